import pytest

from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL
from penstock.loadtests.micro.engine_client import EngineClient


@pytest.fixture(scope="module")
def engine() -> EngineClient:
    return EngineClient(SHIPPED_MODEL.parent / "demo-small", threads=1)


def test_every_prompt_gets_its_answer(engine: EngineClient) -> None:
    prompts = Prompts(ordinary_tokens(engine.vocab_size), 0)
    tokens = [prompts.tokens(Planned(n, 0.0, 20 + n, 1)) for n in range(3)]
    for _ in range(2):  # twice, because an engine must be reusable
        outcomes = engine.run(tokens, 5)
        assert [o.output_len for o in outcomes] == [5, 5, 5]
        assert [o.input_len for o in outcomes] == [20, 21, 22]
        for outcome in outcomes:
            assert outcome.error == ""
            assert outcome.arrivals == sorted(outcome.arrivals)
            assert outcome.arrivals[0] > 0


def test_a_prefill_takes_time(engine: EngineClient) -> None:
    assert engine.prefill(list(range(30, 60))) > 0
