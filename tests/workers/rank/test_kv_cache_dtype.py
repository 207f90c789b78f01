"""Engines that keep the KV cache in bfloat16, FP8 or INT8 and run the model in float32."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.kv_cache.format import FORMATS
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import BeamResult
from penstock.workers.layers import packing
from penstock.workers.models.spec import read_spec
from penstock.workers.rank.fingerprint import layout_mismatch
from penstock.workers.rank.kv_cache import check_cache_format, choose_cache_format
from penstock.workers.sampling.sampler import TokenLogprobs
from penstock.workers.scheduling.sequence import Key, NewSequence, Sibling
from penstock.workers.service.grpc_service import serve_worker
from tests.support.checkpoints import make_checkpoint
from tests.support.disaggregated_pair import DisaggregatedPair
from tests.support.engines import greedy_sequence, run_greedy, run_out
from tests.support.schedule_player import run_all_schedules
from tests.support.tiny import HEAD_DIM, KV_HEADS, NUM_LAYERS, tiny_checkpoint

PROMPT = [3 + (5 * i) % 160 for i in range(120)]
NUM_TOKENS = 8
NARROW = ("bfloat16", "fp8", "int8")
SCALED = ("fp8", "int8")


def token_bytes(name: str) -> int:
    """Return the bytes of a token's KV in all layers, in the format `name`."""
    return NUM_LAYERS * FORMATS[name].token_bytes((2, KV_HEADS, HEAD_DIM))


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path, **other: Any) -> Engine:
    sizes = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32}
    return Engine(WorkerConfig("w", checkpoint, **{**sizes, **other}))


@pytest.mark.parametrize(
    ("name", "quantization", "dtype", "chosen"),
    [
        ("auto", "none", FP32, FP32),
        ("auto", "none", FP16, FP16),
        ("auto", "int8", FP32, BF16),
        ("float32", "int8", FP32, FP32),
        ("bfloat16", "none", FP32, BF16),
        ("bfloat16", "none", BF16, BF16),
        ("fp8", "none", FP32, FORMATS["fp8"].dtype),
        ("int8", "int8", FP16, torch.int8),
    ],
)
def test_choice_of_the_cache_dtype(
    name: str, quantization: str, dtype: torch.dtype, chosen: torch.dtype
) -> None:
    assert choose_cache_format(name, quantization, dtype, CPU).dtype == chosen


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [("float32", BF16, "cpu"), ("bfloat16", FP16, "cpu"), ("bfloat16", FP32, "cuda")],
)
def test_unavailable_cache_dtype_is_refused(name: str, dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_dtype {name} is not available") as caught:
        choose_cache_format(name, "none", dtype, torch.device(device))
    assert "\n" not in str(caught.value)


def test_auto_on_a_gpu_chooses_the_compute_dtype() -> None:
    assert choose_cache_format("auto", "none", BF16, torch.device("cuda")).dtype == BF16


def test_int8_uses_a_bfloat16_cache_with_twice_the_blocks(checkpoint: Path) -> None:
    wide = make_engine(checkpoint, quantization="int8", kv_cache_dtype="float32")
    narrow = make_engine(checkpoint, quantization="int8")
    assert (wide.cache.data.dtype, narrow.cache.data.dtype) == (FP32, BF16)
    assert narrow.limits.num_blocks // 2 == wide.limits.num_blocks
    assert all(each.cache.data.nbytes <= 1 << 20 for each in (wide, narrow))


@pytest.mark.parametrize("name", SCALED)
def test_codes_hold_twice_the_tokens_of_bfloat16_less_the_scales(
    checkpoint: Path, name: str
) -> None:
    narrow, codes = (make_engine(checkpoint, kv_cache_dtype=each) for each in ("bfloat16", name))
    assert codes.cache.data.nbytes <= 1 << 20
    expected = narrow.limits.num_blocks * 2 * HEAD_DIM / (HEAD_DIM + 2)
    assert expected - 2 < codes.limits.num_blocks < expected + 2


@pytest.mark.parametrize(("family", "text"), [("deepseek-v2", "latent"), ("falcon-rw", "ALiBi")])
@pytest.mark.parametrize("name", SCALED)
def test_codes_that_cannot_hold_the_keys_are_refused(
    tmp_path: Path, family: str, text: str, name: str
) -> None:
    make_checkpoint(tmp_path, family)
    with pytest.raises(ValueError, match=rf"kv_cache_dtype {name} is not .*{text}") as caught:
        make_engine(tmp_path, kv_cache_dtype=name)
    assert "\n" not in str(caught.value)


def test_codes_are_refused_for_heads_of_an_odd_size(checkpoint: Path) -> None:
    odd = replace(read_spec(checkpoint), head_dim=5)
    with pytest.raises(ValueError, match="int8 needs an even number of features per head, not 5"):
        check_cache_format("int8", odd)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_answers_are_equal_alone_and_batched(
    checkpoint: Path, quantization: str, name: str
) -> None:
    given = {"quantization": quantization, "kv_cache_dtype": name}
    engine = make_engine(checkpoint, **given)
    lengths = (1, 15, 16, 17, 31, 33, 60)
    expected = {n: run_greedy(engine, PROMPT[:n], NUM_TOKENS) for n in lengths}
    for small_blocks in (False, True):
        sizes = {"max_model_len": 256, "block_size": 4} if small_blocks else {}
        batched = make_engine(checkpoint, **given, **sizes)
        for n in lengths:
            batched.submit(greedy_sequence(n, PROMPT[:n], NUM_TOKENS, salt=b"batched"))
        assert run_out(batched) == expected
        batched.batcher.check()


@pytest.mark.parametrize(("name", "num_different"), [("bfloat16", 3), ("int8", 5), ("fp8", 8)])
def test_tokens_rarely_differ_from_those_of_a_float32_cache(
    checkpoint: Path, name: str, num_different: int
) -> None:
    """Greedy tokens differ only if two tokens nearly tie, which is frequent with random weights."""
    wide, narrow = (make_engine(checkpoint, kv_cache_dtype=each) for each in ("auto", name))
    answers = [
        (run_greedy(wide, PROMPT[:n], 4), run_greedy(narrow, PROMPT[:n], 4))
        for n in range(3, 60, 4)
    ]
    assert sum(a != b for a, b in answers) <= num_different


@pytest.fixture(
    scope="module",
    params=[("none", "bfloat16"), ("int8", "bfloat16"), ("none", "fp8"), ("int8", "int8")],
    ids="-".join,
)
def exact(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    """An engine in deterministic mode; with INT8, even its small linear layers are quantized."""
    sizes = {"kv_cache_mib": 2, "max_batched_tokens": 64, "block_size": 4, "max_sequences": 11}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_WEIGHTS", 1)
        quantization, name = request.param
        given = {"quantization": quantization, "kv_cache_dtype": name}
        engine = make_engine(checkpoint, deterministic=True, **given, **sizes)
    assert engine.cache.form is FORMATS[name]
    return engine


@pytest.mark.slow
def test_answers_have_equal_bits_under_all_schedules(exact: Engine) -> None:
    expected, *others = run_all_schedules(exact)
    assert all(found == expected for found in others)


def beam_search(key: Key, prompt: list[int], width: int) -> NewSequence:
    params = SamplingParams(n=width, use_beam_search=True, length_penalty=0.0, max_tokens=12)
    siblings = tuple(Sibling(choice, prompt) for choice in range(1, width))
    return NewSequence(key, prompt, len(prompt), params, siblings=siblings)


def run_beam_searches(engine: Engine) -> dict[Key, list[tuple[list[int], float]]]:
    """Run the engine until idle; return each beam search's answers and scores by key."""
    found: list[BeamResult] = []
    while (result := engine.step()).output is not None:
        found += result.beam_results
    engine.batcher.check()
    return {each.key: [(one.tokens, float(one.score)) for one in each.answers] for each in found}


def score_of(engine: Engine, prompt: list[int], answer: list[int]) -> float:
    """Return the sum of `answer`'s logprobs, from the prompt logprobs of `prompt` + `answer`."""
    tokens = [*prompt, *answer]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    engine.submit(NewSequence("shown", tokens, len(tokens), params, salt=b"shown"))
    scores: list[TokenLogprobs | None] = []
    while (result := engine.step()).output is not None:
        for part in result.prompts:
            scores += part.entries
    return sum(entry.chosen for entry in scores[-len(answer) :] if entry is not None)


@pytest.mark.slow
def test_beam_search_is_equal_alone_and_batched_with_preemptions(exact: Engine) -> None:
    prompts = {0: (PROMPT[:9], 4), 1: (PROMPT[:16], 3), 2: (PROMPT[3:36], 5)}
    expected: dict[Key, list[tuple[list[int], float]]] = {}
    for number, (prompt, width) in prompts.items():
        exact.reset_scheduler(exact.limits)
        exact.submit(beam_search(number, prompt, width))
        expected |= run_beam_searches(exact)
    exact.reset_scheduler(replace(exact.limits, num_blocks=30, watermark=0))
    for number, (prompt, width) in prompts.items():
        exact.submit(beam_search(number, prompt, width))
        exact.submit(greedy_sequence(f"greedy {number}", PROMPT[number : number + 11], 30))
    assert run_beam_searches(exact) == expected
    assert exact.load().preemptions > 0
    exact.reset_scheduler(exact.limits)
    for number, (prompt, width) in prompts.items():
        assert len({tuple(tokens) for tokens, _ in expected[number]}) == width
        for tokens, score in expected[number]:
            assert score == pytest.approx(score_of(exact, prompt, tokens), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [("deepseek-v2", "bfloat16"), ("gpt-neox", "bfloat16"), ("gpt-neox", "int8")],
)
def test_narrow_cache_with_mla_and_with_the_transformers_backend(
    tmp_path: Path, family: str, name: str
) -> None:
    make_checkpoint(tmp_path, family)
    engine = make_engine(tmp_path, kv_cache_dtype=name, block_size=4)
    assert engine.cache.form is FORMATS[name]
    expected = {n: run_greedy(engine, PROMPT[:n], NUM_TOKENS) for n in (1, 9, 30)}
    for n in expected:
        engine.submit(greedy_sequence(n, PROMPT[:n], NUM_TOKENS, salt=b"batched"))
    assert run_out(engine) == expected


def test_layouts_of_different_cache_dtypes_do_not_match(checkpoint: Path) -> None:
    wide, narrow, *codes = (
        make_engine(checkpoint, kv_cache_dtype=name).layout
        for name in ("float32", "bfloat16", *SCALED)
    )
    assert layout_mismatch(*codes) == (
        "the formats of the KV caches differ (fp8 and int8): use the same kv_cache_dtype for both "
        "workers"
    )
    assert layout_mismatch(wide, wide) == ""
    assert layout_mismatch(narrow, wide) == (
        "the formats of the KV caches differ (bfloat16 and float32): use the same kv_cache_dtype "
        "for both workers"
    )
    assert "the same model" in layout_mismatch(
        make_engine(checkpoint, dtype="bfloat16").layout, narrow
    )


async def check_drain(pools: DisaggregatedPair, name: str) -> None:
    """Move a half-generated request, as in a drain, and check that nothing is recomputed."""
    expected = await pools.answer_without_transfer(PROMPT[:70], 60)
    computed = pools.decode.load.prompt_tokens_computed
    moving = await pools.decode_and_yield(PROMPT[:70], 60, after=5)
    done = len(moving.first_tokens)
    assert 5 <= done < 60
    assert moving.kv_len == 70 + done - 1
    assert await moving.finish() == expected
    received = await pools.decode.message("received", moving.request)
    assert received.bytes == -(-moving.kv_len // 16) * 16 * token_bytes(name)
    assert pools.decode.load.prompt_tokens_computed == computed


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "other"), [("bfloat16", "float32"), ("fp8", "int8")])
async def test_kv_transfers_require_equal_cache_dtypes(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, name: str, other: str
) -> None:
    names = {"prefill": name, "decode": name, "other": other}
    # `other` waits until its time limit, because the source refuses to send to it.
    limits = {"prefill": 240.0, "decode": 240.0, "other": 5.0}
    workers = {
        role: await serve_worker(
            WorkerConfig(
                role,
                checkpoint,
                kv_cache_dtype=dtype,
                kv_cache_mib=1,
                transfer_seconds=limits[role],
            )
        )
        for role, dtype in names.items()
    }
    for target, compatible in (("decode", True), ("other", False)):
        pools = await DisaggregatedPair.open(workers["prefill"].address, workers[target].address)
        expected = await pools.answer_without_transfer(PROMPT[:70], NUM_TOKENS)
        moving = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS)
        if compatible:
            assert await moving.finish() == expected
            received = await pools.decode.message("received", moving.request)
            assert received.bytes == 5 * 16 * token_bytes(name)
            await check_drain(pools, name)
        else:
            # The Submit claims an equal layout, so the mismatch is found when workers connect.
            with caplog.at_level(logging.WARNING):
                await moving.submit(layout=pools.decode.welcome.layout)
                await moving.send()
                failed = await pools.decode.message("failed", moving.request)
            assert f"KV caches differ ({name} and {other})" in failed.reason + caplog.text
        await pools.close()
    for worker in workers.values():
        await worker.stop()
