"""Converts records of `penstock.common` to messages of worker.proto and back.

Routers and workers both use this module. Decoding does not validate the values, so the receiver of
a message must validate them.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.thinking_budget import ThinkingBudget
from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb

PROTOCOL = 4
"""Version of worker.proto. Routers and workers refuse a peer with another version."""

TOKEN_BYTES = 4
"""Size of a token id in `Submit.prompt` and `ChoiceLog.tokens`."""

TOKENS_PER_PIECE = 16 << 10
"""Number of token ids that are encoded without a pause."""

EARLY_STOPPING: dict[bool | str, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_FALSE,
    True: pb.EARLY_STOPPING_TRUE,
    "never": pb.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_VALUES = {number: value for value, number in EARLY_STOPPING.items()}


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, as in `Submit.prompt` and `ChoiceLog.tokens`.

    Raises:
        OverflowError: if a token id is negative or needs more than 32 bits.
    """
    return _as_little_endian(array("I", tokens)).tobytes()


def packed_pieces(tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the pieces of `pack_tokens(tokens)`; each piece takes less than 1 ms."""
    for start in range(0, len(tokens), TOKENS_PER_PIECE):
        yield pack_tokens(tokens[start : start + TOKENS_PER_PIECE])


def unpack_tokens(data: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` has packed.

    Raises:
        ValueError: if the number of bytes is not a multiple of TOKEN_BYTES.
    """
    words = array("I")
    words.frombytes(data)
    return _as_little_endian(words).tolist()


def num_prompt_tokens(submit: pb.Submit) -> int:
    """Return the number of prompt tokens of a Submit message."""
    return len(submit.prompt) // TOKEN_BYTES


def _as_little_endian(words: "array[int]") -> "array[int]":
    """Swap the bytes of each word on a big-endian machine."""
    if sys.byteorder == "big":
        words.byteswap()
    return words


def encoded_lists(params: SamplingParams) -> Iterator[bytes]:
    """Yield the pieces of `SamplingParams.encoded_lists`; each piece takes less than 1 ms.

    The concatenation of the pieces is a serialized `SamplingParams` message with only the lists.
    """
    yield pb.SamplingParams(
        stop_tokens=params.stop_token_ids,
        logit_bias=params.logit_bias,
        bad_words=[pb.BadWord(tokens=word) for word in params.bad_words_token_ids],
    ).SerializeToString()
    allowed = params.allowed_token_ids or ()
    for start in range(0, len(allowed), TOKENS_PER_PIECE):
        piece = allowed[start : start + TOKENS_PER_PIECE]
        yield pb.SamplingParams(allowed_tokens=piece).SerializeToString()


def encode_sampling_params(params: SamplingParams, message: pb.SamplingParams) -> None:
    """Encode sampling parameters, which `SamplingParams.for_worker` has returned.

    `message` is an empty message, which gets the values.
    """
    message.MergeFrom(_encoded_values(params))
    lists = params.encoded_lists
    message.MergeFromString(b"".join(encoded_lists(params)) if lists is None else lists)


def _encoded_values(params: SamplingParams) -> pb.SamplingParams:
    """Return a message with all parameters except the lists."""
    beams = None
    if params.use_beam_search:
        beams = pb.BeamSearch(
            width=params.num_sequences,
            length_penalty=params.length_penalty,
            early_stopping=EARLY_STOPPING[params.early_stopping],
        )
    wanted, budget = params.structured_outputs, params.thinking_budget
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed or 0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        n=params.n,
        typical_p=params.typical_p,
        prompt_logprobs=params.prompt_logprobs,
        beams=beams,
        structured_outputs=(
            None if wanted is None else pb.StructuredOutputs(kind=wanted.kind, text=wanted.text)
        ),
        thinking_budget=(
            None
            if budget is None
            else pb.ThinkingBudget(num_tokens=budget.num_tokens, end=budget.end, start=budget.start)
        ),
    )


def decode_sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Decode a `SamplingParams` message without validation.

    If `n` is absent, it becomes 1. If `typical_p` is absent, it becomes 1.0, which keeps all
    tokens. Floats have float32 precision. An unknown `early_stopping` becomes a string, which
    validation refuses.
    """
    search: dict[str, Any] = {"seed": message.seed}
    wanted = budget = None
    if message.HasField("structured_outputs"):
        form = message.structured_outputs
        wanted = StructuredOutputs(form.kind, form.text)
    if message.HasField("thinking_budget"):
        limit = message.thinking_budget
        budget = ThinkingBudget(limit.num_tokens, limit.end, tuple(limit.start))
    if message.HasField("beams"):
        beams = message.beams
        search = {
            "use_beam_search": True,
            "best_of": beams.width,
            "length_penalty": beams.length_penalty,
            "early_stopping": _EARLY_STOPPING_VALUES.get(
                beams.early_stopping, str(beams.early_stopping)
            ),
        }
    return SamplingParams(
        n=message.n or 1,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        typical_p=message.typical_p or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        bad_words_token_ids=tuple(tuple(word.tokens) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_tokens) or None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_tokens),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structured_outputs=wanted,
        thinking_budget=budget,
        **search,
    )


UINT32_MAX = (1 << 32) - 1


def encode_worker_load(load: WorkerLoad) -> pb.Load:
    """Encode a `WorkerLoad` as a message.

    The duration of the last step is rounded down to microseconds.
    """
    return pb.Load(
        queued=load.queued,
        queued_tokens=load.queued_tokens,
        running=load.running,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        leased_blocks=load.leased_blocks,
        step_micros=min(int(load.last_step_seconds * 1e6), UINT32_MAX),
        steps=load.num_steps,
        prompt_tokens_computed=load.prompt_tokens_computed,
        prompt_tokens_cached=load.prompt_tokens_cached,
        bytes_received=load.bytes_received,
        bytes_sent=load.bytes_sent,
        preemptions=load.preemptions,
        reserved_blocks=load.reserved_blocks,
        used_blocks=load.used_blocks,
        unwritten_slots=load.unwritten_slots,
        step_counts=load.step_counts,
        step_seconds=load.step_seconds,
        prompt_seconds=load.prompt_seconds,
        expert_imbalance=load.expert_imbalance,
        step_token_counts=load.step_token_counts,
        step_tokens=load.step_tokens,
        receiving=load.receiving,
        awaiting_grammar=load.awaiting_grammar,
    )


def decode_worker_load(message: pb.Load) -> WorkerLoad:
    """Decode a `Load` message into a `WorkerLoad`."""
    # The arguments are positional, because keyword arguments would take 1.5 times as long.
    return WorkerLoad(
        message.queued,
        message.queued_tokens,
        message.running,
        message.free_blocks,
        message.cached_blocks,
        message.leased_blocks,
        message.reserved_blocks,
        message.used_blocks,
        message.unwritten_slots,
        message.step_micros / 1e6,
        message.steps,
        tuple(message.step_counts[:]),  # the slice halves the time of the conversion
        message.step_seconds,
        message.prompt_seconds,
        message.prompt_tokens_computed,
        message.prompt_tokens_cached,
        message.preemptions,
        message.bytes_received,
        message.bytes_sent,
        message.expert_imbalance,
        tuple(message.step_token_counts[:]),
        message.step_tokens,
        message.receiving,
        message.awaiting_grammar,
    )
