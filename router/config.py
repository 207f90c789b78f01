"""What a router is started with, and the bounds on everything that clients may send."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.common.sampling_params import SamplingLimits


@dataclass(frozen=True, slots=True)
class RequestBounds(SamplingLimits):
    """Limits on sizes, checked before anything is done with what a client sent."""

    max_body_bytes: int = 4 << 20  # of an HTTP body or a gRPC message
    max_header_bytes: int = 64 << 10
    receive_seconds: float = 30.0  # for a request's head, and again for its body
    max_prompts: int = 64  # in one call; each is a request of its own
    max_unread_tokens: int = 8192  # made, but not yet taken by a slow reader


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router.

    Ports of 0 are chosen by the system. The deadline of a request is the smaller of the client's
    and `timeout`. `max_model_len` bounds prompt and answer together; by default the model's own
    configuration and what the workers can hold decide.
    """

    model: Path  # a checkpoint folder; only its configuration and tokenizer are read here
    served_name: str
    name: str = "router-0"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everyone may call
    worker_token: str | None = field(default=None, repr=False)
    max_model_len: int | None = None
    timeout: float = 600.0  # seconds
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    ttft_slo_seconds: float = 0.0  # to first tokens: who waits is ordered by it; 0: by arrival
    vllm_metrics: bool = False  # tell the metrics under vLLM's names too
    waits_for_both: bool = False  # prefill and decode pools are never empty: see `readiness`
    wakes_workers: bool = False  # none may be there: they come when something waits for them
    worker_timeout_seconds: float = 10.0  # a worker silent for longer is lost
    step_timeout_seconds: float = 30.0  # of a step: see `queue.timeouts`
    bounds: RequestBounds = field(default_factory=RequestBounds)

    @property
    def stuck_seconds(self) -> float:
        """So long a worker may not get on. Its own watchdog goes first: it knows where it hangs.

        Longer than a KV transfer may be silent, 5 s: what another router's sequence receives there,
        with what waits behind it, is not seen from here.
        """
        return max(1.5 * self.step_timeout_seconds, 8.0)
