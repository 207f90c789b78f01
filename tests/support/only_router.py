"""A router in a process that can import only the packages of `requirements-router.txt`.

`python -m tests.support.only_router` runs `penstock.loadtests.micro.standalone_router` under this
restriction, and imports every module of the product that a router image needs.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements-router.txt"
MODULES = (
    "penstock.cluster.processes.actors",
    "penstock.cluster.kubernetes.node_drain",
    "penstock.cluster.kubernetes.readiness_probe",
    "penstock.cli.chat",
    "penstock.cli.fetch",
    "penstock.cli.role",
    "penstock.cli.status",
)


def requirements(text: str) -> list[str]:
    """Return the requirements in the text of a pip requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def distribution_name(requirement: str) -> str:
    """Return the normalized name of the distribution that a requirement names."""
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def installed_with(names: Iterable[str]) -> set[str]:
    """Return the distributions `names` with all their installed dependencies."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # this requirement is for another platform or Python version
        found.add(name)
        waiting += [distribution_name(each) for each in needed if "extra ==" not in each]
    return found


class Blocker(MetaPathFinder):
    """An import hook that refuses packages of distributions outside `allowed`."""

    def __init__(self, allowed: set[str]) -> None:
        self._blocked = {
            package
            for package, names in metadata.packages_distributions().items()
            if not {distribution_name(name) for name in names} & {*allowed, "penstock"}
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] in self._blocked:
            message = f"{name} is not a package of {REQUIREMENTS.name}"
            raise ModuleNotFoundError(message, name=name)
        return None


def main() -> int:
    names = map(distribution_name, requirements(REQUIREMENTS.read_text()))
    sys.meta_path.insert(0, Blocker(installed_with(names)))
    for module in MODULES:
        import_module(module)
    code: int = import_module("penstock.loadtests.micro.standalone_router").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
