"""Dequantization, bit for bit against the `gguf` package."""

import gguf
import numpy as np
import pytest
import torch

from penstock.common.gguf.tensor_types import BY_NAME
from penstock.workers.weights.gguf.dequantize import DEQUANTIZE, dequantize

HALF_PRECISION_NUMBERS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Offsets of the float16 numbers in a block; random bytes there could be NaN or infinity."""


def random_blocks(dtype: str, count: int, seed: int) -> np.ndarray:
    """Return random bytes [count, bytes of a block] whose float numbers are finite."""
    random = np.random.default_rng(seed)
    if dtype in ("F32", "F16", "BF16"):
        numbers = torch.from_numpy(random.standard_normal((count, 1)))
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
        return numbers.to(kind).view(torch.uint8).numpy()
    blocks = random.integers(0, 256, (count, BY_NAME[dtype].block_bytes), dtype=np.uint8)
    for at in HALF_PRECISION_NUMBERS[dtype]:
        halves = random.standard_normal((count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks


@pytest.mark.parametrize("dtype", DEQUANTIZE)
@pytest.mark.parametrize("seed", range(3))
def test_items_have_the_bits_that_the_gguf_package_gives(dtype: str, seed: int) -> None:
    blocks = random_blocks(dtype, 257, seed)
    kind = gguf.GGMLQuantizationType[dtype]
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
    found = dequantize(torch.from_numpy(blocks), dtype)
    assert found.shape == (257, BY_NAME[dtype].block_items)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32).view(found.shape))


def test_every_served_type_can_be_dequantized() -> None:
    assert DEQUANTIZE.keys() == BY_NAME.keys()


@pytest.mark.parametrize("dtype", BY_NAME)
def test_block_sizes_are_those_of_the_gguf_package(dtype: str) -> None:
    kind = gguf.GGMLQuantizationType[dtype]
    assert gguf.GGML_QUANT_SIZES[kind] == (BY_NAME[dtype].block_items, BY_NAME[dtype].block_bytes)
