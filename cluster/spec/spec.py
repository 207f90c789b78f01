"""The specification of a cluster as frozen dataclasses, read from a YAML file, from flags, or both.

`ModelSpec` has the settings of a model, and `PoolSpec` the settings of a pool's workers. The other
classes apply to the whole cluster. Errors about keys and values contain the dotted path of the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from penstock.cluster.spec import labels
from penstock.cluster.spec.records import SpecError, knob, record
from penstock.cluster.spec.router_spec import KeySpec, RouterSpec
from penstock.router.parsers.parser_names import check_reasoning_parser, check_tool_parser

ROLES = ("prefill", "decode", "mixed")
BUNDLED = "demo"
"""Name and `path` of the model that is part of the package."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Settings of one model, such as its checkpoint, dtypes and limits. All workers use them."""

    path: str | None = knob(
        None, f"checkpoint folder, hub name, or `{BUNDLED}`, the bundled model; by default its NAME"
    )
    revision: str | None = knob(
        None, "commit, tag or branch of a checkpoint from the hub; default: its main branch"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "dtype of weights and KV"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = knob(
        "auto",
        "format of the KV cache; auto: as dtype, but bfloat16 with int8 weights (CPU); fp8 and "
        "int8 have one scale for each token and head",
    )
    quantization: Literal["none", "float", "int8", "fp8", "int4"] = knob(
        "none",
        "quantization of float weights while loading: int8 or fp8 (one scale per output), or int4 "
        "(groups of 32); int8, and fp8 on GPUs with FP8 tensor cores, also quantize activations; "
        "float dequantizes a GGUF file, whose Q8_0 and Q4_0 blocks otherwise stay packed",
    )
    max_model_len: int | None = knob(
        None, "maximum number of tokens of prompt and answer; default: the model's", 1
    )
    aliases: tuple[str, ...] = knob((), "further names of the model in the API")
    generation_config: Literal["auto", "none"] = knob(
        "auto",
        "defaults of sampling parameters; auto: those of the model's generation_config.json",
    )
    chat_template: str | None = knob(
        None, "file with a chat template, or its text, instead of the checkpoint's own"
    )
    tool_call_parser: str = knob(
        "auto",
        "vLLM's name of the tool call format; auto: found from the chat template; none: no parsing",
    )
    reasoning_parser: str = knob(
        "auto",
        "vLLM's name of the reasoning format; auto: found from the chat template; none: no parsing",
    )
    attention_backend: Literal["auto", "flashinfer", "fa3"] = knob(
        "auto",
        "attention kernels on GPUs; auto: Penstock's; others need their library, and the log says "
        "why one is not used",
    )
    deterministic: bool = knob(
        False, "equal requests get bitwise equal answers, whatever else is served (CPU)"
    )

    def __post_init__(self) -> None:
        for name, check in (
            ("tool_call_parser", check_tool_parser),
            ("reasoning_parser", check_reasoning_parser),
        ):
            try:
                check(getattr(self, name))
            except ValueError as error:
                raise SpecError(f"{name}: {error}") from None
        cached, dtype = self.kv_cache_dtype, self.dtype
        if dtype in ("bfloat16", "float16") and cached not in ("auto", dtype, "fp8", "int8"):
            raise SpecError(
                f"kv_cache_dtype: {cached} cannot be used with dtype {dtype}: use auto (the same "
                "dtype), fp8 or int8, or set dtype to float32"
            )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings of all workers of all pools."""

    ttft_slo_seconds: float = knob(
        0.0,
        "target for the time to first token, plus five times the prompt's own compute time; queued "
        "requests are ordered so that most meet it; 0: by arrival",
        0,
        3600,
    )
    tpot_slo_seconds: float = knob(
        0.0,
        "limit of the time per output token: while answers run, a worker computes only as many "
        "prompt tokens in a step as the limit allows; 0: no limit",
        0,
        60,
    )
    canary_seconds: float = knob(
        10.0, "an idle worker decodes a token this often, as a self-test", 0.1, 3600
    )
    step_timeout_seconds: float = knob(
        30.0, "replace a worker when a step, or a reply to the supervisor, takes longer", 1
    )
    crash_dump_dir: str | None = knob(
        None, "folder for crash dumps of hung workers; by default among temporary files"
    )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Settings of the workers of a pool. A worker keeps these settings when its role changes."""

    replicas: int = knob(1, "workers; the initial number if it may change", 0, 1024)
    min_replicas: int | None = knob(
        None, "minimum number of workers; by default replicas; 0: none while idle", 0, 1024
    )
    max_replicas: int | None = knob(None, "maximum number of workers; by default replicas", 0, 1024)
    tp: int = knob(1, "tensor parallel ranks of each stage, on one node", 1)
    pp: int = knob(1, "pipeline stages of a worker, of tp ranks each", 1)
    ep: int = knob(1, "expert parallel groups of a stage's ranks; must divide tp", 1)
    stages: Literal["pack", "spread"] = knob(
        "pack", "a worker's stages on as few nodes as possible, or each on another node"
    )
    gpus: int | None = knob(None, "GPUs per rank; by default 1 if the pool's nodes have any", 0)
    cpus: float | None = knob(
        None, "CPUs per rank; by default an even share of the node's", 0.01, 4096
    )
    threads: int | None = knob(
        None,
        "compute threads per rank; by default its CPUs and, if cpus is not set, those that other "
        "workers of the node leave idle",
        1,
        1024,
    )
    block_size: int | None = knob(
        None, "tokens per KV block; by default 16 on CPUs, 64 on GPUs", 1, 1024
    )
    kv_cache_mib: int | None = knob(None, "MiB of KV cache per worker; by default what fits", 1)
    max_sequences: int | None = knob(
        None, "most sequences that run at once on a worker; by default 64 on CPUs, 256 on GPUs", 1
    )
    max_batched_tokens: int | None = knob(
        None,
        "most tokens of a worker's step; by default 512 on CPUs (256 on half of the cores), 8192 "
        "on GPUs with 70 GiB or more, 2048 on others; if set, CPU steps are filled with prompts",
        1,
    )
    labels: tuple[str, ...] = knob(
        (), "KEY=VALUE, a label that its nodes must have (repeat for more)"
    )
    accelerator: str | None = knob(
        None, "kind of GPU that its nodes must have, as Ray names it (H100, A100-40G, ...)"
    )

    def __post_init__(self) -> None:
        self._check_labels()
        if self.tp % self.ep:
            raise SpecError(
                f"ep: {self.ep} does not divide tp ({self.tp}): the tp ranks of a stage form ep "
                "groups of equal size; use a divisor of tp"
            )
        if self.gpus is not None and self.gpus > 1:
            raise SpecError(f"gpus: at most 1 per rank, not {self.gpus}: for more, set tp or pp")
        if self.least > self.most:
            raise SpecError(f"min_replicas: {self.least} is more than max_replicas ({self.most})")
        if not self.least <= self.replicas <= self.most:
            raise SpecError(
                f"replicas: {self.replicas} is not between min_replicas ({self.least}) and "
                f"max_replicas ({self.most})"
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
            raise SpecError(f"accelerator: {self.accelerator} conflicts with gpus: 0; remove one")

    @property
    def selector(self) -> dict[str, str]:
        """The labels that the nodes of the pool must have, by label key."""
        return labels.required_labels(self.labels, self.accelerator)

    @property
    def least(self) -> int:
        """Minimum number of workers of the pool."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Maximum number of workers of the pool."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Pools:
    """The three pools. A specification without pools gets one prefill and one decode worker."""

    prefill: PoolSpec = PoolSpec(replicas=0)
    decode: PoolSpec = PoolSpec(replicas=0)
    mixed: PoolSpec = PoolSpec(replicas=0)

    def __post_init__(self) -> None:
        prefill, decode, mixed = (getattr(self, role).most for role in ROLES)
        if not prefill + mixed:
            raise SpecError("no worker prefills: set 'replicas' of prefill or mixed to 1 or more")
        if not decode + mixed:
            raise SpecError("no worker decodes: set 'replicas' of decode or mixed to 1 or more")

    @property
    def may_be_empty(self) -> bool:
        """True if all pools may be empty at the same time, because their minimum size is 0."""
        return not any(getattr(self, role).least for role in ROLES)


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """Limits for the autoscaling of pools whose number of workers may change."""

    max_gpus: int | None = knob(
        None, "maximum number of GPUs of all pools together; by default all GPUs of the nodes", 1
    )
    scale_down_seconds: float | None = knob(
        None,
        "drain a worker if its pool needed fewer workers for this long; by default 120, or 30 "
        "with a TTFT SLO",
        1,
        86400,
    )


DEFAULT_POOLS = Pools(prefill=PoolSpec(), decode=PoolSpec())


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The specification of a whole cluster."""

    models: Mapping[str, ModelSpec] = field(default_factory=lambda: {BUNDLED: ModelSpec()})
    ray_address: str | None = knob(
        None, "address of a running Ray cluster; default: start Ray here"
    )
    pass_env: tuple[str, ...] = knob(
        (), "environment variable to pass on to routers and workers (repeat for more)"
    )
    router: RouterSpec = field(default_factory=RouterSpec)
    keys: Mapping[str, KeySpec] = field(default_factory=dict)
    engine: EngineSpec = EngineSpec()
    pools: Pools = DEFAULT_POOLS
    scaling: ScalingSpec = ScalingSpec()
    routers: int = knob(
        1,
        "number of routers; the first uses the given ports, each further one the next higher ports",
        1,
        64,
    )
    log_format: Literal["text", "keys", "json"] = knob(
        "text", "text for people, or one line per event as key=value (keys) or JSON"
    )
    pool_nodes: bool = knob(
        False,
        "place a pool's workers only on nodes with a Ray resource of its name (for routers: "
        "router); wait for such nodes",
    )

    topology_key: str = knob(
        labels.ZONE,
        "node label of locality, such as a zone: all workers are placed on nodes with the same "
        "value if they fit there; empty: ignore locality",
    )

    def __post_init__(self) -> None:
        if self.pass_env and self.ray_address is not None:
            raise SpecError(
                "pass_env: cannot be used with ray_address: set variables on Ray's nodes instead"
            )
        self._check_models()
        self._check_ports()
        self._check_topology()
        for role in ROLES if self.pool_nodes else ():
            pool = getattr(self.pools, role)
            for name in ("cpus", "gpus"):
                if pool.most and getattr(pool, name) is None:
                    raise SpecError(
                        f"pools.{role}.{name}: is required with pool_nodes: set it, because its "
                        "default depends on the pool's nodes, which may not exist yet"
                    )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        (name,) = self.models
        return name

    @property
    def model(self) -> ModelSpec:
        """Settings of the only model of the cluster."""
        (model,) = self.models.values()
        return model

    @property
    def checkpoint(self) -> str:
        """Checkpoint folder or hub name of the model, or `BUNDLED`."""
        return self.model_name if self.model.path is None else self.model.path

    def ports(self, router: int) -> tuple[int, int, int]:
        """Return the HTTP port, the gRPC port and the operators' port of router number `router`.

        A port of 0 stands for any free port. With `pool_nodes`, each router has its own node, so
        all routers use the same ports.
        """
        after = 0 if self.pool_nodes else router
        http, grpc, admin = self._first_ports()
        return http and http + after, grpc and grpc + after, admin and admin + after

    def _first_ports(self) -> tuple[int, int, int]:
        http, grpc, admin = self.router.http_port, self.router.grpc_port, self.router.admin_port
        if admin is None:
            admin = http and http + self._ports_per_kind
        return http, grpc, admin

    @property
    def _ports_per_kind(self) -> int:
        return 1 if self.pool_nodes else self.routers

    def _check_models(self) -> None:
        if not self.models:
            raise SpecError(f"models: is empty: add a model, or remove 'models' to serve {BUNDLED}")
        if len(self.models) > 1:
            names = ", ".join(self.models)
            raise SpecError(f"models: this version serves one model; found {names}: keep one")
        pools = {role: getattr(self.pools, role) for role in ROLES}
        for name in ("block_size", "tp", "pp", "ep") if self.model.deterministic else ():
            values = {role: getattr(pool, name) for role, pool in pools.items() if pool.most}
            if len(set(values.values())) > 1:
                found = ", ".join(f"{role} {value or 'default'}" for role, value in values.items())
                raise SpecError(
                    f"models.{self.model_name}.deterministic: all pools need the same {name}, "
                    f"found {found}: deterministic workers exchange KV only with equal block sizes "
                    "and meshes"
                )

    def _check_topology(self) -> None:
        try:
            if self.topology_key:
                labels.check_key(self.topology_key)
        except labels.BadLabel as error:
            raise SpecError(f"topology_key: {error}") from None

    def _check_ports(self) -> None:
        last = max(self.ports(self.routers - 1))
        if last > 65535:
            raise SpecError(f"routers: router {self.routers} would use port {last} (above 65535)")
        used = zip(("HTTP", "gRPC", "operators"), self._first_ports(), strict=True)
        for (kind, port), (other, another) in combinations(used, 2):
            if not (port and another) or abs(port - another) >= self._ports_per_kind:
                continue
            if port == another:
                raise SpecError(f"router: {kind} and {other} cannot share port {port}; change one")
            raise SpecError(
                f"routers: {self.routers} routers need consecutive ports from {port} ({kind}) and "
                f"from {another} ({other}), which overlap: set them at least {self.routers} apart"
            )


MOVED = {
    "model": "models: {NAME: {path: FOLDER}}, where NAME is what clients call the model",
    "router.api_keys": "the keys into a file, and router.api_key_file: FILE",
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
"""What to write instead of each key that only older files have, by dotted path of the key."""


def parse(content: Mapping[str, Any]) -> ClusterSpec:
    """Build a `ClusterSpec` from nested plain mappings. Raise `SpecError` if a value is invalid."""
    return record(ClusterSpec, content, moved=MOVED)
