"""Reads `config.json`: every value is validated, and every error names the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from penstock.common.checkpoint_errors import BadCheckpoint as BadCheckpoint
from penstock.common.checkpoint_errors import UnsupportedModel as UnsupportedModel

Config: TypeAlias = Mapping[str, Any]

MAX_JSON_BYTES = 64 << 20
MAX_SIZE = 1 << 24  # largest valid value of a size, for example of a dimension


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise `BadCheckpoint` if it is invalid or too large."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadCheckpoint(
                f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, the limit of a JSON file"
            )
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(
            f"{path} cannot be parsed as JSON ({error}): download it again"
        ) from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} contains no JSON object: download it again")
    return value


def is_file_name(name: object) -> bool:
    """Return True if `name` is a plain file name, which cannot refer to another folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


class Fields:
    """A configuration whose values are validated when they are read."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values: Config = values
        self.path = path

    def bad(self, key: str, wanted: str) -> BadCheckpoint:
        if key not in self.values:
            return BadCheckpoint(f"{self.path} has no {key}: expected {wanted}")
        value = self.values[key]
        found = "null" if value is None else f"{value!r:.80}"
        return BadCheckpoint(f"{self.path}: {key} is {found}: expected {wanted}")

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}")

    def size(self, key: str, default: int | None = None) -> int:
        """Return the positive integer at `key`, or `default` if the value is null or absent."""
        return self._whole_number(key, default, 1)

    def count(self, key: str) -> int:
        """Return the integer at `key`, 0 or more; return 0 if the value is null or absent."""
        return 0 if self.values.get(key) in (None, 0) else self._whole_number(key, None, 0)

    def at_least(self, key: str, least: int) -> int:
        """Return the integer at `key`, `least` or more."""
        return self._whole_number(key, None, least)

    def _whole_number(self, key: str, default: int | None, least: int) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise self.bad(key, f"a whole number from {least} to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.bad(key, "a positive, finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value
