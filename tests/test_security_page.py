"""`docs/security.md` has a row for every vulnerability class; each test named there exists."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLASSES = range(1, 27)
OPEN = {3, 16, 17}
"""Numbers of the vulnerability classes that are partly open; the page says which part is open."""


class Row(NamedTuple):
    number: int
    defence: str
    tests: list[str]


def rows() -> list[Row]:
    found = []
    for line in (ROOT / "docs" / "security.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdigit():
            number, name, defence, tests = cells
            assert name, f"row {number} has no name"
            assert re.fullmatch(r"(`[^`]+`(, )?)*", tests), f"row {number}: {tests!r}"
            found.append(Row(int(number), defence, re.findall(r"`([^`]+)`", tests)))
    return found


@cache
def functions_of(path: str) -> set[str]:
    """Return the names of the functions at the top level of a file."""
    return {
        node.name
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_class_has_one_row() -> None:
    assert [row.number for row in rows()] == list(CLASSES)


def test_open_classes_are_marked() -> None:
    assert {row.number for row in rows() if row.defence.startswith("**Open")} == OPEN


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_every_closed_class_has_tests_and_all_of_them_exist(row: Row) -> None:
    assert row.tests or row.number in OPEN
    for test in row.tests:
        path, _, function = test.partition("::")
        assert function.startswith("test_"), test
        assert Path(path).name.startswith("test_"), test
        assert function in functions_of(path), test
