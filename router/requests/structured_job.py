"""The job with which a helper process checks a constraint on answers."""

import json
from collections.abc import Sequence

from penstock.common.grammar.grammar_text import check_structured_outputs
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.errors import invalid


def structured_job(items: Sequence[bytes]) -> list[bytes]:
    """Check a constraint and return an empty list.

    The only item of the job is the JSON list `[kind, text]`.

    Raises:
        ServingError: INVALID if the constraint is invalid, not supported, or exceeds the limits.
    """
    kind, text = json.loads(items[0])
    try:
        check_structured_outputs(StructuredOutputs(kind, text))
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error
    return []
