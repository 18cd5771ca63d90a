"""Device functions of gemv_records, for weights as stored: codes and the numbers of groups in records of 256 columns.

A record's codes are 32 words, 4 bits a code: low and high halves of every 32 bytes are two runs of 32 columns.  Lane 4 * g + c of
a warp (lanes.py) loads the words from 8 * c on of rows g and g + 8, 16 bytes at a time.  So it holds run 2 * c in low halves and
run 2 * c + 1 in high ones.  The columns of the MMA are the eight runs.  Column g of x is nonzero only where lane c holds run g.
Lane c gets columns 2 * c and 2 * c + 1 of the product, those of its own runs.  A mask leaves bytes 0 and 2 of a word, or 1 and 3,
as a pair; x is paired in the same way, once for all rows.

Every lane of a row loads the words with the numbers of groups, and cuts those of its two runs from them.
"""


from qdsl.runtime.gpu.kernels import group_numbers, lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def at(tensor, row, count, record, size: tl.constexpr):
    """Pointers to a record of `size` words in rows g and g + 8, which have `count` records each."""
    return tensor + (row[0] * (count * size) + record * size), tensor + (row[1] * (count * size) + record * size)


@triton.jit
def words(p, first: tl.constexpr):
    """The words of codes, from word `first` on: int32 [8 * W, 16, 2] of words 8 * c + u, and of 8 * c + 4 + u."""
    a = first + tl.arange(0, 16)[None, :] // 4 * 8 + tl.arange(0, 16)[None, :] % 4
    return (tl.join(tl.load(p[0] + a), tl.load(p[1] + a)),), (tl.join(tl.load(p[0] + (a + 4)), tl.load(p[1] + (a + 4))),)


@triton.jit
def four(p, first: tl.constexpr):
    """Four words from `first` on, the same in every lane of a row: a tuple of int32 [8 * W, 4, 2]."""
    a = first + tl.arange(0, 16)[None, :] % 4
    v = tl.join(tl.load(p[0] + a), tl.load(p[1] + a))
    return group_numbers.in_four(v.reshape(v.shape[0], 4, 2, 2, 2).permute(0, 1, 4, 2, 3))


@triton.jit
def words_of_fields(p, first: tl.constexpr):
    """The words with fields, four from each of `first` on, in the layout of four()."""
    loaded = ()
    for i in tl.static_range(len(first)):
        loaded = loaded + four(p, first[i])
    return loaded


@triton.jit
def runs(x, start, record, count, g, c, unit: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operands of x for a record, run g in column g, in the order of the operands of w; and their sums.

    The order: words u of a lane and low halves of bytes, the same and high halves, words 4 + u and low halves, the same and high
    ones.  Run g begins at pair `start`; records from `count` on are 0.
    """
    W: tl.constexpr = g.shape[0] // 8
    live = record < count
    p = x + (record * 128 + start)
    four = tl.arange(0, 16)[None, :] % 4                         # every lane of g loads all of its run
    operands = ()
    for t in tl.static_range(2):
        low = lanes.two_apart(lanes.pairs(p + (8 * t + four), live, even))
        high = lanes.two_apart(lanes.pairs(p + (8 * t + 4 + four), live, even))
        v = tl.join(tl.join(low[0], high[0]), tl.join(low[1], high[1]))                 # w g c, u0 u1 i
        for h in tl.static_range(2):
            mine = (g == 2 * c + h)[:, :, None, None, None]
            o = lanes.halves(tl.where(mine, v, 0), F).reshape(W, 8, 4, 2, 2, 2, 2)
            operands = operands + (o.permute(0, 4, 3, 2, 5, 6, 1).reshape(W, 64, 8),)
    part = lanes.columns_of_word(lanes.pairs(p + c, live, even), lanes.pairs(p + (c + 4), live, even),
                                 lanes.pairs(p + (c + 8), live, even), lanes.pairs(p + (c + 12), live, even), F)
    return operands, lanes.sums(part, unit, F)


@triton.jit
def integers(bits: tl.constexpr, even, odd):
    """Unsigned integers in the lowest bits of words [8 * W, 4, 2], of runs 2 * c and 2 * c + 1: float32 [W, 16, 8]."""
    mask: tl.constexpr = (1 << bits) - 1
    return spread(group_numbers.number(even & mask, bits), group_numbers.number(odd & mask, bits))


@triton.jit
def floats(type: tl.constexpr, even, odd):
    """Floats in the lowest bits of words [8 * W, 4, 2], of runs 2 * c and 2 * c + 1: float32 [W, 16, 8]."""
    return spread(float_of(even, type), float_of(odd, type))


@triton.jit
def float_of(word, type: tl.constexpr):
    """float32 of a word's 32 bits, or of its low half as a 16-bit float."""
    if type == tl.float32:
        return word.to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(type, bitcast=True).to(tl.float32)


@triton.jit
def spread(even, odd):
    """Numbers of rows g and g + 8 in runs 2 * c and 2 * c + 1, [8 * W, 4, 2], as [W, 16, 8]."""
    W: tl.constexpr = even.shape[0] // 8
    return tl.join(even, odd).reshape(W, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(W, 16, 8)
