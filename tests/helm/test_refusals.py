"""What the chart refuses: every kind of mistake, by name, before anything reaches a cluster."""

from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")

from helm_python import HelmError

from tests.support import chart

STANDALONE = chart.of_mode("standalone")

SECRET_ENV = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def of(source: dict[str, Any]) -> dict[str, Any]:
    """Values with one model of that source."""
    return {"models": {"m": {"source": source}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # A key that is not known, wherever it stands.
    ({"ruoter": {}}, "'ruoter' not allowed"),
    ({"pools": {"decoder": {}}}, "/pools': additional properties 'decoder'"),
    ({"pools": {"decode": {"replica": 2}}}, "/pools/decode': additional properties 'replica'"),
    ({"poolDefaults": {"gpu": 1}}, "/poolDefaults': additional properties 'gpu'"),
    ({"engine": {"kvCacheMib": 1}}, "/engine': additional properties 'kvCacheMib'"),
    ({"models": {"m": {"sauce": {}}}}, "/models/m': additional properties 'sauce'"),
    ({"models": {"m": {"path": "/x"}}}, "/models/m': additional properties 'path'"),
    ({"models": {"m": {"maxModelLen": 1}}}, "/models/m': additional properties 'maxModelLen'"),
    # Keys of older values.
    ({"model": {"hub": {"name": "a/b"}}}, "additional properties 'model' not allowed"),
    ({"router": {"modelName": "m"}}, "/router': additional properties 'modelName'"),
    ({"engine": {"block_size": 16}}, "/engine': additional properties 'block_size'"),
    ({"router": {"service": {"port": 80}}}, "/router/service': additional properties 'port'"),
    (
        {"pools": {"decode": {"tolerations": [{"Key": "gpu"}]}}},
        "/pools/decode/tolerations/0': additional properties 'Key'",
    ),
    # A value of the wrong type, or out of its range.
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
    ({"cluster": {"mode": "kubray"}}, "/cluster/mode': value must be one of"),
    ({"probes": {"startupSeconds": 5}}, "/probes/startupSeconds': minimum"),
    ({"monitoring": {"serviceMonitor": {"interval": "15"}}}, "/serviceMonitor/interval': '15'"),
    ({"monitoring": {"podMonitor": {"interval": "15"}}}, "/podMonitor/interval': '15'"),
    # Two writers of replica counts, or none that scales.
    ({"standalone": {"autoscaler": "keda"}}, "/standalone/autoscaler': value must be 'none'"),
    ({"standalone": {"autoscaler": "hpa"}}, "/standalone/autoscaler': value must be 'none'"),
    (
        {**STANDALONE, "pools": {"decode": {"maxReplicas": 4}}},
        "pools.decode: minReplicas and maxReplicas differ, but with standalone.autoscaler none",
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
        "pools.decode: minReplicas: an HPA keeps one pod at least",
    ),
    # Secrets that are missing.
    ({"cluster": {"mode": "standalone"}}, "/ray/authSecret': minLength"),
    (of({"hub": {"name": "a/b", "tokenSecret": {"name": "x"}}}), "missing property 'key'"),
    (
        {"pools": {"decode": {"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}}},
        "pools.decode.env: HF_TOKEN: a secret is named, never given",
    ),
    (
        {"poolDefaults": {"env": [{"name": "RAY_AUTH_MODE", "value": "disabled"}]}},
        "env: RAY_AUTH_MODE is said by the chart",
    ),
    # A model that cannot be read everywhere, or is said twice.
    (
        of({"pvc": {"claimName": "models", "accessMode": "ReadWriteOnce"}}),
        "/models/m/source/pvc/accessMode': value must be one of 'ReadOnlyMany', 'ReadWriteMany'",
    ),
    (of({"pvc": {"claimName": "models"}}), "/source/pvc': missing property 'accessMode'"),
    (of({"hub": {"name": "llama"}}), "/source/hub/name': 'llama' does not match"),
    (of({"hub": {"name": "a/b"}, "image": {"reference": "x", "path": "/y"}}), "/models/m/source'"),
    ({"models": {"b": {}, "a": {}}}, "models: this version serves one model; found a, b"),
    (
        {"models": {"m": {"deterministic": True}}, "pools": {"decode": {"blockSize": 32}}},
        "models.m.deterministic: all pools need the same blockSize, found 16, 32",
    ),
    # Pools that cannot serve, counts that contradict each other.
    ({"pools": {"prefill": {"replicas": 0}}}, "pools: no worker prefills"),
    ({"pools": {"decode": {"replicas": 0}}}, "pools: no worker decodes"),
    (
        {"pools": {"decode": {"replicas": 5, "maxReplicas": 4}}},
        "pools.decode: replicas, 5, must be from minReplicas, 5, to maxReplicas, 4",
    ),
    (
        {"pools": {"decode": {"replicas": 1, "minReplicas": 2}}},
        "pools.decode: replicas, 1, must be from minReplicas, 2",
    ),
    ({"pools": {"decode": {"tp": 4, "ep": 3}}}, "pools.decode: ep, 3, must divide tp, 4"),
    # A grace period that cuts the drain short.
    (
        {"router": {"drainSeconds": 300}, "terminationGracePeriodSeconds": 60},
        "terminationGracePeriodSeconds: 60 is too short to drain: router.drainSeconds asks for 335",
    ),
    # A probe that an idle worker cannot meet, series that would be told twice.
    (
        {"engine": {"canary_seconds": 40}},
        "probes.tokenSeconds: 60 is less than twice engine.canary_seconds, 40",
    ),
    (
        {"monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor")}},
        "monitoring: serviceMonitor and podMonitor would scrape the same routers twice",
    ),
    # Names that Kubernetes would refuse, one object after the other.
    ({"fullnameOverride": "Bad_Name"}, 'the name "Bad_Name": a Service\'s begins with a letter'),
    ({"fullnameOverride": "7b"}, 'the name "7b": a Service\'s begins with a letter'),
    # A budget that lets no node be drained.
    ({"router": {"disruptionBudget": {"maxUnavailable": 0}}}, "/maxUnavailable': minimum"),
    # Ports, and policies that would not do what they seem to.
    ({"router": {"grpcPort": 8000}}, "router: HTTP and gRPC cannot share port 8000"),
    ({"router": {"httpPort": 6379}}, "router: port 6379 is Ray's own"),
    ({"networkPolicy": {"monitoring": [{"podSelector": {}}]}}, "name both, or neither"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError) as refusal:
        chart.render(chart.merged(chart.of_mode("kuberay"), values))
    assert said in str(refusal.value)


def test_the_same_values_without_their_mistake_are_taken() -> None:
    for values in (
        {
            "pools": {
                "decode": {"replicas": 3, "minReplicas": 0, "maxReplicas": 4, "tp": 4, "ep": 2}
            }
        },
        {"router": {"drainSeconds": 300}, "terminationGracePeriodSeconds": 335},
        {"pools": {"decode": {"env": [SECRET_ENV, {"name": "NCCL_DEBUG", "value": "INFO"}]}}},
        of({"pvc": {"claimName": "models", "accessMode": "ReadWriteMany"}}),
        {"pools": {"decode": {"blockSize": 32}}},
        {
            "models": {"m": {"deterministic": True}},
            "pools": {"decode": {"blockSize": 16}, "mixed": {"replicas": 0, "blockSize": 8}},
        },
    ):
        chart.render(values)
