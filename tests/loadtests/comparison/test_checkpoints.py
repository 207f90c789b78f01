from pathlib import Path

from penstock.loadtests.comparison.checkpoints import Cost, checkpoint
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL


def test_the_cost_of_the_model_that_ships_by_hand() -> None:
    hidden, inner, layers, head_dim, heads, kv_heads, vocab_size = 256, 512, 4, 32, 8, 4, 2048
    matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    norms = (2 * layers + 1) * hidden
    assert Cost.of(SHIPPED_MODEL) == Cost(
        body=layers * matrices + norms,
        head=vocab_size * hidden,  # the embedding, once more
        attention=4 * layers * heads * head_dim,
    )


def test_the_model_that_ships_is_copied_since_peers_export_into_it(tmp_path: Path) -> None:
    folder = checkpoint("shipped", tmp_path)
    assert folder.is_relative_to(tmp_path)
    assert Cost.of(folder) == Cost.of(SHIPPED_MODEL)
    assert checkpoint("shipped", tmp_path) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
