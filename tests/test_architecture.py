"""`docs/architecture.md` agrees with the tree: its packages and its request path exist."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("cluster", "kernels", "loadtests", "protos", "router", "workers", "penstock/common")


class Row(NamedTuple):
    """A row of the table that describes the request path."""

    number: int
    path: str
    function: str
    successor: str  # name of the next row's function, which this function must use
    is_call: bool  # True if the function calls its successor


def request_path() -> list[Row]:
    """Parse the table; a row with an empty file cell has the file of the row above."""
    rows, path = [], ""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            path = cells[1].strip("`") or path
            name = re.fullmatch(r"(.*?)`(\w+)`", cells[4])
            assert name, line
            rows.append(Row(int(cells[0]), path, cells[2].strip("`"), name[2], is_call=not name[1]))
    return rows


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def find(path: str, function: str) -> ast.AST:
    """Return the definition of `Class.method` or `function`."""
    node: ast.AST = tree_of(path)
    for name in function.split("."):
        found = [
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name == name
        ]
        assert found, f"{path} has no {function}"
        node = found[-1]
    return node


def names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that a definition uses."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def calls_in(node: ast.AST) -> set[str]:
    """Return the names of all functions and methods that a definition calls."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in called
        if isinstance(each, ast.Attribute | ast.Name)
    }


PATH = request_path()


def test_rows_are_numbered() -> None:
    assert [row.number for row in PATH] == list(range(1, len(PATH) + 1))
    assert len(PATH) > 30


@pytest.mark.parametrize("row", PATH, ids=lambda row: row.function)
def test_function_uses_what_its_row_names(row: Row) -> None:
    node = find(row.path, row.function)
    assert row.successor in (calls_in(node) if row.is_call else names_in(node))


def test_each_call_leads_to_the_next_row() -> None:
    calls = [(row, after) for row, after in pairwise(PATH) if row.is_call]
    assert [row for row, after in calls if after.function.split(".")[-1] != row.successor] == []


def test_request_crosses_at_most_12_packages_from_the_api_to_the_kernel() -> None:
    kernel = next(row for row in PATH if row.path.startswith("kernels/"))
    packages = {str(Path(row.path).parent) for row in PATH[: kernel.number]}
    assert len(packages) <= 12, sorted(packages)


def test_every_package_is_in_the_page() -> None:
    folders = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    named = set(re.findall(r"`([\w/]+?)/?`", TEXT))
    inside = {"loadtests/simulator/world", "loadtests/simulator/model"}
    inside |= {"loadtests/simulator/faults", "loadtests/simulator/scaling"}
    missing = {each for each in folders - named - inside if "adapters" not in each}
    assert missing == set()


def test_every_package_of_the_page_exists() -> None:
    named = re.findall(r"`((?:cluster|kernels|loadtests|router|workers|penstock)/[\w/.]*)`", TEXT)
    assert named
    assert [each for each in named if not (ROOT / each).exists()] == []
