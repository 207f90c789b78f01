"""The cluster file: valid files are parsed, and each error names the key of the invalid value."""

import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.configs import ClusterSecrets, router_config, worker_config
from penstock.cluster.placement.placement_plan import Node, plan_placements
from penstock.cluster.spec.records import SpecError, knobs, merged, records_of
from penstock.cluster.spec.spec import (
    BUNDLED,
    MOVED,
    ROLES,
    ClusterSpec,
    EngineSpec,
    ModelSpec,
    Pools,
    PoolSpec,
    parse,
)
from penstock.cluster.spec.yaml_file import read_file

ROOT = Path(__file__).resolve().parents[3]
RECORDS = set(records_of(ClusterSpec))
WHOLE = """
models:
  llama: {path: some/where, max_model_len: 4096, dtype: bfloat16}
ray_address: 10.0.0.1:6379
router: {host: 0.0.0.0, http_port: 80, grpc_port: 90, api_key_file: keys, drain_seconds: 5}
engine: {step_timeout_seconds: 9}
pools:
  prefill: {replicas: 2, gpus: 1, block_size: 32, kv_cache_mib: 100, max_batched_tokens: 2048}
  decode: {replicas: 3, cpus: 1.5, threads: 4, labels: [disk=ssd], accelerator: H100}
topology_key: rack
"""

SECRETS = ClusterSecrets.new()


def test_complete_file_is_parsed() -> None:
    spec = parse(yaml.safe_load(WHOLE))
    assert (spec.model_name, spec.checkpoint) == ("llama", "some/where")
    assert spec.model == ModelSpec(path="some/where", max_model_len=4096, dtype="bfloat16")
    assert spec.router.api_key_file == "keys"
    assert (spec.router.drain_seconds, type(spec.router.drain_seconds)) == (5.0, float)
    assert spec.engine == EngineSpec(step_timeout_seconds=9.0)
    assert spec.pools.prefill == PoolSpec(
        replicas=2, gpus=1, block_size=32, kv_cache_mib=100, max_batched_tokens=2048
    )
    assert spec.pools.decode == PoolSpec(
        replicas=3, cpus=1.5, threads=4, labels=("disk=ssd",), accelerator="H100"
    )
    assert spec.topology_key == "rack"
    assert spec.pools.mixed.replicas == 0


def test_empty_file_gives_one_prefill_and_one_decode_worker() -> None:
    spec = parse({})
    assert spec == ClusterSpec()
    assert [getattr(spec.pools, role).replicas for role in ROLES] == [1, 1, 0]


def test_naming_a_pool_leaves_the_others_empty() -> None:
    pools = parse({"pools": {"mixed": {}}}).pools
    assert [getattr(pools, role).replicas for role in ROLES] == [0, 0, 1]


def mixed(**pool: Any) -> dict[str, Any]:
    """Return the content of a file with one mixed pool."""
    return {"pools": {"mixed": pool}}


def model(**settings: Any) -> dict[str, Any]:
    """Return the content of a file with one model, m."""
    return {"models": {"m": settings}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"modle": "x"},
            "modle: unknown key: expected one of models, ray_address, pass_env, router",
        ),
        ({"engine": {"hang": 1}}, "engine.hang: unknown key: expected one of ttft_slo_seconds"),
        ({"pools": {"decoder": {}}}, "pools.decoder: unknown key: expected one of prefill, decode"),
        (mixed(block_sise=1), "pools.mixed.block_sise: unknown key: expected one of replicas"),
        (mixed(block_size="16"), "pools.mixed.block_size: expected a whole number, not '16'"),
        (mixed(block_size=1.5), "pools.mixed.block_size: expected a whole number, not 1.5"),
        (mixed(block_size=True), "pools.mixed.block_size: expected a whole number, not True"),
        (mixed(block_size=0), "pools.mixed.block_size: expected from 1 to 1024, not 0"),
        (mixed(max_sequences=0), "pools.mixed.max_sequences: expected 1 or more, not 0"),
        (model(dtype="int4"), "models.m.dtype: expected one of auto, float32, bfloat16"),
        (model(block_size=16), "models.m.block_size: unknown key: expected one of path, revision"),
        (model(path=3), "models.m.path: expected a string, not 3"),
        (model(max_model_len=0), "models.m.max_model_len: expected 1 or more, not 0"),
        (model(deterministic="yes"), "models.m.deterministic: expected true or false, not 'yes'"),
        ({"models": "m"}, "models: expected a mapping of names to mappings, not 'm'"),
        ({"models": ["m"]}, "models: expected a mapping of names to mappings, not ['m']"),
        ({"models": {}}, "models: is empty: add a model, or remove 'models' to serve demo"),
        ({"models": {"m": None}}, "models.m: expected a mapping of keys to values, not None"),
        (
            {"models": {"m": "/models/m"}},
            "models.m: expected a mapping of keys to values, not '/models/m'",
        ),
        ({"models": {7: {}}}, "models: expected a string as name, not 7: put the name in quotes"),
        ({"models": {"": {}}}, "models: '' cannot be a name"),
        ({"models": {" a": {}}}, "models: ' a' cannot be a name"),
        ({"models": {"a\nb": {}}}, "models: 'a\\nb' cannot be a name"),
        ({"models": {"a": {}, "b": {}}}, "models: this version serves one model; found a, b"),
        (
            model(deterministic=True) | {"pools": {"prefill": {"block_size": 8}, "decode": {}}},
            "models.m.deterministic: all pools need the same block_size, found prefill 8, decode "
            "default: deterministic",
        ),
        (
            model(deterministic=True) | {"pools": {"prefill": {"tp": 2}, "decode": {}}},
            "models.m.deterministic: all pools need the same tp, found prefill 2, decode 1: ",
        ),
        ({"router": {"\n": 1}}, "router.'\\n': unknown key"),
        ({"engine": 3}, "engine: expected a mapping of keys to values, not 3"),
        ({"engine": None}, "engine: expected a mapping of keys to values, not None"),
        ({"router": {"http_port": 65536}}, "router.http_port: expected from 0 to 65535, not 65536"),
        ({"router": {"drain_seconds": float("nan")}}, "router.drain_seconds: expected from 0"),
        ({"router": {"drain_seconds": float("inf")}}, "router.drain_seconds: expected from 0"),
        ({"router": {"http_port": 9000}}, "router: HTTP and gRPC cannot share port 9000"),
        (
            {"router": {"admin_port": 8000}},
            "router: HTTP and operators cannot share port 8000",
        ),
        (
            {"routers": 2, "router": {"admin_port": 9001}},
            "routers: 2 routers need consecutive ports from 9000 (gRPC) and from 9001 (operators)",
        ),
        ({"routers": 0}, "routers: expected from 1 to 64, not 0"),
        (
            {"routers": 3, "router": {"http_port": 8998}},
            "routers: 3 routers need consecutive ports from 8998 (HTTP) and from 9000 (gRPC)",
        ),
        (
            {"routers": 3, "router": {"grpc_port": 65534}},
            "routers: router 3 would use port 65536 (above 65535)",
        ),
        ({"pools": {}}, "pools: no worker prefills: set 'replicas' of prefill or mixed"),
        ({"pools": {"decode": {"replicas": 1}}}, "pools: no worker prefills"),
        ({"pools": {"prefill": {"replicas": 1}}}, "pools: no worker decodes"),
        ({"pools": {"mixed": {"replicas": 0}}}, "pools: no worker prefills"),
        ({"pools": {"mixed": {"replicas": -1}}}, "pools.mixed.replicas: expected from 0 to 1024"),
        ({"pools": {"mixed": {"ep": 2}}}, "pools.mixed: ep: 2 does not divide tp (1): the tp"),
        ({"pools": {"mixed": {"gpus": 2}}}, "pools.mixed: gpus: at most 1 per rank, not 2"),
        ({1: 2}, "1: unknown key"),
        ({"pools": {"mixed": {"labels": "a=b"}}}, "pools.mixed.labels: expected a list of strings"),
        (
            {"pools": {"mixed": {"labels": ["a"]}}},
            "pools.mixed: labels: invalid label 'a': expected",
        ),
        (
            {"pools": {"mixed": {"labels": ["a=b", "a=c"]}}},
            "pools.mixed: labels: label a is given 2 times",
        ),
        (
            {"pools": {"mixed": {"accelerator": "H 100"}}},
            "pools.mixed: accelerator: invalid value 'H 100'",
        ),
        (
            {"pools": {"mixed": {"accelerator": "H100", "gpus": 0}}},
            "pools.mixed: accelerator: H100 conflicts with gpus: 0",
        ),
        ({"topology_key": "a b"}, "topology_key: invalid label key 'a b'"),
        (
            {"pools": {"mixed": {"min_replicas": 3, "max_replicas": 2}}},
            "pools.mixed: min_replicas: 3 is more than max_replicas (2)",
        ),
        (
            {"pools": {"mixed": {"replicas": 3, "max_replicas": 2, "min_replicas": 1}}},
            "pools.mixed: replicas: 3 is not between min_replicas (1) and max_replicas (2)",
        ),
        (
            {"pools": {"mixed": {"min_replicas": 2, "max_replicas": 3}}},
            "pools.mixed: replicas: 1 is not between min_replicas (2) and max_replicas (3)",
        ),
        ({"pools": {"mixed": {"min_replicas": -1}}}, "pools.mixed.min_replicas: expected from 0"),
        (
            {"pools": {"prefill": {"replicas": 0, "max_replicas": 0}, "decode": {}}},
            "pools: no worker prefills",
        ),
        ({"scaling": {"max_gpus": 0}}, "scaling.max_gpus: expected 1 or more, not 0"),
        (
            {"scaling": {"scale_down_seconds": 0}},
            "scaling.scale_down_seconds: expected from 1 to 86400, not 0",
        ),
    ],
)
def test_invalid_content_is_refused_by_key(content: dict[Any, Any], message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse(content)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_routers_on_one_machine_have_different_ports() -> None:
    spec = parse({"routers": 3, "router": {"http_port": 8994}})
    assert [spec.ports(number) for number in range(3)] == [
        (8994, 9000, 8997),
        (8995, 9001, 8998),
        (8996, 9002, 8999),
    ]
    assert parse({"routers": 3, "router": {"http_port": 0}}).ports(2) == (0, 9002, 0)
    pools = {"mixed": {"cpus": 1, "gpus": 0}}
    apart = parse({"routers": 3, "router": {"http_port": 8990}, "pool_nodes": True, "pools": pools})
    assert {apart.ports(number) for number in range(3)} == {(8990, 9000, 8991)}
    apart = parse({"routers": 2, "router": {"admin_port": 7000}})
    assert apart.ports(1) == (8001, 9001, 7001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be parsed as YAML"),
        ("- a\n- b", "expected a mapping"),
        ("just words", "expected a mapping"),
        ("!!python/object/apply:os.system ['true']", "cannot be parsed as YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_unreadable_file_is_refused_with_its_path(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as refusal:
        read_file(path)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


def test_missing_file_is_refused_and_empty_file_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_file(tmp_path / "empty.yaml") == {}


def test_pool_bounds_default_to_its_replicas() -> None:
    pools = parse({"pools": {"mixed": {}, "decode": {"min_replicas": 0, "max_replicas": 4}}}).pools
    assert (pools.mixed.least, pools.mixed.most) == (1, 1)
    assert (pools.decode.least, pools.decode.most) == (0, 4)
    assert not pools.may_be_empty


def test_pools_may_start_empty_if_they_can_grow() -> None:
    pools = parse({"pools": {"mixed": {"replicas": 0, "max_replicas": 2}}}).pools
    assert pools.may_be_empty


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = st.sampled_from([f.name for record in RECORDS for f in fields(record)] + list(ROLES))
NEARLY = st.recursive(JUNK, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)


def parsed_or_refused(content: dict[str, Any]) -> ClusterSpec | str:
    try:
        return parse(content)
    except SpecError as refusal:
        return str(refusal)


@given(st.dictionaries(KEYS, NEARLY, max_size=4))
def test_random_content_is_refused_in_one_line_or_within_bounds(content: dict[str, Any]) -> None:
    spec = parsed_or_refused(content)
    if isinstance(spec, str):
        assert "\n" not in spec
        return
    for record in (
        spec.router,
        spec.engine,
        spec.model,
        spec.scaling,
        *(getattr(spec.pools, role) for role in ROLES),
    ):
        for name, (field, _) in knobs(type(record)).items():
            value = getattr(record, name)
            if isinstance(value, int | float) and field.metadata["least"] is not None:
                assert value >= field.metadata["least"]


@given(NEARLY, NEARLY)
def test_merging_keeps_keys_that_only_one_side_has(base: Any, over: Any) -> None:
    base, over = ({"a": base}, {"b": over})
    assert merged(base, over) == {**base, **over}
    assert merged(base, {}) == base
    assert merged(over, over) == over


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_cache_dtype_wider_than_the_dtype_is_refused(dtype: str) -> None:
    message = rf"models\.m: kv_cache_dtype: float32 .* with dtype {dtype}"
    with pytest.raises(SpecError, match=message):
        parse(model(dtype=dtype, kv_cache_dtype="float32"))
    for cached in ("bfloat16", "fp8", "int8"):
        assert parse(model(dtype="bfloat16", kv_cache_dtype=cached))


def test_at_most_40_knobs_outside_models_and_pools() -> None:
    per_model, per_pool = set(records_of(ModelSpec)), set(records_of(Pools))
    assert {ModelSpec, PoolSpec} < RECORDS
    assert sum(len(knobs(record)) for record in RECORDS - per_model - per_pool) <= 40


@pytest.mark.parametrize("old", MOVED)
def test_moved_key_is_refused_with_its_new_name(old: str) -> None:
    content: Any = "x"
    for key in reversed(old.split(".")):
        content = {key: content}
    with pytest.raises(SpecError) as refusal:
        parse(content)
    assert str(refusal.value) == f"{old}: this key has moved: write {MOVED[old]} instead"


def test_new_names_of_moved_keys_exist() -> None:
    model_keys = {f"models.NAME.{name}" for name in knobs(ModelSpec)}
    pool_keys = {f"pools.POOL.{name}, for each pool" for name in knobs(PoolSpec)}
    moved = {new for old, new in MOVED.items() if old.startswith("engine.")}
    assert moved <= model_keys | pool_keys
    assert len(moved) == 9


def test_path_of_a_model_is_its_name_by_default() -> None:
    assert parse({"models": {"meta-llama/L": {}}}).checkpoint == "meta-llama/L"
    assert parse({"models": {"short": {"path": "meta-llama/L"}}}).checkpoint == "meta-llama/L"
    spec = parse({})
    assert (spec.model_name, spec.checkpoint) == (BUNDLED, BUNDLED)


def test_deterministic_compares_block_sizes_of_pools_with_workers_only() -> None:
    assert parse(model(deterministic=True) | {"pools": {"mixed": {"block_size": 8}}})
    pools = {"prefill": {"block_size": 8}, "decode": {"block_size": 16}}
    assert parse(model() | {"pools": pools})


def test_worker_config_has_the_settings_of_its_pool_and_of_the_model() -> None:
    sizes = {
        "prefill": {"block_size": 32, "max_sequences": 4, "max_batched_tokens": 2048},
        "decode": {"block_size": 8, "max_sequences": 256, "kv_cache_mib": 100},
    }
    shared = {"dtype": "float32", "max_model_len": 99, "deterministic": False}
    spec = parse({"models": {"m": shared}, "pools": sizes})
    config = {
        worker.role: asdict(worker_config(spec, Path("folder"), SECRETS, worker))
        for worker in plan_placements(spec, [Node("here", 4.0)])
    }
    assert set(config) == set(sizes)
    for role, found in config.items():
        expected = asdict(getattr(spec.pools, role)) | shared
        assert {key: found[key] for key in (*MOVES_TO_POOL, *shared)} == {
            key: expected[key] for key in (*MOVES_TO_POOL, *shared)
        }
    router = router_config(spec, Path("folder"), SECRETS)
    assert (router.served_name, router.max_model_len) == ("m", 99)


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ({"prefill": {}, "decode": {}}, True),
        ({"prefill": {"min_replicas": 0}, "decode": {}}, False),
        ({"mixed": {"replicas": 2}}, False),
    ],
)
def test_router_waits_for_both_kinds_of_workers_if_neither_pool_may_be_empty(
    pools: dict[str, Any], expected: bool
) -> None:
    assert router_config(parse({"pools": pools}), Path("f"), SECRETS).waits_for_both is expected


MOVES_TO_POOL = ("block_size", "kv_cache_mib", "max_sequences", "max_batched_tokens")


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_cluster_files_in_the_docs_are_valid(page: str) -> None:
    text = (ROOT / page).read_text()
    files = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "pools:" in block]
    assert files
    for file in files:
        parse(yaml.safe_load(file))


POOL_NODES = {"pool_nodes": True, "pools": {"mixed": {"cpus": 2, "gpus": 0}}}


def test_pool_nodes_requires_cpus_and_gpus_of_each_pool() -> None:
    assert parse(POOL_NODES).pool_nodes
    for missing in ("cpus", "gpus"):
        pool = {"cpus": 2, "gpus": 0}
        del pool[missing]
        with pytest.raises(
            SpecError, match=rf"^pools\.mixed\.{missing}: is required with pool_nodes"
        ):
            parse({"pool_nodes": True, "pools": {"mixed": pool}})
    with pytest.raises(SpecError, match=r"^pool_nodes: expected true or false, not 'yes'"):
        parse({"pool_nodes": "yes"})


def test_allowed_origins_reach_the_routers(tmp_path: Path) -> None:
    given = ("https://chat.example", "http://localhost:3000", "*")
    spec = parse({"router": {"allowed_origins": list(given)}})
    assert router_config(spec, tmp_path, SECRETS).allowed_origins == given
    assert router_config(parse({}), tmp_path, SECRETS).allowed_origins == ()


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", "", "**"])
def test_allowed_origin_must_be_an_origin(origin: str) -> None:
    with pytest.raises(SpecError, match=r"router: allowed_origins: .* is not an origin"):
        parse({"router": {"allowed_origins": [origin]}})


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_with_the_list(name: str) -> None:
    assert getattr(parse({"models": {"m": {name: "mistral"}}}).model, name) == "mistral"
    with pytest.raises(
        SpecError, match=rf"models\.m: {name}: unknown parser 'x': expected one of auto, none,"
    ):
        parse({"models": {"m": {name: "x"}}})
