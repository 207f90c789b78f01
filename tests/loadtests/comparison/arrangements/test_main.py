import asyncio
import os
from pathlib import Path

import pytest

from penstock.cli.flags import read_spec
from penstock.cli.status import fetch
from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.comparison.arrangements.__main__ import Options, Servers, main
from penstock.loadtests.comparison.arrangements.arrangements import BY_NAME
from penstock.loadtests.comparison.arrangements.loads import closed_loop
from penstock.router.config import RouterConfig
from tests.loadtests.bench.test_load import FakeClient
from tests.support.served_router import model_folder, serving
from tests.support.stub_worker import StubWorker


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arrangements", "three"], "unknown arrangement 'three': expected one of default"),
        (["--streams", "0"], "--streams must be numbers of at least 1"),
        (["--streams", "many"], "--streams must be numbers of at least 1"),
        (["--rounds", "0"], "must be at least 1"),
        (["--save-json", "/nowhere/x.json"], "--save-json /nowhere/x.json: its folder does not"),
        (["--peers", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_give_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(flags)
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_loads_are_those_of_the_flags(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"2023-11-16 18:00:{at:02d}.0,400,40" for at in range(60))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    options = Options(streams=("64", "1"), requests=2, mix=True, trace=str(trace), trace_keep=1.0)
    loads = options.loads()
    names = ["64 streams", "1 stream", "changing mix", "trace"]
    assert [load.name for load in loads] == names
    assert [len(load.plan) for load in loads if load.concurrency] == [128, 8]
    assert [(one.input_len, one.output_len) for one in loads[-1].plan[:1]] == [(100, 10)]
    assert [load.goals is not None for load in loads] == [False, False, True, True]


def test_serve_accepts_the_arguments_of_every_arrangement() -> None:
    goals = Goals(ttft=2000, tpot=150)
    for each in BY_NAME.values():
        spec = read_spec(each.serve_arguments("demo", 2048, ("--max-model-len", "4096"), goals))
        pools = (spec.pools.prefill, spec.pools.decode, spec.pools.mixed)
        used = [pool for pool in pools if pool.replicas]
        assert sum(pool.replicas for pool in used) == each.num_workers
        assert {pool.kv_cache_mib for pool in used} == {2048 // each.num_workers}
        threads = max(1, len(os.sched_getaffinity(0)) // 2) if each.has_fixed_threads else None
        assert {pool.threads for pool in used} == {threads}
        slos = spec.engine.ttft_slo_seconds, spec.engine.tpot_slo_seconds
        assert slos == ((2.0, 0.15) if each.name.endswith("-slo") else (0.0, 0.0))


def test_arrangements_with_slos_are_measured_only_by_name() -> None:
    names = ["default", "two-mixed", "one-mixed", "fixed-pair"]
    assert [each.name for each in Options().chosen()] == names
    chosen = Options(arrangements=("two-mixed-slo", "default")).chosen()
    assert [each.name for each in chosen] == ["two-mixed-slo", "default"]


async def test_only_the_fixed_pair_has_a_role_that_an_operator_assigned(tmp_path: Path) -> None:
    config = RouterConfig(model_folder(tmp_path), "stub")
    workers = StubWorker("prefill-0", "prefill"), StubWorker("decode-0", "decode")
    async with serving(config, *workers) as served:
        for name, assigned in (("default", {}), ("fixed-pair-slo", {"prefill-0": "prefill"})):
            await BY_NAME[name].assign_roles(served.admin_url)
            roles = (await asyncio.to_thread(fetch, served.admin_url, ""))["roles"]
            assert {worker: each["role"] for worker, each in roles.items()} == assigned


async def test_cancelled_load_ends_the_measurement() -> None:
    client = FakeClient()
    client.expected_running = 2
    client.gate.clear()
    servers = Servers({"default": client}, 1000, 0)
    measuring = asyncio.ensure_future(servers.measure("default", closed_loop(2, 4, 8, 2), 0))
    await client.all_started.wait()
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
