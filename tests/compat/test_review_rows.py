"""`review_rows.txt` has every row of the OpenAI API review; each test named there exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/compat/"
SECTIONS = (
    "chat field",
    "completion field",
    "answer",
    "error",
    "bug",
    "missing",
    "extension",
)
FIELDS = {
    "chat field": {
        *get_type_hints(chat.CompletionCreateParamsBase),
        *get_type_hints(chat.CompletionCreateParamsStreaming),
    },
    "completion field": {
        *get_type_hints(completion.CompletionCreateParamsBase),
        *get_type_hints(completion.CompletionCreateParamsStreaming),
    },
}
"""The fields of the official client's types. If a new version has more fields, a test here
fails."""
NUMBERS = {"bug": range(1, 9), "extension": range(1, 11)}


class Row(NamedTuple):
    section: str
    name: str
    test: str  # the test's node id without parameters

    @property
    def number(self) -> int:
        """Number of a bug or an extension; 0 in the other sections."""
        return int(self.name.split()[0]) if self.section in NUMBERS else 0

    @property
    def field(self) -> str:
        """Name of the field that the row is about."""
        return self.name.partition(":")[0]


def rows() -> list[Row]:
    lines = (ROOT / FOLDER / "review_rows.txt").read_text().splitlines()
    return [Row(*line.split(" | ")) for line in lines if not line.startswith("#")]


def listed_tests() -> list[str]:
    return sorted({row.test for row in rows()})


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def function_of(test: str) -> ast.AST:
    """Return the definition of a test, at the top level of its file."""
    path, _, name = test.partition("::")
    (found,) = (
        node
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    return found


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings and the names of keyword arguments in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


def test_lines_are_sorted_by_section_and_appear_once() -> None:
    found = rows()
    keys = [(SECTIONS.index(row.section), row.number, row.name, row.test) for row in found]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("test", listed_tests())
def test_listed_test_exists(test: str) -> None:
    assert re.fullmatch(FOLDER + r"test_\w+\.py::test_\w+", test)
    assert function_of(test)


@pytest.mark.parametrize("section", FIELDS)
def test_every_field_of_the_client_has_a_row_whose_tests_name_it(section: str) -> None:
    tests_of: dict[str, list[str]] = {}
    for row in rows():
        if row.section == section:
            tests_of.setdefault(row.field, []).append(row.test)
    assert FIELDS[section] - tests_of.keys() == set()
    assert tests_of.keys() - FIELDS[section] <= {"unknown fields"}
    for field in FIELDS[section]:
        for test in tests_of[field]:
            assert field in words_of(parsed(test.partition("::")[0])), (field, test)


@pytest.mark.parametrize("section", NUMBERS)
def test_numbers_are_complete(section: str) -> None:
    assert {row.number for row in rows() if row.section == section} == set(NUMBERS[section])
