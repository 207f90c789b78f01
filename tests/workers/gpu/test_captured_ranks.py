"""Decode steps of two ranks as recorded commands: interpreted kernels, torch and collectives.

A recorded step reads no value on the host, and its inputs have fixed addresses, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.kernels.attention import work_items
from penstock.workers.engine.engine import Engine
from penstock.workers.gpu import device_runner
from penstock.workers.rank import rank_runtime
from tests.support.device_tape import HostRead, Tape, record_launches_and_collectives
from tests.support.devices import ON_GPU, runs_kernels
from tests.support.ranks import (
    Answers,
    agree,
    answer,
    follow,
    in_threads,
    lead,
    make_model,
    rank_config,
)

if TYPE_CHECKING:
    from penstock.workers.parallel.rendezvous import LocalStore

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(ON_GPU or not runs_kernels(), reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    made: list[Tape] = []

    def make(device: torch.device) -> Tape:
        made.append(Tape(device))
        return made[-1]

    record_launches_and_collectives(monkeypatch)
    # Use small partitions, so that each sequence has several.
    monkeypatch.setattr(work_items, "SPLIT", 32)
    monkeypatch.setattr(work_items, "QUANTUM", 32)
    monkeypatch.setattr(rank_runtime, "_runs_asynchronously", lambda decoder: True)
    monkeypatch.setattr(device_runner, "CudaCaptures", make)
    return made


def run_ranks(model: Path, use: Callable[[Engine], Answers]) -> Answers:
    def work(rank: int, store: LocalStore) -> Answers | None:
        config = rank_config(model, (2, 1, 2), rank=rank, max_sequences=4)
        if not rank:
            return lead(config, store, use)
        follow(config, store)
        return None

    found = in_threads(2, work)[0]
    assert found is not None
    return found


def test_recorded_steps_of_ranks_equal_computed_ones(tmp_path: Path, tapes: list[Tape]) -> None:
    model = make_model(tmp_path, "qwen2-moe", num_hidden_layers=2)
    expected = run_ranks(model, answer)
    assert not tapes

    def with_graphs(engine: Engine) -> Answers:
        engine.warm_up()
        return answer(engine)

    agree(run_ranks(model, with_graphs), expected)
    assert len(tapes) == 2
    assert all(tape.captured == 3 for tape in tapes)  # each rank has graphs of 1, 2 and 4 rows
    assert tapes[0].num_commands == tapes[1].num_commands > 100
    assert tapes[0].replayed == tapes[1].replayed > 5


@pytest.mark.parametrize("read", [int, torch.Tensor.tolist, torch.Tensor.numpy, torch.bincount])
@torch.inference_mode()
def test_read_on_the_host_is_noticed(read: Callable[[torch.Tensor], object]) -> None:
    values = torch.ones(1, dtype=torch.int64)
    with pytest.raises(HostRead):
        Tape().capture(lambda: print(read(values)))


def test_replay_computes_from_new_inputs_at_the_same_addresses() -> None:
    given, out = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def compute() -> None:
        out.copy_((given * 2 + 1).flip(0))

    replay = Tape().capture(compute)
    given.copy_(torch.tensor([5.0, 7.0]))
    replay()
    assert out.tolist() == [15.0, 11.0]
