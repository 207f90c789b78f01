"""Layouts of quantized modules: codes of compressed-tensors, and division among ranks."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationScheme,
)

from penstock.workers.layers.linear import RowParallelLinear
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.parallel.collectives import ProcessGroup
from penstock.workers.parallel.mesh import BadShape, Mesh, MeshCoord
from penstock.workers.parallel.parallel_groups import ParallelGroups
from penstock.workers.weights.loading import load_model
from penstock.workers.weights.quantized_layouts import check_module, read_matrix, stored_tensors
from penstock.workers.weights.quantized_module import QuantizedModule
from tests.support.quantized import WEIGHT_ONLY, make_quantized, small
from tests.support.quantized_fp4 import BITSANDBYTES, FLOATS_OF_4_BITS

CPU = torch.device("cpu")

CASES: dict[str, tuple[str, WeightScheme, dict[str, Any]]] = {
    "4 bits": (
        "pack-quantized",
        WeightScheme("packed", 4, 32),
        {"num_bits": 4, "strategy": "group", "group_size": 32},
    ),
    "4 bits, asymmetric": (
        "pack-quantized",
        WeightScheme("packed", 4, 64, symmetric=False),
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "8 bits packed": (
        "pack-quantized",
        WeightScheme("packed", 8),
        {"num_bits": 8, "strategy": "channel"},
    ),
    "int8": ("int-quantized", WeightScheme("int8", 8), {"num_bits": 8, "strategy": "channel"}),
    "int8 per tensor": (
        "int-quantized",
        WeightScheme("int8", 8, per_tensor=True),
        {"num_bits": 8, "strategy": "tensor"},
    ),
    "int8 groups": (
        "int-quantized",
        WeightScheme("int8", 8, 32),
        {"num_bits": 8, "strategy": "group", "group_size": 32},
    ),
    "int8, asymmetric": (
        "int-quantized",
        WeightScheme("int8", 8, symmetric=False),
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ),
    "int8 groups, asymmetric": (
        "int-quantized",
        WeightScheme("int8", 8, 64, symmetric=False),
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "fp8 per tensor": (
        "float-quantized",
        WeightScheme("fp8", 8, per_tensor=True),
        {"num_bits": 8, "strategy": "tensor", "type": "float"},
    ),
    "fp8": (
        "float-quantized",
        WeightScheme("fp8", 8),
        {"num_bits": 8, "strategy": "channel", "type": "float"},
    ),
    "fp8 blocks": (
        "float-quantized",
        WeightScheme("fp8", 8, 128, 128),
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128], "type": "float"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_compressed_tensors_reads(name: str) -> None:
    form, scheme, options = CASES[name]
    args = QuantizationArgs(**options)
    theirs = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = 40, 256
    module = QuantizedModule("m", scheme, outputs, inputs, has_group_table=False)
    shapes = {each.suffix: each.shape for each in stored_tensors(module, ())}
    state = {
        "weight": torch.randn(outputs, inputs, generator=generator),
        "weight_scale": torch.rand(shapes["weight_scale"], generator=generator) * 0.05 + 0.01,
    }
    if not args.symmetric:
        size = state["weight_scale"].shape
        state["weight_zero_point"] = torch.randint(-8, 8, size, generator=generator).to(torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, theirs)
    for each in stored_tensors(module, ()):
        assert packed[each.suffix].shape in (each.shape, *each.alternatives)
    expected = compressor.decompress(packed, theirs)["weight"]
    found = read_matrix(module, dict(packed))
    assert torch.equal(found.dequantize(), expected.float())


def dense(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the weights [out, in] of all quantized layers, computed from unit vectors."""
    return {
        " ".join(names): linear(torch.eye(linear.weight.shape[1])).T
        for names, linear in decoder.linears()
        if names != ("lm_head",)
    }


def rank(folder: Path, coord: MeshCoord) -> Decoder:
    ranks = ParallelGroups(coord, cast(ProcessGroup, object()))
    return load_model(folder, "auto", CPU, ranks=ranks)[1]


CUT_INSIDE_A_UNIT = {
    *("fp8-blocks", "fp8-block-dynamic", "packed-4-asymmetric", "packed-8-asymmetric", "awq")
}
"""Forms whose groups of 64 or 128 inputs would be cut if two ranks divided the 320 inputs of
`down_proj`. With a table of groups (GPTQ), a rank holds the scales of all groups, so any cut is
possible."""


WHOLE_BLOCKS = {
    **{name: WEIGHT_ONLY[name] for name in WEIGHT_ONLY.keys() - CUT_INSIDE_A_UNIT},
    **FLOATS_OF_4_BITS,
    "bitsandbytes-int8": BITSANDBYTES["bitsandbytes-int8"],
}


@pytest.mark.parametrize("name", sorted(WHOLE_BLOCKS))
def test_two_ranks_hold_the_parts_of_every_product(name: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, WHOLE_BLOCKS[name])
    whole = dense(load_model(tmp_path, "auto", CPU)[1])
    parts = [rank(tmp_path, Mesh(2).coord(number)) for number in range(2)]
    assert isinstance(parts[0].layers[0].attention.output, RowParallelLinear)
    for product, expected in whole.items():
        both = [dense(part)[product] for part in parts]
        if product.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(both, 1), expected)
            continue
        modules = len(product.split())
        sizes = {3: [192, 96, 96], 2: [320, 320]}[modules]
        split = [torch.split(each, [size // 2 for size in sizes]) for each in both]
        joined = [torch.cat(pair) for pair in zip(*split, strict=True)]
        assert torch.equal(torch.cat(joined), expected)


TABLES = ["bitsandbytes-nf4", "bitsandbytes-nf4-nested", "bitsandbytes-fp4-nested"]


@pytest.mark.parametrize("name", TABLES)
def test_two_ranks_hold_whole_blocks_of_bitsandbytes(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 640, "tie_word_embeddings": False}
    make_quantized(tmp_path, BITSANDBYTES[name], transformers.LlamaConfig(**small() | sizes))
    whole = dense(load_model(tmp_path, "auto", CPU)[1])
    parts = [dense(rank(tmp_path, Mesh(2).coord(number))) for number in range(2)]
    for product, expected in whole.items():
        both = [part[product] for part in parts]
        if product.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(both, 1), expected)
            continue
        widths = {3: [256, 128, 128], 2: [640, 640]}[len(product.split())]
        split = [torch.split(each, [width // 2 for width in widths]) for each in both]
        joined = [torch.cat(pair) for pair in zip(*split, strict=True)]
        assert torch.equal(torch.cat(joined), expected)


FORMS_WITH_UNITS = {
    **{name: WEIGHT_ONLY[name] for name in CUT_INSIDE_A_UNIT},
    **{name: BITSANDBYTES[name] for name in TABLES},
}


@pytest.mark.parametrize("name", sorted(FORMS_WITH_UNITS))
def test_ranks_that_would_cut_a_group_are_refused_by_name(name: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, FORMS_WITH_UNITS[name])
    with pytest.raises(
        BadShape, match=r"_proj: a rank's (in|out)puts begin or end at \d+, inside a unit of"
    ):
        rank(tmp_path, Mesh(2).coord(0))


@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs", "message"),
    [
        (WeightScheme("awq", 4), 8, 7, "m has 7 inputs, an odd number"),
        (WeightScheme("awq", 4), 7, 8, "m has 7 outputs: expected a multiple of 8"),
        (WeightScheme("gptq", 4), 8, 12, "m has 12 inputs: expected a multiple of 8"),
        (
            WeightScheme("mxfp4", 4, 32),
            8,
            48,
            "m has 48 inputs: expected a multiple of 32",
        ),
        (
            WeightScheme("packed", 8, 16),
            8,
            24,
            "m has 24 inputs: expected a multiple of 16",
        ),
    ],
)
def test_sizes_that_words_or_groups_do_not_divide_are_refused(
    scheme: WeightScheme, outputs: int, inputs: int, message: str
) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        check_module(QuantizedModule("m", scheme, outputs, inputs, has_group_table=False))
