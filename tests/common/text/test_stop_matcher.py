from hypothesis import given
from hypothesis import strategies as st

from penstock.common.text.stop_matcher import Matched, StopMatcher

SMALL = st.text("ab", max_size=30)  # a two-letter alphabet gives many near matches
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> Matched | None:
    """Reference: return the match that ends first; if several end there, return the longest."""
    matches = [
        Matched(stop, end - len(stop), end)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text.endswith(stop, 0, end)
    ]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def split(text: str, lengths: list[int]) -> list[str]:
    """Split the text into pieces of these lengths, followed by the rest."""
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]


@given(SMALL, STOPS, st.lists(st.integers(0, 5), max_size=12))
def test_match_does_not_depend_on_how_the_text_is_split(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in split(text, lengths):
        safe, matched = matcher.feed(piece)
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
def test_only_a_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    safe, matched = matcher.feed(text)
    if matched is None:
        held = text[len(safe) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_held_text_is_released_once_it_cannot_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("x") == ("ENx", None)


def test_nothing_is_held_back_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == ("the ", None)
    _, matched = matcher.feed("ND")
    assert matched is not None
    assert matcher.rest() == ""
