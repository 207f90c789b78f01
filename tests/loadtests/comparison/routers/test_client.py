import json

import pytest

from penstock.loadtests.comparison.routers.client import check_answer, dechunked
from penstock.loadtests.micro.ab_runner import MeasurementFailed

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"


def test_complete_answer_gives_its_number_of_chunks() -> None:
    answer = HEAD + chunked(event(" a"), event(" a") + event(" a", "length"), DONE)
    assert check_answer(answer, 3) == 3


def test_event_that_two_chunks_carry_counts_once() -> None:
    first, last = event(" a"), event("a", "length")
    answer = HEAD + chunked(first[:20], first[20:] + last[:7], last[7:], DONE)
    assert check_answer(answer, 2) == 4


def test_last_event_without_text_is_no_token() -> None:
    assert check_answer(HEAD + chunked(event(" a"), event("", "length"), DONE), 1) == 3


def test_one_event_may_have_the_tokens_of_several_steps() -> None:
    assert check_answer(HEAD + chunked(event(" a"), event(" a a", "length"), DONE), 3) == 3


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((event(" a", "length"), DONE), "1 tokens ' a' in 2 characters: expected 2"),
        ((event(" a"), event(" a a", "length"), DONE), "3 tokens ' a' in 6 characters"),
        ((event(" a"), event(" b", "length"), DONE), "1 tokens ' a' in 4 characters"),
        ((event(" a"), event(" ab", "length"), DONE), "2 tokens ' a' in 5 characters"),
        ((event(" a"), event(" a", "length")), r"ended without `data: \[DONE\]`"),
        ((event(" a"), event(" a"), DONE), "ended without a finish reason"),
    ],
)
def test_wrong_answer_is_an_error(chunks: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(MeasurementFailed, match=message):
        check_answer(HEAD + chunked(*chunks), 2)


def test_error_status_is_an_error() -> None:
    with pytest.raises(MeasurementFailed, match="503"):
        check_answer(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 1)


def test_dechunked_reads_sizes_with_extensions_and_stops_at_the_last_chunk() -> None:
    assert dechunked(b"3;x=1\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n") == [b"abc", b"0123456789"]
