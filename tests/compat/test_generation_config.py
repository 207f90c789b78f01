"""The model's own sampling defaults: `generation_config.json`, over HTTP and gRPC."""

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from penstock.protos import inference_pb2 as grpc_pb
from penstock.protos import inference_pb2_grpc, worker_pb2
from penstock.protos.worker_codec import num_prompt_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, serving_with_client
from tests.support.served_router import Served, model_folder

pytestmark = pytest.mark.asyncio

DEFAULTS = {
    "temperature": 0.625,
    "top_p": 0.75,
    "top_k": 20,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "max_new_tokens": 12,
    "do_sample": True,
    "eos_token_id": 2,
    "transformers_version": "4.57.0",
}


def config_with(folder: Path, defaults: dict[str, Any], **settings: Any) -> RouterConfig:
    model = model_folder(folder)
    (model / "generation_config.json").write_text(json.dumps(defaults))
    return RouterConfig(model, "stub", **settings)


def values(params: worker_pb2.SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.repetition_penalty,
        params.max_tokens,
    )


async def generate(served: Served, **sampling: Any) -> None:
    """Send a gRPC request and wait for its end."""
    async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
        request = grpc_pb.GenerateRequest(text="hello", sampling=grpc_pb.Sampling(**sampling))
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        async for _ in stub.Generate(request):
            pass


async def test_absent_parameters_get_the_models_defaults(tmp_path: Path) -> None:
    async with serving_with_client(config_with(tmp_path, DEFAULTS)) as (served, client):
        await client.chat.completions.create(model="stub", messages=HELLO)
        await client.completions.create(model="stub", prompt="hello")
        await generate(served)
        expected = (0.625, 0.75, 20, 0.125, 1.25, 12)
        assert [values(submit.params) for submit in served.worker.submits] == [expected] * 3


async def test_given_parameters_override_the_models_defaults(tmp_path: Path) -> None:
    given = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 15}
    more = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    async with serving_with_client(config_with(tmp_path, DEFAULTS)) as (served, client):
        await client.chat.completions.create(model="stub", messages=HELLO, **given, extra_body=more)
        await generate(served, **given, **more)
        expected = (1, 1, 0, 0, 1, 15)
        assert [values(submit.params) for submit in served.worker.submits] == [expected] * 2


async def test_do_sample_false_means_temperature_zero(tmp_path: Path) -> None:
    async with serving_with_client(config_with(tmp_path, {"do_sample": False})) as (served, client):
        await client.chat.completions.create(model="stub", messages=HELLO, max_tokens=1)
        await generate(served, max_tokens=1)
        await client.chat.completions.create(
            model="stub", messages=HELLO, max_tokens=1, temperature=0.5
        )
        temperatures = [submit.params.temperature for submit in served.worker.submits]
        assert temperatures == [0, 0, 0.5]


async def test_completions_default_to_the_smaller_max_tokens(tmp_path: Path) -> None:
    async with serving_with_client(config_with(tmp_path, {"max_new_tokens": 99})) as (
        served,
        client,
    ):
        await client.completions.create(model="stub", prompt="hello")
        await client.chat.completions.create(model="stub", messages=HELLO)
        assert [submit.params.max_tokens for submit in served.worker.submits] == [16, 99]


async def test_beam_search_does_not_get_defaults_of_sampling(tmp_path: Path) -> None:
    async with serving_with_client(config_with(tmp_path, DEFAULTS)) as (served, client):
        await client.chat.completions.create(
            model="stub", messages=HELLO, n=2, extra_body={"use_beam_search": True}
        )
        (submit,) = served.worker.submits
        assert values(submit.params) == (1, 1, 0, 0, 1.25, 12)


async def test_generation_config_none_ignores_the_file(tmp_path: Path) -> None:
    config = config_with(tmp_path, DEFAULTS, generation_config="none")
    async with serving_with_client(config) as (served, client):
        await client.chat.completions.create(model="stub", messages=HELLO, n=1)
        (submit,) = served.worker.submits
        assert values(submit.params)[:5] == (1, 1, 0, 0, 1)
        assert submit.params.max_tokens == 2048 - num_prompt_tokens(submit)
