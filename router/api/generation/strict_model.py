"""The base of all models of request bodies."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from penstock.router.requests.cost_limits import CallSizes

Ids: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
FreeObjects: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""Lists whose validation stops at the first error: a large body could have a million errors."""


class StrictModel(BaseModel):
    """A pydantic model without conversions: it refuses strings for numbers, NaN and infinities."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    # Fields whose content a helper process returns separately. The value of each key is the empty
    # value that the field gets instead.
    CONTENT: ClassVar[Mapping[str, Any]] = {}
    # The client's name of each field that the checks know under another name.
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def sizes(cls, body: Mapping[str, Any]) -> CallSizes:
        """Return the sizes of the lists of a body that was not validated yet."""
        return CallSizes()

    def check_extra(self) -> None:
        """Refuse unknown fields, except those that the API ignores."""

    def check(self) -> None:
        """Refuse combinations of fields that are invalid."""


def length_of(value: object) -> int:
    """Return the length of a list or a mapping; 0 for other values."""
    return len(value) if isinstance(value, list | dict) else 0
