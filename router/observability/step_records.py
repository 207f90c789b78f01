"""The latest steps of a worker, as columns, for the calibration of the simulator."""

from dataclasses import dataclass, fields

from penstock.protos import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Records of a worker's latest steps as columns, oldest first.

    Element i of all columns describes the same step.

    Attributes:
        number: number of the step, from 1.
        ended: end of the step in seconds, on a monotonic clock of the worker.
        seconds: duration of the step.
        tokens: tokens run through the model.
        sequences: sequences of the step.
        positions: KV positions of all sequences.
        pairs: number of pairs of a prompt token and a KV position to which the token attends.
    """

    number: list[int]
    ended: list[float]
    seconds: list[float]
    tokens: list[int]
    sequences: list[int]
    positions: list[int]
    pairs: list[float]


def step_columns(message: pb.StepRecords) -> StepColumns:
    """Return the records of a message. Raises ValueError if the columns differ in length."""
    columns = {each.name: list(getattr(message, each.name)) for each in fields(StepColumns)}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"the columns of the step records differ in length: {sorted(lengths)}")
    return StepColumns(**columns)
