"""Device functions of the lane-tile kernels: packed codes become operands of tensor cores without a shuffle.

An MMA multiplies 16 rows of w by 8 columns.  Lane 4 * g + c holds rows g and g + 8 of w, and column g of the other operand.
The planar storage puts the 128 columns of a chunk in the order that the MMA needs: k = 32 * u + 16 * i + 8 * h +
2 * c + e lies in word u of lane c, at bit 16 * e + 8 * i + width * h.  A mask then leaves the pair e = 0, 1 in the two halves
of a register, which is an operand as it is.  Every tile that is loaded has the shape [8 * warps, 4 * words].  Only this shape
gives lane 4 * g + c row g and the words from c * words on in every version of Triton, so that nothing moves between lanes.

Numbers: the bits of an unsigned code of up to 10 bits are the float16 subnormal code * 2^-24, so a float16 kernel multiplies
sums by 2^24 once.  The bits 0x4300 | code are the bfloat16 128 + code.  Products are exact and sums are float32.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field(word, at: tl.constexpr, to: tl.constexpr, width: tl.constexpr, ones: tl.constexpr = 0x00010001):
    """Bits [at, at + width) of both halves or all bytes, moved to bit `to`; ones: a 1 at the lowest bit of each part."""
    if at > to:
        word = word >> (at - to)
    if at < to:
        word = word << (to - at)
    return word & ((((1 << width) - 1) * ones) << to)


@triton.jit
def halves(word, F: tl.constexpr):
    """The 16-bit halves of int32 [...] as type F [..., 2], low half first; takes no instruction."""
    return tl.join(word.to(tl.int16).to(F, bitcast=True), (word >> 16).to(tl.int16).to(F, bitcast=True))


@triton.jit
def whole_bytes(word, masks):
    """The low bytes of both halves as bfloat16, exactly: signed, or unsigned ones minus 128.  masks: of flips().

    The bits 0x4300 | low are 128 plus the low seven bits.  The bits 0x4300 | sign are 128, or 256 if the sign is set, so that
    the difference is the signed byte.  Unsigned bytes have the sign flipped.
    """
    low = halves((word & 0x007F007F) | masks[0], tl.bfloat16)
    return low - halves((word & 0x00800080) ^ masks[1], tl.bfloat16)


@triton.jit
def warps(W: tl.constexpr):
    """For a lane tile of W warps: the warp and g, [8 * W, 1], and c, [1, 4]."""
    p = tl.arange(0, 8 * W)[:, None]
    return p // 8, p % 8, tl.arange(0, 4)[None, :]


@triton.jit
def tile(tiles, M, N, BM: tl.constexpr):
    """A program's rows of x as (first, end), and the first row of w that they are multiplied by.

    BM: rows per program.  tiles: int32 [T, 3] of (expert, first row, end); None if one weight serves all rows of x.
    """
    if tiles is None:
        return tl.program_id(1) * BM, M, 0
    else:
        p = tiles + tl.program_id(1) * 3
        return tl.load(p + 1), tl.load(p + 2), tl.load(p).to(tl.int64) * N


@triton.jit
def rows(n, N, start=0):
    """Rows n and n + 8 from `start` on, clamped to the last of N: [8 * W, 1] int64."""
    return tl.minimum(n, N - 1).to(tl.int64) + start, tl.minimum(n + 8, N - 1).to(tl.int64) + start


@triton.jit
def stored_columns(K, pitch):
    """Columns from one row of w to the next, from which strides of planes follow: K, or `pitch` in a slice of longer rows."""
    if pitch is None:
        return K
    else:
        return pitch


@triton.jit
def words(plane, row, count, chunk, more: tl.constexpr = 0):
    """16 words of rows g and g + 8, which have 16 * `count` each, from 16 * `more` words on: int32 [8 * W, 16, 2]."""
    at = chunk * 16 + tl.arange(0, 16)[None, :]
    upper, lower = plane + (row[0] * (count * 16) + at), plane + (row[1] * (count * 16) + at)
    return tl.join(tl.load(upper + 16 * more), tl.load(lower + 16 * more))


@triton.jit
def late_words(plane, row, K, chunk, more: tl.constexpr, step: tl.constexpr):
    """The words of a 1-bit plane, which cover 4 chunks; the last two chunks, `step` bits higher, are shifted down."""
    shift = (chunk // 2 + more // 2) % 2 * step + tl.zeros_like(row[0]).to(tl.int32)
    return words(plane, row, tl.cdiv(K, 512), chunk // 4) >> shift[:, :, None]


@triton.jit
def prefetch_and_wait(words, early, first, w, c, N, R: tl.constexpr, WK: tl.constexpr):
    """Prefetch a program's first words into the L2 cache, wait for the previous launch, and let the next one begin.

    words: [N, early].  early: None if the launch begins when the previous one has ended.  Prefetching words that the previous
    launch still writes is safe: all stores pass through the L2 cache.
    """
    if early is not None:
        for r in tl.static_range(R):
            row = rows(first + 16 * r, N)
            for t in tl.static_range(2):
                at = tl.minimum((t * WK + w % WK) * 16 + 4 * c, early - 4)
                fetch(words + (row[0] * early + at))
                fetch(words + (row[1] * early + at))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(p):
    """Prefetch the addresses in p into the L2 cache; no register waits for it."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence(has: tl.constexpr):
    """Keep loads before the fence ahead of those after it, although ptxas sees no dependence between them.

    A warp-level barrier: the lanes of a warp are together, so it takes no instruction.  has: on NVIDIA GPUs, as inline assembly.
    """
    if has:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def half_operand(low, high):
    """The operand [W, 16, 64] of w from numbers [8 * W, 16, 2, 2] of i = 0 and i = 1; its K axis is (u, c, i, e)."""
    W: tl.constexpr = low.shape[0] // 8
    v = tl.join(low, high).reshape(W, 8, 4, 4, 2, 2, 2)                 # w g c u r e i
    return v.permute(0, 4, 1, 3, 2, 6, 5).reshape(W, 16, 64)


@triton.jit
def word_operand(v00, v01, v10, v11):
    """The operand [W, 16, 32] of w from numbers [8 * W, 4, 2, 2] of (h, i); its K axis is (h, c, i, e)."""
    W: tl.constexpr = v00.shape[0] // 8
    v = tl.join(tl.join(v00, v10), tl.join(v01, v11)).reshape(W, 8, 4, 2, 2, 2, 2)      # w g c r e h i
    return v.permute(0, 3, 1, 5, 2, 6, 4).reshape(W, 16, 32)


@triton.jit
def columns(x00, x01, x10, x11, x20, x21, x30, x31, F: tl.constexpr):
    """The operand [W, 64, 8] of x from pairs int32 [8 * W, 4] of (u, i): column g is held by lanes 4 * g + c."""
    W: tl.constexpr = x00.shape[0] // 8
    low = tl.join(tl.join(x00, x20), tl.join(x10, x30))
    high = tl.join(tl.join(x01, x21), tl.join(x11, x31))
    v = halves(tl.join(low, high), F).reshape(W, 8, 4, 2, 2, 2, 2)      # w g c u1 u0 i e
    return v.permute(0, 3, 4, 2, 5, 6, 1).reshape(W, 64, 8)


@triton.jit
def columns_of_word(x00, x01, x10, x11, F: tl.constexpr):
    """The operand [W, 32, 8] of x from pairs int32 [8 * W, 4] of (h, i)."""
    W: tl.constexpr = x00.shape[0] // 8
    v = halves(tl.join(tl.join(x00, x10), tl.join(x01, x11)), F).reshape(W, 8, 4, 2, 2, 2)      # w g c h i e
    return v.permute(0, 3, 2, 4, 5, 1).reshape(W, 32, 8)


@triton.jit
def sums(x, unit: tl.constexpr, F: tl.constexpr):
    """The column sums of an operand of x, divided by `unit` like products with codes, in every row of [W, 16, 8]."""
    return tl.dot(tl.full((x.shape[0], 16, x.shape[1]), 1.0 / unit, tl.float32).to(F), x)


@triton.jit
def within(index, count):
    """index, clamped to the last of `count`.

    Callers clamp in any case: an address is then one multiply-add, not a wide pointer that a loop increments.
    """
    return tl.minimum(index, count - 1)


@triton.jit
def after(chunk, more: tl.constexpr, count, even: tl.constexpr):
    """The chunk from which words() counts `more`; unless `even`, it is clamped to load only existing words."""
    if even:
        return chunk
    else:
        return within(chunk + more, count)


@triton.jit
def pairs(p, live, even: tl.constexpr):
    """Pairs of columns of x, 0 where `live` is false."""
    if even:
        return tl.load(p)
    else:
        return tl.load(p, live, 0)


@triton.jit
def token_rows(x, gather, m, M, K):
    """Pointers to rows m of x, clamped to the last row, or to those that `gather` names; x is int32, two columns per element."""
    row = tl.minimum(m, M - 1)
    if gather is not None:
        row = tl.load(gather + row)
    return x + row.to(tl.int64) * (K // 2)


@triton.jit
def tokens(x, chunk, count, c, size: tl.constexpr, unit: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operands of x for a chunk of 128 columns, one row of x per column, by halves or groups of 32 or 16; and their sums.

    Chunks from `count` on are 0.
    """
    live = chunk < count
    operands = ()
    if size == 128:
        for h in tl.static_range(2):
            p = x + (chunk * 64 + 4 * h + c)
            operands = operands + (columns(
                pairs(p, live, even), pairs(p + 8, live, even), pairs(p + 16, live, even), pairs(p + 24, live, even),
                pairs(p + 32, live, even), pairs(p + 40, live, even), pairs(p + 48, live, even), pairs(p + 56, live, even), F),)
        ones = (sums(operands[0], unit, F) + sums(operands[1], unit, F),)
    else:
        ones = ()
        for u in tl.static_range(4):
            p = x + (chunk * 64 + 16 * u + c)
            x00, x10 = pairs(p, live, even), pairs(p + 4, live, even)
            x01, x11 = pairs(p + 8, live, even), pairs(p + 12, live, even)
            if size == 32:
                operands = operands + (columns_of_word(x00, x01, x10, x11, F),)
            else:
                zero = tl.zeros_like(x00)
                operands = operands + (columns_of_word(x00, zero, x10, zero, F), columns_of_word(zero, x01, zero, x11, F))
        for i in tl.static_range(128 // size):
            ones = ones + (sums(operands[i], unit, F),)
    return operands, ones


@triton.jit
def tokens_in_order(x, chunk, count, c, unit: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operands of x for both halves of a chunk, for 8-bit codes in row order; and their sums.

    Byte b of word 4 * c + u of a half is column 16 * c + 4 * u + b, so that the columns of a pair e = 0, 1 are two apart.
    """
    W: tl.constexpr = c.shape[0] * chunk.shape[0] // 8
    live = chunk < count
    a = tl.arange(0, 16)[None, :]
    operands = ()
    for h in tl.static_range(2):
        p = x + (chunk * 64 + 32 * h + a // 4 * 8 + a % 4)
        low = two_apart(pairs(p, live, even))
        high = two_apart(pairs(p + 4, live, even))
        v = tl.join(tl.join(low[0], high[0]), tl.join(low[1], high[1]))                 # w g c, u0 u1 i
        v = halves(v, F).reshape(W, 8, 4, 2, 2, 2, 2).permute(0, 4, 3, 2, 5, 6, 1)
        operands = operands + (v.reshape(W, 64, 8),)
    return operands, (sums(operands[0], unit, F) + sums(operands[1], unit, F),)


@triton.jit
def two_apart(v):
    """From columns 0 to 3 in two words [..., 16]: the pairs (0, 2) and (1, 3), [..., 4, 2]."""
    first, second = tl.split(v.reshape(v.shape[0], 4, 2, 2))
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def half(codes: tl.constexpr, words, h: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """The operand of w for a half, [W, 16, 64]."""
    return half_operand(codes(words, h, 0, digit, to, flip, F), codes(words, h, 1, digit, to, flip, F))


@triton.jit
def product(codes: tl.constexpr, words, x, flip, first: tl.constexpr, count: tl.constexpr, width: tl.constexpr,
            bits: tl.constexpr, F: tl.constexpr):
    """The product of `count` halves of w and x.  Codes at the same bit position share an accumulator.

    bits: -1 for codes that are the sum of two operands.  codes(words, half, i, digit, to, flip, F) returns the numbers of pairs i
    of a half of a span of 256 columns.
    """
    W: tl.constexpr = words[0][0].shape[0] // 8
    places: tl.constexpr = min(4, 8 // width) if F == tl.float16 and 8 - width + bits <= 10 else 1
    total = tl.zeros((W, 16, 8), tl.float32)
    for i in tl.static_range(min(places, count)):
        part = tl.zeros((W, 16, 8), tl.float32)
        for h in tl.static_range(first + i, first + count, places):
            w = words[h // 2 - first // 2]
            part = tl.dot(half(codes, w, h % 4, 0, width * (h % places), flip[h % places], F), x[h - first], part)
            if bits < 0:
                part = tl.dot(half(codes, w, h % 4, 1, 0, flip[0], F), x[h - first], part)
        if (first + i) % places == 0 and i == 0:
            total = part
        else:
            total += part * (1.0 / (1 << (width * ((first + i) % places))))
    if bits == 8 and F == tl.bfloat16:
        part = tl.zeros((W, 16, 8), tl.float32)
        for h in tl.static_range(first, first + count):
            w = words[h // 2 - first // 2]
            part = tl.dot(half(codes, w, h % 4, 1, 0, flip[1], F), x[h - first], part)
        total += part * 16.0
    return total


@triton.jit
def part(codes: tl.constexpr, words, x, u: tl.constexpr, chunk: tl.constexpr, flip, width: tl.constexpr, bits: tl.constexpr,
         size: tl.constexpr, F: tl.constexpr):
    """The product of group u of a chunk; the chunk is the first or second of a span of 256 columns."""
    if size == 128:
        sum = product(codes, (words,), x, flip, 2 * chunk, 2, width, bits, F)
    else:
        sum = word_product(codes, words[u * size // 32], x[u], flip, 2 * chunk, bits, F)
    return sum


@triton.jit
def word_product(codes: tl.constexpr, w, x, flip, h: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """The product of word u of all lanes of a chunk, 32 columns; h is the first half of the chunk."""
    sum = tl.dot(word_operand(codes(w, h, 0, 0, 0, flip[0], F), codes(w, h, 1, 0, 0, flip[0], F),
                              codes(w, h + 1, 0, 0, 0, flip[0], F), codes(w, h + 1, 1, 0, 0, flip[0], F)), x)
    if bits < 0:
        sum = tl.dot(word_operand(codes(w, h, 0, 1, 0, flip[0], F), codes(w, h, 1, 1, 0, flip[0], F),
                                  codes(w, h + 1, 0, 1, 0, flip[0], F), codes(w, h + 1, 1, 1, 0, flip[0], F)), x, sum)
    if bits == 8 and F == tl.bfloat16:
        sum += tl.dot(word_operand(codes(w, h, 0, 1, 0, flip[1], F), codes(w, h, 1, 1, 0, flip[1], F),
                                   codes(w, h + 1, 0, 1, 0, flip[1], F), codes(w, h + 1, 1, 1, 0, flip[1], F)), x) * 16.0
    return sum


@triton.jit
def by_size(words, size: tl.constexpr):
    """The words of a chunk unchanged, or split by word u for groups smaller than a chunk."""
    if size == 128:
        return words
    else:
        return by_word(words)


@triton.jit
def by_word(words):
    """The words of a chunk split by word u: a tuple of four tuples of [8 * W, 4, 2]."""
    first, second, third, fourth = (), (), (), ()
    for i in tl.static_range(len(words)):
        even, odd = tl.split(words[i].reshape(words[i].shape[0], 4, 2, 2, 2).permute(0, 1, 4, 2, 3))
        u0, u2 = tl.split(even)
        u1, u3 = tl.split(odd)
        first, second, third, fourth = first + (u0,), second + (u1,), third + (u2,), fourth + (u3,)
    return first, second, third, fourth


@triton.jit
def flips(N, width: tl.constexpr, bits: tl.constexpr, signed: tl.constexpr, F: tl.constexpr):
    """The XOR masks that turn codes into numbers, by the place of a float16 code or the digit of a bfloat16 one.

    They make signed codes unsigned, and add bfloat16's 128.  The third of 8 bits in bfloat16 is the second of whole_bytes().
    """
    sign: tl.constexpr = (0x00010001 << (bits - 1)) if signed else 0
    if F == tl.float16:
        return hidden(sign, N), hidden(sign << width, N), hidden(sign << 2 * width, N), hidden(sign << 3 * width, N)
    elif bits == 8:
        return hidden(0x43004300, N), hidden(0x43004300 ^ (sign >> 4), N), hidden(0x43004300 if signed else 0x43804380, N)
    else:
        return hidden(0x43004300 ^ sign, N), hidden(0x43004300 ^ sign, N)


@triton.jit
def zeros(R: tl.constexpr, W: tl.constexpr):
    """R zero accumulators [W, 16, 8]."""
    acc = ()
    for _ in tl.static_range(R):
        acc = acc + (tl.zeros((W, 16, 8), tl.float32),)
    return acc


@triton.jit
def hidden(value: tl.constexpr, N):
    """A constant in a register: (a & b) ^ c is one instruction only if b or c is in a register."""
    return tl.where(N > 0, value, 0)


@triton.jit
def float_numbers(word, at: tl.constexpr, exponent: tl.constexpr, mantissa: tl.constexpr, F: tl.constexpr):
    """Pairs of small floats from bit `at` of each half, as numbers of type F; as float16, times 2^(bias - 15)."""
    bits: tl.constexpr = exponent + mantissa
    low: tl.constexpr = (10 if F == tl.float16 else 7) - mantissa
    if low + bits < 15 - bits:                                   # no bits overlap: one multiplication moves exponent and mantissa
        first: tl.constexpr = at - 8 if at > low else at
        word = field(word, at, first, bits + 1)
        word = (word << (low - first)) + (word << (15 - bits - first))
        magnitude = field(word, low, low, bits)
    else:
        magnitude = field(word, at, low, bits)
        if at + bits < 15:
            word = word << (15 - bits - at)
    value = halves(magnitude | (word & -2147450880), F)
    if F == tl.bfloat16:
        value = value * (2.0 ** (128 - (1 << (exponent - 1))))
    return value


@triton.jit
def scaled(pairs, factors):
    """Pairs of bfloat16 in int32, times pairs of powers of two: exact, for subnormals too.

    Inline assembly, because separate products of the halves would take two more instructions to join them.
    """
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factors, -2147450880],
                                     dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def plain_scaled(pairs, factors):
    """scaled() without assembly."""
    factors += tl.zeros_like(pairs)                              # an integer in the interpreter, if it is a constant
    low = (as_bfloat16(pairs) * as_bfloat16(factors)).to(tl.int16, bitcast=True)
    high = (as_bfloat16(pairs >> 16) * as_bfloat16(factors >> 16)).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def as_bfloat16(bits):
    """bfloat16 of the low 16 bits of integers."""
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def plus(total, value):
    """total + value; value if total is None."""
    if total is None:
        return value
    else:
        return total + value


@triton.jit
def offset(value, factor, base: tl.constexpr):
    """value - base * factor: the factor of `ones` if numbers are codes plus `base`."""
    if base == 0:
        return value
    else:
        return value - base * factor


@triton.jit
def store_row(sum, bias, out, tile, r: tl.constexpr, R: tl.constexpr, N, WN: tl.constexpr, WK: tl.constexpr):
    """Store the sums [W, 16, 8] of one row of x, added over columns and over the WK warps of a tile of 16 * R rows of w."""
    n = (tile + tl.arange(0, WN)[:, None]) * (16 * R) + 16 * r + tl.arange(0, 16)[None, :]
    total = tl.sum(tl.sum(sum, axis=2).reshape(WN, WK, 16), axis=1)
    if bias is not None:
        total += tl.load(bias + n, n < N, 0).to(tl.float32)
    tl.store(out + n, total, n < N)


@triton.jit
def store_columns(sum, bias, out, token, M, start, tile, r: tl.constexpr, R: tl.constexpr, N, WN: tl.constexpr, WK: tl.constexpr):
    """Store the sums [W, 16, 8] of rows of x from `token` on, added over the WK warps of a tile; the bias begins at `start`."""
    m = token + tl.arange(0, 8)[None, None, :]
    n = (tile + tl.arange(0, WN)[:, None, None]) * (16 * R) + 16 * r + tl.arange(0, 16)[None, :, None]
    total = tl.sum(sum.reshape(WN, WK, 16, 8), axis=1)
    if bias is not None:
        total += tl.load(bias + start + n, n < N, 0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, total, (n < N) & (m < M))
