"""Compares CPU variants of a model's linear layers.

`python -m penstock.loadtests.micro.cpu_linear` runs all matmuls of one step of a Llama model in
order. Each layer has its own weights, so that the weights do not fit into the caches. The variants
alternate. With `--threads 1`, the times are the CPU time of the thread, so that other processes
disturb them less.
"""

# ruff: noqa: E402  (`tune_process` must run before torch is imported)

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers.rank.process_tuning import tune_process

tune_process()  # must run before torch is imported

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.linear.cpu_packed_f32 import pack_f32
from penstock.kernels.linear.op import (
    int8_unsupported_reason,
    pack_int8,
    pack_onednn,
    supports_onednn,
)
from penstock.kernels.linear.quantize_weights import WeightForm, quantize_weight
from penstock.kernels.linear.quantized import (
    QuantizedMatrix,
    even_groups,
    pack_quantized,
    supports_dequantizing,
)
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import Quantiles, run
from penstock.loadtests.micro.random_llama import Shape

Variant = Callable[[Tensor], Callable[[Tensor], Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Settings of the measurement."""

    rows: tuple[str, ...] = option(("1", "8", "16", "64", "512"), "numbers of tokens per step")
    layers: int = option(12, "number of layers, each with its own weights")
    hidden: int = option(768, "width of the model")
    inner: int = option(2048, "width of the MLP")
    heads: int = option(12, "number of query heads")
    kv_heads: int = option(4, "number of KV heads")
    variants: tuple[str, ...] = option(("all",), "variants to measure, or all")
    threads: int = option(2, "number of threads")
    rounds: int = option(7, "measured runs of each variant")
    save_json: str = option("", "write the results to this file")

    def __post_init__(self) -> None:
        if not all(each.isdigit() and int(each) for each in self.rows):
            raise ValueError(f"--rows must be numbers of 1 or more, not {' '.join(self.rows)}")
        known = ["all", *variants()]
        for each in self.variants:
            if each not in known:
                raise ValueError(f"unknown variant {each!r}: expected one of {', '.join(known)}")


def shapes(load: Load) -> list[tuple[int, int]]:
    """Return the weight shape [N, K] of each linear layer of a step, in order."""
    shape = Shape(load.hidden, load.inner, load.layers, load.heads, load.kv_heads)
    head_dim = shape.hidden // shape.heads
    layer = [
        (shape.hidden + 2 * shape.kv_heads * head_dim, shape.hidden),
        (shape.hidden, shape.hidden),
        (2 * shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
    ]
    return layer * load.layers + [(shape.vocab, shape.hidden)]


def variants() -> dict[str, Variant]:
    """Return the available variants by name: functions that pack a weight into a linear layer."""
    found: dict[str, Variant] = {
        "plain (MKL)": lambda weight: lambda x: functional.linear(x, weight),
        "panels": lambda weight: pack_f32(weight, None),
    }
    if supports_onednn(torch.zeros(8, 8)):
        found["blocked (oneDNN)"] = lambda weight: pack_onednn(weight, None)
    if not int8_unsupported_reason(torch.device("cpu"), torch.float32):
        found["INT8"] = lambda weight: pack_int8(weight, None)
    if supports_dequantizing(torch.device("cpu"), torch.float32):
        found["int4"] = lambda weight: _pack(weight, "int4", int8_activations=True)
        found["int4, weight-only"] = lambda weight: _pack(weight, "int4")
        found["fp8"] = lambda weight: _pack(weight, "fp8")
        found["q8_0"] = _pack_q8_0
    return found


def _pack(
    weight: Tensor, form: WeightForm, int8_activations: bool = False
) -> Callable[[Tensor], Tensor]:
    return pack_quantized(quantize_weight(weight, form), None, torch.float32, int8_activations)


def _pack_q8_0(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Quantize and pack a weight as in GGUF's Q8_0: INT8 codes in groups of 32 inputs."""
    num_outputs, num_inputs = weight.shape
    blocks = quantize_weight(weight.reshape(-1, 32), "int8")
    codes = blocks.codes.view(num_outputs, num_inputs)
    scales, zeros = (each.view(num_outputs, -1) for each in (blocks.scales, blocks.zeros))
    groups = even_groups(num_inputs, 32, weight.device)
    return pack_quantized(
        QuantizedMatrix("int8", codes, scales, zeros, groups), None, torch.float32
    )  # fmt: skip


def seconds(
    products: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor], threads: int
) -> float:
    """Run all linear layers once; return the seconds: CPU time for one thread, else wall time."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin = clock()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return clock() - begin


async def _measure(load: Load) -> dict[str, Any]:
    torch.set_num_threads(load.threads)
    weights = [torch.randn(shape) for shape in shapes(load)]
    made = {
        name: [variant(weight) for weight in weights]
        for name, variant in variants().items()
        if "all" in load.variants or name in load.variants
    }
    found = {}
    for rows in map(int, load.rows):
        # The LM head computes only the last token of each prompt, so it gets few rows.
        counts = [rows] * (len(weights) - 1) + [min(rows, 64)]
        given = list(zip(counts, weights, strict=True))
        inputs = [torch.randn(count, weight.shape[1]) for count, weight in given]
        operations = sum(2 * count * weight.numel() for count, weight in given)
        times: dict[str, list[float]] = {name: [] for name in made}
        for round_number in range(load.rounds + 1):
            for name, products in made.items():
                took = seconds(products, inputs, load.threads)
                times[name] += [took] if round_number else []
        for name, each in times.items():
            quantiles = Quantiles.of([took * 1e3 for took in each])
            rate = operations / quantiles.median / 1e6
            print(f"{rows} rows, {name}: {quantiles} ms, {rate:.0f} GFLOP/s", flush=True)
            found[f"{name}, {rows} rows, ms"] = dataclasses.asdict(quantiles)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.cpu_linear"
    try:
        (load,) = read_flags(program, "Variants of linear layers.", (Load,), arguments)
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return run(lambda: _measure(load), dataclasses.asdict(load), load.save_json)


if __name__ == "__main__":
    sys.exit(main())
