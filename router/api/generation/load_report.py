"""The header `endpoint-load-metrics` of responses: a load report in the format of ORCA.

ORCA is Open Request Cost Aggregation. A load balancer requests a report by a header of its request,
which names the format. As in vLLM, the report has two named metrics. There is no report if the
format is unknown.
"""

import json
from collections.abc import Callable, Mapping

from starlette.requests import Request

from penstock.router.api.generation.sending import no_headers
from penstock.router.api.http import header_of
from penstock.router.frontend import Frontend

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def _text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def _json(metrics: Mapping[str, float]) -> str:
    return json.dumps({"named_metrics": metrics})


FORMATS: Mapping[str, Callable[[Mapping[str, float]], str]] = {"TEXT": _text, "JSON": _json}


def load_headers(request: Request, frontend: Frontend) -> Callable[[], Mapping[str, str]]:
    """Return a function that returns the header with the report, if one is requested."""
    name = (header_of(request.scope, REQUEST_HEADER) or "").upper()
    encode = FORMATS.get(name)
    if encode is None:
        return no_headers

    def headers() -> Mapping[str, str]:
        load = frontend.cluster_load.read()
        metrics = {
            # The value is rounded, so that a client cannot observe when other clients' requests
            # allocate single blocks.
            "kv_cache_usage_perc": round(load.kv_usage, 2),
            "num_requests_waiting": float(load.num_waiting),
        }
        return {RESPONSE_HEADER: f"{name} {encode(metrics)}"}

    return headers
