"""`Generate` with `resume_from` returns the rest of an answer, from any position."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.protos.worker_codec import unpack_tokens
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
SENTENCE = "the lazy dog, naïve 😀 end"
END = 2


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


async def generate(channel: grpc.aio.Channel, **request: Any) -> list[pb.GenerateReply]:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    return [reply async for reply in stub.Generate(pb.GenerateRequest(text="hi", **request))]


def tokens_in(replies: list[pb.GenerateReply], choice: int = 0) -> list[int]:
    return [token for reply in replies if reply.choice == choice for token in reply.tokens]


def text_in(replies: list[pb.GenerateReply]) -> str:
    return "".join(reply.text for reply in replies)


def resume_from(tokens: list[int], finish: str = "", choice: int = 0) -> pb.ResumeState:
    return pb.ResumeState(choice=choice, tokens=tokens, finish_reason=finish)


@pytest.mark.parametrize("stop", [[], ["ve 😀"], ["dog", "zebra"]])
async def test_answer_resumes_at_any_cut(channel: grpc.aio.Channel, stop: list[str]) -> None:
    sampling = pb.Sampling(seed=2**64 - 1, logprobs=1)
    whole = await generate(channel, sampling=sampling, stop=stop)
    assert {reply.seed for reply in whole} == {2**64 - 1}
    tokens = tokens_in(whole)
    # Answers may be resumed only between replies, which may hold several tokens.
    cuts = [reply.position for reply in whole]
    assert len(cuts) > 1
    for cut in cuts:
        rest = await generate(
            channel, sampling=sampling, stop=stop, resume_from=[resume_from(tokens[:cut])]
        )
        assert tokens_in(rest) == tokens[cut:]
        assert rest[0].position == cut
        assert {reply.seed for reply in rest} == {2**64 - 1}
        before = [reply for reply in whole if reply.position < cut]
        assert text_in(before) + text_in(rest) == text_in(whole)
        assert rest[-1].usage == whole[-1].usage
        assert rest[-1].usage.completion_tokens == len(tokens)
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (
            whole[-1].finish_reason,
            whole[-1].stop_reason,
        )
        assert sum(len(reply.logprobs) for reply in rest) == len(tokens) - cut


async def test_worker_receives_all_earlier_tokens_and_unchanged_parameters(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    tokens = tokens_of(SENTENCE)
    sampling = pb.Sampling(seed=7, min_tokens=3, max_tokens=9, presence_penalty=1.0)
    await generate(channel, sampling=sampling, resume_from=[resume_from(tokens[:5])])
    (submit,) = sentence_served.worker.submits
    assert [(entry.choice, unpack_tokens(entry.tokens)) for entry in submit.log] == [
        (0, tokens[:5])
    ]
    assert (submit.params.min_tokens, submit.params.max_tokens, submit.params.seed) == (3, 9, 7)


async def test_each_choice_resumes_at_its_own_position(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    sampling = pb.Sampling(n=3, seed=4)
    whole = await generate(channel, sampling=sampling)
    answers = [tokens_in(whole, choice) for choice in range(3)]
    assert all(answer[-1] == END for answer in answers)
    sentence_served.worker.submits.clear()
    resume_states = [resume_from(answers[2], "stop", 2), resume_from(answers[0][:4])]
    rest = await generate(channel, sampling=sampling, resume_from=resume_states)
    assert tokens_in(rest, 0) == answers[0][4:]
    assert tokens_in(rest, 1) == answers[1]
    (finished,) = (reply for reply in rest if reply.choice == 2)
    assert (finished.position, list(finished.tokens), finished.text) == (len(answers[2]), [], "")
    assert finished.finish_reason == "stop"
    assert rest[-1].usage.completion_tokens == sum(map(len, answers))
    assert [reply.HasField("usage") for reply in rest].count(True) == 1
    (submit,) = sentence_served.worker.submits
    assert [entry.finished for entry in submit.log] == [False, True]


@pytest.mark.parametrize("finish", ["stop", ""])
async def test_finished_choices_are_answered_without_a_worker(
    channel: grpc.aio.Channel, sentence_served: Served, finish: str
) -> None:
    tokens = [*tokens_of(SENTENCE), END]
    resume_states = [resume_from(tokens, finish), resume_from(tokens[:4], choice=1)]
    sampling = pb.Sampling(n=2, seed=1, max_tokens=len(tokens))
    await generate(channel, sampling=sampling, resume_from=resume_states)
    sentence_served.worker.submits.clear()
    resume_states[1] = resume_from(tokens, finish, 1)
    replies = await generate(channel, sampling=sampling, resume_from=resume_states)
    assert [(reply.choice, reply.finish_reason) for reply in replies] == [(0, "stop"), (1, "stop")]
    assert tokens_in(replies) == []
    assert replies[-1].usage.completion_tokens == 2 * len(tokens)
    assert sentence_served.worker.submits == []


async def test_tokens_sent_by_a_client_do_not_count_as_generated(
    channel: grpc.aio.Channel, sentence_served: Served
) -> None:
    metrics = sentence_served.router.frontend.metrics
    before = sum(metrics.generated_by_tenant().values())
    tokens = tokens_of(SENTENCE)
    sampling = pb.Sampling(seed=7, max_tokens=len(tokens))
    await generate(channel, sampling=sampling, resume_from=[resume_from(tokens[:-2])])
    assert sum(metrics.generated_by_tenant().values()) == before + 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            {"resume_from": [resume_from([2**32 - 1])], "sampling": pb.Sampling(seed=1)},
            "vocabulary",
        ),
        (
            {"resume_from": [resume_from([5, 6])], "sampling": pb.Sampling(seed=1, max_tokens=1)},
            "2 tokens of choice 0, but the answer may have at most 1",
        ),
        ({"resume_from": [resume_from([5])]}, "set 'seed'"),
        (
            {"resume_from": [resume_from([5]), resume_from([6])], "sampling": pb.Sampling(seed=1)},
            "more than one entry for choice 0",
        ),
        (
            {"resume_from": [resume_from([5], choice=10**9)], "sampling": pb.Sampling(seed=1)},
            "but n is 1",
        ),
        (
            {"resume_from": [resume_from([5], "gone")], "sampling": pb.Sampling(seed=1)},
            "finish_reason",
        ),
        ({"resume_from": [resume_from([])], "sampling": pb.Sampling(n=1, best_of=2)}, "best_of"),
        (
            {"resume_from": [resume_from([])], "sampling": pb.Sampling(n=2, use_beam_search=True)},
            "beam",
        ),
    ],
)
async def test_invalid_resume_state_is_refused(
    channel: grpc.aio.Channel, sentence_served: Served, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await generate(channel, **request_)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = refusal.value.details() or ""
    assert words in message
    assert "\n" not in message
    assert sentence_served.worker.submits == []
