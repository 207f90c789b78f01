"""Reads cluster files: YAML, with errors that do not show the content."""

import re
from pathlib import Path
from typing import Any

import yaml

from penstock.cluster.spec.records import SpecError, one_line

QUOTED = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")
"""Pattern of a quoted part of a PyYAML error, with the space before it."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise `SpecError` if the file has no valid mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {one_line(error)}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: is not YAML: {_yaml_mistake(error)}") from None
    except Exception:  # PyYAML's constructors raise errors of many types, which quote the value
        raise SpecError(
            f"{path}: is not YAML: a value does not fit its type (such as a date without a day)"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(
            f"{path}: expected a mapping that begins like `models: {{NAME: {{path: FOLDER}}}}`"
        )
    return content


def _yaml_mistake(error: yaml.YAMLError) -> str:
    """Return a YAML error with its position, without the text of the file: it may have API keys.

    PyYAML quotes the names of aliases, anchors and tags, and reads `*sk-...` as an alias.
    """
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error)
    mark, problem = error.problem_mark, error.problem or "it cannot be read"
    for quoted in QUOTED.finditer(problem):
        text = quoted[1] or quoted[2] or ""
        if len(text) > 1 and not re.fullmatch("<[a-z ]+>", text):  # keep names of YAML tokens
            problem = problem[: quoted.start()].rstrip(":")
            break
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
