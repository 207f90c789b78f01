"""Several ranks run device steps like one rank: with captured graphs and steps planned ahead.

The device is a CPU that replays a captured step by calling it again; ranks are threads over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.stepper import DeviceStepper
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.parallel.collectives import ProcessGroup, StageLinks
from penstock.workers.parallel.step_codec import decode
from penstock.workers.rank import follower as follower_module
from penstock.workers.rank import rank_runtime
from penstock.workers.rank.rank_runtime import load_rank
from penstock.workers.scheduling.sequence import NewSequence, StepPlan
from tests.support.engines import run_out
from tests.support.ranks import (
    PROMPTS,
    Answers,
    agree,
    answer,
    follow,
    in_threads,
    lead,
    make_model,
    rank_config,
)
from tests.support.simulated_device import Replays, in_graph, simulate_device
from tests.support.stepper_driver import StepperDriver

if TYPE_CHECKING:
    from penstock.workers.parallel.rendezvous import LocalStore

pytestmark = pytest.mark.slow

T = TypeVar("T")


def run_on_device(
    use: Callable[[Engine], T], model: Path, mesh: tuple[int, int, int], **more: object
) -> T:
    """Return the result of `use` for the engine of a worker with this mesh, after its warm-up."""

    def work(rank: int, store: LocalStore) -> T | None:
        config = replace(rank_config(model, mesh, **more), rank=rank)
        if rank:
            follow(config, store)
            return None

        def use_warm(engine: Engine) -> T:
            assert isinstance(engine.executor.runner, DeviceRunner)
            engine.warm_up()
            return use(engine)

        return lead(config, store, use_warm)

    found = in_threads(mesh[0] * mesh[1], work)[0]
    assert found is not None
    return found


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    return simulate_device(monkeypatch)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", (2, 1, 1)),
        ("llama", (1, 2, 1)),
        ("qwen2-moe", (2, 2, 2)),
        ("deepseek", (4, 1, 2)),
    ],
)
def test_ranks_with_graphs_give_the_answers_of_one_rank(
    tmp_path: Path, name: str, mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path, name)
    expected = answer(Engine(rank_config(model)))
    captures = simulate_device(monkeypatch)
    exchanged: list[str] = []
    for method in ("send", "receive"):
        original = getattr(StageLinks, method)

        def outside_graphs(
            links: StageLinks, hidden: Tensor, original: Callable[..., T] = original
        ) -> T:
            assert not in_graph()
            exchanged.append("hidden states")
            return original(links, hidden)

        monkeypatch.setattr(StageLinks, method, outside_graphs)
    agree(run_on_device(answer, model, mesh), expected)
    assert len(captures) == mesh[0] * mesh[1]
    assert len({(each.captured, each.replayed) for each in captures}) == 1
    assert captures[0].replayed > 5
    assert bool(exchanged) == (mesh[1] > 1)


def sequences() -> list[NewSequence]:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.9, seed=5, max_tokens=25),
        SamplingParams(temperature=1.0, seed=9, max_tokens=40, stop_token_ids=(7, 30, 71)),
    ]
    return [
        NewSequence(number, prompt, len(prompt), params)
        for number, (prompt, params) in enumerate(zip(PROMPTS[1:], kinds, strict=True))
    ]


def test_followers_get_the_tokens_of_steps_planned_ahead(
    tmp_path: Path, captures: list[Replays], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path, "llama")
    read: list[StepPlan] = []

    def decode_and_keep(message: bytes) -> object:
        found = decode(message)
        if isinstance(found, StepPlan):
            read.append(found)
        return found

    monkeypatch.setattr(follower_module, "decode", decode_and_keep)

    def one_by_one(engine: Engine) -> dict[object, list[int]]:
        for new in sequences():
            engine.submit(new)
        return run_out(engine)

    def ahead(engine: Engine) -> dict[object, list[int]]:
        assert engine.plans_ahead
        driver = StepperDriver(engine)
        assert isinstance(driver.stepper, DeviceStepper)
        for new in sequences():
            driver.advance(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
        while driver.num_ended < len(sequences()):
            driver.advance()
        driver.stepper.stop()
        engine.batcher.check()
        assert driver.num_ahead > 5
        return dict(driver.answers)

    expected = run_on_device(one_by_one, model, (2, 1, 1))
    assert not any(plan.ahead for plan in read)
    assert run_on_device(ahead, model, (2, 1, 1)) == expected
    tokens_ahead = [plan.tokens for plan in read if plan.ahead]
    assert len(tokens_ahead) > 5
    # Plans that are made ahead contain no token ids yet.
    assert not any(tokens.any() for tokens in tokens_ahead)
    assert captures[-1].replayed > 5


def test_sums_in_the_communicators_order_agree_with_those_in_rank_order(
    tmp_path: Path, captures: list[Replays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without deterministic mode, the order of sums is the backend's: NCCL's, or here gloo's."""
    model = make_model(tmp_path, "qwen2-moe")
    expected = run_on_device(answer, model, (2, 1, 2))
    added: list[int] = []
    init = ProcessGroup.__init__

    def in_other_order(group: ProcessGroup, communicator: object, size: int, _: bool) -> None:
        init(group, communicator, size, in_rank_order=False)  # type: ignore[arg-type]
        added.append(size)

    monkeypatch.setattr(ProcessGroup, "__init__", in_other_order)
    found, again = (run_on_device(answer, model, (2, 1, 2)) for _ in range(2))
    agree(found, expected)
    assert found.tokens == again.tokens
    assert all((one == other).all() for one, other in zip(found.logits, again.logits, strict=True))
    assert added == [2] * 4


def test_deterministic_ranks_give_equal_bits_with_and_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path, "llama")

    def work(rank: int, store: LocalStore) -> Answers | None:
        config = rank_config(model, (2, 1, 1), rank=rank, deterministic=True)
        if not rank:
            return lead(config, store, answer)
        follow(config, store)
        return None

    expected = in_threads(2, work)[0]
    assert expected is not None
    simulate_device(monkeypatch)
    found = run_on_device(answer, model, (2, 1, 1), deterministic=True)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert (one == other).all()


def test_ranks_agree_on_the_sizes_for_the_smallest_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_device(monkeypatch)
    memory = threading.local()  # each rank is a thread with its own memory size
    monkeypatch.setattr(rank_runtime, "_gpu_memory", lambda device: memory.size)
    sizes = dict.fromkeys(("block_size", "max_sequences", "max_batched_tokens"))
    model = make_model(tmp_path, "llama", max_position_embeddings=64)

    def work(rank: int, store: LocalStore) -> int:
        memory.size = (80 << 30, 24 << 30)[rank]
        config = rank_config(model, (2, 1, 1), rank=rank, **sizes)
        loaded = load_rank(config, lambda done, total: None, store)
        return loaded.limits.max_batched_tokens

    assert in_threads(2, work) == [2048, 2048]
