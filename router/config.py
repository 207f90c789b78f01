"""Configuration of a router, and size limits on client requests."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.common.sampling_params import SamplingLimits


@dataclass(frozen=True, slots=True)
class RequestBounds(SamplingLimits):
    """Size limits that are checked before a request is processed."""

    max_body_bytes: int = 4 << 20  # bytes of an HTTP body or a gRPC message
    max_header_bytes: int = 64 << 10
    receive_seconds: float = 30.0  # for a request's head, and again for its body
    max_prompts: int = 64  # prompts per call; each prompt becomes a separate request
    max_unread_tokens: int = 8192  # generated tokens that a slow client has not read


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of one router.

    Port 0 means that the system chooses a free port. A request's time limit is the smaller of the
    client's and `timeout`. `max_model_len` limits prompt and answer together; by default the limits
    of the model's configuration and of the workers apply.
    """

    model: Path  # checkpoint folder; a router reads only its configuration and tokenizer
    served_name: str
    name: str = "router-0"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is needed
    worker_token: str | None = field(default=None, repr=False)
    max_model_len: int | None = None
    timeout: float = 600.0  # seconds
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    ttft_slo_seconds: float = 0.0  # see `queue.slo_order`; 0: prompts are ordered by arrival
    vllm_metrics: bool = False  # also export metrics under vLLM's names
    waits_for_both: bool = False  # prefill and decode pool always have workers: see `readiness`
    wakes_workers: bool = False  # pools may be empty: queued requests start workers
    worker_timeout_seconds: float = 10.0  # a worker silent for longer is lost
    step_timeout_seconds: float = 30.0  # a worker's time limit per step: see `stuck_seconds`
    bounds: RequestBounds = field(default_factory=RequestBounds)

    @property
    def stuck_seconds(self) -> float:
        """Seconds without a completed step after which a busy worker counts as stuck.

        This limit is longer than the step timeout, so that the worker's own watchdog fires first
        and writes a crash dump. It is also longer than the 5 s for which a KV transfer may be
        silent: a transfer for another router, unknown to this router, can block the worker.
        """
        return max(1.5 * self.step_timeout_seconds, 8.0)
