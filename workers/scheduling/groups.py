"""Everybody who is here: the choices of each sequence as one group, and how they leave."""

from collections.abc import Sequence

import numpy as np

from penstock.workers.scheduling.flight import Flight
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.seats import Seats
from penstock.workers.scheduling.sequence import Admitted, Finished, Key, SchedulerEvent, Yielded
from penstock.workers.scheduling.steady import Steady
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import Phase, Ticket, WaitingQueue


class Groups:
    """The choices that wait, receive or run, by the key of their sequence.

    Who leaves gives back what it holds: now, or with the commit of the last step that it is in.
    `events` are those that nobody has been told of yet.
    """

    def __init__(
        self,
        table: SequenceTable,
        waiting: WaitingQueue,
        seats: Seats,
        leases: Leases,
        flight: Flight,
        steady: Steady,
    ) -> None:
        self.events: list[SchedulerEvent] = []
        self._tickets: dict[Key, list[Ticket]] = {}
        self._table = table
        self._waiting = waiting
        self._seats = seats
        self._leases = leases
        self._flight = flight
        self._steady = steady

    def __contains__(self, key: Key) -> bool:
        return key in self._tickets

    def add(self, key: Key, group: list[Ticket]) -> None:
        self._tickets[key] = group

    def of(self, key: Key) -> Sequence[Ticket]:
        """None for a key that is unknown."""
        return self._tickets.get(key, ())

    def tickets(self) -> list[Ticket]:
        return [ticket for group in self._tickets.values() for ticket in group]

    def receiver(self, key: Key) -> Ticket | None:
        """The one whose blocks are on their way."""
        return next((one for one in self.of(key) if one.phase is Phase.RECEIVING), None)

    # ------------------------------------------------------------ leaving

    def drop(self, key: Key) -> None:
        """Let all of it go, and never speak of it again; unknown: its lease, if there is one."""
        self.events = [event for event in self.events if event.key != key]
        if key not in self._tickets:
            self._leases.drop(key)
        for ticket in self._tickets.pop(key, ()):
            self._let_go(ticket)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Let one choice go; `Finished` if it was the last one. Unknown, or a beam: nothing."""
        group = self.of(key)
        ticket = next((one for one in group if one.choice == choice), None)
        if ticket is None or ticket.beams:
            return
        if ticket.followers:
            ticket.unwanted = True  # until they have what they wait for
            return
        over = [ticket]
        for leader in group:
            if ticket in leader.followers:
                self._seats.unfollow(leader, ticket)
                if leader.unwanted and not leader.followers:
                    over.append(leader)
        for ticket in over:
            self._let_go(ticket)
            self.ended(ticket)

    def finish(self, key: Key) -> None:
        """Let all of it go. `Finished`; unknown: nothing."""
        for ticket in list(self.of(key)):
            self._let_go(ticket)
            self.ended(ticket)

    def finish_row(self, row: int) -> None:
        """The choice that runs in that row is over."""
        ticket = self._seats.ticket(row)
        self._leave(ticket)
        self.ended(ticket)

    def forget_preempted(self, first: int) -> None:
        """Remove `Admitted` events of choices that have lost their row again.

        Args:
            first: index of the first event to look at; the earlier ones are of earlier steps.
        """
        table = self._table
        self.events[first:] = [
            event
            for event in self.events[first:]
            if not isinstance(event, Admitted)
            or (table.keys[event.row], table.choices[event.row]) == (event.key, event.choice)
        ]

    def ended(self, ticket: Ticket) -> None:
        """One choice is over, and holds nothing any more."""
        group = self._tickets[ticket.key]
        group.remove(ticket)
        if not group:
            del self._tickets[ticket.key]
            self.events.append(Finished(ticket.key))

    def _leave(self, ticket: Ticket) -> None:
        """Give up its row and blocks, now or with the commit of the last step that it is in."""
        if not self._flight.leave(ticket):
            self._steady.forget()

    def _let_go(self, ticket: Ticket) -> None:
        """Give back what it holds, now or with the commit of the step in flight."""
        if ticket.phase is Phase.WAITING:
            self._waiting.remove(ticket)
        elif ticket.row < 0:
            return  # it follows one that waits
        elif ticket.phase is Phase.RECEIVING:
            self._leases.abandon(ticket.key, self._seats.reserved(ticket))
            self._seats.leave(ticket)
        else:
            self._leave(ticket)

    # ------------------------------------------------------------ yielding

    def ask_yield(self, key: Key) -> None:
        """Have it yield at its next boundary, which may be now; unknown: nothing."""
        group = self.of(key)
        for ticket in group:
            ticket.yield_len = 0
            if ticket.row >= 0:
                self._table.yield_len[ticket.row] = 0
        self._steady.forget()
        if group:
            self.yield_if_due(key)

    def yield_if_due(self, key: Key) -> None:
        """Lease its blocks and let the rest go, if it is to yield and no step works on it."""
        group, table = self._tickets[key], self._table
        seated = [ticket for ticket in group if ticket.row >= 0]
        if any(one.phase is Phase.RECEIVING or self._flight.holds(one) for one in seated):
            return
        rows = np.array([ticket.row for ticket in seated], np.int32)
        if seated and not (table.num_tokens[rows] >= table.yield_len[rows]).any():
            return
        running = [ticket for ticket in seated if ticket.phase is Phase.RUNNING]
        keeper = max(running, key=lambda one: int(table.num_computed[one.row]), default=None)
        kv_len = int(table.num_computed[keeper.row]) if keeper else 0
        if len(group) > 1:  # what all have, or will have, in common
            new = group[0].new
            kv_len = min(kv_len, new.num_prompt - new.params.use_beam_search)
        if keeper and kv_len:
            blocks = self._seats.leave(keeper, num_kept=-(-kv_len // table.block_size))
            self._leases.grant(key, blocks, kv_len)
            group.remove(keeper)
        for ticket in group:
            self._let_go(ticket)
        del self._tickets[key]
        self.events.append(Yielded(key, kv_len))
