"""`penstock serve`: flags, the configuration file, and how they are merged."""

from pathlib import Path

import pytest

from penstock.cli import checkpoint, flags
from penstock.cluster import configs
from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import parse


def test_flag_for_origins_of_web_pages_can_be_repeated() -> None:
    origins = ("https://chat.example", "http://localhost:3000")
    arguments = [part for origin in origins for part in ("--allowed-origins", origin)]
    assert flags.read_spec(arguments).router.allowed_origins == origins


def test_flags_for_pool_nodes_and_api_keys() -> None:
    arguments = [
        "--pool-nodes",
        "--cpus",
        "1",
        "--gpus",
        "0",
        "--api-key-file",
        "keys",
    ]
    spec = flags.read_spec([*arguments, "--allow-weak-keys"])
    assert spec.pool_nodes
    assert (spec.router.api_key_file, spec.router.allow_weak_keys) == ("keys", True)


def test_boolean_flag_needs_no_value() -> None:
    assert flags.read_spec(["--deterministic"]).model.deterministic
    assert not flags.read_spec([]).model.deterministic


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("router: {host: 0.0.0.0, http_port: 1}\npools: {mixed: {replicas: 2}}\n")
    spec = flags.read_spec(["--config", str(path), "--http-port", "2", "--threads", "3"])
    assert (spec.router.host, spec.router.http_port) == ("0.0.0.0", 2)
    assert (spec.pools.mixed.replicas, spec.pools.mixed.threads) == (2, 3)
    assert spec.pools.prefill.replicas == 0


def test_variables_to_pass_are_named_one_by_one() -> None:
    arguments = ["--pass-env", "HF_TOKEN", "--pass-env", "A"]
    assert flags.read_spec(arguments).pass_env == ("HF_TOKEN", "A")
    with pytest.raises(SpecError, match=r"^--pass-env: cannot be used with ray_address"):
        flags.read_spec([*arguments, "--ray-address", "auto"])


def test_no_flags_give_the_defaults() -> None:
    assert flags.read_spec([]) == parse({})


def test_cost_of_a_call_is_bounded_by_flag_and_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("router: {max_request_cost: 7}\n")
    shared = configs.ClusterSecrets.new()
    assert configs.router_config(parse({}), tmp_path, shared).bounds.max_request_cost == 1_000_000
    for arguments, cost in (([], 7), (["--max-request-cost", "5"], 5)):
        spec = flags.read_spec(["--config", str(path), *arguments])
        assert configs.router_config(spec, tmp_path, shared).bounds.max_request_cost == cost


def test_connections_of_each_address_are_bounded_by_flag(tmp_path: Path) -> None:
    shared = configs.ClusterSecrets.new()
    for arguments, most in (([], 2048), (["--max-connections-per-address", "0"], 0)):
        config = configs.router_config(flags.read_spec(arguments), tmp_path, shared)
        assert config.connections.max_connections_per_address == most


def test_flags_of_every_pool_reach_the_default_pools() -> None:
    pools = flags.read_spec(["--threads", "3"]).pools
    assert [(pools.prefill.replicas, pools.prefill.threads)] == [(1, 3)]
    assert [(pools.decode.replicas, pools.decode.threads)] == [(1, 3)]
    assert pools.mixed.replicas == 0


def test_several_ranks_make_one_mixed_worker_unless_pools_are_named() -> None:
    pools = flags.read_spec(["--tp", "4", "--pp", "2", "--ep", "2", "--stages", "spread"]).pools
    assert (pools.prefill.replicas, pools.decode.replicas, pools.mixed.replicas) == (0, 0, 1)
    mixed = pools.mixed
    assert (mixed.tp, mixed.pp, mixed.ep, mixed.stages) == (4, 2, 2, "spread")
    pools = flags.read_spec(["--tp", "2", "--prefill", "1", "--decode", "2"]).pools
    assert (pools.prefill.tp, pools.decode.tp, pools.mixed.replicas) == (2, 2, 0)


def test_flags_restrict_the_nodes_of_pools(tmp_path: Path) -> None:
    arguments = "--labels disk=ssd --label tier=fast --accelerator H100 --topology-key rack"
    spec = flags.read_spec(arguments.split())
    assert spec.topology_key == "rack"
    for pool in (spec.pools.prefill, spec.pools.decode):
        assert (pool.labels, pool.accelerator) == (("disk=ssd", "tier=fast"), "H100")
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: {prefill: {accelerator: H100}, decode: {labels: [kind=a, disk=b]}}\n")
    pools = flags.read_spec(["--config", str(path)]).pools
    assert pools.prefill.selector == {"ray.io/accelerator-type": "H100"}
    assert pools.decode.selector == {"kind": "a", "disk": "b"}
    with pytest.raises(SpecError, match=r"^--labels: invalid label 'disk': expected KEY=VALUE$"):
        flags.read_spec(["--labels", "disk"])
    assert flags.read_spec(["--topology-key", ""]).topology_key == ""


def test_flags_limit_the_sizes_of_pools() -> None:
    arguments = "--prefill 1 --decode 2 --min-decode 0 --max-decode 4 --max-gpus 3"
    spec = flags.read_spec([*arguments.split(), "--scale-down-seconds", "9"])
    assert (spec.pools.decode.replicas, spec.pools.decode.least, spec.pools.decode.most) == (
        2,
        0,
        4,
    )
    assert (spec.pools.prefill.least, spec.pools.prefill.most) == (1, 1)
    assert (spec.scaling.max_gpus, spec.scaling.scale_down_seconds) == (3, 9.0)


def test_size_limits_alone_keep_the_default_pools() -> None:
    pools = flags.read_spec(["--max-decode", "3"]).pools
    assert (pools.prefill.replicas, pools.decode.replicas, pools.decode.most) == (1, 1, 3)
    pools = flags.read_spec(["--max-mixed", "3"]).pools
    assert (pools.prefill.most, pools.decode.most, pools.mixed.most) == (0, 0, 3)
    with pytest.raises(SpecError, match="no worker prefills"):
        flags.read_spec(["--tp", "2", "--max-decode", "3"])


def test_flag_names_of_other_engines_are_accepted() -> None:
    arguments = """
        some/model --port 1 --served-model-name m --max-num-seqs 2
        --max-num-batched-tokens 3 --max-model-len 4 --block-size 5 --dtype float32
        --tensor-parallel-size 1 --pipeline-parallel-size 1 --mixed 1
    """
    spec = flags.read_spec(arguments.split())
    assert (spec.checkpoint, spec.router.http_port, spec.model_name) == ("some/model", 1, "m")
    pool = spec.pools.mixed
    assert (pool.max_sequences, pool.max_batched_tokens, pool.block_size) == (2, 3, 5)
    assert (spec.model.max_model_len, spec.model.dtype) == (4, "float32")


def test_engine_sizes_as_flags_reach_every_pool_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: {prefill: {block_size: 32}, decode: {max_sequences: 8}}\n")
    pools = flags.read_spec(["--config", str(path), "--block-size", "8"]).pools
    assert (pools.prefill.block_size, pools.decode.block_size) == (8, 8)
    assert (pools.prefill.max_sequences, pools.decode.max_sequences) == (None, 8)


@pytest.mark.parametrize(
    ("arguments", "name", "path"),
    [
        ([], "llama", "/models/llama"),
        (["--dtype", "float32"], "llama", "/models/llama"),
        (["--model-name", "m"], "m", "/models/llama"),
        (["/models/qwen/"], "qwen", "/models/qwen/"),
        (["org/qwen"], "org/qwen", "org/qwen"),
        (["org/qwen", "--served-model-name", "llama"], "llama", "org/qwen"),
    ],
)
def test_model_flags_override_the_entry_of_the_file(
    tmp_path: Path, arguments: list[str], name: str, path: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: {llama: {path: /models/llama, dtype: float16, max_model_len: 9}}\n")
    spec = flags.read_spec([*arguments, "--config", str(file)])
    assert (spec.model_name, spec.checkpoint) == (name, path)
    assert spec.model.dtype == ("float32" if "--dtype" in arguments else "float16")
    assert spec.model.max_model_len == 9


def test_further_served_model_names_are_aliases() -> None:
    spec = flags.read_spec(["org/qwen", "--served-model-name", "qwen", "gpt-4o", "org/qwen"])
    assert (spec.model_name, spec.checkpoint) == ("qwen", "org/qwen")
    assert spec.model.aliases == ("gpt-4o", "org/qwen")


def test_model_name_flag_keeps_a_path_given_as_name(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: {org/llama: {}}\n")
    spec = flags.read_spec(["--config", str(file), "--model-name", "llama"])
    assert (spec.model_name, spec.checkpoint) == ("llama", "org/llama")
    spec = flags.read_spec(["--model-name", "m"])
    assert checkpoint.find(spec.checkpoint) == checkpoint.SHIPPED


@pytest.mark.parametrize("models", ["3", "{}", "{a: {}, b: {}}", "{a: 3}", "{7: {}}", "[a]"])
def test_invalid_models_in_the_file_are_refused_with_flags_too(tmp_path: Path, models: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"models: {models}\n")
    for arguments in ([], ["some/model"], ["--model-name", "m"], ["--dtype", "float32"]):
        with pytest.raises(SpecError, match=r"^models"):
            flags.read_spec([*arguments, "--config", str(file)])


def test_pools_must_be_mappings_with_flags_too(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for text in ("pools: 3", "pools: {mixed: 3}", "pools: [mixed]"):
        path.write_text(text)
        with pytest.raises(SpecError):
            flags.read_spec(["--config", str(path), "--threads", "1"])


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--tp", "0"], "--tp: expected 1 or more, not 0"),
        (["--max-prefill", "1", "--min-prefill", "2"], "--min-prefill: 2 is more than"),
        (["--max-model-len", "0"], "--max-model-len: expected 1 or more, not 0"),
        ([], "pools.mixed.tp: expected 1 or more, not -1"),
        (["--threads", "2"], "pools.mixed.tp: expected 1 or more, not -1"),
    ],
)
def test_an_error_names_the_flag_or_the_setting_of_the_file(
    arguments: list[str], start: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: {mixed: {tp: -1}}\n")
    if start.startswith("pools"):
        arguments = [*arguments, "--config", str(path)]
    with pytest.raises(SpecError) as error:
        flags.read_spec(arguments)
    assert str(error.value).startswith(start)
