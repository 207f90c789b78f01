"""Settings of the routers and of the API keys that they accept."""

import re
from dataclasses import dataclass
from typing import Literal

from penstock.cluster.spec.records import SpecError, knob

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")
"""Pattern of the origin of a web page, as browsers send it in the Origin header."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Settings of the routers."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 accepts other machines")
    http_port: int = knob(8000, "port of the OpenAI API; 0: any free port", 0, 65535)
    grpc_port: int = knob(9000, "port of the gRPC API; 0: any free port", 0, 65535)
    admin_host: str = knob("127.0.0.1", "address to listen on for operators")
    admin_port: int | None = knob(
        None,
        "port for operators (metrics, status, roles); default: after the HTTP ports; 0: any free",
        0,
        65535,
    )
    api_key_file: str | None = knob(
        None, "file with the API keys of users, one per line", is_secret=True
    )
    allow_weak_keys: bool = knob(False, "accept API keys of fewer than 16 characters")
    allow_anonymous: bool = knob(
        False,
        "serve other machines without API keys: everyone who can reach the ports may use the model",
    )
    max_queued: int = knob(1024, "maximum number of queued requests", 1)
    routing: Literal["cost", "round_robin", "least_loaded", "power_of_two", "consistent_hash"] = (
        knob("cost", "how a worker is chosen among those of one role")
    )
    max_wait_seconds: float = knob(
        60.0, "refuse requests that would wait longer in the queue; 0: no bound", 0
    )
    max_request_cost: int = knob(
        1_000_000,
        "maximum cost of one call: prompts x n x (max_tokens + echoed prompt tokens) x "
        "(1 + logprobs)",
        1,
    )
    max_connections_per_address: int = knob(
        2048,
        "maximum number of open HTTP connections, and of gRPC connections, from one IPv4 address "
        "or IPv6 network (/64); 0: no bound for each address",
        0,
    )
    worker_timeout_seconds: float = knob(
        10.0,
        "a worker that sends nothing for this long is lost: its requests continue elsewhere",
        3,
    )
    drain_seconds: float = knob(30.0, "time for running requests to end after a stop", 0, 86400)
    no_special_in_completions: bool = knob(
        False, "read control tokens in prompts of completions as plain text, as always in chats"
    )
    vllm_metrics: bool = knob(False, "export the metrics under vLLM's names as well")
    allowed_origins: tuple[str, ...] = knob(
        (),
        "origin of web pages that may call /v1/, such as https://chat.example (repeat for more); "
        "*: all origins; none: no page of another origin",
    )

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise SpecError(
                    f"allowed_origins: {origin!r} is not an origin: expected SCHEME://HOST or "
                    "SCHEME://HOST:PORT, in lower case and without a path, or '*'"
                )


@dataclass(frozen=True, slots=True)
class KeySpec:
    """An API key with its name and its role. A file or an environment variable contains the key."""

    role: Literal["user", "operator", "metrics"] = knob(
        "user", "user: the model; metrics: reads metrics and status; operator: also changes roles"
    )
    file: str | None = knob(None, "file that contains the key", is_secret=True)
    env: str | None = knob(None, "environment variable that contains the key", is_secret=True)

    def __post_init__(self) -> None:
        if (self.file is None) == (self.env is None):
            given = "neither 'file' nor 'env'" if self.file is None else "both 'file' and 'env'"
            raise SpecError(f"the API key has {given}: set exactly one of them")
