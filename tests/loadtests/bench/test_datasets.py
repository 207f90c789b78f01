"""Conversations in ShareGPT's format."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtests.bench.datasets import BadDataset, read_conversations, shuffled
from penstock.loadtests.bench.options import Work, WrongOptions, plan_of


def message(text: Any) -> dict[str, Any]:
    return {"from": "human", "value": text}


def entry(*texts: Any) -> dict[str, Any]:
    return {"conversations": [message(text) for text in texts]}


def written(folder: Path, content: Any) -> Path:
    path = folder / "conversations.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_first_prompt_and_reply_of_each_conversation_are_read(tmp_path: Path) -> None:
    long, reply = "a question " * 8, "an answer " * 4
    entries = [entry(long, reply, "more"), entry(long), entry("short", reply), entry()]
    (found,) = read_conversations(written(tmp_path, entries))
    assert found == (long, reply)
    assert (found.input_len, found.output_len) == (22, 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected a JSON file"),
        ({"a": 1}, "expected a JSON list"),
        ([entry("x" * 20, "y" * 20), 3], "entry 1 has no list in the field `conversations`"),
        ([{"conversations": 1}], "entry 0 has no list"),
        ([entry("x" * 20, 5)], "entry 0: expected the first two messages"),
        (
            [entry("short", "short")],
            "expected a conversation with a prompt and a reply of at least 16",
        ),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(BadDataset, match=words):
        read_conversations(written(tmp_path, content))


def test_same_seed_gives_the_same_order_of_conversations(tmp_path: Path) -> None:
    texts = [
        (f"question {number} " * (number + 2), "answer " * (number + 3)) for number in range(20)
    ]
    found = read_conversations(written(tmp_path, [entry(*each) for each in texts]))
    order = shuffled(found, 60, 25, seed=1)
    assert order == shuffled(found, 60, 25, seed=1)
    assert order != shuffled(found, 60, 25, seed=2)
    assert len(order) == len(set(order)) < 20
    assert all(each.input_len <= 60 and each.output_len <= 25 for each in order)
    assert len(shuffled(found, None, None, seed=1)) == 20


def test_plan_has_the_texts_and_their_estimated_lengths(tmp_path: Path) -> None:
    path = written(tmp_path, [entry("q" * 40, "a" * 80)])
    (planned,) = plan_of(Work(dataset=path, rate=2.0))
    assert (planned.text, planned.input_len, planned.output_len) == ("q" * 40, 10, 20)


def test_plan_of_an_unusable_dataset_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [entry("q" * 40, "a" * 80)])
    for work, words in (
        (Work(dataset=tmp_path / "none"), "No such file"),
        (Work(dataset=written(tmp_path, "[]")), "expected a conversation"),
        (Work(dataset=path, trace=path), "cannot be used together"),
        (Work(dataset=path, prefix_len=4), "--prefix-len cannot be used"),
    ):
        with pytest.raises(WrongOptions, match=words):
            plan_of(work)
    path = written(tmp_path, [entry("q" * 40, "a" * 80)])
    with pytest.raises(WrongOptions, match="longer than --max-input-len"):
        plan_of(Work(dataset=path, max_input_len=3))
