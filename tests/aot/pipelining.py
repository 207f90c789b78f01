"""Read from a kernel's Triton GPU IR whether its loops copy tiles ahead while they compute.

The pipeliner turns the loads of a loop into asynchronous copies to buffers in shared memory. On
sm_80 to sm_100, such a loop contains `ttg.async_copy_global_to_local` and `ttg.async_wait`. The
`num` of a wait is the number of copies that may still run after it. With `num = 0`, every iteration
waits for all copies, so copies and computation alternate.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LOOP = re.compile(r"^( *)(?:%\S+ = )?scf\.for\b")
COPY = re.compile(r"ttg\.async_copy_global_to_local \S+, (%[\w#]+)")
WAIT = re.compile(r"ttg\.async_wait\b.*\{num = (\d+)")
PRODUCT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
BUFFERS = re.compile(r"^ *(%\w+) = ttg\.memdesc_index .*: !ttg\.memdesc<(\d+)x", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop that multiplies matrices."""

    copies: int  # number of asynchronous copies per iteration
    buffers: int  # smallest number of buffers of a copied tile; 0 without copies
    in_flight: int  # smallest number of copies that still run after a wait; 0 without waits


def product_loops(ttgir: str) -> list[Loop]:
    """Return the innermost loops of a kernel that contain matrix products."""
    buffers = {name: int(number) for name, number in BUFFERS.findall(ttgir)}
    return [_loop(lines, buffers) for lines in _innermost_loops(ttgir)]


def _loop(lines: list[str], buffers: dict[str, int]) -> Loop:
    targets = [found[1] for line in lines if (found := COPY.search(line))]
    waits = [int(found[1]) for line in lines if (found := WAIT.search(line))]
    return Loop(
        len(targets),
        min((buffers.get(target, 1) for target in targets), default=0),
        min(waits, default=0),
    )


def _innermost_loops(ttgir: str) -> Iterator[list[str]]:
    """Yield the lines of each loop with matrix products that contains no other such loop.

    The compiler may repeat a part of an inner loop after that loop. An outer loop may therefore
    have matrix products of its own; such a loop is not yielded.
    """
    open_loops: list[_OpenLoop] = []
    for line in ttgir.splitlines():
        if open_loops and line.startswith(open_loops[-1].end):
            loop = open_loops.pop()
            multiplies = any(map(PRODUCT.search, loop.lines))
            if multiplies and not loop.has_inner:
                yield loop.lines
            if open_loops:
                open_loops[-1].has_inner |= multiplies or loop.has_inner
        elif found := LOOP.match(line):
            open_loops.append(_OpenLoop(f"{found[1]}}}"))
        elif open_loops:
            open_loops[-1].lines.append(line)


@dataclass(slots=True)
class _OpenLoop:
    """A loop whose last line has not been read yet."""

    end: str  # text with which the loop's last line begins
    # Lines of the loop, without those of inner loops.
    lines: list[str] = field(default_factory=list)
    has_inner: bool = False  # True if this loop contains another loop with matrix products
