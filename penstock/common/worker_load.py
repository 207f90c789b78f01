"""WorkerLoad: how busy a worker is, as it reports to routers after every step.

The engine produces it, the wire carries it, and routing, status pages, metrics, the autoscaler and
the simulator read it.
"""

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """A worker's load. Totals are since the start of its process; an idle new worker has zeros.

    A NamedTuple is built in half the time of a frozen dataclass, and a router builds one for every
    step of every worker.

    Attributes:
        queued: sequences that wait for a row of the running batch.
        queued_tokens: prompt tokens not yet computed, of queued and running sequences.
        running: sequences in the running batch.
        free_blocks: KV blocks without content.
        cached_blocks: KV blocks that only the prefix cache holds; they are reused at once.
        leased_blocks: KV blocks kept for sequences that have yielded.
        reserved_blocks: KV blocks that a transfer writes.
        used_blocks: KV blocks of running sequences.
        unwritten_slots: token slots of the used blocks that hold nothing.
        last_step_seconds: duration of the last step.
        num_steps: total of steps.
        step_counts: total of steps by duration: one entry for each bound of the worker's
            histogram (the upper end of a bucket), and a last one for longer steps.
        step_seconds: total duration of all steps.
        prompt_seconds: total duration of the steps that computed prompt tokens.
        prompt_tokens_computed: total of prompt tokens run through the model.
        prompt_tokens_cached: total of prompt tokens found in the prefix cache.
        preemptions: total of sequences put back into the queue for lack of KV blocks.
        bytes_received: total of KV bytes received from other workers.
        bytes_sent: total of KV bytes sent to other workers.
        expert_imbalance: recent load of the busiest expert relative to the mean, for a mixture of
            experts; 0 if unknown.
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

    @property
    def held_blocks(self) -> int:
        """KV blocks that no other sequence can take: used, leased or reserved."""
        return self.used_blocks + self.leased_blocks + self.reserved_blocks

    @property
    def num_blocks(self) -> int:
        """All KV blocks of the worker."""
        return self.held_blocks + self.cached_blocks + self.free_blocks

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that is held, from 0 to 1."""
        return self.held_blocks / max(self.num_blocks, 1)


NO_LOAD = WorkerLoad()
"""The load of a worker that has not reported yet."""
