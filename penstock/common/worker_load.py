"""The load that a worker reports to routers after every step.

The engine of the worker produces the record. Routing, status pages, metrics, the autoscaler and the
simulator read it.
"""

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """The load of a worker. Totals count from the start of the worker's process.

    The class is a NamedTuple, because a router creates an instance for every step of every worker.
    Creating a frozen dataclass takes twice as long.

    Attributes:
        queued: number of sequences that wait to join the running batch.
        queued_tokens: number of prompt tokens that queued and running sequences still have to
            compute.
        running: number of sequences in the running batch.
        free_blocks: number of KV blocks without content.
        cached_blocks: number of KV blocks that only the prefix cache holds, so that they can be
            reused at any time.
        leased_blocks: number of KV blocks that are kept for sequences that have yielded.
        reserved_blocks: number of KV blocks into which a KV transfer writes.
        used_blocks: number of KV blocks of running sequences.
        unwritten_slots: number of token slots of the used blocks that hold no token yet.
        last_step_seconds: duration of the last step.
        num_steps: total number of steps.
        step_counts: total number of steps in each bucket of the worker's histogram of step
            durations, in ascending order. The last bucket is for steps longer than every bound.
        step_seconds: total duration of all steps.
        prompt_seconds: total duration of the steps that computed prompt tokens.
        prompt_tokens_computed: total number of prompt tokens that the model computed.
        prompt_tokens_cached: total number of prompt tokens that the prefix cache had.
        preemptions: total number of times that a sequence was put back into the queue for lack of
            KV blocks.
        bytes_received: total number of KV bytes received from other workers.
        bytes_sent: total number of KV bytes sent to other workers.
        expert_imbalance: recent load of the busiest expert divided by the mean load of all experts,
            or 0 if unknown.
        step_token_counts: total number of steps in each bucket of the worker's histogram of tokens
            per step, in ascending order. The last bucket is for steps with more tokens than every
            bound.
        step_tokens: total number of tokens of all steps: prompt tokens that the model computed, and
            generated tokens.
        receiving: number of sequences of the running batch that wait for a KV transfer.
        awaiting_grammar: number of sequences that wait until their grammar is compiled. They are
            not in the queue yet.
    """

    queued: int = 0
    queued_tokens: int = 0
    running: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    leased_blocks: int = 0
    reserved_blocks: int = 0
    used_blocks: int = 0
    unwritten_slots: int = 0
    last_step_seconds: float = 0.0
    num_steps: int = 0
    step_counts: tuple[int, ...] = ()
    step_seconds: float = 0.0
    prompt_seconds: float = 0.0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    preemptions: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    expert_imbalance: float = 0.0
    step_token_counts: tuple[int, ...] = ()
    step_tokens: int = 0
    receiving: int = 0
    awaiting_grammar: int = 0

    @property
    def deferred(self) -> int:
        """Number of sequences that wait for a KV transfer or for their grammar.

        These sequences do not wait for room in the running batch.
        """
        return self.receiving + self.awaiting_grammar

    @property
    def held_blocks(self) -> int:
        """Number of used, leased or reserved KV blocks. No other sequence can take these."""
        return self.used_blocks + self.leased_blocks + self.reserved_blocks

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks of the worker."""
        return self.held_blocks + self.cached_blocks + self.free_blocks

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that are used, leased or reserved, from 0 to 1."""
        return self.held_blocks / max(self.num_blocks, 1)


NO_LOAD = WorkerLoad()
"""The load of a worker that has not reported yet."""
