"""The fields of a RayCluster that the chart may use, and the KubeRay release that introduced each.

The versions were read from the CRDs of KubeRay's releases. An operator of an older release prunes a
newer field without an error, or the API server refuses it.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

OLDEST = (1, 6)
"""Oldest KubeRay that the chart supports, as its documentation says."""

NEWEST = "1.7.0"
"""Newest KubeRay with whose CRD the chart was checked; the documentation installs this version."""

FIELDS = {
    **dict.fromkeys(("rayVersion", "enableInTreeAutoscaling", "headGroupSpec"), (1, 0)),
    **dict.fromkeys((f"headGroupSpec.{name}" for name in ("rayStartParams", "template")), (1, 0)),
    "workerGroupSpecs": (1, 0),
    **{
        f"workerGroupSpecs[].{name}": (1, 0)
        for name in ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template")
    },
    "autoscalerOptions": (1, 0),
    **{
        f"autoscalerOptions.{name}": (1, 0)
        for name in (
            *("env", "idleTimeoutSeconds", "imagePullPolicy", "resources", "securityContext"),
        )
    },
    "autoscalerOptions.version": (1, 4),
    "authOptions": (1, 5),
    "authOptions.mode": (1, 5),
    "authOptions.secretName": (1, 6),
    "upgradeStrategy": (1, 6),
    "upgradeStrategy.type": (1, 6),
    # The oldest supported operator lacks these fields, so the chart must not use them yet.
    "autoscalerOptions.args": (1, 7),
    "autoscalerOptions.command": (1, 7),
    "gcsFaultToleranceOptions.backend": (1, 7),
    "gcsFaultToleranceOptions.storage": (1, 7),
    "historyServerOptions": (1, 7),
}
"""The release that introduced a field of a RayCluster's spec, by its path."""

KUBERNETES_TYPES = (
    *("template", "rayStartParams"),
    *("autoscalerOptions.env", "autoscalerOptions.resources", "autoscalerOptions.securityContext"),
)
"""Fields whose content has a type of Kubernetes, or any type."""


def field_problems(spec: Mapping[str, Any]) -> list[str]:
    """Return a line for each field of a RayCluster that the oldest supported KubeRay lacks."""
    problems = []
    for path in sorted(set(_paths(spec, ""))):
        since = FIELDS.get(path)
        if since is None:
            problems.append(f"RayCluster: {path} is in no KubeRay that was looked at")
        elif since > OLDEST:
            problems.append(f"RayCluster: {path} needs KubeRay {since[0]}.{since[1]}")
    return problems


def _paths(value: Any, path: str) -> Iterator[str]:
    if path.endswith(KUBERNETES_TYPES):
        return
    if isinstance(value, Mapping):
        for key, below in value.items():
            name = f"{path}.{key}" if path else key
            yield name
            yield from _paths(below, name)
    elif isinstance(value, list):
        for each in value:
            yield from _paths(each, f"{path}[]")


def replacing_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a RayCluster's spec without the fields that KubeRay ignores when it looks for changes.

    A change of any other field replaces all pods if `upgradeStrategy` is Recreate.
    """
    result: dict[str, Any] = copy.deepcopy(dict(spec))
    result.pop("upgradeStrategy", None)
    for group in (result["headGroupSpec"], *result["workerGroupSpecs"]):
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
        for name in ("tolerations", "schedulingGates"):
            group["template"]["spec"].pop(name, None)
    return result
