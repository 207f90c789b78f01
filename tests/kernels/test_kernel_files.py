"""Kernels have files of their own; the other files show only the interfaces of operations."""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels"
FILES = {
    str(path.relative_to(KERNELS).with_suffix("")): path.read_text()
    for path in sorted(KERNELS.rglob("*.py"))
}
OPERATIONS = sorted(path.parent.name for path in KERNELS.glob("*/op.py"))


CREATORS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
}


def files_with(pattern: str) -> set[str]:
    return {name for name, text in FILES.items() if re.search(pattern, text, re.MULTILINE)}


def test_triton_kernels_are_only_in_files_named_triton() -> None:
    found = files_with(r"^@jit\b")
    assert len(found) > len(OPERATIONS)
    assert not {name for name in found if not name.split("/")[1].startswith("triton")}


def test_numba_loops_of_operations_are_only_in_files_named_cpu() -> None:
    found = files_with(r"^@(inner|entry|numba\.njit)\b|^import numba$")
    assert len(found) > len(OPERATIONS)
    operations = {name for name in found if name.split("/")[0] in OPERATIONS}
    assert not {name for name in operations if not name.split("/")[1].startswith("cpu")}


def test_launchers_name_the_device_of_each_new_tensor() -> None:
    """A launcher that creates a tensor on the default device might wait for a GPU."""
    creators = {f"torch.{name}" for name in CREATORS}
    created = [
        (name, call)
        for name, text in FILES.items()
        if "/triton" in name
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in creators
    ]
    assert len(created) >= 5
    unnamed = [
        f"{name}:{call.lineno}"
        for name, call in created
        if "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert unnamed == []
