"""Alerts and dashboard: expressions are valid, use existing metrics, and alerts fire."""

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
    PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)"
)

METRICS = SERIES | SIZES | EXPERTS

MATCHERS = '{namespace="apps",job="rel-penstock"'


def test_every_alert_has_a_summary_and_a_runbook() -> None:
    for rule in chart.rules():
        assert re.fullmatch("Penstock[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        notes = rule["annotations"]
        assert len(notes["runbook"]) > 40
        assert notes["summary"].endswith(".")
        assert notes["runbook_url"] == f"http://book/#{rule['alert'].lower()}"


def test_expressions_use_existing_metrics_and_select_this_release() -> None:
    exprs = [(rule["alert"], rule["expr"]) for rule in chart.rules()] + list(
        chart.dashboard_queries()
    )
    used = set()
    for name, expr in exprs:
        metrics = re.findall(r"penstock_\w+", expr)
        assert metrics, name
        assert set(metrics) <= METRICS, (name, set(metrics) - METRICS)
        used |= set(metrics)
        assert expr.replace(" ", "").count(MATCHERS) == len(metrics), (name, expr)
    assert {re.sub("_bucket$", "", name) for name in used} == {
        re.sub("_(bucket|sum|count)$", "", name) for name in METRICS
    }, "a metric is used in no alert and no panel"


def test_the_documentation_lists_exactly_the_exported_metrics() -> None:
    text = (chart.ROOT / "docs" / "operations.md").read_text()
    end = text.index("`--vllm-metrics` (`router.vllm_metrics`) adds")
    table = text[text.index("| name | labels | meaning |") : end]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    documented = {f"penstock_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {re.sub("_(bucket|sum|count)$", "", name) for name in METRICS}


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
def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    panels = [
        {"record": f"panel:{n}", "expr": expr}
        for n, (_, expr) in enumerate(chart.dashboard_queries())
    ]
    groups = [{"name": "alerts", "rules": chart.rules()}, {"name": "panels", "rules": panels}]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    output = promtool("check", "rules", str(path))
    assert f"{len(chart.rules()) + len(panels)} rules found" in output


LABELS = 'namespace="apps", job="rel-penstock"'
SLOW = {"0.5": "0x60", "5": "0+1x60", "+Inf": "0+1x60"}
"""Bucket values of a histogram whose observations all lie between 0.5 and 5."""


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
        # This pool has more blocks, because its blocks are smaller. The alert must compare shares.
        series("kv_blocks", "10000x60", 'worker="prefill-0", state="free"'),
    ],
    "PenstockPreempting": [series("preemptions_total", "0+60x60", 'worker="decode-0"')],
    "PenstockFailovers": [series("failovers_total", "0+5x60")],
    "PenstockErrors": [
        series("requests_finished_total", "0+1x60", 'reason="error"'),
        series("requests_finished_total", "0+9x60", 'reason="stop"'),
    ],
    "PenstockKvTransfersSlow": slow("kv_transfer_seconds"),
}
"""For each alert: series for which the alert must fire."""

HEALTHY = [
    series("workers_ready", "2x60", 'pool="decode"'),
    series("workers_desired", "2x60", 'pool="decode"'),
    series("worker_up", "1x60", 'worker="decode-0"'),
    series("router_up", "1x60", 'router="router-0"'),
    series("requests_waiting", "3x60", 'pool="prefill"'),
    series("kv_blocks", "40x60", 'worker="decode-0", state="used"'),
    series("kv_blocks", "60x60", 'worker="decode-0", state="free"'),
    # One worker of this pool is full, but the pool as a whole is not.
    series("kv_blocks", "100x60", 'worker="decode-1", state="used"'),
    series("kv_blocks", "900x60", 'worker="prefill-0", state="used"'),
    series("kv_blocks", "100x60", 'worker="prefill-0", state="free"'),
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
def test_each_alert_fires_on_its_fault_and_none_in_a_healthy_cluster(tmp_path: Path) -> None:
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
    tests.append({"interval": "1m", "input_series": HEALTHY, "promql_expr_test": [quiet]})
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
"""Labels of the metrics that have other labels than the worker and the pool."""
OF_POOLS = ("requests_waiting", "tokens_waiting", *(f"workers_{name}" for name in POOL_COUNTS))
OF_WORKERS = (
    *("worker_up", "requests_running", "kv_blocks", "kv_waste_ratio", "prompt_tokens_total"),
    *("prefix_hit_tokens_total", "preemptions_total", "expert_imbalance_ratio", "step_seconds"),
)
"""Metrics of pools and workers that every router exports with the same values."""


def exported_series(job: str, routers: int) -> list[dict[str, str]]:
    """Return the series that `routers` routers of one cluster export.

    All routers export the same values for workers and pools. For all other metrics, only the first
    router exports values above 0, so that sums do not depend on the number of routers.
    """
    found = []
    for at, name in enumerate(sorted(METRICS)):
        base = re.sub("_(bucket|sum|count)$", "", name).removeprefix("penstock_")
        shared = [{"pool": each} for each in ("prefill", "decode")] if base in OF_POOLS else []
        shared += [{"worker": each} for each in ("a-0", "b-1")] if base in OF_WORKERS else []
        shared += [{"router": each} for each in ("r-0", "r-1")] if base == "router_up" else []
        for index, owner in enumerate(shared or [{}]):
            for more in LABELLED.get(name, ({},)):
                for le, count in (("0.5", 3), ("2", 7), ("+Inf", 8)):
                    labels = {"namespace": "apps", "job": job, **owner, **more}
                    labels |= {"le": le} if name.endswith("_bucket") else {}
                    step = count if "le" in labels else (at + index) % 7 + 1
                    for router in range(routers):
                        own = step if shared or not router else 0
                        own_labels = {**labels, "instance": str(router)}
                        text = ",".join(f'{key}="{value}"' for key, value in own_labels.items())
                        gauge = not re.search("_(total|bucket|sum|count)$", name)
                        values = f"{own}x30" if gauge else f"0+{own}x30"
                        found.append({"series": f"{name}{{{text}}}", "values": values})
                    if "le" not in labels:
                        break
    return found


@pytest.mark.slow
@needs_promtool
def test_expressions_do_not_depend_on_the_number_of_routers(tmp_path: Path) -> None:
    exprs = [rule["expr"] for rule in chart.rules() if "absent" not in rule["expr"]]
    exprs += [expr for _, expr in chart.dashboard_queries()]
    checks: list[dict[str, object]] = []
    for expr in exprs:
        number = re.sub(" (==|>) ", r" \1 bool ", expr)  # `bool` makes a condition return 0 or 1
        both = [number.replace('"rel-penstock"', f'"{job}"') for job in ("one", "two")]
        one, two = (f"({each})" for each in both)
        has_data = f"count({one}) > bool 0"
        yes = [{"labels": "{}", "value": 1}]
        checks.append({"expr": has_data, "eval_time": "25m", "exp_samples": yes})
        for difference in (f"{one} != {two}", f"{one} unless {two}", f"{two} unless {one}"):
            checks.append({"expr": difference, "eval_time": "25m", "exp_samples": []})
    exported = [*exported_series("one", 1), *exported_series("two", 2)]
    unit = {"interval": "1m", "input_series": exported, "promql_expr_test": checks}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [unit]}))
    promtool("test", "rules", str(path))
