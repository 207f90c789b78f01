"""The model card contains the measured scores, and claims only scores above the bound."""

from __future__ import annotations

from pathlib import Path

from training import checkpoint, model_card
from training.evaluate import Score
from training.fit import Progress
from training.model import Llama, LlamaShape
from training.model_card import Run, Stage

SHAPE = LlamaShape(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
    vocab_size=64,
)
SCORES = (Score("addition", 190, 200), Score("story", 100, 200))


STAGE = Stage(
    Progress(step=77, tokens=400_000, wall=300.0, cpu=500.0), (Score("addition", 181, 200),)
)


def write_card(folder: Path, stage: Stage | None = None, note: str = "") -> str:
    """Write and return the card of a fake run."""
    model = Llama(SHAPE)
    checkpoint.save(model, folder)
    progress = Progress(step=1234, tokens=5_600_000, wall=2000.4, cpu=3500.2)
    run = Run("demo", "A model.", model, 0, progress, SCORES, note=note, stage=stage)
    model_card.write(folder, run)
    return (folder / "README.md").read_text()


def test_the_card_claims_scores_above_the_bound_only(tmp_path: Path) -> None:
    rows = [line for line in write_card(tmp_path).splitlines() if line.endswith(("yes |", "no |"))]
    assert [(row.split("|")[1].strip(), row.split("|")[-2].strip()) for row in rows] == [
        ("addition", "yes"),
        ("story", "no"),
    ]


def test_the_card_says_what_the_run_cost(tmp_path: Path) -> None:
    text = write_card(tmp_path)
    for fact in ("1,234 steps", "5.6 million tokens", "2,000 s wall", "3,500 s of processor"):
        assert fact in text


def test_the_card_compares_scores_before_and_after_the_stage_about_tools(tmp_path: Path) -> None:
    text = write_card(tmp_path, STAGE, note="- on a busy machine")
    rows = [line.split("|")[3:] for line in text.splitlines() if line.endswith(("yes |", "no |"))]
    assert rows == [
        [" 181/200 ", " 95.0% (190/200) ", " yes ", ""],
        [" - ", " 50.0% (100/200) ", " no ", ""],
    ]
    for fact in ("about tools: 77 steps, 0.4 million", "300 s wall", "\n- on a busy machine\n\n##"):
        assert fact in text
    assert "`lookup`" in text
    assert "`lookup`" not in write_card(tmp_path)


def test_the_card_has_no_unfilled_placeholders(tmp_path: Path) -> None:
    text = write_card(tmp_path)
    assert "{" not in text
    assert "apache-2.0" in text
