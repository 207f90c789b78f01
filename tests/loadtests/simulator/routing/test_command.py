import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtests.simulator.routing.command import Figures, main, missed_goals
from penstock.loadtests.simulator.routing.loads import (
    infinite_cache_tokens,
    long_and_short,
    without_sharing,
)
from penstock.loadtests.simulator.routing.run import Plan, Prompt, RoutingRun
from penstock.router.routing.placement.routing_strategies import RANKINGS

PLAN = Plan(num_workers=3, num_blocks=8, block_size=512, tokens_per_second=1000.0)


def session(number: int, turn: int) -> Prompt:
    """Return a turn of a conversation: its prompt extends the prompt of the previous turn."""
    blocks = [100 * number + depth for depth in range(turn + 1)]
    return Prompt(turn + 0.1 * number, 512 * (turn + 1) + 9, blocks)


sessions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=30)


@given(sessions, st.sampled_from(sorted(RANKINGS)))
@settings(max_examples=40, deadline=None)
def test_every_prompt_is_computed_once_and_caches_never_beat_an_infinite_one(
    turns: list[tuple[int, int]], strategy: str
) -> None:
    prompts = sorted((session(*turn) for turn in turns), key=lambda prompt: prompt.at)
    outcome = RoutingRun(PLAN, strategy).play(prompts)
    total = sum(prompt.num_tokens for prompt in prompts)
    assert outcome.cached_tokens + sum(outcome.computed_tokens.values()) == total
    assert outcome.cached_tokens <= infinite_cache_tokens(prompts)
    assert all(seconds > 0 for seconds in outcome.seconds)
    assert all(outcome.placed_at)


def test_turns_of_a_conversation_stay_on_one_worker_under_cost() -> None:
    prompts = [session(0, turn) for turn in range(6)]
    outcome = RoutingRun(PLAN, "cost").play(prompts)
    assert len(set(outcome.placed_at)) == 1
    assert outcome.cached_tokens == infinite_cache_tokens(prompts)


def test_short_prompts_are_not_placed_behind_a_long_one() -> None:
    """With round robin, a third of the short prompts wait behind the long one."""
    prompts = [Prompt(0.0, 4000, []), *(Prompt(0.1 + n, 100, []) for n in range(6))]
    ahead = {
        strategy: RoutingRun(replace(PLAN, num_blocks=100), strategy).play(prompts).jobs_ahead
        for strategy in ("cost", "round_robin")
    }
    assert sum(ahead["cost"]) == 0
    assert sum(ahead["round_robin"]) > 0


def test_loads_without_sharing_have_distinct_blocks() -> None:
    prompts = without_sharing([session(0, 3), session(0, 4)])
    assert infinite_cache_tokens(prompts) == 0
    assert [len(prompt.blocks) for prompt in prompts] == [4, 5]
    assert long_and_short(1)[:50] == long_and_short(1)[:50]


def figures(mean: float, share: float = 0.0, short: float = 0.0) -> Figures:
    return Figures(0.0, share, mean, 0.0, 0.0, 0.0, short, 1.0)


def test_each_missed_goal_is_named() -> None:
    good = {
        "shared": {"cost": figures(6.2, 0.93), "least_loaded": figures(10.0)},
        "unshared": {"cost": figures(10.05), "least_loaded": figures(10.0)},
        "long and short": {
            "cost": figures(1.0, short=1.0),
            "least_loaded": figures(1.0),
            "round_robin": figures(9.0, short=9.0),
        },
    }
    assert missed_goals(good) == []
    bad = {
        "shared": {"cost": figures(6.4, 0.91), "least_loaded": figures(10.0)},
        "unshared": {"cost": figures(10.2), "least_loaded": figures(10.0)},
        "long and short": {
            "cost": figures(1.1, short=3.0),
            "least_loaded": figures(1.0),
            "round_robin": figures(9.0, short=9.0),
        },
    }
    assert len(missed_goals(bad)) == 5


def write_trace(path: Path) -> Path:
    rows = [
        {"timestamp": 100 * n, "input_length": 1030, "output_length": 1, "hash_ids": [1, 2 + n, 90]}
        for n in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_command_prints_a_row_per_load_and_strategy_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loadtests.simulator.routing.loads.NUM_MIXED", 60)
    out = tmp_path / "out.json"
    code = main([str(write_trace(tmp_path / "t.jsonl")), "--workers", "2", "--json", str(out)])
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert code == (1 if written["missed"] else 0)
    for load in ("shared", "unshared", "long and short"):
        assert set(written["figures"][load]) == set(RANKINGS)
        assert printed.count(f"| {load} |") == len(RANKINGS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass the path of a Mooncake trace"),
        (["TRACE", "--load", "0"], "--load must be above 0"),
        (["TRACE", "--blocks", "2"], "longest prompt, which has 1030 tokens"),
        (["missing.jsonl"], "No such file"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl"))
    assert main([trace if each == "TRACE" else each for each in options]) == 2
    assert message in capsys.readouterr().err
