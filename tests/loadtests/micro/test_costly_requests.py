"""The measurement of costly requests, with real processes."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.micro import costly_requests


@pytest.mark.process
@pytest.mark.slow
def test_a_short_run_measures_every_kind_of_request(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert costly_requests.main(["--repeats", "1", "--save-json", str(path)]) == 0
    rows = json.loads(path.read_text())["requests"]
    assert rows.keys() == costly_requests.REQUESTS.keys()
    # A refused request may end before the first health check, so compare the maximum of all.
    assert max(row["longest_health_ms"] for row in rows.values()) > 0
