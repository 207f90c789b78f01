"""Adapter for a whole Penstock cluster: `penstock serve` with one mixed worker, over gRPC."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

import penstock
from penstock.loadtests.micro.server import serving
from penstock.protos import inference_pb2, inference_pb2_grpc


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Start a cluster and yield `generate` and the description for the report."""
    with asyncio.Runner() as runner:
        server = serving(_arguments(options))
        running = runner.run(server.__aenter__())
        try:
            channel = runner.run(_channel(running.grpc_address))

            def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
                return runner.run(_all(channel, prompts, output_len))

            yield (
                generate,
                {
                    "version": penstock.__version__,
                    "weights": "fp32",
                    "kv": _kv(options),
                    "pools": "one mixed worker",
                    "client": "gRPC, in a separate process on the same cores",
                },
            )
        finally:
            runner.run(server.__aexit__(None, None, None))


def _arguments(options: dict[str, Any]) -> list[str]:
    return [
        options["model"],
        *("--mixed", "1", "--threads", str(options["threads"])),
        *("--max-sequences", str(options["num_requests"])),
        *("--max-model-len", str(options["max_model_len"])),
        *("--kv-cache-mib", str(1024 * options["kv_gib"])),
        *("--dtype", "float32"),
        *("--kv-cache-dtype", options["kv_cache_dtype"]),
    ]


def _kv(options: dict[str, Any]) -> str:
    chosen = str(options["kv_cache_dtype"])
    return "float32" if chosen == "auto" else chosen  # auto: the dtype of the weights


async def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


async def _all(
    channel: grpc.aio.Channel, prompts: list[list[int]], output_len: int
) -> list[list[int]]:
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    return list(await asyncio.gather(*(_one(stub, prompt, output_len) for prompt in prompts)))


async def _one(
    stub: inference_pb2_grpc.InferenceStub, prompt: list[int], output_len: int
) -> list[int]:
    sampling = inference_pb2.Sampling(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.Tokens(ids=prompt), sampling=sampling
    )
    tokens: list[int] = []
    async for reply in stub.Generate(request):
        tokens += reply.tokens
    return tokens
