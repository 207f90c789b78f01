"""Checks of lists of token ids."""

from array import array
from collections.abc import Collection

import numpy as np

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.number_text import number_text

MANY_TOKENS = 1024
"""Lists of at least this many token ids are checked as arrays, which takes half the time."""


def check_token_ids(name: str, tokens: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidParameterError` for parameter `name` if a token is not in the vocabulary."""
    if not _are_token_ids(tokens, vocab_size):
        wrong = number_text(min(tokens) if min(tokens) < 0 else max(tokens))
        outside = f"outside the vocabulary (0 to {vocab_size - 1})"
        raise InvalidParameterError(
            f"{name} contains the token id {wrong}, which is {outside}", name
        )


def _are_token_ids(tokens: Collection[int], vocab_size: int) -> bool:
    """Return whether all tokens are in the vocabulary."""
    if len(tokens) < MANY_TOKENS:
        return not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)
    try:
        ids = array("I", tokens)
    except OverflowError:
        return False
    return int(np.frombuffer(ids, np.uint32).max()) < vocab_size
