"""Properties that an installation on a real cluster needs: operator, drains, upgrades, scrapes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")

from tests.support import chart, kuberay

KIND = chart.ROOT / ".github" / "workflows" / "kind.yml"


def rendered(values: dict[str, Any], mode: str = "kuberay") -> list[chart.Object]:
    return chart.objects(chart.render(chart.merged(chart.of_mode(mode), values)))


# ------------------------------------------------------------ KubeRay


def test_installed_and_documented_versions_of_kuberay_are_supported() -> None:
    oldest = f"{kuberay.OLDEST[0]}.{kuberay.OLDEST[1]}"
    readme = (chart.CHART / "README.md").read_text()
    manual = (chart.ROOT / "docs" / "kubernetes.md").read_text()
    assert f"KubeRay operator {oldest} or newer" in readme
    assert f"KubeRay {oldest} or newer" in manual
    assert f"the KubeRay operator, {oldest} or newer" in (chart.CHART / "values.yaml").read_text()
    assert re.findall(r"ref=v([\d.]+)", readme) == [kuberay.NEWEST]
    matrix = yaml.safe_load(KIND.read_text())["jobs"]["kind"]["strategy"]["matrix"]
    versions = {entry["kuberay"] for entry in matrix["include"] if "kuberay" in entry}
    assert kuberay.NEWEST in versions
    assert {tuple(map(int, each.split(".")[:2])) for each in versions} == {
        kuberay.OLDEST,
        tuple(map(int, kuberay.NEWEST.split(".")[:2])),
    }
    assert "?ref=v${{ matrix.kuberay }}" in KIND.read_text()


def test_kind_job_frees_disk_space_before_it_loads_the_images() -> None:
    steps = yaml.safe_load(KIND.read_text())["jobs"]["kind"]["steps"]
    commands = [step.get("run", "") for step in steps]
    order = ["sudo rm", "docker build", "docker builder prune", "kind load docker-image"]
    found = [next(i for i, run in enumerate(commands) if run.startswith(each)) for each in order]
    assert found == sorted(found)


@pytest.mark.parametrize("version", [(1, 4), (1, 5)])
def test_older_kuberay_lacks_fields_of_the_chart(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = chart.one(rendered({"ray": {"authSecret": "token"}}), "RayCluster")
    assert kuberay.field_problems(cluster["spec"]) == []
    monkeypatch.setattr(kuberay, "OLDEST", version)
    found = kuberay.field_problems(cluster["spec"])
    assert "RayCluster: upgradeStrategy needs KubeRay 1.6" in found
    assert "RayCluster: authOptions.secretName needs KubeRay 1.6" in found


def test_fields_of_newer_kuberay_and_unknown_fields_are_problems() -> None:
    spec = {"autoscalerOptions": {"args": []}, "workerGroupSpecs": [{"replica": 1}]}
    assert kuberay.field_problems(spec) == [
        "RayCluster: autoscalerOptions.args needs KubeRay 1.7",
        "RayCluster: workerGroupSpecs[].replica is in no KubeRay that was looked at",
    ]


@pytest.mark.parametrize("version", ["1.6.0", "1.7.0"])
def test_listed_fields_are_those_of_the_schemas(version: str) -> None:
    schemas = chart.custom_validators("RayCluster", "ray.io/v1")
    (schema,) = (each.schema for source, each in schemas.items() if f" v{version} " in source)
    release = tuple(map(int, version.split(".")[:2]))
    for path, since in kuberay.FIELDS.items():
        found: Any = schema["properties"]["spec"]
        for name in path.split("."):
            found = found.get("properties", {}).get(name.removesuffix("[]"), {})
            found = found.get("items", {}) if name.endswith("[]") else found
        assert bool(found) is (since <= release), path


# ------------------------------------------------------------ drains


@pytest.mark.parametrize("mode", chart.MODES)
@pytest.mark.parametrize(
    ("replicas", "unavailable", "least"), [(1, 1, None), (2, 1, 1), (3, 1, 2), (4, 3, 1), (2, 5, 0)]
)
def test_budget_lets_a_node_with_a_router_drain(
    mode: str, replicas: int, unavailable: int, least: int | None
) -> None:
    budget = {"disruptionBudget": {"maxUnavailable": unavailable}}
    found = rendered({"router": {"replicas": replicas, **budget}}, mode)
    assert chart.problems(found) == []
    budgets = [each["spec"] for each in found if each["kind"] == "PodDisruptionBudget"]
    assert [each["minAvailable"] for each in budgets] == ([least] if least else [])
    assert all("maxUnavailable" not in each for each in budgets)


# ------------------------------------------------------------ upgrades


@pytest.mark.parametrize("mode", chart.MODES)
def test_new_version_of_the_chart_changes_no_pod(mode: str, tmp_path: Path) -> None:
    copy = tmp_path / "penstock"
    shutil.copytree(chart.CHART, copy)
    metadata = copy / "Chart.yaml"
    text, count = re.subn(r"(?m)^version: .*", "version: 9.9.9+later", metadata.read_text())
    assert count == 1
    metadata.write_text(text)
    values = chart.merged(chart.example("8b"), chart.of_mode(mode))
    old, new = (chart.objects(chart.render(values, folder)) for folder in (chart.CHART, copy))
    assert old != new
    assert [each["spec"] for each in old if "spec" in each] == [
        each["spec"] for each in new if "spec" in each
    ]


@pytest.mark.parametrize("path", ["ray.head", "router", "poolDefaults", "pools.decode"])
def test_new_tolerations_replace_the_pods_of_a_ray_cluster(path: str) -> None:
    toleration = {"key": "spot", "operator": "Exists", "tolerationSeconds": 2_000_000}
    values: dict[str, Any] = {"tolerations": [toleration]}
    for key in reversed(path.split(".")):
        values = {key: values}
    before, after = rendered({}), rendered(values)
    assert chart.problems(after) == []
    specs = [chart.one(found, "RayCluster")["spec"] for found in (before, after)]
    assert kuberay.replacing_fields(specs[0]) != kuberay.replacing_fields(specs[1])


@pytest.mark.parametrize(
    "values", [{"ray": {"idleSeconds": 61}}, {"pools": {"mixed": {"maxReplicas": 1}}}]
)
def test_documented_changes_outside_pod_templates_replace_all_pods(values: dict[str, Any]) -> None:
    before, after = (chart.one(rendered(each), "RayCluster")["spec"] for each in ({}, values))
    assert kuberay.replacing_fields(before) != kuberay.replacing_fields(after)


def test_new_bounds_of_a_pool_replace_no_pods_of_a_ray_cluster() -> None:
    bounds = {"decode": {"minReplicas": 0, "maxReplicas": 9}}
    found = (rendered({}), rendered({"pools": bounds}))
    before, after = (chart.one(each, "RayCluster")["spec"] for each in found)
    assert before != after
    assert kuberay.replacing_fields(before) == kuberay.replacing_fields(after)


@pytest.mark.parametrize("mode", chart.MODES)
def test_routers_and_the_head_can_have_an_image_of_their_own(mode: str) -> None:
    own = {"routerImage": {"repository": "slim", "tag": "1"}, "image": {"tag": "2"}}
    values = chart.merged(chart.example("8b"), chart.of_mode(mode), own)
    found = chart.objects(chart.render(values))
    assert chart.problems(found) == []
    images = {
        role: {
            container["image"]
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        }
        for role, pod in chart.pods(found)
    }
    slim = {"slim:1"}
    assert {role for role, each in images.items() if each == slim} == {"router", "head"}
    assert {role for role, each in images.items() if each == {"penstock:2"}} == {
        *("driver", "prefill", "decode"),
    }


def test_digest_pins_the_image_of_all_containers() -> None:
    digest = f"sha256:{'0' * 64}"
    found = rendered({"image": {"repository": "registry.example/penstock", "digest": digest}})
    images = {
        container["image"]
        for _, pod in chart.pods(found)
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    }
    assert images == {f"registry.example/penstock@{digest}"}
    assert chart.problems(found) == []


# ------------------------------------------------------------ scrapes


def admitted(found: list[chart.Object]) -> dict[str, Any]:
    """Return the peers that may connect, by port of the routers; None means all peers."""
    policy = chart.one(found, "NetworkPolicy", "-clients")["spec"]["ingress"]
    return {port["port"]: rule.get("from") for rule in policy for port in rule["ports"]}


@pytest.mark.parametrize("clients", [[], [{"podSelector": {"matchLabels": {"app": "web"}}}]])
def test_only_the_named_pods_reach_the_port_for_operators(clients: list[Any]) -> None:
    peers = {"http": clients or None, "grpc": clients or None}
    assert admitted(rendered({"networkPolicy": {"clients": clients}})) == peers
    monitoring = [chart.PROMETHEUS]
    found = rendered({"networkPolicy": {"clients": clients, "monitoring": monitoring}})
    assert admitted(found) == {**peers, "admin": monitoring}


@pytest.mark.parametrize("mode", chart.MODES)
def test_the_scraper_of_each_example_has_a_key_that_may_read_metrics(mode: str) -> None:
    scraped = 0
    for name in chart.EXAMPLES:
        router = chart.example(name).get("router", {})
        found = chart.example_objects(name, mode)
        for monitor in (each for each in found if each["kind"] == "ServiceMonitor"):
            (endpoint,) = monitor["spec"]["endpoints"]
            used = endpoint.get("authorization", {}).get("credentials")
            roles = [
                key["role"] for key in router.get("keys", {}).values() if key["secret"] == used
            ]
            has_keys = bool(router.get("keys") or router.get("apiKeysSecret"))
            assert roles == (["metrics"] if has_keys else []), name
            assert admitted(found)["admin"], name
            scraped += 1
    assert scraped == 2
