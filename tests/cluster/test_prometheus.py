"""A real Prometheus scrapes a cluster under light load and gets data for every series."""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from tests.support import chart
from tests.support.api_keys import key_file
from tests.support.checkpoints import make_checkpoint
from tests.support.metrics import EXPERTS, HISTOGRAMS, SERIES, SIZES
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving, wait_for

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        PROMETHEUS is None, reason="needs prometheus (Debian: apt-get install prometheus)"
    ),
]

KEY = "the-key-of-a-test"
ARGUMENTS = [str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "32"]
# With a fixed number of threads, workers do not share cores, so prompts are computed apart and the
# series of KV transfers have data.
ARGUMENTS += ["--log-format", "json", "--threads", "1"]
PROMPT = "What is 2 plus 2, xyzzy?"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: rel-penstock
    authorization: {{credentials: {key}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{namespace: apps}}}}]
"""
RATES = [
    *(f"histogram_quantile(0.95, rate(penstock_{name}_bucket[1m])) >= 0" for name in HISTOGRAMS),
    "sum(rate(penstock_generated_tokens_total[1m])) > 0",
    "sum(rate(penstock_kv_transfer_bytes_total[1m])) > 0",
    'sum(rate(penstock_requests_finished_total{reason="length"}[1m])) > 0',
    "sum(rate(penstock_prompt_tokens_total[1m])) > 0",
    'sum by (worker) (penstock_kv_blocks{state=~"used|leased|reserved"})',
    "sum by (pool) (penstock_workers_ready) == 1",
    "min(penstock_worker_up) == 1",
]
"""Queries of dashboards. Each returns data only if its metrics have data and plausible values."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        yield Path(name)


def with_key(folder: Path) -> list[str]:
    """Return the arguments of a cluster that accepts `KEY` as an operator's key."""
    path = folder / "cluster.yaml"
    path.write_text(f"keys: {{ops: {{role: operator, file: {key_file(folder, KEY)}}}}}\n")
    return ["--config", str(path)]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Serving]:
    with serving([*ARGUMENTS, *with_key(folder)], free_ports(2), folder) as running:
        running.wait_for_output('"event": "serving"')
        yield running


@contextmanager
def scraped(folder: Path, admin: int) -> Iterator[httpx.Client]:
    """Run a Prometheus and yield its client once it has scraped the router at port `admin`."""
    assert PROMETHEUS is not None
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(key=KEY, port=admin))
    (port,) = free_ports(1)
    command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (
        (folder / "prometheus.log").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_SECONDS) as client,
    ):
        try:
            wait_for(lambda: has_data(client, 'up{job="rel-penstock"} == 1'), "the first scrape")
            yield client
        finally:
            process.kill()


@pytest.fixture(scope="module")
def prometheus(folder: Path, cluster: Serving) -> Iterator[httpx.Client]:
    with scraped(folder, cluster.admin) as client:
        yield client


def has_data(client: httpx.Client, query: str) -> bool:
    """Return whether the query gives at least one value that is not NaN."""
    with suppress(httpx.TransportError):
        reply = client.get("/api/v1/query", params={"query": query})
        if reply.status_code == 503:  # Prometheus answers 503 while it starts
            return False
        assert reply.status_code == 200, reply.text
        found = reply.json()["data"]["result"]
        return any(sample["value"][1] != "NaN" for sample in found)
    return False


def send_request(cluster: Serving) -> None:
    url = f"http://127.0.0.1:{cluster.http}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_SECONDS).raise_for_status()


def test_every_series_returns_data(cluster: Serving, prometheus: httpx.Client) -> None:
    missing: list[str] = []

    def complete() -> bool:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send_request, [cluster] * 4))
        queries = [*sorted(SERIES | SIZES), *RATES]
        missing[:] = [query for query in queries if not has_data(prometheus, query)]
        return not missing

    with suppress(AssertionError):
        wait_for(complete, "data")
    assert not missing


def chart_queries() -> tuple[list[str], list[str]]:
    """Return the queries of the chart's dashboard, alerts and scaler for the scraped release.

    Comparisons are changed to return 0 or 1. A query then has a value even if its condition is
    false.

    Returns:
        Queries that have data with any model, and queries that need a model with experts.
    """
    keda = {"autoscaler": "keda", "prometheusAddress": "http://prometheus"}
    pools = {"decode": {"maxReplicas": 2}}
    # Let Prometheus reach the admin port, because KEDA scales by its metrics.
    peers = {"monitoring": [chart.PROMETHEUS]}
    own = {"standalone": keda, "pools": pools, "networkPolicy": peers}
    values = chart.merged(chart.of_mode("standalone"), own)
    (trigger,) = chart.one(chart.objects(chart.render(values)), "ScaledObject")["spec"]["triggers"]
    queries = [rule["expr"].replace("absent(", "count(") for rule in chart.rules()]
    queries += [expr for _, expr in chart.dashboard_queries()]
    queries = [re.sub(" (==|>|<) ", r" \1 bool ", each) for each in queries]
    of_experts = [each for each in queries if any(name in each for name in EXPERTS)]
    rest = [each for each in queries if each not in of_experts]
    return [trigger["metadata"]["query"], *rest], of_experts


def test_all_queries_of_the_chart_return_data(cluster: Serving, prometheus: httpx.Client) -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    queries, _ = chart_queries()
    missing = queries
    assert len(queries) > 40

    def complete() -> bool:
        nonlocal missing
        send_request(cluster)
        missing = [query for query in queries if not has_data(prometheus, query)]
        return not missing

    with suppress(AssertionError):
        wait_for(complete, "data")
    assert not missing


def test_log_has_events_of_requests_but_not_their_content(cluster: Serving) -> None:
    url = f"http://127.0.0.1:{cluster.http}/v1/completions"
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "request-1"}
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    reply = httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_SECONDS)
    answer = reply.json()["choices"][0]["text"]
    wait_for(
        lambda: '"event": "request", "request": "request-1"' in cluster.output_text,
        "the request event",
    )
    lines = [json.loads(line) for line in cluster.output_text.splitlines()]
    events = {each["event"] for each in lines if each.get("request") == "request-1"}
    assert events >= {"request", "placed", "sequence"}, "from the router and from workers"
    assert "xyzzy" not in cluster.output_text
    assert KEY not in cluster.output_text
    assert len(answer) < 8 or answer not in cluster.output_text


def test_silent_worker_is_reported_as_down_and_later_as_up(
    cluster: Serving, prometheus: httpx.Client
) -> None:
    victim = cluster.find("penstock: decode worker 0")
    victim.suspend()  # a suspended worker sends nothing, like a worker on a lost machine
    try:
        down = 'penstock_worker_up{worker=~"decode.*"} == 0'
        wait_for(lambda: has_data(prometheus, down), "the worker to be down")
        stale = 'penstock_requests_running{role="decode"}'
        assert not has_data(prometheus, stale)
        assert has_data(prometheus, 'penstock_workers_ready{pool="decode"} == 0')
    finally:
        victim.resume()
    up = 'penstock_worker_up{worker=~"decode.*"} == 1'
    wait_for(lambda: has_data(prometheus, up), "the worker to be up")


def test_queries_of_the_chart_about_experts_return_data() -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    _, queries = chart_queries()
    assert queries
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        folder = Path(name)
        make_checkpoint(folder / "experts", "mixtral")
        arguments = [str(folder / "experts"), "--mixed", "1", "--tp", "2", "--ep", "2"]
        arguments += ["--kv-cache-mib", "16", "--log-format", "json", *with_key(folder)]
        with serving(arguments, free_ports(2), folder) as running:
            running.wait_for_output('"event": "serving"')
            with scraped(folder, running.admin) as client:

                def complete() -> bool:
                    send_request(running)
                    return all(has_data(client, query) for query in queries)

                wait_for(complete, "data of experts")
