"""Compile a recorded launch for a chip, and measure its machine code."""

import dataclasses
import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import (
    ASTSource,
    get_cache_invalidating_env_vars,
    get_cache_key,
    make_backend,
)
from triton.runtime.jit import create_function_from_signature

from penstock.kernels.triton_common.launch import DeviceInfo, Launch
from tests.aot import pipelining
from tests.aot.pipelining import Loop, product_loops

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

TENSOR_CORE = re.compile(r"[HIQB]MMA|[HIQ]GMMA|UTC\w*MMA|v_s?mfma\w*")
LOCAL_MEMORY = re.compile(r"(?:LDL|STL)\b")

REGISTERS = 1 << 16
"""Number of 32-bit registers of one multiprocessor."""

RESERVED = 1 << 10
"""Bytes of shared memory that a multiprocessor reserves per program."""

CUDA_READS = re.compile(r"(?:LDG|LDGSTS|UTMALDG|UBLKCP)\b")
HIP_READS = re.compile(r"(?:buffer|global|flat)_load_")
WIDTHS = {
    **{"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32},
    **{"UTMALDG": 16, "UBLKCP": 16},  # TMA loads count as loads of 16 bytes
    **{"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2},
    **{"dwordx2": 8, "dwordx3": 12, "dwordx4": 16},
}
"""Bytes that a load instruction reads, by a part of its name. All other loads read 4 bytes."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """Measures of one kernel's machine code on one chip."""

    registers: int
    spilled: int  # spilled bytes per thread, or the number of local memory accesses if larger
    shared_bytes: int
    num_warps: int
    tensor_core: int  # number of tensor core instructions
    read_bytes: dict[int, int]  # total bytes that loads read, by the bytes of one load
    loops: list[Loop]  # innermost loops with matrix products; on NVIDIA GPUs only

    @property
    def wide_share(self) -> float:
        """Share of `read_bytes` that is read by loads of 16 bytes or more."""
        wide = sum(total for width, total in self.read_bytes.items() if width >= 16)
        return wide / max(1, sum(self.read_bytes.values()))

    def resident_warps(self, chip: DeviceInfo) -> int:
        """Return the number of warps that a multiprocessor of an NVIDIA GPU can hold at a time."""
        threads = self.num_warps * chip.warp_size
        by_registers = REGISTERS // max(1, -(-self.registers // 8) * 8 * threads)
        by_memory = (chip.shared_bytes + RESERVED) // (self.shared_bytes + RESERVED)
        return min(by_registers, by_memory) * self.num_warps


def compiled(launch: Launch, chip: DeviceInfo) -> Artefact:
    """Compile a launch and measure its machine code."""
    result = compile_launch(launch, chip)
    known = Path(triton.knobs.cache.dir) / f"{result.hash}-{_VERSION}.json"
    if known.exists():
        return _from_json(known.read_text())
    artefact = _cuda(result) if chip.is_cuda else _hip(result)
    known.write_text(json.dumps(dataclasses.asdict(artefact)))
    return artefact


def compile_launch(launch: Launch, chip: DeviceInfo) -> Any:
    """Compile a launch, with the specialization that `kernel[grid](...)` would choose."""
    source, target, options = _source(launch, chip)
    return triton.compile(source, target=target, options=options)


def cache_key(launch: Launch, chip: DeviceInfo) -> str:
    """Return the key under which Triton caches the compiled launch."""
    source, target, options = _source(launch, chip)
    backend = make_backend(target)
    variables = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, backend.parse_options(options), env_vars=variables)
    return hashlib.sha256(key.encode()).hexdigest()


def _source(launch: Launch, chip: DeviceInfo) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Return the arguments with which `triton.compile` compiles a launch."""
    target = (
        GPUTarget("cuda", int(chip.name.removeprefix("sm_")), chip.warp_size)
        if chip.is_cuda
        else GPUTarget("hip", chip.name, chip.warp_size)
    )
    kernel, backend = launch.kernel, make_backend(target)
    options = {**launch.options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, dict(options)
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return source, target, parsed.__dict__


def _from_json(text: str) -> Artefact:
    fields = json.loads(text)
    read_bytes = {int(width): total for width, total in fields["read_bytes"].items()}
    loops = [Loop(**each) for each in fields["loops"]]
    return Artefact(**fields | {"read_bytes": read_bytes, "loops": loops})


_SOURCES = b"".join(Path(file).read_bytes() for file in (__file__, str(pipelining.__file__)))
_VERSION = hashlib.sha256(_SOURCES).hexdigest()[:16]
"""Hash of the code that computes the cached measures; changed code does not use old measures."""


def _cuda(result: Any) -> Artefact:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    code = _instructions(text, r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)")
    spilled = int(usage["STACK"]) + int(usage["LOCAL"])
    return Artefact(
        registers=int(usage["REG"]),
        spilled=max(spilled, sum(code[name] for name in code if LOCAL_MEMORY.match(name))),
        shared_bytes=result.metadata.shared,
        num_warps=result.metadata.num_warps,
        tensor_core=_count(code, TENSOR_CORE),
        read_bytes=_reads(code, CUDA_READS),
        loops=product_loops(result.asm["ttgir"]),
    )


def _hip(result: Any) -> Artefact:
    text = result.asm["amdgcn"]
    found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_\w+): *(\d+)", text))
    code = _instructions(text, r"^\s+([a-z]\w+)")
    return Artefact(
        registers=int(found["vgpr_count"]),
        spilled=int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"]),
        shared_bytes=result.metadata.shared,
        num_warps=result.metadata.num_warps,
        tensor_core=_count(code, TENSOR_CORE),
        read_bytes=_reads(code, HIP_READS),
        loops=[],
    )


def _instructions(text: str, pattern: str) -> Counter[str]:
    return Counter(re.findall(pattern, text, re.MULTILINE))


def _count(code: Counter[str], pattern: re.Pattern[str]) -> int:
    return sum(number for name, number in code.items() if pattern.match(name))


def _reads(code: Counter[str], pattern: re.Pattern[str]) -> dict[int, int]:
    """Return the total bytes that loads read, by the bytes of one load."""
    found: Counter[int] = Counter()
    for name, number in code.items():
        if pattern.match(name):
            parts = set(re.split(r"[._]", name))
            width = max((WIDTHS[part] for part in parts & WIDTHS.keys()), default=4)
            found[width] += width * number
    return dict(sorted(found.items()))
