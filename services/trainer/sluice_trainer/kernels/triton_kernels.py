"""The kernels of `turning` and `softmax`. Rows are numbered in 64 bits: a micro-batch of a million
tokens has more elements than 32 can count.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_forward(
    x,
    weight,
    cos,
    sin,
    out,
    rows,
    x_token,
    x_head,
    eps,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[row]: x[row] / its root mean square * weight, turned. A row is a head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    inside = (row < rows)[:, None]
    token = row // HEADS
    of_x = x + (token * x_token + (row % HEADS) * x_head)[:, None] + channel[None, :]
    a = tl.load(of_x, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(of_x + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        a = a * scale * tl.load(weight + channel).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + HALF + channel).to(tl.float32)[None, :]
    turns = token[:, None] * HALF + channel[None, :]
    c = tl.load(cos + turns, mask=inside, other=0.0)
    s = tl.load(sin + turns, mask=inside, other=0.0)
    of_out = out + row[:, None] * (2 * HALF) + channel[None, :]
    tl.store(of_out, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(of_out + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_backward(
    x,
    weight,
    cos,
    sin,
    of,
    of_x,
    parts,
    rows,
    x_token,
    x_head,
    of_token,
    of_head,
    eps,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """of_x: the gradient of x by that of the result, `of`. parts: of the weight, [programs, d]."""
    program = tl.program_id(0)
    channel = tl.arange(0, HALF)
    total_a = tl.zeros((HALF,), dtype=tl.float32)
    total_b = tl.zeros((HALF,), dtype=tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None]
        token = row // HEADS
        head = row % HEADS
        turns = token[:, None] * HALF + channel[None, :]
        c = tl.load(cos + turns, mask=inside, other=0.0)
        s = tl.load(sin + turns, mask=inside, other=0.0)
        at = of + (token * of_token + head * of_head)[:, None] + channel[None, :]
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        of_a = first * c + second * s
        of_b = second * c - first * s
        if NORMED:
            of_values = x + (token * x_token + head * x_head)[:, None] + channel[None, :]
            a = tl.load(of_values, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(of_values + HALF, mask=inside, other=0.0).to(tl.float32)
            mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
            scale = (1.0 / tl.sqrt(mean + eps))[:, None]
            a = a * scale
            b = b * scale
            total_a += tl.sum(of_a * a, axis=0)
            total_b += tl.sum(of_b * b, axis=0)
            of_a = of_a * tl.load(weight + channel).to(tl.float32)[None, :]
            of_b = of_b * tl.load(weight + HALF + channel).to(tl.float32)[None, :]
            along = (tl.sum(of_a * a, axis=1) + tl.sum(of_b * b, axis=1)) / (2 * HALF)
            of_a = (of_a - a * along[:, None]) * scale
            of_b = (of_b - b * along[:, None]) * scale
        to = of_x + row[:, None] * (2 * HALF) + channel[None, :]
        tl.store(to, of_a.to(of_x.dtype.element_ty), mask=inside)
        tl.store(to + HALF, of_b.to(of_x.dtype.element_ty), mask=inside)
    if NORMED:
        tl.store(parts + program * (2 * HALF) + channel, total_a)
        tl.store(parts + program * (2 * HALF) + HALF + channel, total_b)


@triton.jit
def softmax_gradient(
    logits,
    place,
    log_total,
    entropy,
    at_target,
    of_log_prob,
    of_entropy,
    out,
    words,
    logits_stride,
    scale,
    WORDS: tl.constexpr,
):
    """The gradient of a row's logits by those of its log-prob and its entropy."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    z = tl.load(logits + row * logits_stride + word, mask=inside, other=0.0).to(tl.float32) * scale
    log_p = z - tl.load(log_total + row)
    of_h = tl.load(of_entropy + row) * (log_p + tl.load(entropy + row))
    result = -tl.exp(log_p) * (tl.load(of_log_prob + row) + of_h)
    result += tl.where(word == tl.load(place + row), tl.load(at_target + row), 0.0)
    tl.store(out + row * words + word, (result * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_forward(up, weights, out, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr):
    """out[row]: SwiGLU of up[row], times the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        of_gate = up + row * 2 * width + column
        gate = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(of_gate + width, mask=inside, other=0.0).to(tl.float32)
        result = gate * tl.sigmoid(gate) * value * weight
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    up, weights, of, of_up, of_weights, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradients of `gated_forward` by that of its result, `of`."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
    along = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        of_gate = row * 2 * width + column
        gate = tl.load(up + of_gate, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(up + of_gate + width, mask=inside, other=0.0).to(tl.float32)
        result = tl.load(of + row * width + column, mask=inside, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        silu = gate * open_
        along += result * silu * value
        result *= weight
        by_gate = result * value * (open_ + silu * (1.0 - open_))
        tl.store(of_up + of_gate, by_gate.to(of_up.dtype.element_ty), mask=inside)
        tl.store(of_up + of_gate + width, (result * silu).to(of_up.dtype.element_ty), mask=inside)
    if WEIGHED:
        tl.store(of_weights + row, tl.sum(along, axis=0).to(of_weights.dtype.element_ty))


@triton.jit
def sums_of_rows(rows, places, out, count, width, MOST: tl.constexpr, COLUMNS: tl.constexpr):
    """out[token]: the sum of rows[places[token]], without the places that are `count`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for number in tl.static_range(MOST):
        place = tl.load(places + token * MOST + number)
        row = tl.load(rows + place * width + column, mask=inside & (place < count), other=0.0)
        total += row.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _moment(stored, at, inside, COMPACT: tl.constexpr):
    """A moment in float32; COMPACT: bf16, whose bits are the upper half of float32's."""
    value = tl.load(stored + at, mask=inside, other=0)
    if COMPACT:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _keep(stored, at, inside, value, threshold, COMPACT: tl.constexpr):
    """Store a moment, rounded to one of its neighbours in bf16 as the threshold says."""
    if COMPACT:
        bits = value.to(tl.int32, bitcast=True) + threshold
        tl.store(stored + at, (bits >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(stored + at, value, mask=inside)


@triton.jit
def compact_adamw(
    weights,
    gradient,
    first,
    second,
    count,
    piece,
    golden,
    offset,
    keep,
    beta1,
    beta2,
    eps,
    rate,
    root,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step of AdamW. keep: of a weight after its decay. rate: the learning rate by the first
    moment's correction; root: the root of the second one's.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    threshold = (((at % piece).to(tl.int32) * golden + offset) >> 16) & 0xFFFF
    g = tl.load(gradient + at, mask=inside, other=0.0)
    mean = _moment(first, at, inside, FIRST)
    mean += (1.0 - beta1) * (g - mean)
    square = _moment(second, at, inside, SECOND)
    square = beta2 * square + (1.0 - beta2) * g * g
    weight = tl.load(weights + at, mask=inside, other=0.0) * keep
    weight -= rate * mean / (tl.sqrt(square) / root + eps)
    tl.store(weights + at, weight, mask=inside)
    _keep(first, at, inside, mean, threshold, FIRST)
    _keep(second, at, inside, square, threshold, SECOND)
