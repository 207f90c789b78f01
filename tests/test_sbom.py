"""The SBOM of a router's environment lists exactly the packages of its lock, and Penstock.

`make router-environment` makes the environment and its SBOM, and runs this test.
"""

import json
import os
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import penstock
from tests import locks

pytestmark = pytest.mark.skipif("SBOM" not in os.environ, reason="run `make router-environment`")


def test_sbom_lists_the_locked_packages_and_penstock() -> None:
    found = json.loads(Path(os.environ["SBOM"]).read_text())
    assert found["bomFormat"] == "CycloneDX"
    listed = {canonicalize_name(each["name"]): each["version"] for each in found["components"]}
    lines = (locks.FOLDER / "router.txt").read_text().splitlines()
    pairs = [line.split(" ")[0].split("==") for line in lines if not line.startswith("#")]
    assert listed == {**dict(pairs), "penstock": penstock.__version__}
