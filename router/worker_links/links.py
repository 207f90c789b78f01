"""The set of worker links of a router, and the Welcome messages of connected workers."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from penstock.protos import worker_pb2
from penstock.router.requests.request import ModelLimits
from penstock.router.routing import events as ev
from penstock.router.worker_links.worker_link import RouterIdentity, WorkerLink

log = logging.getLogger(__name__)


class WorkerLinks:
    """The worker links of a router, one for each configured worker.

    Args:
        identity: name, incarnation and token that this router sends to workers.
        post: receives the events of all links.
    """

    def __init__(self, identity: RouterIdentity, post: Callable[[ev.Event], None]) -> None:
        self._identity = identity
        self._post = post
        self._links: dict[str, WorkerLink] = {}
        self._welcomes: dict[str, worker_pb2.Welcome] = {}  # of connected workers

    def __len__(self) -> int:
        """Return the number of workers with an open stream."""
        return len(self._welcomes)

    def model_limits(self, own: ModelLimits) -> ModelLimits:
        """Return the smallest of the model's own limits `own` and the connected workers' limits."""
        welcomes = self._welcomes.values()
        return ModelLimits(
            own.name,
            min([own.max_model_len, *(welcome.max_model_len for welcome in welcomes)]),
            min([own.vocab_size, *(welcome.vocab_size for welcome in welcomes)]),
            own.eos_tokens.union(*(welcome.eos_tokens for welcome in welcomes)),
        )

    def all_links(self) -> Sequence[WorkerLink]:
        """Return the links to all configured workers, connected or not."""
        return list(self._links.values())

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Connect to the workers in `addresses` (name to `host:port`); stop all other links."""
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
        """Send a command to its worker; discard the command if the worker is not connected."""
        link = self._links.get(command.worker)
        if link is not None:
            link.send(command)

    def close(self, worker: str, reason: str) -> str:
        """Close the stream to a worker; the worker's link then reconnects.

        Returns:
            The worker's address, or an empty string if no worker of this name is configured.
        """
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
            raise ValueError("it serves a different model than the workers already connected")
        self._compare_layouts(welcome)
        self._welcomes[welcome.worker] = welcome

    def _compare_layouts(self, welcome: worker_pb2.Welcome) -> None:
        """Log a warning if a new worker cannot exchange KV blocks with a connected worker."""
        other = next((w for w in self._welcomes.values() if w.layout != welcome.layout), None)
        if other is not None:
            log.warning(
                "worker %s and worker %s cannot exchange KV blocks and recompute prompts "
                "instead: their cache layouts differ (%s, %s); give both the same dtype, "
                "kv_cache_dtype and deterministic setting",
                *(welcome.worker, other.worker),
                *(each.layout.rpartition(" ")[2] for each in (welcome, other)),
            )
