"""Kernels of `invariant`: one tile size for every batch, and sums always in the same order."""

import triton
import triton.language as tl


@triton.jit
def product(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], in float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, DEPTH)
    of_x = x + row[:, None] * x_stride + steps[None, :]
    of_weight = weight + column[None, :] * weight_stride + steps[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + steps < depth
        a = tl.load(of_x + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            of_weight + start, mask=(column < columns)[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_stride + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )


@triton.jit
def norm(x, weight, out, x_stride, width, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, WIDTH)
    inside = channels < width
    values = tl.load(x + row * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    gain = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    result = values * scale * gain
    tl.store(out + row * width + channels, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attention(
    q,
    k,
    v,
    out,
    starts,
    lengths,
    key_lengths,
    table_rows,
    table,
    scale,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Read keys in blocks from the sequence's first on, whatever the query.

    A block that a query does not see does not change its sums.
    """
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    keys = tl.load(key_lengths + sequence)
    if part * QUERIES >= length * GROUP:
        return
    start = tl.load(starts + sequence).to(tl.int64)
    slots = table + tl.load(table_rows + sequence).to(tl.int64) * table_stride
    row = part * QUERIES + tl.arange(0, QUERIES)
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    position = keys - length + token
    channels = tl.arange(0, BLOCK)
    place = (start + token)[:, None] * q_stride + (query_head * WIDTH)[:, None] + channels[None, :]
    is_query = (token < length)[:, None] & (channels < WIDTH)[None, :]
    queries = tl.load(q + place, mask=is_query, other=0.0)

    largest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    result = tl.zeros((QUERIES, BLOCK), dtype=tl.float32)
    last = tl.minimum(keys, keys - length + (part * QUERIES + QUERIES - 1) // GROUP + 1)
    for first in range(0, last, KEYS):
        key = first + tl.arange(0, KEYS)
        slot = tl.load(slots + key, mask=key < keys, other=0).to(tl.int64)
        inside = (key < keys)[:, None] & (channels < WIDTH)[None, :]
        of_head = (head * WIDTH + channels)[None, :]
        present = tl.load(k + slot[:, None] * k_stride + of_head, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(present)) * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(largest - highest)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(v + slot[:, None] * v_stride + of_head, mask=inside, other=0.0)
        result = tl.dot(weights.to(values.dtype), values, result * fade[:, None])
        largest = highest
    result = result / total[:, None]
    place = (
        (start + token)[:, None] * out_stride + (query_head * WIDTH)[:, None] + channels[None, :]
    )
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def softmax_statistics(
    logits, place, scales, largest, total, mean, target, words, stride, WORDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    columns = tl.arange(0, WORDS)
    highest = tl.full((WORDS,), float("-inf"), dtype=tl.float32)
    for first in range(0, words, WORDS):
        inside = first + columns < words
        z = tl.load(logits + row * stride + first + columns, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, z.to(tl.float32) * scale)
    top = tl.max(highest, axis=0)
    sums = tl.zeros((WORDS,), dtype=tl.float32)
    products = tl.zeros((WORDS,), dtype=tl.float32)
    for first in range(0, words, WORDS):
        inside = first + columns < words
        z = tl.load(logits + row * stride + first + columns, mask=inside, other=float("-inf"))
        shifted = z.to(tl.float32) * scale - top
        weights = tl.exp(shifted)
        sums += weights
        products += tl.where(weights > 0.0, weights * shifted, 0.0)
    at_target = tl.load(logits + row * stride + tl.load(place + row)).to(tl.float32) * scale
    tl.store(largest + row, top)
    tl.store(total + row, tl.sum(sums, axis=0))
    tl.store(mean + row, tl.sum(products, axis=0))
    tl.store(target + row, at_target)
