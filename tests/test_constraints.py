"""`constraints.txt` and `locks/` pin the packages of an installed Penstock and of the images."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import locks

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, Requirement]:
    """Return the lines of `constraints.txt` by the name of the package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def versions(requirement: Requirement) -> list[tuple[str, str]]:
    return [(each.operator, each.version) for each in requirement.specifier]


def test_every_requirement_is_pinned_to_one_version() -> None:
    pinned = pins()
    assert [name for name, pin in pinned.items() if [op for op, _ in versions(pin)] != ["=="]] == []
    waiting = list(PROJECT["project"]["dependencies"])
    seen: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in pinned:
            ((_, version),) = versions(pinned[name])
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
        if name not in seen:
            seen.add(name)
            waiting += metadata.requires(name) or []
    assert len(seen) > len(PROJECT["project"]["dependencies"])
    assert seen - pinned.keys() == set()


def test_build_backend_is_pinned_to_one_version() -> None:
    backends = map(Requirement, PROJECT["build-system"]["requires"])
    assert [[op for op, _ in versions(each)] for each in backends] == [["=="]]


# ------------------------------------------------------------ locks of the images


def lock(name: str) -> dict[str, tuple[str, str]]:
    """Return version and hash by package of a lock."""
    found = {}
    for line in (locks.FOLDER / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line)
            assert match is not None, line
            found[match[1]] = (match[2], match[3])
    return found


@pytest.mark.parametrize("name", locks.PURPOSES)
def test_lock_has_one_version_and_hash_of_each_package_and_its_dependencies(name: str) -> None:
    locked, pinned = lock(name), pins()
    for package, (version, _) in locked.items():
        assert versions(pinned[package]) == [("==", version)], package
    waiting = [Requirement(line) for line in locks.requirements_of(name)]
    assert len(waiting) <= len(locked)
    seen = set()
    while waiting:
        requirement = waiting.pop()
        package = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        assert package in locked, f"{requirement} is not in locks/{name}.txt: run `make locks`"
        assert requirement.specifier.contains(locked[package][0])
        if package not in seen:
            seen.add(package)
            waiting += map(Requirement, installed_requirements(package))


def installed_requirements(package: str) -> list[str]:
    """Return the requirements of an installed package, or none if it is not installed here."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def test_router_lock_is_a_part_of_the_full_lock_without_packages_that_compute() -> None:
    router, full = lock("router"), lock("cuda")
    assert router.items() <= full.items()
    assert not {"torch", "triton", "numba", "llvmlite", "transformers"} & router.keys()
    assert any(name.startswith("nvidia-") for name in full)


def test_lock_is_written_from_the_report_of_pip() -> None:
    archive = {"archive_info": {"hashes": {"md5": "x", "sha256": "ab" * 32}}}
    report = {
        "install": [
            {"metadata": {"name": "PyYAML", "version": "6.0.3"}, "download_info": archive},
            {"metadata": {"name": "hf_xet", "version": "1.8.0"}, "download_info": archive},
        ]
    }
    lines = locks.lock_text("router", report).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f"hf-xet==1.8.0 --hash=sha256:{'ab' * 32}",
        f"pyyaml==6.0.3 --hash=sha256:{'ab' * 32}",
    ]
    with pytest.raises(KeyError, match="sha256"):
        locks.locked_line(
            {
                "metadata": {"name": "a", "version": "1"},
                "download_info": {"archive_info": {"hashes": {"md5": "x"}}},
            }
        )


def test_actions_of_the_workflows_are_pinned_to_commits() -> None:
    used = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used += re.findall(r"uses: *(.+)", path.read_text())
    assert used
    assert [
        each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)
    ] == []
