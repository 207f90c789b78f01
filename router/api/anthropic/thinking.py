"""The fields that control how much a model reasons, as variables of chat templates."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from penstock.common.number_text import number_text
from penstock.common.value_text import value_text
from penstock.router.api.anthropic.blocks import ClosedModel
from penstock.router.errors import invalid

SWITCHES = ("enable_thinking", "thinking")
"""Chat template variables that enable or disable reasoning."""

BUDGET = "thinking_budget"
EFFORT = "reasoning_effort"

MIN_BUDGET = 1024


class Thinking(ClosedModel):
    """The field `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check_fields(self, max_tokens: int | None) -> None:
        """Refuse the combinations of fields that Anthropic's API refuses."""
        budget, field = self.budget_tokens, "thinking"
        if (self.type == "enabled") != (budget is not None):
            rule = "requires" if budget is None else "does not allow"
            action = "set" if budget is None else "leave out"
            raise invalid(
                f"thinking.type {self.type!r} {rule} thinking.budget_tokens: {action} this field",
                field,
            )
        if self.type == "disabled" and self.display is not None:
            raise invalid(
                "thinking.type 'disabled' does not allow thinking.display: leave it out",
                field,
            )
        if budget is not None and budget < MIN_BUDGET:
            raise invalid(
                f"thinking.budget_tokens is {number_text(budget)}: it must be at least "
                f"{MIN_BUDGET}",
                field,
            )
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            raise invalid(
                f"thinking.budget_tokens is {number_text(budget)}: it must be less than "
                f"max_tokens, which is {number_text(max_tokens)}",
                field,
            )

    def check_model(self, known: Collection[str], reasons: bool) -> None:
        """Refuse a mode that the model does not have.

        Args:
            known: variables that the model's chat template reads.
            reasons: whether answers of the model may contain reasoning.
        """
        if any(name in known for name in SWITCHES):
            return
        if self.type == "enabled" and not reasons:
            raise invalid(
                "thinking.type 'enabled' is not supported, because this model does not reason: "
                "leave out 'thinking'",
                "thinking",
            )
        if self.type == "disabled" and reasons:
            raise invalid(
                "thinking.type 'disabled' is not supported, because this model's chat template "
                "cannot disable reasoning: leave out 'thinking'",
                "thinking",
            )

    def variables(self, known: Collection[str]) -> Mapping[str, Any]:
        """Return the variables for a chat template that reads only the `known` variables."""
        found: dict[str, Any] = {
            name: self.type != "disabled" for name in SWITCHES if name in known
        }
        if self.budget_tokens is not None and BUDGET in known:
            found[BUDGET] = self.budget_tokens
        return found


class OutputConfig(ClosedModel):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None

    def variables(self, known: Collection[str]) -> Mapping[str, Any]:
        """Return the variables for a chat template that reads only the `known` variables."""
        if self.effort is None:
            return {}
        if EFFORT not in known:
            name = "output_config"
            raise invalid(f"{name}.effort is not supported by this model: leave it out", name)
        return {EFFORT: self.effort}

    def answer_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the answer must follow; None for free text."""
        match self.format:
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema), **rest} if not rest:
                return schema
        name = "output_config"
        given = value_text(self.format)
        form = '{"type": "json_schema", "schema": {...}} without other members'
        raise invalid(f"{name}.format must be {form}, not {given}", name)
