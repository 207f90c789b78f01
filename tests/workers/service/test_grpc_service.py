"""The worker's gRPC service over a real channel. Most tests share one worker."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos import worker_pb2 as wire
from penstock.protos.worker_codec import PROTOCOL, pack_tokens
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.engines import run_greedy
from tests.support.pickle_bomb import PickleBomb, send_raw
from tests.support.raw_calls import write_and_read
from tests.support.tiny import VOCAB_SIZE, tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

Reference = Callable[[list[int], int], Awaitable[list[int]]]

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(checkpoint: Path) -> AsyncIterator[RunningWorker]:
    config = WorkerConfig(
        "w0", checkpoint, kv_cache_mib=1, max_sequences=8, max_queued=16, token="secret"
    )
    running = await serve_worker(config)
    yield running
    await running.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def router(worker: RunningWorker, reference: Reference) -> AsyncIterator[AttachedRouter]:
    attached = await AttachedRouter(worker.address, "secret").open()
    yield attached
    await attached.close()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    """A function that returns greedy answers of a second engine.

    The function runs the engine in a thread, so that heartbeats continue.
    """
    engine = Engine(WorkerConfig("reference", checkpoint, kv_cache_mib=1))

    async def answer(prompt: list[int], max_tokens: int) -> list[int]:
        return await asyncio.to_thread(run_greedy, engine, prompt, max_tokens)

    return answer


def search_params(
    width: int, max_tokens: int = 5, n: int = 1, **search: Any
) -> wire.SamplingParams:
    """Return parameters of a beam search that ignores end-of-sequence tokens."""
    return greedy(max_tokens, n=n, beams=wire.BeamSearch(width=width, **search))


def free_blocks(attached: AttachedRouter) -> int:
    return attached.load.free_blocks + attached.load.cached_blocks


async def refusal_of(address: str, token: str | None, **hello: Any) -> grpc.aio.AioRpcError:
    """Open a stream that the worker must refuse, and return the error."""
    while True:
        attached = AttachedRouter(address, token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attached.open(**hello)
        await attached.close()
        # If the refusal arrives while Hello is being written, gRPC hides its status: try again.
        if "execute_batch" not in (caught.value.debug_error_string() or ""):
            return caught.value


# ------------------------------------------------------------------ the stream


async def test_welcome_describes_the_worker(router: AttachedRouter) -> None:
    welcome = router.welcome
    assert (welcome.worker, welcome.role, welcome.vocab_size) == ("w0", "mixed", VOCAB_SIZE)
    assert (welcome.block_size, welcome.max_model_len, welcome.max_sequences) == (16, 256, 8)
    assert welcome.num_blocks == welcome.load.free_blocks + welcome.load.cached_blocks
    assert len(welcome.load.step_counts) == len(welcome.step_bounds) + 1
    assert len(welcome.load.step_token_counts) == len(welcome.step_token_bounds) + 1
    assert list(welcome.eos_tokens) == [1]
    assert welcome.layout != welcome.model != ""


async def test_health_is_serving(worker: RunningWorker) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("token", [None, "wrong", "secret2", ""])
async def test_missing_or_wrong_token_is_unauthenticated(
    worker: RunningWorker, token: str | None
) -> None:
    error = await refusal_of(worker.address, token)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "token" in error.details()


async def test_other_protocol_version_is_refused(worker: RunningWorker) -> None:
    error = await refusal_of(worker.address, "secret", protocol=9)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"protocol 9 and this worker {PROTOCOL}" in error.details()


async def test_first_message_other_than_hello_is_refused(worker: RunningWorker) -> None:
    attached = AttachedRouter(worker.address, "secret")
    await attached.send(drop=wire.Drop(request=1, attempt=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attached.call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await attached.close()


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_unexpected_message_number_closes_the_stream(
    router: AttachedRouter, number: int
) -> None:
    await router.send(number, drop=wire.Drop(request=1, attempt=1))
    error = await router.until_closed()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected 2" in error.details()


@pytest.mark.parametrize("body", [{}, {"hello": wire.Hello(protocol=PROTOCOL, router="again")}])
async def test_invalid_message_closes_the_stream(
    router: AttachedRouter, body: dict[str, Any]
) -> None:
    await router.send(**body)
    assert (await router.until_closed()).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("is_first", [True, False])
async def test_undecodable_bytes_close_only_their_stream(
    worker: RunningWorker,
    router: AttachedRouter,
    caplog: pytest.LogCaptureFixture,
    is_first: bool,
) -> None:
    hello = wire.ToWorker(number=1, hello=wire.Hello(protocol=PROTOCOL, router="other"))
    async with grpc.aio.insecure_channel(worker.address) as channel:
        attach = channel.stream_stream("/penstock.worker.v1.Worker/Attach")
        call = attach(metadata=(("authorization", "Bearer secret"),))
        if not is_first:
            await call.write(hello.SerializeToString())
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await write_and_read(call, b"\xff\xff\xff garbage")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    await router.submit(1, PROMPT, greedy(3))
    assert len(await router.answer(1)) == 3


async def test_pickles_sent_to_the_port_are_not_loaded(
    worker: RunningWorker, router: AttachedRouter, tmp_path: Path
) -> None:
    bomb = PickleBomb(tmp_path / "loaded")
    await send_raw(worker.address, bomb.data)
    secrets = {
        "worker.v1.Worker/Attach": "secret",
        "transfer.v1.Transfer/Pair": router.welcome.transfer.secret,
    }
    async with grpc.aio.insecure_channel(worker.address) as channel:
        for method, secret in secrets.items():
            metadata = (("authorization", f"Bearer {secret}"),)
            call = channel.stream_stream(f"/penstock.{method}")(metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await write_and_read(call, bomb.data)
            assert refused.value.code() is not grpc.StatusCode.UNAUTHENTICATED
    assert not bomb.was_loaded()
    await router.submit(1, PROMPT, greedy(3))
    assert len(await router.answer(1)) == 3


async def test_too_large_message_closes_only_its_stream(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    other = await AttachedRouter(worker.address, "secret").open("other")
    await other.submit(1, PROMPT, greedy(3), salt=bytes(17 << 20))
    assert (await other.until_closed()).code() is not grpc.StatusCode.OK
    await other.close()
    await router.submit(1, PROMPT, greedy(3))
    assert len(await router.answer(1)) == 3


async def test_both_sides_send_heartbeats_and_silence_closes_the_stream(checkpoint: Path) -> None:
    running = await serve_worker(
        WorkerConfig("w1", checkpoint, kv_cache_mib=1, heartbeat_seconds=0.05)
    )
    talking = await AttachedRouter(running.address).open("talking", heartbeat_seconds=0.05)
    silent = await AttachedRouter(running.address).open("silent", heartbeat_seconds=0)
    await silent.submit(1, PROMPT, greedy(200))
    error = await silent.until_closed()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no message for" in error.details()
    await talking.message("heartbeat")
    await talking.until(lambda: talking.load.running == 0)
    assert talking.closed is None
    for attached in (talking, silent):
        await attached.close()
    await running.stop()


async def test_blocked_event_loop_is_not_taken_for_a_silent_router(checkpoint: Path) -> None:
    heartbeat_seconds = 0.1
    running = await serve_worker(
        WorkerConfig("w1", checkpoint, kv_cache_mib=1, heartbeat_seconds=heartbeat_seconds)
    )
    router = await AttachedRouter(running.address).open(heartbeat_seconds=heartbeat_seconds)
    # The event loop is blocked, so no heartbeats are sent. Ten missed heartbeats end a stream.
    time.sleep(20 * heartbeat_seconds)
    await router.submit(1, PROMPT, greedy(3))
    assert len(await router.answer(1)) == 3
    await router.close()
    await running.stop()


# ------------------------------------------------------------------ requests


async def test_answers_equal_those_of_the_engine(
    router: AttachedRouter, reference: Reference
) -> None:
    prompts = [PROMPT[:length] for length in (1, 15, 16, 17, 36)]
    for request, prompt in enumerate(prompts):
        await router.submit(request, prompt, greedy(20))
    for request, prompt in enumerate(prompts):
        assert await router.answer(request) == await reference(prompt, 20)
        assert router.finishes[request, 1] == wire.FINISH_LENGTH


async def test_request_continues_from_its_token_log(
    router: AttachedRouter, reference: Reference
) -> None:
    whole = await reference(PROMPT, 20)
    log = [wire.ChoiceLog(choice=0, tokens=pack_tokens(whole[:7]))]
    await router.submit(1, PROMPT, greedy(20), log=log, attempt=3)
    assert await router.answer(1, 3) == whole[7:]
    assert router.positions[1, 3] == 20


async def test_stop_tokens_and_logprobs(router: AttachedRouter, reference: Reference) -> None:
    whole = await reference(PROMPT, 20)
    await router.submit(1, PROMPT, greedy(20, stop_tokens=[whole[5]], logprobs=2))
    answer = await router.answer(1)
    assert answer == whole[: whole.index(whole[5]) + 1]
    assert router.finishes[1, 1] == wire.FINISH_STOP
    steps = [message.step for message in router.received if message.HasField("step")]
    entries = [(step.token[entry.row], entry) for step in steps for entry in step.logprobs]
    assert [token for token, _ in entries] == answer
    for token, entry in entries:
        # With greedy sampling, the sampled token is the most likely one.
        assert entry.tokens[0] == token
        assert entry.values[0] == pytest.approx(entry.chosen)
        assert entry.values[0] >= entry.values[1]


async def test_cached_tokens_are_sent_once_and_not_after_the_first_token(
    router: AttachedRouter,
) -> None:
    prompt = [5 + 3 * number % 90 for number in range(40)]
    for request in (1, 2):
        await router.submit(request, prompt, greedy(5), salt=b"counted")
        await router.answer(request)
    steps = [message.step for message in router.received if message.HasField("step")]
    sent = [(entry.request, entry.tokens) for step in steps for entry in step.cached]
    assert sent == [(1, 0), (2, 39)]  # of 40 cached tokens, the last one is computed again
    for request in (1, 2):
        counted = [request in {entry.request for entry in step.cached} for step in steps]
        computed = [request in step.request for step in steps]
        assert counted.index(True) <= computed.index(True)


async def test_drop_frees_the_blocks(router: AttachedRouter) -> None:
    total = router.welcome.num_blocks
    await router.submit(1, PROMPT, greedy(200))
    await router.until(lambda: router.answers[1, 1])
    load = router.load
    assert free_blocks(router) + load.used_blocks + load.leased_blocks == total
    assert 0 <= load.unwritten_slots < load.used_blocks * router.welcome.block_size
    await router.drop(1)
    await router.until(lambda: router.load.running == 0 and free_blocks(router) == total)
    assert len(router.answers[1, 1]) < 200
    await router.drop(1)  # a second drop of the same request has no effect
    await router.drop(77, 5)  # a drop of an unknown request has no effect
    await router.submit(2, PROMPT, greedy(2))
    await router.answer(2)


async def test_end_of_a_stream_frees_its_blocks(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    other = await AttachedRouter(worker.address, "secret").open("other")
    await other.submit(1, PROMPT, greedy(200))
    await other.submit(2, PROMPT[:20], greedy(5), yield_after=1)
    await other.message("yielded", 2)
    await other.until(lambda: other.answers[1, 1])
    await other.close()
    await router.until(lambda: free_blocks(router) == router.welcome.num_blocks)
    assert router.load.leased_blocks == router.load.running == 0


async def test_two_routers_may_use_the_same_request_numbers(
    worker: RunningWorker, router: AttachedRouter, reference: Reference
) -> None:
    other = await AttachedRouter(worker.address, "secret").open("other")
    await router.submit(1, PROMPT, greedy(10))
    await other.submit(1, PROMPT[:9], greedy(12))
    assert await other.answer(1) == await reference(PROMPT[:9], 12)
    assert await router.answer(1) == await reference(PROMPT, 10)
    await other.close()


async def test_reconnect_closes_the_old_stream_and_drops_its_requests(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    await router.submit(1, PROMPT, greedy(200))
    await router.until(lambda: router.answers[1, 1])
    again = await AttachedRouter(worker.address, "secret").open()
    error = await router.until_closed()
    assert error.code() is grpc.StatusCode.ABORTED
    await again.until(lambda: again.load.running == 0)
    await again.submit(1, PROMPT, greedy(3))
    assert len(await again.answer(1)) == 3
    await again.close()


async def test_later_attempt_replaces_the_earlier_one(
    router: AttachedRouter, reference: Reference
) -> None:
    await router.submit(1, PROMPT, greedy(200))
    await router.until(lambda: router.answers[1, 1])
    await router.submit(1, PROMPT, greedy(8), attempt=2)
    assert await router.answer(1, 2) == await reference(PROMPT, 8)
    await router.until(lambda: router.load.running == 0)
    assert (1, 1) not in router.finishes


async def test_lease_is_kept_after_a_later_attempt_until_it_is_dropped(
    router: AttachedRouter, reference: Reference
) -> None:
    await router.submit(1, PROMPT, greedy(10), yield_after=1)
    yielded = await router.message("yielded", 1)
    assert yielded.kv_len == len(PROMPT)
    await router.until(lambda: router.load.leased_blocks == 3)
    log = [wire.ChoiceLog(choice=0, tokens=pack_tokens(router.answers[1, 1]))]
    await router.submit(1, PROMPT, greedy(10), log=log, attempt=2)
    await router.answer(1, 2)
    assert router.answers[1, 1] + router.answers[1, 2] == await reference(PROMPT, 10)
    await router.drop(1)
    await router.until(lambda: free_blocks(router) == router.welcome.num_blocks)


async def test_running_request_yields_on_request_of_the_router(
    router: AttachedRouter, reference: Reference
) -> None:
    await router.submit(1, PROMPT, greedy(200))
    await router.until(lambda: len(router.answers[1, 1]) > 2)
    command: dict[str, Any] = {"yield": wire.Yield(request=1, attempt=1)}
    await router.send(**command)
    yielded = await router.message("yielded", 1)
    answer = router.answers[1, 1]
    assert yielded.kv_len == len(PROMPT) + len(answer) - 1
    assert answer == (await reference(PROMPT, 200))[: len(answer)]
    await router.drop(1)
    await router.until(lambda: free_blocks(router) == router.welcome.num_blocks)


async def test_allowed_tokens_and_bad_words(router: AttachedRouter, reference: Reference) -> None:
    whole = await reference(PROMPT, 20)
    word = wire.BadWord(tokens=whole[2:5])
    await router.submit(1, PROMPT, greedy(20, bad_words=[word]))
    await router.submit(2, PROMPT, greedy(20, allowed_tokens=[whole[0], 7, 9]))
    answer = await router.answer(1)
    assert answer[:4] == whole[:4]
    assert answer[4] != whole[4]
    others = await router.answer(2)
    assert others[0] == whole[0]
    assert set(others) <= {whole[0], 7, 9}


async def test_choices_stream_in_parallel_and_one_can_be_dropped(
    router: AttachedRouter, reference: Reference
) -> None:
    await router.submit(1, PROMPT, greedy(40, n=3))
    await router.until(lambda: len(router.answers[1, 1, 1]) > 2)
    await router.send(drop=wire.Drop(request=1, attempt=1, choice=1))
    await router.until(lambda: {(1, 1), (1, 1, 2)} <= router.finishes.keys())
    expected = await reference(PROMPT, 40)
    assert router.answers[1, 1] == router.answers[1, 1, 2] == expected
    assert router.answers[1, 1, 1] == expected[: len(router.answers[1, 1, 1])]
    await router.until(lambda: free_blocks(router) == router.welcome.num_blocks)


async def test_choices_continue_from_their_token_logs(
    router: AttachedRouter, reference: Reference
) -> None:
    expected = await reference(PROMPT, 20)
    log = [
        wire.ChoiceLog(choice=0, tokens=pack_tokens(expected[:7])),
        wire.ChoiceLog(choice=1, tokens=pack_tokens(expected[:3]), finished=True),
        wire.ChoiceLog(choice=2, tokens=pack_tokens(expected[:12])),
    ]
    await router.submit(1, PROMPT, greedy(20, n=3), log=log, attempt=2)
    await router.until(lambda: {(1, 2), (1, 2, 2)} <= router.finishes.keys())
    assert router.answers[1, 2] == expected[7:]
    assert router.answers[1, 2, 2] == expected[12:]
    assert not router.answers[1, 2, 1]


async def test_request_with_no_allowed_token_left_ends_without_affecting_others(
    router: AttachedRouter, reference: Reference
) -> None:
    strict = greedy(9, allowed_tokens=[7], bad_words=[wire.BadWord(tokens=[7, 7])])
    await router.submit(1, PROMPT, greedy(30))
    await router.submit(2, PROMPT, strict)
    assert await router.answer(1) == await reference(PROMPT, 30)

    def ended() -> list[tuple[int, str]]:
        steps = [message.step for message in router.received if message.HasField("step")]
        return [(entry.request, entry.reason) for step in steps for entry in step.ended]

    await router.until(ended)
    ((number, reason),) = ended()
    assert (number, router.answers[2, 1]) == (2, [7])
    assert "structured_outputs left nothing to draw" in reason


async def test_beam_search_is_sent_in_one_step_at_its_end(router: AttachedRouter) -> None:
    await router.submit(1, PROMPT, search_params(3, 20, n=2, length_penalty=1.0))
    await router.submit(2, PROMPT, search_params(3, 20, n=2, length_penalty=1.0), attempt=4)
    await router.drop(2, 4)
    await router.submit(3, PROMPT, greedy(40))
    await router.answer(1)
    steps = [message.step for message in router.received if 1 in message.step.request]
    assert [list(step.request) for step in steps] == [[1] * 40]
    assert list(steps[0].choice) == [0] * 20 + [1] * 20
    assert list(steps[0].position) == 2 * list(range(20))
    assert router.answers[1, 1] != router.answers[1, 1, 1]
    await router.answer(3)
    assert (2, 4) not in router.answers
    assert free_blocks(router) == router.welcome.num_blocks


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [VOCAB_SIZE]}, "the prompt contains the token id"),
        ({"prompt": [5] * 300}, "256"),
        ({"params": greedy(0)}, "max_tokens"),
        ({"params": greedy(5, n=300)}, "n must be a whole number from 1 to 256"),
        ({"params": greedy(5, n=9)}, "9 choices"),
        ({"params": greedy(5, temperature=-1.0)}, "temperature"),
        ({"params": greedy(5, temperature=float("nan"))}, "temperature"),
        ({"params": greedy(5, top_p=0.0)}, "top_p"),
        ({"params": greedy(5, top_p=1.5)}, "top_p"),
        ({"params": greedy(5, min_p=-0.5)}, "min_p"),
        ({"params": greedy(5, presence_penalty=float("inf"))}, "presence_penalty"),
        ({"params": greedy(5, repetition_penalty=0.0)}, "repetition_penalty"),
        ({"params": greedy(5, logprobs=1000)}, "logprobs"),
        ({"params": greedy(5, stop_tokens=[VOCAB_SIZE])}, "stop_token_ids"),
        ({"params": greedy(5, logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),
        ({"params": greedy(5, logit_bias={3: float("nan")})}, "logit_bias"),
        ({"params": greedy(5, typical_p=1.5)}, "typical_p"),
        ({"params": greedy(5, allowed_tokens=[VOCAB_SIZE])}, "allowed_token_ids"),
        ({"params": greedy(5, bad_words=[wire.BadWord(tokens=[VOCAB_SIZE])])}, "bad_words"),
        ({"params": greedy(5, bad_words=[wire.BadWord()])}, "a word of 0 tokens; 1 to 128"),
        (
            {"params": greedy(5, bad_words=[wire.BadWord(tokens=[3])] * 1025)},
            "at most 1024 token sequences",
        ),
        (
            {"log": [wire.ChoiceLog(choice=0, tokens=pack_tokens([3] * 5))]},
            "answer so far has 5 tokens",
        ),
        ({"log": [wire.ChoiceLog(choice=0, tokens=pack_tokens([VOCAB_SIZE]))]}, "answer so far"),
        ({"log": [wire.ChoiceLog(choice=0, tokens=b"12345")]}, "has 5 bytes: expected a multiple"),
        (
            {"log": [wire.ChoiceLog(choice=1, tokens=pack_tokens([3]))]},
            "has choice 1: expected 0 to 0",
        ),
        ({"log": [wire.ChoiceLog(choice=0, finished=True)]}, "finished"),
        ({"salt": b"x" * 1000}, "salt"),
        ({"params": search_params(1)}, "best_of must be a whole number|best_of from 2 to 256"),
        ({"params": search_params(10**9)}, "best_of must be a whole number from 1 to 256"),
        ({"params": search_params(9)}, "9 choices, .* at most 8"),
        ({"params": search_params(4, n=5)}, "best_of must be a whole number from 5 to 256"),
        ({"params": search_params(4, max_tokens=5000, n=4)}, "16384 tokens in all"),
        (
            {"params": search_params(4, length_penalty=float("nan"))},
            "number from -5 to 5",
        ),
        ({"params": search_params(4, length_penalty=5.5)}, "length_penalty must be"),
        ({"params": search_params(4, early_stopping=7)}, "early_stopping must be"),
        (
            {"params": search_params(2), "log": [wire.ChoiceLog(tokens=pack_tokens([3]))]},
            "cannot continue an answer",
        ),
    ],
)
async def test_request_that_can_never_run_is_rejected_with_a_reason(
    router: AttachedRouter, submit: dict[str, Any], reason: str
) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "params": greedy(5), **submit}
    await router.submit(1, **given)
    rejected = await router.message("rejected", 1)
    assert rejected.never
    assert re.search(reason, rejected.reason)
    await router.submit(2, PROMPT, greedy(2))
    assert len(await router.answer(2)) == 2


async def test_repeated_attempt_is_rejected(router: AttachedRouter) -> None:
    await router.submit(1, PROMPT, greedy(100))
    await router.submit(1, PROMPT, greedy(100))
    assert "already" in (await router.message("rejected", 1)).reason
    await router.until(lambda: (1, 1) in router.finishes)
    assert len(router.answers[1, 1]) == 100


async def test_full_queue_rejects_temporarily(router: AttachedRouter) -> None:
    for request in range(40):
        await router.submit(request, PROMPT, greedy(200))
    rejected = await router.message("rejected")
    assert not rejected.never
    for request in range(40):
        await router.drop(request)
    await router.until(lambda: free_blocks(router) == router.welcome.num_blocks)


async def test_draining_worker_notifies_routers_and_rejects_new_requests(checkpoint: Path) -> None:
    running = await serve_worker(WorkerConfig("w1", checkpoint, kv_cache_mib=1))
    attached = await AttachedRouter(running.address).open()
    await attached.submit(1, PROMPT, greedy(50))
    await attached.until(lambda: attached.answers[1, 1])
    draining = asyncio.create_task(running.drain(60))
    await attached.message("draining")
    await attached.submit(2, PROMPT, greedy(50))
    rejected = await attached.message("rejected", 2)
    assert not rejected.never
    assert "draining" in rejected.reason
    assert len(await attached.answer(1)) == 50
    await draining
    await attached.close()
    await running.stop()


# ------------------------------------------------------------------ the worker itself


async def test_port_in_use_is_a_clear_error(worker: RunningWorker, checkpoint: Path) -> None:
    port = int(worker.address.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: the port is taken"):
        await serve_worker(WorkerConfig("w1", checkpoint, port=port))


async def test_engine_failure_closes_streams_and_ends_the_worker(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await serve_worker(WorkerConfig("w1", checkpoint, kv_cache_mib=1))
    attached = await AttachedRouter(running.address).open()

    def broken(runner: ModelRunner, plan: StepPlan, **options: object) -> None:
        raise MemoryError("out of everything")

    monkeypatch.setattr(ModelRunner, "run", broken)
    await attached.submit(1, PROMPT, greedy(5))
    error = await attached.until_closed()
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "out of everything" in error.details()
    with pytest.raises(RuntimeError, match="out of everything"):
        await running.wait()
    await attached.close()
