"""Joins the named chat templates of a model into one template.

A model may have a template with the name `default` and a template with the name `tool_use`. As in
transformers, chats with tools use `tool_use`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT, TOOL_USE = "default", "tool_use"

_LAST_LINE_BREAK = re.compile(r"(\r\n|\r|\n)\Z")


def read_templates(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a checkpoint folder, or None if there is none.

    Args:
        folder: its files chat_template.jinja and additional_chat_templates/tool_use.jinja replace
            the templates of `config`.
        config: the content of tokenizer_config.json.
    """
    named = _named(config.get("chat_template"))
    default = folder / "chat_template.jinja"
    if default.is_file():
        named = {DEFAULT: default.read_text(encoding="utf-8")}
    for_tools = folder / "additional_chat_templates" / f"{TOOL_USE}.jinja"
    if for_tools.is_file():
        named[TOOL_USE] = for_tools.read_text(encoding="utf-8")
    if DEFAULT not in named or TOOL_USE not in named:
        return named.get(DEFAULT)
    return join_templates(named[DEFAULT], named[TOOL_USE])


def _named(source: object) -> dict[str, str]:
    """Return templates by name. `source` is one template, or a list of objects with a name."""
    entries = source if isinstance(source, list) else [{"name": DEFAULT, "template": source}]
    found: dict[str, str] = {}
    for entry in entries:
        template = entry.get("template") if isinstance(entry, dict) else None
        if isinstance(template, str):
            found.setdefault(str(entry.get("name")), template)
    return found


def join_templates(default: str, tool_use: str) -> str:
    """Return a template that renders `tool_use` for chats with tools, and else `default`."""
    # Jinja drops a line break at the end of a template, and the options of `ChatTemplate` drop the
    # line break after a tag. `+` keeps white space before a tag, which an option would drop too.
    default, tool_use = (_LAST_LINE_BREAK.sub("", each) for each in (default, tool_use))
    return f"{{% if tools %}}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"
