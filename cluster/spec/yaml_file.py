"""Reads cluster files in YAML. Error messages do not show the content of the file."""

import re
from pathlib import Path
from typing import Any

import yaml

from penstock.cluster.spec.records import SpecError, one_line

QUOTED = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")
"""Pattern of a quoted part of a PyYAML error, with the space before it."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raise `SpecError` if the file has no valid mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {one_line(error)}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: cannot be parsed as YAML: {_yaml_mistake(error)}") from None
    except RecursionError:
        raise SpecError(
            f"{path}: cannot be parsed as YAML: lists or mappings are nested too deeply"
        ) from None
    except Exception:  # PyYAML raises errors of many types here, and they quote the value
        raise SpecError(
            f"{path}: cannot be parsed as YAML: a value cannot be converted to its type (such as "
            "the date 2026-02-30): correct the value, or put it in quotes"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(
            f"{path}: expected a mapping that begins like `models: {{NAME: {{path: FOLDER}}}}`"
        )
    return content


def _yaml_mistake(error: yaml.YAMLError) -> str:
    """Return the message of a YAML error and its position, without any text of the file.

    The file may contain API keys. PyYAML reads `*sk-...` as an alias, and its messages quote the
    names of aliases, anchors and tags.
    """
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error)
    mark, problem = error.problem_mark, error.problem or "it cannot be read"
    for quoted in QUOTED.finditer(problem):
        text = quoted[1] or quoted[2] or ""
        # Names of YAML tokens, such as `<block end>`, are kept.
        if len(text) > 1 and not re.fullmatch("<[a-z ]+>", text):
            problem = problem[: quoted.start()].rstrip(":")
            break
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
