"""The benchmark of token masks: its vocabulary, and its figures with small sizes."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from penstock.common.text.tokenizer import ModelTokenizer
from penstock.loadtests.micro.ab_runner import Setup
from penstock.loadtests.micro.token_masks import (
    Load,
    measure_fills,
    measure_others,
    write_ranks,
    write_vocabulary,
)

SMALL = Load(tokens=20, answers=1, concurrency=2, output_len=4, rounds=1)
FOLDER = Path(__file__).parents[3] / "penstock" / "models" / "demo-small"


def test_vocabulary_has_its_size_all_bytes_and_distinct_tokens(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, 3000)
    tokenizer = ModelTokenizer(tmp_path)
    pieces = {tokenizer.token_bytes.bytes_of(token) for token in range(3000)}
    assert (tokenizer.vocab_size, len(pieces)) == (3000, 3000)
    assert {bytes([value]) for value in range(256)} <= pieces


def test_figures_are_of_masks_that_were_filled() -> None:
    found = measure_fills(SMALL, (3000,))["3000"]
    assert 20 < found["masks"] <= 40
    assert 0 < found["fill_p50_us"] <= found["fill_p99_us"]


def test_vocabulary_has_the_tokens_of_a_rank_file(tmp_path: Path) -> None:
    tokens = [bytes([value]) for value in range(256)] + [b" the", b"\xff\x00"]
    lines = [
        " ".join(["!", str(first), *(b64encode(each).decode() for each in part)])
        for first, part in ((0, tokens[:200]), (200, tokens[200:]))
    ]
    file = tmp_path / "small.cjs"
    file.write_text(f"module.exports = {json.dumps({'bpe_ranks': chr(10).join(lines)})};")
    assert write_ranks(tmp_path, file) == len(tokens) + 1
    tokenizer = ModelTokenizer(tmp_path)
    assert [tokenizer.token_bytes.bytes_of(rank) for rank in range(len(tokens))] == tokens


def test_both_modes_are_measured() -> None:
    found = measure_others(Setup(model=str(FOLDER)), SMALL)
    own = found["half_us"] - found["masks_us"]
    assert found["ratio"] == pytest.approx(own / found["plain_us"])
    assert found["ratio"] > 0
