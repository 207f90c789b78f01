"""Triton kernel of token masks, and its launcher (see `token_mask`)."""

from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, tl

TILE = 1024  # tokens per program


@jit(unspecialized=("num_rows",))
def _token_mask_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    rows,  # [M] int64 numbers of the rows to mask
    words,  # [M, W] int32 masks of these rows, with a row stride of words_stride
    num_rows,  # R
    vocab_size,
    logits_stride,
    words_stride,
    TILE: tl.constexpr,
):
    """Set the logits of excluded tokens to -inf. The grid is [M, tiles of V tokens]."""
    mask, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + mask)
    inside = (at < vocab_size) & (row >= 0) & (row < num_rows)
    bits = tl.load(words + mask * words_stride + at // 32, mask=inside, other=-1)
    excluded = inside & (((bits >> (at % 32)) & 1) == 0)
    nothing = tl.full((TILE,), float("-inf"), tl.float32)
    tl.store(logits + row * logits_stride + at, nothing, mask=excluded)


def apply_token_mask_triton_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Do the work of `apply_token_mask_`; the arguments are the same."""
    num_rows, vocab_size = logits.shape
    grid = (len(rows), -(-vocab_size // TILE))
    sizes = (num_rows, vocab_size, logits.stride(0), words.stride(0))
    launch(_token_mask_kernel, grid, logits, rows, words, *sizes, TILE=TILE)
