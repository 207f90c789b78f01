"""What those who run a cluster ask over HTTP: /metrics for Prometheus, /status for `penstock`."""

from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from penstock.router.api.http import json_response
from penstock.router.exposition import Exposition
from penstock.router.frontend import Frontend


class Operations:
    """The routes."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._registry = CollectorRegistry()
        self._registry.register(Exposition(frontend.look, frontend.tally))

    async def metrics(self, request: Request) -> Response:
        """In the format that the scraper prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        return json_response(asdict(self._frontend.look()))
