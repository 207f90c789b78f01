"""The comparison with llama.cpp. In these tests, Penstock runs in place of llama.cpp."""

import sys
from pathlib import Path

import pytest

from penstock.loadtests.comparison import gguf_agreement
from penstock.loadtests.comparison.gguf_agreement import ENGINES, TEXTS, Options, main, prompts_of
from tests.support.gguf_files import make_gguf
from tests.support.refusals import assert_refused

ENCODER = """
import json, sys
from pathlib import Path
from penstock.common.text.tokenizer import ModelTokenizer

tokenizer = ModelTokenizer(Path(sys.argv[1]))
ids = [tokenizer.encode_without_control(text, False) for text in json.load(sys.stdin)]
ids[0] += {extra}
print(json.dumps(ids))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "model", "llama2", "F16")


def replace_llama_cpp(monkeypatch: pytest.MonkeyPatch, folder: Path, extra: list[int]) -> None:
    """Run Penstock in place of llama.cpp; append `extra` to the token ids of the first text."""
    script = folder / "encode.py"
    script.write_text(ENCODER.format(extra=extra))
    monkeypatch.setattr(gguf_agreement, "_TOKENS", script)
    monkeypatch.setattr(gguf_agreement, "ENGINES", (ENGINES[0], ENGINES[0]))
    monkeypatch.setattr(gguf_agreement, "python_of", lambda *_: sys.executable)


@pytest.mark.process
def test_equal_ids_and_answers_end_with_0(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_llama_cpp(monkeypatch, tmp_path, [])
    assert main([str(file), "--tokens", "4", "--prompts", "2", "--threads", "1"]) == 0
    count = len(TEXTS)
    assert capsys.readouterr().out.splitlines() == [
        f"texts with equal token ids: {count} of {count}",
        "equal answers of 4 tokens: 2 of 2",
    ]


def test_text_with_other_ids_is_printed_and_ends_with_1(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_llama_cpp(monkeypatch, tmp_path, [7])
    monkeypatch.setattr(gguf_agreement, "_answers", lambda *_: [[[1]], [[1]]])
    assert main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert repr(TEXTS[0]) in printed
    assert f"texts with equal token ids: {len(TEXTS) - 1} of {len(TEXTS)}" in printed


def test_differing_answers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]
    assert gguf_agreement._report_answers(ours, theirs) == 1
    printed = capsys.readouterr().out
    assert "answer 1 differs after 1 tokens" in printed
    assert "equal answers of 3 tokens: 1 of 2" in printed


def test_prompts_are_pieces_of_the_ids_of_equal_length(file: Path) -> None:
    options = Options(str(file), prompt_len=3, prompts=2)
    assert prompts_of(range(10), options) == [[0, 1, 2], [3, 4, 5]]
    assert prompts_of(range(4), options) == [[0, 1, 2]]
    assert prompts_of(range(2), options) == [[0, 1]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["no-such.gguf"], "'no-such.gguf' is not a file"),
        ([__file__, "--tokens", "0"], "--tokens must be at least 1, not 0"),
    ],
)
def test_wrong_flags_give_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(main, flags, message, capsys)


def test_file_that_is_not_gguf_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__file__]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert Path(__file__).name in error
