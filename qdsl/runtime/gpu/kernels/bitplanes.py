"""Functions for formats whose codes lie in bit planes: loading the words of a chunk, and making numbers of their codes.

The planar storage cuts a code of 1 to 8 bits into planes of 8, 4, 2 and 1 bits (compiler/passes/derive_planar.py), which are the
first tensors of the storage.  The lanes of a chunk of 128 columns hold 16 words of 4-bit codes (runtime/gpu/kernels/lanes.py).
So the words of a 2-bit plane cover 2 chunks, and those of a 1-bit plane 4.  Bits of later planes are as far apart as codes of the
first, so that one shift moves a pair of them into place.

words_B is the function `words` of a format with codes of B bits.  Its function `numbers` has the name of the code type: u1 to u8,
i1 to i8, e4m3, e5m2, e3m2, e2m3, e2m1.  Codes of 2 to 8 bits may index a table instead.  `entries`: integers less than 128 apart;
`split_entries`: also negative in one half; `wide_entries`: integers less than 256 apart; `float_entries`: any; `loaded_by_*`: a
table in memory.  `raw_e2m1`: numbers without their factor.
"""

from qdsl.runtime.gpu.kernels import codebook, lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def words_8(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of 8-bit codes: the two halves of a chunk."""
    codes = tensors[0]
    return lanes.words(codes, row, K // 64, 2 * chunk, 2 * more), lanes.words(codes, row, K // 64, 2 * chunk, 2 * more + 1)


@triton.jit
def words_7(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of planes of 4, 2 and 1 bits."""
    return lanes.words(tensors[0], row, K // 128, chunk, more), second_bits(tensors[1], row, K, chunk, more), \
        lanes.late_words(tensors[2], row, K, chunk, more, 2)


@triton.jit
def words_6(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of planes of 4 and 2 bits."""
    return lanes.words(tensors[0], row, K // 128, chunk, more), second_bits(tensors[1], row, K, chunk, more)


@triton.jit
def words_5(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of planes of 4 bits and 1 bit."""
    return lanes.words(tensors[0], row, K // 128, chunk, more), lanes.late_words(tensors[1], row, K, chunk, more, 2)


@triton.jit
def words_4(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of 4-bit codes."""
    return lanes.words(tensors[0], row, K // 128, chunk, more),


@triton.jit
def words_3(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of planes of 2 bits and 1 bit."""
    return second_bits(tensors[0], row, K, chunk, more), lanes.late_words(tensors[1], row, K, chunk, more, 1)


@triton.jit
def words_2(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of 2-bit codes."""
    return second_bits(tensors[0], row, K, chunk, more),


@triton.jit
def words_1(tensors, row, K, chunk, more: tl.constexpr = 0):
    """Words of 1-bit codes."""
    return lanes.late_words(tensors[0], row, K, chunk, more, 4),


@triton.jit
def second_bits(plane, row, K, chunk, more: tl.constexpr):
    """The words of a 2-bit plane, which cover 2 chunks."""
    return lanes.words(plane, row, tl.cdiv(K, 256), chunk // 2, more // 2)


@triton.jit
def code(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """Codes of pairs i in half 2 * j + h of a span of 256 columns, moved to bit `to`; digit: which 8 bits, for bfloat16."""
    if bits == 8:
        word = lanes.field(words[half % 2], 4 * digit + 8 * i, 0, 8 if F == tl.float16 else 4)
    elif bits >= 4:
        word = lanes.field(words[0], 4 * (half % 2) + 8 * i, to, 4)
        if bits >= 6:
            word |= lanes.field(words[1], 4 * (half % 2) + 2 * (half // 2) + 8 * i, to + 4, 2)
        if bits % 2 == 1:
            word |= lanes.field(words[bits // 2 - 1], 4 * (half % 2) + half // 2 + 8 * i, to + bits - 1, 1)
    elif bits >= 2:
        word = lanes.field(words[0], 2 * half + 8 * i, to, 2)
        if bits == 3:
            word |= lanes.field(words[1], 2 * half + 8 * i, to + 2, 1)
    else:
        word = lanes.field(words[0], half + 8 * i, to, 1)
    return word


@triton.jit
def u1(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 1 bit as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 1, F) ^ flip, F)


@triton.jit
def u2(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 2 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 2, F) ^ flip, F)


@triton.jit
def u3(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 3 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 3, F) ^ flip, F)


@triton.jit
def u4(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 4 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 4, F) ^ flip, F)


@triton.jit
def u5(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 5 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 5, F) ^ flip, F)


@triton.jit
def u6(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 6 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 6, F) ^ flip, F)


@triton.jit
def u7(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 7 bits as numbers."""
    return lanes.halves(code(words, half, i, digit, to, 7, F) ^ flip, F)


@triton.jit
def u8(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of 8 bits as numbers; digit 2: whole codes in bfloat16 (lanes.whole_bytes), with the masks `flip`."""
    if digit == 2 and F == tl.bfloat16:
        return lanes.whole_bytes(words[half % 2] >> 8 * i, flip)
    else:
        return lanes.halves(code(words, half, i, digit, to, 8, F) ^ flip, F)


i1, i2, i3, i4, i5, i6, i7, i8 = u1, u2, u3, u4, u5, u6, u7, u8   # signed ones have another flip (lanes.flips)


@triton.jit
def e4m3(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e4m3 as numbers."""
    return lanes.float_numbers(words[half % 2], 8 * i, 4, 3, F)


@triton.jit
def e5m2(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e5m2 as numbers."""
    return lanes.float_numbers(words[half % 2], 8 * i, 5, 2, F)


@triton.jit
def e3m2(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e3m2 as numbers."""
    return lanes.float_numbers(code(words, half, i, digit, 0, 6, F), 0, 3, 2, F)


@triton.jit
def e2m3(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e2m3 as numbers."""
    return lanes.float_numbers(code(words, half, i, digit, 0, 6, F), 0, 2, 3, F)


@triton.jit
def e2m1(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e2m1 as numbers."""
    pairs = codebook.two_parts(words[0], half % 2, i, flip, F)
    if F == tl.bfloat16:
        pairs = lanes.scaled(pairs, 0x7E807E80)                  # 2^126
    return lanes.halves(pairs, F)


@triton.jit
def raw_e2m1(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e2m1 as bfloat16, times 2^-126."""
    return lanes.halves(codebook.two_parts(words[0], half % 2, i, flip, F), F)


@triton.jit
def ordered_e2m1(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Codes of type e2m1 as numbers; the four bits of a code are adjacent, as files store them."""
    return lanes.float_numbers(words[0], 4 * (half % 2) + 8 * i, 2, 1, F)


@triton.jit
def entries_of_4(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 2-bit codes, as bytes."""
    return codebook.integers(codebook.look_up_4(words[0], half // 2, i, flip, 2), half % 2, flip[1], F)


@triton.jit
def float_entries_of_4(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table numbers of 2-bit codes, in type F."""
    low = codebook.look_up_4(words[0], half // 2, i, flip, 2)
    return codebook.floats(low, codebook.look_up_4(words[0], half // 2, i, flip, 6), half % 2, F)


@triton.jit
def entries_of_8(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 3-bit codes, as bytes."""
    return codebook.integers(codebook.look_up_8(words[0], words[1], half // 2, i, flip, 2), half % 2, flip[1], F)


@triton.jit
def float_entries_of_8(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table numbers of 3-bit codes, in type F."""
    low = codebook.look_up_8(words[0], words[1], half // 2, i, flip, 2)
    return codebook.floats(low, codebook.look_up_8(words[0], words[1], half // 2, i, flip, 6), half % 2, F)


@triton.jit
def entries_of_16(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 4-bit codes, as bytes."""
    bytes = codebook.look_up_half(words[0], i, flip, 0) | codebook.look_up_half(words[0], i, flip, 1)
    return codebook.integers(bytes, half % 2, flip[1], F)


@triton.jit
def entries_of_32(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 5-bit codes, as bytes."""
    return codebook.integers(codebook.look_up_32(words[0], words[1], half // 2, i, flip, 2), half % 2, flip[1], F)


@triton.jit
def wide_entries_of_32(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 5-bit codes; bytes for float16."""
    if F == tl.float16:
        return entries_of_32(words, half, i, digit, to, flip, F)
    else:
        return float_entries_of_32(words, half, i, digit, to, flip, F)


@triton.jit
def float_entries_of_32(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table numbers of 5-bit codes, in type F."""
    low = codebook.look_up_32(words[0], words[1], half // 2, i, flip, 2)
    return codebook.floats(low, codebook.look_up_32(words[0], words[1], half // 2, i, flip, 10), half % 2, F)


@triton.jit
def split_entries_of_16(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 4-bit codes: digit 0 has those of the lower half, 1 of the upper half, 2 all.

    For bfloat16, the negative half's digits are 128 too small, and the others 128 too large.
    """
    if digit == 2:
        return codebook.floats(codebook.look_up_16(words[0], i, flip, 6), codebook.look_up_16(words[0], i, flip, 10), half % 2, F)
    else:
        return codebook.integers(codebook.look_up_half(words[0], i, flip, digit), half % 2, flip[14 if digit else 1], F)


@triton.jit
def wide_entries_of_16(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table integers of 4-bit codes; bytes for float16."""
    if F == tl.float16:
        return codebook.integers(codebook.look_up_16(words[0], i, flip, 2), half % 2, flip[1], F)
    else:
        return float_entries_of_16(words, half, i, digit, to, flip, F)


@triton.jit
def float_entries_of_16(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Table numbers of 4-bit codes, in type F."""
    return codebook.floats(codebook.look_up_16(words[0], i, flip, 2), codebook.look_up_16(words[0], i, flip, 6), half % 2, F)


@triton.jit
def paired_entries_of_16(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip,
                         F: tl.constexpr):
    """The same for a table whose entries are in pairs as bfloat16."""
    if F == tl.bfloat16:
        return codebook.floats(codebook.paired_16(words[0], i, flip, 2), codebook.paired_16(words[0], i, flip, 6), half % 2, F)
    else:
        return float_entries_of_16(words, half, i, digit, to, flip, F)


@triton.jit
def loaded_by_bytes(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """Numbers of a table in memory that 8-bit codes index, in type F."""
    return codebook.loaded(flip, words[half % 2], i, F)


@triton.jit
def loaded_by_planes(words, half: tl.constexpr, i: tl.constexpr, digit: tl.constexpr, to: tl.constexpr, flip, F: tl.constexpr):
    """The same for 6-bit and 7-bit codes in planes, which are first joined to bytes."""
    at: tl.constexpr = 4 * (half % 2)
    codes = lanes.field(words[0], at, 0, 4, 0x01010101) | lanes.field(words[1], at + half // 2 * 2, 4, 2, 0x01010101)
    if len(words) == 3:
        codes |= lanes.field(words[2], at + half // 2, 6, 1, 0x01010101)
    return codebook.loaded(flip, codes, i, F)
