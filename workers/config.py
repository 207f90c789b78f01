"""What a worker is told at its start: names, sizes and bounds. Free of torch."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.workers.parallel.mesh import Mesh, MeshCoord

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("none", "int8")
_WILDCARDS = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker. `ValueError` with one clear line where a value makes no sense.

    Of the sizes, `None` means: what the model or the machine gives.
    """

    name: str
    model: Path  # a checkpoint folder
    role: str = "mixed"
    host: str = "127.0.0.1"  # the address bound, which routers and other workers reach it by
    port: int = 0  # 0: any free one
    token: str | None = field(default=None, repr=False)  # what routers must show
    block_size: int = 16  # tokens
    kv_cache_mib: int | None = None
    max_sequences: int = 64
    max_batched_tokens: int = 512  # of one step
    max_model_len: int | None = None
    max_queued: int = 1024
    threads: int | None = None  # of torch, on a CPU
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    quantization: str = "none"  # of the weights
    kv_cache_dtype: str = "auto"  # the model's; bfloat16 with INT8 weights on a CPU
    deterministic: bool = False  # an answer's bits depend on no other request
    static_batching: bool = False  # to measure continuous batching against
    device: str = "auto"
    plan_ahead: bool | None = None  # the next step while one computes; None: on a GPU
    heartbeat_seconds: float = 0.5  # the longest silence of a stream; ten of them end it
    canary_seconds: float = 10.0  # without a step, then a token is decoded to see that it can be
    transfer_seconds: float = 5.0  # the longest silence of a KV transfer before it is given up
    tp: int = 1  # ranks that share each layer; see `parallel.mesh` for this and the next three
    pp: int = 1  # stages of layers
    ep: int = 1  # groups of ranks that experts are spread over
    rank: int = 0  # this process's, of tp x pp
    ranks_seconds: float = 60.0  # the longest that ranks wait for each other within a step
    step_timeout_seconds: float = 30.0  # a step, or anything else, may take so long: see `watchdog`
    crash_dump_dir: Path | None = None  # folder for what is left of a process that hung

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        for name in ("block_size", "max_sequences", "max_batched_tokens", "max_queued"):
            _at_least(name, getattr(self, name), 1)
        for name in ("kv_cache_mib", "max_model_len", "threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not 0 <= self.rank < Mesh(self.tp, self.pp, self.ep).num_ranks:
            raise ValueError(f"rank {self.rank} is none of tp {self.tp} x pp {self.pp} ranks")
        if not self.name:
            raise ValueError("a worker needs a name")
        if self.host in _WILDCARDS:
            raise ValueError(f"host {self.host!r} is no address that others can reach: name one")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")
        seconds = ("heartbeat_seconds", "canary_seconds", "transfer_seconds", "ranks_seconds")
        for name in (*seconds, "step_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def coord(self) -> MeshCoord:
        """This process's, among the worker's ranks."""
        return MeshCoord(Mesh(self.tp, self.pp, self.ep), self.rank)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
