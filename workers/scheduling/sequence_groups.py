"""Keeps the sequences of a worker, each as a group of choices; forks, yields and removes them."""

from collections.abc import Sequence

import numpy as np

from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    Ints,
    Key,
    Reserved,
    SchedulerEvent,
    Yielded,
)
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState


class SequenceGroups:
    """The choices that wait, run or receive a KV transfer, by the key of their sequence.

    When a choice is removed, its table row and blocks are released immediately. If steps in flight
    have the choice, row and blocks are released when the last of these steps commits. `events` has
    the events that `Batcher.events` has not returned yet.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.events: list[SchedulerEvent] = []
        self._groups: dict[Key, list[SequenceState]] = {}
        self._table, self._pool = state.table, state.pool
        self._waiting = state.waiting
        self._batch = state.batch
        self._leases = state.leases
        self._in_flight = state.in_flight
        self._fast_path = state.fast_path

    def __contains__(self, key: Key) -> bool:
        return key in self._groups

    def add(self, key: Key, group: list[SequenceState]) -> None:
        self._groups[key] = group

    def sequences(self) -> list[SequenceState]:
        return [ticket for group in self._groups.values() for ticket in group]

    # ------------------------------------------------------------ forks and KV transfers

    def start_forks(self) -> list[int]:
        """Start the forks whose prompt is computed.

        Returns:
            The table rows of cancelled choices that end now, because their forks have started and
            no longer need their prompts.
        """
        batch, rows = self._batch, []
        for leader in [one for one in batch.fork_parents if one.phase is SequencePhase.RUNNING]:
            row = leader.row
            if batch.fork_if_due(leader) and leader.is_cancelled:
                rows.append(row)
                batch.release_row(leader)
                self.choice_ended(leader)
        return rows

    def reserved_blocks(self, key: Key) -> Ints:
        """Return the blocks that a KV transfer writes; KeyError if `key` is not receiving."""
        ticket = self._receiver(key)
        if ticket is None:
            raise KeyError(key)
        return self._batch.reserved(ticket)

    def end_receiving(self, key: Key, arrived: bool) -> None:
        """Run a sequence after its KV transfer; do nothing if the sequence is not receiving.

        Args:
            key: key of the sequence.
            arrived: True if the transfer has written all positions of the source.
        """
        ticket = self._receiver(key)
        if ticket is None:
            return
        if arrived:
            self._table.num_computed[ticket.row] = ticket.source_len
        self._batch.run(ticket)
        rows = np.array([ticket.row], np.int32)
        self._batch.publish(rows, self._table.num_computed[rows])
        if ticket.forks:
            self.start_forks()
        if key in self._groups:
            self.yield_if_due(key)

    # ------------------------------------------------------------ removal

    def drop(self, key: Key) -> None:
        """Remove a sequence and its pending events; if the sequence has yielded, drop its lease."""
        removed = [event for event in self.events if event.key == key]
        self.events = [event for event in self.events if event.key != key]
        if key not in self._groups:
            self._leases.drop(key)
        for ticket in self._groups.pop(key, ()):
            self._release(ticket)
        if any(isinstance(event, Reserved) for event in removed):
            # Nobody knows of the reserved blocks, so no transfer writes to them.
            self._leases.release_abandoned(key)

    def fail(self, key: Key) -> None:
        """Drop a sequence with non-finite logits; unpublish its blocks to prevent their reuse."""
        for ticket in self._choices(key):
            if ticket.phase is SequencePhase.RUNNING:
                self._pool.forget(self._table.blocks(ticket.row))
                self._batch.stop_publishing([ticket.row])
        self.drop(key)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove a choice; emit `Finished` if none is left. Ignore beams and unknown choices."""
        group = self._choices(key)
        ticket = next((one for one in group if one.choice == choice), None)
        if ticket is None or ticket.beams:
            return
        if ticket.forks:
            ticket.is_cancelled = True  # the choice is kept while its forks need its prompt
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
        for ticket in list(self._choices(key)):
            self._release(ticket)
            self.choice_ended(ticket)

    def finish_row(self, row: int) -> None:
        """End the choice that runs in table row `row`."""
        ticket = self._batch.sequence(row)
        self._release(ticket)
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

    def _release(self, ticket: SequenceState) -> None:
        """Release the resources that a choice has: its queue entry, reserved blocks or row.

        If steps in flight have the row, row and blocks are released when the last of them commits.
        """
        if ticket.phase is SequencePhase.WAITING:
            self._waiting.remove(ticket)
        elif ticket.row < 0:
            return  # a fork whose leader waits holds no resources
        elif ticket.phase is SequencePhase.RECEIVING:
            self._leases.abandon(ticket.key, self._batch.reserved(ticket))
            self._batch.release_row(ticket)
        elif not self._in_flight.release_row(ticket):
            self._fast_path.invalidate()  # needed because `RunningBatch.rows` still has the row

    # ------------------------------------------------------------ yielding

    def request_yield(self, key: Key) -> None:
        """Make a sequence yield as soon as no step and no KV transfer uses it.

        An unknown key is ignored.
        """
        group = self._choices(key)
        for ticket in group:
            ticket.yield_len = 0
            if ticket.row >= 0:
                self._table.yield_len[ticket.row] = 0
        self._fast_path.invalidate()
        if group:
            self.yield_if_due(key)

    def yield_if_due(self, key: Key) -> None:
        """Yield a sequence and lease its blocks, if its yield is due and possible now.

        A sequence may not yield while it is in a step in flight or receives KV.
        """
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

    # ------------------------------------------------------------ look-up

    def _choices(self, key: Key) -> Sequence[SequenceState]:
        """Return the choices of the sequence `key`; empty if the key is unknown."""
        return self._groups.get(key, ())

    def _receiver(self, key: Key) -> SequenceState | None:
        """Return the choice of the sequence `key` that awaits a KV transfer, or None."""
        return next(
            (one for one in self._choices(key) if one.phase is SequencePhase.RECEIVING), None
        )
