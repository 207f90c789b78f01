"""Peak memory of loading: weights are packed layer by layer, not after all are loaded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import read_spec
from tests.support.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.quantized import fp8_blocks
from tests.support.quantized_fp4 import NF4, bitsandbytes, mxfp4

HIDDEN, INNER, LAYERS, NUM_EXPERTS = 768, 3072, 4, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
STACKED = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": HIDDEN,
    "head_dim": 64,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
}
"""Configuration of gpt-oss. The stack of gate and up has 16 experts, each of 4.7 MB in float32."""

LARGEST = 2 * INNER * HIDDEN * 4
"""Bytes of the largest linear layer, the fused gate and up, in float32."""

BUFFERS = 12 << 20
"""Allowed bytes for the buffer of the file, and for rows that are being converted."""

Loader = subprocess.Popen[str]

PACKED = CONFIG | {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16,
                   "num_key_value_heads": 16}  # fmt: skip
GATE_AND_UP = 2 * 1024 * 8192
"""Number of weights of gate and up. Their codes take at most a quarter of the bytes of float32."""

LOADER = """
import os, sys
from pathlib import Path
import torch
from penstock.workers.weights.loading import load_model

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def load(folder, quantization):
    return load_model(Path(folder), "float32", torch.device("cpu"), quantization=quantization)

def measure(warm, folder, quantization):
    load(warm, quantization)  # compiles what the packing needs
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    model = load(folder, quantization)
    print(memory("VmHWM:") - before, memory("VmRSS:") - before, flush=True)

for line in sys.stdin:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            print("failed", flush=True)
    else:
        measure(*line.rstrip().split("\\t"))
        os._exit(0)
"""
"""Program that measures one load for each line of its input, in a process forked for this load."""


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    """Start `LOADER`. Its forks need no time for imports."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", LOADER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


def make(folder: Path, layers: int, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    shapes = empty_decoder(read_spec(folder), torch.float32, torch.device("meta")).parameters()
    tensors = {name: torch.full(each.shape, 0.01) for name, each in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8", "int4"])
def test_peak_is_the_finished_size_plus_two_products(
    loader: Loader, tmp_path: Path, quantization: str
) -> None:
    folders = (make(tmp_path / "warm", 1), make(tmp_path / "model", LAYERS))
    peak, finished = memory_of(loader, folders, quantization)
    assert peak <= finished + 2 * LARGEST + BUFFERS
    if quantization != "none":
        fraction = 0.25 if quantization == "int4" else 0.5
        assert finished < fraction * LAYERS * (4 * HIDDEN + 3 * INNER) * HIDDEN * 4


@pytest.mark.parametrize(("quantization", "bytes_per_weight"), [("int8", 1.1), ("int4", 0.7)])
def test_stacked_experts_are_quantized_one_by_one(
    loader: Loader, tmp_path: Path, quantization: str, bytes_per_weight: float
) -> None:
    """Besides finished layers, memory holds at most one stack of codes and two experts' floats."""
    folders = (make(tmp_path / "warm", 1, STACKED), make(tmp_path / "model", 2, STACKED))
    peak, finished = memory_of(loader, folders, quantization)
    expert = 2 * HIDDEN * HIDDEN
    codes = NUM_EXPERTS * expert * bytes_per_weight
    assert peak <= finished + codes + 2 * expert * 4 + BUFFERS


def memory_of(loader: Loader, folders: tuple[Path, Path], quantization: str) -> tuple[int, int]:
    """Load both folders in one process; return the peak and growth in bytes of the second load."""
    assert loader.stdin is not None
    assert loader.stdout is not None
    print(*folders, quantization, sep="\t", file=loader.stdin, flush=True)
    answer = loader.stdout.readline()
    assert answer.strip() != "failed", "loading failed; the error is on stderr"
    peak, finished = map(int, answer.split())
    return peak, finished


def gptq_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "qweight": torch.zeros(inputs // 8, outputs, dtype=torch.int32),
        "qzeros": torch.zeros(inputs // 128, outputs // 8, dtype=torch.int32),
        "scales": torch.full((inputs // 128, outputs), 0.01, dtype=torch.float16),
    }


def awq_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    codes = torch.zeros(inputs, outputs // 8, dtype=torch.int32)
    return gptq_tensors(outputs, inputs) | {"qweight": codes}


def fp8_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight": torch.zeros(outputs, inputs).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((outputs // 128, inputs // 128), 0.01),
    }


def mxfp4_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight_packed": torch.zeros(outputs, inputs // 2, dtype=torch.uint8),
        "weight_scale": torch.full((outputs, inputs // 32), 120, dtype=torch.uint8),
    }


def nf4_tensors(outputs: int, inputs: int) -> dict[str, Tensor]:
    """Return the tensors of an NF4 module whose scales are quantized too (double quantization)."""
    size = outputs * inputs
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [outputs, inputs],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.01,
    }  # fmt: skip
    return {
        "weight": torch.zeros(size // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(size // 64, dtype=torch.uint8),
        "weight.quant_map": torch.from_numpy(NF4.copy()),
        "weight.nested_absmax": torch.full((size // 64 // 256,), 0.01),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


INTEGERS = {"bits": 4, "group_size": 128, "zero_point": True}
METHODS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]], float]] = {
    "gptq": ({"quant_method": "gptq", **INTEGERS}, gptq_tensors, 0.5),
    "awq": ({"quant_method": "awq", **INTEGERS}, awq_tensors, 0.5),
    "fp8": (fp8_blocks().config, fp8_tensors, 1),
    "mxfp4": (mxfp4(activations=False).config, mxfp4_tensors, 0.5),
    "nf4": (bitsandbytes("nf4", nested=True).config, nf4_tensors, 0.5),
}
"""For each method: its quantization config, a function that makes the tensors of a module, and the
bytes of the codes per weight."""


def make_packed(folder: Path, layers: int, method: str) -> Path:
    """Write a model whose matrices are quantized; all codes and zero points are zero."""
    config, tensors_of, _ = METHODS[method]
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(PACKED | {"num_hidden_layers": layers, "quantization_config": config})
    )
    shapes = empty_decoder(read_spec(folder), torch.float32, torch.device("meta")).parameters()
    tensors = {}
    for name, each in shapes.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = torch.full(each.shape, 0.01)
            continue
        outputs, inputs = each.shape
        for suffix, stored in tensors_of(outputs, inputs).items():
            tensors[f"{name.removesuffix('.weight')}.{suffix}"] = stored
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_peak_of_quantized_weights_is_the_finished_size_plus_two_products(
    loader: Loader, tmp_path: Path, method: str
) -> None:
    folders = (
        make_packed(tmp_path / "warm", 1, method),
        make_packed(tmp_path / "model", 4, method),
    )
    peak, finished = memory_of(loader, folders, "none")
    assert peak <= finished + 2 * GATE_AND_UP * METHODS[method][2] + BUFFERS
    size = (folders[1] / "model.safetensors").stat().st_size
    assert finished < 1.25 * size  # scales are in float32, so larger than the file


def test_peak_of_dequantized_gguf_weights_is_the_finished_size_plus_two_products(
    loader: Loader,
    tmp_path: Path,
) -> None:
    config, files = CONFIG | {"vocab_size": VOCAB_SIZE}, []
    for name, layers in (("warm", 1), ("model", 3)):
        folder = make(tmp_path / name, layers, config)
        make_tokenizer(folder)
        files.append(write_gguf(folder, tmp_path / f"{name}.gguf", "Q4_K"))
    peak, finished = memory_of(loader, (files[0], files[1]), "none")
    assert peak <= finished + 2 * LARGEST + BUFFERS
    stored = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert finished < 1.05 * stored  # about the bytes of the weights in float32


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
@pytest.mark.parametrize(("kind", "ratio"), [("Q8_0", 37 / 34), ("Q4_0", 21 / 18)])
def test_memory_for_packed_gguf_weights_is_near_the_size_of_the_file(
    loader: Loader, tmp_path: Path, kind: str, ratio: float
) -> None:
    """Blocks of 34 or 18 bytes stay packed; a float32 scale and a zero point add 3 bytes."""
    config, files = CONFIG | {"vocab_size": VOCAB_SIZE}, []
    for name, layers in (("warm", 1), ("model", 3)):
        folder = make(tmp_path / name, layers, config)
        make_tokenizer(folder)
        files.append(write_gguf(folder, tmp_path / f"{name}.gguf", kind))
    peak, finished = memory_of(loader, (files[0], files[1]), "none")
    assert finished < ratio * files[1].stat().st_size + 3e6  # the embeddings are float32
    assert peak <= finished + LARGEST / 2 + BUFFERS  # gate and up, before and after they are fused
