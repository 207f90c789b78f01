"""Each command is encoded to its message, and each message decoded to its event."""

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import decode_sampling_params
from penstock.router.routing import events as ev
from penstock.router.worker_links import codec

PARAMS = SamplingParams(temperature=0.5, max_tokens=7, seed=3)
REQUEST = ev.Request(
    9, [1, 2, 3], PARAMS, num_choices=2, priority=-1, salt=b"tenant", external_id="order-66"
)
ENDPOINT = ev.TransferEndpoint("d0", "d0-1", "10.0.0.1:7", "secret")


def test_submit_carries_every_field() -> None:
    source = ev.Source("p0", "p0-1", 1, 5, "layout")
    command = ev.Submit("d0", REQUEST, 2, ([4, 5], ()), (False, True), source, 1)
    submit = codec.encode_command(command).submit
    assert (submit.request, submit.attempt, submit.yield_after) == (9, 2, 1)
    assert list(submit.prompt) == [1, 2, 3]
    assert decode_sampling_params(submit.params) == PARAMS
    assert (submit.priority, submit.salt, submit.request_id) == (-1, b"tenant", "order-66")
    logs = [(log.choice, list(log.tokens), log.finished) for log in submit.log]
    assert logs == [(0, [4, 5], False), (1, [], True)]
    assert submit.source == pb.Source(
        worker="p0", incarnation="p0-1", attempt=1, kv_len=5, layout="layout"
    )


def test_first_submit_has_neither_log_nor_source() -> None:
    submit = codec.encode_command(
        ev.Submit("w", REQUEST, 1, ((), ()), (False, False), None, 0)
    ).submit
    assert not submit.log
    assert not submit.HasField("source")


def test_yield_send_and_drop_are_encoded() -> None:
    message = codec.encode_command(ev.Yield("w", 9, 2))
    assert message.WhichOneof("body") == "yield"
    assert getattr(message, "yield") == pb.Yield(request=9, attempt=2)
    send = codec.encode_command(ev.Send("p0", 9, 1, ENDPOINT, 2, 77, 16)).send
    assert send.to == pb.TransferEndpoint(
        worker="d0", incarnation="d0-1", address="10.0.0.1:7", secret="secret"
    )
    assert (send.request, send.attempt, send.to_attempt, send.epoch, send.have) == (9, 1, 2, 77, 16)
    assert not codec.encode_command(ev.Drop("w", 9, 2)).drop.HasField("choice")
    assert codec.encode_command(ev.Drop("w", 9, 2, 0)).drop.HasField("choice")


def test_step_with_all_fields_is_decoded() -> None:
    step = pb.Step(
        request=[9, 9],
        attempt=[2, 2],
        choice=[0, 1],
        position=[4, 0],
        token=[11, 12],
        finish=[pb.FINISH_NONE, pb.FINISH_STOP],
        load=pb.Load(
            queued=1, queued_tokens=2, running=3, free_blocks=4, step_micros=1500, steps=9
        ),
    )
    entry = step.logprobs.add(row=1, chosen=-0.5, tokens=[12], values=[-0.5])
    step.ended.add(request=8, attempt=1, reason="not finite")
    event = codec.decode_event("w", pb.ToRouter(step=step))
    assert isinstance(event, ev.Stepped)
    assert event.tokens == [
        ev.NewToken(9, 2, 0, 4, 11, ev.Finish.NONE, None),
        ev.NewToken(9, 2, 1, 0, 12, ev.Finish.STOP, entry),
    ]
    assert event.ended == [(8, 1, "not finite")]
    assert event.load == WorkerLoad(
        queued=1, queued_tokens=2, running=3, free_blocks=4, last_step_seconds=0.0015, num_steps=9
    )


SCORED = pb.PromptLogprobs(
    request=4, attempt=2, position=7, entries=[pb.TokenLogprobs(chosen=-1.5, rank=2)]
)
MESSAGES = [
    (pb.ToRouter(step=pb.Step()), ev.Stepped("w", [], None, [], [])),
    (
        pb.ToRouter(step=pb.Step(prompts=[SCORED])),
        ev.Stepped("w", [], None, [], [ev.ScoredPrompt(4, 2, 7, [SCORED.entries[0]])]),
    ),
    (
        pb.ToRouter(yielded=pb.Yielded(request=9, attempt=1, kv_len=5)),
        ev.Yielded("w", 9, 1, 5),
    ),
    (
        pb.ToRouter(
            ready=pb.Ready(
                request=9,
                attempt=2,
                epoch=7,
                have=16,
                at=pb.TransferEndpoint(
                    worker="d0", incarnation="d0-1", address="10.0.0.1:7", secret="secret"
                ),
            )
        ),
        ev.Ready("w", 9, 2, 7, 16, ENDPOINT),
    ),
    (
        pb.ToRouter(received=pb.Received(request=9, attempt=2, epoch=7, bytes=1)),
        ev.Received("w", 9, 2, 7, 1),
    ),
    (
        pb.ToRouter(failed=pb.Failed(request=9, attempt=2, epoch=7, reason="late")),
        ev.Failed("w", 9, 2, 7, "late"),
    ),
    (
        pb.ToRouter(rejected=pb.Rejected(request=9, attempt=2, reason="full", never=True)),
        ev.Rejected("w", 9, 2, "full", True),
    ),
    (pb.ToRouter(draining=pb.Draining()), ev.Draining("w")),
    (pb.ToRouter(stored=pb.Stored(blocks=[1])), ev.Heartbeat("w")),
    (pb.ToRouter(evicted=pb.Evicted(blocks=[1])), ev.Heartbeat("w")),
    (pb.ToRouter(heartbeat=pb.Heartbeat()), ev.Heartbeat("w")),
]


@pytest.mark.parametrize(("message", "event"), MESSAGES)
def test_message_is_decoded_to_its_event(message: pb.ToRouter, event: ev.Event) -> None:
    assert codec.decode_event("w", message) == event


def test_every_message_of_the_protocol_is_known() -> None:
    (bodies,) = pb.ToRouter.DESCRIPTOR.oneofs
    assert {field.name for field in bodies.fields} - {"welcome"} == set(codec.DECODERS)
    (bodies,) = pb.ToWorker.DESCRIPTOR.oneofs
    assert len(bodies.fields) - 2 == len(codec.ENCODERS)  # not hello and heartbeat
