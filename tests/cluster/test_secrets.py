"""A served cluster shows its API keys and hash key nowhere, and gets no secrets of the shell."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from tests.support.api_keys import key_file
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving, title_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

USER = "user-f1a4b2c93d5e"
OPERATOR = "operator-7d3e8a61c0b9"
BY_VARIABLE = "variable-5b8c2e4f7a90"
KEYS = (USER, OPERATOR, BY_VARIABLE)
SECRET = "cloud-0f9e8d7c6b5a"
HASH_KEY = "hash-key-2b7e151628aed2a6abf7158809cf4f3c762e7160f38b4da56a"
PROGRAM = f"""
import sys
from pathlib import Path
from penstock.cli import main
from penstock.cluster import configs

def known_key():
    Path(__file__).with_suffix(".used").touch()
    return {HASH_KEY.encode()!r}

configs.new_hash_key = known_key
sys.exit(main())
"""
ENVIRONMENT = {"PENSTOCK_API_KEY": BY_VARIABLE, "PENSTOCK_OPERATOR": OPERATOR}
ENVIRONMENT |= {"MY_CLOUD_SECRET": SECRET, "PASSED_ON": "yes"}
GCS_TABLES = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print(client.get_all_job_info())
for namespace in (None, b"job", b"fun"):
    for key in client.internal_kv_keys(b"", namespace):
        print(key, client.internal_kv_get(key, namespace))
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    """A cluster that has served users, refused a caller and let an operator change a role."""
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        folder = Path(name)
        config = folder / "cluster.yaml"
        config.write_text("keys: {ops: {role: operator, env: PENSTOCK_OPERATOR}}\n")
        arguments = [str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "32"]
        arguments += ["--mixed", "1", "--config", str(config), "--log-format", "json"]
        arguments += ["--pass-env", "PASSED_ON"]
        arguments += ["--api-key-file", str(key_file(folder, USER))]
        program = folder / "serve_with_known_key.py"
        program.write_text(PROGRAM)
        command = (sys.executable, str(program))
        with serving(arguments, free_ports(2), folder, ENVIRONMENT, command) as running:
            running.wait_for_output('"event": "serving"')
            assert program.with_suffix(".used").exists(), "the cluster has the known hash key"
            call(running)
            running.wait_for_output('"by": "ops"')
            yield running


def call(running: Serving) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{running.http}", timeout=TIMEOUT_SECONDS) as http:
        body = {"prompt": "What is 2 plus 2?", "max_tokens": 2}
        codes = {}
        for key in (*KEYS, "another"):
            headers = {"authorization": f"Bearer {key}"}
            codes[key] = http.post("/v1/completions", json=body, headers=headers).status_code
        assert codes == {USER: 200, BY_VARIABLE: 200, OPERATOR: 200, "another": 401}
        url = f"http://127.0.0.1:{running.admin}/role"
        role = {"worker": "mixed-0", "role": "mixed"}
        headers = {"authorization": f"Bearer {USER}"}
        assert http.post(url, json=role, headers=headers).status_code == 403
        headers = {"authorization": f"Bearer {OPERATOR}"}
        assert http.post(url, json=role, headers=headers).status_code == 200


def shown_in(text: str) -> list[str]:
    return [secret for secret in (*KEYS, HASH_KEY, SECRET) if secret in text]


def test_log_names_the_operator_who_changed_a_role_and_shows_no_key(running: Serving) -> None:
    events = [json.loads(line) for line in running.output_text.splitlines() if line.startswith("{")]
    (change,) = (each for each in events if each["event"] == "role" and "by" in each)
    assert (change["worker"], change["role"], change["by"]) == ("mixed-0", "mixed", "ops")
    assert shown_in(running.output_text) == []


def test_command_lines_show_no_key(running: Serving) -> None:
    lines = {each.pid: title_of(each) for each in running.processes()}
    assert len(lines) > 3
    assert {pid: line for pid, line in lines.items() if shown_in(line)} == {}


def test_files_of_the_cluster_contain_no_key(running: Serving) -> None:
    files = [path for path in running.temp.rglob("*") if path.is_file()]
    assert files
    found = []
    for path in files:
        with suppress(OSError):
            found += [path] if shown_in(path.read_bytes().decode("latin-1")) else []
    assert found == []


def test_tables_of_ray_contain_no_key(running: Serving) -> None:
    gcs = running.find("gcs_server")
    (port,) = (
        word.partition("=")[2] for word in gcs.cmdline() if word.startswith("--gcs_server_port=")
    )
    listening = {each.laddr.port for each in gcs.net_connections() if each.status == "LISTEN"}
    ports = {int(port)} if int(port) else listening
    token = {name: gcs.environ()[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    tables = ""
    for each in ports:
        command = [sys.executable, "-c", GCS_TABLES, f"127.0.0.1:{each}"]
        done = subprocess.run(
            command, env={**os.environ, **token}, capture_output=True, text=True, timeout=60
        )
        tables += done.stdout
    assert "penstock" in tables, "the table of jobs has the driver's command"
    assert shown_in(tables) == []


def test_secrets_of_the_shell_are_in_no_process_of_the_cluster(running: Serving) -> None:
    names: dict[int, set[str]] = {}
    found = []
    for each in running.processes():
        with suppress(psutil.Error):
            # The driver keeps the environment of the shell, which only the shell's user can read.
            if each.pid == running.process.pid:
                continue
            own = each.environ()
            names[each.pid] = set(own)
            if shown_in(json.dumps(own)):
                found.append(each.cmdline())
    assert found == []
    assert len(names) >= 4, "Ray's two servers, a router and a worker"
    # A process title that is longer than the command line overwrites the visible environment.
    assert sum({"PASSED_ON", "HF_HUB_OFFLINE"} <= each for each in names.values()) > 3
