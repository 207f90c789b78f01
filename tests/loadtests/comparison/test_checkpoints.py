from pathlib import Path

from penstock.loadtests.comparison.checkpoints import Cost, checkpoint
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL


def test_cost_of_the_bundled_model_matches_hand_computed_values() -> None:
    hidden, inner, layers, head_dim, heads, kv_heads, vocab_size = 256, 512, 4, 32, 8, 4, 2048
    matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    norms = (2 * layers + 1) * hidden
    assert Cost.of(SHIPPED_MODEL) == Cost(
        body=layers * matrices + norms,
        head=vocab_size * hidden,  # tied to the embedding, so counted once
        attention=4 * layers * heads * head_dim,
    )


def test_bundled_model_is_copied_because_engines_export_into_its_folder(tmp_path: Path) -> None:
    folder = checkpoint("shipped", tmp_path)
    assert folder.is_relative_to(tmp_path)
    assert Cost.of(folder) == Cost.of(SHIPPED_MODEL)
    assert checkpoint("shipped", tmp_path) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
