"""Beam search through both APIs: a router, a prefill and two decode workers in one event loop."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import torch

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from penstock.router.server import RunningRouter, serve_router
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.served_router import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5 + (7 * i) % 290 for i in range(60)]
STOPS = list(range(2, VOCAB_SIZE, 11))
EOS = 1


@dataclass
class Cluster:
    router: RunningRouter
    workers: dict[str, RunningWorker]
    reference: Any

    def expected(
        self, prompt: Sequence[int], width: int, n: int, stops: Sequence[int], **options: Any
    ) -> list[list[int]]:
        stop_ids = [*stops, EOS]
        found = self.reference.generate(
            torch.tensor([list(prompt)]),
            num_beams=width,
            num_return_sequences=n,
            eos_token_id=stop_ids,
            pad_token_id=EOS,
            do_sample=False,
            **options,
        )
        answers = [row[len(prompt) :] for row in found.tolist()]
        cuts = [[at + 1 for at, token in enumerate(one) if token in stop_ids] for one in answers]
        return [one[: cut[0]] if cut else one for one, cut in zip(answers, cuts, strict=True)]

    async def wait_until_idle(self) -> None:
        """Wait until no block, lease or request is held."""

        def is_idle() -> bool:
            loads = [worker._manager.load for worker in self.workers.values()]
            held = [load.used_blocks + load.leased_blocks + load.reserved_blocks for load in loads]
            return not any(held) and not self.router.frontend.num_open_requests

        await until(is_idle)


async def serve(name: str, role: str, folder: Path, **other: Any) -> RunningWorker:
    sizes = {"kv_cache_mib": 2, "max_sequences": 12, **other}
    return await serve_worker(WorkerConfig(name, folder, role=role, **sizes))


async def stop(workers: Mapping[str, RunningWorker], name: str) -> None:
    """Stop the worker that currently has this name; a test may have replaced the first one."""
    await workers[name].stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("model")
    reference = make_checkpoint(folder, "llama3")
    async with AsyncExitStack() as stack:
        workers: dict[str, RunningWorker] = {}
        for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
            workers[name] = await serve(name, role, folder)
            stack.push_async_callback(partial(stop, workers, name))
        router = await serve_router(RouterConfig(folder, "m", http_port=0, grpc_port=0))
        stack.push_async_callback(router.stop)
        await router.set_workers({name: worker.address for name, worker in workers.items()})
        await until(lambda: len(router.frontend.workers()) == 3)
        yield Cluster(router, workers, reference)


@pytest_asyncio.fixture(loop_scope="module")
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://{cluster.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    """Run a beam search and return its choices."""
    request = {"use_beam_search": True, "return_token_ids": True, "temperature": 0, **body}
    response = await http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    choices: list[Any] = response.json()["choices"]
    return choices


@pytest.mark.parametrize("length", [1, 16, 17, 41])
async def test_openai_completions_equal_transformers(
    http: httpx.AsyncClient, cluster: Cluster, length: int
) -> None:
    prompt = PROMPT[:length]
    sent = cluster.workers["p"]._manager.load.bytes_sent
    choices = await complete(
        http, prompt=prompt, n=2, best_of=4, max_tokens=20, stop_token_ids=STOPS, length_penalty=0.6
    )
    expected = cluster.expected(prompt, 4, 2, STOPS, max_new_tokens=20, length_penalty=0.6)
    assert [choice["token_ids"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        by_stop = choice["token_ids"][-1] in (*STOPS, EOS)
        assert choice["finish_reason"] == ("stop" if by_stop else "length")
        assert choice["logprobs"] is None
    # If the prompt has one token, a search yields no KV, so nothing is transferred.
    await until(lambda: (cluster.workers["p"]._manager.load.bytes_sent > sent) == (length > 1))
    await cluster.wait_until_idle()


async def test_openai_chat_equals_transformers_and_has_logprobs(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    body = {
        "messages": [{"role": "user", "content": "the wheel"}],
        **{"use_beam_search": True, "n": 3, "early_stopping": "never", "max_tokens": 12},
        **{"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    options = {"max_new_tokens": 12, "early_stopping": "never"}
    expected = cluster.expected(answer["prompt_token_ids"], 3, 3, (), **options)
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    totals = []
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == len(choice["token_ids"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        totals.append(sum(entry["logprob"] for entry in content) / len(content))
    assert totals == sorted(totals, reverse=True)
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))


async def test_grpc_answers_equal_transformers(cluster: Cluster) -> None:
    sampling = pb.Sampling(
        use_beam_search=True,
        n=2,
        best_of=3,
        max_tokens=15,
        min_tokens=4,
        prompt_logprobs=0,
        length_penalty=-0.5,
        early_stopping=pb.EARLY_STOPPING_TRUE,
        stop_tokens=STOPS,
    )
    request = pb.GenerateRequest(tokens=pb.Tokens(ids=PROMPT[:30]), sampling=sampling)
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        replies = [reply async for reply in stub.Generate(request)]
    assert len(replies[0].prompt_logprobs) == 29
    options = {"max_new_tokens": 15, "min_new_tokens": 4, "length_penalty": -0.5}
    expected = cluster.expected(PROMPT[:30], 3, 2, STOPS, early_stopping=True, **options)
    assert [list(reply.tokens) for reply in replies[1:]] == expected
    assert [reply.choice for reply in replies[1:]] == [0, 1]
    assert replies[-1].usage.completion_tokens == sum(map(len, expected))
    await cluster.wait_until_idle()


async def test_search_is_complete_after_the_loss_of_its_worker(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    prompt, folder = PROMPT[:37], cluster.router.frontend.config.model
    call = asyncio.create_task(complete(http, prompt=prompt, n=4, max_tokens=120))

    def running() -> list[str]:
        loads = {name: worker._manager.load for name, worker in cluster.workers.items()}
        return [
            name
            for name, load in loads.items()
            if name != "p" and load.running == 4 and load.used_blocks > 10
        ]

    await until(running)
    (name,) = running()
    await cluster.workers[name].stop()
    assert not call.done()
    choices = await call
    expected = cluster.expected(prompt, 4, 4, (), max_new_tokens=120)
    assert [choice["token_ids"] for choice in choices] == expected
    assert cluster.router.frontend.take_snapshot().failovers == 1
    cluster.workers[name] = await serve(name, "decode", folder)
    addresses = {name: worker.address for name, worker in cluster.workers.items()}
    await cluster.router.set_workers(addresses)
    await until(lambda: len(cluster.router.frontend.workers()) == 3)
    await cluster.wait_until_idle()


async def test_disconnect_frees_the_blocks_of_all_beams(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    call = asyncio.create_task(complete(http, prompt=PROMPT[:37], n=4, max_tokens=140))
    loads = [worker._manager for worker in cluster.workers.values()]
    await until(lambda: any(dispatch.load.running == 4 for dispatch in loads))
    call.cancel()
    await cluster.wait_until_idle()


async def test_more_beams_than_rows_are_refused_with_the_limit(http: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT[:5], "use_beam_search": True, "max_tokens": 3}
    response = await http.post("/v1/completions", json={**body, "n": 13})
    assert response.status_code == 400
    assert "at most 12 sequences" in response.json()["error"]["message"]
    response = await http.post("/v1/completions", json={**body, "n": 10**9})
    assert "n must be a whole number from 1 to 64" in response.json()["error"]["message"]
    assert len(await complete(http, **body, n=12)) == 12


async def test_invalid_length_penalties_are_refused(cluster: Cluster) -> None:
    for value in (math.nan, math.inf, -math.inf, 5.1):
        sampling = pb.Sampling(use_beam_search=True, n=2, length_penalty=value)
        request = pb.GenerateRequest(text="the", sampling=sampling)
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "length_penalty must be a number from -5 to 5" in (caught.value.details() or "")
