"""What workers say, and what follows from it."""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.router.routing.admission import Admission
from penstock.router.routing.events import (
    Command,
    Draining,
    Drop,
    Failed,
    Hang,
    Heard,
    Ready,
    Received,
    Rejected,
    RoleChanged,
    Stepped,
    WorkerLost,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.fleet import Fleet, WorkerView
from penstock.router.routing.lifecycle import Life
from penstock.router.routing.log import Taken
from penstock.router.routing.patience import Patience
from penstock.router.routing.placer import Placer

Commands: TypeAlias = list[Command]


@dataclass(slots=True)
class Counters:
    """Since the start."""

    num_failovers: int = 0  # requests begun again elsewhere because their worker was lost
    num_handovers: int = 0  # transfers of blocks that arrived
    num_handovers_failed: int = 0
    num_gaps: int = 0
    num_workers_lost: int = 0


class Reports:
    """Hands each event of a worker to the request it speaks of, and keeps the views of workers."""

    def __init__(
        self, fleet: Fleet, placer: Placer, queue: Admission, patience: Patience, max_gaps: int
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._lives = placer.lives
        self._served = queue.served
        self._patience = patience
        self._max_gaps = max_gaps
        self.counters = Counters()

    # -------------------------------------------------------------- workers

    def worker_up(self, event: WorkerUp, out: Commands, now: float) -> None:
        self._lose(event.info.worker, out, now)  # streams do not resume
        self._fleet.up(event.info, event.load, now)
        self._patience.watch(self._fleet, now)
        self._placer.stirred = True

    def worker_lost(self, event: WorkerLost, out: Commands, now: float) -> None:
        self._lose(event.worker, out, now)

    def _lose(self, worker: str, out: Commands, now: float) -> None:
        view = self._fleet.get(worker)
        if view is None:
            return
        self.counters.num_workers_lost += 1
        self._fleet.lose(worker, now)
        self._patience.watch(self._fleet, now)
        for request in view.holds:
            life = self._lives[request]
            if life.lost(worker, out):
                self.counters.num_failovers += life.status is None
                self._placer.recover(life, out, now)
            else:
                self._placer.settle(life, out, now)

    def hang_up(self, view: WorkerView, reason: str, out: Commands, now: float) -> None:
        out.append(Hang(view.name, view.info.incarnation, reason, view.stuck))
        self._lose(view.name, out, now)

    def draining(self, event: Draining, out: Commands, now: float) -> None:
        view = self._hear(event.worker, now)
        if view is not None:
            view.draining = True
            self._patience.watch(self._fleet, now)
            self._placer.clear(view, out, now)

    def role_changed(self, event: RoleChanged, out: Commands, now: float) -> None:
        view = self._fleet.assign(event.worker, event.role)
        if view is not None:
            self._placer.stirred = True
            if view.sheds:
                self._placer.clear(view, out, now)

    def heard(self, event: Heard, out: Commands, now: float) -> None:
        self._hear(event.worker, now)

    def _hear(self, worker: str, now: float) -> WorkerView | None:
        view = self._fleet.get(worker)
        if view is not None:
            view.heard = now
            if view.suspect:
                view.suspect = False
                self._placer.stirred = True
        return view

    # -------------------------------------------------------------- tokens

    def stepped(self, event: Stepped, out: Commands, now: float) -> None:
        view = self._hear(event.worker, now)
        if view is None:
            return
        worker, lives, served = event.worker, self._lives, self._served
        if event.prompts:
            self._prompts_scored(event, view, out, now)
        for token in event.tokens:
            life = lives.get(token.request)
            if life is None:
                continue
            taken = life.take(worker, token, out)
            if taken is Taken.PLAIN:
                served(life.request.tenant, 1)
            elif taken is not Taken.NOTHING:
                self._turned(life, taken, view, out, now)
        for request, attempt, reason in event.ended:
            life = lives.get(request)
            if life is not None and life.given_up(worker, attempt, reason, out):
                self._placer.settle(life, out, now)
        self._reported(view, event, now)

    def _reported(self, view: WorkerView, event: Stepped, now: float) -> None:
        if event.tokens or event.prompts:
            view.moved = now
        if event.load is None:
            return
        was_stuck, could_begin = view.stuck, view.begins_soon
        self._placer.stirred |= view.masked or was_stuck
        view.reported(event.load, now)
        self._placer.stirred |= view.begins_soon and not could_begin
        if was_stuck:
            self._patience.watch(self._fleet, now)

    def _prompts_scored(self, event: Stepped, view: WorkerView, out: Commands, now: float) -> None:
        for scored in event.prompts:
            life = self._lives.get(scored.request)
            if life is not None:
                taken = life.take_prompt(event.worker, scored, out)
                if taken in (Taken.GAP, Taken.MOVED):
                    self._turned(life, taken, view, out, now)

    def _turned(
        self, life: Life, taken: Taken, view: WorkerView, out: Commands, now: float
    ) -> None:
        if taken is Taken.GAP:
            self._gap(life, view, out, now)
            return
        if taken is Taken.TURN:
            self._served(life.request.tenant, 1)
            self._placer.recovered(life)
        self._placer.settle(life, out, now)

    def _gap(self, life: Life, view: WorkerView, out: Commands, now: float) -> None:
        self.counters.num_gaps += 1
        view.num_gaps += 1
        life.fail_attempt(out)
        self._placer.settle(life, out, now)
        if view.num_gaps == self._max_gaps:
            self.hang_up(view, f"{view.num_gaps} times tokens were missing", out, now)

    # -------------------------------------------------------------- handing over

    def yielded(self, event: Yielded, out: Commands, now: float) -> None:
        life = self._life_of(event, out, now)
        if life is not None:
            life.yielded(event.worker, event.attempt, event.kv_len, out)
            self._placer.settle(life, out, now)

    def ready(self, event: Ready, out: Commands, now: float) -> None:
        life = self._life_of(event, out, now)
        if life is not None:
            life.ready(event, out)
            self._sends(life, event, now)
            self._placer.settle(life, out, now)

    def _sends(self, life: Life, event: Ready, now: float) -> None:
        """Note what is on its way, and since when: what a hand-over costs is learned from it."""
        asked, view = life.next, self._fleet.get(event.worker)
        if asked is None or asked.epoch != event.epoch or life.lease is None or view is None:
            return
        # Waiting for room there is no part of the price: whoever is computed there waits too.
        since = now if view.load.queued else life.asked_at
        life.moving = (max(life.lease.kv_len - event.have, 0), since)

    def received(self, event: Received, out: Commands, now: float) -> None:
        life = self._life_of(event, out, now)
        if life is not None and life.received(event.worker, event.attempt, event.epoch, out):
            self.counters.num_handovers += 1
            if life.moving is not None:
                num_tokens, since = life.moving
                self._fleet.handover.add(num_tokens, event.num_bytes, now - since)
                life.moving = None
            self._placer.settle(life, out, now)

    def failed(self, event: Failed, out: Commands, now: float) -> None:
        life = self._life_of(event, out, now)
        if life is not None:
            failed = life.failed(event.worker, event.attempt, out)
            self.counters.num_handovers_failed += failed
            self._placer.settle(life, out, now)

    def rejected(self, event: Rejected, out: Commands, now: float) -> None:
        life = self._life_of(event, out, now)
        if life is None or not life.rejected(event.worker, event.attempt, out):
            return
        if event.never:
            life.unfit.update(self._fleet.no_larger_than(event.worker))
        else:
            self._fleet.mask(event.worker, now)
        if not (life.homeless and self._placer.end_if_unfit(life, event.reason, out, now)):
            self._placer.settle(life, out, now)

    def _life_of(
        self, event: Yielded | Ready | Received | Failed | Rejected, out: Commands, now: float
    ) -> Life | None:
        """The request that a worker speaks of; offers for an ended one are dropped."""
        view = self._hear(event.worker, now)
        if view is None:
            return None
        life = self._lives.get(event.request)
        if isinstance(event, Yielded | Ready):
            view.moved = now
            if life is None:
                out.append(Drop(event.worker, event.request, event.attempt))
        return life
