"""Write gates: a closed epoch admits no writer, and stays closed."""

from random import Random

from penstock.workers.kv_transfer.write_gate import WriteGate, WriteGates


def test_closed_gate_calls_back_after_the_last_writer_leaves() -> None:
    gate = WriteGate()
    calls: list[int] = []
    assert gate.enter()
    assert gate.enter()
    gate.leave()
    gate.close(lambda: calls.append(1))
    assert not gate.enter()
    assert calls == []
    gate.leave()
    assert calls == [1]


def test_drained_epoch_stays_closed_and_others_stay_open() -> None:
    gates = WriteGates()
    before = gates.get(2)
    calls: list[int] = []
    gates.drain(2, lambda: calls.append(2))
    assert calls == [2]
    assert not before.enter()
    assert not gates.get(2).enter()
    assert gates.get(1).enter()
    assert gates.get(3).enter()


def test_gates_of_drained_epochs_use_no_memory() -> None:
    gates = WriteGates()
    epochs = list(range(1, 101))
    Random(1).shuffle(epochs)
    for epoch in epochs:
        if epoch % 2:
            gates.get(epoch)
        gates.drain(epoch, lambda: None)
    assert not gates._gates
    assert not gates._drained
    assert not any(gates.get(epoch).enter() for epoch in epochs)
