"""What a cluster is made of: a small YAML file, or the same as flags, as frozen records.

Strict: a key that is not known, a value of the wrong type or out of its range is refused by name.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from penstock.cluster import labels

ROLES = ("prefill", "decode", "mixed")

T = TypeVar("T")


class SpecError(ValueError):
    """The specification makes no sense; the message says where and what to do."""


def knob(default: Any, about: str, least: float | None = None, most: float | None = None) -> Any:
    """A field of a specification: its default, what it is, and its range (both ends allowed)."""
    return field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The front door."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    http_port: int = knob(8000, "port of the OpenAI API; 0: any free one", 0, 65535)
    grpc_port: int = knob(9000, "port of the gRPC API; 0: any free one", 0, 65535)
    model_name: str | None = knob(None, "what clients call the model; by default its folder's name")
    api_keys: tuple[str, ...] = knob(
        (), "keys that clients must show (repeat for more); none: anyone may call"
    )
    api_keys_file: str | None = knob(None, "file with more keys, one a line")
    max_queued: int = knob(1024, "requests that may wait", 1)
    lost_seconds: float = knob(
        10.0, "a worker that says nothing for so long is lost, and its streams go on elsewhere", 3
    )
    drain_seconds: float = knob(30.0, "time for running requests when asked to stop", 0, 86400)
    vllm_metrics: bool = knob(False, "tell the metrics under vLLM's names too")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every worker is given."""

    block_size: int = knob(16, "tokens in a KV block", 1, 1024)
    kv_cache_mib: int | None = knob(None, "MiB of KV cache a worker; by default what fits", 1)
    max_sequences: int = knob(64, "sequences that run at once on a worker", 1)
    max_batched_tokens: int = knob(512, "tokens computed in one step of a worker", 1)
    promised_seconds: float = knob(
        0.0,
        "the first token within so long and five times its prompt's own time: who waits is ordered "
        "so that most requests have that; 0: by arrival",
        0,
        3600,
    )
    max_model_len: int | None = knob(None, "longest prompt and answer; by default the model's", 1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob("auto", "of weights and KV")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "of KV; by default the dtype, but bfloat16 with int8 (CPU)"
    )
    quantization: Literal["none", "int8"] = knob(
        "none", "of weights; int8 also quantizes activations, token by token (CPU)"
    )
    deterministic: bool = knob(
        False, "the same request gives the same bytes, whatever else is served (CPU)"
    )
    canary_seconds: float = knob(
        10.0, "an idle worker decodes a token of its own so often, to show that it can", 0.1, 3600
    )
    hang_seconds: float = knob(
        30.0, "a step, or an answer to the supervisor, may take so long; then it is replaced", 1
    )
    bundles: str | None = knob(
        None, "folder for what is left of a worker that hung; by default among temporary files"
    )

    def __post_init__(self) -> None:
        cached, dtype = self.kv_cache_dtype, self.dtype
        if dtype in ("bfloat16", "float16") and cached not in ("auto", dtype):
            raise SpecError(
                f"kv_cache_dtype: {cached} cannot be had with dtype {dtype}: only what computes in "
                "float32 may have another cache; use auto"
            )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of like workers."""

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
            labels.asked(self.labels, None)
        except labels.BadLabel as error:
            raise SpecError(f"labels: {error}") from None
        try:
            labels.asked(self.labels, self.accelerator)
        except labels.BadLabel as error:
            raise SpecError(f"accelerator: {error}") from None
        if self.accelerator is not None and self.gpus == 0:
            raise SpecError(f"accelerator: {self.accelerator} is asked for, but with gpus: 0")

    @property
    def selector(self) -> dict[str, str]:
        """The labels that its nodes must have."""
        return labels.asked(self.labels, self.accelerator)

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

    model: str | None = knob(None, "checkpoint folder or hub name; by default the one that ships")
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

    def ports(self, router: int) -> tuple[int, int]:
        """Of HTTP and gRPC of the router of that number; 0: any free one.

        On nodes of their own all have the same.
        """
        after = 0 if self.pool_nodes else router
        http, grpc = self.router.http_port, self.router.grpc_port
        return http and http + after, grpc and grpc + after

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
        raise SpecError(f"{path}: cannot be read: {_one_line(error)}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: is not YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(f"{path}: holds no keys; it should begin like `model: NAME`")
    return content


def read_keys(path: str) -> tuple[str, ...]:
    """The API keys of a file, one a line; empty lines are none. `SpecError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"router.api_keys_file: cannot be read: {_one_line(error)}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise SpecError(f"router.api_keys_file: {path} holds no key, and anyone might call")
    return keys


def parse(content: Mapping[str, Any]) -> ClusterSpec:
    """The specification that nested mappings of plain values give, or `SpecError`."""
    return _record(ClusterSpec, content, "")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one, nested ones too; where they differ, `over` is right."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def knobs(record: type) -> dict[str, tuple[Field[Any], Any]]:
    """The plain fields of a specification and their types, nested records left out."""
    hints = get_type_hints(record)
    return {f.name: (f, hints[f.name]) for f in fields(record) if "about" in f.metadata}


def _record(record: type[T], content: Any, where: str) -> T:
    if not isinstance(content, Mapping):
        raise SpecError(f"{where or 'the file'}: expected keys, not {content!r}")
    hints = get_type_hints(record)
    unknown = [key for key in content if key not in hints]
    if unknown:
        name = f"{where}.{unknown[0]}" if where else str(unknown[0])
        raise SpecError(f"{name}: unknown key; known here: {', '.join(hints)}")
    metadata = {f.name: f.metadata for f in fields(record)}  # type: ignore[arg-type]
    values = {}
    for key, value in content.items():
        path = f"{where}.{key}" if where else key
        nested = isinstance(hints[key], type) and hasattr(hints[key], "__dataclass_fields__")
        if nested:
            values[key] = _record(hints[key], value, path)
        else:
            values[key] = _checked(value, hints[key], metadata[key], path)
    try:
        return record(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}" if where else str(error)) from None


def _checked(value: Any, kind: Any, metadata: Mapping[str, Any], where: str) -> Any:
    result = _typed(value, kind)
    if result is _WRONG:
        raise SpecError(f"{where}: expected {_spelled(kind)}, not {value!r}")
    least, most = metadata["least"], metadata["most"]
    numbers = isinstance(result, (int, float))
    if numbers and not ((least is None or result >= least) and (most is None or result <= most)):
        bounds = f"{least} or more" if most is None else f"from {least} to {most}"
        raise SpecError(f"{where}: expected {bounds}, not {value!r}")
    return result


_WRONG = object()


def _typed(value: Any, kind: Any) -> Any:
    """`value` as a `kind`, or `_WRONG`; nothing but int to float and list to tuple is converted."""
    if get_origin(kind) is UnionType:
        return next((r for k in get_args(kind) if (r := _typed(value, k)) is not _WRONG), _WRONG)
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _WRONG
    if get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if fits else _WRONG
    if kind is float and type(value) is int:
        return float(value)
    # Not isinstance: True is no number.
    return value if type(value) is kind else _WRONG


def _spelled(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is UnionType:
        return " or ".join(_spelled(part) for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of strings"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
