"""Keeps every request somewhere: in the line, on a worker, or on its way from one to another."""

from collections import Counter
from collections.abc import Collection, Sequence

from penstock.router.routing import lifecycle
from penstock.router.routing.admission import Admission, Entry
from penstock.router.routing.events import Command, Status
from penstock.router.routing.fleet import Fleet, WorkerView
from penstock.router.routing.lifecycle import Life
from penstock.router.routing.policy import Demand, Placement, Policy
from penstock.router.routing.promised import crew_of
from penstock.router.routing.revision import has_room_sooner, patience_of


class Pace:
    """Requests whose worker was lost: let back into the line a few at a time, so that one death
    does not trample the workers that are left."""

    def __init__(self, num_per_worker: int) -> None:
        self._num_per_worker = num_per_worker
        self._held: dict[int, None] = {}  # in order
        self._recovering: dict[int, None] = {}  # let go, their first new token not seen yet

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: int) -> bool:
        return request in self._held

    def add(self, request: int) -> None:
        self._recovering.pop(request, None)
        self._held[request] = None

    def release(self, num_workers: int) -> list[int]:
        room = self._num_per_worker * num_workers - len(self._recovering)
        released = list(self._held)[: max(room, 0)]
        for request in released:
            del self._held[request]
            self._recovering[request] = None
        return released

    def discard(self, request: int) -> None:
        """It has a token again, or has ended."""
        self._held.pop(request, None)
        self._recovering.pop(request, None)


class Placer:
    """Places what waits while workers have room, and moves what has to leave a worker."""

    def __init__(self, policy: Policy, fleet: Fleet, queue: Admission, pace: Pace) -> None:
        self._policy = policy
        self._fleet = fleet
        self._queue = queue
        self._pace = pace
        self.lives: dict[int, Life] = {}
        self._counted: dict[int, list[str]] = {}  # a request: the workers whose views hold it
        self.num_ended: Counter[Status] = Counter()
        self.num_decided: Counter[str] = Counter()  # where prompts are computed, and why
        self.num_revised = 0  # requests taken back from a worker that had no room for them yet
        self.stirred = False  # something changed that may give a waiting request room

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._pace)

    def waits(self, request: int) -> bool:
        return request in self._queue or request in self._pace

    def admit(self, life: Life) -> None:
        """Take in a new request; one that has ended at the door is only counted."""
        if life.status is not None:
            self.num_ended[life.status] += 1
            return
        self.lives[life.request.id] = life
        self._queue.add(_entry(life, again=False))
        self.stirred = True

    def settle(self, life: Life, out: list[Command], now: float) -> None:
        """Call after whatever changed where a request is: the views follow, and one that nobody
        has any more is placed again or waits."""
        request = life.request.id
        self.stirred = True
        if life.status is not None:
            self._uncount(request)
            del self.lives[request]
            self.num_ended[life.status] += 1
            self._queue.remove(request)
            self._pace.discard(request)
            return
        if life.homeless and not self.waits(request):
            self._place_again(life, out, now)
        self._count(life, now)

    def recover(self, life: Life, out: list[Command], now: float) -> None:
        """Like `settle`, for one whose worker was lost under it."""
        if life.status is None:
            self._pace.add(life.request.id)
        self.settle(life, out, now)

    def recovered(self, life: Life) -> None:
        self._pace.discard(life.request.id)

    def place_waiting(self, out: list[Command], now: float) -> None:
        """Place requests in their turn while workers have room."""
        for request in self._pace.release(len(self._fleet)):
            self._queue.add(_entry(self.lives[request], again=True))
        views = self._fleet.views() if len(self._queue) else ()
        while (head := self._next(views, now)) is not None:
            life = self.lives[head]
            placement = self._choose(life, views, now)
            if placement is not None:
                self._queue.take(head, now)
                self._place(life, placement, out, now)
                self._count(life, now)
            elif not self.end_if_unfit(life, "it fits on no worker that is there", out, now):
                break
        self.stirred = False

    def _next(self, views: Sequence[WorkerView], now: float) -> int | None:
        """Whose turn it is; None: nobody's that could be placed now."""
        if not self._fleet.shallow:
            return self._queue.head()
        return self._queue.next(now, crew_of(views)) if len(self._queue) else None

    def busy_since(self, view: WorkerView) -> float | None:
        """Since when that worker has had something to do for which it waits neither for blocks nor
        for another one to yield; None: it has nothing. What it receives blocks for has taken room,
        for which all else there may wait."""
        lives = [self.lives[request] for request in view.holds]
        if any(life.receives(view.name) for life in lives):
            return None
        here = [life.working for life in lives if life.working is not None]
        return min((hold.since for hold in here if hold.worker == view.name), default=None)

    def short_of(self) -> Collection[str]:
        """The roles of which no worker has room for the request whose turn it is."""
        head = self._queue.head()
        if head is None:
            return ()
        life = self.lives[head]
        size = (life.log.num_known, life.request.num_choices)
        usable = [view for view in self._fleet.views() if view.usable and view.has_room(*size)]
        if life.lease is None:  # its prompt is to be computed, which a decode worker seldom does
            usable = [view for view in usable if view.role == "decode" or view.begins_soon]
        return {"prefill", "decode", "mixed"} - {view.role for view in usable}

    def end_if_unfit(self, life: Life, reason: str, out: list[Command], now: float) -> bool:
        """End a request that fits on none of the workers that stay."""
        staying = [view for view in self._fleet.views() if view.stays]
        if not staying or any(view.name not in life.unfit for view in staying):
            return False
        life.end(Status.INVALID, reason, out)
        self.settle(life, out, now)
        return True

    # -------------------------------------------------------------- moving

    def clear(self, view: WorkerView, out: list[Command], now: float) -> None:
        """Move off a worker what can be moved: all of it when it drains; what it generates, as far
        as its blocks can move too, when it is to prefill; only what has not begun there when it is
        merely silent."""
        for request in list(view.holds):
            life = self.lives[request]
            if life.then == view.name:
                life.then = None
                self.settle(life, out, now)
            if life.next is not None and life.next.worker == view.name:
                self._take_back(life, view, out, now)
            elif life.here is not None and life.here.worker == view.name:
                if view.draining:
                    self._hand_on(life, out, now)
                elif view.sheds and not view.suspect and not life.here.passes:
                    self._shed(life, out, now)

    def _take_back(self, life: Life, view: WorkerView, out: list[Command], now: float) -> None:
        """From a worker that waits for room; blocks on their way are let arrive."""
        assert life.next is not None
        if life.here is None and life.next.epoch is not None:
            return
        if life.here is None or view.usable:
            other = self._elsewhere(life, now)
            if other is None or (view.usable and other.role == "prefill"):
                return
        life.revoke(out)
        self.settle(life, out, now)

    def _hand_on(self, life: Life, out: list[Command], now: float) -> None:
        """Its worker drains: the next one is asked first, so that the stop is short."""
        assert life.here is not None
        if life.here.yielding or life.next is not None:
            return
        view = self._elsewhere(life, now)
        if view is None:
            return
        if life.askable and view.info.layout == life.here.info.layout:
            life.ask(view.info, out)
            self.settle(life, out, now)
        else:
            life.ask_yield(out)

    def _shed(self, life: Life, out: list[Command], now: float) -> None:
        """Its worker is to prefill now: it moves if its blocks can, and ends there if not."""
        assert life.here is not None
        if life.here.yielding or life.next is not None or not life.askable:
            return
        view = self._elsewhere(life, now)
        if view is None or view.role == "prefill" or view.info.layout != life.here.info.layout:
            return
        life.ask(view.info, out)
        self.settle(life, out, now)

    def look_at_sources(self, out: list[Command], now: float) -> None:
        """Nobody waits for blocks as long as a transfer may take once their source is gone."""
        for life in list(self.lives.values()):
            if life.look_at_source(out):
                self.settle(life, out, now)

    def revise(self, out: list[Command], now: float) -> None:
        """Take back what waits for room at one worker while another one has it."""
        if not any(view.usable and not view.load.queued for view in self._fleet.views()):
            return
        for life in list(self.lives.values()):
            asked = life.next
            if asked is None or life.lease is None or asked.epoch is not None:
                continue
            if now - life.asked_at < patience_of(life.num_revisions):
                continue
            view, other = self._fleet.get(asked.worker), self._elsewhere(life, now)
            if view is None or other is None or other is view:
                continue
            if has_room_sooner(other, view, life.log.num_known, life.request.num_sequences):
                life.num_revisions += 1
                self.num_revised += 1
                life.revoke(out)
                life.then = other.name
                self.settle(life, out, now)

    def _elsewhere(self, life: Life, now: float) -> WorkerView | None:
        """Where it would be placed now."""
        placement = self._choose(life, self._fleet.views(), now)
        return None if placement is None else self._fleet.get(placement.worker)

    def _choose(self, life: Life, views: Sequence[WorkerView], now: float) -> Placement | None:
        return self._policy.place(self._demand(life), views, self._fleet.handover, now)

    # -------------------------------------------------------------- placing

    def _demand(self, life: Life) -> Demand:
        return Demand(
            life.request.id,
            life.log.num_known,
            life.request.num_sequences,
            life.log.num_left,
            life.lease is not None or life.askable,
            life.unfit,
            life.request.num_beams == 0 and life.request.num_choices > 1,
            self._queue.num_tokens if self._fleet.shallow else 0,
        )

    def _place_again(self, life: Life, out: list[Command], now: float) -> None:
        view = self._fleet.get(life.then)
        if view is not None and view.usable and not view.masked:
            self._place(life, Placement(view.name), out, now)
        else:
            life.then = None
            self._queue.add(_entry(life, again=True))

    def _place(self, life: Life, placement: Placement, out: list[Command], now: float) -> None:
        view = self._fleet.get(placement.worker)
        assert view is not None, "the policy chose a worker that is not there"
        life.place(view.info, placement.yield_after, out)
        life.then = placement.then
        life.asked_at = now
        if placement.decision is not None:
            self.num_decided[str(placement.decision)] += 1
        num_tokens = life.log.num_known if life.next is None else 0
        view.placed(num_tokens, life.request.num_sequences)

    def _count(self, life: Life, now: float) -> None:
        """Enter a request into the views of all workers that have or will have something of it."""
        life.note_work(now)
        request, num_sequences = life.request.id, life.request.num_sequences
        self._uncount(request)
        names = self._counted[request] = []
        lease = life.lease.worker if life.lease is not None else None
        for name in dict.fromkeys((*life.workers(), life.then)):
            view = self._fleet.get(name)
            if view is not None:
                names.append(view.name)
                share = view.share_of(life.log.num_known, num_sequences)
                view.hold(request, None if view.name == lease else share)

    def _uncount(self, request: int) -> None:
        for name in self._counted.pop(request, ()):
            view = self._fleet.get(name)
            if view is not None:
                view.let_go(request)

    # -------------------------------------------------------------- always true

    def check(self) -> None:
        """AssertionError if requests, line and views do not agree."""
        self._queue.check()
        for request, life in self.lives.items():
            lifecycle.check(life)
            assert life.homeless == self.waits(request), "neither placed nor waiting, or both"
            assert not (request in self._queue and request in self._pace), "waits twice"
            names = self._counted.get(request, [])
            for name in life.workers():
                assert self._fleet.get(name) is not None, "held by a worker that is not there"
                assert name in names, "held, but not counted"
        for view in self._fleet.views():
            view.check()
            for request in view.holds:
                assert view.name in self._counted[request], "counted, but not held"


def _entry(life: Life, again: bool) -> Entry:
    request, num_tokens = life.request, len(life.request.prompt)
    return Entry(request.id, request.tenant, request.priority, num_tokens, again, life.since)
