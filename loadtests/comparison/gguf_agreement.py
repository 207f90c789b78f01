"""Compares Penstock with llama.cpp on a GGUF file: token ids of texts, and greedy answers.

`python -m penstock.loadtests.comparison.gguf_agreement FILE` installs llama.cpp once, in a virtual
environment of its own. Both engines encode the same texts and answer the same prompts. The prompts
are consecutive parts of the encoded texts. The command prints every difference.
"""

# ruff: noqa: RUF001  (the texts contain characters that look like others on purpose)

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.text.token_bytes import UnsupportedTokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.comparison.engines import (
    AS_IN_FILE,
    BY_NAME,
    HERE,
    Engine,
)
from penstock.loadtests.comparison.environments import NotInstalled, cache_folder, python_of
from penstock.loadtests.comparison.process import EngineFailed, EngineProcess
from penstock.loadtests.comparison.summary import Tokens

PROGRAM = "python -m penstock.loadtests.comparison.gguf_agreement"
_TOKENS = Path(__file__).parent / "adapters" / "llama_cpp_tokens.py"
_LLAMA_CPP = BY_NAME["llama.cpp"].environment
ENGINES = (
    Engine("penstock-file", "Penstock", "on_penstock", HERE, AS_IN_FILE),
    Engine("llama.cpp-file", "llama.cpp", "on_llama_cpp", _LLAMA_CPP, AS_IN_FILE),
)

TEXTS = (
    "Hello, world! It's a test; they'll say WE'RE done, I'VE seen HE'D.",
    "The quick brown fox jumps over the lazy dog. 1234567890 3.14159 -42 1,000,000",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "   leading, trailing   \n\n  and    inner spaces\t\ttabs \r\n carriage",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE x1y2z3 a.b.c/d\\e",
    'https://example.org/a?b=c&d=%20#e user@example.org {"k": [1, 2.5, null]}',
    "Füße über Straßen, déjà vu, naïve café, Ångström, İstanbul, ŁÓDŹ",
    "cafe\u0301 A\u030angstro\u0308m n\u0303",
    "Привет, мир! Ещё раз. ΑΒΓ αβγ ς Ω",
    "你好，世界。今天天气很好！ 日本語のテキスト、カタカナ。 한국어 문장입니다.",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 ✌🏽 ∑∫√ ≠ ≤ → “quotes” ‘single’ … — –",
    "\u00a0no-break\u2003em\u200bzero\ufeffmark\u3000ideographic",
    "<|im_end|> <s> </s> <|endoftext|> [INST] are written by a user",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!! ............ ------------ \n\n\n\n\n\n",
    "½ ² ₃ Ⅷ ٣ ५ 一二三 𝟘𝟙 ①",
    "",
    " ",
    "\n",
    "a",
)
"""Texts on which tokenizers tend to differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the comparison."""

    file: str = option("", "a GGUF file", positional=True)
    tokens: int = option(32, "tokens of each answer")
    prompt_len: int = option(24, "tokens of each prompt")
    prompts: int = option(8, "maximum number of prompts")
    threads: int = option(0, "threads; default: the cores usable by this process")

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise ValueError(f"{self.file!r} is not a file: expected the path of a GGUF file")
        check_least(self, 1, ("tokens", "prompt_len", "prompts"))
        check_least(self, 0, ("threads",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code.

    The code is 0 if ids and answers are equal, 1 if they differ or an engine failed, 2 for wrong
    flags.
    """
    about = "Compare Penstock's token ids and greedy answers with llama.cpp's, for a GGUF file."
    try:
        (options,) = read_flags(PROGRAM, about, (Options,), arguments)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    try:
        ours, theirs = _ids(Path(options.file))
        num_different = _report_ids(ours, theirs)
        answers = _answers(options, prompts_of(chain.from_iterable(ours), options))
    except (
        BadCheckpoint, EngineFailed, NotInstalled, OSError, UnsupportedModel, UnsupportedTokenizer,
    ) as error:  # fmt: skip
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 1 if num_different + _report_answers(*answers) else 0


def _ids(file: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Encode TEXTS with Penstock and with llama.cpp, and return the token ids of each.

    Raises EngineFailed if llama.cpp fails.
    """
    tokenizer = ModelTokenizer(file)
    ours = [tokenizer.encode_without_control(text, add_special_tokens=False) for text in TEXTS]
    done = subprocess.run(
        [str(python_of(_LLAMA_CPP, cache_folder())), str(_TOKENS), str(file)],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise EngineFailed(f"llama.cpp could not encode texts: {done.stderr.strip()[-600:]}")
    try:
        return ours, json.loads(done.stdout)
    except ValueError as error:
        raise EngineFailed(
            f"llama.cpp printed {done.stdout[-600:]!r}: expected token ids as JSON"
        ) from error


def _report_ids(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """Print each text whose token ids differ. Return the number of such texts."""
    different = [each for each in zip(TEXTS, ours, theirs, strict=True) if each[1] != each[2]]
    for text, mine, other in different:
        print(f"{text!r}:\n  Penstock  {mine}\n  llama.cpp {other}")
    print(f"texts with equal token ids: {len(TEXTS) - len(different)} of {len(TEXTS)}")
    return len(different)


def prompts_of(ids: Iterable[int], options: Options) -> list[list[int]]:
    """Split the token ids `ids` into prompts of equal length; return one or more prompts."""
    sequence, length = list(ids), options.prompt_len
    starts = range(0, max(1, len(sequence) - length + 1), length)
    return [sequence[start : start + length] for start in starts][: options.prompts]


def _answers(options: Options, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return the answers of each engine, [engine][prompt][token]. Raises EngineFailed."""
    settings = {
        "model": options.file,
        "threads": options.threads or len(os.sched_getaffinity(0)),
        "num_requests": len(prompts),
        "max_model_len": options.prompt_len + options.tokens,
        "kv_gib": 1,
        "kv_cache_dtype": "auto",
    }
    found = []
    for engine in ENGINES:
        process = EngineProcess(engine, python_of(engine.environment, cache_folder()), settings)
        try:
            found.append(process.generate(prompts, options.tokens).tokens)
        finally:
            process.close()
    return found


def _report_answers(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """Print each answer whose tokens differ. Return the number of such answers."""
    different = [
        (number, mine, other)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        if mine != other
    ]
    for number, mine, other in different:
        equal = Tokens.of([mine], [other]).agreeing
        print(f"answer {number} differs after {equal} tokens:")
        print(f"  Penstock  {mine}\n  llama.cpp {other}")
    print(f"equal answers of {len(ours[0])} tokens: {len(ours) - len(different)} of {len(ours)}")
    return len(different)


if __name__ == "__main__":
    sys.exit(main())
