"""Reads request traces: Mooncake's JSON lines and the CSV of Azure's public data set."""

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from penstock.common.value_text import value_text
from penstock.loadtests.bench.workload import MAX_BLOCK_ID, TRACE_BLOCK, TraceRow

_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class BadTrace(ValueError):
    """Raised if the file is not a trace in a known format. The message gives the line number."""


def read_trace(path: Path) -> list[TraceRow]:
    """Read a whole trace. The first line of the file determines its format.

    Times are relative to the first request. Raises BadTrace and OSError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadTrace(f"{path}: expected a text file in UTF-8") from None
    if not lines:
        raise BadTrace(f"{path}: the file is empty: expected a trace of at least one request")
    if lines[0].lstrip().startswith("{"):
        parse, first = _mooncake_row, 1
    elif lines[0] == _AZURE_HEADER:
        parse, first = _azure_row, 2
    else:
        raise BadTrace(
            f"{path}:1: expected a JSON object with {', '.join(_MOONCAKE_FIELDS)} (Mooncake) or "
            f"the header {_AZURE_HEADER} (Azure)"
        )
    rows: list[TraceRow] = []
    for number, line in enumerate(lines[first - 1 :], start=first):
        try:
            rows.append(parse(line))
            if rows[-1].at < rows[max(0, len(rows) - 2)].at:
                raise ValueError("the timestamp is earlier than the timestamp of the previous line")
        except ValueError as error:
            raise BadTrace(f"{path}:{number}: {error}") from None
    return list(_from_zero(rows))


def _from_zero(rows: list[TraceRow]) -> Iterator[TraceRow]:
    for row in rows:
        yield row._replace(at=row.at - rows[0].at)


def _mooncake_row(line: str) -> TraceRow:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object ({error.msg})") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {value_text(record)}")
    for field in _MOONCAKE_FIELDS:
        if field not in record:
            raise ValueError(f"the field {field} is missing")
    at, input_len, output_len, blocks = (record[field] for field in _MOONCAKE_FIELDS)
    if type(at) not in (int, float) or not 0 <= at < math.inf:
        raise ValueError(f"timestamp must be 0 or more milliseconds, not {value_text(at)}")
    input_len = _length("input_length", input_len)
    num_blocks = -(-input_len // TRACE_BLOCK)
    if not isinstance(blocks, list) or len(blocks) != num_blocks:
        raise ValueError(
            f"hash_ids must be a list of {num_blocks} ids for {input_len} tokens, not "
            f"{value_text(blocks)}"
        )
    for block in blocks:
        if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:
            raise ValueError(
                f"hash_ids contains {value_text(block)}: expected whole numbers from 0 to "
                f"{MAX_BLOCK_ID}"
            )
    return TraceRow(at / 1000, input_len, _length("output_length", output_len), tuple(blocks))


def _azure_row(line: str) -> TraceRow:
    fields = line.split(",")
    if len(fields) != 3:
        raise ValueError(f"expected 3 fields, found {len(fields)}")
    try:
        at = datetime.fromisoformat(fields[0]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {value_text(fields[0])}: expected a date and a time"
        ) from None
    lengths = [int(field) if field.isascii() and field.isdigit() else field for field in fields]
    return TraceRow(
        at, _length("ContextTokens", lengths[1]), _length("GeneratedTokens", lengths[2])
    )


def _length(field: str, value: object) -> int:
    if type(value) is not int or value < 1:  # `isinstance` would also accept a bool
        raise ValueError(f"{field} must be 1 or more tokens, not {value_text(value)}")
    return value
