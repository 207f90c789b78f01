"""Invalid values fail when the chart is rendered, with a message that names the key."""

from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")

from helm_python import HelmError

from tests.support import chart

STANDALONE = chart.of_mode("standalone")

POLICY = {"networkPolicy": {"monitoring": [chart.PROMETHEUS]}}
SCRAPER = {"name": "scraper", "key": "key"}


def monitored(role: str | None, monitor: str = "serviceMonitor") -> dict[str, Any]:
    """Return values with a monitor and API keys; if `role` is set, Prometheus has a key with it."""
    keys = {"prometheus": {"role": role, "secret": SCRAPER}} if role else {}
    router = {"apiKeysSecret": {"name": "users"}, "keys": keys}
    own = {"enabled": True, "apiKeySecret": SCRAPER}
    return {**POLICY, "router": router, "monitoring": {monitor: own}}


SECRET_ENV = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def with_source(source: dict[str, Any]) -> dict[str, Any]:
    """Return values with one model from `source`."""
    return {"models": {"m": {"source": source}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Cases: unknown keys at every depth.
    ({"ruoter": {}}, "'ruoter' not allowed"),
    ({"pools": {"decoder": {}}}, "/pools': additional properties 'decoder'"),
    ({"pools": {"decode": {"replica": 2}}}, "/pools/decode': additional properties 'replica'"),
    ({"poolDefaults": {"gpu": 1}}, "/poolDefaults': additional properties 'gpu'"),
    ({"engine": {"kvCacheMib": 1}}, "/engine': additional properties 'kvCacheMib'"),
    ({"models": {"m": {"sauce": {}}}}, "/models/m': additional properties 'sauce'"),
    ({"models": {"m": {"path": "/x"}}}, "/models/m': additional properties 'path'"),
    ({"models": {"m": {"maxModelLen": 1}}}, "/models/m': additional properties 'maxModelLen'"),
    # Cases: keys of older chart versions.
    ({"model": {"hub": {"name": "a/b"}}}, "additional properties 'model' not allowed"),
    ({"router": {"modelName": "m"}}, "/router': additional properties 'modelName'"),
    ({"engine": {"block_size": 16}}, "/engine': additional properties 'block_size'"),
    ({"router": {"service": {"port": 80}}}, "/router/service': additional properties 'port'"),
    (
        {"pools": {"decode": {"tolerations": [{"Key": "gpu"}]}}},
        "/pools/decode/tolerations/0': additional properties 'Key'",
    ),
    # Cases: values of the wrong type or out of range.
    ({"pools": {"decode": {"replicas": "three"}}}, "/pools/decode/replicas': got string, want"),
    ({"pools": {"decode": {"replicas": -1}}}, "/pools/decode/replicas': minimum"),
    ({"pools": {"decode": {"gpus": 2}}}, "/pools/decode/gpus': value must be one of"),
    ({"pools": {"decode": {"cpus": 0}}}, "/pools/decode/cpus': minimum"),
    ({"pools": {"decode": {"memory": "lots"}}}, "/pools/decode/memory': 'lots' does not match"),
    ({"pools": {"decode": {"gpuResource": "gpu"}}}, "/pools/decode/gpuResource': 'gpu' does not"),
    ({"poolDefaults": {"near": "a zone"}}, "/poolDefaults/near': 'a zone' does not match"),
    ({"poolDefaults": {"blockSize": 0}}, "/poolDefaults/blockSize': minimum"),
    ({"pools": {"decode": {"maxSequences": 1.5}}}, "/pools/decode/maxSequences': got number, want"),
    ({"models": {"m": {"dtype": "int4"}}}, "/models/m/dtype': value must be one of"),
    ({"models": {" ": {}}}, "/models': additional properties ' ' not allowed"),
    ({"router": {"httpPort": 65536}}, "/router/httpPort': maximum"),
    ({"router": {"replicas": 65}}, "/router/replicas': maximum"),
    ({"router": {"routing": "random"}}, "/router/routing': value must be one of"),
    (
        {"router": {"httpRoute": {"timeouts": {"request": "60"}}}},
        "/router/httpRoute/timeouts/request': '60' does not",
    ),
    (
        {"router": {"httpRoute": {"parentRefs": [{"namespace": "gateway"}]}}},
        "/router/httpRoute/parentRefs/0': missing property 'name'",
    ),
    (
        {"router": {"httpRoute": {"enabled": True}}},
        "router.httpRoute: parentRefs is empty, so no gateway would use the route",
    ),
    ({"cluster": {"mode": "kubray"}}, "/cluster/mode': value must be one of"),
    ({"probes": {"startupSeconds": 5}}, "/probes/startupSeconds': minimum"),
    ({"monitoring": {"serviceMonitor": {"interval": "15"}}}, "/serviceMonitor/interval': '15'"),
    ({"monitoring": {"podMonitor": {"interval": "15"}}}, "/podMonitor/interval': '15'"),
    # Cases: a replica count that two controllers set; bounds on a count that no controller sets.
    ({"standalone": {"autoscaler": "keda"}}, "/standalone/autoscaler': value must be 'none'"),
    ({"standalone": {"autoscaler": "hpa"}}, "/standalone/autoscaler': value must be 'none'"),
    (
        {**STANDALONE, "pools": {"decode": {"maxReplicas": 4}}},
        "pools.decode: minReplicas and maxReplicas differ, but standalone.autoscaler is none",
    ),
    (
        {**STANDALONE, "standalone": {"autoscaler": "keda"}},
        "/standalone/prometheusAddress': minLength",
    ),
    (
        {
            **STANDALONE,
            "standalone": {"autoscaler": "hpa"},
            "pools": {"decode": {"minReplicas": 0, "maxReplicas": 2}},
        },
        "pools.decode: minReplicas: an HPA cannot scale to 0",
    ),
    # Cases: secrets that are missing, in plain text, or set by the chart itself.
    ({"cluster": {"mode": "standalone"}}, "/ray/authSecret': minLength"),
    (with_source({"hub": {"name": "a/b", "tokenSecret": {"name": "x"}}}), "missing property 'key'"),
    (
        {"pools": {"decode": {"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}}},
        "pools.decode.env: HF_TOKEN: a secret must not be given as a plain value",
    ),
    (
        {"poolDefaults": {"env": [{"name": "RAY_AUTH_MODE", "value": "disabled"}]}},
        "env: RAY_AUTH_MODE is set by the chart",
    ),
    # Cases: models that not all nodes can read, or with two sources; conflicting model settings.
    (
        with_source({"pvc": {"claimName": "models", "accessMode": "ReadWriteOnce"}}),
        "/models/m/source/pvc/accessMode': value must be one of 'ReadOnlyMany', 'ReadWriteMany'",
    ),
    (with_source({"pvc": {"claimName": "models"}}), "/source/pvc': missing property 'accessMode'"),
    (with_source({"hub": {"name": "llama"}}), "/source/hub/name': 'llama' does not match"),
    (
        with_source({"hub": {"name": "a/b"}, "image": {"reference": "x", "path": "/y"}}),
        "/models/m/source'",
    ),
    ({"models": {"b": {}, "a": {}}}, "models: this version serves one model; found a, b: keep one"),
    (
        {"models": {"m": {"deterministic": True}}, "pools": {"decode": {"blockSize": 32}}},
        "models.m.deterministic: all pools need the same blockSize, found 32, default",
    ),
    (
        # The cluster file does not contain values that are not set, so the driver sees no default.
        {"models": {"m": {"deterministic": True}}, "pools": {"decode": {"blockSize": 16}}},
        "models.m.deterministic: all pools need the same blockSize, found 16, default",
    ),
    *(
        (
            {
                "models": {"m": {"deterministic": True}},
                "poolDefaults": {"gpusPerNode": 8, "tp": 2},
                "pools": {"decode": {name: other}},
            },
            f"models.m.deterministic: all pools need the same {name}, found {found}",
        )
        for name, other, found in (("tp", 4, "2, 4"), ("pp", 2, "1, 2"), ("ep", 2, "1, 2"))
    ),
    # Cases: pools that cannot serve, and contradictory counts.
    ({"pools": {"prefill": {"replicas": 0}}}, "pools: no worker prefills"),
    ({"pools": {"decode": {"replicas": 0}}}, "pools: no worker decodes"),
    (
        {"pools": {"decode": {"replicas": 5, "maxReplicas": 4}}},
        "pools.decode: replicas: 5 is not between minReplicas (5) and maxReplicas (4)",
    ),
    (
        {"pools": {"decode": {"replicas": 1, "minReplicas": 2}}},
        "pools.decode: replicas: 1 is not between minReplicas (2)",
    ),
    ({"pools": {"decode": {"tp": 4, "ep": 3}}}, "pools.decode: ep: 3 does not divide tp (4)"),
    # Case: a grace period that is shorter than the drain.
    (
        {"router": {"drainSeconds": 300}, "terminationGracePeriodSeconds": 60},
        "terminationGracePeriodSeconds: 60 is too short: router.drainSeconds requires at least 335",
    ),
    # Cases: a probe that idle workers would fail; routers that Prometheus would scrape twice.
    (
        {"engine": {"canary_seconds": 40}},
        "probes.tokenSeconds: 60 is less than twice engine.canary_seconds (40)",
    ),
    (
        {"monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor")}},
        "monitoring: serviceMonitor and podMonitor would scrape the same routers twice",
    ),
    # Cases: names that Kubernetes would refuse.
    ({"fullnameOverride": "Bad_Name"}, 'the name "Bad_Name" is not valid for a Service'),
    ({"fullnameOverride": "7b"}, 'the name "7b" is not valid for a Service'),
    # Case: a disruption budget with which no node can be drained.
    ({"router": {"disruptionBudget": {"maxUnavailable": 0}}}, "/maxUnavailable': minimum"),
    # Case: a worker that is too large for every node.
    (
        {"pools": {"decode": {"tp": 8, "pp": 2}}},
        "pools.decode: tp: 8 and pp: 2 need 16 GPUs in one pod, but no node has more than "
        "gpusPerNode (8)",
    ),
    (
        {"poolDefaults": {"gpusPerNode": 1}, "pools": {"prefill": {"tp": 2}}},
        "pools.prefill: tp: 2 and pp: 1 need 2 GPUs in one pod",
    ),
    # Cases: scrapes that would fail, without access to the port or without a suitable key.
    (
        {"monitoring": {"serviceMonitor": {"enabled": True}}},
        "monitoring.serviceMonitor: networkPolicy.monitoring is empty",
    ),
    (
        {"monitoring": {"podMonitor": {"enabled": True}}},
        "monitoring.podMonitor: networkPolicy.monitoring is empty",
    ),
    (
        {**STANDALONE, "standalone": {"autoscaler": "hpa"}},
        "standalone.autoscaler: hpa follows a metric of the routers, but networkPolicy.monitoring",
    ),
    (monitored(None), "monitoring.serviceMonitor.apiKeySecret: with API keys, Prometheus needs"),
    (monitored("user"), "monitoring.serviceMonitor.apiKeySecret: with API keys, Prometheus needs"),
    (monitored("user", "podMonitor"), "monitoring.podMonitor.apiKeySecret: with API keys"),
    (
        {
            **POLICY,
            "router": {"apiKeysSecret": {"name": "users"}},
            "monitoring": {"serviceMonitor": {"enabled": True}},
        },
        "monitoring.serviceMonitor.apiKeySecret: with API keys, Prometheus needs",
    ),
    # Cases: invalid values of the router, and an invalid digest of an image.
    ({"router": {"maxWaitSeconds": -1}}, "/router/maxWaitSeconds': minimum"),
    (
        {"router": {"maxConnectionsPerAddress": -1}},
        "/router/maxConnectionsPerAddress': minimum",
    ),
    ({"router": {"allowedOrigins": ["https://a/b"]}}, "/router/allowedOrigins/0': 'https://a/b'"),
    ({"image": {"digest": "sha256:12"}}, "/image/digest': 'sha256:12' does not match"),
    # Cases: port conflicts.
    ({"router": {"grpcPort": 8000}}, "router: httpPort and grpcPort must differ; both are 8000"),
    ({"router": {"adminPort": 8000}}, "router: adminPort must differ from httpPort and grpcPort"),
    ({"router": {"httpPort": 6379}}, "router: port 6379 is used by Ray"),
    # Cases: a key in the values themselves, a key without a role, a key with an invalid file name.
    ({"router": {"keys": {"ops": "sk-1"}}}, "/router/keys/ops': got string, want object"),
    (
        {"router": {"keys": {"ops": {"role": "boss", "secret": {"name": "a", "key": "b"}}}}},
        "/router/keys/ops/role': value must be one of",
    ),
    ({"router": {"keys": {"../ops": {}}}}, "/router/keys': additional properties '../ops'"),
    # Case: a router without API keys, although `allowAnonymous` is false.
    (
        {"router": {"allowAnonymous": False}},
        "router: there are no API keys: set apiKeysSecret.name",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_invalid_values_are_refused_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        chart.render(chart.merged(chart.of_mode("kuberay"), values))
    assert message in str(refusal.value)


def test_similar_values_without_the_mistake_are_accepted() -> None:
    for values in (
        {
            "pools": {
                "decode": {"replicas": 3, "minReplicas": 0, "maxReplicas": 4, "tp": 4, "ep": 2}
            }
        },
        {"router": {"drainSeconds": 300}, "terminationGracePeriodSeconds": 335},
        monitored("metrics"),
        monitored("operator", "podMonitor"),
        {"pools": {"decode": {"tp": 8, "gpusPerNode": 8}}},
        {"pools": {"decode": {"tp": 8, "pp": 2, "gpusPerNode": 16}}},
        {"pools": {"decode": {"tp": 8, "pp": 2, "gpus": 0}}},
        {
            "networkPolicy": {"enabled": False},
            "monitoring": {"serviceMonitor": {"enabled": True}},
        },
        {"pools": {"decode": {"env": [SECRET_ENV, {"name": "NCCL_DEBUG", "value": "INFO"}]}}},
        with_source({"pvc": {"claimName": "models", "accessMode": "ReadWriteMany"}}),
        {"pools": {"decode": {"blockSize": 32}}},
        {
            "models": {"m": {"deterministic": True}},
            "poolDefaults": {"blockSize": 16},
            "pools": {"mixed": {"replicas": 0, "blockSize": 8, "tp": 2, "gpusPerNode": 2}},
        },
    ):
        chart.render(values)
