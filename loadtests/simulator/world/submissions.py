"""Converts submissions of routers into sequences of the batcher.

Models `workers/service/codec`.
"""

from array import array
from collections.abc import Sequence

from penstock.loadtests.simulator.world.session import Key
from penstock.router.routing.events import Submit, WorkerInfo
from penstock.workers.scheduling import sequence as seq


def new_sequence(key: Key, submit: Submit, worker: WorkerInfo) -> seq.NewSequence:
    """Return the sequence to submit to the batcher of `worker`.

    The sequence's `source_len` is 0 if no KV can be received. Examples are a source that is this
    worker itself, or a source with another layout.
    """
    request, source = submit.request, submit.source
    first, *others = [
        seq.Sibling(choice, _joined(request.prompt, answer))
        for choice, answer in enumerate(submit.log)
        if not submit.finished[choice]
    ]
    name = (worker.worker, worker.incarnation)
    own = source is not None and (source.worker, source.incarnation) == name
    source_len = 0
    if source is not None and not own and source.layout == worker.layout:
        lengths = [len(one.tokens) for one in (first, *others)]
        source_len = seq.usable_source(source.kv_len, len(request.prompt), lengths)
    return seq.NewSequence(
        key=key,
        tokens=first.tokens,
        num_prompt=len(request.prompt),
        params=request.params,
        choice=first.choice,
        yield_after=submit.yield_after,
        salt=request.salt,
        source_len=source_len,
        siblings=tuple(others),
    )


def _joined(prompt: Sequence[int], answer: Sequence[int]) -> Sequence[int]:
    """Return prompt and answer as one sequence. An array stays an array, since lists are slow."""
    if not answer:
        return prompt
    if isinstance(prompt, array):
        return prompt + array("i", answer)
    return [*prompt, *answer]
