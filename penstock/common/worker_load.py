"""The load that a worker reports to routers after every step.

The engine produces the record. Routing, status pages, metrics, the autoscaler and the simulator
read the record.
"""

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """A worker's load. Totals count from the start of the worker's process.

    A NamedTuple, because a router creates one for every step of every worker, and creating a frozen
    dataclass takes twice as long.

    Attributes:
        queued: sequences that wait to join the running batch.
        queued_tokens: prompt tokens not yet computed, of queued and running sequences.
        running: sequences in the running batch.
        free_blocks: KV blocks without content.
        cached_blocks: KV blocks held only by the prefix cache; free for reuse at any time.
        leased_blocks: KV blocks kept for sequences that have yielded.
        reserved_blocks: KV blocks into which a KV transfer writes.
        used_blocks: KV blocks of running sequences.
        unwritten_slots: token slots of the used blocks that hold no token yet.
        last_step_seconds: duration of the last step.
        num_steps: total of steps.
        step_counts: total of steps for each bucket of the worker's histogram of step durations, in
            ascending order; the last bucket is for steps longer than every bound.
        step_seconds: total duration of all steps.
        prompt_seconds: total duration of the steps that computed prompt tokens.
        prompt_tokens_computed: total of prompt tokens run through the model.
        prompt_tokens_cached: total of prompt tokens found in the prefix cache.
        preemptions: total of sequences put back into the queue for lack of KV blocks.
        bytes_received: total of KV bytes received from other workers.
        bytes_sent: total of KV bytes sent to other workers.
        expert_imbalance: recent load of the busiest expert divided by the mean load of all experts;
            0 if unknown.
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
        """Number of used, leased or reserved KV blocks, which no other sequence can take."""
        return self.used_blocks + self.leased_blocks + self.reserved_blocks

    @property
    def num_blocks(self) -> int:
        """Number of all KV blocks of the worker."""
        return self.held_blocks + self.cached_blocks + self.free_blocks

    @property
    def kv_usage(self) -> float:
        """Held KV blocks as a fraction of all KV blocks, from 0 to 1."""
        return self.held_blocks / max(self.num_blocks, 1)


NO_LOAD = WorkerLoad()
"""The load of a worker that has not reported yet."""
