import dataclasses
import math
import re
from pathlib import Path

import pytest

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.options import (
    Options,
    Results,
    Server,
    Sweep,
    Work,
    WrongOptions,
    check_results,
    goals_of,
    plan_of,
    read_options,
    target_of,
)
from tests.support.api_keys import key_file

MOONCAKE = '{"timestamp": %d, "input_length": 600, "output_length": 9, "hash_ids": [4, %d]}\n'


def options(*argv: str) -> Options:
    return read_options(argv)


def test_defaults_are_a_load_over_grpc() -> None:
    target = target_of(options())
    assert (target.address, target.api, target.temperature) == ("127.0.0.1:9000", "grpc", 0.0)
    plan = plan_of(options().work)
    assert len(plan) == 100
    assert {(p.due, p.input_len, p.output_len) for p in plan} == {(0.0, 128, 64)}


def test_flags_set_the_target_the_plan_and_the_goals(tmp_path: Path) -> None:
    flags = (
        "http://h:1/v1/ --api chat --model m --timeout 5 --num-requests 7 --rate 3.5"
        " --concurrency 2 --input-len 3 --output-len 4-6 --seed 9 --temperature 0.5"
        " --goodput ttft:200 tpot:50 --allow-failures --save-rows --save-json"
    )
    read = options(
        *flags.split(), str(tmp_path / "o.json"), "--api-key-file", str(key_file(tmp_path, "k"))
    )
    target = target_of(read)
    assert dataclasses.astuple(target) == ("http://h:1/v1/", "chat", "m", "k", 5.0, 0.5)
    plan = plan_of(read.work)
    assert plan[-1].due == pytest.approx(7 / 3.5)
    assert {p.input_len for p in plan} == {3}
    assert {p.output_len for p in plan} <= {4, 5, 6}
    assert goals_of(read.results.goodput) == Goals(200.0, 50.0, None)
    assert read.results.allow_failures
    check_results(read.results, read.sweep)


@pytest.mark.parametrize(
    ("address", "api"),
    [("grpc://h:1", "grpc"), ("http://h:1", "completions"), ("https://h", "completions")],
)
def test_api_follows_from_the_address(address: str, api: str) -> None:
    assert target_of(Options(server=Server(address))).api == api


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("localhost:9000", "expected grpc://HOST:PORT"),
        ("ftp://h:1", "expected grpc://HOST:PORT"),
        ("grpc://", "expected grpc://HOST:PORT"),
        ("grpc://h:1 --api chat", "cannot be used with"),
        ("http://h:1 --api grpc", "cannot be used with"),
        ("--timeout 0", "--timeout must be above 0"),
        ("--timeout nan", "--timeout must be above 0"),
        ("--temperature -1", "--temperature must be 0 or more"),
    ],
)
def test_wrong_server_options_are_refused(argv: str, message: str) -> None:
    with pytest.raises(WrongOptions, match=message):
        target_of(options(*argv.split()))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-requests 0", "--num-requests must be 1"),
        ("--concurrency 0", "--concurrency must be 1"),
        ("--num-warmups -1", "--num-warmups must be 0"),
        ("--rate 0", "--rate must be above 0"),
        ("--rate nan", "--rate must be above 0"),
        ("--input-len x", "invalid length 'x'"),
        ("--output-len 0", "invalid length '0'"),
        ("--seed -1", "--seed must be from 0"),
        ("--max-input-len 5", "require --trace"),
        ("--trace-speed 2", "requires --trace"),
        ("--trace x --trace-speed 0", "--trace-speed must be above 0"),
        ("--trace x --max-output-len 0", "--max-output-len must be 1"),
        ("--trace x --trace-speed 2 --rate 1", "leave out --trace-speed"),
        ("--trace x --input-len 9", "cannot be used with --trace or --dataset"),
        ("--dataset x --output-len 9", "cannot be used with --trace or --dataset"),
        ("--num-prefixes 2", "requires --prefix-len"),
    ],
)
def test_wrong_work_options_are_refused(argv: str, message: str) -> None:
    with pytest.raises(WrongOptions, match=message):
        plan_of(options(*argv.split()).work)


@pytest.mark.parametrize(
    "argv", ["--nun 3", "--num-requests x", "--api rest", "a b", "--rate", "--num 3"]
)
def test_unusable_arguments_give_a_one_line_error(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options(*argv.split())
    assert caught.value.code == 2
    assert re.fullmatch(r"penstock bench: .*; see penstock bench --help\n", capsys.readouterr().err)


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for record in (Server, Work, Results, Sweep):
        for field in dataclasses.fields(record):
            assert field.name == "address" or f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", ":5"])
def test_wrong_goals_are_refused(pair: str) -> None:
    with pytest.raises(WrongOptions, match="expected METRIC:TIME"):
        goals_of([pair])


def test_goals_have_milliseconds_or_a_unit() -> None:
    assert goals_of(["ttft:2s", "tpot:50ms", "e2el:9000"]) == Goals(2000.0, 50.0, 9000.0)
    given = options("--goal", "ttft:1", "--goal", "tpot:2", "--goodput", "e2el:3")
    assert goals_of(given.results.goodput) == Goals(1.0, 2.0, 3.0)


def test_wrong_result_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongOptions, match="--save-rows requires"):
        check_results(Results(save_rows=True), Sweep())
    with pytest.raises(WrongOptions, match="--save-rows cannot be used with --sweep"):
        check_results(Results(save_rows=True, save_json=tmp_path / "o.json"), Sweep(sweep=True))
    for path in (tmp_path, tmp_path / "none" / "o.json"):
        with pytest.raises(WrongOptions, match="a file in an existing folder"):
            check_results(Results(save_json=path), Sweep())


def test_trace_sets_times_lengths_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(MOONCAKE % (1000 * n, 5 + n) for n in range(4)))
    plan = plan_of(Work(trace=path, trace_speed=2.0, num_requests=3, max_output_len=5))
    assert [p.due for p in plan] == [0.0, 0.5, 1.0]
    assert [p.blocks for p in plan] == [(4, 5), (4, 6), (4, 7)]
    assert {(p.input_len, p.output_len) for p in plan} == {(600, 5)}
    assert {p.due for p in plan_of(Work(trace=path, rate=math.inf))} == {0.0}
    assert plan_of(Work(trace=path, rate=8.0))[-1].due == pytest.approx(4 / 8)


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(WrongOptions, match="contains no requests"):
        plan_of(Work(trace=path))
