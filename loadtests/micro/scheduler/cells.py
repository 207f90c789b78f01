"""Cells of the scheduler benchmark.

A cell is an initial state of a scheduler and a number of steps to measure.
"""

from dataclasses import dataclass

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """An initial state of a scheduler, and the number of steps to measure from there.

    The first `shared` tokens of all prompts are equal, and the other tokens are random. The lengths
    of the running sequences are spread evenly over one block. Thus the same number of sequences
    needs a new block in every step.
    """

    name: str
    about: str
    running: int = 0  # number of sequences that already decode at the start
    running_len: int = 512  # prompt tokens of each running sequence, to which 0 to 15 are added
    output_len: int = 512  # answer tokens of each running sequence
    arriving: int = 0  # number of requests submitted at the start
    arriving_len: int = 0  # prompt tokens of each arriving request
    first_len: int = 0  # prompt tokens of the first arriving request; 0 means `arriving_len`
    shared: int = 0  # number of leading prompt tokens that are in the prefix cache
    arriving_output_len: int = 1
    max_model_len: int = 2048
    max_sequences: int = 1024
    max_batched_tokens: int = 2048
    num_blocks: int = 65536
    num_steps: int = 0  # number of measured steps; 0 means until all sequences have finished
    least_preempted: int = 0  # preemptions that each side must have in the measured steps
    submission_counts: bool = True  # whether step times include the submission


def _decoding(count: int) -> Cell:
    words = f"{count:,} sequences decode" if count > 1 else "1 sequence decodes"
    return Cell(f"decode {count:,}", words, running=count, num_steps=64)


CELLS = (
    _decoding(1),
    _decoding(32),
    _decoding(256),
    _decoding(1024),
    Cell(
        "prefill 8k",
        "16 prompts of 8,192 tokens, in chunks of up to 2,048",
        arriving=16,
        arriving_len=8192,
        max_model_len=16_384,
    ),
    Cell(
        "prefix 90%",
        "64 prompts of 4,096 tokens, 3,680 of them cached; answers of 8",
        arriving=64,
        arriving_len=4096,
        shared=3680,
        max_model_len=8192,
        arriving_output_len=8,
    ),
    Cell(
        "preemption",
        "512 sequences decode, and every step lacks blocks for about five of them",
        running=512,
        running_len=48,
        max_sequences=512,
        max_batched_tokens=32_768,
        num_blocks=512 * 4 + 48,
        num_steps=24,
        least_preempted=24,
    ),
    Cell(
        "10,000 wait",
        "256 rows, answers of 64 tokens: about four sequences end and four start in each step",
        arriving=10_256,
        arriving_len=128,
        arriving_output_len=64,
        max_sequences=256,
        num_steps=192,
        submission_counts=False,
    ),
    Cell(
        "10,000 wait, blocked",
        "256 sequences decode; the first queued prompt, of 32,768 tokens, does not fit",
        running=256,
        arriving=10_000,
        arriving_len=128,
        first_len=32_768,
        max_model_len=65_536,
        max_sequences=512,
        max_batched_tokens=40_000,
        num_blocks=256 * 34 + 1500,
        num_steps=64,
        submission_counts=False,
    ),
)
