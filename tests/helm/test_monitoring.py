"""Alerts and dashboard: expressions are sound, speak of metrics that there are, and fire."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's engine is in the dependency group chart")

from tests.support import chart
from tests.support.metrics import EXPERTS, POOL_COUNTS, SERIES, SIZES

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here (Debian: apt-get install prometheus)"
)

METRICS = SERIES | SIZES | EXPERTS

OF = '{namespace="apps",job="rel-penstock"'


def test_every_alert_tells_what_to_do_first() -> None:
    for rule in chart.rules():
        assert re.fullmatch("Penstock[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        notes = rule["annotations"]
        assert len(notes["runbook"]) > 40
        assert notes["summary"].endswith(".")
        assert notes["runbook_url"] == f"http://book/#{rule['alert'].lower()}"


def test_expressions_speak_of_metrics_that_there_are_and_of_this_release() -> None:
    exprs = [(rule["alert"], rule["expr"]) for rule in chart.rules()] + list(chart.drawn())
    told = set()
    for name, expr in exprs:
        named = re.findall(r"penstock_\w+", expr)
        assert named, name
        assert set(named) <= METRICS, (name, set(named) - METRICS)
        told |= set(named)
        assert expr.replace(" ", "").count(OF) == len(named), (name, expr)
    assert {re.sub("_bucket$", "", name) for name in told} == {
        re.sub("_(bucket|sum|count)$", "", name) for name in METRICS
    }, "something that is told is shown nowhere"


def test_the_documentation_knows_every_metric_and_no_other() -> None:
    text = (chart.ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("| name | labels | meaning |") : text.index("With `--vllm-metrics`")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    written = {f"penstock_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert written == {re.sub("_(bucket|sum|count)$", "", name) for name in METRICS}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in chart.dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    shown = [{"record": f"panel:{n}", "expr": expr} for n, (_, expr) in enumerate(chart.drawn())]
    groups = [{"name": "alerts", "rules": chart.rules()}, {"name": "panels", "rules": shown}]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    assert f"{len(chart.rules()) + len(shown)} rules found" in promtool("check", "rules", str(path))


LABELS = 'namespace="apps", job="rel-penstock"'
SLOW = {"0.5": "0x60", "5": "0+1x60", "+Inf": "0+1x60"}
"""A histogram, by bucket, whose every observation is between the second bound and the first."""


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f"penstock_{name}{{{LABELS}{labels and ', '}{labels}}}", "values": values}


def slow(name: str) -> list[dict[str, str]]:
    return [series(f"{name}_bucket", values, f'le="{bound}"') for bound, values in SLOW.items()]


FIRING: dict[str, list[dict[str, str]]] = {
    "PenstockGone": [series("step_seconds_count", "1x60")],
    "PenstockNoWorkers": [
        series("workers_ready", "0x60", 'pool="decode"'),
        series("workers_desired", "1x60", 'pool="decode"'),
    ],
    "PenstockWorkersMissing": [
        series("workers_ready", "1x60", 'pool="decode"'),
        series("workers_desired", "2x60", 'pool="decode"'),
    ],
    "PenstockWorkerDown": [series("worker_up", "0x60", 'worker="decode-0"')],
    "PenstockRouterDown": [series("router_up", "0x60", 'router="router-1"')],
    "PenstockQueueLong": [series("requests_waiting", "101x60", 'pool="prefill"')],
    "PenstockFirstTokenLate": slow("time_to_first_token_seconds"),
    "PenstockTokensSlow": slow("time_per_output_token_seconds"),
    "PenstockKvFull": [
        series("kv_blocks", "98x60", 'worker="decode-0", state="used"'),
        series("kv_blocks", "2x60", 'worker="decode-0", state="free"'),
    ],
    "PenstockPreempting": [series("preemptions_total", "0+60x60", 'worker="decode-0"')],
    "PenstockFailovers": [series("failovers_total", "0+5x60")],
    "PenstockErrors": [
        series("requests_finished_total", "0+1x60", 'reason="error"'),
        series("requests_finished_total", "0+9x60", 'reason="stop"'),
    ],
    "PenstockKvTransfersSlow": slow("kv_transfer_seconds"),
}
"""What each alert wakes somebody for."""

WELL = [
    series("workers_ready", "2x60", 'pool="decode"'),
    series("workers_desired", "2x60", 'pool="decode"'),
    series("worker_up", "1x60", 'worker="decode-0"'),
    series("router_up", "1x60", 'router="router-0"'),
    series("requests_waiting", "3x60", 'pool="prefill"'),
    series("kv_blocks", "40x60", 'worker="decode-0", state="used"'),
    series("kv_blocks", "60x60", 'worker="decode-0", state="free"'),
    series("preemptions_total", "0x60", 'worker="decode-0"'),
    series("failovers_total", "0x60"),
    series("requests_finished_total", "0x60", 'reason="error"'),
    series("requests_finished_total", "0+10x60", 'reason="stop"'),
    *[
        series(f"{name}_bucket", "0+1x60", f'le="{bound}"')
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds")
        for bound in ("0.05", "+Inf")
    ],
    series("kv_transfer_seconds_bucket", "0+1x60", 'le="0.1"'),
    series("kv_transfer_seconds_bucket", "0+1x60", 'le="+Inf"'),
]


@pytest.mark.slow
@needs_promtool
def test_each_alert_fires_for_what_it_is_for_and_none_while_all_is_well(tmp_path: Path) -> None:
    alerts = chart.rules()
    assert {rule["alert"] for rule in alerts} == FIRING.keys()
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": alerts}]}))
    tests = [
        {
            "interval": "1m",
            "input_series": FIRING[rule["alert"]],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}})',
                    "eval_time": "55m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for rule in alerts
    ]
    quiet = {"expr": "ALERTS", "eval_time": "55m", "exp_samples": []}
    tests.append({"interval": "1m", "input_series": WELL, "promql_expr_test": [quiet]})
    unit = tmp_path / "test.yaml"
    unit.write_text(yaml.safe_dump({"rule_files": [path.name], "tests": tests}))
    promtool("test", "rules", str(unit))


# ------------------------------------------------------------ several routers

LABELLED = {
    "penstock_kv_blocks": ({"state": "used"}, {"state": "free"}),
    "penstock_requests_running": ({"role": "decode"},),
    "penstock_workers_required": ({"term": "queue"}, {"term": "occupancy"}),
    "penstock_requests_finished_total": ({"reason": "error"}, {"reason": "stop"}),
    "penstock_generated_tokens_total": ({"tenant": "key-1"},),
    "penstock_prompt_tokens_by_tenant_total": ({"tenant": "key-1"},),
    "penstock_prefill_placements_total": ({"where": "apart", "reason": "even"},),
}
"""Labels of a metric besides the worker or the pool."""
OF_POOLS = ("requests_waiting", "tokens_waiting", *(f"workers_{name}" for name in POOL_COUNTS))
OF_WORKERS = (
    *("worker_up", "requests_running", "kv_blocks", "kv_waste_ratio", "prompt_tokens_total"),
    *("prefix_hit_tokens_total", "preemptions_total", "expert_imbalance_ratio", "step_seconds"),
)
"""What every router tells alike, as the workers tell it to each."""


def told_by(job: str, routers: int) -> list[dict[str, str]]:
    """The series of one cluster by that many routers: of workers and pools each tells the same,
    the rest is each one's own."""
    found = []
    for at, name in enumerate(sorted(METRICS)):
        base = re.sub("_(bucket|sum|count)$", "", name).removeprefix("penstock_")
        shared = [{"pool": each} for each in ("prefill", "decode")] if base in OF_POOLS else []
        shared += [{"worker": each} for each in ("a-0", "b-1")] if base in OF_WORKERS else []
        shared += [{"router": each} for each in ("r-0", "r-1")] if base == "router_up" else []
        for place, owner in enumerate(shared or [{}]):
            for more in LABELLED.get(name, ({},)):
                for le, count in (("0.5", 3), ("2", 7), ("+Inf", 8)):
                    labels = {"namespace": "apps", "job": job, **owner, **more}
                    labels |= {"le": le} if name.endswith("_bucket") else {}
                    step = count if "le" in labels else (at + place) % 7 + 1
                    for router in range(routers):
                        own = step if shared or not router else 0
                        said = {**labels, "instance": str(router)}
                        text = ",".join(f'{key}="{value}"' for key, value in said.items())
                        gauge = not re.search("_(total|bucket|sum|count)$", name)
                        values = f"{own}x30" if gauge else f"0+{own}x30"
                        found.append({"series": f"{name}{{{text}}}", "values": values})
                    if "le" not in labels:
                        break
    return found


@pytest.mark.slow
@needs_promtool
def test_several_routers_are_counted_as_one_cluster(tmp_path: Path) -> None:
    exprs = [rule["expr"] for rule in chart.rules() if "absent" not in rule["expr"]]
    exprs += [expr for _, expr in chart.drawn()]
    checks: list[dict[str, object]] = []
    for expr in exprs:
        number = re.sub(" (==|>) ", r" \1 bool ", expr)  # a condition as 0 or 1
        both = [number.replace('"rel-penstock"', f'"{job}"') for job in ("one", "two")]
        one, two = (f"({each})" for each in both)
        there = f"count({one}) > bool 0"
        yes = [{"labels": "{}", "value": 1}]
        checks.append({"expr": there, "eval_time": "25m", "exp_samples": yes})
        for lacking in (f"{one} != {two}", f"{one} unless {two}", f"{two} unless {one}"):
            checks.append({"expr": lacking, "eval_time": "25m", "exp_samples": []})
    told = [*told_by("one", 1), *told_by("two", 2)]
    unit = {"interval": "1m", "input_series": told, "promql_expr_test": checks}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [unit]}))
    promtool("test", "rules", str(path))
