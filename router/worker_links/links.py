"""The set of worker links of a router, and the Welcome messages of connected workers."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import penstock
from penstock.protos import worker_pb2
from penstock.router.observability.step_records import StepColumns
from penstock.router.requests.request import ModelLimits
from penstock.router.routing import events as ev
from penstock.router.routing.prefix_cache.cache_events import ResyncCache
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
        self._set_workers_lock = asyncio.Lock()
        # Last Welcome message of each connected worker.
        self._welcomes: dict[str, worker_pb2.Welcome] = {}
        # The last argument of `model_limits` and the cached result for it, or None without a cached
        # result.
        self._limits: tuple[ModelLimits, ModelLimits] | None = None
        # The cached system fingerprint, or None if it must be computed or no worker is connected.
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        """Return the number of workers with an open stream."""
        return len(self._welcomes)

    def model_limits(self, own: ModelLimits) -> ModelLimits:
        """Return the smallest of the model's own limits `own` and the connected workers' limits."""
        if self._limits is None or self._limits[0] is not own:
            welcomes = self._welcomes.values()
            limits = ModelLimits(
                own.name,
                min([own.max_model_len, *(welcome.max_model_len for welcome in welcomes)]),
                min([own.vocab_size, *(welcome.vocab_size for welcome in welcomes)]),
                own.eos_tokens.union(*(welcome.eos_tokens for welcome in welcomes)),
            )
            self._limits = own, limits
        return self._limits[1]

    def block_sizes(self) -> Collection[int]:
        """Return the block sizes of the connected workers."""
        return {welcome.block_size for welcome in self._welcomes.values()} - {0}

    def system_fingerprint(self) -> str | None:
        """Return an identifier of the software, weights and dtypes that compute the answers.

        If the identifier has changed, the same seed may give another answer. The result is None if
        no worker is connected.
        """
        if self._fingerprint is None and self._welcomes:
            layouts = sorted({welcome.layout for welcome in self._welcomes.values()})
            text = "\0".join((penstock.__version__, *layouts))
            self._fingerprint = "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._fingerprint

    def all_links(self) -> Sequence[WorkerLink]:
        """Return the links to all configured workers, connected or not."""
        return list(self._links.values())

    async def step_records(self) -> Mapping[str, StepColumns]:
        """Return the latest steps of each worker that reports them, by worker name."""
        links = self.all_links()
        found = await asyncio.gather(*(link.steps() for link in links))
        named = zip(links, found, strict=True)
        return {link.worker: steps for link, steps in named if steps is not None}

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Connect to the workers in `addresses` (name to `host:port`); stop links to any others.

        Concurrent calls run one after another; the last call decides.
        """
        async with self._set_workers_lock:
            gone = [
                each for name, each in self._links.items() if addresses.get(name) != each.address
            ]
            for link in gone:
                del self._links[link.worker]
            await asyncio.gather(*(link.stop() for link in gone))
            for name, address in addresses.items():
                if name not in self._links:
                    self._links[name] = WorkerLink(
                        name, address, self._identity, self._on_event, self._on_welcome
                    )

    def send(self, command: ev.WorkerCommand) -> None:
        """Send a command to its worker. The command is discarded if the worker is not connected."""
        # This cannot flood the log, because the cache feed limits the rate of `ResyncCache`
        # commands.
        if isinstance(command, ResyncCache):
            log.warning(
                "worker %s: %s; requesting a snapshot of its cached blocks",
                *(command.worker, command.reason),
            )
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
            self._workers_changed()
        self._post(event)

    def _on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        others = {other.model for other in self._welcomes.values()}
        if others and welcome.model not in others:
            raise ValueError(
                "the worker's model differs from that of the connected workers: give all workers "
                "the same checkpoint"
            )
        self._compare_layouts(welcome)
        self._welcomes[welcome.worker] = welcome
        self._workers_changed()

    def _workers_changed(self) -> None:
        self._limits = self._fingerprint = None

    def _compare_layouts(self, welcome: worker_pb2.Welcome) -> None:
        """Log a warning if a new worker cannot exchange KV blocks with a connected worker."""
        other = next((w for w in self._welcomes.values() if w.layout != welcome.layout), None)
        if other is not None:
            formats = [each.layout.rpartition(" ")[2] for each in (welcome, other)]
            same = "dtype, quantization and deterministic setting"
            if formats[0] != formats[1]:
                same = f"kv_cache_dtype (not {formats[0]} and {formats[1]}), {same}"
            log.warning(
                "worker %s and worker %s cannot exchange KV blocks, so prompts are recomputed "
                "instead: give both the same %s, and in deterministic mode also the same tp, pp, "
                "ep, block_size and kind of device",
                *(welcome.worker, other.worker, same),
            )
