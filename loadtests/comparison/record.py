"""The record of a comparison run. Records are JSON files that can be merged."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.comparison.summary import Row, summarize
from penstock.loadtests.comparison.work import EngineRun, Work


class BadRecord(ValueError):
    """Raised if a file does not contain a record, or if records cannot be merged.

    The message gives the reason.
    """


@dataclass(slots=True)
class Record:
    """Settings and results of one run, or of several merged runs that have the same settings."""

    model: str
    threads: int
    work: Work
    cost: Cost
    machine: dict[str, Any]
    dates: list[str]  # date and time of each run
    commits: list[str]
    left_out: dict[str, str]  # for each engine that was not measured, the reason
    # Description of each engine, by its name.
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Measurements, indexed [round][engine].
    rounds: list[list[EngineRun]] = field(default_factory=list)

    def rows(self) -> list[Row]:
        return summarize([runs for runs in self.rounds if runs], self.work, self.cost)

    def as_json(self) -> dict[str, Any]:
        kept = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            **kept,
            "work": dataclasses.asdict(self.work),
            "cost": dataclasses.asdict(self.cost),
            "summary": {row.engine.name: row.as_json() for row in self.rows()},
            "rounds": [[run.as_json() for run in runs] for runs in self.rounds],
        }


def read(path: Path) -> Record:
    """Read a record from a JSON file. Raises BadRecord."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("summary")
        content["work"], content["cost"] = Work(**content["work"]), Cost(**content["cost"])
        content["rounds"] = [[EngineRun(**run) for run in runs] for runs in content["rounds"]]
        return Record(**content)
    except OSError as error:
        raise BadRecord(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"{path} is not a record of a comparison run: {error!r}") from None


def merged(records: Sequence[Record]) -> Record:
    """Merge the rounds of all records. Raises BadRecord if the records have different settings."""
    first = records[0]
    for other in records[1:]:
        for name in ("model", "threads", "work", "cost", "machine"):
            if getattr(other, name) != getattr(first, name):
                raise BadRecord(
                    f"cannot merge runs with different values of {name!r}: merge only runs with "
                    "equal settings"
                )
        for name in first.about.keys() & other.about.keys():
            if first.about[name].get("kv") != other.about[name].get("kv"):
                raise BadRecord(f"cannot merge runs of {name} with different KV cache formats")
    rounds = [runs for record in records for runs in record.rounds]
    ran = {run.engine for runs in rounds for run in runs}
    left_out = {name: why for record in records for name, why in record.left_out.items()}
    return dataclasses.replace(
        first,
        dates=[date for record in records for date in record.dates],
        commits=list(dict.fromkeys(commit for record in records for commit in record.commits)),
        left_out={name: why for name, why in left_out.items() if name not in ran},
        about={name: about for record in records for name, about in record.about.items()},
        rounds=rounds,
    )
