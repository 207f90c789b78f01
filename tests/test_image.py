"""The Dockerfile, read without a container engine; no test here builds an image."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("router", "cuda")


class Stage(NamedTuple):
    name: str
    parent: str
    lines: list[tuple[str, str]]  # pairs of an instruction and its arguments


@cache
def stages() -> dict[str, Stage]:
    """Return the stages of the Dockerfile by name, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    found: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = Stage(name, parent, [])
        elif found:
            found[list(found)[-1]].lines.append((instruction, rest.strip()))
    return found


def all_of(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage].lines if name == instruction]


def test_every_image_comes_from_a_base_by_digest() -> None:
    assert {stage.parent for stage in stages().values()} - stages().keys() == {"${BASE}"}
    assert (ROOT / "Dockerfile").read_text().count("\nARG BASE\n") == 2
    (check,) = all_of("base", "RUN")
    for base, accepted in (("python:3.11@sha256:0", True), ("python:3.11", False), ("", False)):
        done = subprocess.run(["sh", "-c", check], env={"BASE": base}, capture_output=True)
        assert (done.returncode == 0) == accepted, base


def test_paths_that_are_copied_exist_and_are_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied: set[str] = set()
    for stage in stages().values():
        for rest in all_of(stage.name, "COPY"):
            if not rest.startswith("--from="):
                copied |= set(rest.split()[:-1])
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    packages = [each.resolve() for each in (ROOT / "penstock").iterdir() if each.is_symlink()]
    assert len(packages) > 5
    assert {str(each.relative_to(ROOT.resolve())) for each in packages} <= copied


@pytest.mark.parametrize("image", IMAGES)
def test_image_takes_only_the_environment_of_its_build_stage(image: str) -> None:
    assert all_of(image, "COPY") == [f"--from={image}-packages /opt/penstock /opt/penstock"]
    assert not [line for line in all_of(image, "RUN") if re.search(r"\bpip\b", line)]


@pytest.mark.parametrize("image", IMAGES)
def test_image_does_not_run_as_root(image: str) -> None:
    assert all_of(image, "USER") == ["10001:10001"]
    created = [line for line in all_of(image, "RUN") if "useradd --uid 10001 --user-group" in line]
    assert len(created) == 1
    helm = (ROOT / "helm" / "penstock" / "values.yaml").read_text()
    assert "podSecurity:\n  user: 10001\n" in helm


def test_packages_are_installed_with_hashes_and_from_locks_only() -> None:
    commands = [line for stage in stages() for line in all_of(stage, "RUN")]
    installed = [each for line in commands for each in re.findall(r"pip .*?install [^&]*", line)]
    assert len(installed) == 5
    locks = set()
    for command in installed:
        if "--no-index" in command:  # this command installs the wheel of Penstock
            assert "--no-deps" in command
        else:
            assert "--require-hashes --only-binary :all:" in " ".join(command.split())
            locks |= set(re.findall(r"--requirement (\S+)", command))
    assert locks == {f"locks/{name}.txt" for name in ("build", "router", "cuda")}
    assert all((ROOT / path).is_file() for path in locks)
    (wheel,) = [line for line in commands if "pip wheel" in line]
    assert "--no-build-isolation --no-index" in wheel


@pytest.mark.parametrize("image", IMAGES)
def test_modules_are_compiled_and_packages_listed_in_the_build(image: str) -> None:
    commands = " ".join(all_of(f"{image}-packages", "RUN"))
    assert "python -m compileall" in commands
    assert "/opt/penstock/share/penstock/sbom.cdx.json" in commands


@pytest.mark.process
def test_modules_of_torch_compile_with_the_flags_of_the_cuda_image(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    commands = " ".join(all_of("cuda-packages", "RUN"))
    (found,) = re.findall(r"-m compileall ([^&]*)/opt/penstock/lib", commands)
    flags = shlex.split(found)
    flags[flags.index("-j") + 1] = "2"
    # This folder contains the only module that needs Python 3.12.
    folder = Path(torch.__file__).parent / "testing"
    command = [sys.executable, "-m", "compileall", *flags, str(folder)]
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert {"_comparison", "common_utils"} <= compiled


def test_cuda_image_has_a_compiler_and_checks_it_and_the_router_image_has_none() -> None:
    cuda, router = (" ".join(all_of(image, "RUN")) for image in IMAGES[::-1])
    assert "install --yes --no-install-recommends gcc libc6-dev" in cuda
    assert "apt-get" not in router
    lines = stages()["cuda"].lines
    user = lines.index(("USER", "10001:10001"))
    (check,) = [at for at, (_, rest) in enumerate(lines) if "check_compiler" in rest]
    assert check > user, "as the user of the image, who must be able to read the headers"


def test_seed_of_kernels_is_where_the_workers_look() -> None:
    pytest.importorskip("triton")
    from penstock.kernels.triton_common.kernel_cache import SEED

    (command,) = [line for line in all_of("cuda-packages", "RUN") if "tests.aot.seed" in line]
    assert command.split()[-1] == str(Path("/opt/penstock") / SEED.relative_to(sys.prefix))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as the image has it")
def test_compiler_is_checked_by_compiling_a_module(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "penstock.kernels.triton_common.check_compiler"]
    (tmp_path / "bin").mkdir()
    for path, expected in ((os.environ["PATH"], 0), (str(tmp_path / "bin"), 1)):
        cache = str(tmp_path / f"cache {expected}")
        environment = {"TRITON_CACHE_DIR": cache, "HOME": "/tmp", "PATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
    assert "Failed to find C compiler" in done.stderr
