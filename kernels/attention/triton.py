"""Triton kernels of paged attention (see `attention/op`): `attend_kernel` and `merge_kernel`.

Shapes: B sequences, T tokens, H KV heads, G query heads per KV head, D features, S slots per block,
I work items, P rows of partial results. See `attention/op` for the other letters.

The query heads of one KV head are packed as rows: row r of a sequence is token r // G and query
head r % G of that KV head. A work item (`attention/work_items`) is a tile of BLOCK_M rows of one
sequence, and a range of the sequence's positions. A program computes items for one KV head. The
program loops over keys and values, BLOCK_N positions at a time, with an online softmax in float32.

For MLA, a row of the cache is a key with a tail: the first D features of the row are also the
value, and the last TAIL features only contribute to the score. There is one KV head, and the cache
has no separate values.

If an item covers all positions of its rows, it writes the final result. Otherwise, it writes a
partial result, and `merge_kernel` merges the partial results of a sequence in the order of
positions. The merge is a separate launch. The last program to finish could merge instead, with the
same order of sums. But then every program would need registers for the merge, and counters would
have to be reset before each replay of a CUDA graph. Also, the memory order of such a merge could
not be tested without a GPU.

With SPLIT, an item computes all positions of its rows, in partitions of SPLIT positions, each with
its own accumulators. The item merges the results of the partitions in the order that `merge_kernel`
uses with BLOCK_P = 1. The result for a token is then bitwise the same whether one item computes all
partitions or each partition is an item. This requires that all tiles have one size. The
compiler must not fuse multiply-adds, because it may fuse them differently in the two cases.

Exponentials have base 2, so scores are multiplied by log2(e). Until a row has attended to a
position, its maximum score is MASKED, a finite number. If it were -inf, -inf - (-inf) would be NaN.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from penstock.kernels.triton_common.launch import jit, tl


@jit
def _as_floats(x, dtype: tl.constexpr):
    """Convert elements of the cache to `dtype`. FP8 codes given as uint8 are also divided by 2^8.

    A float8_e4m3fn divided by 2^8 is a float16 with the same bits of exponent and mantissa.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return x.to(dtype)


@jit
def _store_result(out, at, features, sinks, heads, most, total, acc, present, kept):
    """Apply the sinks, divide `acc` by the sum of the weights, and store the results of a tile."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=present, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(most, sink)
        fade = tl.exp2(most - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc *= fade[:, None]
    result = (acc / tl.where(present, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + features[None, :], result, mask=kept)


@jit
def _attend_item(  # noqa: C901
    item,  # index in `items`; the other arguments are those of `attend_kernel`
    head,
    query,
    layer,
    tables,
    query_starts,
    context_lens,
    items,
    out,
    partial_sums,
    weights,
    sinks,
    slopes,
    scales,
    query_stride,
    table_stride,
    side_stride,
    scale,
    cap,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    GAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute attention for one work item and KV head."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    MASKED: tl.constexpr = -1e30
    sequence = tl.load(items + 5 * item)
    first_row = tl.load(items + 5 * item + 1) * BLOCK_M
    if not SPLIT:
        first_position = tl.load(items + 5 * item + 2)
        end_position = tl.load(items + 5 * item + 3)
        partial_row = tl.load(items + 5 * item + 4)
    first_token = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - first_token
    context = tl.load(context_lens + sequence)

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // G
    heads = head * G + rows % G
    present = tokens < num_tokens
    before = context - num_tokens
    positions = before + tokens
    features = tl.arange(0, BLOCK_D)
    wide = features < D if BLOCK_D != D else tl.full((BLOCK_D,), True, tl.int1)
    kept = present[:, None] & wide[None, :]
    q_at = (first_token + tokens).to(tl.int64) * query_stride + heads * (D + TAIL)
    q = tl.load(query + q_at[:, None] + features[None, :], mask=kept, other=0.0)
    if TAIL:
        behind = tl.arange(0, BLOCK_T)
        narrow = behind < TAIL if BLOCK_T != TAIL else tl.full((BLOCK_T,), True, tl.int1)
        q_tail_at = query + D + q_at[:, None] + behind[None, :]
        q_tail = tl.load(q_tail_at, mask=present[:, None] & narrow[None, :], other=0.0)

    # Every row of the tile attends to all positions in [all_low, all_high). No row attends to a
    # position outside of [low, high).
    earliest = before + first_row // G
    latest = tl.minimum(before + (first_row + BLOCK_M - 1) // G, context - 1)
    low = tl.maximum(earliest - WINDOW + 1, 0) if WINDOW else 0
    high = latest + 1
    first_partition, num_partitions = 0, 1
    if SPLIT:
        first_partition = low // SPLIT
        num_partitions = (high + SPLIT - 1) // SPLIT - first_partition
    else:
        low = tl.maximum(low, first_position)
        high = tl.minimum(high, end_position)
    begin = low // BLOCK_N * BLOCK_N
    if WINDOW:
        all_low = (tl.maximum(latest - WINDOW + 1, low) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    else:
        all_low = begin
    all_high = tl.maximum(tl.minimum(earliest + 1, high) // BLOCK_N * BLOCK_N, all_low)

    factor = scale * UNIT
    if cap is None:
        factor *= LOG2_E
    if slopes is not None:
        slope = tl.load(slopes + heads, mask=present, other=0.0).to(tl.float32) * LOG2_E

    table = tables + sequence.to(tl.int64) * table_stride
    most = tl.full((BLOCK_M,), MASKED, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if SPLIT:
        all_most, all_total, all_acc = most, total, acc
    for partition in range(0, num_partitions):
        if SPLIT:
            most = tl.full((BLOCK_M,), MASKED, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        # The positions are processed in up to three stretches. Stretch 0 is the window's edge, and
        # stretch 2 is the causal edge; both need a mask. In stretch 1, every row attends to every
        # position, so no mask is needed. With SHORT, one masked stretch covers all positions. MLA's
        # wide tiles also use SHORT, because three stretches would take too many registers.
        for stretch in tl.static_range(2 if SHORT else (0 if WINDOW else 1), 3):
            if SPLIT:
                start = tl.maximum(begin, (first_partition + partition) * SPLIT)
                stop = tl.minimum(high, (first_partition + partition + 1) * SPLIT)
            elif SHORT:
                start, stop = begin, high
            elif stretch == 0:
                start, stop = begin, tl.minimum(all_low, high)
            elif stretch == 1:
                start, stop = all_low, all_high
            else:
                start, stop = all_high, high
            # Each iteration loads the block numbers of the next iteration. Triton prefetches a tile
            # only if no load in the same iteration computes the tile's address.
            ahead = start + tl.arange(0, BLOCK_N)
            next_block = tl.load(table + ahead // S, mask=ahead < high, other=0)
            for at in tl.range(start, stop, BLOCK_N):
                columns = at + tl.arange(0, BLOCK_N)
                block = next_block.to(tl.int64)
                ahead = columns + BLOCK_N
                next_block = tl.load(table + ahead // S, mask=ahead < high, other=0)
                if stretch == 1:
                    inside = tl.full((BLOCK_N,), True, tl.int1)
                else:
                    inside = (columns >= low) & (columns < high)
                loaded = inside[:, None] & wide[None, :]
                # Without scales, a flat index is used, which needs fewer registers than `page`.
                if scales is None:
                    kv_at = ((block * H + head) * S + columns % S) * (D + TAIL)
                else:
                    page = (block * H + head) * PAGE
                    kv_at = page + columns % S * D
                    scale_at = scales + (page + S * D) // 2 + columns % S
                    k_scale = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
                k = tl.load(layer + kv_at[:, None] + features[None, :], mask=loaded, other=0.0)
                s = tl.dot(q, tl.trans(_as_floats(k, q.dtype)), input_precision="ieee")
                if TAIL:
                    k_tail_at = layer + D + kv_at[:, None] + behind[None, :]
                    k_tail = tl.load(k_tail_at, mask=inside[:, None] & narrow[None, :], other=0.0)
                    s = tl.dot(q_tail, tl.trans(k_tail.to(q.dtype)), s, input_precision="ieee")
                if scales is not None:
                    s *= (k_scale * factor)[None, :]
                else:
                    s *= factor
                if cap is not None:
                    s = (1 - 2 / (1 + tl.exp2(s * (2 * LOG2_E / cap)))) * (cap * LOG2_E)
                if slopes is not None:
                    s += slope[:, None] * (columns[None, :] - positions[:, None])
                if stretch != 1:
                    seen = columns[None, :] <= positions[:, None]
                    if WINDOW:
                        seen &= columns[None, :] > positions[:, None] - WINDOW
                    s = tl.where(seen, s, float("-inf"))
                higher = tl.maximum(most, tl.max(s, 1))
                probs = tl.exp2(s - higher[:, None])
                fade = tl.exp2(most - higher)
                total = total * fade + tl.sum(probs, 1)
                if TAIL:
                    v = k
                else:
                    v_at = layer + side_stride + kv_at[:, None] + features[None, :]
                    v = tl.load(v_at, mask=loaded, other=0.0)
                acc *= fade[:, None]
                if scales is not None:
                    v_scale_at = scale_at + side_stride // 2
                    v_scale = tl.load(v_scale_at, mask=inside, other=0.0).to(tl.float32)
                    probs *= (v_scale * GAIN)[None, :]
                v = _as_floats(v, q.dtype)
                acc = tl.dot(probs.to(q.dtype), v, acc, input_precision="ieee")
                most = higher

        if scales is not None:
            acc *= UNIT / GAIN
        if SPLIT:
            higher = tl.maximum(all_most, most)
            fade, gain = tl.exp2(all_most - higher), tl.exp2(most - higher)
            all_total = all_total * fade + total * gain
            all_acc = all_acc * fade[:, None] + acc * gain[:, None]
            all_most = higher

    if SPLIT:
        most, total, acc = all_most, all_total, all_acc
    out_at = (first_token + tokens).to(tl.int64) * (H * G * D) + heads * D
    if SPLIT:
        _store_result(out, out_at, features, sinks, heads, most, total, acc, present, kept)
    elif partial_row >= 0:
        partial_at = (partial_row + tokens).to(tl.int64) * (H * G) + heads
        tl.store(weights + partial_at * 2, most, mask=present)
        tl.store(weights + partial_at * 2 + 1, total, mask=present)
        tl.store(partial_sums + partial_at[:, None] * D + features[None, :], acc, mask=kept)
    else:
        _store_result(out, out_at, features, sinks, heads, most, total, acc, present, kept)


@jit(unspecialized=("table_stride",))
def attend_kernel(
    query,  # [T, H G, D + TAIL]; consecutive tokens are `query_stride` elements apart
    layer,  # [2, N, H, S, W], or [1, N, 1, S, D + TAIL]
    tables,  # [B, M] int32 block tables; consecutive rows are `table_stride` elements apart
    query_starts,  # [B + 1] int32 index of each sequence's first token; the last entry is T
    context_lens,  # [B] int32 context length of each sequence
    # [I, 5] int32: sequence, row tile, first position, end of positions, first row of the partial
    # results. If this row is -1, the item computes final results.
    items,
    worker_starts,  # [workers + 1] int32 index of each worker's first item; used if PERSISTENT
    out,  # [T, H G, D]
    partial_sums,  # [P, H G, D] float32 unnormalized sums of values; None with SPLIT
    weights,  # [P, H G, 2] float32 maximum score and sum of exponentials; None with SPLIT
    sinks,  # [H G] attention sinks, or None
    slopes,  # [H G] ALiBi slopes, or None
    scales,  # `layer` viewed as float16, to read the scales of codes; None if there are no scales
    query_stride,
    table_stride,
    side_stride,  # distance in elements from a key to its value in `layer`
    scale,  # factor of the scores
    cap,  # soft cap of the scores, or None
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,  # MLA: features of a key after its value. 0: keys and values are separate.
    PAGE: tl.constexpr,  # elements of a page: the keys (or values) of one block and KV head
    # A code of the cache equals UNIT times the result of `_as_floats`.
    UNIT: tl.constexpr,
    GAIN: tl.constexpr,  # `KvCacheFormat.value_gain` of the cache
    WINDOW: tl.constexpr,  # number of positions that a token attends to; 0 means all
    # positions per partition if one item computes all its partitions; otherwise 0
    SPLIT: tl.constexpr,
    SHORT: tl.constexpr,  # mask every tile instead of only the edges, for short items or wide tiles
    # If True, a program computes all items of one worker; otherwise, a program computes one item.
    PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D rounded up to a power of two
    BLOCK_T: tl.constexpr,  # TAIL rounded up to a power of two
):
    """Compute attention for work items.

    The grid is [workers, H] if PERSISTENT, else [I, H]. Final results are written to `out`, and
    results that `merge_kernel` must merge to `partial_sums` and `weights`.
    """
    worker, head = tl.program_id(0), tl.program_id(1)
    if PERSISTENT:
        for item in range(tl.load(worker_starts + worker), tl.load(worker_starts + worker + 1)):
            _attend_item(
                item, head, query, layer, tables, query_starts, context_lens, items, out,
                partial_sums, weights, sinks, slopes, scales, query_stride, table_stride,
                side_stride, scale, cap, H, G, S, D, TAIL, PAGE, UNIT, GAIN, WINDOW, SPLIT, SHORT,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_T,
            )  # fmt: skip
    else:
        _attend_item(
            worker, head, query, layer, tables, query_starts, context_lens, items, out,
            partial_sums, weights, sinks, slopes, scales, query_stride, table_stride,
            side_stride, scale, cap, H, G, S, D, TAIL, PAGE, UNIT, GAIN, WINDOW, SPLIT,
            SHORT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_T,
        )  # fmt: skip


@jit(unspecialized=("num_shared", "first_shared", "num_sequences"))
def merge_kernel(
    # [P, HEADS, D] float32 unnormalized sums of values. First the rows of each sequence's own
    # partitions, then those of the shared prefix. Row first_shared + partition * B + sequence
    # belongs to one partition of the prefix and one sequence.
    partial_sums,
    weights,  # [P, HEADS, 2] float32 maximum score and sum of exponentials
    # [B, 2] int32 first row and number of a sequence's own partitions.
    # If the number is 0, there is nothing to merge for the sequence.
    merges,
    query_starts,  # [B + 1] int32 index of each sequence's first token; the last entry is T
    out,  # [T, HEADS, D]
    sinks,  # [HEADS] attention sinks, or None
    num_shared,  # number of partitions of the shared prefix
    first_shared,  # first row of the shared prefix in `partial_sums`
    num_sequences,  # B, number of sequences
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,  # partitions merged per iteration
    BLOCK_D: tl.constexpr,  # D rounded up to a power of two
):
    """Merge the partitions of each split sequence, and of the shared prefix if any, into `out`.

    Grid: [B, HEADS, tokens of the longest sequence to merge]. A program merges one token and query
    head.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    MASKED: tl.constexpr = -1e30
    sequence, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(merges + 2 * sequence)
    num_own = tl.load(merges + 2 * sequence + 1)
    first_token = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - first_token
    if (num_own == 0) | (token >= num_tokens):
        return
    count = num_own + num_shared
    features = tl.arange(0, BLOCK_D)
    most = tl.full((1,), MASKED, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for at in range(0, count, BLOCK_P):
        numbers = at + tl.arange(0, BLOCK_P)
        there = numbers < count
        own = first + numbers * num_tokens + token
        shared = first_shared + (numbers - num_own) * num_sequences + sequence
        row = tl.where(numbers < num_own, own, shared).to(tl.int64) * HEADS + head
        greatest = tl.load(weights + row * 2, mask=there, other=MASKED)
        sums = tl.load(weights + row * 2 + 1, mask=there, other=0.0)
        higher = tl.maximum(most, tl.max(greatest, 0))
        fade, gain = tl.exp2(most - higher), tl.exp2(greatest - higher)
        total = total * fade + tl.sum(sums * gain, 0)
        values = tl.load(
            partial_sums + row[:, None] * D + features[None, :],
            mask=there[:, None] & (features < D)[None, :],
            other=0.0,
        )
        acc = acc * fade + tl.sum(values * gain[:, None], 0)
        most = higher
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        higher = tl.maximum(most, sink)
        fade = tl.exp2(most - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc *= fade
    out_at = (first_token + token).to(tl.int64) * HEADS + head
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + out_at * D + features, result, mask=features < D)
