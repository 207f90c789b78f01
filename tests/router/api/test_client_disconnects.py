"""Clients that disconnect or read slowly, and requests that cannot complete."""

import asyncio
import gc
import json
import socket
from dataclasses import replace

import grpc
import grpc.aio
import httpx
import pytest

from penstock.protos import inference_pb2, inference_pb2_grpc, worker_pb2
from penstock.router.config import RouterConfig
from penstock.router.requests.response_stream import ResponseStream
from tests.support.openai_errors import check_form, check_text
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker

LONG = {"prompt": "hi", "max_tokens": 2000}


async def until_dropped(served: Served) -> None:
    """Wait until neither the router nor the worker has a request."""
    await until(lambda: served.worker.drops and not served.worker.runs)
    assert served.router.frontend.num_open_requests == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_running", [True, False])
async def test_request_is_dropped_when_its_http_client_disconnects(
    config: RouterConfig, stream: bool, is_running: bool
) -> None:
    worker = StubWorker(step_seconds=0.002)
    async with serving(config, worker) as served:
        if not is_running:
            worker.stepping.clear()
        host, port = served.router.http_address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({**LONG, "stream": stream}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: worker.runs)
        if is_running:
            await until(lambda: next(iter(worker.runs.values())).num_new > 3)
        writer.transport.abort()
        await until_dropped(served)


@pytest.mark.parametrize("stream", [True, False])
async def test_idle_connection_does_not_keep_the_call_before(
    config: RouterConfig, stream: bool
) -> None:
    def streams() -> int:
        gc.collect()
        return sum(type(each) is ResponseStream for each in gc.get_objects())

    async with serving(config, StubWorker()) as served:
        before = streams()
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            body = {"prompt": "hi", "max_tokens": 3, "stream": stream}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            await until(lambda: streams() == before)


@pytest.mark.parametrize("in_one_piece", [True, False])
async def test_request_is_dropped_although_another_is_pipelined_behind_it(
    config: RouterConfig, in_one_piece: bool
) -> None:
    worker = StubWorker(step_seconds=0.002)
    async with serving(config, worker) as served:
        host, port = served.router.http_address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(LONG).encode()
        first = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        second = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(first + second if in_one_piece else first)
        await until(lambda: worker.runs)
        if not in_one_piece:
            writer.write(second)
            await until(lambda: next(iter(worker.runs.values())).num_new > 30)
        writer.transport.abort()
        await until_dropped(served)


async def test_call_of_many_prompts_is_cancelled_in_short_callbacks(served: Served) -> None:
    """The fixture `callback_times` fails the test if a callback takes too long."""
    served.worker.stepping.clear()
    body = {"prompt": ["hi"] * 1000, "max_tokens": 500, "stream": True}
    frontend = served.router.frontend
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: frontend.num_open_requests == 1000)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: frontend.num_open_requests == 0)
    await until(lambda: not served.worker.runs)
    assert frontend.metrics.finished["cancelled"] == 1000


async def test_request_is_dropped_when_its_grpc_client_disconnects(config: RouterConfig) -> None:
    worker = StubWorker(step_seconds=0.002)
    async with serving(config, worker) as served:
        channel = grpc.aio.insecure_channel(served.router.grpc_address)
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        assert (await call.read()).position == 0
        call.cancel()
        await until_dropped(served)

        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        await call.read()
        worker.drops.clear()
        await channel.close()
        await until_dropped(served)


@pytest.mark.parametrize(
    "wanted", [{"logprobs": 20, "return_token_ids": True}, {"n": 8}], ids=["long events", "text"]
)
async def test_only_the_request_of_a_slow_reader_ends(
    config: RouterConfig, wanted: dict[str, object]
) -> None:
    bounds = replace(config.bounds, max_unread_tokens=50)
    slow = {**LONG, "stream": True, **wanted}
    async with serving(replace(config, bounds=bounds), StubWorker()) as served:
        host, port = served.router.http_address.rsplit(":", 1)
        # The client has a small buffer and reads nothing, so the server's writes soon block.
        client_socket = socket.socket()
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client_socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client_socket, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client_socket, limit=1024)
        body = json.dumps(slow).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until_dropped(served)
        async with httpx.AsyncClient(base_url=served.url) as http:
            other = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
            assert other.status_code == 200
        text = b""
        while b"[DONE]" not in text:
            chunk = await asyncio.wait_for(reader.read(1 << 16), 20)
            assert chunk
            text += chunk
        assert b"tokens were unread" in text
        writer.close()


async def test_no_worker_means_unavailable_at_the_deadline(config: RouterConfig) -> None:
    async with (
        serving(replace(config, timeout=0.2)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        response = await http.post("/v1/completions", json=LONG)
        assert response.status_code == 503
        check_form(response)


async def test_a_deadline_before_the_first_token_is_504(config: RouterConfig) -> None:
    async with (
        serving(replace(config, timeout=0.2), StubWorker()) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        served.worker.stepping.clear()
        response = await http.post("/v1/completions", json={**LONG, "stream": True})
        assert response.status_code == 504
        check_form(response)
        await until_dropped(served)


@pytest.mark.slow
async def test_deadline_in_mid_stream_is_reported_in_the_stream(config: RouterConfig) -> None:
    worker = StubWorker(step_seconds=0.01)
    async with (
        serving(replace(config, timeout=2.0), worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        response = await http.post("/v1/completions", json={**LONG, "stream": True})
        assert response.status_code == 200
        events = response.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == 504


async def test_full_queue_refuses_with_a_retry_time(config: RouterConfig) -> None:
    async with (
        serving(replace(config, max_queued_requests=1)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(http.post("/v1/completions", json=LONG))
        await until(lambda: served.router.frontend.num_open_requests == 1)
        response = await http.post("/v1/completions", json=LONG)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        check_form(response)
        channel = grpc.aio.insecure_channel(served.router.grpc_address)
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Generate(inference_pb2.GenerateRequest(text="hi")).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(refusal.value.trailing_metadata())
        assert int(trailing["grpc-retry-pushback-ms"]) >= 1000
        await channel.close()
        first.cancel()


async def test_request_that_can_never_fit_is_a_client_error(config: RouterConfig) -> None:
    worker = StubWorker()
    worker.reject = worker_pb2.Rejected(reason="it needs 9 blocks and there are 4", never=True)
    async with (
        serving(config, worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        response = await http.post("/v1/completions", json=LONG)
        assert response.status_code == 400
        assert "9 blocks" in check_form(response)["message"]


def fail_with_a_traceback(worker: StubWorker) -> None:
    """End the worker's only request with an error that contains a path, address and pointer."""
    trace = 'Traceback: File "/srv/penstock/engine.py", line 7\nValueError at 0x7f00 of 10.0.0.3:55'
    step = worker_pb2.Step()
    (submit,) = worker.submits
    step.ended.add(request=submit.request, attempt=submit.attempt, reason=trace)
    worker.send(worker_pb2.ToRouter(step=step))


async def test_error_text_of_a_worker_is_not_shown_to_clients(config: RouterConfig) -> None:
    worker = StubWorker()
    async with (
        serving(config, worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
        asyncio.TaskGroup() as group,
    ):
        worker.stepping.clear()
        sending = group.create_task(http.post("/v1/completions", json=LONG))
        await until(lambda: worker.submits)
        fail_with_a_traceback(worker)
        response = await sending
        assert response.status_code == 500
        check_form(response)


async def test_error_text_of_a_worker_is_not_shown_to_grpc_clients(config: RouterConfig) -> None:
    worker = StubWorker()
    async with (
        serving(config, worker) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        worker.stepping.clear()
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        await until(lambda: worker.submits)
        fail_with_a_traceback(worker)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        check_text(failure.value.details())
