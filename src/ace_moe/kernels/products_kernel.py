"""What the expert kernels share: the two products of an expert on a tile of slots, and what lies between them.

A skipped slot's id is not in [0, E). Weights are [E, rows, columns] with any strides; FP8 weights have a factor for every
block of QN rows and QK columns (QK = 0: none) and are widened to the tokens' type in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_of(e, w, near, near_w, w_expert, there, NEAR: tl.constexpr):
    """Where expert e's weights begin (one, or a tensor of them): at its copy beside the GPU, where `near` [E] has one."""
    at = w + e.to(tl.int64) * w_expert
    if NEAR:
        row = tl.load(near + e, mask=there, other=-1)
        at = tl.where(row < 0, at, near_w + row.to(tl.int64) * w_expert)
    return at


@triton.jit
def both(a, b, c, d):
    """Two sums at once: threads exchange theirs in one go."""
    return a + c, b + d


@triton.jit
def by_eight(products):
    """Sums of eight neighbours in the last dimension: a thread has them all, and from here on an eighth of the registers."""
    last: tl.constexpr = len(products.shape) - 1
    shape: tl.constexpr = products.shape[:last] + [products.shape[last] // 8, 8]  # noqa: RUF005  not known to Triton
    return tl.sum(tl.reshape(products, shape), last + 1)


@triton.jit
def add_row(out, add, ADD: tl.constexpr):
    """`out` of the result's type plus what else belongs to the token, rounded as two operations would."""
    if ADD:
        out = (out.to(tl.float32) + add.to(tl.float32)).to(out.dtype)
    return out


@triton.jit
def activate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """activation.reference for gated experts."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == 0:
        return gate * tl.sigmoid(gate) * up
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner) * up  # 0.5 · (1 + tanh z) = sigmoid(2 z)
    else:
        return gate * tl.sigmoid(ALPHA * gate) * (up + 1)


@triton.jit
def finish_up(
    gate, up, b, gate_row, up_row, inside, GATED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Bias and activation. gate, up [.., BN] in fp32; b points at the expert's biases."""
    if BIAS:
        gate += tl.load(b + gate_row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(b + up_row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        return activate(gate, up, KIND, ALPHA, LIMIT)
    else:
        gate = tl.maximum(gate, 0.0)
        return gate * gate


@triton.jit
def _add(total, x, w, factors, row, inside, block, QN: tl.constexpr, QK: tl.constexpr, s_row, s_col):
    """total + x w, w [BK, BN] being columns of rows `row` inside one block of columns."""
    if QK > 0:
        factor = tl.load(factors + (row // QN) * s_row + block * s_col, mask=inside, other=0.0)
        return total + tl.dot(x, w.to(x.dtype), input_precision="ieee") * factor.to(tl.float32)[None, :]
    else:
        return tl.dot(x, w, total, input_precision="ieee")


@triton.jit
def dot_up(
    x_rows, live, w, desc, s, b, e, n0, d, m, w_row, w_col, s_row, s_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """act(x W_gateᵀ) ∘ (x W_upᵀ): [BM, BN] in fp32, columns n0 ….

    x_rows points at the rows' starts; w, s, b at expert e's first weight, factor, bias. With BULK the weights come
    through `desc`, a descriptor of [E · rows, d], by the bulk copy engine; rows past the expert's last are its
    neighbours', and never stored.
    """
    k = tl.arange(0, BK)
    n = n0 + tl.arange(0, BN)
    inside = n < m
    gate_row = n * 2 if INTERLEAVED else n
    up_row = gate_row + 1 if INTERLEAVED else n + m
    gates = w + gate_row[None, :] * w_row + k[:, None] * w_col
    ups = w + up_row[None, :] * w_row + k[:, None] * w_col
    first = e * 2 * m + n0 if GATED else e * m + n0
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, d, BK):
        full = live[:, None] if EVEN else live[:, None] & (start + k < d)[None, :]
        column = inside[None, :] if EVEN else inside[None, :] & (start + k < d)[:, None]
        x = tl.load(x_rows[:, None] + start + k[None, :], mask=full, other=0.0)
        if BULK:
            gate = tl.dot(x, desc.load([first, start]).T, gate, input_precision="ieee")
            if GATED:
                up = tl.dot(x, desc.load([first + m, start]).T, up, input_precision="ieee")
        else:
            block = start // QK if QK > 0 else 0
            w_gate = tl.load(gates + start * w_col, mask=column, other=0.0)
            gate = _add(gate, x, w_gate, s, gate_row, inside, block, QN, QK, s_row, s_col)
            if GATED:
                w_up = tl.load(ups + start * w_col, mask=column, other=0.0)
                up = _add(up, x, w_up, s, up_row, inside, block, QN, QK, s_row, s_col)
    return finish_up(gate, up, b, gate_row[None, :], up_row[None, :], inside[None, :], GATED, BIAS, KIND, ALPHA, LIMIT)


@triton.jit
def dot_down(
    h_rows, live, w, desc, s, b, e, n0, d, m, w_row, w_col, s_row, s_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr,
    QK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """h W_downᵀ (+ b): [BM, BN] in fp32, columns n0 …."""
    k = tl.arange(0, BK)
    n = n0 + tl.arange(0, BN)
    inside = n < d
    columns = w + n[None, :] * w_row + k[:, None] * w_col
    out = tl.zeros((BM, BN), tl.float32)
    for start in range(0, m, BK):
        full = live[:, None] if EVEN else live[:, None] & (start + k < m)[None, :]
        column = inside[None, :] if EVEN else inside[None, :] & (start + k < m)[:, None]
        h = tl.load(h_rows[:, None] + start + k[None, :], mask=full, other=0.0)
        if BULK:
            out = tl.dot(h, desc.load([e * d + n0, start]).T, out, input_precision="ieee")
        else:
            block = start // QK if QK > 0 else 0
            w_down = tl.load(columns + start * w_col, mask=column, other=0.0)
            out = _add(out, h, w_down, s, n, inside, block, QN, QK, s_row, s_col)
    if BIAS:
        out += tl.load(b + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def rms_norm(v, scale, root, PLUS: tl.constexpr, ROUNDED: tl.constexpr, dtype: tl.constexpr):
    """An RMS norm of v in fp32, rounded where transformers rounds: before the scale as well, or after it alone."""
    v = v * root
    if ROUNDED:
        v = v.to(dtype).to(tl.float32)
    v = v * (scale + 1.0) if PLUS else v * scale
    return v.to(dtype).to(tl.float32)
