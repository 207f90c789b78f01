"""A cluster whose pools have different block sizes and limits.

KV transfers convert between block sizes, and answers equal those of an engine with default
settings.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from tests.support.engines import run_greedy
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MODEL = SHIPPED.parent / "demo-small"
PREFILL = {"block_size": 32, "max_sequences": 3, "max_batched_tokens": 48, "kv_cache_mib": 32}
DECODE = {"block_size": 12, "max_sequences": 2, "max_batched_tokens": 512, "kv_cache_mib": 64}
# With a fixed number of threads, workers do not share cores, so prompts are computed apart.
APART = {"threads": 1}
FILE = {
    "models": {"small": {"path": str(MODEL), "dtype": "float32"}},
    "router": {"drain_seconds": 20},
    "pools": {"prefill": PREFILL | APART, "decode": DECODE | APART},
}
LENGTHS = [1, 11, 12, 13, 31, 32, 33, 96, 150]
NUM_NEW = 24


def prompt(length: int, start: int) -> list[int]:
    """Return a prompt of token ids; another `start` gives other ids."""
    return [100 + (start * 31 + position * 7) % 400 for position in range(length)]


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        file = Path(name, "cluster.yaml")
        file.write_text(yaml.safe_dump(FILE))
        with serving(["--config", str(file)], free_ports(2), Path(name)) as running:
            running.wait_for_output("small is served after")
            yield running


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(WorkerConfig("plain", MODEL, dtype="float32", kv_cache_mib=64, threads=1))


def complete(running: Serving, ids: list[int]) -> list[int]:
    """Return the tokens of a greedy answer of `NUM_NEW` tokens."""
    body = {"model": "small", "prompt": ids, "max_tokens": NUM_NEW, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    reply = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def metric_sum(running: Serving, name: str) -> float:
    """Return the sum of a metric over all its labels."""
    text = httpx.get(f"http://127.0.0.1:{running.admin}/metrics", timeout=TIMEOUT_SECONDS).text
    families = text_string_to_metric_families(text)
    return sum(each.value for family in families for each in family.samples if each.name == name)


def workers(running: Serving) -> dict[str, dict[str, Any]]:
    status = httpx.get(f"http://127.0.0.1:{running.admin}/status", timeout=TIMEOUT_SECONDS).json()
    return {each["worker"]: each for each in status["workers"]}


def check_answers(running: Serving, plain: Engine, start: int) -> None:
    """Send prompts of all lengths together, more prompts than there are rows; check the answers."""
    prompts = [prompt(length, start + number) for number, length in enumerate(LENGTHS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda ids: complete(running, ids), prompts))
    assert found == [run_greedy(plain, ids, NUM_NEW) for ids in prompts]


def test_pools_of_different_block_sizes_answer_like_one_engine(
    served: Serving, plain: Engine
) -> None:
    check_answers(served, plain, 0)
    assert metric_sum(served, "penstock_kv_transfer_bytes_total") > 0
    assert metric_sum(served, "penstock_kv_transfers_failed_total") == 0
    places = {name: each["numbers"]["places"] for name, each in workers(served).items()}
    assert places == {"prefill-0": 3, "decode-0": 2}


def test_worker_keeps_the_settings_of_its_pool_when_its_role_changes(
    served: Serving, plain: Engine
) -> None:
    steps = [("prefill-0", "mixed"), ("decode-0", "prefill"), ("prefill-0", "decode")]
    for worker, role in steps:
        url = f"http://127.0.0.1:{served.admin}/role"
        reply = httpx.post(url, json={"worker": worker, "role": role}, timeout=TIMEOUT_SECONDS)
        assert reply.status_code == 200, reply.text

    def have_roles() -> bool:
        return {name: each["role"] for name, each in workers(served).items()} == dict(steps)

    wait_for(have_roles, "the new roles")
    check_answers(served, plain, 100)
    assert metric_sum(served, "penstock_kv_transfers_failed_total") == 0
    found = {name: each["numbers"] for name, each in workers(served).items()}
    for name, pool in (("prefill-0", PREFILL), ("decode-0", DECODE)):
        assert found[name]["places"] == pool["max_sequences"]
        assert found[name]["max_batched_tokens"] == pool["max_batched_tokens"]


def test_choices_beyond_the_rows_of_one_pool_are_computed_by_the_other(
    served: Serving, plain: Engine
) -> None:
    ids = prompt(40, 500)
    body = {"model": "small", "prompt": ids, "max_tokens": NUM_NEW, "temperature": 0, "n": 3}
    body |= {"ignore_eos": True, "return_token_ids": True}
    url = f"http://127.0.0.1:{served.http}/v1/completions"
    reply = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
    assert reply.status_code == 200, reply.text
    expected = run_greedy(plain, ids, NUM_NEW)
    assert [choice["token_ids"] for choice in reply.json()["choices"]] == [expected] * 3
