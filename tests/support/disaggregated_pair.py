"""A test router that prefills on one worker and moves requests to another worker."""

from dataclasses import dataclass
from itertools import count
from typing import Any

from penstock.protos import worker_pb2 as wire
from penstock.protos.worker_codec import pack_tokens
from tests.support.attached_router import AttachedRouter, greedy

_requests = count(1)
_salts = count(1)


@dataclass
class DisaggregatedPair:
    """Streams to a prefill and a decode worker."""

    prefill: AttachedRouter
    decode: AttachedRouter

    @classmethod
    async def open(cls, prefill: str, decode: str, router: str = "router") -> "DisaggregatedPair":
        return cls(
            await AttachedRouter(prefill).open(router), await AttachedRouter(decode).open(router)
        )

    async def close(self) -> None:
        await self.prefill.close()
        await self.decode.close()

    async def answer_without_transfer(
        self, prompt: list[int], num_tokens: int, **params: Any
    ) -> list[int]:
        """Let the decode worker prefill and decode, without a cached prefix; return the answer."""
        request = next(_requests)
        given = greedy(num_tokens, **params)
        await self.decode.submit(request, prompt, given, salt=b"mixed %d" % next(_salts))
        return await self.decode.answer(request)

    async def prefill_and_yield(
        self, prompt: list[int], num_tokens: int, salt: bytes = b"", **params: Any
    ) -> "YieldedRequest":
        """Run the prompt on the prefill worker until the worker yields the request."""
        request = next(_requests)
        given = greedy(num_tokens, **params)
        salt = salt or b"moved %d" % next(_salts)
        await self.prefill.submit(request, prompt, given, yield_after=1, salt=salt)
        yielded = await self.prefill.message("yielded", request)
        return YieldedRequest(self, request, prompt, given, salt, yielded.kv_len)

    async def decode_and_yield(
        self, prompt: list[int], num_tokens: int, after: int
    ) -> "YieldedRequest":
        """Decode at least `after` tokens on the prefill worker, then yield, as in a drain."""
        request, salt = next(_requests), b"half done %d" % next(_salts)
        given = greedy(num_tokens)
        await self.prefill.submit(request, prompt, given, salt=salt)
        await self.prefill.until(lambda: len(self.prefill.answers[request, 1]) >= after)
        command: dict[str, Any] = {"yield": wire.Yield(request=request, attempt=1)}
        await self.prefill.send(**command)
        yielded = await self.prefill.message("yielded", request)
        return YieldedRequest(self, request, prompt, given, salt, yielded.kv_len)


@dataclass
class YieldedRequest:
    """A request that the prefill worker has yielded (attempt 1); attempt 2 is its resubmission."""

    pools: DisaggregatedPair
    request: int
    prompt: list[int]
    params: wire.SamplingParams
    salt: bytes
    kv_len: int

    async def submit(self, **source: Any) -> None:
        welcome = self.pools.prefill.welcome
        given = {
            "worker": welcome.worker,
            "incarnation": welcome.incarnation,
            "attempt": 1,
            "kv_len": self.kv_len,
            "layout": welcome.layout,
        }
        log = [wire.ChoiceLog(choice=0, tokens=pack_tokens(self.first_tokens))]
        await self.pools.decode.submit(
            self.request,
            self.prompt,
            self.params,
            attempt=2,
            log=log,
            salt=self.salt,
            source=wire.Source(**{**given, **source}),
        )

    async def ready(self) -> Any:
        return await self.pools.decode.message("ready", self.request)

    async def send(self, **send: Any) -> None:
        ready = await self.ready()
        given = {"attempt": 1, "to": ready.at, "epoch": ready.epoch, "have": ready.have}
        message = wire.Send(request=self.request, to_attempt=2, **{**given, **send})
        await self.pools.prefill.send(send=message)

    async def answer(self) -> list[int]:
        return self.first_tokens + await self.pools.decode.answer(self.request, 2)

    @property
    def first_tokens(self) -> list[int]:
        return self.pools.prefill.answers[self.request, 1]

    async def drop(self) -> None:
        await self.pools.prefill.drop(self.request, 1)
        await self.pools.decode.drop(self.request, 2)

    async def finish(self) -> list[int]:
        """Submit, transfer and finish the request; return the whole answer."""
        await self.submit()
        await self.send()
        answer = await self.answer()
        await self.drop()
        return answer
