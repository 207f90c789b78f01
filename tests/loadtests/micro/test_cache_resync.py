import json
from pathlib import Path

import pytest

from penstock.loadtests.micro.cache_resync import main


@pytest.mark.process
def test_routers_learn_all_blocks_of_all_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round ends only when the router knows all blocks, and the last one when it has none."""
    out = tmp_path / "out.json"
    main(["--blocks", "20000", "--workers", "2", "--rounds", "2", "--save-json", str(out)])
    rounds = json.loads(out.read_text())
    assert len(rounds) == 2
    assert all(0 < each["longest_callback"] <= each["cpu"] for each in rounds)
    assert [bool(each["longest_removal"]) for each in rounds] == [False, True]
    assert "20000 blocks of 2 workers" in capsys.readouterr().out
