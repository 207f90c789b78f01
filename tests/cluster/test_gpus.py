"""A cluster on two GPUs: router, Ray, workers, NCCL within a worker and between workers.

Run on a machine with two GPUs: `python -m pytest -m gpu tests/cluster/test_gpus.py`
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from penstock.loadtests.micro.server import free_ports
from tests.cluster.test_ranks import MODEL, complete
from tests.support.serving import Serving, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@contextmanager
def served(*flags: str) -> Iterator[Serving]:
    arguments = [str(MODEL), "--gpus", "1", "--dtype", "float32", *flags]
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as folder,
        serving(arguments, free_ports(2), Path(folder)) as running,
    ):
        running.wait_for_output("is served after")
        yield running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with served("--mixed", "1") as one:
        return complete(one)


@pytest.mark.parametrize("flags", [("--tp", "2"), ("--pp", "2")])
def test_two_ranks_answer_like_one_and_recover_from_a_killed_rank(
    flags: tuple[str, ...], expected: list[str]
) -> None:
    with served(*flags) as several:
        assert complete(several) == expected
        several.find("mixed worker 0, rank 1").kill()
        several.wait_for_output("mixed worker 0: ready after", times=2)
        assert complete(several) == expected


def test_kv_blocks_are_transferred_between_gpus(expected: list[str]) -> None:
    with served("--prefill", "1", "--decode", "1") as pools:
        assert complete(pools) == expected
