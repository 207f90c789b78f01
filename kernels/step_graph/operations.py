"""Operations of a CPU step graph.

Each class describes one opcode of `interpreter`. The method `columns` of a class is the only code
that writes the opcode's own columns of the integer table. `builder.GraphBuilder` checks the
arguments. `matmul_operations` has the classes of matrix products.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.kernels.step_graph import opcodes as codes
from penstock.kernels.step_graph.layout import TOKENS, Buffer, ExpertLayout, RowRange


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation(ABC):
    """An operation of a step graph on a range of rows. Its weights must be contiguous."""

    opcode: ClassVar[int]

    rows: RowRange = TOKENS
    # True if the next operation does not read the result of this one. No barrier is then needed
    # between the two operations.
    continues: bool = False

    @abstractmethod
    def columns(self) -> dict[int, int]:
        """Return column -> value for the columns whose meaning depends on the opcode."""

    def floats(self) -> dict[int, float]:
        """Return column -> value for the operation's row in the table of float parameters."""
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class Norm(Operation):
    """`out = RMS norm of x`, preceded by `x += added` if `added` is given.

    `weight` [D] is applied to each group of D features of the columns [first, first + size).
    """

    opcode = codes.NORM

    x: Buffer
    weight: Tensor
    eps: float
    out: Buffer
    first: int
    size: int
    added: Buffer | None = None

    def __post_init__(self) -> None:
        if self.added is not None and self.size != len(self.weight):
            raise ValueError(
                "a norm of several groups of columns cannot be combined with an addition"
            )

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x, self.first),
            **output_columns(self.out, self.first),
            codes.WEIGHT: self.weight.data_ptr(),
            codes.ADDED: _at(self.added),
            codes.NUM_GROUPS: self.size // len(self.weight),
            codes.GROUP_SIZE: len(self.weight),
        }

    def floats(self) -> dict[int, float]:
        return {codes.EPS: self.eps}


@dataclass(frozen=True, slots=True, eq=False)
class Attend(Operation):
    """Rotary embedding, cache write of keys and values, and attention.

    A row of `heads` has query heads, then key heads, then value heads.
    """

    opcode = codes.ATTEND

    heads: Buffer
    out: Buffer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    angles: Buffer | None  # cosines, then sines; None if there is no rotary embedding
    interleaved: bool
    layer_start: int  # index of the layer's first element in the flat KV cache
    layer_size: int  # number of elements of the layer in the cache
    values_start: int  # index of the first value within the layer (keys begin at 0)
    window: int  # number of positions in the sliding window; 0 if there is no window
    sinks: Tensor  # [num_heads] attention sink of each query head; -inf if the head has none
    slopes: Tensor  # [num_heads] ALiBi slope of each query head; 0 if the head has none
    scale: float
    cap: float  # soft cap of the scores; 0 if there is none

    def columns(self) -> dict[int, int]:
        return {
            codes.X: self.heads.at,
            codes.OUT: self.out.at,
            codes.NUM_HEADS: self.num_heads,
            codes.NUM_KV_HEADS: self.num_kv_heads,
            codes.HEAD_DIM: self.head_dim,
            codes.BLOCK_SIZE: self.block_size,
            codes.ANGLES: _at(self.angles),
            codes.ROTARY_DIM: 0 if self.angles is None else self.angles.width // 2,
            codes.INTERLEAVED: int(self.interleaved),
            codes.LAYER_START: self.layer_start,
            codes.LAYER_SIZE: self.layer_size,
            codes.VALUES_START: self.values_start,
            codes.WINDOW: self.window,
            codes.SINKS: self.sinks.data_ptr(),
            codes.SLOPES: self.slopes.data_ptr(),
        }

    def floats(self) -> dict[int, float]:
        return {codes.SCALE: self.scale, codes.CAP: self.cap}


@dataclass(frozen=True, slots=True, eq=False)
class Gate(Operation):
    """`out = f(first half of x) * (second half of x)`, where `kind` is a key of GATES."""

    opcode = codes.GATE

    x: Buffer
    kind: str
    out: Buffer

    def columns(self) -> dict[int, int]:
        return {
            codes.X: self.x.at,
            **output_columns(self.out),
            codes.GATE_KIND: codes.GATES[self.kind],
        }


@dataclass(frozen=True, slots=True, eq=False)
class Add(Operation):
    """`x += added`."""

    opcode = codes.ADD

    x: Buffer
    added: Buffer

    def columns(self) -> dict[int, int]:
        return {**input_columns(self.x), codes.ADDED: self.added.at}


@dataclass(frozen=True, slots=True, eq=False)
class Gemv(Operation):
    """`out = x Wᵀ` for a small, unpacked W."""

    opcode = codes.GEMV

    x: Buffer
    weight: Tensor
    out: Buffer

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            **output_columns(self.out),
            codes.WEIGHT: self.weight.data_ptr(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class TopkSoftmax(Operation):
    """Chooses each token's experts, and writes `weights` and the choices of `layout`.

    The operation overwrites `logits`.
    """

    opcode = codes.TOPK_SOFTMAX

    logits: Buffer
    layout: ExpertLayout
    normalise: bool
    weights: Buffer

    def columns(self) -> dict[int, int]:
        return {
            codes.X: self.logits.at,
            codes.OUT: self.weights.at,
            codes.NUM_EXPERTS: self.layout.num_experts,
            **_choices(self.layout),
            codes.NORMALISE: int(self.normalise),
        }


@dataclass(frozen=True, slots=True, eq=False)
class PermuteIndex(Operation):
    """Sorts the choices of all tokens by expert: computes the row of each choice in `layout`."""

    opcode = codes.PERMUTE_INDEX

    layout: ExpertLayout

    def columns(self) -> dict[int, int]:
        return {
            codes.LAYOUT: self.layout.at,
            codes.NUM_EXPERTS: self.layout.num_experts,
            **_choices(self.layout),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Permute(Operation):
    """Copies each token's row of `x` to the rows of its choices in `out` (with `layout`)."""

    opcode = codes.PERMUTE

    x: Buffer
    layout: ExpertLayout
    out: Buffer

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            codes.OUT: self.out.at,
            **_choices(self.layout),
        }


@dataclass(frozen=True, slots=True, eq=False)
class UnpermuteSum(Operation):
    """`out` = weighted sum of each token's expert outputs `x` (with `layout`), plus `shared`."""

    opcode = codes.UNPERMUTE_SUM

    x: Buffer
    layout: ExpertLayout
    weights: Buffer
    out: Buffer
    shared: Buffer | None  # output of a shared expert, if there is one
    shared_gate: Buffer | None  # if given, `shared` is multiplied by the sigmoid of this buffer

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            codes.OUT: self.out.at,
            **_choices(self.layout),
            codes.EXPERT_WEIGHTS: self.weights.at,
            codes.SHARED: _at(self.shared),
            codes.SHARED_GATE: _at(self.shared_gate),
        }


def input_columns(buffer: Buffer, first: int = 0) -> dict[int, int]:
    """Return column -> value for an input buffer that is read from feature `first` on."""
    return {codes.X: buffer.at + first, codes.X_WIDTH: buffer.width}


def output_columns(buffer: Buffer, first: int = 0) -> dict[int, int]:
    """Return column -> value for an output buffer that is written from feature `first` on."""
    return {codes.OUT: buffer.at + first, codes.OUT_WIDTH: buffer.width}


def _choices(layout: ExpertLayout) -> dict[int, int]:
    return {codes.CHOICES: layout.choices, codes.TOP_K: layout.top_k}


def _at(buffer: Buffer | None) -> int:
    return -1 if buffer is None else buffer.at
