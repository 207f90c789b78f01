"""Loads that are replayed against an engine: arrivals, latencies and their ratios."""

from collections import deque
from pathlib import Path

import pytest
import torch

from penstock.loadtests.gpu.beside_torch import SMALL_SIZES, Sizes, make_arrivals, make_loads
from penstock.loadtests.gpu.models import SHAPES, random_model, small
from penstock.loadtests.gpu.replay import Prompt, Request, replay, speed_ratios, summary
from penstock.loadtests.gpu.torch_engine import TorchEngine, TorchModel
from penstock.workers.models.decoder import Decoder


class OneByOne:
    """An engine with its own clock: each step takes a second and generates one token."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._queue: deque[list[int]] = deque()

    def submit(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        self._queue.append([number, max_tokens])

    def advance(self) -> list[tuple[int, int]]:
        self.now += 1.0
        first = self._queue[0]
        first[1] -= 1
        if not first[1]:
            self._queue.popleft()
        return [(first[0], 7)]

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_request_waits_for_its_arrival_and_for_the_token_before_it() -> None:
    engine = OneByOne()
    requests = [Request(3, 2, arrival=0.5), Request(3, 1, after=0), Request(3, 1, arrival=9.0)]
    answers = replay(engine, requests, [[1]] * 3, lambda: engine.now, engine.sleep)
    assert [answer.arrived for answer in answers] == [0.5, 1.5, 9.0]
    assert [answer.times for answer in answers] == [[1.5, 2.5], [3.5], [10.0]]
    assert engine.slept == [0.5, 5.5]


def test_latency_counts_from_the_arrival_even_if_the_engine_was_busy() -> None:
    engine = OneByOne()
    requests = [Request(10, 3, background=True), Request(6, 1, arrival=0.25)]
    answers = replay(engine, requests, [[1]] * 2, lambda: engine.now, engine.sleep)
    found = summary(requests, answers)
    assert found == {
        "requests_per_second": pytest.approx(2 / 4),
        "tokens_per_second": pytest.approx(20 / 4),
        "first_token_p50_us": pytest.approx(3.75e6),
        "first_token_p99_us": pytest.approx(3.75e6),
        "per_token_p50_us": pytest.approx(1e6),
        "per_token_p99_us": pytest.approx(1e6),
    }
    ratios = speed_ratios(found, {**found, "tokens_per_second": 10.0, "per_token_p50_us": 3e6})
    assert ratios["tokens_per_second"] == pytest.approx(0.5)
    assert ratios["per_token_p50_us"] == pytest.approx(3.0)


@pytest.mark.parametrize("sizes", [Sizes(), SMALL_SIZES])
def test_loads_fit_the_engines(sizes: Sizes) -> None:
    loads = make_loads(sizes)
    mixed = loads["mixed"]
    assert [each.background for each in mixed] == [True] * sizes.num_decoding + [
        False
    ] * sizes.num_prompts
    assert mixed[sizes.num_decoding].after == sizes.num_decoding - 1
    assert mixed[-1].after == len(mixed) - 2
    for requests in (*loads.values(), make_arrivals(sizes, 5.0)):
        assert max(each.prompt_len + each.output_len for each in requests) <= sizes.max_model_len


def test_arrivals_have_the_wanted_rate_and_duration() -> None:
    arrivals = make_arrivals(Sizes(), 10.0)
    assert len(arrivals) == 120
    assert arrivals[-1].arrival / len(arrivals) == pytest.approx(0.1, rel=0.25)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    config = small(SHAPES["8b"].config)
    return random_model(tmp_path, config, torch.float32, torch.device("cpu"))


def test_torch_engine_generates_in_a_batch_as_each_request_alone(decoder: Decoder) -> None:
    requests = [Request(9, 5), Request(4, 2), Request(4, 7), Request(12, 3), Request(1, 4)]
    prompts = [
        list(range(number, number + each.prompt_len)) for number, each in enumerate(requests)
    ]
    answers = replay(TorchEngine(TorchModel(decoder, 3, 64)), requests, prompts)
    model = TorchModel(decoder, 1, 64)
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        tokens = list(prompt)
        for _ in range(request.output_len):
            tokens.append(int(model.prefill(0, torch.tensor(tokens))))
        assert answer.tokens == tokens[len(prompt) :]


def test_torch_engine_refuses_a_model_that_it_would_compute_wrongly(tmp_path: Path) -> None:
    config = small(SHAPES["moe"].config)
    mixture = random_model(tmp_path, config, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="Llama family only"):
        TorchModel(mixture, 1, 64)
