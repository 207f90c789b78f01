"""Pin the packages of the images by version and hash: `python -m tests.locks` writes `locks/`.

pip resolves each set of requirements for this machine without installing it, so the command needs a
network, and the Python and the platform of the images: CPython 3.11 on Linux, x86-64.
"""

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locks"
PYTHON, MACHINE = (3, 11), "x86_64"
HEADER = """\
# Written by `make locks`: {purpose}.
# For CPython 3.11 on Linux, x86-64:
#   pip install --require-hashes --only-binary :all: --requirement locks/{name}.txt
"""
PURPOSES = {
    "cuda": "all packages of an image with the CUDA build of torch",
    "router": "the packages of an image that only hosts routers",
    "build": "what builds the wheel of Penstock and lists the packages of an image",
}


def requirements_of(name: str) -> list[str]:
    """Return the requirements that are resolved into the lock of this name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if name == "cuda":
        return list(project["project"]["dependencies"])
    if name == "build":
        return [*project["build-system"]["requires"], *project["dependency-groups"]["sbom"]]
    lines = (ROOT / "requirements-router.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked_line(entry: Mapping[str, Any]) -> str:
    """Return the line of a lock for one entry of pip's installation report."""
    metadata, archive = entry["metadata"], entry["download_info"]["archive_info"]
    name = canonicalize_name(metadata["name"])
    return f"{name}=={metadata['version']} --hash=sha256:{archive['hashes']['sha256']}"


def lock_text(name: str, report: Mapping[str, Any]) -> str:
    """Return the text of a lock."""
    lines = sorted(locked_line(entry) for entry in report["install"])
    return HEADER.format(purpose=PURPOSES[name], name=name) + "".join(f"{line}\n" for line in lines)


def resolve(requirements: Sequence[str]) -> dict[str, Any]:
    """Return pip's report of the installation of `requirements` into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt")]
    # Ignore the indexes and folders of this machine, which may have a CPU build of torch.
    local = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"}
    environment = {key: value for key, value in os.environ.items() if key not in local}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [*command, "--report", "-", *requirements],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> int:
    found = (*sys.version_info[:2], sys.platform, platform.machine())
    if found != (*PYTHON, "linux", MACHINE):
        print(f"locks are for CPython 3.11 on Linux, x86-64; this is {found}", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for name in PURPOSES:
        (FOLDER / f"{name}.txt").write_text(lock_text(name, resolve(requirements_of(name))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
