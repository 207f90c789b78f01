"""A worker without a model: a real router-worker stream, with tokens from a function.

    worker = StubWorker("w0", answer=lambda prompt: [5, 6, 7])
    await worker.start()        # worker.address is host:port
    ...
    await worker.stop()

The stub answers every prompt with the tokens of `answer` and an end token, one token per step.
Choice c omits the first c tokens. `worker.stepping.clear()` pauses the steps; `worker.submits`,
`worker.drops` and `worker.runs` show the stub's state.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from penstock.protos import worker_pb2 as pb
from penstock.protos import worker_pb2_grpc
from penstock.protos.worker_codec import PROTOCOL, TOKEN_BYTES, num_prompt_tokens, unpack_tokens

END_TOKEN = 2
FIRST_PLAIN_TOKEN = 6


def counting(prompt: Sequence[int], vocab_size: int = 1024) -> list[int]:
    """Return a long answer that depends on the prompt; each token identifies its position."""
    start = sum(prompt)
    span = vocab_size - FIRST_PLAIN_TOKEN
    return [FIRST_PLAIN_TOKEN + (start + 7 * index) % span for index in range(4096)]


@dataclass
class Run:
    """One choice of a submission that the stub holds."""

    submit: pb.Submit
    answer: Sequence[int]
    position: int  # position of the next token
    num_new: int = 0
    is_running: bool = True  # False while the run waits for a KV transfer or is under a lease
    choice: int = 0
    others: list["Run"] = field(default_factory=list)  # runs of the submission's other choices
    has_ended: bool = False

    def open(self) -> list["Run"]:
        """Return the runs of all choices that have not ended."""
        return [run for run in (self, *self.others) if not run.has_ended]

    def next_token(self, end_token: int) -> tuple[int, pb.Finish]:
        """Return the next token and its finish reason."""
        params = self.submit.params
        is_out = self.position >= len(self.answer)
        token = end_token if is_out else self.answer[self.position]
        stops = {*params.stop_tokens, *(() if params.ignore_eos else (end_token,))}
        self.position += 1
        self.num_new += 1
        if token in stops and self.position >= params.min_tokens:
            return token, pb.FINISH_STOP
        if self.position >= params.max_tokens:
            return token, pb.FINISH_LENGTH
        return token, pb.FINISH_NONE


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """An in-process worker.

    Args:
        name: name of the worker.
        role: prefill, decode or mixed.
        answer: returns the answer's tokens for a prompt.
        peers: dict of stubs by name; stubs that transfer KV to each other get the same dict.
        token: bearer token that a router must send.
        step_seconds: pause between steps.
    """

    def __init__(
        self,
        name: str = "w0",
        role: str = "mixed",
        answer: Callable[[Sequence[int]], Sequence[int]] = counting,
        peers: dict[str, "StubWorker"] | None = None,
        token: str | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self.role = role
        self.answer = answer
        self.peers = {} if peers is None else peers
        self.peers[name] = self
        self.token = token
        self.step_seconds = step_seconds
        self.welcome = pb.Welcome(
            protocol=PROTOCOL,
            worker=name,
            incarnation=f"{name}-1",
            role=role,
            model="stub",
            layout="stub",
            block_size=16,
            num_blocks=4096,
            max_model_len=2048,
            max_sequences=256,
            max_batched_tokens=512,
            eos_tokens=[END_TOKEN],
            vocab_size=1024,
        )
        self.stepping = asyncio.Event()  # steps run only while this event is set
        self.stepping.set()
        self.steps = pb.StepRecords()  # reply to a request for step records
        self.reject: pb.Rejected | None = None  # reply to every Submit; None to accept them
        self.hellos: list[pb.Hello] = []
        self.submits: list[pb.Submit] = []
        self.drops: list[pb.Drop] = []
        self.runs: dict[tuple[int, int], Run] = {}  # runs by (request, attempt)
        self.num_heartbeats = 0
        self.num_resyncs = 0
        self.first_number = 2  # number of the first message that the stub sends after the welcome
        self.logprobs: Callable[[int], tuple[float, Sequence[tuple[int, float]]]] = _logprobs
        self._out: asyncio.Queue[pb.ToRouter] = asyncio.Queue()
        self._epochs: dict[int, tuple[int, int]] = {}
        self._next_epoch = itertools.count(1)
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def Steps(
        self, request: pb.StepsRequest, context: grpc.aio.ServicerContext
    ) -> pb.StepRecords:
        return self.steps

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Break every stream immediately, as if the process had been killed."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def __aenter__(self) -> "StubWorker":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def send(self, message: pb.ToRouter) -> None:
        """Queue a message for the stream."""
        self._out.put_nowait(message)

    # ------------------------------------------------------------ the stream

    async def Attach(
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> None:
        authorization = dict(context.invocation_metadata() or ()).get("authorization")
        if self.token is not None and authorization != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a wrong token")
        first = await anext(aiter(requests))
        self.hellos.append(first.hello)
        self.runs.clear()
        self._out = asyncio.Queue()
        await context.write(pb.ToRouter(number=1, welcome=self.welcome))
        writer = asyncio.create_task(self._write(context))
        stepper = asyncio.create_task(self._step())
        try:
            async for message in requests:
                self._handle(message)
                self._changed.set()
        finally:
            writer.cancel()
            stepper.cancel()
            self.runs.clear()

    async def _write(self, context: grpc.aio.ServicerContext) -> None:
        for number in itertools.count(self.first_number):
            message = pb.ToRouter(heartbeat=pb.Heartbeat())
            with contextlib.suppress(TimeoutError):
                message = await asyncio.wait_for(self._out.get(), 0.5)
            message.number = number
            await context.write(message)

    def _handle(self, message: pb.ToWorker) -> None:
        match message.WhichOneof("body"):
            case "submit":
                self._submitted(message.submit)
            case "drop":
                self._dropped(message.drop)
            case "yield":
                self._yield(getattr(message, "yield"))
            case "send":
                self._send(message.send)
            case "resync_cache":
                self.num_resyncs += 1
            case "heartbeat":
                self.num_heartbeats += 1

    def _dropped(self, drop: pb.Drop) -> None:
        self.drops.append(drop)
        key = (drop.request, drop.attempt)
        if not drop.HasField("choice"):
            self.runs.pop(key, None)
        elif key in self.runs:
            for run in self.runs[key].open():
                run.has_ended |= run.choice == drop.choice

    def _submitted(self, submit: pb.Submit) -> None:
        self.submits.append(submit)
        key = (submit.request, submit.attempt)
        if self.reject is not None:
            rejected = pb.Rejected(request=key[0], attempt=key[1])
            rejected.reason, rejected.never = self.reject.reason, self.reject.never
            self.send(pb.ToRouter(rejected=rejected))
            return
        answer = self.answer(unpack_tokens(submit.prompt))
        runs = [Run(submit, answer[c:], 0, choice=c) for c in range(max(submit.params.n, 1))]
        for entry in submit.log:
            runs[entry.choice].position = len(entry.tokens) // TOKEN_BYTES
            runs[entry.choice].has_ended = entry.finished
        run = self.runs[key] = runs[0]
        run.others = runs[1:]
        if submit.HasField("source"):
            run.is_running = False
            epoch = next(self._next_epoch)
            self._epochs[epoch] = key
            at = pb.TransferEndpoint(worker=self.name, incarnation=self.welcome.incarnation)
            ready = pb.Ready(request=key[0], attempt=key[1], epoch=epoch, at=at)
            self.send(pb.ToRouter(ready=ready))

    def _yield(self, command: pb.Yield) -> None:
        run = self.runs.get((command.request, command.attempt))
        if run is not None and run.is_running:
            self._yielded(run)

    def _yielded(self, run: Run) -> None:
        run.is_running = False
        kv_len = num_prompt_tokens(run.submit) + run.position - 1 if run.num_new else 0
        submit = run.submit
        self.send(
            pb.ToRouter(
                yielded=pb.Yielded(request=submit.request, attempt=submit.attempt, kv_len=kv_len)
            )
        )

    def _send(self, send: pb.Send) -> None:
        if (send.request, send.attempt) in self.runs and send.to.worker in self.peers:
            self.peers[send.to.worker]._received(send.epoch)

    def _received(self, epoch: int) -> None:
        request, attempt = self._epochs.pop(epoch)
        run = self.runs.get((request, attempt))
        if run is not None:
            run.is_running = True
            received = pb.Received(request=request, attempt=attempt, epoch=epoch)
            self.send(pb.ToRouter(received=received))
            self._changed.set()

    # ------------------------------------------------------------ steps

    async def _step(self) -> None:
        while True:
            await self.stepping.wait()
            held = [run for run in self.runs.values() if run.is_running]
            runs = [one for run in held for one in run.open()]
            if not runs:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._make_step(runs)
            await asyncio.sleep(self.step_seconds)

    def _score(self, submit: pb.Submit, step: pb.Step) -> None:
        prompt, known = unpack_tokens(submit.prompt), max(submit.prompt_known, 1)
        if submit.params.HasField("prompt_logprobs") and known < len(prompt):
            scored = pb.PromptLogprobs(position=known)
            scored.request, scored.attempt = submit.request, submit.attempt
            scored.entries.extend(map(prompt_logprobs, prompt[known:]))
            step.prompts.append(scored)

    def _make_step(self, runs: Sequence[Run]) -> None:
        step = pb.Step(load=pb.Load(running=len(runs), free_blocks=self.welcome.num_blocks))
        yielded: list[Run] = []
        for row, run in enumerate(runs):
            submit = run.submit
            if run.num_new == run.choice == 0:
                self._score(submit, step)
            position = run.position
            token, finish = run.next_token(END_TOKEN)
            step.request.append(submit.request)
            step.attempt.append(submit.attempt)
            step.choice.append(run.choice)
            step.position.append(position)
            step.token.append(token)
            step.finish.append(finish)
            if submit.params.HasField("logprobs"):
                chosen, top = self.logprobs(token)
                top = top[: submit.params.logprobs]
                step.logprobs.add(
                    row=row, chosen=chosen, tokens=[t for t, _ in top], values=[v for _, v in top]
                )
            run.has_ended = bool(finish)
            key = (submit.request, submit.attempt)
            if not self.runs[key].open():
                del self.runs[key]
            elif submit.yield_after and run.num_new >= submit.yield_after:
                yielded.append(run)
        self.send(pb.ToRouter(step=step))
        for run in yielded:
            self._yielded(run)


def prompt_logprobs(token: int) -> pb.TokenLogprobs:
    """Return the logprobs of a prompt token."""
    return pb.TokenLogprobs(chosen=-token / 8, rank=3, tokens=[7, 8, 9], values=[-1, -2, -3])


def _logprobs(token: int) -> tuple[float, Sequence[tuple[int, float]]]:
    """Return logprobs in which the chosen token is the most likely token."""
    return -0.25, [(token, -0.25)] + [(FIRST_PLAIN_TOKEN + i, -1.0 - i) for i in range(20)]
