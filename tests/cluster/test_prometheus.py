"""A real Prometheus scrapes a served cluster under a little load: every series has data there."""

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
from tests.support.checkpoints import make_checkpoint
from tests.support.metrics import EXPERTS, HISTOGRAMS, SERIES, SIZES
from tests.support.serving import PATIENCE, Serving, serving, wait_for

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here (Debian: prometheus)"),
]

KEY = "a-key-of-no-worth"
ARGUMENTS = [str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "32", "--api-key", KEY]
ARGUMENTS += ["--log-format", "json"]
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
"""What dashboards ask: each gives data only where the numbers are there and right."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's own: its paths are too long for the sockets that lie below.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Serving]:
    with serving(ARGUMENTS, free_ports(2), folder) as running:
        running.wait_until_said('"event": "serving"')
        yield running


@contextmanager
def scraped(folder: Path, http: int) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped the router at that port."""
    assert PROMETHEUS is not None
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(key=KEY, port=http))
    (port,) = free_ports(1)
    command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (
        (folder / "prometheus.log").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        try:
            wait_for(lambda: has_data(client, 'up{job="rel-penstock"} == 1'), "its first scrape")
            yield client
        finally:
            process.kill()


@pytest.fixture(scope="module")
def prometheus(folder: Path, cluster: Serving) -> Iterator[httpx.Client]:
    with scraped(folder, cluster.http) as client:
        yield client


def has_data(client: httpx.Client, query: str) -> bool:
    """Whether it answers, and with something."""
    with suppress(httpx.TransportError):
        reply = client.get("/api/v1/query", params={"query": query})
        if reply.status_code == 503:  # it starts
            return False
        assert reply.status_code == 200, reply.text
        found = reply.json()["data"]["result"]
        return any(sample["value"][1] != "NaN" for sample in found)
    return False


def ask(cluster: Serving) -> None:
    url = f"http://127.0.0.1:{cluster.http}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    httpx.post(url, json=body, headers=headers, timeout=PATIENCE).raise_for_status()


def test_every_series_returns_data(cluster: Serving, prometheus: httpx.Client) -> None:
    lacking: list[str] = []

    def complete() -> bool:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, [cluster] * 4))
        queries = [*sorted(SERIES | SIZES), *RATES]
        lacking[:] = [query for query in queries if not has_data(prometheus, query)]
        return not lacking

    with suppress(AssertionError):
        wait_for(complete, "data")
    assert not lacking


def asked_by_the_chart() -> tuple[list[str], list[str]]:
    """By its dashboard, its alerts and its scaler, whose values name the release that is scraped;
    first of any model, then of mixtures of experts.

    A condition is asked as a number, which is there whether it is met or not.
    """
    keda = {"autoscaler": "keda", "prometheusAddress": "http://prometheus"}
    pools = {"decode": {"maxReplicas": 2}}
    values = chart.merged(chart.of_mode("standalone"), {"standalone": keda, "pools": pools})
    (trigger,) = chart.one(chart.objects(chart.render(values)), "ScaledObject")["spec"]["triggers"]
    asked = [rule["expr"].replace("absent(", "count(") for rule in chart.rules()]
    asked += [expr for _, expr in chart.drawn()]
    asked = [re.sub(" (==|>|<) ", r" \1 bool ", each) for each in asked]
    of_experts = [each for each in asked if any(name in each for name in EXPERTS)]
    rest = [each for each in asked if each not in of_experts]
    return [trigger["metadata"]["query"], *rest], of_experts


def test_whatever_the_chart_asks_returns_data(cluster: Serving, prometheus: httpx.Client) -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    queries, _ = asked_by_the_chart()
    lacking = queries
    assert len(queries) > 40

    def complete() -> bool:
        nonlocal lacking
        ask(cluster)
        lacking = [query for query in queries if not has_data(prometheus, query)]
        return not lacking

    with suppress(AssertionError):
        wait_for(complete, "data")
    assert not lacking


def test_the_log_tells_of_requests_and_nothing_that_was_asked(cluster: Serving) -> None:
    url = f"http://127.0.0.1:{cluster.http}/v1/completions"
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-1"}
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    reply = httpx.post(url, json=body, headers=headers, timeout=PATIENCE)
    answer = reply.json()["choices"][0]["text"]
    wait_for(lambda: '"event": "request", "request": "mine-1"' in cluster.said, "its end")
    lines = [json.loads(line) for line in cluster.said.splitlines()]
    events = {each["event"] for each in lines if each.get("request") == "mine-1"}
    assert events >= {"request", "placed", "sequence"}, "from the router and from workers"
    assert "xyzzy" not in cluster.said
    assert KEY not in cluster.said
    assert len(answer) < 8 or answer not in cluster.said


def test_a_worker_that_died_is_told_as_down_and_then_as_up(
    cluster: Serving, prometheus: httpx.Client
) -> None:
    victim = cluster.find("penstock: decode worker 0")
    victim.suspend()  # silent, which is all that can be seen of a machine that has gone
    try:
        down = 'penstock_worker_up{worker=~"decode.*"} == 0'
        wait_for(lambda: has_data(prometheus, down), "its being down")
        stale = 'penstock_requests_running{role="decode"}'
        assert not has_data(prometheus, stale)
        assert has_data(prometheus, 'penstock_workers_ready{pool="decode"} == 0')
    finally:
        victim.resume()
    up = 'penstock_worker_up{worker=~"decode.*"} == 1'
    wait_for(lambda: has_data(prometheus, up), "its being up again")


def test_what_it_asks_of_experts_returns_data_too() -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")
    _, queries = asked_by_the_chart()
    assert queries
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        folder = Path(name)
        make_checkpoint(folder / "experts", "mixtral")
        arguments = [str(folder / "experts"), "--mixed", "1", "--tp", "2", "--ep", "2"]
        arguments += ["--kv-cache-mib", "16", "--api-key", KEY, "--log-format", "json"]
        with serving(arguments, free_ports(2), folder) as running:
            running.wait_until_said('"event": "serving"')
            with scraped(folder, running.http) as client:

                def complete() -> bool:
                    ask(running)
                    return all(has_data(client, query) for query in queries)

                wait_for(complete, "data of experts")
