"""Fields of the Responses API that Penstock does not support, and their accepted values."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.router.errors import invalid

PERMITTED_VALUES: Mapping[str, Sequence[Any]] = {
    "access_programs": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
}
"""Unsupported fields of OpenAI, with the accepted values besides null.

These values mean the same as no value.
"""

REASONING_VALUES: Mapping[str, Sequence[Any]] = {
    "context": ("auto",),
    "generate_summary": (),
    "mode": ("standard",),
    "summary": (),
}
"""Unsupported members of `reasoning`, with their accepted values (see `PERMITTED_VALUES`)."""

TEXT_VALUES: Mapping[str, Sequence[Any]] = {"verbosity": ("medium",)}
"""Unsupported members of `text`, with their accepted values (see `PERMITTED_VALUES`)."""

STREAM_VALUES: Mapping[str, Sequence[Any]] = {"include_obfuscation": (False,)}
"""Unsupported members of `stream_options`, with their accepted values (see `PERMITTED_VALUES`)."""

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that adds log probabilities."""

INCLUDABLE = (
    LOGPROBS,
    # The following values have no effect, because answers never contain the items that they name.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The accepted values of `include`."""

SERVICE_TIERS = ("auto", "default")
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


def check_extra(
    fields: Mapping[str, Any], permitted: Mapping[str, Sequence[Any]], parent: str = ""
) -> None:
    """Refuse unknown members of an object, unless they are null or have a permitted value.

    Args:
        fields: the members.
        permitted: accepted values by member; other members must be null.
        parent: name of the body's field that is the object, or empty for the body itself.
    """
    for name, value in fields.items():
        if value is None or any(value == one for one in permitted.get(name, ())):
            continue
        path = f"{parent}.{name}" if parent else name
        allowed = ", ".join(repr(one) for one in permitted.get(name, ()))
        remedy = f"leave it out, or set it to {allowed}" if allowed else "leave it out"
        raise invalid(f"{path[:80]} is not supported: {remedy}", (parent or name)[:80])


def check_include(include: Sequence[str]) -> None:
    """Refuse values of `include` that answers cannot contain."""
    for name in include:
        if name == "reasoning.encrypted_content":
            raise invalid(
                f"include: {name} is not supported, and not needed, because reasoning items "
                "contain the text of the reasoning: leave it out",
                "include",
            )
        if name not in INCLUDABLE:
            raise invalid(
                f"include: unknown value {name[:80]!r}: expected one of {', '.join(INCLUDABLE)}",
                "include",
            )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata beyond OpenAI's limits."""
    if len(metadata) > MAX_METADATA:
        raise invalid(
            f"metadata has {len(metadata)} pairs; at most {MAX_METADATA} are allowed", "metadata"
        )
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise invalid(
                f"metadata.{name[:MAX_METADATA_KEY]}: a key may have at most {MAX_METADATA_KEY} "
                f"characters, and a value at most {MAX_METADATA_VALUE}; this key has {len(name)}, "
                f"and its value has {len(value)}",
                "metadata",
            )


def check_service_tier(tier: str | None) -> None:
    """Refuse OpenAI's service tiers other than `SERVICE_TIERS`."""
    if tier is not None and tier not in SERVICE_TIERS:
        raise invalid(
            f"service_tier {tier[:40]!r} is not supported: expected {' or '.join(SERVICE_TIERS)}",
            "service_tier",
        )
