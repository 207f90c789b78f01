"""Compares the answers of quantized forms of the bundled model with those of float32.

`python -m penstock.loadtests.quality` must run in the source tree, because it uses the questions of
`training`. The command makes a checkpoint of each quantized form. Penstock's engine then answers
all held-out questions greedily with each checkpoint. The command prints two tables in Markdown. The
first has exact match and perplexity of each form, compared with float32 on the same questions, with
95 % intervals (bootstrap over questions). The second has each form's error of a large matmul (see
`features`).
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL
from penstock.loadtests.quality.calibration import collect_inputs
from penstock.loadtests.quality.checkpoints import (
    Source,
    write_awq,
    write_gptq,
    write_mxfp4,
    write_nf4,
    write_nvfp4,
    write_q4_k,
    write_q6_k,
    write_w8a16,
)
from penstock.loadtests.quality.features import product_errors
from penstock.loadtests.quality.questions import (
    calibration_sequences,
    held_out,
    results_of,
    tokenizer_of,
)
from penstock.loadtests.quality.statistics import Results, compare


@dataclass(frozen=True, slots=True)
class Form:
    """A quantized form of the weights or of the KV cache, the way to get it, and its goal."""

    about: str
    goal: float | None  # maximum loss of exact match in percentage points, or None
    quantization: str = "none"  # value of the option `--quantization`
    write: Callable[[Source, Path], Path] | None = (
        None  # writes the quantized checkpoint; None to load the float checkpoint
    )
    kv_cache_dtype: str = "float32"


FORMS = {
    "int8": Form("`--quantization int8`, INT8 products", 1.0, "int8"),
    "fp8": Form("`--quantization fp8`", 1.0, "fp8"),
    "int4": Form("`--quantization int4`, groups of 32", None, "int4"),
    "GPTQ": Form("4 bits, groups of 128, calibrated", 1.0, write=write_gptq),
    "AWQ": Form("4 bits, groups of 128, calibrated", 1.0, write=write_awq),
    "Q4_K": Form("plain rounding; embeddings Q6_K", 2.5, write=write_q4_k),
    "Q6_K": Form("plain rounding", 1.0, write=write_q6_k),
    "NF4": Form("blocks of 64", 2.5, write=write_nf4),
    # INT8 of bitsandbytes has the same weights.
    "W8A16": Form("INT8 weights, float activations", 1.0, write=write_w8a16),
    "MXFP4": Form("blocks of 32", None, write=write_mxfp4),
    "NVFP4": Form("blocks of 16", None, write=write_nvfp4),
    "KV int8": Form("`--kv-cache-dtype int8`", None, kv_cache_dtype="int8"),
    "KV fp8": Form("`--kv-cache-dtype fp8`", None, kv_cache_dtype="fp8"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the comparison."""

    model: str = option("", "float Llama with a chat template; default: the bundled model")
    count: int = option(200, "held-out questions of each family; the model card has 200")
    calibration: int = option(8, "training conversations of each family for GPTQ and AWQ")
    form: tuple[str, ...] = option((), f"a form to measure, of {', '.join(FORMS)}; default: all")
    save_json: str = option("", "write the results to this file")


def main(arguments: list[str] | None = None) -> None:
    [options] = read_flags("quality", str(__doc__).partition("\n")[0], [Options], arguments)
    names = options.form or tuple(FORMS)
    for name in names:
        if name not in FORMS:
            sys.exit(f"quality: unknown form {name!r}: expected one of {', '.join(FORMS)}")
    folder = Path(options.model) if options.model else SHIPPED_MODEL
    tokenizer = tokenizer_of(folder)
    questions = held_out(tokenizer, options.count)
    inputs = collect_inputs(folder, calibration_sequences(tokenizer, options.calibration))
    source = Source.of(folder, inputs)
    found: dict[str, Results] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-quality-") as scratch:
        reference = results_of(folder, "none", "float32", tokenizer, questions)
        print(f"float32: {reference.exact_match:.2f} % of {len(questions)} questions", flush=True)
        for name in names:
            form = FORMS[name]
            made = folder if form.write is None else form.write(source, Path(scratch) / name)
            dtype = form.kv_cache_dtype
            found[name] = results_of(made, form.quantization, dtype, tokenizer, questions)
            print(f"{name}: {found[name].exact_match:.2f} %", file=sys.stderr, flush=True)
            if options.save_json:  # after each form: an interrupted run keeps its results
                _save(Path(options.save_json), options, found, reference)
    print(quality_table(found, reference))
    errors = product_errors()
    # The name of a form of quantized activations begins with that of its weights.
    shown = [each for name in names for each in errors if each.split(",")[0] == name]
    if shown:
        print("\n| form | error of the product | share of the form's bound |\n| --- | --: | --: |")
    for name in shown:
        each = errors[name]
        print(f"| {name} | {100 * each.relative:.2f} % | {each.of_bound:.2f} |")


def quality_table(found: dict[str, Results], reference: Results) -> str:
    """Return the table of exact match and perplexity, in Markdown."""
    lines = [
        "| form | exact match | points against float32 | perplexity, ratio | goal | met |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for name, results in found.items():
        points, ratio = compare(results, reference)
        goal = FORMS[name].goal
        is_met = "-" if goal is None else "yes" if points.value >= -goal else "**no**"
        lines.append(
            f"| {name} | {results.exact_match:.2f} % | {points.text(2)} | {ratio.text(4)} | "
            f"{'-' if goal is None else f'-{goal:g}'} | {is_met} |"
        )
    return "\n".join(lines)


def _save(path: Path, options: Options, found: dict[str, Results], reference: Results) -> None:
    forms = {}
    for name, results in found.items():
        points, ratio = compare(results, reference)
        forms[name] = {"exact_match": results.exact_match, "points": asdict(points),
                       "perplexity_ratio": asdict(ratio)}  # fmt: skip
    used = {name: value for name, value in asdict(options).items() if name != "save_json"}
    content = {"options": used, "questions": len(reference.right),
               "float32": reference.exact_match, "forms": forms}  # fmt: skip
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
