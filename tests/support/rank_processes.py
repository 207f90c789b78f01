"""Reusable rank processes: torch is imported once for many test cases."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from penstock.cluster.processes.descriptors import reserve_descriptors
from penstock.workers.engine.engine import Engine
from tests.support.ranks import Answers, answer

TIMEOUT_SECONDS = 240.0


@dataclass
class RankProcesses:
    """Runs each case in as many processes as the mesh has ranks; rank 0 returns the result.

    After a case in which a rank did not answer, all processes are replaced, so that the hung rank
    cannot block the next case.
    """

    processes: list[BaseProcess]
    pipes: list[Connection]
    hung: bool = False

    def answers(self, model: Path, mesh: tuple[int, int, int], **config: Any) -> Answers:
        """Return the answers of a worker with this mesh, after all its ranks have finished."""
        found = self.result_of(answer, model, mesh, **config)
        assert isinstance(found, Answers)
        return found

    def result_of(
        self, use: Callable[[Engine], Any], model: Path, mesh: tuple[int, int, int], **config: Any
    ) -> Any:
        """Run `use`, a function in `tests.support`, on the worker's engine; return its result."""
        self.begin(model, mesh, use, **config)
        found = [self.receive(rank) for rank in range(mesh[0] * mesh[1])]
        failures = [each for each in found if isinstance(each, Exception)]
        if failures:  # if a rank fails, the others fail too, so report all errors
            raise RuntimeError("; ".join(map(str, failures)))
        return found[0]

    def begin(
        self,
        model: Path,
        mesh: tuple[int, int, int],
        use: Callable[[Engine], Any] = answer,
        **config: Any,
    ) -> None:
        if self.hung:
            count = len(self.processes)
            self.end()
            self.start(count)
        num_ranks = mesh[0] * mesh[1]
        self.pipes[0].send(("lead", model, mesh, config, 0, use))
        rendezvous = self.receive(0)
        for rank in range(1, num_ranks):
            self.pipes[rank].send(("follow", model, mesh, config, rank, rendezvous))

    def receive(self, rank: int) -> Any:
        self.hung = not self.pipes[rank].poll(TIMEOUT_SECONDS)
        assert not self.hung, f"rank {rank} did not answer"
        return self.pipes[rank].recv()

    def start(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)
        self.hung = False

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()
        self.pipes.clear()


@contextmanager
def rank_processes(count: int) -> Iterator[RankProcesses]:
    found = RankProcesses([], [])
    found.start(count)
    try:
        yield found
    finally:
        found.end()


def _serve(pipe: Connection) -> None:
    import torch

    reserve_descriptors()
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
    from penstock.workers.parallel.rendezvous import RendezvousServer
    from tests.support.ranks import rank_config

    rendezvous = RendezvousServer("127.0.0.1", "secret", mesh[0] * mesh[1])
    pipe.send(rendezvous.address)
    try:
        engine = Engine(rank_config(model, mesh, **config), store=rendezvous.store)
        try:
            found = use(engine)
            # The `.wait` file means that the test will kill a rank. Answer until then.
            if model.with_suffix(".wait").exists():
                pipe.send("answering")
                while True:
                    answer(engine)
        finally:
            engine.stop()
    finally:
        # Close the rendezvous last, because this cancels the pending calls of other ranks.
        rendezvous.close()
    return found


def _follow(
    model: Path, mesh: tuple[int, int, int], config: Any, rank: int, rendezvous: str
) -> None:
    from penstock.workers.parallel.rendezvous import RemoteStore
    from penstock.workers.rank.follower import Follower
    from tests.support.ranks import rank_config

    store = RemoteStore(rendezvous, "secret")
    given = replace(rank_config(model, mesh, **config), rank=rank)
    Follower(given, store, lambda done, total: None).run()
    store.close()
