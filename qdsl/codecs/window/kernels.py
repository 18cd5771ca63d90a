"""Kernels of `window` and `row_window` (their reference.py): every symbol has a fixed place, and patches are applied afterwards.

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

Codes of three bits come as two tensors, of which `upper` has the third bits; it is None for four bits.  They take two more
instructions for a pair.  Patches are then sixty times as many.  So each row has a list of its own, and a program adds those of
its 16 rows side by side: nothing compares patches with rows.

Cost, counted on sm_90, in instructions of a thread per weight: `skinny` 3.8 in its loop, and at K = 8192 another 1.4
outside of it, for the sum over warps and a round of patches; `dequantize` 4.2.
"""


from qdsl.runtime.gpu.kernels import lanes, pairs
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def lowest(base, row, AT: tl.constexpr, of_rows: tl.constexpr):
    """The symbol of code 0 at bit AT of both halves; of_rows: each row has its own."""
    if of_rows:
        base += row
    return tl.load(base).to(tl.uint32) * (0x00010001 << AT)


@triton.jit
def unpack_eight(word, upper, low, AT: tl.constexpr, EIGHT: tl.constexpr = 0):
    """The symbols of eight columns as pairs, at bit AT of each half; low: the symbol of code 0.

    word: codes of four bits; with `upper`, the third bits of 32 columns, the lower two of 16, of which EIGHT says which eight.
    """
    word = word.to(tl.uint32, bitcast=True)
    if upper is None:
        higher = word >> 8
        return (pairs.moved(word & 0x000F000F, AT) + low, pairs.moved(word & 0x00F000F0, AT - 4) + low,
                pairs.moved(higher & 0x000F000F, AT) + low, pairs.moved(higher & 0x00F000F0, AT - 4) + low)
    else:
        upper = upper.to(tl.uint32, bitcast=True)
        p = ()
        for j in tl.static_range(4):
            lower = pairs.moved(word, AT - EIGHT % 2 * 8 - 2 * j) & (0x00030003 << AT)
            p = p + (((pairs.moved(upper, AT + 2 - 4 * EIGHT - j) & (0x00040004 << AT)) | lower) + low,)
        return p


@triton.jit
def load_eight(codes, upper, row, i, K8, live, low, AT: tl.constexpr):
    """The symbols of columns 8i to 8i + 7 of rows as pairs, at bit AT of each half."""
    if upper is None:
        return unpack_eight(tl.load(codes + row * K8 + i, live, 0), None, low, AT)
    else:
        words = tl.cdiv(K8, 4)
        word = tl.load(codes + row * (2 * words) + i // 2, live, 0).to(tl.uint32, bitcast=True)
        third = tl.load(upper + row * words + i // 4, live, 0).to(tl.uint32, bitcast=True)
        return unpack_eight(word >> (i % 2 * 8).to(tl.uint32), third >> (i % 4 * 4).to(tl.uint32), low, AT)


@triton.jit
def load_patches(p, stop, index, value, K):
    """For patch numbers p: whether it is below `stop`, its row in the block, its column, its symbol."""
    live = p < stop
    at = tl.load(index + p, live, 0)
    return live, at // K, at % K, tl.load(value + p, live, 0).to(tl.uint32)


@triton.jit
def list_of(start, row, SPANS: tl.constexpr):
    """Where the lists of patches of rows begin and end; each row has SPANS of them."""
    return tl.load(start + row * SPANS), tl.load(start + (row + 1) * SPANS)


@triton.jit
def load_row_patches(p, stop, column, value, start, row, SPANS: tl.constexpr):
    """For patch numbers p of rows: whether it is below `stop`, its column, its symbol.  A list has 65536 columns of a row."""
    live, span = p < stop, tl.zeros_like(p)
    for i in tl.static_range(1, SPANS):
        span += (p >= tl.load(start + row * SPANS + i)).to(tl.int32)
    return live, span * 65536 + (tl.load(column + p, live, 0).to(tl.int32) & 0xFFFF), tl.load(value + p, live, 0).to(tl.uint32)


@triton.jit
def load_uncoded_bits(to_weights: tl.constexpr, uncoded, row, k, K8, live):
    at = row * (2 * K8) + k // 8 * 2
    zero = tl.zeros_like(k).to(tl.uint32)
    return pairs.one(to_weights((zero, zero, zero, zero), tl.load(uncoded + at, live, 0).to(tl.uint32, bitcast=True),
                          tl.load(uncoded + at + 1, live, 0).to(tl.uint32, bitcast=True)), k)


@triton.jit
def symbols(codes, upper, base, start, index, value, out, N, K, blocks, ROWS: tl.constexpr, STEP: tl.constexpr,
            PATCHES: tl.constexpr, SPANS: tl.constexpr):
    """out[n, k]: the symbols of ROWS rows.

    blocks: the numbers of blocks of ROWS rows to decode; None for all in order.
    """
    block = tl.program_id(0)
    if blocks is not None:
        block = tl.load(blocks + block)
    n = block * ROWS + tl.arange(0, ROWS)[:, None]
    row = lanes.within(n, N).to(tl.int64)
    out += tl.program_id(0).to(tl.int64) * ROWS * K
    inside = tl.arange(0, ROWS)[:, None].to(tl.int64)
    K8 = tl.cdiv(K, 8)
    low = lowest(base, row, 0, upper is not None)
    for first in range(0, K8, STEP):
        i = first + tl.arange(0, STEP)[None, :]
        live = (n < N) & (i < K8)
        p = load_eight(codes, upper, row, i, K8, live, low, 0)
        k = (i * 8)[:, :, None] + tl.arange(0, 8)
        tl.store(out + (inside * K)[:, :, None] + k, pairs.columns(p[0], p[1], p[2], p[3]).to(tl.uint8),
                 live[:, :, None] & (k < K))
    tl.debug_barrier()                                           # other threads may have stored the unpatched symbol
    if upper is None:
        stop = tl.load(start + block + 1)
        for first in range(tl.load(start + block), stop, PATCHES):
            live, own, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
            tl.store(out + own.to(tl.int64) * K + k, symbol.to(tl.uint8), live)
    else:
        head, stop = list_of(start, row, SPANS)
        place = head + tl.arange(0, PATCHES)[None, :]
        for first in range(0, tl.max(stop - head), PATCHES):
            live, k, symbol = load_row_patches(place + first, stop, index, value, start, row, SPANS)
            tl.store(out + inside * K + k, symbol.to(tl.uint8), live & (n < N))


@triton.jit
def dequantize(codes, upper, base, start, index, value, uncoded, uncoded64, out, out16, N, K, K8, to_weights: tl.constexpr,
               AT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TIMES: tl.constexpr, PATCHES: tl.constexpr,
               SPANS: tl.constexpr):
    """Writes the 16-bit weights of ROWS rows, as words of two columns.

    to_weights: makes pairs of weights from pairs of symbols and the uncoded bits of eight columns.
    uncoded, uncoded64: those bits, as words of 32 and 64 bits.  out, out16: weights, as words of 32 and 16 bits.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = lanes.within(n, N).to(tl.int64)
    begin = row * K8
    eight = tl.arange(0, STEP)[None, :]
    uncoded64 += begin + eight
    place = out + begin * 4 + tl.arange(0, 4 * STEP)[None, :]
    low = lowest(base, row, AT, upper is not None)
    if upper is None:
        codes += begin + eight
    else:
        codes += begin // 2 + eight // 2
        upper += begin // 4 + eight // 4
    for first in range(0, K8, STEP * TIMES):
        for i in tl.static_range(TIMES):                         # one word per thread, so that it stores what it loaded
            more = tl.load(uncoded64 + i * STEP)
            if upper is None:
                p = unpack_eight(tl.load(codes + i * STEP), None, low, AT)
            else:                                                # of 16 and 32 columns: threads beside each other load the same
                p = unpack_eight(tl.load(codes + i * STEP // 2).to(tl.uint32, bitcast=True) >> (eight % 2 * 8).to(tl.uint32),
                                 tl.load(upper + i * STEP // 4).to(tl.uint32, bitcast=True) >> (eight % 4 * 4).to(tl.uint32),
                                 low, AT)
            p = to_weights(p, more.to(tl.uint32), (more >> 32).to(tl.uint32))
            tl.store(place + i * STEP * 4, pairs.interleave_words(p[0], p[1], p[2], p[3]), n < N)
        codes += STEP * TIMES if upper is None else STEP * TIMES // 2
        if upper is not None:
            upper += STEP * TIMES // 4
        uncoded64 += STEP * TIMES
        place += STEP * TIMES * 4
    tl.debug_barrier()                                           # other threads may have stored the unpatched weight
    if upper is None:
        above = tl.program_id(0).to(tl.int64) * ROWS
        stop = tl.load(start + tl.program_id(0) + 1)
        for first in range(tl.load(start + tl.program_id(0)), stop, PATCHES):
            live, own, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
            bits = load_uncoded_bits(to_weights, uncoded, above + own, k, K8, live) | (symbol << AT)
            tl.store(out16 + (above + own) * K + k, bits.to(tl.int16), live)
    else:
        head, stop = list_of(start, row, SPANS)
        place = head + tl.arange(0, PATCHES)[None, :]
        for first in range(0, tl.max(stop - head), PATCHES):
            live, k, symbol = load_row_patches(place + first, stop, index, value, start, row, SPANS)
            bits = load_uncoded_bits(to_weights, uncoded, row, k, K8, live) | (symbol << AT)
            tl.store(out16 + row * K + k, bits.to(tl.int16), live & (n < N))


@triton.jit
def skinny(codes, upper, base, start, index, value, uncoded, x, x16, bias, out, M, N, K, K8, to_weights: tl.constexpr,
           AT: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
           PATCHES: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32, for ROWS rows of w and 8 * BLOCKS of x.

    W warps share K.  Patched columns are first multiplied by their code's weight; the correction subtracts that, product by
    product, for TOKENS rows of x.  x, uncoded: as words of 32 bits.
    """
    warp, g, c = lanes.warps(W)
    a = tl.arange(0, 16)[None, :]
    n = tl.program_id(0) * ROWS
    m = tl.program_id(1) * (8 * BLOCKS)
    rows = lanes.rows(n + g, N)
    of_rows: tl.constexpr = upper is not None
    low = (lowest(base, rows[0], AT, of_rows), lowest(base, rows[1], AT, of_rows))
    if of_rows:                                                  # loaded now, so that they are there after the loop
        own = lanes.within(n + tl.arange(0, 16)[:, None], N).to(tl.int64)
        head, stop = list_of(start, own, 1)
        place = head + tl.arange(0, PATCHES)[None, :]
        patches = load_row_patches(place, stop, index, value, start, own, 1)
    acc = lanes.zeros(BLOCKS, W)
    for first in range(0, K8, 16 * W):
        chunk = first + warp * 16
        live = chunk + a < K8
        code = (_load_codes(codes, upper, rows[0], chunk, K8, EVEN), _load_codes(codes, upper, rows[1], chunk, K8, EVEN))
        third = (None, None)
        if upper is not None:
            third = (_load_thirds(upper, rows[0], chunk, c, K8, EVEN), _load_thirds(upper, rows[1], chunk, c, K8, EVEN))
        at = chunk * 2 + a // 4 * 8 + a % 4
        high = (_load4(uncoded + (rows[0] * (2 * K8) + at), live, EVEN), _load4(uncoded + (rows[1] * (2 * K8) + at), live, EVEN))
        more = (_load4(uncoded + (rows[0] * (2 * K8) + at + 4), live, EVEN),
                _load4(uncoded + (rows[1] * (2 * K8) + at + 4), live, EVEN))
        xs = ()
        for b in tl.static_range(BLOCKS):
            token = x + (lanes.within(m + b * 8 + g, M).to(tl.int64) * (4 * K8) + chunk * 4 + a // 4 * 16 + a % 4)
            xs = xs + ((_load4(token, live, EVEN), _load4(token + 4, live, EVEN), _load4(token + 8, live, EVEN),
                        _load4(token + 12, live, EVEN)),)
        for u in tl.static_range(4):
            other = high if u < 2 else more
            upper_p = to_weights(unpack_eight(code[0][u], third[0], low[0], AT, u), _bits(other[0][u % 2 * 2]),
                                 _bits(other[0][u % 2 * 2 + 1]))
            lower_p = to_weights(unpack_eight(code[1][u], third[1], low[1], AT, u), _bits(other[1][u % 2 * 2]),
                                 _bits(other[1][u % 2 * 2 + 1]))
            w = pairs.weights(upper_p, lower_p, F)
            sums = ()
            for b in tl.static_range(BLOCKS):
                v = xs[b][u]
                sums = sums + (tl.dot(w, lanes.columns_of_word(v[0], v[1], v[2], v[3], F), acc[b]),)
            acc = sums
    for b in tl.static_range(BLOCKS):
        token = m + b * 8
        if upper is None:
            total = _patched(tl.sum(acc[b], 0), base, start, index, value, uncoded, x16, token, M, K, K8, to_weights, AT, ROWS,
                             PATCHES, F)
        else:
            total = _patched_by_rows(tl.sum(acc[b], 0), patches, head, stop, own, base, start, index, value, uncoded, x16, token,
                                     M, K, K8, to_weights, AT, TOKENS, PATCHES, F)
        token += tl.arange(0, 8)
        lanes_n = n + tl.arange(0, 16)[:, None]
        if bias is not None:
            total += tl.load(bias + lanes_n, lanes_n < N, 0).to(tl.float32)
        tl.store(out + token[None, :].to(tl.int64) * N + lanes_n, total, (lanes_n < N) & (token[None, :] < M))


@triton.jit
def _patched(total, base, start, index, value, uncoded, x16, m, M, K, K8, to_weights: tl.constexpr, AT: tl.constexpr,
             ROWS: tl.constexpr, PATCHES: tl.constexpr, F: tl.constexpr):
    """Sums [16, 8] of rows of w and of x from m on, corrected by the list of patches that the rows of w share."""
    n, token, row = tl.program_id(0) * ROWS, m + tl.arange(0, 8), tl.arange(0, 16)[:, None]
    low = lowest(base, 0, AT, False)
    stop = tl.load(start + tl.program_id(0) + 1)
    for first in range(tl.load(start + tl.program_id(0)), stop, PATCHES):
        live, r, k, symbol = load_patches(first + tl.arange(0, PATCHES), stop, index, value, K)
        bits = load_uncoded_bits(to_weights, uncoded, n.to(tl.int64) + r, k, K8, live)
        xk = tl.load(x16 + lanes.within(token, M).to(tl.int64)[:, None] * K + k[None, :]).to(tl.float32)
        mine = (live[None, :] & (r[None, :] == row))[:, None, :]
        right, wrong = _products(xk, bits[None, :], symbol[None, :], low, AT, F)
        total -= tl.sum(tl.where(mine, wrong[None, :, :], 0.0), 2)
        total += tl.sum(tl.where(mine, right[None, :, :], 0.0), 2)
    return total


@triton.jit
def _patched_by_rows(total, patches, head, stop, row, base, start, column, value, uncoded, x16, m, M, K, K8,
                     to_weights: tl.constexpr, AT: tl.constexpr, TOKENS: tl.constexpr, PATCHES: tl.constexpr, F: tl.constexpr):
    """Sums [16, 8] of rows of w and of x from m on, of which TOKENS are wanted, corrected by the list of each row.

    patches: the first ones of the lists, which are [head, stop).  Each round loads those of the next, and waits
    for uncoded bits and x alone.
    """
    token = lanes.within(m + tl.arange(0, TOKENS), M).to(tl.int64)[None, :, None]
    low = lowest(base, row, AT, True)[:, :, None]
    added, taken = tl.zeros((16, TOKENS, PATCHES), tl.float32), tl.zeros((16, TOKENS, PATCHES), tl.float32)
    place = head + tl.arange(0, PATCHES)[None, :]
    for first in range(PATCHES, tl.max(stop - head) + PATCHES, PATCHES):
        live, k, symbol = patches
        patches = load_row_patches(place + first, stop, column, value, start, row, 1)
        bits = load_uncoded_bits(to_weights, uncoded, row, k, K8, live)
        xk = tl.load(x16 + token * K + k[:, None, :]).to(tl.float32)
        right, wrong = _products(xk, bits[:, None, :], symbol[:, None, :], low, AT, F)
        added += tl.where(live[:, None, :], right, 0.0)          # not their difference: that would lose tiny weights
        taken += tl.where(live[:, None, :], wrong, 0.0)
    return total - tl.sum(taken, 2) + tl.sum(added, 2)


@triton.jit
def _products(xk, bits, symbol, low, AT: tl.constexpr, F: tl.constexpr):
    """The products of x with patched weights: with the weight itself, and with that of code 0."""
    wrong = xk * pairs.number(bits | (low & 0xFFFF), F)
    if AT < 8:                                                   # the sign is not in the symbol: infinity stays infinite
        wrong = tl.where(tl.abs(xk) < float("inf"), wrong, 0.0)
    return xk * pairs.number(bits | (symbol << AT), F), wrong


@triton.jit
def _load_codes(codes, upper, row, chunk, K8, EVEN: tl.constexpr):
    """The words with codes of each eight of the 32 columns that a lane has of 128; with `upper`, two eights share one."""
    if upper is None:
        a = tl.arange(0, 16)[None, :]
        return _load4(codes + (row * K8 + chunk + a), chunk + a < K8, EVEN)
    else:
        at = chunk // 2 + tl.arange(0, 8)[None, :]
        word = _load(codes + (row * (K8 // 2) + at), at < K8 // 2, EVEN)
        first, second = tl.split(word.reshape(word.shape[0], 4, 2))
        return first, first, second, second


@triton.jit
def _load_thirds(upper, row, chunk, c, K8, EVEN: tl.constexpr):
    """The word with the third bits of the 32 columns that lane c has of 128."""
    at = chunk // 4 + c
    return _load(upper + (row * (K8 // 4) + at), at < K8 // 4, EVEN)


@triton.jit
def _load(p, live, EVEN: tl.constexpr):
    """Words, 0 where not live."""
    if EVEN:
        return tl.load(p)
    else:
        return tl.load(p, live, 0)


@triton.jit
def _load4(p, live, EVEN: tl.constexpr):
    """Four words of every lane, 0 where not live."""
    return pairs.apart(_load(p, live, EVEN))


@triton.jit
def _bits(word):
    return word.to(tl.uint32, bitcast=True)
