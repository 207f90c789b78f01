"""Keeps the sequences of a worker, each as a group of choices, and removes them."""

from collections.abc import Sequence

import numpy as np

from penstock.workers.scheduling.decode_fast_path import DecodeFastPath
from penstock.workers.scheduling.in_flight import InFlightSteps
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Admitted, Finished, Key, SchedulerEvent, Yielded
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState, WaitingQueue


class SequenceGroups:
    """The choices that wait, receive or run, by the key of their sequence.

    The table row and blocks of a removed choice are released at once or, if it is in steps in
    flight, with the commit of the last of these steps. `events` has the events that
    `Batcher.events` has not returned yet.
    """

    def __init__(
        self,
        table: SequenceTable,
        waiting: WaitingQueue,
        batch: RunningBatch,
        leases: Leases,
        in_flight: InFlightSteps,
        fast_path: DecodeFastPath,
    ) -> None:
        self.events: list[SchedulerEvent] = []
        self._groups: dict[Key, list[SequenceState]] = {}
        self._table = table
        self._waiting = waiting
        self._batch = batch
        self._leases = leases
        self._in_flight = in_flight
        self._fast_path = fast_path

    def __contains__(self, key: Key) -> bool:
        return key in self._groups

    def add(self, key: Key, group: list[SequenceState]) -> None:
        self._groups[key] = group

    def choices(self, key: Key) -> Sequence[SequenceState]:
        """Return the choices of the sequence `key`; empty if the key is unknown."""
        return self._groups.get(key, ())

    def sequences(self) -> list[SequenceState]:
        return [ticket for group in self._groups.values() for ticket in group]

    def receiver(self, key: Key) -> SequenceState | None:
        """Return the choice of the sequence `key` that awaits a KV transfer, or None."""
        return next(
            (one for one in self.choices(key) if one.phase is SequencePhase.RECEIVING), None
        )

    # ------------------------------------------------------------ removal

    def drop(self, key: Key) -> None:
        """Remove a sequence and its pending events; if the sequence has yielded, drop its lease."""
        self.events = [event for event in self.events if event.key != key]
        if key not in self._groups:
            self._leases.drop(key)
        for ticket in self._groups.pop(key, ()):
            self._release(ticket)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove a choice; emit `Finished` after the last one. Ignore beams and unknown choices."""
        group = self.choices(key)
        ticket = next((one for one in group if one.choice == choice), None)
        if ticket is None or ticket.beams:
            return
        if ticket.forks:
            ticket.is_cancelled = True  # kept until its forks no longer need its prompt
            return
        over = [ticket]
        for leader in group:
            if ticket in leader.forks:
                self._batch.remove_fork(leader, ticket)
                if leader.is_cancelled and not leader.forks:
                    over.append(leader)
        for ticket in over:
            self._release(ticket)
            self.choice_ended(ticket)

    def finish(self, key: Key) -> None:
        """Remove all choices of a sequence and emit `Finished`; ignore an unknown key."""
        for ticket in list(self.choices(key)):
            self._release(ticket)
            self.choice_ended(ticket)

    def finish_row(self, row: int) -> None:
        """End the choice that runs in table row `row`."""
        ticket = self._batch.sequence(row)
        self._release_row(ticket)
        self.choice_ended(ticket)

    def forget_preempted(self, first: int) -> None:
        """Remove `Admitted` events of choices that have been preempted since their admission.

        Args:
            first: index of the first event to check; earlier events belong to earlier steps.
        """
        table = self._table
        self.events[first:] = [
            event
            for event in self.events[first:]
            if not isinstance(event, Admitted)
            or (table.keys[event.row], table.choices[event.row]) == (event.key, event.choice)
        ]

    def choice_ended(self, ticket: SequenceState) -> None:
        """Take an ended choice out of its group; emit `Finished` if it was the last."""
        group = self._groups[ticket.key]
        group.remove(ticket)
        if not group:
            del self._groups[ticket.key]
            self.events.append(Finished(ticket.key))

    def _release_row(self, ticket: SequenceState) -> None:
        """Release row and blocks now or, if steps in flight have them, at the last commit."""
        if not self._in_flight.release_row(ticket):
            self._fast_path.invalidate()

    def _release(self, ticket: SequenceState) -> None:
        """Release the resources of a choice in its phase: queue entry, reserved blocks, or row."""
        if ticket.phase is SequencePhase.WAITING:
            self._waiting.remove(ticket)
        elif ticket.row < 0:
            return  # a fork whose leader waits holds no resources
        elif ticket.phase is SequencePhase.RECEIVING:
            self._leases.abandon(ticket.key, self._batch.reserved(ticket))
            self._batch.release_row(ticket)
        else:
            self._release_row(ticket)

    # ------------------------------------------------------------ yielding

    def request_yield(self, key: Key) -> None:
        """Make a sequence yield as soon as no step and no KV transfer uses it.

        An unknown key is ignored.
        """
        group = self.choices(key)
        for ticket in group:
            ticket.yield_len = 0
            if ticket.row >= 0:
                self._table.yield_len[ticket.row] = 0
        self._fast_path.invalidate()
        if group:
            self.yield_if_due(key)

    def yield_if_due(self, key: Key) -> None:
        """Yield a sequence and lease its blocks, if it is due and not in a step or KV transfer."""
        group, table = self._groups[key], self._table
        in_batch = [ticket for ticket in group if ticket.row >= 0]
        if any(
            one.phase is SequencePhase.RECEIVING or self._in_flight.holds(one) for one in in_batch
        ):
            return
        rows = np.array([ticket.row for ticket in in_batch], np.int32)
        if in_batch and not (table.num_tokens[rows] >= table.yield_len[rows]).any():
            return
        running = [ticket for ticket in in_batch if ticket.phase is SequencePhase.RUNNING]
        longest = max(running, key=lambda one: int(table.num_computed[one.row]), default=None)
        kv_len = int(table.num_computed[longest.row]) if longest else 0
        if len(group) > 1:  # the choices share only the prompt
            new = group[0].new
            kv_len = min(kv_len, new.num_prompt - new.params.use_beam_search)
        if longest and kv_len:
            blocks = self._batch.release_row(longest, num_kept=-(-kv_len // table.block_size))
            self._leases.grant(key, blocks, kv_len)
            group.remove(longest)
        for ticket in group:
            self._release(ticket)
        del self._groups[key]
        self.events.append(Yielded(key, kv_len))
