"""Configuration of a router, and size limits on client requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.common.api_key import ApiKey
from penstock.common.block_hash import check_hash_key, new_hash_key
from penstock.common.sampling_params import SamplingLimits
from penstock.router.parsers.parser_names import check_reasoning_parser, check_tool_parser


@dataclass(frozen=True, slots=True)
class RequestBounds(SamplingLimits):
    """Size limits that are checked before a request is processed."""

    max_body_bytes: int = 4 << 20  # bytes of an HTTP body or a gRPC message
    max_header_bytes: int = 64 << 10
    receive_seconds: float = 30.0  # time limit to receive a request or to open a gRPC connection
    max_prompts: int = 1024  # prompts in one API call; each prompt becomes a separate request
    max_request_cost: int = 1_000_000  # maximum cost of one call, see `requests.cost_limits`
    max_messages: int = 4096  # messages of a chat
    max_content_pieces: int = 4096  # content parts of all messages of a chat
    max_tool_calls: int = 4096  # tool calls of all messages of a chat
    max_tools: int = 512
    max_tools_bytes: int = 512 << 10  # largest size of all tools, in bytes of JSON
    max_documents: int = 1024
    max_json_depth: int = 64  # maximum nesting depth of the JSON of tools and documents
    max_template_kwargs: int = 16 << 10  # largest size of chat_template_kwargs, in bytes of JSON
    # Maximum tokens per Detokenize call: `max_detokenize_contexts` times the context length, but at
    # most `max_detokenize_tokens`. The tokens of one context are always allowed.
    max_detokenize_contexts: int = 64
    max_detokenize_tokens: int = 512 << 10
    max_encoding_chars: int = 64 << 20  # characters of all texts that wait to be tokenized
    max_helper_bytes: int = 64 << 20  # bytes of all bodies and chats that wait for a helper process
    max_unread_tokens: int = 8192  # generated tokens that a slow client has not read


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Limits on clients' connections; a limit closes only the connections that exceed it."""

    max_connections: int = 8192  # open HTTP connections, and open gRPC connections
    # Open connections of one IPv4 address or IPv6 network (see `client_network`); 0 means no limit.
    max_connections_per_address: int = 2048
    idle_seconds: float = 75.0  # longest pause from a response to the next HTTP request
    # Age of an HTTP connection after which it is closed with its next response.
    http_age_seconds: float = 3600.0
    # A client that reads nothing for longer is disconnected (HTTP), or its call fails (gRPC).
    write_seconds: float = 60.0
    # Time to read the rest of a request that was answered before all of it had arrived.
    linger_seconds: float = 2.0
    max_grpc_calls: int = 1024  # open calls of one gRPC connection
    max_health_watches: int = 16  # open `Watch` calls of gRPC health from one IP address
    grpc_idle_seconds: float = 300.0  # a gRPC connection without calls for this time is closed
    grpc_age_seconds: float = 3600.0  # connection age at which the client is asked to reconnect


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """Limits of a router's helper processes, which parse large bodies and render chats."""

    num_processes: int = 2  # each tenant uses at most one process at a time
    cpu_seconds: float = 1.0  # CPU time limit of one job; the kernel ends a process that exceeds it
    wall_seconds: float = 30.0  # wall-clock time limit of one job
    memory_bytes: int = 256 << 20  # memory limit of a process, in addition to its libraries


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of one router.

    Port 0 means that the system chooses a free port. A request's time limit is the smaller of the
    client's limit and `timeout`. `max_model_len` limits the total tokens of prompt and answer; by
    default the model's configuration and the workers set this limit.
    """

    model: Path  # checkpoint folder; a router reads only its configuration and tokenizer
    served_name: str
    aliases: tuple[str, ...] = ()  # additional names of the served model
    name: str = "router-0"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    admin_host: str = "127.0.0.1"  # address of the port for /metrics, /status, /steps and /role
    admin_port: int = 0
    api_keys: tuple[ApiKey, ...] = ()  # if empty, calls need no API key
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may call /v1/; "*" allows all
    worker_token: str | None = field(default=None, repr=False)
    # Secret key of the cluster, used to compute the hashes of cached blocks.
    hash_key: bytes = field(default_factory=new_hash_key, repr=False)
    max_model_len: int | None = None
    # Encode control tokens in text prompts as ordinary text.
    no_special_in_completions: bool = False
    generation_config: Literal["auto", "none"] = "auto"  # "auto" uses the model's sampling defaults
    # Text of a chat template that replaces the model's own.
    chat_template: str | None = field(default=None, repr=False)
    # "auto" derives the parser from the chat template; see `parsers.parser_names`.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    timeout: float = 600.0  # longest time limit of a request, in seconds
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20  # prompt tokens of all queued requests
    max_queued_cost: int = 32 << 20  # prompt and answer tokens of all queued sequences
    routing: str = "cost"  # name of the placement strategy (see `placement.routing_strategies`)
    max_wait_seconds: float = 60.0  # maximum time in the queue; with 0 only `timeout` applies
    # SLO on the time to first token (see `queue.slo_order`). 0 means no SLO: prompts are then
    # ordered by arrival.
    ttft_slo_seconds: float = 0.0
    # SLO on the time per output token of running answers; 0 means no SLO.
    tpot_slo_seconds: float = 0.0
    vllm_metrics: bool = False  # whether to export the metrics under vLLM's names as well
    # Whether the router becomes ready only when it has both prefill and decode workers (see
    # `observability.readiness`).
    waits_for_both: bool = False
    wakes_workers: bool = False  # whether a queued request makes an empty pool start a worker
    worker_timeout_seconds: float = 10.0  # a worker that sends nothing for longer counts as lost
    step_timeout_seconds: float = 30.0  # a worker's own time limit for one step
    bounds: RequestBounds = field(default_factory=RequestBounds)
    connections: ConnectionBounds = field(default_factory=ConnectionBounds)
    helpers: HelperLimits = field(default_factory=HelperLimits)

    def __post_init__(self) -> None:
        check_hash_key(self.hash_key)
        check_tool_parser(self.tool_call_parser)
        check_reasoning_parser(self.reasoning_parser)

    @property
    def model_names(self) -> Sequence[str]:
        """All names under which clients can request the model; answers contain the first one."""
        return list(dict.fromkeys((self.served_name, *self.aliases)))

    @property
    def stuck_seconds(self) -> float:
        """Seconds without a completed step after which a busy worker counts as stuck.

        This limit is longer than the step timeout, so that the worker's own watchdog fires first
        and writes a crash dump. It is also longer than 5 s, because a KV transfer may block the
        worker for that long without progress, and this router may not know about the transfer.
        """
        return max(1.5 * self.step_timeout_seconds, 8.0)
