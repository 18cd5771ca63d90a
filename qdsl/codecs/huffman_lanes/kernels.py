"""Kernels of `huffman_lanes` (reference.py): a thread decodes a lane, eight columns of its row at a time.

A program of `skinny` multiplies 2 * W groups of lanes with 8 * BLOCKS rows of x, or half of that where a row has 8 lanes.

      words of a group, in turns         a row of w, of R = 4 lanes          w's operand       x, transposed      sums

        lane 0   1        31             0      8      16     24     32       k of lane c      rows of x
       +------+------+- -+------+       +------+------+------+------+- -     +-----------+    +---------+       +---------+
turn 0 | 32   | 32   |   | 32   |    n  |lane 0| 1    | 2    | 3    | 0  row | 8 columns |    | 8       |    g  | 2c,     |
       | bits | bits |   | bits |       +------+------+------+------+- -  g  | of lane   |    | columns | =     | 2c + 1  |
turn 1 |      |      |   |      |  n+1  |lane 4| 5    | 6    | 7    | 4 g+8 | 4g + c    |    | of c    |  g+8  |         |
       +------+------+- -+------+       +------+------+------+------+- -     +-----------+    +---------+       +---------+

Lane 4g + c keeps up to 64 bits of two streams, one of row g and one of row g + 8, each in a register pair.  It decodes exactly
its part of the MMA's operand, so that weights stay in its registers, and x is loaded in the same order.

- A code has at most 8 bits: one load from a table of 512 bytes, in the L1 cache, gives symbol and length.  Table and address
  are joined by OR, since the table begins at a multiple of 512.
- A lane has at least 32 bits, enough for four codes, so a stream is refilled once per four symbols, by selects instead of
  branches.  Lanes that need a word load adjacent words, because the words of lanes are interleaved.
- A symbol goes to its bit of a pair by mask and shift.  `to_weights` then adds the uncoded bits: two weights an instruction.
- mma.sync rather than wgmma, for its 8 columns; the matrix unit is idle most of the time.
- Four symbols depend on each other: shift, mask, load, subtraction.  Two streams per lane and other warps hide the latency.

Cost, counted on sm_90, in instructions of a thread per weight: `skinny` 13.8, most of them for codes, `dequantize` 12.8.
"""


from qdsl.runtime.gpu.kernels import lanes, pairs, tile
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def refill_bits(at, inside, bits, left):
    """Load 32 more bits for lanes with fewer, if they are inside the words.

    at: a lane's read position.  left: its number of bits minus 8, so that the next code is in the eight bits from bit `left` on.
    """
    need = left < 24
    word = tl.load(at, need & inside, 0).to(tl.uint32, bitcast=True)
    bits = tl.where(need, (bits << 32) | word.to(tl.uint64), bits)
    return tl.where(need, at + 32, at), bits, tl.where(need, left + 32, left)


@triton.jit
def next_symbol(table, bits, left):
    """The next table entry, 128 * symbol + bits of its code; table: its address, with 9 zero bits at the end."""
    place = table | ((bits << 1 >> left.to(tl.uint64)).to(tl.uint32) & 510).to(tl.uint64)
    entry = tl.load(place.to(tl.pointer_type(tl.uint16))).to(tl.uint32)
    return entry, left - (entry & 127).to(tl.int32)


@triton.jit
def next_four(table, at, inside, bits, left, AT: tl.constexpr):
    """The next four symbols as pairs, at bit AT of each half; they take at most 32 bits."""
    at, bits, left = refill_bits(at, inside, bits, left)
    e0, left = next_symbol(table, bits, left)
    e1, left = next_symbol(table, bits, left)
    e2, left = next_symbol(table, bits, left)
    e3, left = next_symbol(table, bits, left)
    first, second = (e0 + (e1 << 16)) & 0x7F807F80, (e2 + (e3 << 16)) & 0x7F807F80
    return pairs.moved(first, AT - 7), pairs.moved(second, AT - 7), at, bits, left


@triton.jit
def next_eight(table, at, last, bits, left, AT: tl.constexpr):
    """The next eight symbols as pairs.  last: where the last turn of words begins; two more turns end before that."""
    inside = at.to(tl.uint64) < last
    p0, p1, at, bits, left = next_four(table, at, inside, bits, left, AT)
    p2, p3, at, bits, left = next_four(table, at, inside, bits, left, AT)
    return (p0, p1, p2, p3), at, bits, left


@triton.jit
def start_lane(words, starts, total, group, groups, lane):
    """The start of a lane: its read position, and its first 32 bits."""
    start = tl.load(starts + lanes.within(group, groups))
    return refill_bits(words + (start.to(tl.int64) * 32 + lane), start + tl.zeros_like(lane) < total,
                       tl.zeros_like(lane + group).to(tl.uint64), tl.zeros_like(lane + group) - 8)


@triton.jit
def symbols(words, starts, table, out, total, N, K, groups, runs, size, blocks, R: tl.constexpr, BN: tl.constexpr):
    """out[n, k]: the symbols of BN rows in a chunk, `size` of a lane's `runs`.

    blocks: the numbers of blocks of BN rows to decode; None for all in order.
    """
    block = tl.program_id(0)
    if blocks is not None:
        block = tl.load(blocks + block)
    n = block * BN + tl.arange(0, BN)[:, None]
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
    i = tl.arange(0, R)[None, :]
    ROWS: tl.constexpr = 32 // R
    first = tl.program_id(1) * size
    address, last = table.to(tl.uint64), (words + (total - 1).to(tl.int64) * 32).to(tl.uint64)
    at, bits, left = start_lane(words, starts + tl.program_id(1) * groups, total, n // ROWS, groups, n % ROWS * R + i)
    for t in range(first, tl.minimum(first + size, runs)):
        p, at, bits, left = next_eight(address, at, last, bits, left, 0)
        k = ((t * R + i) * 8)[:, :, None] + tl.arange(0, 8)
        tl.store(out + (row * K)[:, :, None] + k, pairs.columns(p[0], p[1], p[2], p[3]).to(tl.uint8),
                 (n < N)[:, :, None] & (k < K))


@triton.jit
def dequantize(words, starts, table, uncoded, out, total, N, K8, groups, runs, size, to_weights: tl.constexpr, AT: tl.constexpr,
               R: tl.constexpr, BN: tl.constexpr, TIMES: tl.constexpr):
    """Writes the 16-bit weights of BN rows in a chunk, as words of two columns.

    to_weights: makes pairs of weights from pairs of symbols and the uncoded bits.
    uncoded: the uncoded bits of eight columns, as words of 64 bits.
    """
    lane = tl.arange(0, BN * R)
    n = tl.program_id(0) * BN + lane // R
    ROWS: tl.constexpr = 32 // R
    first = tl.program_id(1) * size
    address, last = table.to(tl.uint64), (words + (total - 1).to(tl.int64) * 32).to(tl.uint64)
    at, bits, left = start_lane(words, starts + tl.program_id(1) * groups, total, n // ROWS, groups, lane % 32)
    uncoded += lanes.within(n, N).to(tl.int64) * K8 + (first * R + lane % R)
    four = tl.arange(0, BN * R * 4)
    row = tl.program_id(0) * BN + four // (4 * R)
    place = out + (row.to(tl.int64) * (4 * K8) + (first * (4 * R) + four % (4 * R)))
    for _ in range(0, tl.minimum(size, runs - first), TIMES):
        for j in tl.static_range(TIMES):
            more = tl.load(uncoded + j * R)
            e, at, bits, left = next_eight(address, at, last, bits, left, AT)
            p = to_weights(e, more.to(tl.uint32), (more >> 32).to(tl.uint32))
            tl.store(place + j * 4 * R, pairs.interleave_words(p[0], p[1], p[2], p[3]), row < N)
        uncoded += R * TIMES
        place += 4 * R * TIMES


@triton.jit
def skinny(words, starts, table, uncoded, x, bias, out, total, M, N, K8, groups, runs, size, chunks,
        to_weights: tl.constexpr, AT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, F: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32; a warp has two groups of lanes.

    Lane 4 * g + c of a group is lane i of row r.  It holds the columns of row r of x that its weights meet.  If R is 4 these are
    an operand of the matrix unit.  If R is 8 rows of both operands are halves of rows, and products of different halves are
    dropped.
    """
    HALVES: tl.constexpr = R // 4
    ROWS: tl.constexpr = 32 // R
    lane = tl.arange(0, 32 * W)
    group = (tl.program_id(0) * W + lane // 32) * 2
    n = group * ROWS + lane % 32 // R
    m = tl.program_id(1) * (ROWS * BLOCKS)
    address, last = table.to(tl.uint64), (words + (total - 1).to(tl.int64) * 32).to(tl.uint64)
    g = lanes.warps(W)[1]
    a = tl.arange(0, 16)[None, :]
    acc = ()
    tokens = ()
    for b in tl.static_range(BLOCKS):
        acc = acc + (tl.zeros((W, 16, 8), tl.float32),)
        tokens = tokens + (x + (lanes.within(m + b * ROWS + g // HALVES, M).to(tl.int64) * (4 * K8) + g % HALVES * 16 + a),)
    upper = uncoded + (lanes.within(n, N).to(tl.int64) * K8 + lane % R)
    lower = uncoded + (lanes.within(n + ROWS, N).to(tl.int64) * K8 + lane % R)
    for chunk in range(chunks):
        at0, bits0, left0 = start_lane(words, starts + chunk * groups, total, group, groups, lane % 32)
        at1, bits1, left1 = start_lane(words, starts + chunk * groups, total, group + 1, groups, lane % 32)
        for t in range(chunk * size * R, tl.minimum(chunk * size + size, runs) * R, R):   # by eight columns of a row
            more0, more1 = tl.load(upper + t), tl.load(lower + t)
            xs = ()
            for b in tl.static_range(BLOCKS):
                xs = xs + (pairs.apart(tl.load(tokens[b] + t * 4)),)
            e0, at0, bits0, left0 = next_eight(address, at0, last, bits0, left0, AT)
            e1, at1, bits1, left1 = next_eight(address, at1, last, bits1, left1, AT)
            w = pairs.weights(tiled(to_weights(e0, more0.to(tl.uint32), (more0 >> 32).to(tl.uint32))),
                              tiled(to_weights(e1, more1.to(tl.uint32), (more1 >> 32).to(tl.uint32))), F)
            sums = ()
            for b in tl.static_range(BLOCKS):
                v = xs[b]
                sums = sums + (tl.dot(w, lanes.columns_of_word(v[0], v[1], v[2], v[3], F), acc[b]),)
            acc = sums
    for b in tl.static_range(BLOCKS):
        tile.store_tile(sum_equal_halves(acc[b], HALVES), bias, out, tl.program_id(0) * (2 * W * ROWS), m + b * ROWS, M, N)


@triton.jit
def tiled(p):
    """Words of lanes as a tile [8 * W, 4]."""
    W: tl.constexpr = p[0].shape[0] // 32
    return (p[0].reshape(8 * W, 4), p[1].reshape(8 * W, 4), p[2].reshape(8 * W, 4), p[3].reshape(8 * W, 4))


@triton.jit
def sum_equal_halves(sums, HALVES: tl.constexpr):
    """The sums of products of equal halves of rows: [rows of w, rows of x], from [W, 16, 8]."""
    W: tl.constexpr = sums.shape[0]
    if HALVES == 1:
        return sums.reshape(W * 16, 8)
    else:
        row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
        kept = tl.where(row % HALVES == column % HALVES, sums, 0.0)
        return tl.sum(tl.sum(kept.reshape(W * 16 // HALVES, HALVES, 8 // HALVES, HALVES), 3), 1)
