"""Render the Helm chart, and check the result against schemas and our own rules.

Problems are returned as a list of lines, which is empty for a correct chart.
"""

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.support import kuberay

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "penstock"
CRDS = ROOT / "tests" / "helm" / "crds"  # schemas of custom resources, without descriptions
"""Folders with schemas of custom resources; one kind may have a file for each supported version."""
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
MODES = ("kuberay", "standalone")
KUBERNETES = ("1.27", "1.37")  # oldest supported (Chart.yaml) and newest version

PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
"""Selector of Prometheus's pods, in the form that the chart's values use."""

ANONYMOUS = {"router": {"allowAnonymous": True}}

Object = dict[str, Any]


def merged(*layers: Mapping[str, Any]) -> Object:
    """Merge values as Helm does: later layers override earlier ones."""
    result: Object = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                result[key] = merged(below, value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def of_mode(mode: str) -> Object:
    """Return the chart values for this cluster mode."""
    ray = {"authSecret": "ray-token"} if mode == "standalone" else {}
    return {"cluster": {"mode": mode}, "ray": ray}


def example(name: str) -> Object:
    values: Object = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def render(
    values: Mapping[str, Any],
    chart: Path = CHART,
    base: Mapping[str, Any] = ANONYMOUS,
    release: tuple[str, str] = ("rel", "apps"),
) -> dict[str, str]:
    """Return the rendered text of each template, by path. Raises the template engine's errors.

    `values` override `base`, which by default allows a release without API keys. `release` is the
    release's name and namespace.
    """
    from helm_python import Chart

    name, namespace = release
    loaded = Chart.load(chart)
    rendered: dict[str, str] = loaded.render(merged(base, values), name=name, namespace=namespace)
    return rendered


def objects(rendered: Mapping[str, str]) -> list[Object]:
    texts = (text for path, text in rendered.items() if path.endswith(".yaml"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@functools.cache
def _example_objects(name: str, mode: str) -> list[Object]:
    return objects(render(merged(example(name), of_mode(mode)), base={}))


def example_objects(name: str, mode: str) -> list[Object]:
    """Return a copy of an example's objects; each example is rendered once."""
    return copy.deepcopy(_example_objects(name, mode))


def one(found: Sequence[Object], kind: str, ending: str = "") -> Object:
    """Return the only object of a kind whose name ends with `ending`."""
    (only,) = (
        each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    )
    return only


def pods(found: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the component and the pod template of every pod."""
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "RayCluster":
            templates = [spec["headGroupSpec"]["template"]]
            templates += [group["template"] for group in spec["workerGroupSpecs"]]
        else:
            templates = [spec["template"]] if "template" in spec else []
        for template in templates:
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


# ------------------------------------------------------------ monitoring


def rules() -> list[Object]:
    values = {"monitoring": {"prometheusRule": {"enabled": True, "runbookUrl": "http://book/#"}}}
    found = objects(render(values))
    (group,) = one(found, "PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


def dashboard() -> Object:
    found = objects(render({"monitoring": {"dashboard": {"enabled": True}}}))
    each = one(found, "ConfigMap", "-dashboard")
    assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
    return dict(json.loads(each["data"]["penstock.json"]))


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield title and expression of each dashboard panel, with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$namespace", "apps").replace("$job", "rel-penstock")
            yield panel["title"], expr.replace("$__rate_interval", "5m")


# ------------------------------------------------------------ schemas


def schema_problems(found: Sequence[Object], version: str) -> list[str]:
    """Check objects against the schemas of Kubernetes `version` and of custom resources."""
    loose = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, "spec": pod["spec"]}
        for role, pod in pods(found)
    ]
    problems: list[str] = []
    for each in [*found, *loose]:
        text = json.dumps(each, sort_keys=True)
        problems += _refusals(text, version)
    return problems


@functools.cache
def _refusals(text: str, version: str) -> tuple[str, ...]:
    each = json.loads(text)
    name = f"{each['kind']} {each['metadata']['name']}"
    if validators := custom_validators(each["kind"], each["apiVersion"]):
        return tuple(
            f"{name}: {error.message} ({source})"
            for source, validator in validators.items()
            for error in validator.iter_errors(each)
        )
    if "." in each["apiVersion"].partition("/")[0].removesuffix(".k8s.io"):
        return ()  # `CRDS` has no schema for this custom resource
    import kubernetes_validate
    from kubernetes_validate import utils

    # Without this cache, each validated object would read megabytes of schemas.
    if not hasattr(utils.schema_contents, "cache_info"):
        utils.schema_contents = functools.cache(utils.schema_contents)
        utils.all_versions = functools.cache(utils.all_versions)
    try:
        kubernetes_validate.validate(each, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return (f"{name}: {error.message}",)
    return ()


@functools.cache
def custom_validators(kind: str, api: str) -> dict[str, jsonschema.Draft202012Validator]:
    """Return the validators of a custom resource, by the source of each schema."""
    validators = {}
    for path in sorted(CRDS.glob(f"*_{kind.lower()}_*.json")):
        found = json.loads(path.read_text())
        if api == f"{found['group']}/{found['version']}":
            schema = _strict(found["openAPIV3Schema"], is_root=True)
            validators[found["source"]] = jsonschema.Draft202012Validator(schema)
    return validators


def _strict(schema: Any, is_root: bool = False) -> Any:
    """Convert a custom resource's schema to a JSON Schema that rejects unknown fields."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key not in ("format", "default")}
    if result.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    keeps_unknown = result.pop("x-kubernetes-preserve-unknown-fields", False)
    for key in ("items", "additionalProperties", "anyOf", "allOf", "oneOf", "not"):
        if key in result:
            result[key] = _strict(result[key])
    if "properties" in result:
        below = {name: _strict(each) for name, each in result["properties"].items()}
        if is_root:
            below["metadata"] = {"type": "object"}
        result["properties"] = below
        if not keeps_unknown:
            result.setdefault("additionalProperties", False)
    return result


# ------------------------------------------------------------ our own rules


def rule_problems(found: Sequence[Object]) -> list[str]:
    """Return violations of our own rules, which the Kubernetes schemas do not cover."""
    problems = []
    for role, pod in pods(found):
        spec = pod["spec"]
        problems += [f"{role}: {line}" for line in _pod_problems(role, spec)]
    for each in found:
        if each["kind"] == "RayCluster":
            problems += kuberay.field_problems(each["spec"])
    problems += _label_problems(found)
    problems += _writer_problems(found)
    problems += _reach_problems(found)
    return problems


def _label_problems(found: Sequence[Object]) -> Iterator[str]:
    """Check that no pod label changes with the chart's version, because this would restart pods."""
    stable = {f"app.kubernetes.io/{name}" for name in ("part-of", "instance", "component", "name")}
    for role, pod in pods(found):
        if more := pod["metadata"]["labels"].keys() - stable:
            yield f"{role}: pods have labels that may change: {sorted(more)}"


def _pod_problems(role: str, spec: Object) -> Iterator[str]:
    security = spec.get("securityContext", {})
    # Only Ray's autoscaler, which runs next to the head, uses the Kubernetes API.
    if role != "head" and spec.get("automountServiceAccountToken") is not False:
        yield "holds a token of the Kubernetes API"
    if not (security.get("runAsNonRoot") and security.get("runAsUser")):
        yield "may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    volumes = {each["name"]: each for each in spec["volumes"]}
    for each in containers:
        name, own = each["name"], each.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name} may gain privileges"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name} keeps capabilities"
        if missing := {mount["name"] for mount in each["volumeMounts"]} - volumes.keys():
            yield f"{name} mounts volumes that do not exist: {missing}"
        yield from _secret_problems(each)
    yield from _main_problems(role, spec, volumes)


def _secret_problems(container: Object) -> Iterator[str]:
    env = {each["name"]: each for each in container.get("env", [])}
    for name, each in env.items():
        if "TOKEN" in name and "secretKeyRef" not in each.get("valueFrom", {}):
            yield f"{container['name']} gets {name} in plain text"
    if container["name"] not in ("fetch-model", "copy-model") and (
        env.get("RAY_AUTH_MODE", {}).get("value") != "token" or "RAY_AUTH_TOKEN" not in env
    ):
        yield f"{container['name']} connects to Ray without a token"


def _main_problems(role: str, spec: Object, volumes: Mapping[str, Object]) -> Iterator[str]:
    main = spec["containers"][0]
    if role in ("head", "router", "driver") and not main.get("securityContext", {}).get(
        "readOnlyRootFilesystem"
    ):
        yield "may write to its root filesystem"
    mounted = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in main["volumeMounts"]}
    if mounted.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "has no /dev/shm of its own"
    for probe in ("startupProbe", "livenessProbe"):
        if probe not in main or "initialDelaySeconds" in main.get(probe, {}):
            yield f"has no {probe}, or one with initialDelaySeconds"
    startup = main.get("startupProbe", {})
    if startup.get("failureThreshold", 0) * startup.get("periodSeconds", 0) < 60:
        yield "has less than a minute to start"
    resources = main.get("resources", {})
    if not resources or resources.get("requests") != resources.get("limits"):
        yield "has requests that differ from its limits"
    hook = main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if main["name"] != "driver":
        if not hook or float(hook[-1]) >= spec["terminationGracePeriodSeconds"]:
            yield "has no preStop hook that ends within its grace period"
        yield from _readiness_problems(role, main.get("readinessProbe", {}))


def _readiness_problems(role: str, probe: Object) -> Iterator[str]:
    """Check that a router's readiness probe tests its queue, and a worker's tests decoding."""
    command = " ".join(probe.get("exec", {}).get("command", []))
    if role == "router" and probe.get("httpGet", {}).get("path") != "/health":
        yield "has a readinessProbe that does not check its queue"
    if (
        role in ("prefill", "decode", "mixed")
        and "penstock.cluster.kubernetes.readiness_probe" not in command
    ):
        yield "has a readinessProbe that does not check decoding"
    if not probe:
        yield "has no readinessProbe"


def _writer_problems(found: Sequence[Object]) -> Iterator[str]:
    """Check that every replica count has exactly one writer."""
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for each in found
        if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")
    }
    for each in found:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "RayCluster":
            written = [g["groupName"] for g in spec["workerGroupSpecs"] if "replicas" in g]
            if written or scaled or not spec.get("enableInTreeAutoscaling"):
                yield f"{name}: its autoscaler is not the only writer of {written or 'replicas'}"
            if spec.get("autoscalerOptions", {}).get("version") != "v2":
                yield f"{name}: not autoscaler v2"
            if spec.get("authOptions", {}).get("mode") != "token":
                yield f"{name}: Ray without a token"
        if each["kind"] == "Deployment" and (name in scaled) == ("replicas" in spec):
            yield f"{name}: its replica count has no writer, or two"


def _reach_problems(found: Sequence[Object]) -> Iterator[str]:
    """Check that Services, budgets and policies select the intended pods and no other pods."""
    labels = {role: pod["metadata"]["labels"] for role, pod in pods(found)}
    for each in found:
        kind, spec = each["kind"], each.get("spec", {})
        if kind not in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            continue
        selector = spec.get("selector", spec.get("podSelector", {}))
        selector = selector.get("matchLabels", selector)
        reached = {role for role, own in labels.items() if selector.items() <= own.items()}
        name = each["metadata"]["name"]
        if kind == "NetworkPolicy" and name == "rel-penstock":
            wanted = set(labels)
        else:
            wanted = {"head"} if name.endswith(("-head", "-autoscaler")) else {"router"}
        if reached != wanted:
            yield f"{kind} {name} reaches {sorted(reached)}, not {sorted(wanted)}"
        if kind == "NetworkPolicy":
            yield from _policy_problems(name, spec)
        if kind == "PodDisruptionBudget":
            yield from _budget_problems(name, spec, replicas_of("router", found))
    if "NetworkPolicy" not in {each["kind"] for each in found}:
        yield "no NetworkPolicy protects Ray"


def replicas_of(role: str, found: Sequence[Object]) -> int:
    """Return the replica count of a component with a fixed number of pods, or 0 if it is absent."""
    for each in found:
        spec = each.get("spec", {})
        for group in spec.get("workerGroupSpecs", []):
            if group.get("groupName") == role:
                return int(group["minReplicas"])
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith(f"-{role}"):
            return int(spec["replicas"])
    return 0


def _budget_problems(name: str, spec: Object, replicas: int) -> Iterator[str]:
    """Check that Kubernetes can compute the budget and that it allows an eviction.

    The controller of a RayCluster's pods has no scale subresource: for such pods only an integer
    `minAvailable` is supported, and with every other form no pod may be evicted.
    """
    least = spec.get("minAvailable")
    if not isinstance(least, int) or "maxUnavailable" in spec:
        yield f"PodDisruptionBudget {name} has no integer minAvailable, so no node can be drained"
    elif not 0 < least < replicas:
        yield f"PodDisruptionBudget {name} keeps {least} of {replicas} pods"


def _policy_problems(name: str, spec: Object) -> Iterator[str]:
    """Check that the release's pods can reach each other, and other pods reach only routers."""
    inside = [{"podSelector": spec["podSelector"]}]
    for rule in spec.get("ingress", []):
        ports = {each.get("port") for each in rule.get("ports", [])}
        if name == "rel-penstock" and rule.get("from") != inside:
            yield f"NetworkPolicy {name} admits pods outside the release"
        if name != "rel-penstock" and not (ports and ports <= {"http", "grpc", "admin"}):
            yield f"NetworkPolicy {name} opens {ports or 'every port'}"
    for rule in spec.get("egress", []):
        if not rule.get("ports") and rule.get("to") != inside:
            yield f"NetworkPolicy {name} allows all egress"
    if name == "rel-penstock" and "Ingress" not in spec.get("policyTypes", []):
        yield f"NetworkPolicy {name} does not restrict ingress"


def problems(found: Sequence[Object], versions: Sequence[str] = KUBERNETES) -> list[str]:
    """Return all problems of a render."""
    by_schema = [line for version in versions for line in schema_problems(found, version)]
    return [*by_schema, *rule_problems(found)]
