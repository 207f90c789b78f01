"""Command-line flags of `penstock serve`, generated from the dataclasses of the specification."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from penstock.cli import checkpoint
from penstock.cli.client_key import refuse_key
from penstock.cluster.spec.records import SpecError, knobs, merged
from penstock.cluster.spec.router_spec import RouterSpec
from penstock.cluster.spec.spec import (
    BUNDLED,
    DEFAULT_POOLS,
    ROLES,
    ClusterSpec,
    EngineSpec,
    ModelSpec,
    PoolSpec,
    ScalingSpec,
    parse,
)
from penstock.cluster.spec.yaml_file import read_file

ALSO = {
    "http_port": ["--port"],
    "max_sequences": ["--max-num-seqs"],
    "max_batched_tokens": ["--max-num-batched-tokens"],
    "tp": ["--tensor-parallel-size"],
    "pp": ["--pipeline-parallel-size"],
    "labels": ["--label"],
}
"""Additional names of the flags of some settings. Most of them are vLLM's names."""

EVERY_POOL = "pools.*"
THE_MODEL = "models.*"
PATH, NAME = f"{THE_MODEL}.path", "model_name"
COUNTS = ("replicas", "min_replicas", "max_replicas")
"""Settings that have a separate flag for each pool."""
UNSET = argparse.SUPPRESS


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        refuse_key(self)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def read_spec(arguments: Sequence[str]) -> ClusterSpec:
    """Return the specification for `penstock serve`. Flags override the settings of the file.

    The program exits with code 2 if the flags cannot be parsed.

    Raises:
        SpecError: the specification is invalid. The message names the flag with the invalid value,
            or the setting if the value is from the file.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    options = {action.dest: action.option_strings for action in parser._actions}
    flags = {name: options[name][0] for name in given if options[name]}
    try:
        return _parse(given)
    except SpecError as error:
        raise SpecError(_with_flag(str(error), flags)) from None


def _with_flag(message: str, flags: Mapping[str, str]) -> str:
    """Replace the name of a setting at the start of an error message by the name of its flag.

    The message is not changed if the setting was not set by a flag.
    """
    words = message.split(": ")
    for length in (1, 2):  # the setting may contain ": ", as in `pools.decode: labels: ...`
        setting = ".".join(words[:length])
        of_all = f"{setting.partition('.')[0]}.*.{setting.rpartition('.')[2]}"
        flag = flags.get(setting) or flags.get(of_all)
        if flag:
            return ": ".join([flag, *words[length:]])
    return message


def _parse(given: dict[str, Any]) -> ClusterSpec:
    """Return the specification for parsed arguments. Raise `SpecError` if it is invalid."""
    path = given.pop("config", None)
    content = file = read_file(path) if path is not None else {}
    ranks: dict[str, Any] = {}
    model: dict[str, Any] = {}
    model_name, *aliases = given.pop(NAME, [None])
    if aliases:
        model["aliases"] = aliases
    for name, value in given.items():
        where, _, key = name.rpartition(".")
        if where == EVERY_POOL:
            ranks[key] = value
        elif where == THE_MODEL:
            model[key] = value
        else:
            content = merged(content, _nested(name, value))
    content = _over_model(content, model_name, model)
    if "pools" not in file and not any(name.endswith(".replicas") for name in given):
        content = _with_default_pools(content, ranks)
    return parse(_over_pools(content, ranks))


def _over_model(
    content: dict[str, Any], name: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Apply the flags of the model to the entry of `models`, if there is exactly one entry.

    If the flags give a path but no `name`, the entry gets the default name of the path. Otherwise
    the new checkpoint would be served under the name of the old one.
    """
    models = content.get("models", {BUNDLED: {}})
    if not (name or settings):
        return content
    if not (isinstance(models, Mapping) and len(models) == 1):
        return content  # `parse` raises the error about invalid models later
    ((own_name, own),) = models.items()
    if not (isinstance(own_name, str) and isinstance(own, Mapping)):
        return content
    entry = {"path": own_name, **own, **settings}
    if name is None:
        name = checkpoint.default_name(settings["path"]) if "path" in settings else own_name
    return {**content, "models": {name: entry}}


def _nested(name: str, value: Any) -> dict[str, Any]:
    """Return nested dicts for a dotted name. For example, `a.b` and 1 become {"a": {"b": 1}}."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return dict(value)


def _default_pools(ranks: dict[str, Any]) -> dict[str, Any]:
    """Return the pools of a cluster whose specification gives no pools."""
    if ranks.get("tp", 1) != 1 or ranks.get("pp", 1) != 1:
        # Return only one pool, because one machine may lack room for two workers with several
        # ranks each.
        return {"mixed": {}}
    return {role: {} for role in ROLES if getattr(DEFAULT_POOLS, role).replicas}


def _with_default_pools(content: dict[str, Any], ranks: dict[str, Any]) -> dict[str, Any]:
    """Add the default pools to `content`, unless it has a pool that is not a default pool."""
    default, bounded = _default_pools(ranks), content.get("pools", {})
    return merged({"pools": default}, content) if bounded.keys() <= default.keys() else content


def _over_pools(content: dict[str, Any], ranks: dict[str, Any]) -> dict[str, Any]:
    """Apply the flags without the name of a pool to each pool of `content`."""
    pools = content.get("pools", _default_pools(ranks))
    if not ranks or not isinstance(pools, dict):
        return content  # `parse` raises the error about invalid pools later
    over = {role: ranks for role, pool in pools.items() if isinstance(pool, dict)}
    return merged(content, {"pools": merged(pools, over)})


def _parser() -> Parser:
    parser = Parser(
        prog="penstock serve",
        description="Serve a model on a Ray cluster of prefill and decode workers.",
        epilog="A cluster has prefill and decode pools, a mixed pool, or all three.",
        allow_abbrev=False,
    )
    parser.add_argument(
        PATH,
        nargs="?",
        default=UNSET,
        metavar="MODEL",
        help=f"checkpoint folder, GGUF file or hub name; by default {BUNDLED}, the bundled model",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="specification file (YAML); flags override it"
    )
    parser.add_argument(
        "--routers", type=int, default=UNSET, metavar="N", help=_help("routers") + " (1)"
    )
    parser.add_argument(
        "--ray-address", default=UNSET, metavar="HOST:PORT", help=_help("ray_address")
    )
    parser.add_argument(
        "--pass-env", action="append", default=UNSET, metavar="NAME", help=_help("pass_env")
    )
    parser.add_argument(
        "--pool-nodes", action="store_true", default=UNSET, help=_help("pool_nodes")
    )
    parser.add_argument(
        "--topology-key",
        default=UNSET,
        metavar="KEY",
        help=f"{_help('topology_key')} ({ClusterSpec().topology_key})",
    )
    parser.add_argument(
        "--log-format",
        default=UNSET,
        help=_help("log_format"),
        **_argument_options(knobs(ClusterSpec)["log_format"][1]),
    )
    _add(parser.add_argument_group("router"), RouterSpec, "router")
    model = parser.add_argument_group("model")
    model.add_argument(
        *("--model-name", "--served-model-name"),
        dest=NAME,
        nargs="+",
        default=UNSET,
        metavar="NAME",
        help="names of the model in the API, the first of which is in answers; by default its "
        "folder's name or its hub name",
    )
    _add(model, ModelSpec, THE_MODEL, without=("path", "aliases"))
    _add(parser.add_argument_group("every worker"), EngineSpec, "engine")
    pools = parser.add_argument_group(
        "pools", "Flags without a pool in their name apply to every pool."
    )
    for role in ROLES:
        _add_counts(pools, role)
    _add(pools, PoolSpec, EVERY_POOL, without=COUNTS)
    _add(parser.add_argument_group("scaling"), ScalingSpec, "scaling")
    return parser


def _add_counts(group: Any, role: str) -> None:
    """Add the flags for the number of workers of a pool."""
    at_first = getattr(DEFAULT_POOLS, role).replicas
    abouts = (
        f"initial number of {role} workers ({at_first} if no pool is given)",
        f"minimum number of {role} workers; by default the initial number; 0: none while idle",
        f"maximum number of {role} workers; by default the initial number",
    )
    for prefix, key, about in zip(("", "min-", "max-"), COUNTS, abouts, strict=True):
        group.add_argument(
            f"--{prefix}{role}",
            type=int,
            default=UNSET,
            dest=f"pools.{role}.{key}",
            metavar="N",
            help=about,
        )


def _add(group: Any, record: type, where: str, without: Sequence[str] = ()) -> None:
    for name, (field, kind) in knobs(record).items():
        if name in without:
            continue
        is_unset = field.default in (None, ()) or field.default is False
        default = "" if is_unset else f" ({field.default})"
        group.add_argument(
            f"--{name.replace('_', '-')}",
            *ALSO.get(name, ()),
            dest=f"{where}.{name}",
            default=UNSET,
            help=field.metadata["about"] + default,
            **_argument_options(kind),
        )


def _argument_options(kind: Any) -> dict[str, Any]:
    """Return the argparse options for a flag whose value has the type `kind`."""
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if kind is bool:
        return {"action": "store_true"}
    first = get_args(kind)[0] if get_args(kind) else kind
    metavar = {int: "N", float: "X", str: "TEXT"}[first]
    return {"type": first, "metavar": metavar}


def _help(name: str) -> str:
    field, _ = knobs(ClusterSpec)[name]
    return str(field.metadata["about"])
