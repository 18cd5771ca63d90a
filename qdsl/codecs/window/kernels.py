"""Kernels of `window` (qdsl/codecs/window/reference.py): every symbol has a fixed place, and patches are applied afterwards.

A program of `skinny` multiplies 16 rows of w with 8 * BLOCKS rows of x.  W warps share K: a warp takes 128 columns in turn.

             codes: a word is 8 columns           uncoded bits: two words             x, transposed          sums

    lane     c = 0   c = 1   c = 2   c = 3        c = 0   c = 1   c = 2   c = 3        rows of x
            +-------+-------+-------+-------+    +-------+-------+-------+-------+    +---------+        +---------+
    row g   | 4     |       |       |       |    | 8     |       |       |       |    | 32      |   g    | 2c,     |
    (0..7)  | words |       |       |       | +  | words |       |       |       |    | columns | =      | 2c + 1  |
    row g+8 | 4     |       |       |       |    | 8     |       |       |       |    | of c    |  g+8   |         |
            +-------+-------+-------+-------+    +-------+-------+-------+-------+    +---------+        +---------+
              lane 4g + c: loads of 16 bytes

A lane loads exactly its part of the MMA's operand.  The operand's columns are in the order of the words, and x is loaded in the
same order.

- A mask and a shift move two codes to their bits of a pair, and one addition adds the base to both: no table.
- `to_weights` inserts the uncoded bits by mask and shift: two weights per instruction, in the form of an MMA operand.
- Patches would be branches in the loop.  So the loop multiplies the unpatched codes, and the error of patched columns is
  corrected afterwards, in float32, product by product.  `dequantize` and `symbols` overwrite patched elements at the end.

Cost, counted on sm_90, in instructions of a thread per weight: `skinny` 3.8 in its loop, and at K = 8192 another 1.4
outside of it, for the sum over warps and a round of patches; `dequantize` 4.2.
"""


from qdsl.runtime.gpu.kernels import lanes, pairs
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def lowest(base, AT: tl.constexpr):
    """The symbol of code 0 at bit AT of both halves."""
    return tl.load(base).to(tl.uint32) * (0x00010001 << AT)


@triton.jit
def unpack_eight(word, low, AT: tl.constexpr):
    """The symbols of a word of codes as pairs, at bit AT of each half; low: the symbol of code 0."""
    word = word.to(tl.uint32, bitcast=True)
    upper = word >> 8
    return (pairs.moved(word & 0x000F000F, AT) + low, pairs.moved(word & 0x00F000F0, AT - 4) + low,
            pairs.moved(upper & 0x000F000F, AT) + low, pairs.moved(upper & 0x00F000F0, AT - 4) + low)


@triton.jit
def load_patches(p, stop, index, value, K):
    """For patch numbers p: whether it is below `stop`, its row in the block, its column, its symbol."""
    live = p < stop
    at = tl.load(index + p, live, 0)
    return live, at // K, at % K, tl.load(value + p, live, 0).to(tl.uint32)


@triton.jit
def load_uncoded_bits(to_weights: tl.constexpr, uncoded, row, k, K8, live):
    """The uncoded bits of columns k of rows."""
    at = row * (2 * K8) + k // 8 * 2
    zero = tl.zeros_like(k).to(tl.uint32)
    return pairs.one(to_weights((zero, zero, zero, zero), tl.load(uncoded + at, live, 0).to(tl.uint32, bitcast=True),
                          tl.load(uncoded + at + 1, live, 0).to(tl.uint32, bitcast=True)), k)


@triton.jit
def symbols(codes, base, start, index, value, out, N, K, blocks, ROWS: tl.constexpr, STEP: tl.constexpr,
            PATCHES: tl.constexpr):
    """out[n, k]: the symbols of ROWS rows, which share a list of patches.

    blocks: the numbers of blocks of ROWS rows to decode; None for all in order.
    """
    block = tl.program_id(0)
    if blocks is not None:
        block = tl.load(blocks + block)
    n = block * ROWS + tl.arange(0, ROWS)[:, None]
    out += tl.program_id(0).to(tl.int64) * ROWS * K
    inside = tl.arange(0, ROWS)[:, None].to(tl.int64)
    K8 = tl.cdiv(K, 8)
    low = lowest(base, 0)
    for first in range(0, K8, STEP):
        i = first + tl.arange(0, STEP)[None, :]
        live = (n < N) & (i < K8)
        p = unpack_eight(tl.load(codes + n.to(tl.int64) * K8 + i, live, 0), low, 0)
        k = (i * 8)[:, :, None] + tl.arange(0, 8)
        tl.store(out + (inside * K)[:, :, None] + k, pairs.columns(p[0], p[1], p[2], p[3]).to(tl.uint8),
                 live[:, :, None] & (k < K))
    tl.debug_barrier()                                           # other threads may have stored the unpatched symbol
    stop = tl.load(start + block + 1)
    for first in range(tl.load(start + block), stop, PATCHES):
        live, row, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
        tl.store(out + row.to(tl.int64) * K + k, symbol.to(tl.uint8), live)


@triton.jit
def dequantize(codes, base, start, index, value, uncoded, uncoded64, out, out16, N, K, K8, to_weights: tl.constexpr,
               AT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TIMES: tl.constexpr, PATCHES: tl.constexpr):
    """Writes the 16-bit weights of ROWS rows, as words of two columns.

    to_weights: makes pairs of weights from pairs of symbols and the uncoded bits of eight columns.
    uncoded, uncoded64: those bits, as words of 32 and 64 bits.  out, out16: weights, as words of 32 and 16 bits.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    begin = lanes.within(n, N).to(tl.int64) * K8
    codes += begin + tl.arange(0, STEP)[None, :]
    uncoded64 += begin + tl.arange(0, STEP)[None, :]
    place = out + begin * 4 + tl.arange(0, 4 * STEP)[None, :]
    low = lowest(base, AT)
    for first in range(0, K8, STEP * TIMES):
        for i in tl.static_range(TIMES):                         # one word per thread, so that it stores what it loaded
            more = tl.load(uncoded64 + i * STEP)
            p = to_weights(unpack_eight(tl.load(codes + i * STEP), low, AT), more.to(tl.uint32), (more >> 32).to(tl.uint32))
            tl.store(place + i * STEP * 4, pairs.words(p[0], p[1], p[2], p[3]), n < N)
        codes += STEP * TIMES
        uncoded64 += STEP * TIMES
        place += STEP * TIMES * 4
    tl.debug_barrier()                                           # other threads may have stored the unpatched weight
    above = tl.program_id(0).to(tl.int64) * ROWS
    stop = tl.load(start + tl.program_id(0) + 1)
    for first in range(tl.load(start + tl.program_id(0)), stop, PATCHES):
        live, row, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
        bits = load_uncoded_bits(to_weights, uncoded, above + row, k, K8, live) | (symbol << AT)
        tl.store(out16 + (above + row) * K + k, bits.to(tl.int16), live)


@triton.jit
def skinny(codes, base, start, index, value, uncoded, x, x16, bias, out, M, N, K, K8, to_weights: tl.constexpr, AT: tl.constexpr,
        ROWS: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, PATCHES: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, for ROWS rows of w and 8 * BLOCKS of x.

    W warps share K.  Patched columns are first multiplied by their code's weight; the correction subtracts that, product by
    product.  x, uncoded: as words of 32 bits.
    """
    warp, g, c = lanes.warps(W)
    a = tl.arange(0, 16)[None, :]
    n = tl.program_id(0) * ROWS
    m = tl.program_id(1) * (8 * BLOCKS)
    upper, lower = lanes.rows(n + g, N)
    low = lowest(base, AT)
    acc = ()
    for _ in tl.static_range(BLOCKS):
        acc = acc + (tl.zeros((W, 16, 8), tl.float32),)
    for first in range(0, K8, 16 * W):
        chunk = first + warp * 16
        live = chunk + a < K8
        code = (_load4(codes + (upper * K8 + chunk + a), live, EVEN), _load4(codes + (lower * K8 + chunk + a), live, EVEN))
        at = chunk * 2 + a // 4 * 8 + a % 4
        high = (_load4(uncoded + (upper * (2 * K8) + at), live, EVEN), _load4(uncoded + (lower * (2 * K8) + at), live, EVEN))
        more = (_load4(uncoded + (upper * (2 * K8) + at + 4), live, EVEN),
                _load4(uncoded + (lower * (2 * K8) + at + 4), live, EVEN))
        xs = ()
        for b in tl.static_range(BLOCKS):
            token = x + (lanes.within(m + b * 8 + g, M).to(tl.int64) * (4 * K8) + chunk * 4 + a // 4 * 16 + a % 4)
            xs = xs + ((_load4(token, live, EVEN), _load4(token + 4, live, EVEN), _load4(token + 8, live, EVEN),
                        _load4(token + 12, live, EVEN)),)
        for u in tl.static_range(4):
            other = high if u < 2 else more
            upper_p = to_weights(unpack_eight(code[0][u], low, AT), _bits(other[0][u % 2 * 2]), _bits(other[0][u % 2 * 2 + 1]))
            lower_p = to_weights(unpack_eight(code[1][u], low, AT), _bits(other[1][u % 2 * 2]), _bits(other[1][u % 2 * 2 + 1]))
            w = pairs.weights(upper_p, lower_p, F)
            sums = ()
            for b in tl.static_range(BLOCKS):
                v = xs[b][u]
                sums = sums + (tl.dot(w, lanes.columns_of_word(v[0], v[1], v[2], v[3], F), acc[b]),)
            acc = sums
    stop = tl.load(start + tl.program_id(0) + 1)
    row = tl.arange(0, 16)[:, None]
    for b in tl.static_range(BLOCKS):
        token = m + b * 8 + tl.arange(0, 8)
        total = tl.sum(acc[b], 0)
        for first in range(tl.load(start + tl.program_id(0)), stop, PATCHES):
            live, r, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
            bits = load_uncoded_bits(to_weights, uncoded, n.to(tl.int64) + r, k, K8, live)
            xk = tl.load(x16 + lanes.within(token, M).to(tl.int64)[:, None] * K + k[None, :]).to(tl.float32)
            mine = (live[None, :] & (r[None, :] == row))[:, None, :]
            wrong = xk * pairs.number(bits | (low & 0xFFFF), F)[None, :]
            if AT < 8:                                           # the sign is not in the symbol: infinity stays infinite
                wrong = tl.where(tl.abs(xk) < float("inf"), wrong, 0.0)
            right = xk * pairs.number(bits | (symbol << AT), F)[None, :]
            total -= tl.sum(tl.where(mine, wrong[None, :, :], 0.0), 2)
            total += tl.sum(tl.where(mine, right[None, :, :], 0.0), 2)
        lanes_n = n + row
        if bias is not None:
            total += tl.load(bias + lanes_n, lanes_n < N, 0).to(tl.float32)
        tl.store(out + token[None, :].to(tl.int64) * N + lanes_n, total, (lanes_n < N) & (token[None, :] < M))


@triton.jit
def _load4(p, live, EVEN: tl.constexpr):
    """Four words of every lane, 0 where not live."""
    if EVEN:
        return pairs.apart(tl.load(p))
    else:
        return pairs.apart(tl.load(p, live, 0))


@triton.jit
def _bits(word):
    return word.to(tl.uint32, bitcast=True)
