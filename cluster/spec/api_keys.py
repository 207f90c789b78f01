"""Reads a cluster's API keys. A cluster without API keys may serve only local clients."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import ClusterSpec
from penstock.common.api_key import VARIABLE, ApiKey, BadKey, checked_key, read_key_lines
from penstock.common.loopback import is_loopback


def read_api_keys(spec: ClusterSpec, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Return the API keys of the cluster.

    The keys are read from the file `router.api_key_file`, from the environment variable
    PENSTOCK_API_KEY, and from the sources that the setting `keys` lists.

    Raises:
        SpecError: a key cannot be read or used. The message does not contain the key.
    """
    found: dict[str, ApiKey] = {}
    origins: dict[str, str] = {}  # where each key was found, by its name
    for where, each in _sources(spec, environment):
        try:
            key = replace(each, key=checked_key(each.key, spec.router.allow_weak_keys))
        except BadKey as error:
            raise SpecError(f"{where}: the key {error}") from None
        if key.name in found:
            raise SpecError(
                f"{where}: the key at {origins[key.name]} already has the name {key.name!r}: give "
                "this key another name"
            )
        same = next((name for name, other in found.items() if other.key == key.key), None)
        if same is not None:
            raise SpecError(
                f"{where}: this key has the same value as the key at {origins[same]}: remove one "
                "of them"
            )
        found[key.name], origins[key.name] = key, where
    return tuple(found.values())


def key_variables(spec: ClusterSpec) -> set[str]:
    """Return the names of the environment variables that may contain API keys."""
    return {VARIABLE, *(each.env for each in spec.keys.values() if each.env is not None)}


def check_access(spec: ClusterSpec, has_keys: bool) -> None:
    """Raise `SpecError` if other machines can connect without a key.

    The setting `router.allow_anonymous` allows such connections.
    """
    router = spec.router
    for name, host in (("host", router.host), ("admin_host", router.admin_host)):
        if is_loopback(host) or has_keys or router.allow_anonymous:
            continue
        raise SpecError(
            f"router.{name}: {host} can be reached from other machines, and there are no API "
            f"keys: give --api-key-file FILE or {VARIABLE}, or --allow-anonymous if "
            "everyone who can reach the ports may use the model"
        )


def _sources(spec: ClusterSpec, environment: Mapping[str, str]) -> Iterator[tuple[str, ApiKey]]:
    """Yield each key, which is not checked yet, after the name of the setting of its source."""
    where = "router.api_key_file"
    if spec.router.api_key_file is not None:
        lines = _lines(spec.router.api_key_file, where)
        for index, (number, text) in enumerate(lines, 1):
            yield f"{where}: line {number}", ApiKey(f"key-{index}", text)
    if VARIABLE in environment:
        yield VARIABLE, ApiKey("environment", environment[VARIABLE])
    for name, record in spec.keys.items():
        where = f"keys.{name}"
        if record.file is not None:
            (_, text), *others = _lines(record.file, f"{where}.file")
            if others:
                raise SpecError(f"{where}.file: the file has several lines: expected one key")
        else:
            variable = record.env or ""
            if variable not in environment:
                raise SpecError(
                    f"{where}.env: the environment has no variable of this name: set the variable"
                )
            text = environment[variable]
        yield where, ApiKey(name, text, record.role)


def _lines(path: str, where: str) -> list[tuple[int, str]]:
    try:
        return read_key_lines(Path(path))
    except BadKey as error:
        raise SpecError(f"{where}: the file {error}") from None
