"""The specification of a cluster as frozen records: a small YAML file, flags, or both.

Settings of a model are in `ModelSpec`, those of a pool's workers in `PoolSpec`; only what is
neither is cluster-wide. `records` parses strictly: every mistake is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.cluster.spec import labels
from penstock.cluster.spec.records import SpecError, knob, one_line, record

ROLES = ("prefill", "decode", "mixed")
BUNDLED = "demo"
"""Name and path of the model that is bundled with the package."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The front door."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    http_port: int = knob(8000, "port of the OpenAI API; 0: any free one", 0, 65535)
    grpc_port: int = knob(9000, "port of the gRPC API; 0: any free one", 0, 65535)
    api_keys: tuple[str, ...] = knob(
        (), "keys that clients must show (repeat for more); none: anyone may call"
    )
    api_keys_file: str | None = knob(None, "file with more keys, one a line")
    max_queued: int = knob(1024, "requests that may wait", 1)
    worker_timeout_seconds: float = knob(
        10.0, "a worker that says nothing for so long is lost, and its streams go on elsewhere", 3
    )
    drain_seconds: float = knob(30.0, "time for running requests when asked to stop", 0, 86400)
    vllm_metrics: bool = knob(False, "tell the metrics under vLLM's names too")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: its checkpoint and how it is computed, on every worker that serves it."""

    path: str | None = knob(
        None, f"checkpoint folder, hub name, or `{BUNDLED}`, the bundled model; by default the NAME"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob("auto", "of weights and KV")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "of KV; by default the dtype, but bfloat16 with int8 (CPU)"
    )
    quantization: Literal["none", "int8"] = knob(
        "none", "of weights; int8 also quantizes activations, token by token (CPU)"
    )
    max_model_len: int | None = knob(None, "longest prompt and answer; by default the model's", 1)
    deterministic: bool = knob(
        False, "the same request gives the same bytes, whatever else is served (CPU)"
    )

    def __post_init__(self) -> None:
        cached, dtype = self.kv_cache_dtype, self.dtype
        if dtype in ("bfloat16", "float16") and cached not in ("auto", dtype):
            raise SpecError(
                f"kv_cache_dtype: {cached} cannot be had with dtype {dtype}: only what computes in "
                "float32 may have another cache; use auto"
            )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings of all workers of all pools."""

    ttft_slo_seconds: float = knob(
        0.0,
        "the first token within so long and five times its prompt's own time: who waits is ordered "
        "so that most requests have that; 0: by arrival",
        0,
        3600,
    )
    canary_seconds: float = knob(
        10.0, "an idle worker decodes a token of its own so often, to show that it can", 0.1, 3600
    )
    step_timeout_seconds: float = knob(
        30.0, "a step, or an answer to the supervisor, may take so long; then it is replaced", 1
    )
    crash_dump_dir: str | None = knob(
        None, "folder for what is left of a worker that hung; by default among temporary files"
    )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of workers with the same settings. A worker keeps them when its role changes."""

    replicas: int = knob(1, "workers; at first, where their number may change", 0, 1024)
    min_replicas: int | None = knob(
        None, "fewest workers, by default replicas; 0: none while nothing is asked", 0, 1024
    )
    max_replicas: int | None = knob(None, "most workers; by default replicas", 0, 1024)
    tp: int = knob(1, "ranks that share each layer of a worker, on one node", 1)
    pp: int = knob(1, "stages that a worker's layers are cut into, of tp ranks each", 1)
    ep: int = knob(1, "groups of a stage's ranks that experts are spread over; divides tp", 1)
    stages: Literal["pack", "spread"] = knob(
        "pack", "a worker's stages on as few nodes as can be, or each on a node of its own"
    )
    gpus: int | None = knob(None, "GPUs a rank; by default one where the cluster has any", 0)
    cpus: float | None = knob(
        None, "CPUs a rank; by default the node's, shared out evenly", 0.01, 4096
    )
    threads: int | None = knob(None, "compute threads a rank; by default its whole CPUs", 1, 1024)
    block_size: int = knob(16, "tokens in a KV block", 1, 1024)
    kv_cache_mib: int | None = knob(None, "MiB of KV cache a worker; by default what fits", 1)
    max_sequences: int = knob(64, "sequences that run at once on a worker", 1)
    max_batched_tokens: int = knob(512, "tokens computed in one step of a worker", 1)
    labels: tuple[str, ...] = knob(
        (), "KEY=VALUE that its nodes are labelled with (repeat for more)"
    )
    accelerator: str | None = knob(
        None, "kind of GPU that its nodes have, as Ray names it (H100, A100-40G, ...)"
    )

    def __post_init__(self) -> None:
        self._check_labels()
        if self.tp % self.ep:
            raise SpecError(
                f"ep: {self.ep} does not divide tp ({self.tp}): experts are spread over the tp "
                "ranks of a stage"
            )
        if self.gpus is not None and self.gpus > 1:
            raise SpecError(f"gpus: a rank computes on one GPU at most, not {self.gpus}")
        if self.least > self.most:
            raise SpecError(f"min_replicas, {self.least}, is more than max_replicas, {self.most}")
        if not self.least <= self.replicas <= self.most:
            raise SpecError(
                f"replicas: {self.replicas} is not from min_replicas, {self.least}, to "
                f"max_replicas, {self.most}"
            )

    def _check_labels(self) -> None:
        try:
            labels.required_labels(self.labels, None)
        except labels.BadLabel as error:
            raise SpecError(f"labels: {error}") from None
        try:
            labels.required_labels(self.labels, self.accelerator)
        except labels.BadLabel as error:
            raise SpecError(f"accelerator: {error}") from None
        if self.accelerator is not None and self.gpus == 0:
            raise SpecError(f"accelerator: {self.accelerator} is asked for, but with gpus: 0")

    @property
    def selector(self) -> dict[str, str]:
        """The labels that its nodes must have."""
        return labels.required_labels(self.labels, self.accelerator)

    @property
    def least(self) -> int:
        """Workers that there always are."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Workers that there may be."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Pools:
    """Who prefills, who decodes, who does both; by default one worker each of the first two."""

    prefill: PoolSpec = PoolSpec(replicas=0)
    decode: PoolSpec = PoolSpec(replicas=0)
    mixed: PoolSpec = PoolSpec(replicas=0)

    def __post_init__(self) -> None:
        prefill, decode, mixed = (getattr(self, role).most for role in ROLES)
        if not prefill + mixed:
            raise SpecError("no worker prefills: give prefill or mixed one replica or more")
        if not decode + mixed:
            raise SpecError("no worker decodes: give decode or mixed one replica or more")

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be no worker at all, until something is asked."""
        return not any(getattr(self, role).least for role in ROLES)


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """How far and how fast pools follow what is asked, where their workers may change in number."""

    max_gpus: int | None = knob(
        None, "GPUs that all pools may hold together; by default what the nodes have", 1
    )
    scale_down_seconds: float | None = knob(
        None,
        "a worker drains when fewer have been enough for so long; by default 120, with promised"
        " first tokens 30",
        1,
        86400,
    )


DEFAULT_POOLS = Pools(prefill=PoolSpec(), decode=PoolSpec())


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A whole cluster."""

    models: Mapping[str, ModelSpec] = field(default_factory=lambda: {BUNDLED: ModelSpec()})
    ray_address: str | None = knob(None, "a running Ray cluster's; by default one is started here")
    router: RouterSpec = RouterSpec()
    engine: EngineSpec = EngineSpec()
    pools: Pools = DEFAULT_POOLS
    scaling: ScalingSpec = ScalingSpec()
    routers: int = knob(
        1,
        "routers, each with ports of its own: the first has those given, the next one more",
        1,
        64,
    )
    log_format: Literal["text", "keys", "json"] = knob(
        "text", "of what is told: for people, or a line an event as key=value or JSON"
    )
    pool_nodes: bool = knob(
        False, "wait for nodes that carry a Ray resource named like the pool (or router), use those"
    )

    topology_key: str = knob(
        labels.ZONE,
        "label of nodes: those with one value of it are near each other, and all workers go there "
        "if they fit; empty: anywhere",
    )

    def __post_init__(self) -> None:
        self._check_models()
        self._check_ports()
        self._check_topology()
        for role in ROLES if self.pool_nodes else ():
            pool = getattr(self.pools, role)
            for name in ("cpus", "gpus"):
                if pool.most and getattr(pool, name) is None:
                    raise SpecError(
                        f"pools.{role}.{name}: say how many a rank has: with pool_nodes the nodes "
                        "that would tell may not be there yet"
                    )

    @property
    def model_name(self) -> str:
        """The name that clients call the model by."""
        (name,) = self.models
        return name

    @property
    def model(self) -> ModelSpec:
        """The settings of the one model."""
        (model,) = self.models.values()
        return model

    @property
    def checkpoint(self) -> str:
        """Checkpoint folder or hub name of the model, or `BUNDLED`."""
        return self.model_name if self.model.path is None else self.model.path

    def ports(self, router: int) -> tuple[int, int]:
        """Of HTTP and gRPC of the router of that number; 0: any free one.

        On nodes of their own all have the same.
        """
        after = 0 if self.pool_nodes else router
        http, grpc = self.router.http_port, self.router.grpc_port
        return http and http + after, grpc and grpc + after

    def _check_models(self) -> None:
        if not self.models:
            raise SpecError(f"models: no model is named; leave it out to serve {BUNDLED}")
        if len(self.models) > 1:
            names = ", ".join(self.models)
            raise SpecError(f"models: this version serves one model; found {names}")
        pools = {role: getattr(self.pools, role) for role in ROLES}
        sizes = {role: pool.block_size for role, pool in pools.items() if pool.most}
        if self.model.deterministic and len(set(sizes.values())) > 1:
            found = ", ".join(f"{role} {size}" for role, size in sizes.items())
            raise SpecError(
                f"models.{self.model_name}.deterministic: all pools need the same block_size, "
                f"found {found}: deterministic workers exchange KV only in equal blocks"
            )

    def _check_topology(self) -> None:
        try:
            if self.topology_key:
                labels.check_key(self.topology_key)
        except labels.BadLabel as error:
            raise SpecError(f"topology_key: {error}") from None

    def _check_ports(self) -> None:
        http, grpc = self.router.http_port, self.router.grpc_port
        last = max(self.ports(self.routers - 1))
        if last > 65535:
            raise SpecError(f"routers: the last of {self.routers} would have port {last}")
        if not (http and grpc):
            return
        if http == grpc:
            raise SpecError(f"router: HTTP and gRPC cannot share port {http}")
        if not self.pool_nodes and abs(http - grpc) < self.routers:
            raise SpecError(
                f"routers: {self.routers} take as many ports from {http} on for HTTP and from "
                f"{grpc} on for gRPC: keep those {self.routers} apart"
            )


def read_file(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; `SpecError` where it holds none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {one_line(error)}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: is not YAML: {one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(
            f"{path}: holds no keys; it should begin like `models: {{NAME: {{path: FOLDER}}}}`"
        )
    return content


def read_keys(path: str) -> tuple[str, ...]:
    """The API keys of a file, one a line; empty lines are none. `SpecError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"router.api_keys_file: cannot be read: {one_line(error)}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise SpecError(f"router.api_keys_file: {path} holds no key, and anyone might call")
    return keys


MOVED = {
    "model": "models: {NAME: {path: FOLDER}}, where NAME is what clients call the model",
    "router.model_name": "it as the NAME in models: {NAME: {path: FOLDER}}",
    **{
        f"engine.{name}": f"models.NAME.{name}"
        for name in ("dtype", "kv_cache_dtype", "quantization", "max_model_len", "deterministic")
    },
    **{
        f"engine.{name}": f"pools.POOL.{name}, for each pool"
        for name in ("block_size", "kv_cache_mib", "max_sequences", "max_batched_tokens")
    },
}
"""Keys of older files, by path, and what to write instead."""


def parse(content: Mapping[str, Any]) -> ClusterSpec:
    """The specification that nested mappings of plain values give, or `SpecError`."""
    return record(ClusterSpec, content, moved=MOVED)
