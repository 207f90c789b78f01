"""A thinking budget: the largest number of tokens that a model may use for reasoning."""

from dataclasses import dataclass

from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.number_text import number_text

NAME = "thinking_token_budget"
"""Name of the parameter, as in vLLM."""

MAX_BUDGET = 2**31 - 1

MAX_START_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of the reasoning at the start of an answer, with the tokens that delimit the reasoning.

    Attributes:
        num_tokens: number of tokens of reasoning after which the next token must be `end`.
        end: token that ends the reasoning.
        start: tokens that begin the reasoning and are not counted. Empty if the answer begins
            inside the reasoning.
    """

    num_tokens: int
    end: int
    start: tuple[int, ...] = ()

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidParameterError` if a value of the budget is out of range."""
        if not 0 <= self.num_tokens <= MAX_BUDGET:
            raise InvalidParameterError(
                f"{NAME} must be a whole number from 0 to {MAX_BUDGET}, not "
                f"{number_text(self.num_tokens)}",
                NAME,
            )
        if len(self.start) > MAX_START_TOKENS:
            raise InvalidParameterError(
                f"{NAME}: the text that starts reasoning has {len(self.start)} tokens; at most "
                f"{MAX_START_TOKENS} are allowed",
                NAME,
            )
        if not all(0 <= token < vocab_size for token in (self.end, *self.start)):
            raise InvalidParameterError(
                f"{NAME}: the ids of tokens that start or end reasoning, "
                f"{[*self.start, self.end]}, must be in the vocabulary (0 to {vocab_size - 1})",
                NAME,
            )
