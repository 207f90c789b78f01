"""The quality comparison: intervals, and checkpoints that the engine serves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL as DEMO
from penstock.loadtests.quality.__main__ import FORMS, main
from penstock.loadtests.quality.calibration import collect_inputs
from penstock.loadtests.quality.checkpoints import Source
from penstock.loadtests.quality.statistics import Results, compare
from penstock.workers.models.spec import read_spec
from penstock.workers.weights.loading import load_model


def results(right: list[int], losses: list[float]) -> Results:
    return Results(np.array(right, float), np.array(losses), np.full(len(right), 2.0))


def test_equal_models_have_no_difference() -> None:
    same = results([1, 0, 1, 1], [0.5, 2.0, 0.1, 0.3])
    points, ratio = compare(same, same)
    assert (points.value, points.low, points.high) == (0, 0, 0)
    assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)


def test_pairs_are_kept_together() -> None:
    """The perplexity ratio is equal for all questions, so its interval has no width."""
    losses = np.random.default_rng(0).random(50)
    reference = results([1] * 50, losses.tolist())
    found = results([1] * 25 + [0] * 25, (losses + 0.2).tolist())
    points, ratio = compare(found, reference)
    assert ratio.value == pytest.approx(np.exp(0.1))
    assert ratio.low == pytest.approx(ratio.high)
    assert points.value == -50
    assert -70 < points.low < -50 < points.high < -30


def test_unknown_form_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown form 'Q9': expected one of int8"):
        main(["--form", "Q9"])


@pytest.fixture(scope="module")
def source() -> Source:
    numbers = torch.Generator().manual_seed(0)
    sequences = [torch.randint(5, 2000, (64,), generator=numbers).tolist() for _ in range(4)]
    return Source.of(DEMO, collect_inputs(DEMO, sequences))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.write is not None])
def test_checkpoints_hold_nearly_the_same_weights(
    name: str, source: Source, tmp_path: Path
) -> None:
    write = FORMS[name].write
    assert write is not None
    made = write(source, tmp_path / name)
    _, decoder = load_model(made, "float32", torch.device("cpu"))
    _, exact = load_model(DEMO, "float32", torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, read_spec(DEMO).hidden_size, generator=generator)
    assert exact.layers[0].mlp_norm is not None
    assert decoder.layers[0].mlp_norm is not None
    expected = exact.layers[0].mlp(exact.layers[0].mlp_norm(x))
    found = decoder.layers[0].mlp(decoder.layers[0].mlp_norm(x))
    error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert 1e-3 < error < 0.2
