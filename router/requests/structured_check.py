"""Checks constraints on answers in helper processes, where their time and memory are limited."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import NAME, StructuredOutputs
from penstock.router.errors import invalid, renamed
from penstock.router.requests.request import GenerationRequest

KIND = NAME
"""Name of the job that checks a constraint."""

MAX_KNOWN = 256
"""Maximum number of constraints that are remembered as valid."""


def check_form(wanted: StructuredOutputs, field: str) -> None:
    """Refuse a constraint whose text is empty or too long; the text itself is not checked.

    Args:
        wanted: the constraint.
        field: request field that sets the constraint.
    """
    try:
        wanted.validate()
    except InvalidParameterError as error:
        raise renamed(invalid(str(error), error.param), {NAME: field}) from error


class Helpers(Protocol):
    """Interface to the helper processes, which `HelperPool` implements."""

    async def run(
        self, kind: str, items: Sequence[bytes], tenant: str, name: str, param: str | None = None
    ) -> list[bytes]: ...


class StructuredOutputsChecker:
    """Refuses constraints that are invalid or not supported, and remembers the valid ones.

    Args:
        helpers: the helper processes that check the constraints.
    """

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()

    async def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Check the constraints of a call's requests.

        Raises:
            ServingError: INVALID if a constraint is invalid, not supported, or exceeds the limits;
                also the errors of `HelperPool.run`.
        """
        for request in requests:
            wanted = request.sampling.structured_outputs
            if wanted is not None and wanted not in self._known:
                await self._check(wanted, request.tenant)
            if wanted is not None:
                self._known[wanted] = None
                self._known.move_to_end(wanted)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _check(self, wanted: StructuredOutputs, tenant: str) -> None:
        check_form(wanted, NAME)
        items = [json.dumps([wanted.kind, wanted.text]).encode()]
        await self._helpers.run(KIND, items, tenant, NAME, NAME)
