"""Queue of the sequences that wait for a table row, in order of arrival."""

import heapq
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from penstock.common.block_hash import extend_chain, root_hash
from penstock.workers.scheduling.sequence import NEVER, Ints, Key, NewSequence, Sibling


class SequencePhase(Enum):
    """Phase of a submitted sequence."""

    WAITING = auto()  # the sequence is in the queue and has no row
    RECEIVING = auto()  # the sequence has a row, and a KV transfer writes its blocks
    RUNNING = auto()  # the sequence has a row and is scheduled
    AWAITING_FORK = auto()  # the choice starts once another choice has computed the prompt


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one choice of a submitted sequence, without the state in the sequence table."""

    new: NewSequence
    arrival: int  # arrival number, by which the queue is sorted; kept after a preemption
    # [num_tokens] prompt and answer; unused while the choice has a row, because the sequence table
    # then has the tokens
    tokens: Ints
    yield_len: int
    source_len: int  # number of KV positions that a transfer may still provide
    phase: SequencePhase = SequencePhase.WAITING
    row: int = -1  # row of the sequence table; -1: none
    root: bytes = b""  # result of `root_hash`, used as the parent hash of the first block
    # hashes of the first full blocks; grows on demand
    hashes: list[bytes] = field(default_factory=list)
    choice: int = 0
    prompt_known: int = NEVER  # first prompt position that needs logprobs; NEVER: none does
    forks: list["SequenceState"] = field(default_factory=list)  # choices that wait for this prompt
    is_cancelled: bool = False  # True: dropped, but kept because the forks still need the prompt
    # all beams of this sequence's beam search
    beams: list["SequenceState"] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.new.key

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens to compute for this choice and its forks.

        Tokens whose KV another worker can send are not counted.
        """
        own = sum(len(follower.tokens) - self.new.num_prompt for follower in self.forks)
        return len(self.tokens) - self.source_len + own

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens whose KV may be taken from the prefix cache.

        The last token must be computed, because the next token is sampled from its logits. A prompt
        token must also be computed if the logprobs of the token after it are requested.
        """
        return min(len(self.tokens), self.prompt_known) - 1

    def chain(self, tokens: Ints, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the hashes of the first `num_blocks` full blocks of this sequence's `tokens`."""
        if len(self.hashes) < num_blocks:
            prefix = tokens[: num_blocks * block_size]
            extend_chain(self.hashes, self.root, prefix, block_size)
        return self.hashes[:num_blocks]


def make_sequence_states(new: NewSequence, arrival: int, hash_key: bytes) -> list[SequenceState]:
    """Return one state per choice: the leader, with arrival number `arrival`, then its forks."""
    root = root_hash(hash_key, new.salt)
    # The shortest choice is the leader.
    # Choices without an answer sample their first token from the leader's logits.
    siblings = sorted(
        (Sibling(new.choice, new.tokens), *new.siblings), key=lambda one: len(one.tokens)
    )
    # The lease of a yielded beam search has all prompt tokens except the last.
    # With a prompt of one token it would be empty, so such a search never yields.
    in_vain = new.params.use_beam_search and new.num_prompt == 1
    yield_after = NEVER if in_vain else new.yield_after or NEVER
    tickets = [
        SequenceState(
            new=new,
            arrival=arrival + index,
            # this is faster than `np.array`
            tokens=np.frombuffer(array("i", one.tokens), np.int32),
            yield_len=min(len(one.tokens) + yield_after, NEVER),
            source_len=new.source_len,
            choice=one.choice,
            root=root,
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
    """A heap with lazy deletion: a removed entry may stay in the heap until it reaches the top."""

    def __init__(self) -> None:
        self.num_tokens = 0  # tokens to compute, over all waiting sequences
        self._heap: list[tuple[int, SequenceState]] = []
        # Tokens that `num_tokens` counts for each waiting sequence, by its arrival number. After a
        # choice of the sequence was dropped, fewer tokens are left to compute.
        self._waiting: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, ticket: SequenceState) -> None:
        heapq.heappush(self._heap, (ticket.arrival, ticket))
        self._waiting[ticket.arrival] = ticket.num_uncomputed
        self.num_tokens += ticket.num_uncomputed

    def head(self) -> SequenceState | None:
        """Return the next sequence without removing it; None if the queue is empty."""
        while self._heap and self._heap[0][1].arrival not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, ticket: SequenceState) -> None:
        """Remove a sequence from any position in the queue."""
        if self._heap[0][1] is ticket:
            # Pop the entry now, so that the heap never contains the sequence twice.
            # A sequence that was the head may be pushed again after a preemption.
            heapq.heappop(self._heap)
        self.num_tokens -= self._waiting.pop(ticket.arrival)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[1].arrival in self._waiting]
            heapq.heapify(self._heap)
