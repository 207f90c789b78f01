"""Conversion between messages of the gRPC API and the router's requests and deltas."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs, choice
from penstock.protos import inference_pb2 as pb
from penstock.protos import worker_pb2
from penstock.router.api.grpc_chat import chat_sizes
from penstock.router.errors import invalid
from penstock.router.requests.cost_limits import CallSizes
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.request import (
    GenerationRequest,
    ResumeState,
    check_timeout,
    safe_request_id,
)
from penstock.router.requests.response_stream import Delta
from penstock.router.requests.slices import Slices

PROMPT_TOKENS_PER_REPLY = 128
TOKENS_PER_SLICE = 16 << 10
"""Number of token ids that are read from a message or serialized without a pause."""

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "n",
    "best_of",
    "prompt_logprobs",
    "use_beam_search",
    "length_penalty",
)

EARLY_STOPPING: Mapping[int, bool | str] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}


async def sampling_params(
    request: pb.GenerateRequest, defaults: GenerationDefaults
) -> SamplingParams:
    """Return the sampling parameters of a request, without its bad words.

    Absent fields get the `defaults`.
    """
    wire = request.sampling
    allowed = await token_ids(wire.allowed_tokens)
    given: dict[str, Any] = {
        name: getattr(wire, name) for name in SAMPLING_FIELDS if wire.HasField(name)
    }
    given |= {
        "early_stopping": EARLY_STOPPING.get(wire.early_stopping, "unknown"),
        "stop_token_ids": tuple(wire.stop_tokens),
        "logit_bias": dict(wire.logit_bias),
        "allowed_token_ids": tuple(allowed) or None,
        "stop": tuple(request.stop),
        "include_stop_str_in_output": request.include_stop,
        "skip_special_tokens": not request.keep_special_tokens,
        "structured_outputs": structured_outputs(wire),
    }
    return defaults.sampling_params(given)


async def token_ids(field: Sequence[int]) -> list[int]:
    """Return the token ids in a field of a message.

    They are read in slices, because reading 131,000 token ids takes 4 ms.
    """
    slices = Slices()
    found: list[int] = []
    for start in range(0, len(field), TOKENS_PER_SLICE):
        # The slice of a field is a list, which is read in half the time of the field.
        found += field[start : start + TOKENS_PER_SLICE]
        await slices.pause()
    return found


def structured_outputs(wire: pb.Sampling) -> StructuredOutputs | None:
    """Return the form that a request's answers must have, or None if any form is allowed."""
    match wire.WhichOneof("structured_outputs"):
        case None:
            return None
        case "json_object":
            return StructuredOutputs("json_object") if wire.json_object else None
        case "json_schema":
            return StructuredOutputs("json", wire.json_schema)
        case "choice":
            return choice(wire.choice.texts)
        case kind:
            return StructuredOutputs(kind, getattr(wire, kind))


def call_sizes(request: pb.GenerateRequest) -> CallSizes:
    """Return the numbers of entries in the lists of a request."""
    wire = request.sampling
    return CallSizes(
        **chat_sizes(request.chat),
        logit_bias=len(wire.logit_bias),
        stop=len(request.stop),
        stop_token_ids=len(wire.stop_tokens),
        bad_words=len(wire.bad_words),
        resumed_choices=len(request.resume_from),
    )


def to_generation_request(
    request: pb.GenerateRequest,
    prompt: Sequence[int],
    sampling: SamplingParams,
    default_max_tokens: int | None,
    time_left: float | None,
    tenant: str,
    resume_from: Mapping[int, ResumeState],
) -> GenerationRequest:
    """Decode a `GenerateRequest` whose resumed answers are already decoded.

    `time_left` is the time to the call's deadline in seconds.
    """
    bounds = [] if time_left is None else [max(time_left, 0.001)]
    if request.timeout_seconds:
        check_timeout(request.timeout_seconds)
        bounds.append(request.timeout_seconds)
    return GenerationRequest(
        prompt,
        sampling,
        default_max_tokens=default_max_tokens,
        timeout=min(bounds) if bounds else None,
        tenant=tenant,
        priority=request.priority,
        request_id=safe_request_id(request.request_id) or f"gen-{time.time_ns():x}",
        resume_from=resume_from,
        cache_salt=request.cache_salt,
        prompt_copies=int(
            request.echo_prompt_tokens or request.sampling.HasField("prompt_logprobs")
        ),
    )


async def resume_states(entries: Sequence[pb.ResumeState]) -> dict[int, ResumeState]:
    """Decode the resumed answers of a request, by choice; refuse two answers of one choice."""
    slices = Slices()
    known = dict[int, ResumeState]()
    for each in entries:
        if each.choice in known:
            raise invalid(
                f"resume_from has more than one entry for choice {each.choice}: send at most one "
                "entry for each choice",
                "resume_from",
            )
        known[each.choice] = ResumeState(await token_ids(each.tokens), each.finish_reason)
        await slices.pause()
    return known


def to_reply(delta: Delta) -> pb.GenerateReply:
    """Encode a delta as a message."""
    reply = pb.GenerateReply(
        choice=delta.choice,
        position=delta.position,
        tokens=delta.tokens,
        text=delta.text,
        finish_reason=delta.finish,
        stop_reason=delta.stop if isinstance(delta.stop, str) else "",
    )
    reply.logprobs.extend(_logprob(entry) for entry in delta.logprobs if entry is not None)
    return reply


def prompt_replies(entries: Sequence[worker_pb2.TokenLogprobs]) -> Iterator[pb.GenerateReply]:
    """Yield the prompt's logprobs in several replies, each of which takes a few ms to encode."""
    for start in range(0, len(entries), PROMPT_TOKENS_PER_REPLY):
        chunk = entries[start : start + PROMPT_TOKENS_PER_REPLY]
        yield pb.GenerateReply(prompt_logprobs=map(_logprob, chunk))


def text_reply(texts: Sequence[bytes]) -> bytes:
    """Return a serialized `DetokenizeReply` with the concatenation of texts in UTF-8.

    This takes half the time of making a message, which copies a text of 4 MiB twice more.
    """
    size = sum(map(len, texts))
    head = bytearray([pb.DetokenizeReply.TEXT_FIELD_NUMBER << 3 | 2])
    while size >= 1 << 7:  # the size as a varint, in groups of 7 bits
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return b"".join((head, *texts))


def _logprob(entry: worker_pb2.TokenLogprobs) -> pb.TokenLogprob:
    pairs = zip(entry.tokens, entry.values, strict=True)
    top = [pb.Alternative(token=token, logprob=value) for token, value in pairs]
    return pb.TokenLogprob(chosen=entry.chosen, top=top, rank=entry.rank)
