import json
import math

from penstock.loadtests.bench.metrics import Figures, Outcome, Summary
from penstock.loadtests.bench.report import as_json, block, rows

FIGURES = Figures(
    duration=105.234,
    completed=1000,
    failed=3,
    short=0,
    total_input=215_000,
    total_output=180_000,
    peak_output=2104.0,
    peak_concurrent=64,
    good=None,
    ttft=Summary(48.2, 42.1, 9.0, 90.0, 125.3),
    tpot=Summary(12.345, 11.0, 1.0, 19.0, 30.0),
    itl=Summary(11.8, 10.2, 2.0, 20.0, 35.7),
    e2el=Summary(2000.0, 1900.0, 50.0, 2300.0, 2500.0),
    lag=Summary(0.1, 0.1, 0.0, 0.2, 0.3),
)

# The output of `vllm bench serve`; | marks the end of a line that has trailing blanks.
GOLDEN = """\
============ Serving Benchmark Result ============
Successful requests:                     1000      |
Failed requests:                         3         |
Maximum request concurrency:             64        |
Request rate configured (RPS):           10.00     |
Benchmark duration (s):                  105.23    |
Total input tokens:                      215000    |
Total generated tokens:                  180000    |
Request throughput (req/s):              9.50      |
Request goodput (req/s):                 8.55      |
Output token throughput (tok/s):         1710.47   |
Peak output token throughput (tok/s):    2104.00   |
Peak concurrent requests:                64.00     |
Total token throughput (tok/s):          3753.54   |
---------------Time to First Token----------------
Mean TTFT (ms):                          48.20     |
Median TTFT (ms):                        42.10     |
P99 TTFT (ms):                           125.30    |
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          12.35     |
Median TPOT (ms):                        11.00     |
P99 TPOT (ms):                           30.00     |
---------------Inter-token Latency----------------
Mean ITL (ms):                           11.80     |
Median ITL (ms):                         10.20     |
P99 ITL (ms):                            35.70     |
=================================================="""


def with_goals(good: int) -> Figures:
    values = {name: getattr(FIGURES, name) for name in Figures.__slots__}
    return Figures(**{**values, "good": good})


def test_block_equals_that_of_vllm_bench_serve() -> None:
    assert block(with_goals(900), rate=10.0, concurrency=64) == GOLDEN.replace("|", "")


def test_settings_that_were_not_given_are_not_printed() -> None:
    optional = ("Maximum request concurrency", "Request rate configured", "Request goodput")
    expected = [line for line in GOLDEN.splitlines() if not line.startswith(optional)]
    assert block(FIGURES, math.inf, None) == "\n".join(expected).replace("|", "")


def test_the_json_has_the_same_figures() -> None:
    made = as_json(with_goals(900), {"server": {"address": "grpc://x"}})
    assert json.loads(json.dumps(made)) == made
    assert made["config"] == {"server": {"address": "grpc://x"}}
    assert made["completed"] == 1000
    assert made["p99_itl_ms"] == 35.7
    assert made["median_ttft_ms"] == 42.1
    assert made["request_goodput"] == 900 / 105.234
    assert made["output_throughput"] == 180_000 / 105.234
    assert made["machine"]["cpus"] >= 1
    assert as_json(FIGURES, {})["request_goodput"] is None


def test_rows_include_failed_requests() -> None:
    done = Outcome(0, 0.0, 8, 3, start=0.5, arrivals=[1.0, 1.25], output_len=3)
    failed = Outcome(1, 0.25, 9, 3, start=0.5, error="gone")
    assert rows([done, failed]) == [
        {
            "number": 0,
            "due": 0.0,
            "start": 0.5,
            "input_len": 8,
            "output_len": 3,
            "ttft": 0.5,
            "latency": 0.75,
            "itls": [0.25],
            "error": "",
        },
        {
            "number": 1,
            "due": 0.25,
            "start": 0.5,
            "input_len": 9,
            "output_len": 0,
            "ttft": None,
            "latency": None,
            "itls": [],
            "error": "gone",
        },
    ]
