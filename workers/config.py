"""Settings of a worker: names, sizes and limits. This module does not import torch."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from penstock.common.block_hash import check_hash_key, new_hash_key
from penstock.workers.parallel.mesh import Mesh, MeshCoord

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8", "int8")
QUANTIZATIONS = ("none", "float", "int8", "fp8", "int4")
ATTENTION_BACKENDS = ("auto", "flashinfer", "fa3")
_WILDCARDS = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Limits on the size of a step, and the size of a block of the KV cache."""

    block_size: int
    max_sequences: int
    max_batched_tokens: int


LARGE_GPU_BYTES = 70 << 30
CPU_BATCHED_TOKENS = 512
"""Default token budget of a worker that has all CPU cores of its machine."""
MIN_CPU_BATCHED_TOKENS = 128


def default_sizes(memory_bytes: int | None, fraction_of_cores: float = 1.0) -> StepSizes:
    """Return the default sizes for a GPU with `memory_bytes` of memory, or for a CPU if None.

    The token budgets of a GPU are those of vLLM for an API server
    (`EngineArgs.get_batch_defaults`), except that vLLM uses 2048 on any A100. `max_sequences` is
    256 because a captured graph has at most 256 rows. `block_size` is 64 so that a tile of the
    attention kernel is one block.

    On a CPU, the token budget is proportional to `fraction_of_cores`, so that a step takes the same
    time on a worker that shares its cores. With the budget of a whole machine, prompts that are
    divided among two workers would get their first tokens later.
    """
    if memory_bytes is None:
        tokens = max(MIN_CPU_BATCHED_TOKENS, int(CPU_BATCHED_TOKENS * fraction_of_cores))
        return StepSizes(block_size=16, max_sequences=64, max_batched_tokens=tokens)
    tokens = 8192 if memory_bytes >= LARGE_GPU_BYTES else 2048
    return StepSizes(block_size=64, max_sequences=256, max_batched_tokens=tokens)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker. Raises ValueError, with a message of one line, if a value is invalid.

    A size that is None is derived from the model or the machine.
    """

    name: str
    model: Path  # checkpoint folder
    role: str = "mixed"
    host: str = "127.0.0.1"  # address to bind; routers and other workers connect to it
    port: int = 0  # port to bind; 0 binds any free port
    token: str | None = field(default=None, repr=False)  # cluster token that routers must send
    # Secret of the cluster; it is the key of the keyed hashes that identify cached blocks.
    hash_key: bytes = field(default_factory=new_hash_key, repr=False)
    # `step_sizes` gives the defaults of block_size, max_sequences and max_batched_tokens.
    block_size: int | None = None  # tokens per block
    kv_cache_mib: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None  # token budget of one step
    max_model_len: int | None = None
    max_queued: int = 1024
    # Limit of the time between two tokens of an answer, in seconds; 0 means no limit.
    tpot_slo_seconds: float = 0.0
    threads: int | None = None  # number of torch threads on a CPU
    # Number of threads while no other worker on this machine computes; None: always `threads`.
    max_threads: int | None = None
    dtype: str = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    quantization: str = "none"  # conversion of weights at loading; "float" dequantizes GGUF files
    # "auto": bfloat16 if the weights are INT8 on a CPU, otherwise `dtype`. "fp8" and "int8": 8-bit
    # values with scales.
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"  # "auto": Penstock's own kernels; other values need a GPU
    deterministic: bool = False  # deterministic mode: results do not depend on the batch
    # Admit sequences only when the batch is empty. This setting is a baseline for benchmarks.
    static_batching: bool = False
    device: str = "auto"
    # On a CPU, serve before all kernels are compiled (`kernels/background_compilation.py`).
    compile_in_background: bool = False
    plan_ahead: bool | None = None  # plan a step while another is in flight; None: only on a GPU
    # The worker sends a heartbeat to a router to which it has sent no message for this time. If a
    # router sends nothing for ten times as long, the worker ends the router's stream.
    heartbeat_seconds: float = 0.5
    canary_seconds: float = 10.0  # time without a step after which a canary is sent
    transfer_seconds: float = 5.0  # a KV transfer without progress for this time is aborted
    tp: int = 1  # ranks that share each layer; `parallel.mesh` describes tp, pp and ep
    pp: int = 1  # pipeline stages
    ep: int = 1  # groups of ranks among which the experts are divided
    rank: int = 0  # number of this process, in [0, tp * pp)
    ranks_seconds: float = 60.0  # longest time that ranks wait for each other within a step
    step_timeout_seconds: float = 30.0  # time limit per step; longer if recent steps were slow
    crash_dump_dir: Path | None = None  # folder of crash dumps; None: `crash_dump.default_folder`

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _at_least("max_queued", self.max_queued, 1)
        sizes = ("block_size", "max_sequences", "max_batched_tokens")
        for name in (*sizes, "kv_cache_mib", "max_model_len", "threads", "max_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not 0 <= self.tpot_slo_seconds < math.inf:
            raise ValueError(
                f"tpot_slo_seconds must be at least 0 and finite, not {self.tpot_slo_seconds}"
            )
        num_ranks = Mesh(self.tp, self.pp, self.ep).num_ranks
        if not 0 <= self.rank < num_ranks:
            raise ValueError(
                f"rank must be from 0 to {num_ranks - 1} (tp x pp - 1), not {self.rank}"
            )
        check_hash_key(self.hash_key)
        if not self.name:
            raise ValueError("the name of the worker is empty: expected at least one character")
        if self.host in _WILDCARDS:
            raise ValueError(
                f"host must be an address that routers can connect to, not {self.host!r}"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")
        seconds = ("heartbeat_seconds", "canary_seconds", "transfer_seconds", "ranks_seconds")
        for name in (*seconds, "step_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    def step_sizes(self, memory_bytes: int | None) -> StepSizes:
        """Return the sizes that are set, and defaults for the others.

        Args:
            memory_bytes: Memory of the GPU; None: the worker runs on a CPU.
        """
        default = default_sizes(memory_bytes, self.fraction_of_cores)
        sequences, tokens = self.max_sequences, self.max_batched_tokens
        # A step must have room for one token of every sequence.
        return StepSizes(
            block_size=self.block_size or default.block_size,
            max_sequences=sequences or min(default.max_sequences, tokens or sys.maxsize),
            max_batched_tokens=tokens or max(default.max_batched_tokens, sequences or 0),
        )

    @property
    def fraction_of_cores(self) -> float:
        """The worker's part of the cores that it shares with other workers; 1 if it shares none."""
        if not self.threads or not self.max_threads:
            return 1.0
        threads = self.threads * self.coord.mesh.num_ranks
        return threads / max(self.max_threads, threads)

    @property
    def coord(self) -> MeshCoord:
        """Position of this process in the mesh of the worker's ranks."""
        return MeshCoord(Mesh(self.tp, self.pp, self.ep), self.rank)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
