"""`DeviceInfo`: the conversions and products that kernels may use on a device."""

import pytest

from penstock.kernels.triton_common.launch import DeviceInfo

KB = 1 << 10


@pytest.mark.parametrize(
    ("name", "converts"),
    [
        *(("sm_75", False), ("sm_80", False), ("sm_86", False), ("sm_87", False)),
        *(("sm_89", True), ("sm_90", True), ("sm_100", True), ("sm_120", True)),
        *(("gfx942", False), ("interpreter", False)),
    ],
)
def test_only_devices_from_capability_89_on_convert_e4m3(name: str, converts: bool) -> None:
    assert DeviceInfo(name, 64 * KB).converts_e4m3 is converts


@pytest.mark.parametrize(
    ("name", "multiplies"),
    [
        *(("sm_75", False), ("sm_80", True), ("sm_87", True), ("sm_120", True)),
        *(("gfx942", True), ("gfx90a", False), ("interpreter", True)),
    ],
)
def test_int8_products_need_capability_80(name: str, multiplies: bool) -> None:
    assert DeviceInfo(name, 64 * KB).multiplies_int8 is multiplies
