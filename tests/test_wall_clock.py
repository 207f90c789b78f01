"""No test asserts wall-clock durations.

On a busy machine any wall-clock bound is exceeded at some time. Assert counts or the thread's CPU
time (`time.thread_time`), or replace the clock of the code under test. Goals in wall-clock time are
measured in `loadtests/`. A timeout that only ends a hang is not a bound and is allowed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("process_time", "process_time_ns"),  # CPU time of the process includes that of other threads
}
ALLOWED = {
    "support/serving.py": "`wait_for` gives up at its deadline: it only ends a hang",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_clock(node: ast.expr, names: set[str]) -> bool:
    """Return True if an expression is a clock reading, or computed from a reading by arithmetic.

    `names` are variables that hold such values.
    """
    match node:
        case ast.Name(name):
            return name in names
        # This case matches time.monotonic() and loop.time().
        case ast.Call(ast.Attribute(_, attribute), []):
            return attribute in CLOCKS
        case ast.Call(ast.Name("abs" | "max" | "min" | "round" | "float"), arguments):
            return any(is_clock(each, names) for each in arguments)
        case ast.BinOp(left, _, right):
            return is_clock(left, names) or is_clock(right, names)
        case ast.NamedExpr(_, value) | ast.UnaryOp(_, value):
            return is_clock(value, names)
    return False


def assignments(function: Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables that a function assigns, with their values."""
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                for target, value in zip(targets, values, strict=False):
                    if isinstance(target, ast.Name):
                        yield target.id, value
            case ast.Assign(targets, value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, value
            case ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                yield name, value
            case ast.AugAssign(ast.Name(name), _, value) | ast.NamedExpr(ast.Name(name), value):
                yield name, value


def wall_clock_asserts(source: str) -> list[int]:
    """Return the line numbers of assertions that compare clock readings."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, Function):
            continue
        names: set[str] = set()
        values = list(assignments(function))
        while more := {name for name, value in values if is_clock(value, names)} - names:
            names |= more
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                compared = (each for each in ast.walk(node.test) if isinstance(each, ast.Compare))
                sides = [side for each in compared for side in (each.left, *each.comparators)]
                if any(is_clock(side, names) for side in sides):
                    found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("assert time.monotonic() - began < 10", [2]),
        (
            "began = time.perf_counter()\n    work()\n    assert time.perf_counter() < began + 1",
            [4],
        ),
        ("took = clock.time() - begun\n    assert 0.1 < took, 'slow'", [3]),
        (
            "a, b = 1, time.time_ns()\n    c = b - a\n    assert a\n    assert c / 1e9 > 1",
            [5],
        ),
        ("assert (took := round(time.process_time() - began, 1)) < 2", [2]),
        ("began = time.thread_time()\n    assert time.thread_time() - began < 20", []),
        ("assert pulse.waited(time.monotonic() + 100) > 100", []),
        ("began = time.monotonic()\n    assert count < 3", []),
    ],
)
def test_assertion_about_wall_time_is_found(body: str, lines: list[int]) -> None:
    assert wall_clock_asserts(f"def test() -> None:\n    {body}\n") == lines


def test_no_test_bounds_wall_time() -> None:
    found = {
        name: lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := wall_clock_asserts(path.read_text()))
        and (name := str(path.relative_to(TESTS))) not in ALLOWED
    }
    assert found == {}, "assert counts or the thread's CPU time instead"


def test_every_allowed_file_needs_its_exception() -> None:
    for name in ALLOWED:
        assert wall_clock_asserts((TESTS / name).read_text()), name
