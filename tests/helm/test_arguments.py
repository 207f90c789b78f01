"""Each command line and file of the chart is parsed by the program that receives it in a pod."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")

from penstock.cli import fetch, flags
from penstock.cluster.kubernetes import node_drain, readiness_probe
from penstock.cluster.placement.placement_plan import plan_placements
from penstock.cluster.spec.api_keys import read_api_keys
from penstock.cluster.spec.records import knobs
from penstock.cluster.spec.spec import ROLES, ClusterSpec, EngineSpec, ModelSpec, PoolSpec, parse
from penstock.common.api_key import ApiKey
from tests.support import chart

CASES = [(name, mode) for name in chart.EXAMPLES for mode in chart.MODES]


def driver(found: list[chart.Object]) -> chart.Object:
    spec: chart.Object = chart.one(found, "Deployment", "-driver")["spec"]["template"]["spec"]
    return spec


def config(found: list[chart.Object]) -> str:
    return str(chart.one(found, "ConfigMap", "rel-penstock")["data"]["cluster.yaml"])


def read(found: list[chart.Object], folder: Path) -> ClusterSpec:
    """Parse the driver's command line and files as `penstock serve` does."""
    (script,) = driver(found)["containers"][0]["args"]
    joined, served = shlex.split(script.partition("&&")[0]), shlex.split(script.partition("&&")[2])
    ray_start(joined)
    assert served[:3] == ["exec", "penstock", "serve"]
    path = folder / "cluster.yaml"
    path.write_text(config(found))
    arguments = [path if word == "/etc/penstock/cluster.yaml" else word for word in served[3:]]
    return flags.read_spec([str(word) for word in arguments])


def ray_start(words: list[str]) -> dict[str, Any]:
    """Parse a command with Ray's own parser, which exits on an unknown option."""
    from ray.scripts.scripts import start

    assert words[:2] == ["ray", "start"]
    return dict(start.make_context("ray start", words[2:]).params)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_driver_reads_its_configuration(name: str, mode: str, tmp_path: Path) -> None:
    found = chart.example_objects(name, mode)
    spec = read(found, tmp_path)
    assert spec.pool_nodes
    assert spec.router.host == "0.0.0.0"
    grace = driver(found)["terminationGracePeriodSeconds"]
    assert grace > spec.router.drain_seconds
    for worker in plan_placements(spec, []):
        # A node offers one unit of the pool's resource for each rank of its worker.
        assert all(bundle[worker.role] == worker.tp for bundle in worker.bundles)


def test_driver_gets_the_bounds_of_the_pool(tmp_path: Path) -> None:
    pools = {"decode": {"minReplicas": 0, "maxReplicas": 6}, "mixed": {"replicas": 0}}
    values = chart.merged(chart.example("8b"), {"pools": pools})
    decode = read(chart.objects(chart.render(values)), tmp_path).pools.decode
    assert (decode.least, decode.replicas, decode.most) == (0, 2, 6)


@pytest.mark.parametrize("mode", chart.MODES)
def test_each_router_has_a_node_and_the_same_ports(mode: str, tmp_path: Path) -> None:
    values = chart.merged(chart.example("8b"), {"router": {"replicas": 3}})
    values = chart.merged(values, chart.of_mode(mode))
    found = chart.objects(chart.render(values))
    spec = read(found, tmp_path)
    assert spec.routers == 3
    assert {spec.ports(number) for number in range(3)} == {(8000, 9000, 8001)}
    if mode == "kuberay":
        groups = chart.one(found, "RayCluster")["spec"]["workerGroupSpecs"]
        (group,) = (each for each in groups if each["groupName"] == "router")
        counts = [group[key] for key in ("minReplicas", "maxReplicas")]
    else:
        (own,) = (
            each
            for each in found
            if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("router")
        )
        counts = [own["spec"]["replicas"]]
    assert set(counts) == {3}


def test_driver_gets_log_format_and_vllm_metrics(tmp_path: Path) -> None:
    settings = {"logFormat": "json", "router": {"vllmMetrics": True}}
    spec = read(chart.objects(chart.render(chart.merged(chart.example("8b"), settings))), tmp_path)
    assert (spec.log_format, spec.router.vllm_metrics) == ("json", True)


def test_router_settings_reach_the_driver_and_are_left_to_it_by_default(tmp_path: Path) -> None:
    default = chart.example("8b")
    text = config(chart.objects(chart.render(default)))
    assert "max_wait_seconds" not in text
    assert "allowed_origins" not in text
    assert "max_connections_per_address" not in text
    own = {
        "maxWaitSeconds": 0.6,
        "allowedOrigins": ["https://chat.example", "*"],
        "maxConnectionsPerAddress": 9000,
    }
    values = chart.merged(default, {"router": own})
    router = read(chart.objects(chart.render(values)), tmp_path).router
    assert (router.max_wait_seconds, router.allowed_origins) == (0.6, ("https://chat.example", "*"))
    assert router.max_connections_per_address == 9000
    none = {"router": {"maxWaitSeconds": 0, "maxConnectionsPerAddress": 0}}
    off = yaml.safe_load(config(chart.objects(chart.render(chart.merged(default, none)))))["router"]
    assert (off["max_wait_seconds"], off["max_connections_per_address"]) == (0, 0)


def test_large_numbers_reach_the_driver(tmp_path: Path) -> None:
    million = 1_000_000
    values = {
        "router": {
            "maxQueued": million,
            "maxWaitSeconds": million,
            "maxConnectionsPerAddress": 2**31,
        },
        "engine": {"step_timeout_seconds": million},
        "poolDefaults": {"kvCacheMib": million},
    }
    spec = read(chart.objects(chart.render(values)), tmp_path)
    assert (spec.router.max_queued, spec.router.max_wait_seconds) == (million, million)
    assert spec.router.max_connections_per_address == 2**31
    assert spec.engine.step_timeout_seconds == million
    assert spec.pools.decode.kv_cache_mib == million


def test_api_keys_come_from_secrets_with_their_names_and_roles(tmp_path: Path) -> None:
    found = chart.example_objects("8b", "kuberay")
    read(found, tmp_path)
    (keys,) = (each for each in driver(found)["volumes"] if each["name"] == "keys")
    (mount,) = (
        each for each in driver(found)["containers"][0]["volumeMounts"] if each["name"] == "keys"
    )
    for number, source in enumerate(keys["projected"]["sources"]):
        (item,) = source["secret"]["items"]
        path = tmp_path / "mounted" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"key-of-{source['secret']['name']}-{number}\n")
        path.chmod(keys["projected"]["defaultMode"])
    text = config(found).replace(mount["mountPath"], str(tmp_path / "mounted"))
    assert read_api_keys(parse(yaml.safe_load(text)), {}) == (
        ApiKey("key-1", "key-of-penstock-api-keys-0"),
        ApiKey("prometheus", "key-of-penstock-prometheus-1", "metrics"),
    )
    monitor = chart.one(found, "ServiceMonitor")["spec"]["endpoints"][0]
    assert monitor["authorization"]["credentials"]["name"] == "penstock-prometheus"


def test_examples_have_the_shapes_that_their_names_promise() -> None:
    pools = {name: yaml.safe_load(config(found(name)))["pools"] for name in chart.EXAMPLES}
    counts = {
        name: {role: (pool["replicas"], pool["tp"], pool["ep"]) for role, pool in each.items()}
        for name, each in pools.items()
    }
    assert counts == {
        "one-gpu": {"mixed": (1, 1, 1)},
        "8b": {"prefill": (1, 1, 1), "decode": (2, 1, 1)},
        "70b-tp4": {"prefill": (1, 4, 1), "decode": (2, 4, 1)},
        "moe-tp8-ep8": {"mixed": (1, 8, 8)},
    }


def found(name: str, mode: str = "kuberay") -> list[chart.Object]:
    return chart.example_objects(name, mode)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_pod_has_the_resources_that_its_worker_requests(name: str, mode: str) -> None:
    objects = found(name, mode)
    pools = yaml.safe_load(config(objects))["pools"]
    for role, flagged in nodes(objects).items():
        if role not in ROLES:
            continue
        pool, ranks = pools[role], pools[role]["tp"] * pools[role]["pp"]
        assert flagged["resources"] == {role: ranks}
        assert flagged["num_gpus"] == ranks * pool["gpus"]
        assert flagged["num_cpus"] >= ranks * pool["cpus"]
        (pod,) = (pod for each, pod in chart.pods(objects) if each == role)
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert int(limits["nvidia.com/gpu"]) == flagged["num_gpus"]
        assert float(limits["cpu"]) >= ranks * pool["cpus"]


def nodes(objects: list[chart.Object]) -> dict[str, dict[str, Any]]:
    """Return the parsed options of `ray start`, by component."""
    result = {}
    for each in objects:
        if each["kind"] == "RayCluster":
            result = {"head": parsed_params(each["spec"]["headGroupSpec"], ["--head"])}
            for group in each["spec"]["workerGroupSpecs"]:
                result[group["groupName"]] = parsed_params(group, ["--address=head:6379"])
            return result
    for role, pod in chart.pods(objects):
        main = pod["spec"]["containers"][0]
        if main["name"] == "ray":
            result[role] = ray_start([*main["command"], *main["args"]])
            assert result[role]["block"]
            result[role]["resources"] = json.loads(result[role]["resources"])
    return result


def parsed_params(group: chart.Object, more: list[str]) -> dict[str, Any]:
    """Parse a group's parameters as KubeRay does: as flags of one shell command."""
    line = " ".join(f"--{key}={value}" for key, value in group["rayStartParams"].items())
    read = ray_start(["ray", "start", *more, *shlex.split(line)])
    read["resources"] = json.loads(read["resources"])
    return read


@pytest.mark.parametrize("mode", chart.MODES)
def test_init_containers_wait_for_the_head_with_a_valid_health_check(mode: str) -> None:
    from ray.scripts.scripts import healthcheck

    objects = found("8b", mode)
    head = {"kuberay": "rel-penstock-head-svc:6379", "standalone": "rel-penstock-head:6379"}[mode]
    waiting = {
        role: each
        for role, pod in chart.pods(objects)
        for each in pod["spec"].get("initContainers", [])
        if each["name"] == "wait-for-head"
    }
    all_roles = {"driver", "router", "prefill", "decode"}
    # With KubeRay, the operator adds this container to all pods but the driver's.
    expected = {"driver"} if mode == "kuberay" else all_roles
    assert set(waiting) == expected
    for each in waiting.values():
        (script,) = each["args"]
        check, log, pause = (part.split() for part in script.split(";")[:3])
        assert check[:3] == ["until", "ray", "health-check"]
        assert healthcheck.make_context("ray health-check", check[3:]).params["address"] == head
        assert log[:3] == ["do", "echo", '"waiting']
        assert pause == ["sleep", "2"]
        done = subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("mode", chart.MODES)
def test_head_has_no_cpus_and_no_dashboard(mode: str) -> None:
    head = nodes(found("8b", mode))["head"]
    assert (head["num_cpus"], head["include_dashboard"], head["resources"]) == (0, False, {})
    assert nodes(found("8b", mode))["router"]["resources"] == {"router": 1}


def test_rays_autoscaler_accepts_the_ray_cluster() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr as derive,
    )

    pools = {"decode": {"minReplicas": 0, "maxReplicas": 6}}
    values = chart.merged(chart.example("8b"), {"pools": pools, "ray": {"idleSeconds": 45}})
    cluster = chart.one(chart.objects(chart.render(values)), "RayCluster")
    cluster["metadata"]["namespace"] = "apps"
    derived = derive(cluster)
    types = derived["available_node_types"]
    bounds = {name: (each["min_workers"], each["max_workers"]) for name, each in types.items()}
    assert bounds == {"headgroup": (0, 0), "router": (1, 1), "prefill": (1, 1), "decode": (0, 6)}
    assert types["decode"]["resources"] | {"memory": 0} == {
        **{"CPU": 4, "GPU": 1, "memory": 0},
        "decode": 1,
    }
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert derived["idle_timeout_minutes"] == 0.75


@pytest.mark.parametrize("mode", chart.MODES)
def test_commands_of_hooks_and_probes_are_accepted_by_our_programs(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, pod in chart.pods(found("70b-tp4", mode)):
        if role in ("driver", "head"):
            continue
        main = pod["spec"]["containers"][0]
        command = main["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["python", "-m", node_drain.__name__]
        env = {each["name"]: each.get("value") for each in main["env"]}
        mounts = {mount["mountPath"] for mount in main["volumeMounts"]}
        assert env[node_drain.FOLDER_VARIABLE] in mounts
        monkeypatch.setenv(node_drain.FOLDER_VARIABLE, str(tmp_path))
        assert node_drain.main(command[3:]) == 0
        if role in ROLES:
            probe = main["readinessProbe"]["exec"]["command"]
            assert probe[:3] == ["python", "-m", readiness_probe.__name__]
            mark = tmp_path / f"{os.getpid()}{readiness_probe.READINESS_SUFFIX}"
            assert readiness_probe.main(probe[3:]) == 1
            mark.touch()
            assert readiness_probe.main(probe[3:]) == 0
            mark.unlink()


def test_models_are_downloaded_to_the_folder_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[tuple[str, list[str], Path, str | None]] = []
    monkeypatch.setattr(fetch, "download", lambda *arguments: fetched.append(arguments))
    objects = found("8b", "standalone")
    for role, pod in chart.pods(objects):
        for each in pod["spec"].get("initContainers", []):
            if each["name"] != "fetch-model":
                continue
            assert each["command"] == ["python", "-m", fetch.__name__]
            assert fetch.main(each["args"]) == 0
            name, wanted, folder, revision = fetched[-1]
            assert (name, revision) == ("meta-llama/Llama-3.1-8B-Instruct", None)
            assert str(folder) == parse(yaml.safe_load(config(objects))).checkpoint
            assert (fetch.WEIGHTS in wanted) == (role in ROLES)
    assert len(fetched) == 4  # driver, router, prefill and decode pods; the head fetches no model


@pytest.mark.parametrize("revision", ["0123abc", "refs/pr/1", "1.0"])
def test_all_pods_download_the_same_revision(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str | None] = []
    monkeypatch.setattr(fetch, "download", lambda *arguments: fetched.append(arguments[3]))
    source = {"hub": {"name": "a/b", "revision": revision}}
    objects = chart.objects(chart.render({"models": {"m": {"source": source}}}))
    for _, pod in chart.pods(objects):
        for each in pod["spec"].get("initContainers", []):
            if each["name"] == "fetch-model":
                assert fetch.main(each["args"]) == 0
    assert set(fetched) == {revision}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({}, "demo"),
        ({"hub": {"name": "a/b"}}, "/models/b"),
        ({"image": {"reference": "x", "path": "/y/z"}}, "/models/z"),
        ({"pvc": {"claimName": "c", "accessMode": "ReadOnlyMany"}}, "/models"),
        ({"pvc": {"claimName": "c", "accessMode": "ReadOnlyMany", "path": "d/e"}}, "/models/d/e"),
        ({"pvc": {"claimName": "1", "accessMode": "ReadOnlyMany", "path": "a: b"}}, "/models/a: b"),
    ],
)
def test_each_source_of_a_model_has_its_folder(source: dict[str, Any], path: str) -> None:
    objects = chart.objects(chart.render({"models": {"a/b-1.5": {"source": source}}}))
    spec = parse(yaml.safe_load(config(objects)))
    assert (spec.model_name, spec.checkpoint) == ("a/b-1.5", path)
    for role, pod in chart.pods(objects):
        mounts = {each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
        assert ("/models" in mounts) == (path != "demo" and role != "head"), role


def test_without_models_the_bundled_model_is_served() -> None:
    assert parse(yaml.safe_load(config(chart.objects(chart.render({}))))).models == parse({}).models


def test_settings_of_a_model_and_of_pools_reach_the_driver() -> None:
    settings: dict[str, Any] = {
        "aliases": ["other"],
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "quantization": "int8",
        "max_model_len": 2_000_000,
        "generation_config": "none",
        "chat_template": "{{ messages }}",
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "attention_backend": "fa3",
        "deterministic": True,
    }
    # In the chart, a model has no `path` and no `revision`: its `source` determines both.
    assert {"path", "revision", *settings} == set(knobs(ModelSpec))
    sizes = {"kvCacheMib": 10, "maxSequences": 3}
    values = {
        "models": {"m": settings},
        "poolDefaults": {"blockSize": 32, "maxBatchedTokens": 2048},
        "pools": {"decode": sizes},
    }
    spec = parse(yaml.safe_load(config(chart.objects(chart.render(values)))))
    expected = ModelSpec(path="demo", **{**settings, "aliases": ("other",)})
    assert spec.models == {"m": expected}
    found = {
        role: (pool.block_size, pool.max_batched_tokens, pool.kv_cache_mib, pool.max_sequences)
        for role, pool in (("prefill", spec.pools.prefill), ("decode", spec.pools.decode))
    }
    default = PoolSpec().max_sequences
    assert found == {"prefill": (32, 2048, None, default), "decode": (32, 2048, 10, 3)}


SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())


@pytest.mark.parametrize(
    ("record", "known"),
    [
        (EngineSpec, SCHEMA["properties"]["engine"]["properties"]),
        (ModelSpec, SCHEMA["definitions"]["model"]["properties"]),
    ],
)
def test_schema_has_the_keys_and_bounds_of_the_program(record: type, known: dict[str, Any]) -> None:
    here = set(knobs(record)) - {"path", "revision"}  # the chart has both keys under `source`
    assert set(known) - {"source"} == here, "add it to the schema"
    for name, (field, _) in knobs(record).items():
        bounds = (known.get(name, {}).get("minimum"), known.get(name, {}).get("maximum"))
        assert bounds == (field.metadata["least"], field.metadata["most"]), name


def test_schema_has_the_bounds_of_pool_sizes_of_the_program() -> None:
    known = SCHEMA["definitions"]["pool"]["properties"]
    names = {
        "block_size": "blockSize",
        "kv_cache_mib": "kvCacheMib",
        "max_sequences": "maxSequences",
        "max_batched_tokens": "maxBatchedTokens",
    }
    for name, chart_name in names.items():
        field, _ = knobs(PoolSpec)[name]
        bounds = (known[chart_name].get("minimum"), known[chart_name].get("maximum"))
        assert bounds == (field.metadata["least"], field.metadata["most"]), name


def test_chart_names_the_installed_version_of_ray() -> None:
    import ray

    cluster = chart.one(found("8b"), "RayCluster")
    assert cluster["spec"]["rayVersion"] == ray.__version__
