import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.traces import BadTrace, read_trace
from penstock.loadtests.bench.workload import TRACE_BLOCK, TraceRow

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"

GOOD = '{"timestamp": 27, "input_length": 513, "output_length": 2, "hash_ids": [4, 9]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write_trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_bytes("\r\n".join(lines).encode())
    return path


def test_mooncake_rows_are_read(tmp_path: Path) -> None:
    later = json.dumps({**json.loads(GOOD), "timestamp": 1527, "kind": "ignored"})
    assert read_trace(write_trace(tmp_path, GOOD, later)) == [
        TraceRow(0.0, 513, 2, (4, 9)),
        TraceRow(1.5, 513, 2, (4, 9)),
    ]


def test_azure_rows_are_read(tmp_path: Path) -> None:
    rows = (HEADER, "2023-11-16 18:15:46.5000000,374,44", "2023-11-16 18:15:48.2500000,3,1")
    expected = [TraceRow(0.0, 374, 44), TraceRow(1.75, 3, 1)]
    assert read_trace(write_trace(tmp_path, *rows)) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "found a list of 1 items"),
        ("", "expected a JSON object"),
        (GOOD.replace('"timestamp": 27, ', ""), "timestamp is missing"),
        (GOOD.replace("27", '"now"'), "timestamp must be"),
        (GOOD.replace("27", "-1"), "timestamp must be"),
        (GOOD.replace("27", "NaN"), "timestamp must be"),
        (GOOD.replace("27", "1e999"), "timestamp must be"),
        (GOOD.replace("27", "26"), "is earlier"),
        (GOOD.replace("513", "0"), "input_length must be"),
        (GOOD.replace("513", "1.5"), "input_length must be"),
        (GOOD.replace("513", "true"), "input_length must be"),
        (GOOD.replace("513", "512"), "must be a list of 1 ids for 512 tokens"),
        (GOOD.replace(": 2,", ": -2,"), "output_length must be"),
        (GOOD.replace("[4, 9]", "7"), "must be a list of 2 ids"),
        (GOOD.replace("9]", "4294967296]"), "expected whole numbers from 0 to"),
        (GOOD.replace("9]", '"9"]'), "expected whole numbers from 0 to"),
    ],
)
def test_error_names_the_bad_mooncake_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BadTrace, match=message) as caught:
        read_trace(write_trace(tmp_path, GOOD, line, GOOD))
    assert str(caught.value).startswith(f"{tmp_path / 'trace'}:2: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46.6805900,374", "expected 3 fields, found 2"),
        ("yesterday,374,44", "expected a date and a time"),
        ("2023-11-16 18:15:46,three,44", "ContextTokens must be"),
        ("2023-11-16 18:15:46,3,0", "GeneratedTokens must be"),
        ("2023-11-16 18:15:46,3,-1", "GeneratedTokens must be"),
        ("2023-11-16 18:15:44,3,1", "is earlier"),
    ],
)
def test_error_names_the_bad_azure_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BadTrace, match=message) as caught:
        read_trace(write_trace(tmp_path, HEADER, "2023-11-16 18:15:45,1,1", line))
    assert ":3: " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "a text file in UTF-8"),
        (b"a,b\n1,2", ":1: expected a JSON object with"),
    ],
)
def test_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=message):
        read_trace(path)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_text("{" + text, encoding="utf-8", errors="replace")
    with suppress(BadTrace):  # the test fails with any other exception
        assert read_trace(path)


def shared_trace(name: str) -> list[TraceRow]:
    if not SHARED.is_dir():
        pytest.skip("needs the traces in ../shared/traces")
    return read_trace(SHARED / name)


@pytest.mark.parametrize(
    ("name", "count", "span", "inputs", "outputs", "longest", "hits", "unique"),
    [
        ("conversation", 12_031, 3537.0, 12_035, 343, 126_195, (0.366, 0.374), 182_790),
        ("synthetic", 3_993, 1022.0, 15_325, 149, 191_378, (0.640, 0.651), 43_924),
    ],
)
def test_statistics_of_the_mooncake_traces(
    name: str,
    count: int,
    span: float,
    inputs: int,
    outputs: int,
    longest: int,
    hits: tuple[float, float],
    unique: int,
) -> None:
    rows = shared_trace(f"mooncake_{name}_trace.jsonl")
    assert len(rows) == count
    assert rows[-1].at - rows[0].at == pytest.approx(span, abs=0.5)
    assert round(sum(row.input_len for row in rows) / count) == inputs
    assert round(sum(row.output_len for row in rows) / count) == outputs
    assert max(row.input_len for row in rows) == longest
    seen, block_hits, token_hits = set[int](), 0, 0
    for row in rows:
        hit = next((n for n, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        block_hits += hit
        token_hits += min(hit * TRACE_BLOCK, row.input_len)
        seen.update(row.blocks)
    assert len(seen) == unique
    assert block_hits / sum(len(row.blocks) for row in rows) == pytest.approx(hits[0], abs=5e-4)
    assert token_hits / sum(row.input_len for row in rows) == pytest.approx(hits[1], abs=5e-4)


@pytest.mark.parametrize(("name", "count"), [("conv", 19_366), ("code", 8_819)])
def test_statistics_of_the_azure_traces(name: str, count: int) -> None:
    rows = shared_trace(f"azure_llm_2023_{name}.csv")
    assert len(rows) == count
    assert rows[0].at == 0.0
    assert 3000 < rows[-1].at < 3600  # the trace covers an hour
    assert not any(row.blocks for row in rows)
