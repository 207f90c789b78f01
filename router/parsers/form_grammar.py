"""The grammar of an answer with free reasoning, whose content has the form that a request sets.

The grammar is written in llguidance's variant of Lark's syntax. `FORM` stands for the form of the
content, which is a grammar of its own (see `penstock.common.structured_outputs.after_reasoning`).
"""

import json
from collections.abc import Callable
from typing import TypeAlias

from penstock.router.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, ROLE, START
from penstock.router.parsers.think import Tags

FORM = "@form"
TEXT = "TEXT: /(.|\\n)*/"
SPACE = "SPACE: /[ \\t\\r\\n]{0,8}/"

SpecialId: TypeAlias = Callable[[str], int | None]
"""Returns the id of the special token with a given text, or None if there is no such token."""


def tagged_form_grammar(tags: Tags, is_open: bool, special_id: SpecialId) -> str:
    """Return the grammar of answers whose reasoning is between tags.

    Reasoning contains no special tokens except its start tag. The model's end tokens are therefore
    excluded until the content is complete.

    Args:
        tags: the tags.
        is_open: whether the answer begins with reasoning, without the start tag. If not, the answer
            may begin with the start tag or with the content.
        special_id: see `SpecialId`.
    """
    start, end = special_id(tags.start), special_id(tags.end)
    nested = "" if start is None else f"( TEXT <[{start}]> )* "
    if end is None:
        rules = [
            f"last_text[lazy]: TEXT {json.dumps(tags.end)}",
            f"reasoning: {nested}last_text SPACE",
        ]
    else:
        rules = [f"reasoning: {nested}TEXT <[{end}]> SPACE"]
    begun = f"{_start_tag(tags, special_id)} reasoning {FORM} | {FORM}"
    rules.append(f"start: reasoning {FORM}" if is_open else f"start: {begun}")
    return "\n".join(("%llguidance {}", TEXT, SPACE, *rules)) + "\n"


def harmony_form_grammar(special_id: SpecialId) -> str:
    """Return the grammar of answers in the harmony format (see `harmony`), or an empty text.

    The answer consists of messages in the channel `analysis`, and of one message in the channel
    `final`. The grammar is empty if a marker of the format is not a special token.
    """
    ids = [special_id(marker) for marker in (START, CHANNEL, MESSAGE, END, CONSTRAIN)]
    if None in ids:
        return ""
    start, channel, message, end, constrain = (f"<[{each}]>" for each in ids)
    rules = (
        f'reasoning: {channel} "analysis" {message} TEXT {end} {start} "{ROLE}"',
        f'final: {channel} "final" ( " "? {constrain} /[a-z]{{1,16}}/ )? {message}',
        f"start: reasoning* final {FORM}",
    )
    return "\n".join(("%llguidance {}", TEXT, *rules)) + "\n"


def _start_tag(tags: Tags, special_id: SpecialId) -> str:
    """Return the start tag as special token, as special token with text, or as text."""
    for token in (tags.start, tags.start_token):
        found = special_id(token) if token else None
        if found is not None:
            rest = tags.start.removeprefix(token)
            return f"<[{found}]> {json.dumps(rest)}" if rest else f"<[{found}]>"
    return json.dumps(tags.start)
