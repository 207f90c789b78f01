"""Quantized forms with 4-bit codes that are not integers, and LLM.int8; see `quantized`.

Values of the codes, scales and packed bytes follow the definitions of the formats.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.support.quantized import Form, compressed

Floats = npt.NDArray[np.float64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
FP4 = np.array([0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48]) / 192


def nearest(values: Floats, table: Floats) -> npt.NDArray[np.int64]:
    """Return, for each value, the index of the nearest value in the table."""
    found: npt.NDArray[np.int64] = np.abs(values[..., None] - table).argmin(-1)
    return found


def low_first(codes: npt.NDArray[np.int64]) -> Tensor:
    """Pack pairs of the last dimension into bytes, the first code in the lower bits."""
    return torch.from_numpy((codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8))


def mx_blocks(weight: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Tensor]:
    """Quantize blocks of 32 to MXFP4; return codes, biased exponents and dequantized weights."""
    blocks = weight.double().numpy().reshape(*weight.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1)
    exponents = np.floor(np.log2(np.maximum(largest, 2.0**-100))).astype(np.int64) - 2
    codes = nearest(blocks / 2.0 ** exponents[..., None], E2M1)
    values = E2M1[codes] * 2.0 ** exponents[..., None]
    shape = weight.shape
    dequantized = torch.from_numpy(values.reshape(shape)).float()
    return codes.reshape(shape), exponents + 127, dequantized


def mxfp4(activations: bool) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents, dequantized = mx_blocks(weight)
        scales = torch.from_numpy(exponents.astype(np.uint8))
        return {"weight_packed": low_first(codes), "weight_scale": scales}, dequantized

    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
        "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    inputs = {**weights, "dynamic": True} if activations else None
    return Form(compressed(weights, "mxfp4-pack-quantized", inputs), quantize)


def nvfp4(modelopt: bool) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.double().numpy().reshape(len(weight), -1, 16)
        factor = float(np.float32(np.abs(blocks).max() / (6 * 448)))
        divisor = float(np.float32(1 / factor))
        wanted = torch.from_numpy(np.abs(blocks).max(-1) / 6 / factor)
        scales = wanted.float().to(torch.float8_e4m3fn)
        stored = scales.double().numpy()[..., None]
        wide = stored * factor if modelopt else stored / divisor
        codes = nearest(blocks / np.maximum(wide, 1e-30), E2M1)
        dequantized = torch.from_numpy((E2M1[codes] * wide).reshape(weight.shape)).float()
        packed = low_first(codes.reshape(weight.shape))
        if modelopt:
            names = ("weight", "weight_scale_2", "input_scale")
            numbers = torch.tensor(factor), torch.tensor(0.01)
        else:
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            numbers = torch.tensor([divisor]), torch.tensor([100.0])
        tensors = dict(zip(names, (packed, *numbers), strict=True))
        return tensors | {"weight_scale": scales}, dequantized

    if modelopt:
        config: dict[str, Any] = {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.router*"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }  # fmt: skip
        return Form(config, quantize)
    weights = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    inputs = {**weights, "dynamic": "local"}
    return Form(compressed(weights, "nvfp4-pack-quantized", inputs), quantize)


def _dynamic_map() -> Floats:
    """Return a table of codes for 8-bit scales: 256 ascending values in [-1, 1], dense around 0."""
    sizes = np.arange(128) / 127.0
    return np.concatenate((-(sizes[::-1] ** 2), sizes**2)).astype(np.float32).astype(np.float64)


def bitsandbytes(table: str, nested: bool) -> Form:
    values = {"nf4": NF4.astype(np.float64), "fp4": FP4.astype(np.float32).astype(np.float64)}[
        table
    ]

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.double().numpy().reshape(-1, 64)
        scales = np.abs(blocks).max(1).astype(np.float32).astype(np.float64)
        state: dict[str, Any] = {
            "quant_type": table, "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)
        }  # fmt: skip
        tensors = {"weight.quant_map": torch.from_numpy(values).float()}
        if nested:
            offset = float(np.float32(scales.mean()))
            around, each = scales - offset, np.zeros_like(scales)
            second = [np.abs(around[at : at + 256]).max() for at in range(0, len(scales), 256)]
            largest = np.array(second).astype(np.float32).astype(np.float64)
            codes = np.zeros(len(scales), np.uint8)
            for i, value in enumerate(around):
                codes[i] = np.abs(value / largest[i // 256] - _dynamic_map()).argmin()
                each[i] = _dynamic_map()[codes[i]] * largest[i // 256] + offset
            scales = each
            tensors |= {
                "weight.absmax": torch.from_numpy(codes),
                "weight.nested_absmax": torch.from_numpy(largest).float(),
                "weight.nested_quant_map": torch.from_numpy(_dynamic_map()).float(),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = torch.from_numpy(scales).float()
        codes_of_4 = nearest(blocks / scales[:, None], values)
        flat = codes_of_4.reshape(-1)
        # bitsandbytes stores the first code in the upper bits of a byte.
        packed = (16 * flat[0::2] + flat[1::2]).astype(np.uint8)
        tensors["weight"] = torch.from_numpy(packed)[:, None]
        name = f"weight.quant_state.bitsandbytes__{table}"
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        dequantized = (values[codes_of_4] * scales[:, None]).reshape(weight.shape)
        return tensors, torch.from_numpy(dequantized).float()

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": table, "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None, "llm_int8_has_fp16_weight": False,
    }  # fmt: skip
    return Form(config, quantize)


def llm_int8() -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round()
        tensors = {
            "weight": codes.to(torch.int8),
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return tensors, (codes.double() * largest.double()[:, None] / 127).float()

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
              "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"]}  # fmt: skip
    return Form(config, quantize)


FLOATS_OF_4_BITS: dict[str, Form] = {
    "mxfp4": mxfp4(activations=False),
    "mxfp4-activations": mxfp4(activations=True),
    "nvfp4": nvfp4(modelopt=False),
    "nvfp4-modelopt": nvfp4(modelopt=True),
}
BITSANDBYTES: dict[str, Form] = {
    "bitsandbytes-nf4": bitsandbytes("nf4", nested=False),
    "bitsandbytes-nf4-nested": bitsandbytes("nf4", nested=True),
    "bitsandbytes-fp4-nested": bitsandbytes("fp4", nested=True),
    "bitsandbytes-int8": llm_int8(),
}
FP4_AND_BITSANDBYTES = FLOATS_OF_4_BITS | BITSANDBYTES
