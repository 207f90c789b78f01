"""What both schedulers are asked to do: one cell, one state that a server can be in."""

from dataclasses import dataclass

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A state to bring a scheduler into, and the steps from there that are measured.

    Of every prompt's tokens the first `shared` are those of all; what the prompts do not share is
    drawn for each. Lengths of running sequences are spread over a block, so that steps are alike.
    """

    name: str
    about: str
    running: int = 0  # sequences that decode already when the measured part begins
    running_len: int = 512  # tokens of each then, and up to a block more
    output_len: int = 512
    arriving: int = 0  # submitted as the measured part begins; the submission is measured too
    arriving_len: int = 0
    first_len: int = 0  # of the first that arrives, if it is another
    shared: int = 0  # their first tokens, which the prefix cache holds
    arriving_output_len: int = 1
    max_model_len: int = 2048
    max_sequences: int = 1024
    max_batched_tokens: int = 2048
    num_blocks: int = 65536
    num_steps: int = 0  # measured; 0: until everything that arrived is done
    least_preempted: int = 0  # by each side in the measured steps, or the run fails
    submission_counts: bool = True  # into the time of the steps


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
        "512 sequences decode and every step lacks the blocks of about five",
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
        "256 rows, answers of 64: about four end and four start each step",
        arriving=10_256,
        arriving_len=128,
        arriving_output_len=64,
        max_sequences=256,
        num_steps=192,
        submission_counts=False,
    ),
    Cell(
        "10,000 wait, blocked",
        "256 sequences decode; the first of the queue, of 32,768 tokens, does not fit",
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
