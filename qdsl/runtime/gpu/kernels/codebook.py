"""Device functions of the lane-tile kernels: codes of 3 or 4 bits that stand for the numbers of a table.

A table lies in registers, a byte of four entries in each; the byte permutation of NVIDIA GPUs (Triton's libdevice has it by
name) takes four codes at once from eight entries, and a third one chooses between the halves of sixteen.  The planar storage
puts the codes of a word so that codes e = 0, 1 of a pair come out two bytes apart: code (i, e, h) lies at bit 16 * i + 8 * e +
4 * h (runtime/gpu/kernels/lanes.py says what i, e and h are).  Of 3 bits two lie there, or two bits higher in the second chunk
of a span, and the third in a word of its own.

Integers become numbers without a conversion: a byte is float16's subnormal byte * 2^-24, and behind 0x43 bfloat16's 128 + byte
for bytes below 128.  Other tables have a second byte for each entry.
"""

from qdsl.runtime.gpu.kernels.lanes import halves
from qdsl.runtime.gpu.triton import libdevice, tl, triton


@triton.jit
def table(g, N, high: tl.constexpr, t0: tl.constexpr, t1: tl.constexpr, t2: tl.constexpr = 0, t3: tl.constexpr = 0,
          h0: tl.constexpr = 0, h1: tl.constexpr = 0, h2: tl.constexpr = 0, h3: tl.constexpr = 0):
    """What the functions below take, in registers: the selectors of bytes 0 to 3, twice; the high byte of integers as numbers;
    the words of a table, the entries' low bytes and then their high ones.
    """
    g = g[:, :, None]
    return ((in_lane(0x32103210, g, N), in_lane(high, g, N),
             in_lane(t0, g, N), in_lane(t1, g, N), in_lane(t2, g, N), in_lane(t3, g, N),
             in_lane(h0, g, N), in_lane(h1, g, N), in_lane(h2, g, N), in_lane(h3, g, N)),)


@triton.jit
def in_lane(word: tl.constexpr, g, N):
    """The constant in a register of every lane; a literal would be loaded into one for every use."""
    if word == 0:
        return 0
    else:
        return tl.where(g < N + 8, word, 0)


@triton.jit
def of_16(word, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 16, code j of half i in byte j; its words are those from `first` on."""
    low = word & 0x77777777
    upper = ((word >> 1) & 0x44444444) | table[0]                # byte j of the lower entries, or of the upper ones
    if i:
        low = low >> 16
        upper = upper >> 16
    return libdevice.byte_perm(libdevice.byte_perm(table[first], table[first + 1], low),
                               libdevice.byte_perm(table[first + 2], table[first + 3], low), upper)


@triton.jit
def of_8(low, high, chunk: tl.constexpr, i: tl.constexpr, table, first: tl.constexpr):
    """Four codes' bytes of a table of 8, from words of two bits and of one, in the first or second chunk of a span."""
    if chunk:
        low = low >> 2
    else:
        high = high << 2
    codes = (low & 0x33333333) | (high & 0x44444444)
    if i:
        codes = codes >> 16
    return libdevice.byte_perm(table[first], table[first + 1], codes)


@triton.jit
def integers(bytes, h: tl.constexpr, table, F: tl.constexpr):
    """Pairs of integers from four bytes: times 2^-24 as float16, and 128 more as bfloat16."""
    return halves(libdevice.byte_perm(bytes, table[1], 0x4341 if h else 0x4240), F)


@triton.jit
def floats(low, high, h: tl.constexpr, F: tl.constexpr):
    """Pairs of 16-bit floats from four low bytes and four high ones."""
    return halves(libdevice.byte_perm(low, high, 0x7351 if h else 0x6240), F)
