"""The gRPC API, used through server reflection and through the generated stubs."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.protos.worker_codec import num_prompt_tokens, unpack_tokens
from penstock.router.api import grpc as router_grpc
from penstock.router.api import grpc_codec
from penstock.router.config import RouterConfig
from penstock.router.requests.response_stream import ResponseStream
from penstock.router.requests.slices import Slices
from tests.support.api_keys import EVERY_ROLE, METRICS, user_keys
from tests.support.openai_errors import check_text
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
SENTENCE = "the lazy dog, naïve 😀"
SERVICE = "penstock.v1.Inference"


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
def sentence_served(shared_served: Served) -> Served:
    shared_served.worker.answer = lambda prompt: tokens_of(SENTENCE)
    shared_served.worker.submits.clear()
    return shared_served


@pytest_asyncio.fixture(loop_scope="module")
async def channel(sentence_served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(sentence_served.router.grpc_address) as channel:
        yield channel


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def generate(channel: grpc.aio.Channel, **request: Any) -> list[pb.GenerateReply]:
    return [reply async for reply in stub_of(channel).Generate(pb.GenerateRequest(**request))]


def chat_by_reflection(address: str) -> tuple[str, int]:
    """Stream a chat, given only the address and the name of the method."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        request_class = message_factory.GetMessageClass(method.input_type)
        reply = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=reply.FromString,
        )
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        replies = list(call(request_class(chat=chat), timeout=30))
        return "".join(each.text for each in replies), replies[-1].usage.completion_tokens


async def test_client_built_from_reflection_can_chat(sentence_served: Served) -> None:
    address = sentence_served.router.grpc_address
    text, num_tokens = await asyncio.to_thread(chat_by_reflection, address)
    assert (text, num_tokens) == (SENTENCE, len(tokens_of(SENTENCE)) + 1)


async def test_every_position_is_delivered_once(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    replies = await generate(channel, text="hi", request_id="mine", echo_prompt_tokens=True)
    tokens = [token for reply in replies for token in reply.tokens]
    assert tokens == [*tokens_of(SENTENCE), 2]
    positions = [reply.position + i for reply in replies for i in range(len(reply.tokens))]
    assert positions == list(range(len(tokens)))
    assert [reply.finish_reason for reply in replies] == [""] * (len(replies) - 1) + ["stop"]
    assert {reply.request_id for reply in replies} == {"mine"}
    submit = sentence_served.worker.submits[0]
    assert {reply.seed for reply in replies} == {submit.params.seed}
    assert replies[0].prompt_tokens == unpack_tokens(submit.prompt)
    assert all(not reply.prompt_tokens for reply in replies[1:])
    assert replies[-1].usage.prompt_tokens == num_prompt_tokens(submit)


async def test_stop_strings_and_logprobs(channel: grpc.aio.Channel) -> None:
    replies = await generate(channel, text="hi", stop=["y d"], sampling=pb.Sampling(logprobs=2))
    assert "".join(reply.text for reply in replies) == "the laz"
    assert replies[-1].stop_reason == "y d"
    logprobs = [entry for reply in replies for entry in reply.logprobs]
    assert len(logprobs) == replies[-1].usage.completion_tokens
    assert all(entry.chosen == -0.25 and len(entry.top) == 2 for entry in logprobs)


async def test_parameters_reach_the_worker(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    sampling = pb.Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=2**64 - 1,
        max_tokens=2,
        min_tokens=1,
        stop_tokens=[9],
        ignore_eos=True,
        n=1,
        logit_bias={5: -1.0},
        typical_p=0.25,
        bad_words=["dog"],
        allowed_tokens=[5, 300],
    )
    await generate(channel, tokens=pb.Tokens(ids=[5, 6]), sampling=sampling)
    params = sentence_served.worker.submits[0].params
    assert unpack_tokens(sentence_served.worker.submits[0].prompt) == [5, 6]
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.5, 3)
    assert (params.seed, params.max_tokens, params.min_tokens) == (2**64 - 1, 2, 1)
    assert (list(params.stop_tokens), params.ignore_eos) == ([9], True)
    assert dict(params.logit_bias) == {5: -1.0}
    assert params.typical_p == 0.25
    assert list(params.bad_words[0].tokens) == tokens_of("dog")
    assert list(params.allowed_tokens) == [5, 300]


STRUCTURED: list[tuple[pb.Sampling, tuple[str, str]]] = [
    (pb.Sampling(json_object=True), ("json_object", "")),
    (pb.Sampling(json_schema='{"type": "object"}'), ("json", '{"type": "object"}')),
    (pb.Sampling(regex="a+"), ("regex", "a+")),
    (pb.Sampling(choice=pb.Choices(texts=["a", "é"])), ("choice", '["a", "é"]')),
    (pb.Sampling(grammar='start: "a"'), ("grammar", 'start: "a"')),
]


@pytest.mark.parametrize(("sampling", "expected"), STRUCTURED)
async def test_wanted_form_reaches_the_worker(
    channel: grpc.aio.Channel,
    sentence_served: Served,
    sampling: pb.Sampling,
    expected: tuple[str, str],
) -> None:
    await generate(channel, text="hi", sampling=sampling)
    wanted = sentence_served.worker.submits[0].params.structured_outputs
    assert (wanted.kind, wanted.text) == expected


async def test_false_json_object_means_any_form(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    await generate(channel, text="hi", sampling=pb.Sampling(json_object=False))
    assert not sentence_served.worker.submits[0].params.HasField("structured_outputs")


async def test_tokenize_and_detokenize(channel: grpc.aio.Channel) -> None:
    stub = stub_of(channel)
    reply = await stub.Tokenize(pb.TokenizeRequest(text=SENTENCE))
    assert list(reply.tokens) == TOKENIZER.encode(SENTENCE).ids
    assert reply.max_model_len == 2048
    bare = await stub.Tokenize(pb.TokenizeRequest(text=SENTENCE, add_special_tokens=False))
    assert list(bare.tokens) == tokens_of(SENTENCE)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    assert (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).tokens[0] == 1
    back = await stub.Detokenize(pb.DetokenizeRequest(tokens=reply.tokens))
    assert back.text == SENTENCE
    shown = await stub.Detokenize(
        pb.DetokenizeRequest(tokens=reply.tokens, keep_special_tokens=True)
    )
    assert shown.text == f"<s>{SENTENCE}"


async def test_models_are_listed(channel: grpc.aio.Channel) -> None:
    stub = stub_of(channel)
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model == await stub.GetModel(pb.GetModelRequest(name="stub"))
    assert (model.name, model.max_model_len, model.has_chat_template) == ("stub", 2048, True)


NAN = math.nan
HI = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "empty"),
    ({"text": ""}, "empty"),
    ({"tokens": pb.Tokens()}, "empty"),
    ({"chat": pb.Chat()}, "'messages' is empty"),
    ({"chat": pb.Chat(messages=[pb.ChatMessage(role="robot", content="x")])}, "role must be one"),
    ({"chat": pb.Chat(messages=[pb.ChatMessage(content="x")])}, "role must be one of"),
    ({"tokens": pb.Tokens(ids=[2**32 - 1])}, "outside the vocabulary"),
    ({"tokens": pb.Tokens(ids=[5] * 5000)}, "maximum context length is 2048"),
    ({"text": "x", "stop": [""]}, "stop string"),
    ({"text": "x", "sampling": pb.Sampling(regex="(a")}, "unclosed group"),
    ({"text": "x", "sampling": pb.Sampling(json_schema='{"not": {}}')}, "at /not: "),
    (
        {"text": "x", "sampling": pb.Sampling(structural_tag="{}")},
        "structural_tag.structures is null",
    ),
    ({"text": "x", "sampling": pb.Sampling(regex="a", ignore_eos=True)}, "ignore_eos"),
    ({"text": "x", "stop": ["a"] * 17}, "17 strings; at most 16"),
    ({"text": "x", "timeout_seconds": -1.0}, "timeout"),
    ({"text": "x", "timeout_seconds": NAN}, "timeout"),
    ({"text": "x", "sampling": pb.Sampling(temperature=NAN)}, "temperature"),
    ({"text": "x", "sampling": pb.Sampling(temperature=-0.1)}, "temperature"),
    ({"text": "x", "sampling": pb.Sampling(top_p=math.inf)}, "top_p"),
    ({"text": "x", "sampling": pb.Sampling(top_k=2**32 - 1)}, "top_k"),
    ({"text": "x", "sampling": pb.Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
    ({"text": "x", "sampling": pb.Sampling(max_tokens=0)}, "max_tokens"),
    ({"text": "x", "sampling": pb.Sampling(max_tokens=2**31)}, "max_tokens"),
    ({"text": "x", "sampling": pb.Sampling(min_tokens=2**31)}, "min_tokens"),
    ({"text": "x", "sampling": pb.Sampling(logprobs=21)}, "logprobs"),
    ({"text": "x", "sampling": pb.Sampling(n=10**9)}, "n must be a whole number from 1 to 64"),
    (
        {"text": "x", "sampling": pb.Sampling(n=3, best_of=2)},
        "best_of must be a whole number from 3",
    ),
    ({"text": "x", "sampling": pb.Sampling(logit_bias={5: NAN})}, "logit_bias"),
    ({"text": "x", "sampling": pb.Sampling(use_beam_search=True)}, "needs n from 2 to 64"),
    (
        {"text": "x", "sampling": pb.Sampling(use_beam_search=True, n=2, best_of=10**9)},
        "best_of must be a whole number from 2 to 64",
    ),
    (
        {"text": "x", "sampling": pb.Sampling(use_beam_search=True, n=2, length_penalty=NAN)},
        "length_penalty must be a number from -5 to 5",
    ),
    (
        {"text": "x", "sampling": pb.Sampling(use_beam_search=True, n=2, seed=7)},
        "leave out seed",
    ),
    ({"text": "x", "sampling": pb.Sampling(length_penalty=2.0)}, "set use_beam_search"),
    ({"text": "x", "sampling": pb.Sampling(early_stopping=cast(Any, 7))}, "early_stopping"),
    ({"text": "x", "sampling": pb.Sampling(stop_tokens=[2**31])}, "stop_token_ids"),
    ({"text": "x", "sampling": pb.Sampling(typical_p=0.0)}, "typical_p"),
    ({"text": "x", "sampling": pb.Sampling(bad_words=["x"] * 65)}, "65 words; at most 64"),
    ({"text": "x", "sampling": pb.Sampling(bad_words=[""])}, "1 to 256 characters"),
    ({"text": "x", "sampling": pb.Sampling(allowed_tokens=[2**31])}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("request_", "words"), INVALID)
async def test_invalid_request_is_refused_with_a_reason(
    channel: grpc.aio.Channel, sentence_served: Served, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await generate(channel, **request_)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = refusal.value.details() or ""
    assert words in details
    check_text(details)
    assert sentence_served.worker.submits == []


@pytest.mark.parametrize("seconds", [NAN, math.inf, -1.0])
async def test_invalid_timeout_is_refused_although_the_call_has_a_deadline(
    channel: grpc.aio.Channel, seconds: float
) -> None:
    request = pb.GenerateRequest(text="x", timeout_seconds=seconds)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub_of(channel).Generate(request, timeout=60).read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_model_is_not_found(channel: grpc.aio.Channel) -> None:
    stub = stub_of(channel)
    calls = [
        stub.Generate(pb.GenerateRequest(model="x", text="x")).read(),
        stub.Tokenize(pb.TokenizeRequest(model="x", text="x")),
        stub.Detokenize(pb.DetokenizeRequest(model="x")),
        stub.GetModel(pb.GetModelRequest(name="x")),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_invalid_tokenize_and_detokenize_requests_are_refused(
    channel: grpc.aio.Channel,
) -> None:
    stub = stub_of(channel)
    calls = [
        stub.Tokenize(pb.TokenizeRequest()),
        stub.Detokenize(pb.DetokenizeRequest(tokens=[2**31])),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModel"])
async def test_malformed_message_is_refused(channel: grpc.aio.Channel, method: str) -> None:
    call = channel.unary_stream(f"/{SERVICE}/{method}")
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call(b"\xff\xff\xff\xff garbage").read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid penstock.v1." in (refusal.value.details() or "")


async def test_too_large_message_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await generate(channel, text="x" * (5 << 20))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_deadline_ends_the_call_and_the_work_on_the_worker(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    sentence_served.worker.stepping.clear()
    try:
        for request, timeout in (
            (pb.GenerateRequest(text="x", timeout_seconds=0.1), None),
            (pb.GenerateRequest(text="x"), 0.1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub_of(channel).Generate(request, timeout=timeout).read()
            assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not sentence_served.worker.runs)
    finally:
        sentence_served.worker.stepping.set()


async def test_api_key_is_required_except_for_health(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))
    methods = [f"/{SERVICE}/{m}" for m in ("Generate", "Tokenize", "Detokenize", "ListModels")]
    methods += [f"/{SERVICE}/GetModel", "/nobody.knows/It"]
    methods += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
    async with (
        serving(keyed, StubWorker()) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        for method in methods:
            for metadata in ([], [("authorization", "Bearer another")]):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await channel.unary_stream(method)(b"", metadata=metadata).read()
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
            metadata = [("authorization", f"Bearer {METRICS}")]
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_stream(method)(b"", metadata=metadata).read()
            assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        metadata = [("authorization", "Bearer a-key")]
        models = await stub_of(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
        assert models.models[0].name == "stub"
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        )
        names = {each.name for each in (await reflected.read()).list_services_response.service}
        assert names >= {SERVICE, "grpc.health.v1.Health"}


async def test_health_follows_the_workers(config: RouterConfig) -> None:
    async with (
        serving(config) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with StubWorker() as worker:
            await served.router.set_workers({worker.name: worker.address})
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_prompt_logprobs_are_sent_before_the_answer(
    channel: grpc.aio.Channel, sentence_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router.api.grpc_codec.PROMPT_TOKENS_PER_REPLY", 3)
    prompt = [9, 40, 30, 20, 10, 11]
    replies = await generate(
        channel,
        tokens=pb.Tokens(ids=prompt),
        sampling=pb.Sampling(prompt_logprobs=2, max_tokens=4, n=2),
    )
    scored = [list(reply.prompt_logprobs) for reply in replies]
    assert list(map(len, scored[:3])) == [3, 2, 0]
    assert not any(reply.tokens for reply in replies[:2])
    entries = scored[0] + scored[1]
    assert [entry.chosen for entry in entries] == [-token / 8 for token in prompt[1:]]
    assert [(entry.rank, len(entry.top)) for entry in entries] == [(3, 3)] * 5
    assert {reply.choice for reply in replies[2:]} == {0, 1}
    assert [reply.HasField("usage") for reply in replies].count(True) == 1


async def test_prompt_logprobs_are_freed_in_parts_at_the_end_of_a_call(
    channel: grpc.aio.Channel, sentence_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router.requests.response_stream.LOGPROBS_PER_SLICE", 2)
    left: list[int] = []
    original = ResponseStream.free_prompt_logprobs

    def free(stream: ResponseStream, max_tokens: int) -> bool:
        has_more = original(stream, max_tokens)
        left.append(sum(map(len, stream.prompt_logprobs.values())))
        return has_more

    monkeypatch.setattr(ResponseStream, "free_prompt_logprobs", free)
    await generate(
        channel,
        tokens=pb.Tokens(ids=[9, 40, 30, 20, 10, 11]),
        sampling=pb.Sampling(prompt_logprobs=2, max_tokens=4),
    )
    await until(lambda: left == [3, 1, 0])


async def test_long_list_of_allowed_tokens_is_read_and_checked_in_slices(
    channel: grpc.aio.Channel, sentence_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    class Recorder(Slices):
        async def pause(self) -> None:
            steps.append("pause")
            await super().pause()

    def recorded(name: str) -> None:
        original = getattr(router_grpc, name)

        def call(*given: Any) -> Any:
            steps.append(name)
            return original(*given)

        monkeypatch.setattr(router_grpc, name, call)

    recorded("sampling_params")
    recorded("check_least_cost")
    monkeypatch.setattr(router_grpc, "Slices", Recorder)
    monkeypatch.setattr(grpc_codec, "Slices", Recorder)
    monkeypatch.setattr(grpc_codec, "TOKENS_PER_SLICE", 2)
    await generate(channel, text="x", sampling=pb.Sampling(max_tokens=1, allowed_tokens=[5, 6, 7]))
    assert steps[:6] == ["sampling_params", *["pause"] * 3, "check_least_cost", "pause"]
