"""Problems of the tuning sweep: kernels with tile sizes, for the shapes of the models.

The file of tuned tiles has one entry for each problem. Workloads have the sizes that are timed. The
check is a small workload that runs the same compiled kernel, because batch sizes are not compiled
into kernels.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from penstock.kernels.attention.triton_configs import chunk_tiles, split_kv_tiles
from penstock.kernels.attention.triton_launch import padded
from penstock.kernels.linear import triton_quantized
from penstock.kernels.linear.quantized import (
    KIND_NUMBERS,
    Kind,
    QuantizedMatrix,
    even_groups,
    has_zeros,
    is_narrow,
    pack_quantized,
)
from penstock.kernels.moe.op import ExpertWeights, GatedActivation, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.moe.triton import tiles_for
from penstock.kernels.triton_common.launch import DeviceInfo, device_info
from penstock.loadtests.gpu.attention_work import Paged, Sizes
from penstock.loadtests.gpu.clock import Call
from penstock.loadtests.gpu.models import SHAPES, small

Candidate = dict[str, int]

BLOCK_SIZE = 64  # default block size of the KV cache on a GPU
SMALL_CANDIDATES = 3  # number of candidates per problem under the interpreter
SMALL_ROWS = 64  # maximum rows per expert under the interpreter
MOE_TOKENS = {16: 64, 64: 512, 128: 4096}
"""Number of tokens of the timed batch, by number of rows of the default tiles.

The numbers are for a model that uses 8 of 128 experts per token.
"""
WEIGHT_ONLY = "8b"  # model whose matmuls are tuned with weights of 4 and 8 bits
CODES: tuple[tuple[Kind, int], ...] = (("int4", 128), ("fp8", 0))
"""Kinds of codes that are tuned, each with the inputs per group; 0 means a group of all inputs."""
PRODUCT_ROWS = {triton_quantized.FEW_ROWS: (1, 16), triton_quantized.MANY_ROWS: (64, 2048)}
"""Numbers of rows of the timed matmuls, by number of rows of the default tiles."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel with one shape: one entry of the file of tuned tiles."""

    name: str
    kernel: str  # name of the kernel, a key of `tuned_tiles.KERNELS`
    shape: dict[str, int]
    candidates: list[Candidate]  # sets of tile sizes to compare; the first set is the default
    # Each function allocates inputs and returns a function to time.
    workloads: Mapping[str, Callable[[], Call]]
    check: Callable[[], Call]


def all_problems(device: torch.device, dtype: torch.dtype, is_small: bool) -> list[Problem]:
    """Return the problems of all models of `SHAPES`, without duplicates of kernel and shape."""
    chip = device_info(torch.empty(0, device=device))
    found: dict[tuple[str, str], Problem] = {}
    for model, shape in SHAPES.items():
        config = small(shape.config) if is_small else shape.config
        for problem in _problems_of(model, config, chip, device, dtype, is_small):
            found.setdefault((problem.kernel, str(problem.shape)), problem)
    return [*found.values(), *_weight_only_problems(chip, device, dtype, is_small)]


def _problems_of(
    model: str,
    config: dict[str, Any],
    chip: DeviceInfo,
    device: torch.device,
    dtype: torch.dtype,
    is_small: bool,
) -> Iterator[Problem]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]
    width, group = padded(dim), heads // kv_heads

    def attention(batch: int, context: int, prompts: bool) -> Callable[[], Call]:
        sizes = Sizes(batch, context, heads, kv_heads, dim, prompts, block_size=BLOCK_SIZE)

        def make() -> Call:
            torch.manual_seed(0)  # gives every candidate the same inputs
            return Paged.random(sizes, device, dtype).ours()

        return make

    def named(*batches: tuple[int, int], prompts: bool) -> dict[str, Callable[[], Call]]:
        used = [(2, 70)] if is_small else batches
        return {
            f"{batch} x {context}": attention(batch, context, prompts) for batch, context in used
        }

    item = dtype.itemsize
    yield Problem(
        f"split_kv, {model}",
        "attention.split_kv",
        {"width": width, "group": group, "itemsize": item, "cached": item},
        _first(
            split_kv_tiles(chip, width, item, group, item)._asdict(),
            _attention_candidates(chip, width, item, (), (2, 4, 8), (2, 3, 4, 5)),
            is_small,
        ),
        named((64, 2048), (8, 8192), prompts=False),
        attention(2, 70 if is_small else 700, False),
    )
    yield Problem(
        f"chunks, {model}",
        "attention.chunks",
        {"width": width, "itemsize": item, "cached": item},
        _first(
            chunk_tiles(chip, width, item, item)._asdict(),
            _attention_candidates(chip, width, item, (64, 128), (4, 8), (2, 3, 4)),
            is_small,
        ),
        named((1, 4096), (4, 1024), prompts=True),
        attention(1, 70 if is_small else 700, True),
    )
    if "num_experts" in config:
        yield from _expert_problems(model, config, chip, device, dtype, is_small)


def _first(default: Candidate, others: Sequence[Candidate], is_small: bool) -> list[Candidate]:
    """Return the default and the other candidates.

    The interpreter gets only a few candidates. A candidate without `rows` uses the rows of the
    default.
    """
    complete = [{**default, **each} for each in others]
    candidates = [default, *(each for each in complete if each != default)]
    return candidates[:: len(candidates) // SMALL_CANDIDATES] if is_small else candidates


def _attention_candidates(
    chip: DeviceInfo,
    width: int,
    itemsize: int,
    rows: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
) -> list[Candidate]:
    """Return candidates whose buffers of keys and values fit in shared memory."""
    return [
        {
            **({"rows": row} if row else {}),
            "columns": columns,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }
        for row, columns, num_warps, num_stages in itertools.product(
            rows or (0,), (32, 64, 128), warps, stages
        )
        if (2 * columns * (num_stages - 1) + row) * width * itemsize <= chip.shared_bytes
    ]


def _expert_problems(
    model: str,
    config: dict[str, Any],
    chip: DeviceInfo,
    device: torch.device,
    dtype: torch.dtype,
    is_small: bool,
) -> Iterator[Problem]:
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    size, inner = config["hidden_size"], config["moe_intermediate_size"]

    def layer(tokens: int) -> Callable[[], Call]:
        def make() -> Call:
            generator = torch.Generator(device).manual_seed(tokens)

            def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
                values = torch.randn(shape, generator=generator, device=device)
                return (values * scale).to(dtype)

            stacks = ExpertWeights(
                randn(experts, 2 * inner, size, scale=size**-0.5).transpose(1, 2),
                randn(experts, size, inner, scale=inner**-0.5).transpose(1, 2),
                GatedActivation("silu"),
            )
            x, logits = randn(tokens, size), randn(tokens, experts).float()
            chosen, weights = route(logits, Routing(top_k, normalise=True))
            return lambda: grouped_moe_forward(x, chosen, weights, stacks)

        return make

    for rows, tokens in MOE_TOKENS.items():
        if is_small:
            if rows > SMALL_ROWS:
                continue
            # The numbers in `MOE_TOKENS` are for 8 of 128 experts. Scale them to get the same mean
            # number of rows per expert in this smaller model.
            tokens = tokens * 8 * experts // (128 * top_k)
        default = asdict(tiles_for(dtype, tokens * top_k / experts, False))
        assert default["rows"] == rows
        shape = {"experts": experts, "size": size, "inner": inner, "rows": rows}
        others = [
            {"outputs": outputs, "inputs": inputs, "num_warps": warps, "num_stages": stages}
            for outputs, inputs, warps, stages in itertools.product(
                (64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5)
            )
            if (rows + outputs) * inputs * dtype.itemsize * (stages - 1) <= chip.shared_bytes
        ]
        yield Problem(
            f"experts, {rows} rows, {model}",
            "moe",
            {**shape, "itemsize": dtype.itemsize},
            _first(default, others, is_small),
            {f"{tokens} tokens": layer(tokens)},
            layer(tokens),
        )


def _weight_only_problems(
    chip: DeviceInfo, device: torch.device, dtype: torch.dtype, is_small: bool
) -> Iterator[Problem]:
    """Yield problems of matmuls with weight-only quantization.

    Each problem covers all matmuls of a layer, for one kind of codes and one number of rows of a
    tile.
    """
    config = SHAPES[WEIGHT_ONLY].config
    if is_small:
        config = {**small(config), "hidden_size": 128, "intermediate_size": 128}
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = [(heads * config["head_dim"], size), (size, size), (2 * inner, size), (size, inner)]
    for (kind, group), (rows, batches) in itertools.product(CODES, PRODUCT_ROWS.items()):
        default = asdict(triton_quantized.tiles_for(dtype, rows, True))
        assert default["rows"] == rows
        others = [
            {"rows": row, "outputs": outputs, "num_warps": warps, "num_stages": stages}
            for row, outputs, warps, stages in itertools.product(
                (rows,) if rows == triton_quantized.FEW_ROWS else (rows, 2 * rows),
                (32, 64, 128) if rows == triton_quantized.FEW_ROWS else (64, 128),
                (4, 8),
                (2, 3, 4),
            )
            if (row + outputs) * default["inputs"] * dtype.itemsize * (stages - 1)
            <= chip.shared_bytes
        ]
        yield Problem(
            f"{kind} weights, {rows} rows, {WEIGHT_ONLY}",
            "linear.weight_only",
            {
                "kind": KIND_NUMBERS[kind],
                "one_group": 1,
                "rows": rows,
                "itemsize": dtype.itemsize,
            },
            _first(default, others, is_small),
            {
                f"{batch} rows": _products(kind, group, layer, batch, device, dtype)
                for batch in ((rows,) if is_small else batches)
            },
            _products(kind, group, [(min(512, size), size)], rows, device, dtype),
        )


def _products(
    kind: Kind,
    group: int,
    layer: Sequence[tuple[int, int]],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], Call]:
    """Return a function that allocates matrices of codes [outputs, inputs] and returns a call.

    The call multiplies by each matrix and returns the last product. With several matrices, the
    codes do not stay in the L2 cache.
    """

    def make() -> Call:
        generator = torch.Generator(device).manual_seed(rows)

        def codes(most: int, *shape: int) -> torch.Tensor:
            found = torch.randint(most, shape, generator=generator, device=device)
            return found.to(torch.uint8)

        products = []
        for outputs, inputs in layer:
            groups = even_groups(inputs, group or inputs, device)
            num_groups = inputs // (group or inputs)
            scales = torch.full((outputs, num_groups), inputs**-0.5 / 8, device=device)
            zeros = codes(16, outputs, num_groups if has_zeros(kind) else 0)
            # The FP8 (e4m3) codes from 0 to 64 stand for values from 0 to 2.
            values = (
                codes(256, outputs, inputs // 2) if is_narrow(kind) else codes(65, outputs, inputs)
            )
            matrix = QuantizedMatrix(kind, values, scales, zeros, groups)
            x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
            products.append((pack_quantized(matrix, None, dtype), x))

        def run() -> torch.Tensor:
            return [product(x) for product, x in products][-1]

        return run

    return make
