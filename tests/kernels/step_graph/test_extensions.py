"""An interpreter of step graphs contains only the opcodes that its graphs need."""

# mypy: disable-error-code="no-untyped-call"

from dataclasses import asdict

import pytest

from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.step_graph import opcodes
from penstock.kernels.step_graph.opcodes import Extensions

FUNCTIONS = {"int8": "_int8_op", "experts": "_expert_op", "codes": "_codes_op", "int4": "_int4_op"}


@pytest.mark.parametrize(
    "extensions",
    [
        Extensions(),
        Extensions(int8=True),
        Extensions(experts=True),
        Extensions(codes=True),
        Extensions(int4=True),
        Extensions(int8=True, experts=True, codes=True, int4=True),
    ],
    ids=lambda each: str(each) or "none",
)
def test_branches_of_absent_extensions_are_removed_before_they_are_compiled(
    extensions: Extensions,
) -> None:
    if not has_numba():
        pytest.skip("numba is not installed")
    configure_numba()
    from numba.core import ir
    from numba.core.analysis import dead_branch_prune
    from numba.core.compiler import run_frontend

    from penstock.kernels.step_graph.interpreter import _make_run

    parsed = run_frontend(_make_run(**asdict(extensions)))
    dead_branch_prune(parsed, ())  # numba runs this pass before it infers types
    assigned = [each for block in parsed.blocks.values() for each in block.find_insts(ir.Assign)]
    names = {each.value.name for each in assigned if isinstance(each.value, ir.Global)}
    assert "_compute" in names
    wanted = {FUNCTIONS[name] for name, present in asdict(extensions).items() if present}
    assert names & set(FUNCTIONS.values()) == wanted


def test_extensions_of_a_graph_follow_from_its_opcodes() -> None:
    dense = [opcodes.NORM, opcodes.MATMUL_F32, opcodes.ATTEND, opcodes.GATE, opcodes.ADD]
    assert Extensions.of(dense) == Extensions()
    for opcode in range(max(dense) + 1, opcodes.MATMUL_INT4 + 1):
        found = Extensions.of([*dense, opcode])
        assert sum(asdict(found).values()) == 1, "one extension has this opcode"
    assert Extensions.of([opcodes.MATMUL_INT8]) == Extensions.of([opcodes.QUANTIZE])
    assert str(Extensions.of([opcodes.QUANTIZE, opcodes.GEMV])) == "-int8-experts"
