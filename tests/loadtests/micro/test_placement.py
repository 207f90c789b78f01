import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.loadtests.micro import placement
from penstock.loadtests.micro.placement import BLOCK, NEW_BLOCKS, Fixture, Load, main
from penstock.router.routing.placement.disaggregation import DisaggregationPolicy, ignores_roles

SMALL = Load(("3",), blocks=600, depth=120, decisions=5)


def test_fixture_has_the_blocks_and_prompts_extend_what_a_worker_has() -> None:
    fixture = Fixture(SMALL, 3)
    held = sum(fixture.index.num_blocks(name) for name in fixture.names)
    assert held == fixture.num_pairs >= SMALL.blocks
    request = fixture.request(1)
    hashes = request.prompt_hashes[BLOCK]
    assert len(hashes) == SMALL.depth
    assert max(fixture.index.match(hashes).values()) == SMALL.depth - NEW_BLOCKS


def test_decisions_use_the_index() -> None:
    fixture = Fixture(SMALL, 3)
    blocks, name = fixture.chats[0]
    for view in fixture.registry.views():
        view.update_load(view.load._replace(queued_tokens=0), 0.0)
    request = fixture.request(1)
    depths = fixture.index.match(request.prompt_hashes[BLOCK])
    assert depths[fixture.decide(request)] == max(depths.values())
    assert fixture.index.match(blocks)[name] == len(blocks)


def test_command_prints_and_saves_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--workers", "2", "3", "--blocks", "600", "--depth", "120", "--decisions", "5"]
    assert main([*options, "--save-json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [each["workers"] for each in written["figures"]] == [2, 3]
    assert all(each["bytes_per_block"] > 0 for each in written["figures"])
    assert "hashing 120 blocks" in capsys.readouterr().out


def test_split_pools_have_measured_speeds_so_that_both_places_of_a_prompt_are_compared() -> None:
    fixture = Fixture(replace(SMALL, split=True), 4)
    views = fixture.registry.views()
    assert [view.role for view in views] == ["prefill", "decode"] * 2
    costs = DisaggregationPolicy(views, fixture.registry.transfer_costs)
    assert costs.is_measured
    assert fixture.decide(fixture.request(1)) in fixture.names


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_that_share_cores_get_requests_whatever_their_role(role: str) -> None:
    fixture = Fixture(replace(SMALL, shared=True), 4)
    views = fixture.registry.views()
    assert ignores_roles(views)
    for view in views:
        queued = 0 if view.role == role else 100_000
        view.update_load(view.load._replace(queued_tokens=queued), 1.0)
    chosen = fixture.registry.get(fixture.decide(fixture.request(1)))
    assert chosen is not None
    assert chosen.role == role


def test_command_fails_if_a_decision_takes_longer_than_its_goal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "GOALS", {2: 0.0})
    options = ["--blocks", "600", "--depth", "120", "--decisions", "5", "--split"]
    assert main([*options, "--workers", "2"]) == 1
    assert main([*options, "--workers", "3"]) == 0
