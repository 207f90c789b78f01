"""Requests for a model that is served under several names."""

from dataclasses import replace

import grpc.aio
import openai
import pytest

from penstock.protos import inference_pb2 as grpc_pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, serving_with_client

pytestmark = pytest.mark.asyncio


async def test_each_name_is_listed_and_served(config: RouterConfig) -> None:
    named = replace(config, aliases=("gpt-4o", "org/model", "stub"))
    async with serving_with_client(named) as (served, client):
        names = ["stub", "gpt-4o", "org/model"]
        assert [model.id for model in (await client.models.list()).data] == names
        for name in names:
            assert (await client.models.retrieve(name)).id == name
            answer = await client.chat.completions.create(model=name, messages=HELLO, max_tokens=1)
            assert answer.model == "stub"  # answers report the first name, as in vLLM
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=HELLO)
        async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            listed = await stub.ListModels(grpc_pb.ListModelsRequest())
            assert [model.name for model in listed.models] == names
            card = await stub.GetModel(grpc_pb.GetModelRequest(name="gpt-4o"))
            assert card.name == "gpt-4o"
            request = grpc_pb.GenerateRequest(text="x", model="gpt-4o")
            request.sampling.max_tokens = 1
            assert [reply async for reply in stub.Generate(request)]
