import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.comparison.summary import (
    PHASES,
    Tokens,
    batch_flops,
    limit,
    reached,
    summarize,
    value,
)
from tests.loadtests.comparison.records import WORK, turn

COST = Cost(body=1000, head=500, attention=64)


def test_figures_of_a_turn_by_hand() -> None:
    one = turn("penstock", seconds=2.0)
    assert value(one, WORK, "throughput") == 2 * 4 / 2.0
    assert value(one, WORK, "tpot") == pytest.approx(200.0)
    assert value(one, WORK, "ttft") == 2000.0


def test_operations_by_hand() -> None:
    # 8 tokens through the body, one through the head; each looks at itself and all before it.
    prompt = 2 * (1000 * 8 + 500) + 64 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    assert COST.prefill(8) == prompt
    answer = 2 * 1500 * 3 + 64 * (9 + 10 + 11)
    assert COST.decode(8, 3) == answer
    assert batch_flops(COST, WORK) == 2 * (prompt + answer)


def test_limits_by_hand() -> None:
    fp32, int8 = turn("penstock"), turn("openvino-int8")
    # So short a prompt is bound by the weights, which are read once; a long one by arithmetic.
    assert limit(fp32, WORK, COST, "ttft") == pytest.approx(1e3 * 6000 / 10e9)
    fp32.limits["gflops"] = 1.0
    assert limit(fp32, WORK, COST, "ttft") == pytest.approx(1e3 * COST.prefill(16) / 1e9)
    fp32.limits["gflops"] = 100.0
    # One stream reads all weights for every token: 6,000 bytes at 10 GB/s; a quarter as INT8.
    assert limit(fp32, WORK, COST, "tpot") == pytest.approx(1e3 * 6000 / 10e9)
    assert limit(int8, WORK, COST, "tpot") == pytest.approx(1e3 * 1500 / 10e9)
    rates = [limit(each, WORK, COST, "throughput") for each in (fp32, int8)]
    assert rates[0] == pytest.approx(8 / (batch_flops(COST, WORK) / 100e9))
    assert rates[1] == pytest.approx(4 * rates[0])


@given(st.floats(1e-3, 1e3), st.sampled_from(PHASES))
def test_twice_the_time_is_half_of_the_limit(seconds: float, phase: str) -> None:
    fast, slow = (reached(turn("vllm", 0, t), WORK, COST, phase) for t in (seconds, 2 * seconds))
    assert fast == pytest.approx(2 * slow)


def test_ratios_are_taken_within_rounds_only() -> None:
    rounds = [
        [turn("penstock", 0, 1.0), turn("vllm", 0, 2.0)],
        [turn("penstock", 1, 10.0), turn("vllm", 1, 20.0)],
        [turn("penstock", 0, 500.0)],  # of another run, without vllm
    ]
    ours, vllm = summarize(rounds, WORK, COST)
    assert (ours.engine.name, vllm.engine.name) == ("penstock", "vllm")
    assert not ours.ahead
    for phase in PHASES:
        assert vllm.ahead[phase].median == pytest.approx(2.0)
        assert vllm.ahead[phase].count == 2


def test_int8_is_compared_with_int8() -> None:
    rounds = [[turn("penstock", 0, 4.0), turn("penstock-int8", 0, 1.0), turn("openvino-int8")]]
    rows = {row.engine.name: row for row in summarize(rounds, WORK, COST)}
    assert rows["openvino-int8"].ahead["ttft"].median == pytest.approx(1.0)


def test_tokens_are_compared_in_fp32_only_and_with_transformers() -> None:
    names = ("penstock", "openvino-int8", "transformers")
    rows = {
        row.engine.name: row.tokens
        for row in summarize([[turn(name) for name in names]], WORK, COST)
    }
    assert rows == {"penstock": Tokens(8, 8, None), "openvino-int8": None, "transformers": None}


def test_without_transformers_nothing_is_said_of_tokens() -> None:
    assert summarize([[turn("penstock")]], WORK, COST)[0].tokens is None


def test_agreement_ends_at_the_first_difference() -> None:
    judge = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert Tokens.of([[1, 2, 9, 4], [5, 6, 7, 8]], judge) == Tokens(6, 8, 2)
    assert Tokens.of(judge, judge) == Tokens(8, 8, None)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1), st.data())
def test_one_changed_token_is_found(judge: list[list[int]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(judge) - 1))
    index = data.draw(st.integers(0, 4))
    changed = [list(tokens) for tokens in judge]
    changed[row][index] += 1
    found = Tokens.of(changed, judge)
    assert found == Tokens(5 * len(judge) - (5 - index), 5 * len(judge), index)
