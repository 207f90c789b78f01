"""KV transfers between two workers on one event loop: bytes sent, recomputation and failures."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from penstock.protos import worker_pb2 as wire
from penstock.workers.config import WorkerConfig
from penstock.workers.kv_transfer import sender as source_side
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import Operation, RankPair
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.disaggregated_pair import DisaggregatedPair, YieldedRequest
from tests.support.tiny import tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [3 + (7 * i) % 150 for i in range(100)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


async def serve(name: str, checkpoint: Path, **other: Any) -> RunningWorker:
    sizes = {"kv_cache_mib": 1, "transfer_seconds": 240.0}
    return await serve_worker(WorkerConfig(name, checkpoint, **{**sizes, **other}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(checkpoint: Path) -> AsyncIterator[tuple[RunningWorker, RunningWorker]]:
    prefill, decode = await serve("prefill", checkpoint), await serve("decode", checkpoint)
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def pools(workers: tuple[RunningWorker, RunningWorker]) -> AsyncIterator[DisaggregatedPair]:
    prefill, decode = workers
    pools = await DisaggregatedPair.open(prefill.address, decode.address)
    yield pools
    await pools.close()


def kv_bytes(pools: DisaggregatedPair, num_tokens: int) -> int:
    """Return the bytes of KV that `num_tokens` occupy, in whole blocks."""
    size = pools.decode.welcome.block_size
    # Bytes of a token: layers x (K, V) x KV heads x head_dim x bytes of float32.
    return -(-num_tokens // size) * size * 3 * 2 * 2 * 8 * 4


def holds_nothing(attached: AttachedRouter) -> bool:
    load = attached.load
    return load.free_blocks + load.cached_blocks == attached.welcome.num_blocks


async def settle(pools: DisaggregatedPair) -> None:
    """Wait until neither worker holds running sequences, leases or other blocks in use."""
    for attached in (pools.prefill, pools.decode):
        await attached.until(partial(holds_nothing, attached))
        assert attached.load.running == attached.load.leased_blocks == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
async def test_transferred_request_gives_the_answer_of_a_mixed_worker(
    pools: DisaggregatedPair, length: int
) -> None:
    prompt = PROMPT[:length]
    expected = await pools.answer_without_transfer(prompt, NUM_TOKENS)
    before = pools.decode.load
    sent = pools.prefill.load.bytes_sent
    moving = await pools.prefill_and_yield(prompt, NUM_TOKENS)
    assert await moving.finish() == expected
    received = await pools.decode.message("received", moving.request)
    after = pools.decode.load
    assert moving.kv_len == length
    assert received.bytes == kv_bytes(pools, length)
    assert after.bytes_received - before.bytes_received == received.bytes
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    await settle(pools)
    assert pools.prefill.load.bytes_sent - sent == received.bytes


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (8, 12)], ids=str)
async def test_transfer_between_different_block_sizes(
    checkpoint: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 2000)
    both = [await serve(f"of {size}", checkpoint, block_size=size) for size in sizes]
    pools = await DisaggregatedPair.open(both[0].address, both[1].address)
    for length in (1, 16, 17, 70):
        expected = await pools.answer_without_transfer(PROMPT[:length], NUM_TOKENS)
        computed = pools.decode.load.prompt_tokens_computed
        moving = await pools.prefill_and_yield(PROMPT[:length], NUM_TOKENS)
        assert await moving.finish() == expected
        assert pools.decode.load.prompt_tokens_computed == computed, (
            "the KV must be received, not recomputed"
        )
        await settle(pools)
    first = await pools.prefill_and_yield(PROMPT[:50], NUM_TOKENS, salt=b"shared")
    await first.finish()
    expected = await pools.answer_without_transfer(PROMPT[:70], NUM_TOKENS)
    second = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS, salt=b"shared")
    assert await second.finish() == expected
    assert (await second.ready()).have == 50 // sizes[1] * sizes[1], (
        "the destination must reuse the full blocks that it has cached"
    )
    await settle(pools)
    await pools.close()
    for worker in both:
        await worker.stop()


async def test_sampling_continues_unchanged_after_a_transfer(pools: DisaggregatedPair) -> None:
    params: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 77,
        "top_p": 0.95,
        "presence_penalty": 0.3,
    }
    expected = await pools.answer_without_transfer(PROMPT[:33], 30, **params)
    moving = await pools.prefill_and_yield(PROMPT[:33], 30, **params)
    assert await moving.finish() == expected


async def test_prefix_that_the_destination_has_cached_is_not_sent(pools: DisaggregatedPair) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:70], NUM_TOKENS)
    first = await pools.prefill_and_yield(PROMPT[:50], NUM_TOKENS, salt=b"shared")
    await first.finish()
    second = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS, salt=b"shared")
    assert await second.finish() == expected
    assert (await second.ready()).have == 48
    received = await pools.decode.message("received", second.request)
    assert received.bytes == kv_bytes(pools, 70) - kv_bytes(pools, 48)
    await settle(pools)


async def test_eight_requests_transfer_concurrently(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 1)
    prompts = [PROMPT[i : i + 20 + 9 * i] for i in range(8)]
    expected = [await pools.answer_without_transfer(prompt, NUM_TOKENS) for prompt in prompts]
    moving = [await pools.prefill_and_yield(prompt, NUM_TOKENS) for prompt in prompts]
    for transfer in moving:
        await transfer.submit()
    for transfer in moving:
        await transfer.send()
    assert [await transfer.answer() for transfer in moving] == expected
    for transfer in moving:
        assert await pools.decode.message("received", transfer.request)
        await transfer.drop()
    await settle(pools)


# ------------------------------------------------------------------ failures


class Gate:
    """Counts calls of a `KvStaging` method; calls after the first `free` wait for `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, free: int) -> None:
        self.num_calls = 0
        self._opened = threading.Event()
        original = getattr(KvStaging, method)

        def held(*args: Any) -> Any:
            self.num_calls += 1
            if self.num_calls > free:
                assert self._opened.wait(60)
            return original(*args)

        monkeypatch.setattr(KvStaging, method, held)

    def open(self) -> None:
        self._opened.set()

    async def reached(self, num_calls: int) -> None:
        async with asyncio.timeout(60):
            while self.num_calls < num_calls:
                await asyncio.sleep(0.005)


async def failure_reason(attached: AttachedRouter, moving: YieldedRequest) -> str:
    reason = (await attached.message("failed", moving.request)).reason
    assert isinstance(reason, str)
    return reason


async def test_flipped_bit_is_detected_and_the_request_recomputed(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:40], NUM_TOKENS)
    monkeypatch.setattr(RankPair, "send", send_flipped)
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    assert await moving.finish() == expected
    assert "checksum" in await failure_reason(pools.decode, moving)
    await settle(pools)


def send_flipped(pair: RankPair, data: torch.Tensor) -> Operation:
    """Send `data` with one bit flipped."""
    data[len(data) // 2] ^= 4
    return send(pair, data)


send = RankPair.send


async def test_blocks_of_a_dropped_lease_are_kept_while_they_are_read(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 1)
    gate = Gate(monkeypatch, "gather", free=2)
    expected = await pools.answer_without_transfer(PROMPT[:70], NUM_TOKENS)
    moving = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS)
    await moving.submit()
    await moving.send()
    await gate.reached(3)
    leased = pools.prefill.load.leased_blocks
    await pools.prefill.drop(moving.request)
    # The drop is processed before these requests, but the dropped blocks are still being read.
    await pools.answer_without_transfer(PROMPT[:3], 2)
    await pools.prefill.submit(10**6, PROMPT[:3], greedy(1))
    await pools.prefill.answer(10**6)
    assert pools.prefill.load.leased_blocks == leased == 5
    gate.open()
    assert await moving.answer() == expected
    assert "gave up" in await failure_reason(pools.decode, moving)
    await settle(pools)


async def test_blocks_of_a_dropped_receiver_are_kept_while_they_are_written(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "scatter", free=0)
    moving = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS)
    await moving.submit()
    await moving.send()
    await gate.reached(1)
    free = pools.decode.load.free_blocks
    await moving.drop()
    await pools.answer_without_transfer(PROMPT[:3], 2)
    # A transfer still writes the dropped blocks, so they are not free.
    assert pools.decode.load.free_blocks <= free
    gate.open()
    await settle(pools)
    again = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS)
    assert await again.finish() == await pools.answer_without_transfer(PROMPT[:70], NUM_TOKENS)


async def test_source_stops_sending_when_the_receiver_is_dropped(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 1)
    gate = Gate(monkeypatch, "gather", free=2)
    moving = await pools.prefill_and_yield(PROMPT[:70], NUM_TOKENS)
    await moving.submit()
    await moving.send()
    await gate.reached(3)
    await pools.decode.drop(moving.request, 2)
    await pools.answer_without_transfer(PROMPT[:3], 2)
    gate.open()
    await pools.prefill.drop(moving.request)
    await settle(pools)
    assert gate.num_calls < 15  # the source did not send all messages


async def test_request_is_recomputed_if_its_lease_was_dropped(pools: DisaggregatedPair) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:40], NUM_TOKENS)
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    await moving.submit()
    await pools.prefill.drop(moving.request)
    await moving.send()
    assert await moving.answer() == expected
    assert "gave up" in await failure_reason(pools.decode, moving)
    await settle(pools)


async def test_send_for_an_unknown_epoch_transfers_nothing(pools: DisaggregatedPair) -> None:
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    await moving.submit()
    received = pools.decode.load.bytes_received
    await moving.send(epoch=10**9)
    other = await pools.prefill_and_yield(PROMPT[:20], NUM_TOKENS)
    await other.finish()
    assert pools.decode.load.bytes_received == received + kv_bytes(pools, 20)
    await moving.drop()
    await settle(pools)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [({"secret": "wrong"}, "UNAUTHENTICATED"), ({"address": "127.0.0.1:1"}, "UNAVAILABLE")],
)
async def test_source_reports_that_it_cannot_reach_the_destination(
    pools: DisaggregatedPair, endpoint: dict[str, str], reason: str
) -> None:
    expected = await (await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)).finish()
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    await moving.submit()
    ready = await moving.ready()
    to = wire.TransferEndpoint()
    to.CopyFrom(ready.at)
    to.MergeFrom(wire.TransferEndpoint(**endpoint))
    await moving.send(to=to)
    assert reason in await failure_reason(pools.prefill, moving)
    # The changed endpoint makes the source close the pair, which the destination detects.
    assert await moving.answer() == expected
    await moving.drop()
    await settle(pools)


@pytest.mark.parametrize("source", [{"layout": "another"}, {"kv_len": 0}, {"kv_len": 10**6}])
async def test_unusable_source_is_not_waited_for(
    pools: DisaggregatedPair, source: dict[str, Any]
) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:40], NUM_TOKENS)
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    await moving.submit(**source)
    assert await moving.answer() == expected
    assert not any(message.HasField("ready") for message in pools.decode.received)
    await moving.drop()
    await settle(pools)


async def test_wait_for_blocks_times_out(checkpoint: Path, pools: DisaggregatedPair) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:40], NUM_TOKENS)
    impatient = await serve("impatient", checkpoint, transfer_seconds=0.2)
    decode = await AttachedRouter(impatient.address).open()
    moving = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    redirected = replace(moving, pools=DisaggregatedPair(pools.prefill, decode))
    await redirected.submit()
    assert await redirected.answer() == expected
    assert "nothing came for 0.2 s" in await failure_reason(decode, redirected)
    await redirected.drop()
    await decode.close()
    await impatient.stop()


async def test_stopped_source_is_not_waited_for(checkpoint: Path, pools: DisaggregatedPair) -> None:
    expected = await pools.answer_without_transfer(PROMPT[:40], NUM_TOKENS)
    source = await serve("source", checkpoint)
    prefill = await AttachedRouter(source.address).open()
    both = DisaggregatedPair(prefill, pools.decode)
    first = await both.prefill_and_yield(PROMPT[:20], NUM_TOKENS)
    await first.finish()
    moving = await both.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
    await moving.submit()
    await moving.ready()
    await source.stop()
    assert await moving.answer() == expected
    assert "the pair with source broke" in await failure_reason(pools.decode, moving)
    await pools.decode.drop(moving.request, 2)
    await prefill.close()
    await settle(pools)


async def test_restarted_destination_gets_a_new_pair(
    checkpoint: Path, pools: DisaggregatedPair
) -> None:
    for _ in range(2):
        running = await serve("restarted", checkpoint)
        decode = await AttachedRouter(running.address).open()
        both = DisaggregatedPair(pools.prefill, decode)
        moving = await both.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
        assert len(await moving.finish()) == NUM_TOKENS
        assert await decode.message("received", moving.request)
        await decode.close()
        await running.stop()
    await settle(pools)
