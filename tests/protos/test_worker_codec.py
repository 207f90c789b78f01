"""Codec of the router-worker stream: records survive encoding and decoding; any message decodes."""

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import (
    EARLY_STOPPING,
    MAX_LENGTH_PENALTY,
    RANGES,
    InvalidParameterError,
    SamplingLimits,
    SamplingParams,
)
from penstock.common.structured_outputs import KINDS, StructuredOutputs
from penstock.common.thinking_budget import MAX_BUDGET, NAME, ThinkingBudget
from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import (
    TOKEN_BYTES,
    TOKENS_PER_PIECE,
    decode_sampling_params,
    decode_worker_load,
    encode_sampling_params,
    encode_worker_load,
    encoded_lists,
    pack_tokens,
    packed_pieces,
    unpack_tokens,
)

LIMITS = SamplingLimits()
VOCAB_SIZE = 100
MESSAGE_PARAMS = {
    *(*RANGES, "top_k", "n", "best_of", "logprobs", "stop_token_ids", "logit_bias"),
    *("bad_words", "allowed_token_ids", "max_tokens", "min_tokens", "length_penalty"),
    *("early_stopping", "structured_outputs", "ignore_eos", "use_beam_search", NAME),
}
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple)
COUNTS = st.none() | st.integers(0, 20)


def float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


COMMON = {
    "n": st.integers(1, 4),
    "best_of": st.none() | st.integers(4, 64),
    "presence_penalty": st.floats(*RANGES["presence_penalty"]).map(float32),
    "frequency_penalty": st.floats(*RANGES["frequency_penalty"]).map(float32),
    "repetition_penalty": st.floats(*RANGES["repetition_penalty"]).map(float32),
    "logit_bias": st.dictionaries(
        st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100).map(float32), max_size=3
    ),
    "bad_words_token_ids": st.lists(TOKENS.filter(len), max_size=3).map(tuple),
    "allowed_token_ids": st.none() | TOKENS.filter(len),
    "max_tokens": st.none() | st.integers(50, 90),
    "min_tokens": st.integers(0, 50),
    "stop_token_ids": TOKENS,
    "ignore_eos": st.booleans(),
    "logprobs": COUNTS,
    "prompt_logprobs": COUNTS,
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "thinking_budget": st.none()
    | st.builds(ThinkingBudget, st.integers(0, MAX_BUDGET), st.integers(0, VOCAB_SIZE - 1), TOKENS),
}
SAMPLED = st.builds(
    SamplingParams,
    **COMMON,
    temperature=st.floats(*RANGES["temperature"]).map(float32),
    top_p=st.floats(*RANGES["top_p"]).map(float32),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(*RANGES["min_p"]).map(float32),
    typical_p=st.floats(*RANGES["typical_p"]).map(float32),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
)
FORMS = st.builds(
    StructuredOutputs,
    st.sampled_from(sorted({*KINDS} - {"json_object"})),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
CONSTRAINED = st.builds(
    replace,
    SAMPLED,
    ignore_eos=st.just(False),
    structured_outputs=FORMS | st.just(StructuredOutputs("json_object")),
)
BEAM_SEARCHES = st.builds(
    SamplingParams,
    **{**COMMON, "n": st.integers(2, 4)},
    use_beam_search=st.just(True),
    length_penalty=st.floats(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    early_stopping=st.sampled_from(EARLY_STOPPING),
)


def refusal(params: SamplingParams) -> InvalidParameterError | None:
    try:
        params.validate(LIMITS, VOCAB_SIZE)
    except InvalidParameterError as error:
        return error
    return None


def leaves_a_token(params: SamplingParams) -> bool:
    """Return whether `params` is valid: some allowed token must not be banned."""
    error = refusal(params)
    assert error is None or "remove a word" in str(error)
    return error is None


@given((SAMPLED | CONSTRAINED | BEAM_SEARCHES).filter(leaves_a_token))
def test_worker_decodes_what_the_router_resolved(params: SamplingParams) -> None:
    sent = params.resolve(10, 100, LIMITS, seed=3).for_worker()
    message = pb.SamplingParams()
    encode_sampling_params(sent, message)
    received = decode_sampling_params(pb.SamplingParams.FromString(message.SerializeToString()))
    assert received == replace(
        sent, stop=(), include_stop_str_in_output=False, skip_special_tokens=True
    )
    received.validate(LIMITS, VOCAB_SIZE)


def test_lists_can_be_encoded_once_for_several_messages() -> None:
    params = SamplingParams(
        allowed_token_ids=tuple(range(40_000)),
        stop_token_ids=(7, 8),
        logit_bias={3: 1.5, 4: -2.0},
        bad_words_token_ids=((5, 6), (9,)),
        max_tokens=3,
    )
    pieces = list(encoded_lists(params))
    assert len(pieces) == 4  # the allowed tokens are encoded in pieces of 16,384
    message = pb.SamplingParams()
    encode_sampling_params(replace(params, encoded_lists=b"".join(pieces)), message)
    assert replace(decode_sampling_params(message), seed=None) == params


NUMBERS, FLOATS = st.integers(0, 2**32 - 1) | st.integers(0, 3), st.floats(width=32)
MESSAGES = st.builds(
    pb.SamplingParams,
    **{name: FLOATS for name in RANGES},
    top_k=NUMBERS,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=NUMBERS,
    min_tokens=NUMBERS,
    stop_tokens=st.lists(NUMBERS, max_size=3),
    logprobs=st.none() | NUMBERS,
    n=NUMBERS,
    logit_bias=st.dictionaries(NUMBERS, FLOATS, max_size=3),
    bad_words=st.lists(st.builds(pb.BadWord, tokens=st.lists(NUMBERS, max_size=3)), max_size=3),
    allowed_tokens=st.lists(NUMBERS, max_size=3),
    beams=st.none()
    | st.builds(
        pb.BeamSearch,
        width=NUMBERS,
        length_penalty=st.floats(),
        early_stopping=st.integers(0, 9),
    ),
    structured_outputs=st.none()
    | st.builds(
        pb.StructuredOutputs, kind=st.sampled_from(("", "json", "x")), text=st.text(max_size=3)
    ),
    thinking_budget=st.none()
    | st.builds(
        pb.ThinkingBudget, num_tokens=NUMBERS, end=NUMBERS, start=st.lists(NUMBERS, max_size=20)
    ),
)


@given(MESSAGES)
def test_any_message_is_decoded_and_then_accepted_or_refused_by_name(
    message: pb.SamplingParams,
) -> None:
    params = decode_sampling_params(message)
    error = refusal(params)
    if error is not None:
        assert error.param in MESSAGE_PARAMS
        return
    assert params.num_sequences <= LIMITS.max_choices
    assert all(math.isfinite(getattr(params, name)) for name in RANGES)
    assert params.max_tokens is not None
    assert params.max_tokens >= 1


def test_absent_fields_mean_no_token_filter() -> None:
    params = decode_sampling_params(pb.SamplingParams())
    assert (params.n, params.typical_p, params.allowed_token_ids) == (1, 1.0, None)
    assert (params.logprobs, params.prompt_logprobs, params.use_beam_search) == (None, None, False)


def test_an_unknown_early_stopping_is_refused() -> None:
    beams = pb.BeamSearch(width=2, length_penalty=1.0, early_stopping=7)  # type: ignore[arg-type]
    message = pb.SamplingParams(
        top_p=1.0, repetition_penalty=1.0, n=2, max_tokens=5, temperature=1.0, beams=beams
    )
    error = refusal(decode_sampling_params(message))
    assert error is not None
    assert error.param == "early_stopping"


COUNTS32, COUNTS64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e9)
LOADS = st.builds(
    WorkerLoad,
    **{name: COUNTS32 for name in ("queued", "running", "free_blocks", "cached_blocks")},
    **{name: COUNTS32 for name in ("leased_blocks", "reserved_blocks", "used_blocks")},
    **{name: COUNTS32 for name in ("receiving", "awaiting_grammar")},
    **{name: COUNTS64 for name in ("queued_tokens", "unwritten_slots", "num_steps", "preemptions")},
    **{name: COUNTS64 for name in ("prompt_tokens_computed", "prompt_tokens_cached")},
    **{name: COUNTS64 for name in ("bytes_received", "bytes_sent", "step_tokens")},
    **{name: SECONDS for name in ("step_seconds", "prompt_seconds", "expert_imbalance")},
    **{
        name: st.lists(COUNTS64, max_size=4).map(tuple)
        for name in ("step_counts", "step_token_counts")
    },
    last_step_seconds=COUNTS32.map(lambda micros: micros / 1e6),
)


@given(LOADS)
def test_router_decodes_the_load_that_a_worker_sent(load: WorkerLoad) -> None:
    data = encode_worker_load(load).SerializeToString()
    received = decode_worker_load(pb.Load.FromString(data))
    assert received.last_step_seconds == pytest.approx(load.last_step_seconds, abs=1.5e-6)
    assert received._replace(last_step_seconds=load.last_step_seconds) == load


def test_step_time_beyond_the_range_of_its_field_is_clamped() -> None:
    sent = encode_worker_load(WorkerLoad(last_step_seconds=1e5))
    assert decode_worker_load(sent).last_step_seconds == pytest.approx(2**32 / 1e6)


@given(st.lists(COUNTS32, max_size=50))
def test_packed_tokens_are_little_endian_words(tokens: list[int]) -> None:
    data = pack_tokens(tokens)
    assert data == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(data) == tokens
    assert pack_tokens(tuple(tokens)) == data


@pytest.mark.parametrize("length", [0, 1, TOKENS_PER_PIECE, 2 * TOKENS_PER_PIECE + 1])
def test_pieces_of_packed_tokens_are_short_and_equal_the_whole(length: int) -> None:
    tokens = list(range(length))
    pieces = list(packed_pieces(tokens))
    assert b"".join(pieces) == pack_tokens(tokens)
    assert all(0 < len(piece) <= TOKEN_BYTES * TOKENS_PER_PIECE for piece in pieces)


def test_bytes_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"12345")
