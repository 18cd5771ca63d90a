"""Device functions of the lane-tile kernels: codes of 2 to 5 bits that stand for the numbers of a table.

A table lies in registers, a byte of four entries in each; the byte permutation of NVIDIA GPUs takes four codes at once from
eight entries, and a third one chooses between the halves of sixteen.  The planar storage puts the codes of a word so that codes
e = 0, 1 of a pair come out two bytes apart: code (i, e, h) lies at bit 16 * i + 8 * e + 4 * h (runtime/gpu/kernels/lanes.py says
what i, e and h are).  Of 3 bits two lie there, or two bits higher in the second chunk of a span, and the third in a word of its
own.

Integers become numbers without a conversion: a byte is float16's subnormal byte * 2^-24, and behind 0x43 bfloat16's 128 + byte
for bytes below 128.  Other tables have a second byte for each entry.

Where bytes are below 128, those of the other half's codes come out as 0, so that nothing is chosen: the halves are or-ed.  Where
a table's negative integers are one half of it (IQ4_NL), each half is an operand of its own, and its sign is in the high byte:
128 and -128 add up to nothing.  For 8 codes the two take 13 and 15 instructions, and tables of two bytes, as in tile_gemm, 21.

`permute` is a line of assembly, for libdevice's byte_perm masks every selector, and so hides what the instruction does beyond 7.
`plain_permute` is the same without it, for the interpreter.
"""

from qdsl.runtime.gpu.kernels import group_numbers, lanes
from qdsl.runtime.gpu.kernels.lanes import halves
from qdsl.runtime.gpu.triton import libdevice, tl, triton


@triton.jit
def table(g, N, high: tl.constexpr, t0: tl.constexpr, t1: tl.constexpr = None, t2: tl.constexpr = None, t3: tl.constexpr = None,
          h0: tl.constexpr = None, h1: tl.constexpr = None, h2: tl.constexpr = None, h3: tl.constexpr = None):
    """What the functions below take, in registers: the selectors of bytes 0 to 3, twice; the high byte of integers as numbers;
    the words of a table, the entries' low bytes and then their high ones."""
    g = g[:, :, None]
    return ((in_lane(0x32103210, g, N), in_lane(high, g, N),
             in_lane(t0, g, N), in_lane(t1, g, N), in_lane(t2, g, N), in_lane(t3, g, N),
             in_lane(h0, g, N), in_lane(h1, g, N), in_lane(h2, g, N), in_lane(h3, g, N)),)


@triton.jit
def table_of_32(g, N, high: tl.constexpr, t0: tl.constexpr, t1: tl.constexpr, t2: tl.constexpr, t3: tl.constexpr,
                t4: tl.constexpr, t5: tl.constexpr, t6: tl.constexpr, t7: tl.constexpr,
                h0: tl.constexpr = 0, h1: tl.constexpr = 0, h2: tl.constexpr = 0, h3: tl.constexpr = 0,
                h4: tl.constexpr = 0, h5: tl.constexpr = 0, h6: tl.constexpr = 0, h7: tl.constexpr = 0):
    """The same of a table of 32 numbers."""
    low, more = table(g, N, high, t0, t1, t2, t3, t4, t5, t6, t7)[0], table(g, N, 0, h0, h1, h2, h3, h4, h5, h6, h7)[0]
    return (low + more[2:],)


@triton.jit
def split_table(g, N, lower: tl.constexpr, t0: tl.constexpr, t1: tl.constexpr, t2: tl.constexpr, t3: tl.constexpr,
                l0: tl.constexpr, l1: tl.constexpr, l2: tl.constexpr, l3: tl.constexpr, h0: tl.constexpr, h1: tl.constexpr,
                h2: tl.constexpr, h3: tl.constexpr, upper: tl.constexpr):
    """The same of a table with integers below 0 in one half: the words of magnitudes, those of low bytes and of high ones of
    whole numbers; before and after them the high bytes of the lower half's magnitudes and of the upper one's.
    """
    g = g[:, :, None]
    return ((in_lane(0x32103210, g, N), in_lane(lower, g, N),
             in_lane(t0, g, N), in_lane(t1, g, N), in_lane(t2, g, N), in_lane(t3, g, N),
             in_lane(l0, g, N), in_lane(l1, g, N), in_lane(l2, g, N), in_lane(l3, g, N),
             in_lane(h0, g, N), in_lane(h1, g, N), in_lane(h2, g, N), in_lane(h3, g, N), in_lane(upper, g, N)),)


@triton.jit
def constants(table: tl.constexpr, levels: tl.constexpr, tensors, row, g, N, wide: tl.constexpr, width: tl.constexpr,
              bits: tl.constexpr, signed: tl.constexpr, F: tl.constexpr):
    """What a format's numbers() takes besides words in two rows, where codes may be looked up in stored tables.

    levels: the place of their tensor, rows that share one, and its entries; None elsewhere.
    """
    if levels is None:
        return lanes.constants(table, g, N, width, bits, signed, F)
    else:
        return stored_table(tensors[levels[0]], row, levels[1], levels[2], g, wide, N, F)


@triton.jit
def stored_table(plane, row, block: tl.constexpr, entries: tl.constexpr, g, wide: tl.constexpr, N, F: tl.constexpr):
    """What table() has, of stored tables, one for every `block` rows, for the rows g and g + 8 of a lane tile, which are `row`.

    Each lane has the tables of its own rows, entries rounded to F.  wide: for words [8 * W, 16, 2] rather than [8 * W, 4, 2].
    """
    at = group_numbers.blocks(row, block)
    words = (in_lane(0x32103210, g[:, :, None], N), 0)
    for high in tl.static_range(2):
        for i in tl.static_range(8 if entries == 32 else 4):
            if i < entries // 4:
                word = tl.join(bytes_of_four(plane + (at[0] * entries + 4 * i), high, F),
                               bytes_of_four(plane + (at[1] * entries + 4 * i), high, F))
                if wide:
                    word = tl.join(word, word).permute(0, 1, 3, 2)
                    word = tl.join(word, word).permute(0, 1, 2, 4, 3).reshape(word.shape[0], 16, 2)
                words = words + (word,)
            else:
                words = words + (0,)                             # numbers() of fewer entries reads no more
    return (words,)


@triton.jit
def bytes_of_four(p, high: tl.constexpr, F: tl.constexpr):
    """The low or the high bytes of four numbers as F, the same in every lane of a row: int32 [8 * W, 4]."""
    v = tl.load(p + tl.arange(0, 16)[None, :] % 4).to(F).to(tl.int16, bitcast=True).to(tl.int32)
    v = group_numbers.in_four(v.reshape(v.shape[0], 4, 2, 2))
    first, second = libdevice.byte_perm(v[0], v[1], 0x5410), libdevice.byte_perm(v[2], v[3], 0x5410)
    return libdevice.byte_perm(first, second, 0x7531 if high else 0x6420)


@triton.jit
def in_lane(word: tl.constexpr, g, N):
    """The constant in a register of every lane; a literal would be loaded into one for every use.  None: an int1."""
    if word is None:
        return tl.full((1,), 0, tl.int1)                         # Triton 3.6 cannot return None
    elif word == 0:
        return word
    else:
        return tl.where(g < N + 8, word, 0)


@triton.jit
def permute(first, second, selectors):
    """Byte i is that of eight which bits 4i to 4i + 2 of selectors number; 0 where bit 4i + 3 is set, for a byte below 128."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selectors], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def permute_half(first, second, selectors, i: tl.constexpr):
    """permute() by the lower or the upper 16 bits of selectors."""
    if i:
        selectors = selectors >> 16
    return permute(first, second, selectors)


@triton.jit
def plain_permute(first, second, selectors):
    """permute() without assembly, by two permutations."""
    return libdevice.byte_perm(first, second, selectors) & libdevice.byte_perm(-1, 0, (selectors >> 1) & 0x44444444)


@triton.jit
def scaled(pairs):
    """Pairs of bfloat16 in int32, times 2^126: exactly, subnormal ones too.

    One line of assembly, for a product of halves that come out of a permutation takes two more to bring them together.
    """
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, 0x7E807E80, -2147450880],
                                     dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def plain_scaled(pairs):
    """scaled() without assembly."""
    low = (pairs.to(tl.int16).to(tl.bfloat16, bitcast=True) * 2.0 ** 126).to(tl.int16, bitcast=True)
    high = ((pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * 2.0 ** 126).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def of_16(word, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 16, code j of half i in byte j; its words are those from `first` on.

    Two words alone are those of both halves, which have the same bytes.
    """
    low = word & 0x77777777
    if table[first + 2].dtype == tl.int1:
        return permute_half(table[first], table[first + 1], low, i)
    else:
        upper = ((word >> 1) & 0x44444444) | table[0]            # byte j of the lower entries, or of the upper ones
        return permute_half(permute_half(table[first], table[first + 1], low, i),
                            permute_half(table[first + 2], table[first + 3], low, i), upper, i)


@triton.jit
def of_32(low, high, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 32, from words of four bits and of one, in the first or second chunk of a span."""
    upper = ((high << (2 - chunk)) & 0x44444444) | table[0]
    if i:
        upper = upper >> 16
    return permute(of_16(low, i, table, first), of_16(low, i, table, first + 4), upper)


@triton.jit
def of_half(word, i: tl.constexpr, table, upper: tl.constexpr):
    """Four codes' bytes of the lower half of a table of 16, or of the upper one; 0 for codes of the other half."""
    if upper:
        word = word ^ (-2004318072)                              # 0x88888888
    return permute_half(table[4 if upper else 2], table[5 if upper else 3], word, i)


@triton.jit
def of_4(word, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 4, from words of two bits, in the first or second chunk of a span."""
    if chunk:
        word = word >> 2
    codes = word & 0x33333333
    if i:
        codes = codes >> 16
    return permute(table[first], table[first], codes)


@triton.jit
def of_8(low, high, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 8, from words of two bits and of one, in the first or second chunk of a span."""
    if chunk:
        low = low >> 2
    else:
        high = high << 2
    return permute_half(table[first], table[first + 1], (low & 0x33333333) | (high & 0x44444444), i)


@triton.jit
def two_part_table(g, N, F: tl.constexpr):
    """What two_parts() takes: the low bytes and the high ones that the parts of an e2m1 code number."""
    g = g[:, :, None]
    if F == tl.float16:                                          # both parts belong into the high byte
        first: tl.constexpr = 0x06040200
        second: tl.constexpr = -2004875264                       # 0x88800800
    else:                                                        # the upper exponent bits are 0
        first: tl.constexpr = -1065336832                        # 0xC0804000
        second: tl.constexpr = -2122317568                       # 0x81800100
    return (in_lane(first, g, N), in_lane(second, g, N), in_lane(0x33333333, g, N), in_lane(0x40404040, g, N)),


@triton.jit
def two_parts(word, h: tl.constexpr, i: tl.constexpr, table, F: tl.constexpr):
    """Pairs of e2m1 codes as numbers, times 2^-14 as float16.

    The lower exponent bit and the mantissa's number the low byte, the sign and the upper exponent bit the high one.  Selectors
    of two pairs are cut out of a word at once, by masks in registers: through a literal one ptxas moves the shift, and then has
    the mask twice.
    """
    if h:
        word = word >> 2
    both = permute_half(table[0], table[1], (word & table[2]) | table[3], i)
    if F == tl.float16:
        return halves((both | (both << 8)) & -16711936, F)       # 0xFF00FF00
    else:
        return halves(scaled(both), F)


@triton.jit
def integers(bytes, h: tl.constexpr, high, F: tl.constexpr):
    """Pairs of integers from four bytes: times 2^-24 as float16, and 128 more as bfloat16; or less than 0, by the high byte."""
    return halves(libdevice.byte_perm(bytes, high, 0x4341 if h else 0x4240), F)


@triton.jit
def floats(low, high, h: tl.constexpr, F: tl.constexpr):
    """Pairs of 16-bit floats from four low bytes and four high ones."""
    return halves(libdevice.byte_perm(low, high, 0x7351 if h else 0x6240), F)
