"""The GPU measurements import no package that a GPU machine may lack."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
AVAILABLE = {"torch", "triton", "numpy", "transformers", "pytest", "penstock", "tests"}
"""Packages that a GPU machine has, besides the standard library and their dependencies."""

BLOCK = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # as if not installed, also for `find_spec`
"""
ABSENT = (
    *("ray", "psutil", "numba", "hypothesis", "uvloop", "aiohttp", "uvicorn", "starlette", "rich"),
    *(
        "grpc",
        "google",
        "psutil",
        "prometheus_client",
        "pydantic",
        "httptools",
        "openai",
        "httpx",
        "setproctitle",
    ),
)
MODULES = sorted(
    f"penstock.loadtests.gpu.{path.stem}"
    for path in (ROOT / "loadtests/gpu").glob("*.py")
    if path.stem != "__main__"
)


def run_blocked(code: str, blocked: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BLOCK.format(blocked=blocked) + code]
    # Use one thread, because several threads would slow down tiny products on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.process
def test_every_section_can_be_imported_without_absent_packages() -> None:
    names = ", ".join([*MODULES, "penstock.loadtests.gpu.__main__"])
    done = run_blocked(f"import {names}", ABSENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_kernel_tests_can_be_imported_without_absent_packages() -> None:
    folders = ("tests/kernels", "tests/workers/gpu")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    # hypothesis may be imported: `make gpu-carry` copies it to the machine (docs/gpu.md).
    absent = tuple(name for name in ABSENT if name != "hypothesis")
    done = run_blocked(f"import {', '.join(names)}", absent)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_blocked_package_cannot_be_imported() -> None:
    assert run_blocked("import ray", ABSENT).returncode == 1


def figures_without_ray(tmp_path: Path, *sections: str) -> list[dict[str, Any]]:
    """Run sections in one process that lacks ray, grpc and protobuf; return their results."""
    (tmp_path / "bounds.json").write_text('{"bytes_per_second": 1e10, "flops_per_second": 1e11}')
    options = ["--json", str(tmp_path / "x.json"), "--bounds", str(tmp_path / "bounds.json")]
    options += ["--device", "cpu", "--small", "--model", "1b"]
    code = f"sys.argv[1:] = {options!r}\n"
    code += f"from penstock.loadtests.gpu import {', '.join(sections)}\n"
    for section in sections:
        code += f"{section}.main()\nprint(open(sys.argv[2]).read())\n"
    done = run_blocked(code, ("ray", "grpc", "google"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.process
def test_the_engine_steps_without_ray(tmp_path: Path) -> None:
    decoding, prices = figures_without_ray(tmp_path, "steps", "deterministic")
    assert all("over_floor" in batch for batch in decoding["batches"].values())
    assert "plain_us" in prices["prices"]["prompt of 40"]


@pytest.mark.process
def test_the_engine_and_the_torch_engine_generate_the_same_first_tokens(tmp_path: Path) -> None:
    (found,) = figures_without_ray(tmp_path, "beside_torch")
    loads = found["loads"]
    assert list(loads) == ["prefill of 12", "prefill of 40", "mixed", "all at once", "arrivals"]
    assert [each["equal_first_tokens"] for each in loads.values()] == [1.0] * 5


@pytest.mark.parametrize("folder", ["tests/kernels", "tests/workers/gpu"])
def test_kernel_tests_import_only_available_packages(folder: str) -> None:
    """Check imports at module level. hypothesis is allowed: `make gpu-carry` copies it."""
    allowed = {*sys.stdlib_module_names, *AVAILABLE, "hypothesis"}
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {str(node.module).partition(".")[0]}
            else:
                continue
            assert not names - allowed, path
