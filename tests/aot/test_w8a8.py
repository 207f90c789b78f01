"""FP8 products: properties of compiled kernels that batch invariance and accuracy require."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from penstock.kernels.linear.triton_w8a8 import tiles_for
from penstock.kernels.triton_common.launch import INTERPRETED, DeviceInfo, record_launches
from tests.aot.case import SM_89, SM_90, SM_100, kernel_name
from tests.aot.cases.linear import w8a8_product
from tests.aot.compiling import CUOBJDUMP, TENSOR_CORE, compile_launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
]

ROWS = (1, 64, 4096)  # numbers of rows with different tiles


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def compiled_product(
    chip: DeviceInfo, rows: int, num_groups: int, tmp_path: Path
) -> tuple[str, str]:
    """Return the GPU IR and the machine code of an FP8 product."""
    with record_launches(chip) as launches:
        w8a8_product("fp8", num_groups, rows)
    (launch,) = (each for each in launches if kernel_name(each.kernel) == "_w8a8_matmul_kernel")
    result = compile_launch(launch, chip)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(result.asm["cubin"])
    command = [str(CUOBJDUMP), "-sass", str(file)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return result.asm["ttgir"], code


@pytest.mark.parametrize("chip", [SM_89, SM_90, SM_100], ids=lambda chip: chip.name)
def test_products_of_any_number_of_rows_use_one_kind_of_instruction(
    chip: DeviceInfo, tmp_path: Path
) -> None:
    """Only the number of outputs of an instruction may differ: "n" in QGMMA.64x[n]x32."""
    assert len({tiles_for(chip, True, rows) for rows in ROWS}) > 1
    used = set()
    for rows in ROWS:
        _, code = compiled_product(chip, rows, 1, tmp_path)
        used |= set(re.findall(rf"\b(?:{TENSOR_CORE.pattern})[\w.]*", code))
    assert len({re.sub(r"64x\d+x32", "64x[n]x32", name) for name in used}) == 1, used


@pytest.mark.parametrize("num_groups", [1, 32])
@pytest.mark.parametrize("chip", [SM_89, SM_90], ids=lambda chip: chip.name)
def test_tensor_cores_start_each_sum_of_128_products_from_zero(
    chip: DeviceInfo, num_groups: int, tmp_path: Path
) -> None:
    for rows in ROWS:
        ir, _ = compiled_product(chip, rows, num_groups, tmp_path)
        sums = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) %\S+, %\S+, %(\w+)", ir)
        assert sums
        for start in sums:
            assert re.search(rf"%{start} = arith\.constant dense<0\.0+e\+00>", ir), start
