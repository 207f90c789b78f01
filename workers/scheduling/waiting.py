"""Sequences that wait for a row: by priority, then by arrival."""

import heapq
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from penstock.common.block_hash import extend_chain
from penstock.workers.scheduling.sequence import NEVER, Ints, Key, NewSequence, Sibling


class SequencePhase(Enum):
    """Where a submitted sequence stands."""

    WAITING = auto()  # in the queue, without a row
    RECEIVING = auto()  # has a row; its blocks are being written from elsewhere
    RUNNING = auto()  # has a row and is scheduled
    AWAITING_FORK = auto()  # goes on from another choice's prompt, once that is computed


@dataclass(slots=True, eq=False)
class SequenceState:
    """A submitted sequence: what is known of it beside its row of the table."""

    new: NewSequence
    arrival: int  # of arrival; kept when it is preempted, so that it returns to its place
    tokens: Ints  # [num_tokens] while it waits; the table's from then on
    yield_len: int
    source_len: int  # positions that may still come from elsewhere
    phase: SequencePhase = SequencePhase.WAITING
    row: int = -1  # while it has one
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as needed yet
    choice: int = 0
    prompt_known: int = NEVER  # prompt positions from here on want logprobs
    forks: list["SequenceState"] = field(default_factory=list)  # they wait for its prompt
    is_cancelled: bool = False  # dropped, but others follow it
    beams: list["SequenceState"] = field(default_factory=list)  # of its search, itself among them

    @property
    def key(self) -> Key:
        return self.new.key

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first has the smaller one."""
        return -self.new.priority, self.arrival

    @property
    def num_uncomputed(self) -> int:
        own = sum(len(follower.tokens) - self.new.num_prompt for follower in self.forks)
        return len(self.tokens) - self.source_len + own

    def num_reusable(self, block_size: int) -> int:
        """Blocks that may be found in the cache: what must be computed is not read from there.

        At least the last token must be: the next one is drawn from its logits. So must be every
        prompt token whose successor's logprobs are wanted.
        """
        return (min(len(self.tokens), self.prompt_known) - 1) // block_size

    def chain(self, tokens: Ints, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks of `tokens`, which are this sequence's."""
        if len(self.hashes) < num_blocks:
            prefix = tokens[: num_blocks * block_size]
            extend_chain(self.hashes, self.new.salt, prefix, block_size)
        return self.hashes[:num_blocks]


def make_sequence_states(new: NewSequence, arrival: int) -> list[SequenceState]:
    """One for each of its choices; the first, which gets `number`, leads: the others follow it."""
    # One that draws its first token from the prompt has to lead: the others can follow it.
    siblings = sorted(
        (Sibling(new.choice, new.tokens), *new.siblings), key=lambda one: len(one.tokens)
    )
    # A search yields nothing but its prompt, without the last token, which it draws from.
    in_vain = new.params.use_beam_search and new.num_prompt == 1
    yield_after = NEVER if in_vain else new.yield_after or NEVER
    tickets = [
        SequenceState(
            new=new,
            arrival=arrival + index,
            tokens=np.frombuffer(array("i", one.tokens), np.int32),  # faster than from a list
            yield_len=min(len(one.tokens) + yield_after, NEVER),
            source_len=new.source_len,
            choice=one.choice,
            phase=SequencePhase.AWAITING_FORK if index else SequencePhase.WAITING,
        )
        for index, one in enumerate(siblings)
    ]
    leader, *leader.forks = tickets
    if new.params.prompt_logprobs is not None and new.prompt_known < new.num_prompt:
        leader.prompt_known = new.prompt_known
    if new.params.use_beam_search:
        for ticket in tickets:
            ticket.beams = tickets.copy()
    return tickets


class WaitingQueue:
    """A heap; what is taken out of its middle stays in it as a shadow until it surfaces."""

    def __init__(self) -> None:
        self.num_tokens = 0  # to compute, over all that wait
        self._heap: list[tuple[tuple[int, int], SequenceState]] = []
        self._waiting: set[int] = set()  # numbers

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, ticket: SequenceState) -> None:
        heapq.heappush(self._heap, (ticket.order, ticket))
        self._waiting.add(ticket.arrival)
        self.num_tokens += ticket.num_uncomputed

    def head(self) -> SequenceState | None:
        """Who is next, left in its place."""
        while self._heap and self._heap[0][1].arrival not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, ticket: SequenceState) -> None:
        """Take one out, wherever it stands."""
        if self._heap[0][1] is ticket:
            heapq.heappop(self._heap)  # only these come back, after a preemption: no shadow of them
        self._waiting.remove(ticket.arrival)
        self.num_tokens -= ticket.num_uncomputed
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[1].arrival in self._waiting]
            heapq.heapify(self._heap)
