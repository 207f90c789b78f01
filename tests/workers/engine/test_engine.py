"""Tests of the engine that call its methods directly, without the engine thread."""

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.common.block_hash import block_hash, root_hash
from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine import executor as module
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.step_times import STEP_TOKEN_BOUNDS
from penstock.workers.engine.warm_up import warm_up_block_moves, warm_up_sequences
from penstock.workers.rank.rank_runtime import choose_device
from penstock.workers.sampling import sampler
from penstock.workers.sampling.token_masks import StepMasks
from penstock.workers.scheduling.sequence import (
    NeverFits,
    NewSequence,
    QueueFull,
    Sibling,
    StepPlan,
    Yielded,
)
from tests.support.engines import greedy_sequence, run_greedy, run_out, tokens_of
from tests.support.tiny import tiny_checkpoint

PROMPT = [3 + (5 * i) % 160 for i in range(120)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path, **sizes: Any) -> Engine:
    given = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32, **sizes}
    return Engine(WorkerConfig("w", checkpoint, **given))


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint)


def greedy_without_cache(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    """Return a greedy answer. For each token, the whole sequence is computed again."""
    tokens = list(prompt)
    for number in range(num_tokens):
        engine.submit(greedy_sequence("one", tokens, 1, salt=b"%d" % number))
        tokens += run_out(engine)["one"]
    return tokens[len(prompt) :]


def test_greedy_answers_equal_recomputation_alone_and_in_a_batch(engine: Engine) -> None:
    prompts = {length: PROMPT[:length] for length in (1, 15, 16, 17, 31, 33, 100)}
    expected = {
        length: greedy_without_cache(engine, prompt, 8) for length, prompt in prompts.items()
    }
    assert {n: run_greedy(engine, prompt, 8) for n, prompt in prompts.items()} == expected
    for length, prompt in prompts.items():
        engine.submit(greedy_sequence(length, prompt, 8, salt=b"crowd"))
    assert run_out(engine) == expected
    engine.batcher.check()


def test_preempted_sequences_give_the_same_tokens(checkpoint: Path, engine: Engine) -> None:
    expected = {i: run_greedy(engine, PROMPT[i : 40 + i], 60) for i in range(8)}
    small = make_engine(checkpoint)
    small.reset_scheduler(dataclasses.replace(small.limits, num_blocks=30))
    for i in range(8):
        small.submit(greedy_sequence(i, PROMPT[i : 40 + i], 60))
    answers: dict[Any, list[int]] = {i: [] for i in range(8)}
    preempted: Counter[Any] = Counter()
    while (result := small.step()).output is not None:
        preempted.update(result.preempted)
        for key, token in tokens_of(result):
            answers[key].append(token)
    assert answers == expected
    assert preempted.total() == small.load().preemptions > 0
    assert 0 not in preempted, "the oldest sequence was preempted"
    small.batcher.check()


def test_step_result_and_load_report_the_step(engine: Engine) -> None:
    assert engine.step().empty
    engine.submit(greedy_sequence("a", PROMPT[:5], 2))
    first, last = engine.step(), engine.step()
    assert first.output is not None
    assert last.output is not None
    assert (first.output.indices.tolist(), last.output.indices.tolist()) == ([0], [1])
    assert (first.finished, last.finished) == ([], ["a"])
    assert first.logprobs == [None]
    assert engine.step().empty
    load = engine.load()
    assert load.num_steps == sum(load.step_counts) == 2
    assert load.step_seconds > load.last_step_seconds > 0
    assert load.prompt_seconds == pytest.approx(load.step_seconds - load.last_step_seconds)
    assert load.prompt_tokens_computed == 5
    assert load.step_tokens == (5 + 1) + 1
    assert load.step_token_counts[:3] == (1, 1, 0)


def test_tokens_of_steps_are_the_computed_prompt_tokens_and_the_generated_tokens(
    checkpoint: Path,
) -> None:
    """Prompts exceed the token budget; some requests have several choices, some are preempted."""
    engine = make_engine(checkpoint)
    engine.reset_scheduler(dataclasses.replace(engine.limits, num_blocks=22))
    for i in range(2):
        engine.submit(sampled_sequence(i, 60 + i, 0, num_siblings=2))
        engine.submit(greedy_sequence(10 + i, PROMPT[i : 40 + i], 60))
    num_tokens, seen = 0, 0
    while (output := engine.step().output) is not None:
        load = engine.load()
        num_tokens += len(output.tokens)
        assert load.step_tokens == load.prompt_tokens_computed + num_tokens
        assert load.num_steps == sum(load.step_token_counts)
        bucket = bisect_left(STEP_TOKEN_BOUNDS, load.step_tokens - seen)
        assert load.step_token_counts[bucket] > 0
        seen = load.step_tokens
    assert engine.load().preemptions > 0
    assert num_tokens == 2 * 3 * 24 + 2 * 60


def test_tokens_of_beams_count_as_generated(engine: Engine) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=4, n=1, best_of=3, use_beam_search=True, ignore_eos=True
    )
    siblings = tuple(Sibling(beam, PROMPT[:9]) for beam in (1, 2))
    engine.submit(NewSequence("beams", PROMPT[:9], 9, params, siblings=siblings))
    assert run_out(engine) == {}
    assert engine.load().step_tokens == 9 + 4 * 3


def test_logprobs_belong_to_their_tokens(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=3)
    engine.submit(greedy_sequence("plain", PROMPT[:9], 3))
    engine.submit(NewSequence("asked", PROMPT[:7], 7, params))
    while (result := engine.step()).output is not None:
        for (key, token), logprobs in zip(tokens_of(result), result.logprobs, strict=True):
            assert (logprobs is None) == (key == "plain")
            if logprobs is not None:
                assert logprobs.tokens[0] == token
                assert len(logprobs.values) == 3


def sampled_sequence(key: Any, num_prompt: int, choice: int, num_siblings: int = 0) -> NewSequence:
    prompt = PROMPT[:num_prompt]
    siblings = tuple(Sibling(choice + 1 + i, prompt) for i in range(num_siblings))
    params = SamplingParams(temperature=1.3, seed=11, max_tokens=24, logprobs=2)
    return NewSequence(key, prompt, num_prompt, params, choice=choice, siblings=siblings)


@pytest.mark.parametrize("num_prompt", [5, 16, 41])
def test_choices_of_one_request_equal_separate_requests(engine: Engine, num_prompt: int) -> None:
    expected = []
    for choice in range(4):
        engine.submit(sampled_sequence(choice, num_prompt, choice))
        expected.append(run_out(engine)[choice])
    engine.reset_scheduler(engine.limits)
    engine.submit(sampled_sequence("all", num_prompt, 0, num_siblings=3))
    answers: list[list[int]] = [[] for _ in range(4)]
    while (output := (result := engine.step()).output) is not None:
        assert len(result.logprobs) == len(output.tokens)
        for choice, token in zip(output.choices.tolist(), output.tokens.tolist(), strict=True):
            answers[choice].append(token)
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) == 4
    assert engine.load().prompt_tokens_computed == num_prompt
    engine.batcher.check()


def test_yield_keeps_the_blocks_until_they_are_dropped(engine: Engine) -> None:
    engine.submit(greedy_sequence("a", PROMPT[:20], 10, yield_after=1))
    result = engine.step()
    assert len(tokens_of(result)) == 1
    assert result.yielded == [Yielded("a", 20)]
    assert engine.load().leased_blocks == 2
    assert len(engine.batcher.pin("a", 0)) == 2
    engine.batcher.unpin("a")
    engine.drop("a")
    assert engine.load().leased_blocks == 0
    engine.batcher.check()


def test_requested_yield_takes_effect_at_the_next_step(engine: Engine) -> None:
    engine.submit(greedy_sequence("running", PROMPT[:20], 50))
    for _ in range(3):
        engine.step()
    engine.submit(greedy_sequence("queued", PROMPT[:9], 50))
    engine.request_yield("running")
    engine.request_yield("queued")
    result = engine.step()
    assert set(result.yielded) == {Yielded("running", 22), Yielded("queued", 0)}
    assert tokens_of(result) == []


def test_drop_frees_the_blocks_within_a_step(engine: Engine) -> None:
    num_blocks = engine.limits.num_blocks
    for key in range(4):
        engine.submit(greedy_sequence(key, PROMPT[:100], 50))
    engine.step()
    for key in range(4):
        engine.drop(key)
    engine.drop("unknown")
    assert engine.step().empty
    pool = engine.load()
    assert pool.free_blocks + pool.cached_blocks == num_blocks
    assert pool.running == pool.queued == 0
    engine.batcher.check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_sequence_with_non_finite_logits_fails_without_affecting_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    expected = run_greedy(engine, PROMPT[:9], 6)
    original = engine.executor.runner.run

    def poisoned(plan: StepPlan, **options: Any) -> torch.Tensor:
        logits = original(plan, **options).clone()
        keys = engine.batcher.table.keys[plan.rows[plan.samples]].tolist()
        if "bad" in keys and num_seen.get("bad", 0) >= 2:
            logits[keys.index("bad"), 7] = value
        return logits

    num_seen: dict[Any, int] = {}
    monkeypatch.setattr(engine.executor.runner, "run", poisoned)
    engine.submit(greedy_sequence("bad", PROMPT[3:20], 6))
    engine.submit(greedy_sequence("good", PROMPT[:9], 6, salt=b"other"))
    failed, good = [], []
    while (result := engine.step()).output is not None:
        failed += result.failed
        assert len(result.logprobs) == len(result.output.tokens)
        for key, token in tokens_of(result):
            num_seen[key] = num_seen.get(key, 0) + 1
            good += [token] if key == "good" else []
    assert failed == ["bad"]
    assert num_seen["bad"] == 2
    assert good == expected
    engine.batcher.check()


def test_reserved_blocks_are_reported_and_computed_if_the_transfer_fails(engine: Engine) -> None:
    expected = run_greedy(engine, PROMPT[:40], 5)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    engine.submit(NewSequence("a", PROMPT[:40], 40, params, salt=b"x", source_len=39))
    result = engine.step()
    assert result.output is None
    assert len(result.reserved) == 1
    receiving = result.reserved[0]
    assert (receiving.key, receiving.have, receiving.stop) == ("a", 0, 39)
    assert len(receiving.blocks) == 3
    assert engine.step().empty
    engine.batcher.transfer_failed("a")
    assert run_out(engine)["a"] == expected


def test_transferred_blocks_are_not_recomputed(engine: Engine) -> None:
    expected = run_greedy(engine, PROMPT[:40], 5)
    engine.submit(greedy_sequence("source", PROMPT[:40], 5, salt=b"s", yield_after=1))
    (first,) = run_out(engine)["source"]
    computed = engine.load().prompt_tokens_computed
    params = SamplingParams(temperature=0.0, max_tokens=5)
    new = NewSequence("a", [*PROMPT[:40], first], 40, params, salt=b"d", source_len=40)
    engine.submit(new)
    (receiving,) = engine.step().reserved
    blocks = engine.batcher.pin("source", 0)
    engine.cache.data[:, :, receiving.blocks] = engine.cache.data[:, :, blocks]
    engine.batcher.unpin("source")
    engine.batcher.transfer_done("a")
    assert [first, *run_out(engine)["a"]] == expected
    assert engine.load().prompt_tokens_computed == computed


def test_warm_up_leaves_no_counts_and_no_used_blocks(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    engine.warm_up()
    load = engine.load()
    assert load.step_seconds == sum(load.step_counts) == 0
    assert load.num_steps == load.prompt_tokens_computed == load.cached_blocks == 0
    assert load.free_blocks == engine.limits.num_blocks


def test_replaced_scheduler_is_empty_and_keeps_the_estimate_of_step_times(engine: Engine) -> None:
    run_greedy(engine, PROMPT[:40], 3)
    longest, last = engine.outputs.times.longest, engine.load().last_step_seconds
    limits = dataclasses.replace(engine.limits, num_blocks=30)
    engine.reset_scheduler(limits)
    load = engine.load()
    assert engine.batcher.limits == limits
    assert (load.free_blocks, load.num_steps, load.step_seconds) == (30, 0, 0.0)
    assert (engine.outputs.times.longest, load.last_step_seconds) == (longest, last)
    assert longest > 0
    assert len(run_greedy(engine, PROMPT[:40], 3)) == 3


def test_warm_up_includes_block_moves_and_leaves_the_cache_unchanged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, warmed = make_engine(checkpoint), []
    engine.cache.data.normal_()
    before = engine.cache.data.clone()

    def checked_block_moves(kv: torch.Tensor) -> None:
        warm_up_block_moves(kv)
        assert torch.equal(kv, before)
        warmed.append(kv)

    monkeypatch.setattr(module, "warm_up_block_moves", checked_block_moves)
    engine.warm_up()
    assert len(warmed) == 1
    assert warmed[0] is engine.cache.data


def test_sampler_admits_rows_on_the_compute_stream(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are admitted on the compute stream, because steps do not wait for other CUDA streams."""
    in_compute_stream, admitted, admit = [], [], engine.executor.sampler.admit

    @contextmanager
    def computing() -> Iterator[None]:
        in_compute_stream.append(True)
        yield
        in_compute_stream.pop()

    def recorded_admit(*arguments: Any) -> None:
        admitted.append(bool(in_compute_stream))
        admit(*arguments)

    monkeypatch.setattr(engine.executor.streams, "computing", computing)
    monkeypatch.setattr(engine.executor.sampler, "admit", recorded_admit)
    run_greedy(engine, PROMPT[:5], 2)
    assert admitted == [True]


def test_warm_up_sequences_of_a_gpu_run_to_their_end(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, max_batched_tokens=128)
    every = list(warm_up_sequences(engine.limits, compiles=True))
    assert [new.num_prompt for new in every] == [128, 64, 1]
    for new in every:
        engine.submit(new)
        computed = engine.load().prompt_tokens_computed
        assert len(run_out(engine)[new.key]) == 2
        assert engine.load().prompt_tokens_computed == computed + new.num_prompt


def test_warm_up_sequences_of_a_gpu_apply_a_token_mask(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint)
    masked: list[int] = []

    def apply(logits: torch.Tensor, masks: StepMasks) -> None:
        masked.extend(masks.at.tolist())

    monkeypatch.setattr(sampler, "_apply_masks_", apply)
    for new in warm_up_sequences(engine.limits, compiles=True):
        engine.submit(new)
        run_out(engine)
    assert masked == [0, 0]


def test_too_long_prompts_and_a_full_queue_are_refused(engine: Engine) -> None:
    with pytest.raises(NeverFits):
        engine.submit(greedy_sequence("a", [5] * 257, 1))
    for key in range(engine.limits.max_queued):
        engine.submit(greedy_sequence(key, PROMPT[:3], 1))
    with pytest.raises(QueueFull):
        engine.submit(greedy_sequence("late", PROMPT[:3], 1))


def test_too_little_memory_for_one_sequence_is_a_one_line_error(checkpoint: Path) -> None:
    # The cache has 1 MiB, and one block of 4096 tokens would take 1.5 MiB.
    with pytest.raises(ValueError, match="too little memory for one sequence of 256 tokens") as e:
        make_engine(checkpoint, kv_cache_mib=1, block_size=256 * 16)
    assert "\n" not in str(e.value)


def test_more_positions_than_the_model_has_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="more than the 256 positions"):
        make_engine(checkpoint, max_model_len=300)


def test_layouts_differ_with_weights_and_dtype(checkpoint: Path, tmp_path: Path) -> None:
    layout = make_engine(checkpoint).layout
    assert make_engine(checkpoint).layout == layout
    assert make_engine(checkpoint, block_size=8).layout == layout
    assert make_engine(checkpoint, dtype="bfloat16").layout != layout
    assert make_engine(tiny_checkpoint(tmp_path, seed=1)).layout != layout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        make_engine(checkpoint, device="cuda")
    assert choose_device("auto").type == "cpu"


def test_block_hashes_are_keyed_by_the_secret_of_the_configuration(checkpoint: Path) -> None:
    key = bytes(range(32))
    engine = make_engine(checkpoint, hash_key=key)
    run_greedy(engine, PROMPT[:40], 1)
    first = np.array(PROMPT[: engine.limits.block_size], np.int32)
    assert engine.batcher.pool.published.has_hash(block_hash(root_hash(key, b""), first))
    assert not engine.batcher.pool.published.has_hash(block_hash(root_hash(b"", b""), first))
