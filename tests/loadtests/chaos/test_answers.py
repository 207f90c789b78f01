"""What the chaos holds against the undisturbed answer, and what it lets pass."""

from dataclasses import replace

import pytest

from penstock.loadtests.chaos.answers import Divergence, Stream, compare, near_tie
from penstock.loadtests.chaos.request_mix import KINDS, ChaosRequest, make_requests
from penstock.protos import inference_pb2 as pb

ASK = ChaosRequest(1, "greedy with logprobs", "Hello", {"temperature": 0.0})


def reply(position: int, *tokens: int, choice: int = 0, finish: str = "") -> pb.GenerateReply:
    scores = [pb.TokenLogprob(chosen=-token / 10, rank=1) for token in tokens]
    text = "".join(f"<{token}>" for token in tokens)
    return pb.GenerateReply(
        choice=choice, position=position, tokens=tokens, text=text,
        logprobs=scores, finish_reason=finish,
    )  # fmt: skip


def heard(*replies: pb.GenerateReply) -> Stream:
    stream = Stream("name", ASK, 0.0)
    for number, each in enumerate(replies):
        stream.take(each, float(number))
    return stream


RIGHT = heard(reply(0, 5), reply(1, 6, 7), reply(3, 8, finish="length"))


def test_the_same_tokens_in_other_replies_are_the_same() -> None:
    stream = heard(reply(0, 5, 6), reply(2, 7), reply(3, 8, finish="length"))
    for exact in (True, False):
        assert compare(stream, RIGHT, exact) == ([], [])
    assert stream.num_tokens == 4
    assert stream.arrivals == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ([reply(0, 5), reply(0, 5)], "position 0 came where 1 was to come"),
        ([reply(0, 5), reply(2, 7)], "position 2 came where 1 was to come"),
        ([reply(0, 5, 6, 7, 8, finish="length"), reply(4, 9)], "something came after its finish"),
        ([reply(0, 5, 6, 7, finish="length")], "3 tokens, not the 4"),
        ([reply(0, 5, 6, 7, 8, finish="stop")], "finish is 'stop', not 'length'"),
        ([reply(0, 5, 6, 7, 8, finish="length"), reply(0, 5, choice=1)], "choices [0, 1], not [0]"),
    ],
)
def test_a_position_twice_or_left_out_and_another_end_are_seen(
    replies: list[pb.GenerateReply], said: str
) -> None:
    problems, _ = compare(heard(*replies), RIGHT, exact=True)
    assert any(said in problem for problem in problems), problems


def test_text_and_scores_count_too() -> None:
    whole = reply(0, 5, 6, 7, 8, finish="length")
    other = pb.GenerateReply()
    other.CopyFrom(whole)
    other.text = "<5><6><7>"
    assert "text is" in compare(heard(other), RIGHT, exact=False)[0][0]
    other.CopyFrom(whole)
    other.logprobs[2].chosen += 1e-5
    assert compare(heard(other), RIGHT, exact=False) == ([], [])
    assert "position 2 differ" in compare(heard(other), RIGHT, exact=True)[0][0]
    other.logprobs[2].chosen += 1e-2
    assert "position 2 differ" in compare(heard(other), RIGHT, exact=False)[0][0]


def test_another_token_is_wrong_or_to_be_judged() -> None:
    stream = heard(reply(0, 5, 6, 9, 9, 9, finish="length"))
    assert compare(stream, RIGHT, exact=True)[0]
    assert compare(stream, RIGHT, exact=False) == ([], [Divergence(ASK, 0, (5, 6), 7, 9)])


def test_two_tokens_are_as_far_apart_as_their_draw_was() -> None:
    parting = Divergence(ASK, 0, (5, 9, 9), 7, 9)
    scores = (-0.5, 1, ((7, -0.5), (9, -0.25), (3, -4.0)))
    assert near_tie(parting, scores, {}) == pytest.approx(0.25)
    penalised = {"temperature": 0.0, "presence_penalty": 0.05, "frequency_penalty": 0.1}
    other = replace(parting, request=replace(ASK, sampling=penalised))
    assert near_tie(other, scores, {}) == pytest.approx(0.0)
    drawn = replace(parting, request=replace(ASK, sampling={"temperature": 0.5}))
    assert near_tie(drawn, scores, {7: 0.5, 9: 0.0}) == pytest.approx(0.0)
    assert near_tie(replace(parting, wrong=4), scores, {}) is None


def test_asked_again_the_known_comes_again_and_nothing_else() -> None:
    stream = heard(reply(0, 5), reply(1, 6))
    stream.choices[0].restart()
    stream.take(reply(0, 5, 6, 7), 5.0)
    stream.take(reply(3, 8, finish="length"), 6.0)
    assert compare(stream, RIGHT, exact=True) == ([], [])
    stream = heard(reply(0, 5), reply(1, 6))
    stream.choices[0].restart()
    stream.take(reply(0, 5, 9), 5.0)
    assert "another token came for position 1" in compare(stream, RIGHT, exact=False)[0][0]


def test_asks_are_of_every_kind_and_the_same_for_a_seed() -> None:
    asks = make_requests(20, 3, (10, 20))
    assert {ask.kind for ask in asks} == set(KINDS)
    assert all(10 <= ask.sampling["max_tokens"] <= 20 for ask in asks)
    assert list(asks) == list(make_requests(20, 3, (10, 20)))
    assert list(asks) != list(make_requests(20, 4, (10, 20)))
    message = asks[1].message("c1", logprobs=7)
    assert (message.request_id, message.sampling.logprobs) == ("c1", 7)
