"""A rendered chart satisfies the Kubernetes schemas and our own rules; a mutated chart does not."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
pytest.importorskip("kubernetes_validate", reason="it is in the dependency group chart")

from helm_python import lint

from penstock.cluster.spec.router_spec import RouterSpec
from tests.support import chart

CASES = [(name, mode) for name in chart.EXAMPLES for mode in chart.MODES]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_example_is_valid_in_both_modes(name: str, mode: str) -> None:
    assert chart.problems(chart.example_objects(name, mode)) == []


@pytest.mark.parametrize("mode", chart.MODES)
def test_the_defaults_are_valid(mode: str) -> None:
    assert chart.problems(chart.objects(chart.render(chart.of_mode(mode)))) == []


@pytest.mark.parametrize("mode", chart.MODES)
def test_values_of_the_kind_job_are_valid(mode: str) -> None:
    path = chart.ROOT / ".github" / "workflows" / "kind-values.yaml"
    values = chart.merged(yaml.safe_load(path.read_text()), chart.of_mode(mode))
    assert chart.problems(chart.objects(chart.render(values))) == []


def types_of(value: object) -> object:
    """Return a YAML value with each scalar replaced by the name of its type."""
    if isinstance(value, dict):
        return {key: types_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [types_of(each) for each in value]
    return type(value).__name__


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_release_may_have_a_name_that_yaml_reads_as_a_boolean(name: str, mode: str) -> None:
    values = chart.merged(chart.example(name), chart.of_mode(mode))
    boolean, plain = (
        chart.objects(chart.render(chart.merged(values, {"fullnameOverride": full}), base={}))
        for full in ("on", "xx")
    )
    assert types_of(boolean) == types_of(plain)
    assert chart.one(boolean, "Service", "on")["metadata"]["name"] == "on"


def test_image_and_pods_have_the_same_user_id() -> None:
    pod = chart.one(chart.objects(chart.render({})), "Deployment")["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in (chart.ROOT / "Dockerfile").read_text()


def test_custom_resources_have_schemas() -> None:
    for kind, api in [
        ("RayCluster", "ray.io/v1"),
        ("ScaledObject", "keda.sh/v1alpha1"),
        ("ServiceMonitor", "monitoring.coreos.com/v1"),
        ("PodMonitor", "monitoring.coreos.com/v1"),
        ("PrometheusRule", "monitoring.coreos.com/v1"),
        ("HTTPRoute", "gateway.networking.k8s.io/v1"),
    ]:
        assert chart.custom_validators(kind, api), kind


def scaled(scaler: str) -> chart.Object:
    """Return values with a decode pool that KEDA or an HPA scales."""
    scaling = {"autoscaler": scaler, "prometheusAddress": "http://prometheus:9090"}
    pools = {"decode": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}}
    monitoring = {"networkPolicy": {"monitoring": [chart.PROMETHEUS]}}
    own = {"standalone": scaling, "pools": pools, **monitoring}
    return chart.merged(chart.of_mode("standalone"), own)


@pytest.mark.parametrize("scaler", ["keda", "hpa"])
def test_with_an_external_autoscaler_the_chart_sets_no_replica_count(scaler: str) -> None:
    found = rendered_objects(scaled(scaler))
    assert chart.problems(found) == []
    kind = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}[scaler]
    assert [each["metadata"]["name"] for each in found if each["kind"] == kind] == [
        "rel-penstock-decode"
    ]
    assert "replicas" not in chart.one(found, "Deployment", "-decode")["spec"]
    assert chart.one(found, "Deployment", "-prefill")["spec"]["replicas"] == 1


@pytest.mark.parametrize("replicas", [3, 0])
def test_replica_count_of_an_existing_deployment_is_kept(replicas: int, tmp_path: Path) -> None:
    """The engine of this test has no cluster, so an object replaces the call of `lookup`."""
    copy = tmp_path / "penstock"
    shutil.copytree(chart.CHART, copy)
    path = copy / "templates" / "standalone.yaml"
    called = 'lookup "apps/v1" "Deployment" $.Release.Namespace $name'
    live = f'dict "spec" (dict "replicas" {replicas}) "metadata" (dict "name" $name)'
    assert path.read_text().count(called) == 1
    path.write_text(path.read_text().replace(called, live))
    found = rendered_objects(scaled("keda"), chart=copy)
    assert chart.one(found, "Deployment", "-decode")["spec"]["replicas"] == replicas
    assert chart.one(found, "Deployment", "-prefill")["spec"]["replicas"] == 1


def test_large_numbers_stay_integers() -> None:
    spread = {"topologyKey": "rack", "maxSkew": 2_000_000}
    values = {"podSecurity": {"user": 1_000_680_000}, "poolDefaults": {"topologySpread": [spread]}}
    (decode,) = (
        pod["spec"] for role, pod in chart.pods(rendered_objects(values)) if role == "decode"
    )
    numbers = [decode["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")]
    numbers.append(decode["topologySpreadConstraints"][0]["maxSkew"])
    assert numbers == [1_000_680_000] * 3 + [2_000_000]
    assert {type(number) for number in numbers} == {int}


def rendered_objects(values: chart.Object, **options: Any) -> list[chart.Object]:
    return chart.objects(chart.render(values, **options))


@pytest.mark.parametrize("mode", chart.MODES)
@pytest.mark.parametrize("name", ["123", "true"])
@pytest.mark.parametrize("source", ["hub", "pvc", "image"])
def test_names_that_look_like_numbers_stay_strings(mode: str, name: str, source: str) -> None:
    """The rendered objects must equal those of a common name, with this name replaced."""
    texts = {
        each: json.dumps(rendered_objects(named_values(each, mode, source), release=(each, each)))
        for each in (name, "common")
    }
    hashed = [re.sub(r"\b[0-9a-f]{64}\b", "HASH", text) for text in texts.values()]
    assert hashed[0] == hashed[1].replace("common", name)


def named_values(name: str, mode: str, source: str) -> chart.Object:
    """Return values of the chart in which each Secret, claim and class is called `name`."""
    secret = {"name": name, "key": name}
    sources = {
        "hub": {"name": "a/b", "tokenSecret": secret},
        "pvc": {"claimName": name, "accessMode": "ReadOnlyMany"},
        "image": {"reference": name, "path": "/m"},
    }
    monitor = {"enabled": True, "apiKeySecret": secret}
    keys = {"scraper": {"role": "metrics", "secret": secret}}
    scaled = {"autoscaler": "hpa"} if mode == "standalone" else {}
    return {
        "fullnameOverride": "full",
        "cluster": {"mode": mode},
        "ray": {"authSecret": name},
        "image": {"repository": "penstock", "pullSecrets": [name]},
        "models": {"m": {"source": {source: sources[source]}}},
        "router": {"apiKeysSecret": secret, "keys": keys},
        "poolDefaults": {
            "runtimeClassName": name,
            "priorityClassName": name,
            "topologySpread": [{"topologyKey": name}],
        },
        "pools": {"decode": {"maxReplicas": 2 if scaled else 1}},
        "standalone": scaled,
        "networkPolicy": {"monitoring": [chart.PROMETHEUS]},
        "monitoring": {"serviceMonitor": monitor},
    }


def test_pod_monitor_scrapes_the_router_pods() -> None:
    secret = {"name": "penstock-scraper", "key": "key"}
    monitor = {"enabled": True, "interval": "30s", "apiKeySecret": secret}
    values = {
        "monitoring": {"podMonitor": monitor},
        "networkPolicy": {"monitoring": [chart.PROMETHEUS]},
        "router": {"keys": {"scraper": {"role": "metrics", "secret": secret}}},
    }
    found = chart.objects(chart.render(chart.merged(chart.of_mode("kuberay"), values)))
    assert chart.problems(found) == []
    (endpoint,) = chart.one(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    # Alerts and the dashboard select their series by the label `job`.
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "rel-penstock"}]
    assert endpoint["authorization"]["credentials"]["name"] == "penstock-scraper"


def test_gateways_route_to_the_http_port_of_the_service() -> None:
    route = {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateway", "sectionName": "https"}],
        "hostnames": ["llm.example", "*.llm.example"],
        "timeouts": {"request": "600s"},
        "annotations": {"a": "b"},
    }
    found = chart.objects(chart.render({"router": {"httpRoute": route, "httpPort": 8100}}))
    assert chart.problems(found) == []
    rendered = chart.one(found, "HTTPRoute")
    assert rendered["metadata"]["annotations"] == {"a": "b"}
    spec = rendered["spec"]
    assert [spec["parentRefs"], spec["hostnames"]] == [route["parentRefs"], route["hostnames"]]
    (rule,) = spec["rules"]
    assert rule["timeouts"] == {"request": "600s"}
    (backend,) = rule["backendRefs"]
    service = chart.one(found, "Service", backend["name"])
    names = {each["port"]: each["name"] for each in service["spec"]["ports"]}
    assert names[backend["port"]] == "http"


def test_route_with_an_unknown_field_or_a_bad_timeout_is_a_problem() -> None:
    refs = {"enabled": True, "parentRefs": [{"name": "public"}], "timeouts": {"request": "1m"}}
    found = chart.objects(chart.render({"router": {"httpRoute": refs}}))
    spec = chart.one(found, "HTTPRoute")["spec"]
    spec["parentRefs"][0]["gateway"] = "public"
    spec["rules"][0]["timeouts"]["request"] = "60"
    lines = chart.problems(found)
    # Each of the two mistakes violates the schemas of two Gateway API versions.
    assert len(lines) == 2 * 2 * len(chart.KUBERNETES)
    assert all("'gateway' was unexpected" in each or "'60' does not" in each for each in lines)


def test_there_is_no_route_by_default() -> None:
    assert "HTTPRoute" not in {each["kind"] for each in chart.objects(chart.render({}))}


def test_chart_passes_strict_lint() -> None:
    for values in ({}, chart.of_mode("standalone"), *map(chart.example, chart.EXAMPLES)):
        found = lint(chart.CHART, values, strict=True, kube_version="1.27.0")
        assert found["errors"] == []
        assert {each["error"] for each in found["messages"]} <= {"icon is recommended"}


def test_the_oldest_supported_kubernetes_version_is_tested() -> None:
    metadata = (chart.CHART / "Chart.yaml").read_text()
    assert f'kubeVersion: ">={chart.KUBERNETES[0]}.0-0"' in metadata


def test_pods_of_all_pools_differ_only_in_the_role() -> None:
    values = chart.merged(chart.of_mode("kuberay"), {"pools": {"mixed": {"replicas": 1}}})
    cluster = chart.one(chart.objects(chart.render(values)), "RayCluster")
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    assert set(groups) == {"router", "prefill", "decode", "mixed"}
    shapes = {
        re.sub(rf"\b{role}\b", "POOL", str(groups[role])) for role in ("prefill", "decode", "mixed")
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("mode", chart.MODES)
def test_workers_prefer_nodes_near_other_workers(mode: str) -> None:
    zone, soft = "topology.kubernetes.io/zone", "preferredDuringSchedulingIgnoredDuringExecution"
    own = {"weight": 1, "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {}}}
    affinity = {"podAffinity": {soft: [own]}, "nodeAffinity": {soft: []}}
    pools = {"prefill": {"affinity": affinity}, "mixed": {"replicas": 1, "near": ""}}
    values = chart.merged(
        chart.of_mode(mode), {"poolDefaults": {"near": zone}, "pools": pools, "router": {}}
    )
    found = chart.objects(chart.render(values))
    assert chart.problems(found) == []
    affinities = {role: pod["spec"].get("affinity", {}) for role, pod in chart.pods(found)}
    assert affinities["decode"].keys() == {"podAffinity"}
    (term,) = affinities["decode"]["podAffinity"][soft]
    assert term["podAffinityTerm"]["topologyKey"] == zone
    assert affinities["prefill"] == {**affinity, "podAffinity": {soft: [own, term]}}
    assert not any(affinities[other] for other in ("head", "router", "driver", "mixed"))
    # The affinity term selects the pods of workers and no other pods.
    selected = {
        role
        for role, pod in chart.pods(found)
        if selects(term["podAffinityTerm"]["labelSelector"], pod["metadata"]["labels"])
    }
    assert selected == {"prefill", "decode", "mixed"}


def selects(selector: chart.Object, labels: chart.Object) -> bool:
    """Return whether Kubernetes would match `labels`; supports only equality and one NotIn."""
    (excluded,) = selector["matchExpressions"]
    assert excluded["operator"] == "NotIn"
    return labels.get(excluded["key"]) not in excluded["values"] and all(
        labels.get(key) == value for key, value in selector["matchLabels"].items()
    )


@pytest.mark.parametrize("mode", chart.MODES)
def test_operators_have_a_port_and_a_service_of_their_own(mode: str) -> None:
    found = chart.example_objects("70b-tp4", mode)
    services = [each for each in found if each["kind"] == "Service"]
    ports = {
        each["metadata"]["name"]: {port["name"] for port in each["spec"]["ports"]}
        for each in services
        if not each["metadata"]["name"].endswith("-head")
    }
    assert ports == {"rel-penstock": {"http", "grpc"}, "rel-penstock-admin": {"admin"}}
    monitor = chart.one(found, "ServiceMonitor")["spec"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == "admin"
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "rel-penstock"}]
    (admin,) = (each for each in services if each["metadata"]["name"] == "rel-penstock-admin")
    wanted = monitor["selector"]["matchLabels"].items()
    assert wanted <= admin["metadata"]["labels"].items()
    policy = chart.one(found, "NetworkPolicy", "-clients")["spec"]["ingress"]
    namespaces = {
        port["port"]: rule["from"][0]["namespaceSelector"]["matchLabels"]
        for rule in policy
        for port in rule["ports"]
    }
    name = "kubernetes.io/metadata.name"
    assert namespaces == {
        "http": {name: "gateway"},
        "grpc": {name: "gateway"},
        "admin": {name: "monitoring"},
    }
    (router,) = (pod for role, pod in chart.pods(found) if role == "router")
    container = router["spec"]["containers"][0]
    assert {"name": "admin", "containerPort": 8001} in container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_chart_knows_every_routing_strategy_and_passes_it_to_the_routers() -> None:
    schema = json.loads((chart.CHART / "values.schema.json").read_text())
    strategies = schema["properties"]["router"]["properties"]["routing"]["enum"]
    assert tuple(strategies) == get_args(get_type_hints(RouterSpec)["routing"])
    for strategy in strategies:
        rendered = chart.objects(chart.render({"router": {"routing": strategy}}))
        assert (
            f"routing: {strategy}\n"
            in chart.one(rendered, "ConfigMap", "rel-penstock")["data"]["cluster.yaml"]
        )


def test_notes_show_the_next_commands() -> None:
    notes = chart.render({})["penstock/templates/NOTES.txt"]
    assert "kubectl -n apps logs -f deployment/rel-penstock-driver" in notes
    assert "No API keys are set" in notes
    keyed = chart.render({"router": {"apiKeysSecret": {"name": "keys"}}})
    assert "No API keys" not in keyed["penstock/templates/NOTES.txt"]


def test_chart_has_no_subcharts() -> None:
    assert "dependencies" not in (chart.CHART / "Chart.yaml").read_text()
    assert not (chart.CHART / "charts").exists()


MUTATIONS = [
    ("kuberay", "_pods.tpl", "runAsNonRoot: true", "runAsNonRoot: false"),
    ("kuberay", "_pods.tpl", "seccompProfile: {type: RuntimeDefault}", ""),
    ("kuberay", "_pods.tpl", "drop: [ALL]", "drop: [NET_RAW]"),
    ("standalone", "_pods.tpl", "allowPrivilegeEscalation: false", ""),
    ("kuberay", "_pods.tpl", "{name: shm, mountPath: /dev/shm}", "{name: shm, mountPath: /shm}"),
    ("kuberay", "_pods.tpl", "{name: RAY_AUTH_MODE, value: token}", "{name: A, value: b}"),
    ("kuberay", "_pods.tpl", "readinessProbe:", "readinessProb:"),
    ("standalone", "_pods.tpl", "preStop:", "postStart:"),
    (
        "kuberay",
        "_pods.tpl",
        "penstock.cluster.kubernetes.readiness_probe",
        "penstock.cluster.kubernetes.node_drain",
    ),
    ("standalone", "_pods.tpl", "httpGet: {path: /health", "httpGet: {path: /"),
    ("kuberay", "_pods.tpl", "limits: {{- toYaml", "limit: {{- toYaml"),
    (
        "kuberay",
        "_pods.tpl",
        "failureThreshold: {{ divf",
        "failureThreshold: {{ mulf 0 | addf 1 | divf 600",
    ),
    ("kuberay", "_pods.tpl", '{{ include "penstock.graceSeconds" $root }}', "30"),
    ("kuberay", "raycluster.yaml", "version: v2", "version: v1"),
    ("kuberay", "raycluster.yaml", "mode: token", "mode: disabled"),
    ("kuberay", "raycluster.yaml", "enableInTreeAutoscaling: true", ""),
    (
        "kuberay",
        "raycluster.yaml",
        "  minReplicas: {{ .least }}",
        "  minReplicas: {{ .least }}\n  replicas: 1",
    ),
    ("kuberay", "raycluster.yaml", "groupName:", "groupname:"),
    ("standalone", "standalone.yaml", "replicas := $pool.replicas", 'replicas := dig "a" nil dict'),
    ("standalone", "standalone.yaml", "serviceName:", "serviceNam:"),
    (
        "kuberay",
        "router.yaml",
        'dict "root" . "component" "router"',
        'dict "root" . "component" "decode"',
    ),
    ("kuberay", "router.yaml", "policy/v1", "policy/v1beta1"),
    ("kuberay", "router.yaml", "minAvailable:", "minAvailabel:"),
    ("kuberay", "router.yaml", "minAvailable: {{ $available }}", "maxUnavailable: 1"),
    ("standalone", "router.yaml", "minAvailable: {{ $available }}", "minAvailable: 50%"),
    ("kuberay", "router.yaml", "minAvailable: {{ $available }}", "minAvailable: 2"),
    ("kuberay", "_pods.tpl", '"penstock.podLabels"', '"penstock.labels"'),
    ("kuberay", "driver.yaml", '"penstock.podLabels"', '"penstock.labels"'),
    ("kuberay", "raycluster.yaml", "    version: v2", "    version: v2\n    args: [--verbose]"),
    ("kuberay", "networkpolicy.yaml", "if .Values.networkPolicy.enabled", "if false"),
    ("kuberay", "networkpolicy.yaml", "- from: [", "- from: [{namespaceSelector: {}}, "),
    (
        "standalone",
        "networkpolicy.yaml",
        "- ports: [{port: http, protocol: TCP}, {port: grpc, protocol: TCP}]",
        "- ports: [{port: 6379, protocol: TCP}]",
    ),
    ("kuberay", "networkpolicy.yaml", "- to: [", "- to: [{namespaceSelector: {}}, "),
    ("kuberay", "driver.yaml", "automountServiceAccountToken: false", ""),
    ("standalone", "_pods.tpl", "automountServiceAccountToken: false", ""),
    (
        "standalone",
        "_pods.tpl",
        """"shm" "256Mi" "readOnlyRootFilesystem" true""",
        """"shm" "256Mi" "readOnlyRootFilesystem" false""",
    ),
    ("kuberay", "driver.yaml", "{name: config, mountPath", "{name: konfig, mountPath"),
    ("kuberay", "monitoring.yaml", "interval: {{ .interval }}", "interval: 15"),
    (
        "kuberay",
        "alerts.yaml",
        "expr: {{ $rule.expr | quote }}",
        "expression: {{ $rule.expr | quote }}",
    ),
    (
        "kuberay",
        "_model.tpl",
        "valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}",
        "value: {{ .name }}",
    ),
]
"""(mode, template, original text, replacement). Checks must detect each mutation."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "template", "text", "replacement"), MUTATIONS)
def test_mutated_template_is_detected(
    mode: str, template: str, text: str, replacement: str, tmp_path: Path
) -> None:
    copy = tmp_path / "penstock"
    shutil.copytree(chart.CHART, copy)
    path = copy / "templates" / template
    before = path.read_text()
    assert text in before
    path.write_text(before.replace(text, replacement))
    assert problems_of(copy, mode), f"no check detected {replacement!r}"


def problems_of(copy: Path, mode: str) -> list[str]:
    """Return the problems of the chart in folder `copy`, rendered with example 8b."""
    from helm_python import HelmError

    values = chart.merged(chart.example("8b"), chart.of_mode(mode), {"router": {"replicas": 2}})
    try:
        return chart.problems(chart.objects(chart.render(values, copy)), chart.KUBERNETES[-1:])
    except HelmError as error:
        return [str(error)]
