"""Processes that are ranks of one worker after another: torch is imported once, cases are many."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from penstock.workers.engine import Engine
from tests.support.ranks import Answers, answer

PATIENCE = 240.0


@dataclass
class RankProcesses:
    """Starts cases in the first so many of them; rank 0 gives the answers."""

    processes: list[BaseProcess]
    pipes: list[Connection]

    def answers(self, model: Path, mesh: tuple[int, int, int], **config: Any) -> Answers:
        """Of a worker of that shape, once all its ranks have ended well."""
        found = self.made_by(answer, model, mesh, **config)
        assert isinstance(found, Answers)
        return found

    def made_by(
        self, use: Callable[[Engine], Any], model: Path, mesh: tuple[int, int, int], **config: Any
    ) -> Any:
        """What `use`, a function of `tests.support`, makes of such a worker's engine."""
        self.begin(model, mesh, use, **config)
        found = [self.hear(rank) for rank in range(mesh[0] * mesh[1])]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found[0]

    def begin(
        self,
        model: Path,
        mesh: tuple[int, int, int],
        use: Callable[[Engine], Any] = answer,
        **config: Any,
    ) -> None:
        num_ranks = mesh[0] * mesh[1]
        self.pipes[0].send(("lead", model, mesh, config, 0, use))
        meeting = self.hear(0)
        for rank in range(1, num_ranks):
            self.pipes[rank].send(("follow", model, mesh, config, rank, meeting))

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


@contextmanager
def rank_processes(count: int) -> Iterator[RankProcesses]:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        yield RankProcesses(processes, pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            part, model, mesh, config, rank, other = pipe.recv()
        except EOFError:
            return
        try:
            if part == "lead":
                pipe.send(_lead(pipe, model, mesh, config, other))
            else:
                _follow(model, mesh, config, rank, other)
                pipe.send(None)
        except Exception as error:
            pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _lead(
    pipe: Connection,
    model: Path,
    mesh: tuple[int, int, int],
    config: Any,
    use: Callable[[Engine], Any],
) -> Any:
    from penstock.workers.parallel.meeting import Meeting
    from tests.support.ranks import rank_config

    meeting = Meeting("127.0.0.1", "secret", mesh[0] * mesh[1])
    pipe.send(meeting.address)
    try:
        engine = Engine(rank_config(model, mesh, **config), store=meeting.store)
    finally:
        meeting.close()
    try:
        found = use(engine)
        if model.with_suffix(".wait").exists():  # somebody is to be killed meanwhile
            pipe.send("answering")
            while True:
                answer(engine)
    finally:
        engine.stop()
    return found


def _follow(model: Path, mesh: tuple[int, int, int], config: Any, rank: int, meeting: str) -> None:
    from penstock.workers.follower import Follower
    from penstock.workers.parallel.meeting import RemoteStore
    from tests.support.ranks import rank_config

    store = RemoteStore(meeting, "secret")
    given = replace(rank_config(model, mesh, **config), rank=rank)
    Follower(given, store, lambda done, total: None).run()
    store.close()
