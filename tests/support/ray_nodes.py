"""Ray nodes on one machine that join a separate head, isolated from other Ray clusters."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)

from penstock.cluster.kubernetes import node_drain
from penstock.loadtests.micro.server import free_ports

OBJECT_STORE = 83886080
HEAD = "ray.head.default"
IDLE_SECONDS = 2.0


@contextmanager
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for a Ray cluster on 127.0.0.1 with token authentication."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # the pods of the chart set this too
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pn-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for below in ("t", "ray"):
            (folder / below).mkdir()
        # Ray stores the address of its last cluster in this folder.
        monkeypatch.setenv("RAY_TMPDIR", name)
        yield folder


class Nodes:
    """Ray nodes started by `ray start`; tests find and end their processes through TMPDIR."""

    def __init__(self, folder: Path) -> None:
        self.port, self._client = free_ports(2)
        self._folder = folder
        self.leaving = folder / "leave"
        self.leaving.mkdir()

    def add(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        bin_folder: Path = Path(sys.executable).parent,
    ) -> None:
        common = ["--node-ip-address=127.0.0.1", f"--object-store-memory={OBJECT_STORE}"]
        # Let Ray use any free ports: its default range may include the ports chosen here.
        common += ["--min-worker-port=0", "--max-worker-port=0"]
        command = [str(bin_folder / "ray"), "start", *arguments, *common]
        more = {
            "TMPDIR": str(self._folder / "t"),
            node_drain.FOLDER_VARIABLE: str(self.leaving),
            **(env or {}),
        }
        # Try again, because Ray's limit of 30 s may be too short on a busy machine.
        for _ in range(3):
            done = subprocess.run(
                command, env={**os.environ, **more}, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def add_head(self, *more: str, env: Mapping[str, str] | None = None) -> None:
        own = [f"--port={self.port}", f"--ray-client-server-port={self._client}"]
        own += [f"--temp-dir={self._folder / 'r'}", "--include-dashboard=false", "--num-cpus=0"]
        self.add("--head", *own, *more, env=env)

    def add_worker(self, **resources: int) -> None:
        """Add a node with `resources`; by default one unit each of router, prefill and decode."""
        given = json.dumps(resources or {"router": 1, "prefill": 1, "decode": 1})
        arguments = ("--num-cpus=2", "--num-gpus=0", f"--resources={given}")
        self.add(f"--address=127.0.0.1:{self.port}", *arguments)

    def add_router(self, bin_folder: Path) -> None:
        """Add a node for routers that uses the Python and packages of another environment."""
        arguments = ("--num-cpus=1", "--num-gpus=0", '--resources={"router": 1}')
        self.add(f"--address=127.0.0.1:{self.port}", *arguments, bin_folder=bin_folder)

    def add_scaled_head(self, kinds: Mapping[str, int]) -> None:
        """Start a head with Ray's autoscaler v2.

        `kinds` holds the maximum number of nodes by kind. Each node has a CPU and one unit of the
        resource named like its kind, and is removed when idle. Ray's fake node provider runs the
        nodes as local processes. `ray.cluster_utils.AutoscalingCluster` is not used, because it
        would also end other Ray processes.
        """
        config = self._folder / "autoscaler.json"
        config.write_text(json.dumps(self._scaling(kinds)))
        env = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_NODE_TYPE_NAME": HEAD,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        self.add_head(f"--autoscaling-config={config}", env=env)

    def _scaling(self, kinds: Mapping[str, int]) -> dict[str, Any]:
        types: dict[str, Any] = {
            kind: {
                "resources": {"CPU": 1, kind: 1, "object_store_memory": OBJECT_STORE},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            }
            for kind, most in kinds.items()
        }
        types[HEAD] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        provider = {
            # Name the provider's module: its short name needs a file that Ray's wheel lacks.
            "type": "external",
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": f"127.0.0.1:{self.port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        }
        commands = [
            *("initialization", "setup", "head_setup", "worker_setup"),
            *("head_start_ray", "worker_start_ray"),
        ]
        return {
            "cluster_name": "scaled",
            "provider": provider,
            "max_workers": sum(kinds.values()),
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_SECONDS / 60,
            "head_node_type": HEAD,
            "available_node_types": types,
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            **{f"{name}_commands": [] for name in commands},
        }
