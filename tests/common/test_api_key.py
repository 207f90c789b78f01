"""Keys from files and from the environment."""

from pathlib import Path

import pytest

from penstock.common.api_key import VARIABLE, ApiKey, BadKey, checked_key, client_key
from tests.support.api_keys import key_file

KEY = "0123456789abcdef"


def test_key_is_stripped_and_never_shown() -> None:
    assert checked_key(f" \t{KEY}\r\n") == KEY
    assert KEY not in repr(ApiKey("team", KEY))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \t ", "is empty"),
        (f"{KEY} {KEY}", "has spaces"),
        (f"{KEY}\t{KEY}", "has spaces"),
        (f"{KEY}\x00", "not printable ASCII"),
        (f"{KEY}é", "not printable ASCII"),
        (f"\ufeff{KEY}", "not printable ASCII"),
        (KEY[1:], "fewer than 16 characters"),
    ],
)
def test_what_cannot_be_a_key_is_refused_without_being_shown(text: str, words: str) -> None:
    with pytest.raises(BadKey, match=words) as failure:
        checked_key(text)
    assert KEY[1:] not in str(failure.value)


def test_short_keys_can_be_allowed_but_not_empty_ones() -> None:
    assert checked_key("k", allow_weak=True) == "k"
    with pytest.raises(BadKey, match="is empty"):
        checked_key(" ", allow_weak=True)


def test_client_takes_its_key_from_the_file_first_then_from_the_environment(tmp_path: Path) -> None:
    path = key_file(tmp_path, "", f" {KEY} ")
    assert client_key(path, {VARIABLE: "another"}) == KEY
    assert client_key(None, {VARIABLE: "another\n"}) == "another"
    assert client_key(None, {VARIABLE: ""}) == ""
    assert client_key(None, {}) == ""


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666])
def test_file_that_other_users_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEY, mode=mode)
    with pytest.raises(BadKey, match="can be read or written by other users") as failure:
        client_key(path)
    assert KEY not in str(failure.value)
    path.chmod(mode & 0o770)
    assert client_key(path) == KEY


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "contains no key"),
        (["", " "], "contains no key"),
        (["sk-1", "sk-2"], "has several lines"),
        (["two words"], "has spaces"),
    ],
)
def test_client_needs_exactly_one_key(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(BadKey, match=words) as failure:
        client_key(key_file(tmp_path, *lines))
    assert not [line for line in lines if line.strip() and line in str(failure.value)]


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadKey, match=rf"^--api-key-file {path}: the file cannot be read: "):
            client_key(path)
