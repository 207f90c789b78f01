"""Role changes take effect once the supervisor (here a fake) has confirmed them."""

import asyncio

import pytest

from penstock.router.errors import Code, ServingError
from penstock.router.observability import role_recorder
from penstock.router.observability.role_recorder import RoleRecorder
from penstock.router.observability.role_registry import Assignment


class Supervisor:
    """A fake supervisor, which records assignments of roles until the test confirms them."""

    def __init__(self) -> None:
        self.changed: list[tuple[str, str]] = []
        self.sent: list[tuple[str, Assignment]] = []
        self.recorder = RoleRecorder(lambda worker, role: self.changed.append((worker, role)))
        self.recorder.send = lambda worker, assignment: self.sent.append((worker, assignment))

    async def start_recording(self, worker: str, role: str) -> "asyncio.Task[None]":
        """Start to record a role. Return the task once the supervisor has got the role."""
        before = len(self.sent)
        task = asyncio.create_task(self.recorder.record(worker, role, "ops"))
        while len(self.sent) == before:
            await asyncio.sleep(0)
        return task


async def run_tasks(count: int = 10) -> None:
    """Run all tasks until each of them waits or has ended."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_role_takes_effect_once_the_supervisor_confirms_it() -> None:
    supervisor = Supervisor()
    recording = await supervisor.start_recording("d0", "mixed")
    supervisor.recorder.merge({"d1": Assignment("prefill", 5.0, "ops")})
    supervisor.recorder.merge({"d0": Assignment("decode", 5.0, "ops")})
    await run_tasks()
    assert not recording.done(), "another worker's role and an older role do not confirm it"
    assert supervisor.recorder.assignments["d0"].role == "decode"
    ((worker, assignment),) = supervisor.sent
    supervisor.recorder.merge({worker: assignment})
    await recording
    assert supervisor.recorder.assignments["d0"] == assignment
    assert supervisor.changed == [("d1", "prefill"), ("d0", "decode"), ("d0", "mixed")]


async def test_newer_role_confirms_the_one_that_it_supersedes() -> None:
    supervisor = Supervisor()
    recording = await supervisor.start_recording("d0", "mixed")
    supervisor.recorder.merge({"d0": Assignment("prefill", supervisor.sent[0][1].at + 1, "ops")})
    await recording
    assert supervisor.changed == [("d0", "prefill")]


async def test_new_role_wins_although_the_previous_one_has_a_later_time() -> None:
    supervisor = Supervisor()
    supervisor.recorder.merge({"d0": Assignment("prefill", 1e12, "ops")})
    recording = await supervisor.start_recording("d0", "decode")
    supervisor.recorder.merge(dict(supervisor.sent))
    await recording
    assert supervisor.changed == [("d0", "prefill"), ("d0", "decode")]


async def test_unconfirmed_role_is_refused_and_has_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(role_recorder, "SECONDS_TO_RECORD", 0.02)
    supervisor = Supervisor()
    with pytest.raises(ServingError, match="was not recorded") as refusal:
        await supervisor.recorder.record("d0", "mixed", "ops")
    assert refusal.value.code is Code.UNAVAILABLE
    assert refusal.value.retry_after == role_recorder.RETRY_SECONDS
    assert (supervisor.recorder.assignments, supervisor.changed) == ({}, [])


async def test_without_a_supervisor_the_role_takes_effect_at_once() -> None:
    changed: list[tuple[str, str]] = []
    recorder = RoleRecorder(lambda worker, role: changed.append((worker, role)))
    await recorder.record("d0", "mixed", "ops")
    await recorder.record("d0", "mixed", "ops")
    assert [assignment.role for assignment in recorder.assignments.values()] == ["mixed"]
    assert set(changed) == {("d0", "mixed")}
