"""Triton kernels of the other modules of this package.

Rows are numbered in 64 bits: a micro-batch of a million tokens has more elements than 32 bits can
count.
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
    """Normalise and rotate rows; a row is one head of a token.

    out[row] is x[row] divided by its root mean square, times weight, rotated.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    inside = (row < rows)[:, None]
    token = row // HEADS
    # a and b are the halves of a head: channel i is paired with channel i + HALF.
    x_pointers = x + (token * x_token + (row % HEADS) * x_head)[:, None] + channel[None, :]
    a = tl.load(x_pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_pointers + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        a = a * scale * tl.load(weight + channel).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + HALF + channel).to(tl.float32)[None, :]
    angles = token[:, None] * HALF + channel[None, :]
    c = tl.load(cos + angles, mask=inside, other=0.0)
    s = tl.load(sin + angles, mask=inside, other=0.0)
    out_pointers = out + row[:, None] * (2 * HALF) + channel[None, :]
    tl.store(out_pointers, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out_pointers + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_backward(
    x,
    weight,
    cos,
    sin,
    grad,
    grad_x,
    parts,
    rows,
    x_token,
    x_head,
    grad_token,
    grad_head,
    eps,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of `rotate_forward`: of x in `grad_x`, and of the weight as partial sums.

    parts: [programs, d].
    """
    program = tl.program_id(0)
    channel = tl.arange(0, HALF)
    total_a = tl.zeros((HALF,), dtype=tl.float32)
    total_b = tl.zeros((HALF,), dtype=tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None]
        token = row // HEADS
        head = row % HEADS
        angles = token[:, None] * HALF + channel[None, :]
        c = tl.load(cos + angles, mask=inside, other=0.0)
        s = tl.load(sin + angles, mask=inside, other=0.0)
        at = grad + (token * grad_token + head * grad_head)[:, None] + channel[None, :]
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        # The transposed rotation.
        grad_a = first * c + second * s
        grad_b = second * c - first * s
        if NORMED:
            x_pointers = x + (token * x_token + head * x_head)[:, None] + channel[None, :]
            a = tl.load(x_pointers, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x_pointers + HALF, mask=inside, other=0.0).to(tl.float32)
            mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF)
            scale = (1.0 / tl.sqrt(mean + eps))[:, None]
            a = a * scale
            b = b * scale
            total_a += tl.sum(grad_a * a, axis=0)
            total_b += tl.sum(grad_b * b, axis=0)
            grad_a = grad_a * tl.load(weight + channel).to(tl.float32)[None, :]
            grad_b = grad_b * tl.load(weight + HALF + channel).to(tl.float32)[None, :]
            # The norm does not depend on the length of x: remove the component along x.
            along = (tl.sum(grad_a * a, axis=1) + tl.sum(grad_b * b, axis=1)) / (2 * HALF)
            grad_a = (grad_a - a * along[:, None]) * scale
            grad_b = (grad_b - b * along[:, None]) * scale
        to = grad_x + row[:, None] * (2 * HALF) + channel[None, :]
        tl.store(to, grad_a.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(to + HALF, grad_b.to(grad_x.dtype.element_ty), mask=inside)
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
    grad_log_prob,
    grad_entropy,
    out,
    words,
    logits_stride,
    scale,
    WORDS: tl.constexpr,
):
    """Gradient of a row's logits from those of its log-prob and entropy."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    z = tl.load(logits + row * logits_stride + word, mask=inside, other=0.0).to(tl.float32) * scale
    log_p = z - tl.load(log_total + row)
    # d log p_t / dz = 1[t] - p, and dH / dz = -p (log p + H).
    entropy_part = tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    result = -tl.exp(log_p) * (tl.load(grad_log_prob + row) + entropy_part)
    result += tl.where(word == tl.load(place + row), tl.load(at_target + row), 0.0)
    tl.store(out + row * words + word, (result * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_forward(up, weights, out, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr):
    """out[row] is SwiGLU of up[row], times the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        gate_pointers = up + row * 2 * width + column
        gate = tl.load(gate_pointers, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(gate_pointers + width, mask=inside, other=0.0).to(tl.float32)
        result = gate * tl.sigmoid(gate) * value * weight
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    up, weights, grad, grad_up, grad_weights, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Gradients of `gated_forward` from the gradient of its result."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
    along = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        gate_offsets = row * 2 * width + column
        gate = tl.load(up + gate_offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(up + gate_offsets + width, mask=inside, other=0.0).to(tl.float32)
        result = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        silu = gate * open_
        along += result * silu * value
        result *= weight
        # d silu(g) / dg = sigmoid(g) + silu(g) (1 - sigmoid(g)).
        by_gate = result * value * (open_ + silu * (1.0 - open_))
        tl.store(grad_up + gate_offsets, by_gate.to(grad_up.dtype.element_ty), mask=inside)
        tl.store(
            grad_up + gate_offsets + width,
            (result * silu).to(grad_up.dtype.element_ty),
            mask=inside,
        )
    if WEIGHED:
        tl.store(grad_weights + row, tl.sum(along, axis=0).to(grad_weights.dtype.element_ty))


@triton.jit
def sums_of_rows(rows, places, out, count, width, MOST: tl.constexpr, COLUMNS: tl.constexpr):
    """out[token] is the sum of rows[places[token]]; places equal to `count` are skipped."""
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
    """Load a moment in float32. COMPACT: stored as bf16, the upper half of a float32's bits."""
    value = tl.load(stored + at, mask=inside, other=0)
    if COMPACT:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _keep(stored, at, inside, value, threshold, COMPACT: tl.constexpr):
    """Store a moment; COMPACT rounds it to one of its bf16 neighbours, as the threshold says."""
    if COMPACT:
        # A carry out of the lower half rounds up.
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
    """Take one step of AdamW.

    keep: factor of a weight after decay. rate: learning rate divided by the first moment's bias
    correction. root: square root of the second moment's bias correction.
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
