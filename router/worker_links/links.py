"""The streams to all workers that are wanted, and what those with an open one said."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from penstock.protos import worker_pb2
from penstock.router.requests.request import ModelLimits
from penstock.router.routing import events as ev
from penstock.router.worker_links.worker_link import RouterIdentity, WorkerLink

log = logging.getLogger(__name__)


class WorkerLinks:
    """One link a worker.

    Args:
        identity: who the router is.
        tell: takes the events of all of them.
    """

    def __init__(self, identity: RouterIdentity, post: Callable[[ev.Event], None]) -> None:
        self._identity = identity
        self._post = post
        self._links: dict[str, WorkerLink] = {}
        self._welcomes: dict[str, worker_pb2.Welcome] = {}  # of workers whose stream is open

    def __len__(self) -> int:
        """Workers whose stream is open."""
        return len(self._welcomes)

    def model_limits(self, own: ModelLimits) -> ModelLimits:
        """The model's own bounds, or those of the workers at hand where they are tighter."""
        welcomes = self._welcomes.values()
        return ModelLimits(
            own.name,
            min([own.max_model_len, *(welcome.max_model_len for welcome in welcomes)]),
            min([own.vocab_size, *(welcome.vocab_size for welcome in welcomes)]),
            own.eos_tokens.union(*(welcome.eos_tokens for welcome in welcomes)),
        )

    def all_links(self) -> Sequence[WorkerLink]:
        """The links to all workers that are wanted, with or without an open stream."""
        return list(self._links.values())

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Keep streams to exactly these workers, given as name: host:port."""
        gone = [link for name, link in self._links.items() if addresses.get(name) != link.address]
        for link in gone:
            del self._links[link.worker]
        await asyncio.gather(*(link.stop() for link in gone))
        for name, address in addresses.items():
            if name not in self._links:
                self._links[name] = WorkerLink(
                    name, address, self._identity, self._on_event, self._on_welcome
                )

    def send(self, command: ev.Submit | ev.Yield | ev.Send | ev.Drop) -> None:
        """Send a command to the worker that it names; nothing if there is no stream."""
        link = self._links.get(command.worker)
        if link is not None:
            link.send(command)

    def close(self, worker: str, reason: str) -> str:
        """Close the stream to a worker; it is opened again while the worker is wanted. Returns the
        address that it was to, empty if there is none any more."""
        link = self._links.get(worker)
        if link is None:
            return ""
        link.close(reason)
        return link.address

    def _on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerLost):
            self._welcomes.pop(event.worker, None)
        self._post(event)

    def _on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        others = {other.model for other in self._welcomes.values()}
        if others and welcome.model not in others:
            raise ValueError("it serves another model than the workers before it")
        self._compare_layouts(welcome)
        self._welcomes[welcome.worker] = welcome

    def _compare_layouts(self, welcome: worker_pb2.Welcome) -> None:
        """Say where a worker's keys and values are of no use to another: all else goes on."""
        other = next((w for w in self._welcomes.values() if w.layout != welcome.layout), None)
        if other is not None:
            log.warning(
                "worker %s and worker %s hand nothing over to each other, and compute prompts "
                "again instead: their caches differ (%s, %s); give both the same dtype, "
                "kv_cache_dtype and deterministic",
                *(welcome.worker, other.worker),
                *(each.layout.rpartition(" ")[2] for each in (welcome, other)),
            )
