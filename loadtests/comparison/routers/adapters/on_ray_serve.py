"""Ray Serve with one replica that forwards the stub's stream, on a Ray cluster of its own.

The replica copies bytes and does not parse them. Its cost is therefore a lower bound of the cost of
an LLM application on Serve. With the option `throughput`, Serve uses its settings for throughput:
HAProxy replaces the HTTP proxy, and requests go directly to the replica.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any


class Forward:
    """The Serve deployment, which streams the response of the stub to the client."""

    def __init__(self, stub: str) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0)
        )
        self._url = f"http://{stub}"

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        body = await request.body()
        headers = {"Content-Type": "application/json"}
        response = await self._session.post(
            self._url + request.url.path, data=body, headers=headers
        )

        async def content() -> AsyncIterator[bytes]:
            async with response:
                async for chunk in response.content.iter_any():
                    yield chunk

        return StreamingResponse(
            content(), status_code=response.status, media_type=response.content_type
        )


@contextlib.contextmanager
def router(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Start a Ray cluster and Serve with the deployment; yield Ray's version and the settings."""
    if options["throughput"]:
        os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    host, port = options["address"].split(":")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    try:
        serve.start(http_options={"host": host, "port": int(port)})
        deployment = serve.deployment(
            Forward,
            max_ongoing_requests=1024,
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False},
        )
        serve.run(deployment.bind(options["stub"]), route_prefix="/")
        yield {"ray": ray.__version__, "replicas": 1, "HAProxy": bool(options["throughput"])}
    finally:
        ray.shutdown()
