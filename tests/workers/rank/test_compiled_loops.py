"""A ready worker has loaded the compiled loops for its form of weights, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.cpu_compilation import required_groups
from penstock.kernels.linear import cpu_packed_int8
from penstock.kernels.linear.cpu_packed_int4 import has_int4_loops
from penstock.workers.config import WorkerConfig
from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.rank.cpu_kernels import _products, kernel_needs
from tests.support.gguf_files import make_gguf
from tests.support.quantized import FORMS, make_quantized
from tests.support.tiny import tiny_checkpoint

CPU = torch.device("cpu")
WEIGHT_ONLY, INT8 = {"dequantizing"}, {"level-products", "levels"}
INT4 = {"int4-products"} if has_int4_loops() else WEIGHT_ONLY

pytestmark = pytest.mark.skipif(not has_avx2(), reason="needs AVX2")


@pytest.fixture(autouse=True)
def int8_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packed_int8, "has_int8_loops", lambda: True)


def loaded(folder: Path, quantization: str = "none") -> set[str]:
    """Return the names of the loaded groups of loops that only some forms of weights need."""
    needs = kernel_needs(WorkerConfig("w", folder, quantization=quantization), CPU)
    assert needs is not None
    return {each.name for each in required_groups(needs)} & (WEIGHT_ONLY | INT8 | INT4)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("int8-products", INT8),
        ("int8-channel", WEIGHT_ONLY),
        ("int8-groups", WEIGHT_ONLY),
        ("awq", WEIGHT_ONLY),
        ("fp8-blocks", WEIGHT_ONLY),
    ],
)
def test_quantized_checkpoints_load_the_loops_of_their_products(
    form: str, expected: set[str], tmp_path: Path
) -> None:
    make_quantized(tmp_path, FORMS[form])
    assert loaded(tmp_path) == expected


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [("none", set()), ("int8", INT8), ("fp8", WEIGHT_ONLY), ("int4", INT4)],
)
def test_float_checkpoints_load_the_loops_of_the_option(
    quantization: str, expected: set[str], tmp_path: Path
) -> None:
    assert loaded(tiny_checkpoint(tmp_path), quantization) == expected


@pytest.mark.parametrize(
    ("kind", "quantization", "expected"),
    [("Q8_0", "none", WEIGHT_ONLY), ("Q8_0", "float", set()), ("F16", "none", set())],
)
def test_gguf_files_load_the_loops_of_blocks_that_stay_packed(
    kind: str, quantization: str, expected: set[str], tmp_path: Path
) -> None:
    assert loaded(make_gguf(tmp_path / "m", "llama2", kind), quantization) == expected


@pytest.mark.parametrize(("group", "act_order"), [(96, False), (128, True)])
def test_unsupported_groups_with_int8_activations_load_weight_only_loops(
    group: int, act_order: bool
) -> None:
    scheme = WeightScheme("packed", 4, group, act_order=act_order, activations="int8")
    assert _products(scheme) == {"weight-only"}
    assert _products(replace(scheme, group_size=128, act_order=False)) == {"int4"}
