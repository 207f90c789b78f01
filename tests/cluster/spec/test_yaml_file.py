"""Errors about cluster files name the mistake and its position, and quote no text of the file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.yaml_file import read_file

KEY = "sk-1234567890abcdef"


def refusal(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as failure:
        read_file(path)
    message = str(failure.value)
    assert message.startswith(f"{path}: cannot be parsed as YAML: ")
    assert KEY not in message
    assert "sk-" not in message
    assert "\n" not in message
    return message.partition("cannot be parsed as YAML: ")[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"keys: *{KEY}", "found undefined alias, line 1, column 7"),
        (f"keys: !{KEY} x", "could not determine a constructor for the tag, line 1, column 7"),
        (f"keys: !{KEY}! x", "expected URI, but found ' ', line 1, column 28"),
        (f"keys: !sk-1'{KEY} x", "could not determine a constructor for the tag, line 1, column 7"),
        (f"keys: !{KEY.replace('-', '')}!x y", "found undefined tag handle, line 1, column 7"),
        (f"a: &{KEY} 1\nb: &{KEY} 2", "second occurrence, line 2, column 4"),
        (f"a: !!int {KEY}", "a value cannot be converted to its type"),
        (f"a: !!bool {KEY}", "a value cannot be converted to its type"),
        (f"a: !!timestamp {KEY}", "a value cannot be converted to its type"),
        ("a: 2026-13-45", "a value cannot be converted to its type"),
        (f"a: !!binary {KEY}é", "failed to convert base64 data into ascii, line 1, column 4"),
        (f"a: [{KEY}", "expected ',' or ']', but got '<stream end>', line 1, column"),
        (f"a: @{KEY}", "found character '@' that cannot start any token, line 1, column 4"),
        (f"a: {'[' * 2000}{KEY}", "lists or mappings are nested too deeply"),
    ],
)
def test_errors_show_the_mistake_and_no_name_of_the_file(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert refusal(tmp_path, text).startswith(expected)


PIECES = st.sampled_from([*"*&!{}[]:,-?|>%@`'\"\\# \n\t~<=", "a", "!!int ", "<<", "0", "é", "--- "])


@given(before=st.lists(PIECES, max_size=8), after=st.lists(PIECES, max_size=8))
def test_no_file_raises_another_error_or_shows_a_key(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], after: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.yaml"
    path.write_text("".join([*before, KEY, *after]), encoding="utf-8")
    message = ""
    try:
        read_file(path)
    except SpecError as error:
        message = str(error)
    assert KEY not in message
