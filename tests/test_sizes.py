"""Limits on the size of files, classes and functions."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, TEST_FILE_LINES = 400, 600
CLASS_LINES = 250
FUNCTION_LINES = 80  # kernels are exempt


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split()]
    return [
        path for path in paths if path.exists() and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


def sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, line count and limit of a file, and of each class and function in it."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    limit = TEST_FILE_LINES if name.startswith("tests/") else FILE_LINES
    yield name, text.count("\n"), limit
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef():
                limit = CLASS_LINES
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not name.startswith("kernels/"):
                limit = FUNCTION_LINES
            case _:
                continue
        assert node.end_lineno is not None
        yield f"{name} {node.name}", node.end_lineno - node.lineno + 1, limit


def test_nothing_is_larger_than_its_limit() -> None:
    paths = sources()
    if not paths:
        pytest.skip("git lists no files here")
    measured = [each for path in paths for each in sizes(path)]
    too_large = {name: lines for name, lines, limit in measured if lines > limit}
    assert too_large == {}, "split it, or shorten it"
