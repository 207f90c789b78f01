import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.comparison.engines import BY_NAME, ENGINES
from penstock.loadtests.comparison.summary import (
    PHASES,
    Tokens,
    batch_flops,
    limit,
    reached,
    summarize,
    value,
)
from tests.loadtests.comparison.records import WORK, engine_run

COST = Cost(body=1000, head=500, attention=64)


def test_values_of_a_run_match_hand_computed_ones() -> None:
    run = engine_run("penstock", seconds=2.0)
    assert value(run, WORK, "throughput") == 2 * 4 / 2.0
    assert value(run, WORK, "tpot") == pytest.approx(200.0)
    assert value(run, WORK, "ttft") == 2000.0


def test_flops_match_hand_computed_values() -> None:
    # The model's body computes 8 tokens, and its head 1 token. Each token attends to itself and to
    # all earlier tokens.
    prompt = 2 * (1000 * 8 + 500) + 64 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    assert COST.prefill(8) == prompt
    answer = 2 * 1500 * 3 + 64 * (9 + 10 + 11)
    assert COST.decode(8, 3) == answer
    assert batch_flops(COST, WORK) == 2 * (prompt + answer)


def test_limits_match_hand_computed_values() -> None:
    fp32, int8 = engine_run("penstock"), engine_run("openvino-int8")
    # Reading all weights limits the time of a short prompt; at 1 GFLOP/s, arithmetic limits this
    # time.
    assert limit(fp32, WORK, COST, "ttft") == pytest.approx(1e3 * 6000 / 10e9)
    fp32.limits["gflops"] = 1.0
    assert limit(fp32, WORK, COST, "ttft") == pytest.approx(1e3 * COST.prefill(16) / 1e9)
    fp32.limits["gflops"] = 100.0
    # With one stream, each token reads all weights: 6,000 bytes at 10 GB/s. INT8 weights have a
    # quarter of these bytes, and INT4 weights an eighth.
    assert limit(fp32, WORK, COST, "tpot") == pytest.approx(1e3 * 6000 / 10e9)
    assert limit(int8, WORK, COST, "tpot") == pytest.approx(1e3 * 1500 / 10e9)
    int4 = engine_run("penstock-int4")
    assert limit(int4, WORK, COST, "tpot") == pytest.approx(1e3 * 750 / 10e9)
    rates = [limit(each, WORK, COST, "throughput") for each in (fp32, int8)]
    assert rates[0] == pytest.approx(8 / (batch_flops(COST, WORK) / 100e9))
    assert rates[1] == pytest.approx(4 * rates[0])


@given(st.floats(1e-3, 1e3), st.sampled_from(PHASES))
def test_doubled_time_halves_the_fraction_of_the_limit(seconds: float, phase: str) -> None:
    fast, slow = (
        reached(engine_run("vllm", 0, t), WORK, COST, phase) for t in (seconds, 2 * seconds)
    )
    assert fast == pytest.approx(2 * slow)


def test_ratios_are_computed_only_within_rounds() -> None:
    rounds = [
        [engine_run("penstock", 0, 1.0), engine_run("vllm", 0, 2.0)],
        [engine_run("penstock", 1, 10.0), engine_run("vllm", 1, 20.0)],
        [engine_run("penstock", 0, 500.0)],  # another run, in which vllm did not take part
    ]
    penstock, vllm = summarize(rounds, WORK, COST)
    assert (penstock.engine.name, vllm.engine.name) == ("penstock", "vllm")
    assert not penstock.ahead
    for phase in PHASES:
        assert vllm.ahead[phase].median == pytest.approx(2.0)
        assert vllm.ahead[phase].count == 2


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("penstock-int8", "openvino-int8"),
        ("penstock-int4", "llama.cpp-int4"),
        ("penstock-f16", "llama.cpp-f16"),
    ],
)
def test_engines_are_compared_in_the_same_form_of_weights(ours: str, other: str) -> None:
    rounds = [[engine_run("penstock", 0, 4.0), engine_run(ours, 0, 2.0), engine_run(other)]]
    rows = {row.engine.name: row for row in summarize(rounds, WORK, COST)}
    assert rows[other].ahead["ttft"].median == pytest.approx(0.5)
    assert not rows[ours].ahead


def test_tokens_are_compared_with_transformers_in_fp32_only() -> None:
    names = ("penstock", "openvino-int8", "transformers")
    rows = {
        row.engine.name: row.tokens
        for row in summarize([[engine_run(name) for name in names]], WORK, COST)
    }
    assert rows == {"penstock": Tokens(8, 8, None), "openvino-int8": None, "transformers": None}


def test_tokens_of_f16_files_are_compared_with_llama_cpp() -> None:
    runs = [engine_run(name) for name in ("penstock", "penstock-f16", "llama.cpp-f16")]
    rows = {row.engine.name: row.tokens for row in summarize([runs], WORK, COST)}
    assert rows == {"penstock": None, "penstock-f16": Tokens(8, 8, None), "llama.cpp-f16": None}


def test_every_engine_has_a_counterpart_and_a_reference_of_its_form() -> None:
    for engine in ENGINES:
        assert BY_NAME[engine.counterpart].form == engine.form
        assert not engine.reference or BY_NAME[engine.reference].form == engine.form


def test_tokens_are_not_compared_without_transformers() -> None:
    assert summarize([[engine_run("penstock")]], WORK, COST)[0].tokens is None


def test_agreement_ends_at_the_first_difference() -> None:
    reference = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert Tokens.of([[1, 2, 9, 4], [5, 6, 7, 8]], reference) == Tokens(6, 8, 2)
    assert Tokens.of(reference, reference) == Tokens(8, 8, None)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1), st.data())
def test_one_changed_token_is_found(reference: list[list[int]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(reference) - 1))
    index = data.draw(st.integers(0, 4))
    changed = [list(tokens) for tokens in reference]
    changed[row][index] += 1
    found = Tokens.of(changed, reference)
    assert found == Tokens(5 * len(reference) - (5 - index), 5 * len(reference), index)
