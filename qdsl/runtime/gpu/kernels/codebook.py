"""Device functions of the lane-tile kernels for codes of 2 to 8 bits that index a table of numbers.

A table of up to 32 numbers lies in registers, four bytes in each.  NVIDIA's byte permutation looks four codes up at once among
eight entries; a third permutation chooses between the halves of a table of sixteen.  The planar storage orders the codes of a
word so that codes e = 0, 1 of a pair come out two bytes apart: code (i, e, h) lies at bit 16 * i + 8 * e + 4 * h (lanes.py
defines i, e and h).  3-bit codes have two bits there, or two bits higher in the second chunk of a span, and the third in another
word.

Integers become numbers without a conversion.  As float16, a byte is the subnormal byte * 2^-24.  As bfloat16, a byte below 128
behind 0x43 is 128 + byte.  Other tables have a second byte for each entry.

If bytes are below 128, codes of the other half come out as 0, so that the halves are or-ed instead of selected.  If the negative
integers are one half of the table (IQ4_NL), each half is an operand of its own, with its sign in the high byte: 128 and -128
cancel.  For 8 codes the two take 13 and 15 instructions; two-byte tables, as in tile_gemm, take 21, or 19 with entries in pairs
(compiler/passes/pair_levels.py).

Longer tables stay in memory, cached in L1: 64 to 256 numbers of two bytes are one to four lines.  A code takes a load, no
barrier.  tl.gather would store the table to shared memory per tile of codes, between barriers of all warps.

`permute` is inline assembly: libdevice's byte_perm masks every selector, which hides what the instruction does beyond 7.
`plain_permute` is the same for the interpreter.  `bits_at` is assembly too: Triton moves tiles of tl.load between lanes.
"""

from qdsl.runtime.gpu.kernels import group_numbers, lanes
from qdsl.runtime.gpu.kernels.lanes import halves
from qdsl.runtime.libraries.triton import libdevice, tl, triton


@triton.jit
def table(g, N, high: tl.constexpr, words: tl.constexpr):
    """The constants that the functions below take, in registers.

    The selectors of bytes 0 to 3, twice; the high byte of integers as numbers; words of low bytes, then of high bytes.  If half
    of the table is negative: the high byte and words of the lower half's magnitudes, the same of numbers, the upper half's high
    byte.
    """
    g = g[:, :, None]
    kept = (in_lane(0x32103210, g, N), in_lane(high, g, N))
    for i in tl.static_range(len(words)):
        kept = kept + (in_lane(words[i], g, N),)
    return kept


@triton.jit
def constants(table: tl.constexpr, levels: tl.constexpr, tensors, row, g, N, wide: tl.constexpr, width: tl.constexpr,
              bits: tl.constexpr, signed: tl.constexpr, F: tl.constexpr, by_products: tl.constexpr = False):
    """The last argument of a format's numbers(): the words or address of a table, or lanes.flips().

    levels: the index of the tensor of tables, the rows that share a table, and its entries; None without a stored table.
    by_products: with factors for shifted(), which are the last two words of a table.
    """
    if levels is None and table is None:
        return lanes.flips(N, width, bits, signed, F)
    elif levels is None:
        return with_factors(table(g, N, F), g, N, by_products),
    elif levels[2] > 32:
        return table_in_memory(tensors[levels[0]], row, levels[1], levels[2], F),
    else:
        return with_factors(stored_table(tensors[levels[0]], row, levels[1], levels[2], g, wide, N, F), g, N, by_products),


@triton.jit
def with_factors(table, g, N, by_products: tl.constexpr):
    """A table and the factors of shifted(): 2^16 and 2^30, or markers for none."""
    g = g[:, :, None]
    if by_products:
        return table + (in_lane(1 << 16, g, N), in_lane(1 << 30, g, N))
    else:
        return table + (in_lane(None, g, N), in_lane(None, g, N))


@triton.jit
def stored_table(plane, row, block: tl.constexpr, entries: tl.constexpr, g, wide: tl.constexpr, N, F: tl.constexpr):
    """The constants of table() for stored tables, one per `block` rows, for the rows g and g + 8 of a lane tile, which are `row`.

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
    return words


@triton.jit
def table_in_memory(plane, row, block: tl.constexpr, entries: tl.constexpr, F: tl.constexpr):
    """Pointers to the tables of two rows, one or [8 * W, 1, 2]; an integer table has float16 bits, then bfloat16 bits."""
    if plane.dtype.element_ty == tl.int16:
        return plane + (0 if F == tl.float16 else entries)
    elif block == 0:
        return plane
    else:
        at = group_numbers.blocks(row, block)
        return plane + tl.join(at[0], at[1]) * entries


@triton.jit
def loaded(table, codes, i: tl.constexpr, F: tl.constexpr):
    """Table entries as pairs i of type F, for the codes in bytes i and i + 2."""
    return tl.join(entry(table, libdevice.byte_perm(codes, 0, 0x4440 + i), F),
                   entry(table, libdevice.byte_perm(codes, 0, 0x4442 + i), F))


@triton.jit
def entry(table, code, F: tl.constexpr):
    """The table entries of codes, rounded to F if they are stored in another type."""
    kind: tl.constexpr = table.dtype.scalar.element_ty
    bits = bits_at(table, code).to(tl.int32 if kind == tl.float32 else tl.int16)
    return bits.to(F if kind == tl.int16 else kind, bitcast=True).to(F)


@triton.jit
def bits_at(table, code):
    """The bits of a table's entries, two bytes or four, as int32.

    The product and sum of the address become one instruction of an idle pipe; other forms of the address take two.
    """
    wide: tl.constexpr = table.dtype.scalar.element_ty == tl.float32
    at = tl.inline_asm_elementwise("mul.wide.u32 $0, $1, 4;" if wide else "mul.wide.u32 $0, $1, 2;", "=l,r", [code],
                                   dtype=tl.int64, is_pure=True, pack=1)
    return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];" if wide else "ld.global.nc.u16 $0, [$1];", "=r,l",
                                     [table.to(tl.int64) + at], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def plain_bits_at(table, code):
    """bits_at() without assembly."""
    wide: tl.constexpr = table.dtype.scalar.element_ty == tl.float32
    return tl.load(table + code).to(tl.int32 if wide else tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def bytes_of_four(p, high: tl.constexpr, F: tl.constexpr):
    """The low or the high bytes of four numbers as F, the same in every lane of a row: int32 [8 * W, 4]."""
    v = tl.load(p + tl.arange(0, 16)[None, :] % 4).to(F).to(tl.int16, bitcast=True).to(tl.int32)
    v = group_numbers.in_four(v.reshape(v.shape[0], 4, 2, 2))
    first, second = libdevice.byte_perm(v[0], v[1], 0x5410), libdevice.byte_perm(v[2], v[3], 0x5410)
    return libdevice.byte_perm(first, second, 0x7531 if high else 0x6420)


@triton.jit
def in_lane(word: tl.constexpr, g, N):
    """A constant in a register of every lane; as a literal it would be loaded anew for every use.  None: an int1."""
    if word is None:
        return tl.full((1,), 0, tl.int1)                         # Triton 3.6 cannot return None
    elif word == 0:
        return tl.full((), 0, tl.int32)
    else:
        return tl.where(g < N + 8, word, 0)


@triton.jit
def permute(first, second, selectors):
    """Byte i is the one of eight that bits 4i to 4i + 2 of `selectors` select; if bit 4i + 3 is set, its top bit, repeated."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selectors], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def permute_half(first, second, selectors, i: tl.constexpr, table):
    """permute() by the lower or the upper 16 bits of selectors."""
    if i:
        selectors = shifted(selectors, 16, table[len(table) - 2])
    return permute(first, second, selectors)


@triton.jit
def plain_permute(first, second, selectors):
    """permute() without assembly, by two permutations."""
    bytes = libdevice.byte_perm(first, second, selectors)
    signs = libdevice.byte_perm(0, -1, (selectors >> 1) & 0x44444444)
    return (bytes & ~signs) | (((bytes >> 7) & 0x01010101) * 255 & signs)


@triton.jit
def shifted(word, bits: tl.constexpr, factor):
    """word >> bits: the upper half of word * factor, if `factor` is 2^(32 - bits) and no marker.

    Shifts, masks and permutations keep the ALU busy where codes are looked up, and products run next to it.
    """
    if factor.dtype == tl.int1:
        return word >> bits
    else:
        return tl.umulhi(word.to(tl.uint32, bitcast=True), factor.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def look_up_16(word, i: tl.constexpr, table, first: tl.constexpr):
    """Table bytes of four codes for a table of 16, code j of half i in byte j; the words are those from `first` on.

    Two words are enough if both halves have the same bytes.
    """
    low = word & 0x77777777
    if table[first + 2].dtype == tl.int1:
        return permute_half(table[first], table[first + 1], low, i, table)
    else:
        upper = ((word >> 1) & 0x44444444) | table[0]            # byte j of the lower entries, or of the upper ones
        return permute_half(permute_half(table[first], table[first + 1], low, i, table),
                            permute_half(table[first + 2], table[first + 3], low, i, table), upper, i, table)


@triton.jit
def paired_16(word, i: tl.constexpr, table, first: tl.constexpr):
    """Table bytes of four codes for a table of 16 in pairs.

    A half gives 0 or, if its top bit is set, 255 for codes of the other half.  Entries j and j + 8 have equal top bits.  The
    upper half's bytes are stored flipped where that bit is set: then the upper half gives 0 for lower codes, and the lower half
    flips the bytes back.
    """
    return permute_half(table[first], table[first + 1], word, i, table) \
        ^ permute_half(table[first + 2], table[first + 3], word ^ (-2004318072), i, table)               # 0x88888888


@triton.jit
def look_up_32(low, high, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Table bytes of four codes for a table of 32, from 4-bit and 1-bit words, in the first or second chunk of a span."""
    upper = ((high << (2 - chunk)) & 0x44444444) | table[0]
    return permute_half(look_up_16(low, i, table, first), look_up_16(low, i, table, first + 4), upper, i, table)


@triton.jit
def look_up_half(word, i: tl.constexpr, table, upper: tl.constexpr):
    """Table bytes of four codes for the lower or upper half of a table of 16; 0 for codes of the other half."""
    if upper:
        word = word ^ (-2004318072)                              # 0x88888888
    return permute_half(table[4 if upper else 2], table[5 if upper else 3], word, i, table)


@triton.jit
def look_up_4(word, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Table bytes of four codes for a table of 4, from 2-bit words, in the first or second chunk of a span."""
    if chunk:
        word = word >> 2
    return permute_half(table[first], table[first], word & 0x33333333, i, table)


@triton.jit
def look_up_8(low, high, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Table bytes of four codes for a table of 8, from 2-bit and 1-bit words, in the first or second chunk of a span."""
    if chunk:
        low = low >> 2
    else:
        high = high << 2
    return permute_half(table[first], table[first + 1], (low & 0x33333333) | (high & 0x44444444), i, table)


@triton.jit
def two_part_table(g, N, F: tl.constexpr):
    """The constants of two_parts(): the low and high bytes that the parts of an e2m1 code index."""
    g = g[:, :, None]
    if F == tl.float16:                                          # both parts belong into the high byte
        first: tl.constexpr = 0x06040200
        second: tl.constexpr = -2004875264                       # 0x88800800
    else:                                                        # the upper exponent bits are 0
        first: tl.constexpr = -1065336832                        # 0xC0804000
        second: tl.constexpr = -2122317568                       # 0x81800100
    return in_lane(first, g, N), in_lane(second, g, N), in_lane(0x33333333, g, N), in_lane(0x40404040, g, N)


@triton.jit
def two_parts(word, h: tl.constexpr, i: tl.constexpr, table, F: tl.constexpr):
    """Pairs of e2m1 codes in int32 with their bits in the places of type F: times 2^-14 in float16, 2^-126 in bfloat16.

    The lower exponent bit and the mantissa select the low byte, the sign and the upper exponent bit the high one.  A mask in a
    register cuts the selectors of two pairs out of a word at once.  With a literal mask ptxas moves the shift and applies the
    mask twice.
    """
    if h:
        word = shifted(word, 2, table[len(table) - 1])
    if table[len(table) - 1].dtype == tl.int1:
        selectors = (word & table[2]) | table[3]
    else:
        selectors = (word & table[2]) | 0x40404040               # a literal saves a register; ptxas cannot move a product
    both = permute_half(table[0], table[1], selectors, i, table)
    if F == tl.float16:
        both = (both | (both << 8)) & -16711936                  # 0xFF00FF00
    return both


@triton.jit
def integers(bytes, h: tl.constexpr, high, F: tl.constexpr):
    """Pairs of integers from four bytes: times 2^-24 as float16, plus 128 as bfloat16; negative if the high byte says so."""
    return halves(libdevice.byte_perm(bytes, high, 0x4341 if h else 0x4240), F)


@triton.jit
def floats(low, high, h: tl.constexpr, F: tl.constexpr):
    """Pairs of 16-bit floats from four low bytes and four high ones."""
    return halves(libdevice.byte_perm(low, high, 0x7351 if h else 0x6240), F)
