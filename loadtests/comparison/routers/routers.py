"""The routers of the comparison, with their Python environments and settings."""

from dataclasses import dataclass, field

from penstock.loadtests.comparison.engines import HERE, Environment

_RAY_SERVE = Environment("ray-serve", ("ray[serve]==2.60.0",))


@dataclass(frozen=True, slots=True)
class Router:
    """One router of the comparison."""

    name: str
    title: str
    environment: Environment
    adapter: str = ""  # name of a module in `adapters`; empty for Penstock's router
    settings: dict[str, bool] = field(default_factory=dict)  # options that the adapter gets


PENSTOCK = Router("penstock", "Penstock", HERE)
PEERS = (
    Router(
        "sglang-router",
        "sglang-router",
        Environment("sglang-router", ("sglang-router==0.3.2",)),
        "on_sglang_router",
    ),
    Router(
        "litellm",
        "LiteLLM proxy",
        Environment("litellm", ("litellm[proxy]==1.106.0",)),
        "on_litellm",
    ),
    Router("ray-serve", "Ray Serve", _RAY_SERVE, "on_ray_serve", {"throughput": False}),
    Router(
        "ray-serve-haproxy",
        "Ray Serve, HAProxy",
        _RAY_SERVE,
        "on_ray_serve",
        {"throughput": True},
    ),
)
BY_NAME = {router.name: router for router in PEERS}
