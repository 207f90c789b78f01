from hypothesis import given
from hypothesis import strategies as st

from penstock.common.text.stop_matcher import Matched, StopMatcher

SMALL = st.text("ab", max_size=30)  # few letters: many near matches
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> Matched | None:
    """By its meaning: the match that ends first, and of several the longest."""
    found = [
        Matched(stop, end - len(stop), end)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text.endswith(stop, 0, end)
    ]
    return min(found, key=lambda match: (match.end, match.start), default=None)


def cut(text: str, lengths: list[int]) -> list[str]:
    """The text in parts of these lengths, the rest behind them."""
    parts = []
    for length in lengths:
        parts.append(text[:length])
        text = text[length:]
    return [*parts, text]


@given(SMALL, STOPS, st.lists(st.integers(0, 5), max_size=12))
def test_any_cut_finds_the_same_match(text: str, stops: list[str], lengths: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for part in cut(text, lengths):
        safe, matched = matcher.feed(part)
        if matched is not None:
            expected = first_match(text, stops)
            assert expected is not None
            assert matched.stop == expected.stop
            assert shown + safe[: matched.start] == text[: expected.start]
            return
        shown += safe
    assert first_match(text, stops) is None
    assert shown + matcher.rest() == text


@given(SMALL, STOPS)
def test_nothing_is_held_back_that_cannot_become_a_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    safe, matched = matcher.feed(text)
    if matched is None:
        held = text[len(safe) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_before_a_match_was_never_withheld_longer_than_needed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("x") == ("ENx", None)
