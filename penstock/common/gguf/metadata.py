"""Metadata of a GGUF file, whose values are validated when they are read."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from struct import pack, unpack

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.header import GgufArray, Value

MAX_SIZE = 1 << 24  # largest valid value of a size, for example of a dimension


def shortest(value: float) -> float:
    """Return `value`, rounded to 7 digits if this does not change its float32 value."""
    short = float(f"{value:.7g}")
    try:
        return short if unpack("<f", pack("<f", short)) == (value,) else value
    except OverflowError:
        return value


class Metadata:
    """The metadata of a GGUF file, by key.

    The object records which keys were read. Files with keys that nothing has read can then be
    refused (see `refuse_unread`).
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values
        self._read: set[str] = set()

    def get(self, key: str) -> Value | None:
        self._read.add(key)
        return self._values.get(key)

    def bad(self, key: str, wanted: str) -> BadCheckpoint:
        found = self._values.get(key)
        if found is None:
            return BadCheckpoint(f"{self.path} has no {key}: expected {wanted}")
        shown = f"an array of {len(found)} items" if isinstance(found, GgufArray) else repr(found)
        return BadCheckpoint(f"{self.path}: {key} is {shown:.80}: expected {wanted}")

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(key, "a bool")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer from 0 to `MAX_SIZE`."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self.bad(key, f"a whole number from 0 to {MAX_SIZE}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to `MAX_SIZE`."""
        value = self.count(key, default)
        if value == 0:
            raise self.bad(key, "a positive whole number")
        return value

    def uniform_size(self, key: str, default: int | None = None) -> int:
        """Return a size that the file gives as one number or as an array with one number per layer.

        Raises:
            UnsupportedModel: the numbers of the array differ.
        """
        value = self.get(key)
        if not isinstance(value, GgufArray):
            return self.size(key, default)
        found = set(value.numbers())
        if len(found) != 1:
            raise self.unsupported(
                f"{key} has {len(found)} different values: expected one value for all layers"
            )
        (same,) = found
        if type(same) is not int or not 0 < same <= MAX_SIZE:
            raise self.bad(key, f"an array of whole numbers from 1 to {MAX_SIZE}")
        return same

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number.

        Most numbers in files are float32. The result is rounded to 7 digits if this does not change
        its float32 value. The number 0.1 is thus returned as 0.1, as in config.json.
        """
        value = self.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
            raise self.bad(key, "a positive, finite number")
        return shortest(float(value))  # type: ignore[arg-type]

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, GgufArray):
            raise self.bad(key, "an array of strings")
        return value.strings()

    def numbers(self, key: str) -> list[int | float] | None:
        """Return an array of numbers, or None if the file does not have it."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray):
            raise self.bad(key, "an array of numbers")
        return value.numbers()

    def refuse_unread(self, prefix: str, neutral: Iterable[str] = ()) -> None:
        """Raise `UnsupportedModel` for a key below `prefix` that was not read.

        An entry that was not read may change the model's answers.

        Args:
            neutral: Keys that may stay unread, because their entries do not change answers.
        """
        known = self._read.union(neutral)
        for key in self._values:
            if key.startswith(prefix) and key not in known:
                value = self._values[key]
                shown = "an array" if isinstance(value, GgufArray) else f"{value!r:.40}"
                raise self.unsupported(
                    f"{key} ({shown}) is not supported, and ignoring it may change answers"
                )
