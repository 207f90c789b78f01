"""Compares the CPU operations that are used in serving with alternatives.

`python -m penstock.loadtests.micro.cpu_ops` uses one thread and reports the minimum CPU time per
call. The variants of an operation alternate in one process. The run fails if their results differ.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation.op import silu_and_mul
from penstock.kernels.attention.score_mod import PLAIN
from penstock.kernels.attention.torch_gather import GatheredPlan
from penstock.kernels.kv_cache.op import slot_rows, write_kv
from penstock.kernels.norm.op import rms_norm
from penstock.kernels.rope.op import rotary_table, rotate_
from penstock.kernels.sampling.logit_filters import _descending
from penstock.kernels.sampling.philox import SAMPLE, gumbel_noise, gumbel_noise_reference
from penstock.kernels.sampling.row_scan import scan_rows, scan_rows_reference

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation and the variants to compare."""

    name: str
    variants: dict[str, Call]  # functions by name; serving uses the first variant


def attention(name: str, lengths: Sequence[tuple[int, int]]) -> Operation:
    """Return the variants of attention for one layer: 12 query heads, 4 KV heads, 64 features each.

    `lengths` has the number of new tokens and the context length of each sequence.
    """
    starts = np.cumsum([0, *(new for new, _ in lengths)]).astype(np.int32)
    contexts = np.array([context for _, context in lengths], np.int32)
    num_columns = -(-int(contexts.max()) // 16)
    num_blocks = len(lengths) * num_columns
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    layer, query = torch.randn(2, num_blocks, 4, 16, 64), torch.randn(int(starts[-1]), 12, 64)
    batch = (starts, contexts, tables.reshape(len(lengths), num_columns), layer, 0)
    decodes = all(new == 1 for new, _ in lengths)

    def attend(is_paged: bool) -> Call:
        plan = GatheredPlan.of(*batch, reads_paged=is_paged, one_path=is_paged)
        return lambda: plan.attend(query, layer, PLAIN)

    variants = {"read in place, numba": attend(True), "gathered, torch": attend(False)}
    return Operation(name, variants if decodes else dict(reversed(variants.items())))


def cache_writes(num_tokens: int) -> Operation:
    layer, new = torch.zeros(2, 400, 4, 16, 64), torch.randn(num_tokens, 8, 64)
    slots = torch.randperm(6400)[:num_tokens]
    rows = slot_rows(slots, layer.shape)
    blocks, offsets, flat = slots // 16, slots % 16, rows.flatten()

    def served() -> Tensor:
        write_kv(layer, rows, new)
        return layer

    def by_token() -> Tensor:
        layer[:, blocks, :, offsets] = new.view(num_tokens, 2, 4, 64)
        return layer

    def copied() -> Tensor:
        layer.view(-1, 64).index_copy_(0, flat, new.view(-1, 64))
        return layer

    variants = {"rows, index_put_": served, "rows, index_copy_": copied, "block and slot": by_token}
    return Operation(f"cache write of {num_tokens} tokens, 4 heads of 64", variants)


Floats = npt.NDArray[np.float32]


@numba.njit(fastmath={"reassoc", "contract"})
def _norm_loop(x: Floats, weight: Floats, out: Floats) -> None:
    width = x.shape[1]
    for row in range(len(x)):
        power = np.float32(0)
        for i in range(width):
            power += x[row, i] * x[row, i]
        scale = np.float32(1 / np.sqrt(power / width + 1e-6))
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


@numba.njit(fastmath={"contract"})
def _rotate_loop(x: Floats, cos_sin: Floats) -> None:
    half = x.shape[2] // 2
    for token in range(len(x)):
        for head in range(x.shape[1]):
            for i in range(half):
                u, v = x[token, head, i], x[token, head, half + i]
                cos, sin = cos_sin[token, 0, i], cos_sin[token, 1, half + i]
                x[token, head, i] = u * cos - v * sin
                x[token, head, half + i] = v * cos + u * sin


def norm(num_tokens: int, width: int) -> Operation:
    x, weight = torch.randn(num_tokens, width), torch.randn(width)

    def by_loop() -> Tensor:
        out = torch.empty_like(x)
        _norm_loop(x.numpy(), weight.numpy(), out.numpy())
        return out

    return Operation(
        f"RMS norm, {num_tokens} x {width}",
        {
            "torch's own": lambda: rms_norm(x, weight, 1e-6),
            "written out": lambda: (
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
            ),
            "a numba loop": by_loop,
        },
    )


def rotation(num_tokens: int) -> Operation:
    heads = torch.randn(num_tokens, 16, 64)
    frequencies = 10000.0 ** -(torch.arange(32) / 32)
    cos_sin = rotary_table(frequencies, num_tokens, torch.float32)
    cos, sin = cos_sin[:, :1, :32], cos_sin[:, 1:, 32:]
    factors = torch.complex(cos, sin)

    def served() -> Tensor:
        x = heads.clone()
        rotate_(x, cos_sin)
        return x

    def by_halves() -> Tensor:
        low, high = heads.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def as_complex() -> Tensor:
        rotated = torch.complex(*heads.chunk(2, -1)) * factors
        return torch.cat((rotated.real, rotated.imag), -1)

    def by_loop() -> Tensor:
        x = heads.clone()
        _rotate_loop(x.numpy(), cos_sin.numpy())
        return x

    variants = {
        "swapped, in place": served,
        "by halves": by_halves,
        "complex": as_complex,
        "a numba loop": by_loop,
    }
    return Operation(f"rotation, {num_tokens} x 16 heads of 64 (a copy in each)", variants)


def gate(num_tokens: int) -> Operation:
    gate_up = torch.randn(num_tokens, 2 * 2048)

    def torch_silu(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate, inplace=True) * up

    variants: dict[str, Call] = {
        "a numba loop": lambda: silu_and_mul(gate_up.clone()),
        "torch's silu": lambda: torch_silu(gate_up.clone()),
    }
    return Operation(f"gate of silu, {num_tokens} x 2048 (a copy in each)", variants)


def sampling(rows: int, vocab: int) -> Iterator[Operation]:
    logits = torch.randn(rows, vocab) * 3
    seeds, counts = np.arange(rows, dtype=np.uint64), np.arange(rows)
    sizes = f"{rows} x {vocab}"

    def by_numpy() -> Tensor:
        noise = np.empty((rows, vocab), np.float32)
        counters = np.stack((counts, counts, np.full(rows, SAMPLE))).astype(np.uint32)
        gumbel_noise_reference(noise, counters, np.stack((seeds, seeds * 0)).astype(np.uint32))
        return torch.from_numpy(noise)

    noise: dict[str, Call] = {
        "numba": lambda: gumbel_noise(seeds, counts, counts, vocab),
        "numpy": by_numpy,
    }
    yield Operation(f"noise, {sizes}", noise)
    order: dict[str, Call] = {
        "numpy's sort": lambda: _descending(logits),
        "torch's sort": lambda: logits.sort(-1, descending=True).values,
    }
    yield Operation(f"order for the cuts, {sizes}", order)
    largest: dict[str, Call] = {
        "scan": lambda: torch.from_numpy(scan_rows(logits).tokens),
        "numpy's argmax": lambda: torch.from_numpy(scan_rows_reference(logits).tokens),
        "torch's argmax": lambda: logits.argmax(-1),
    }
    yield Operation(f"largest of each row, {sizes}", largest)


def operations(small: bool) -> Iterator[Operation]:
    few, many, vocab = (2, 5, 128) if small else (64, 512, 32000)
    yield attention(f"attention, {few} decodes of 157", [(1, 157)] * few)
    yield attention(f"attention, {few // 2} decodes of 512", [(1, 512)] * (few // 2))
    yield attention(f"attention, first chunk of {many}", [(many, many)])
    yield attention(f"attention, second chunk of {many}", [(many, 2 * many)])
    for num_tokens in (few, many):
        yield cache_writes(num_tokens)
        yield norm(num_tokens, 768)
        yield rotation(num_tokens)
        yield gate(num_tokens)
    yield from sampling(few // 2, vocab)


def least_ms(operation: Operation, rounds: int) -> dict[str, float]:
    """Return the minimum CPU time of each variant in milliseconds, over `rounds` calls.

    Raises AssertionError if the results of the variants differ.
    """
    calls = operation.variants
    first, *others = (call().clone() for call in calls.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-4)
    least = dict.fromkeys(calls, np.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - began)
    return {name: 1000 * seconds for name, seconds in least.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all operations, print the times and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.loadtests.micro.cpu_ops")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the command")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        for operation in operations(given.small):
            found = least_ms(operation, given.rounds)
            served = next(iter(found.values()))
            print(operation.name)
            for name, each in found.items():
                print(f"    {name:24}{each:9.3f} ms{each / served:8.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
