"""Device functions of the lane-tile kernels: codes of 4 bits that stand for the numbers of a table.

A table lies in registers, a byte of four entries in each; the byte permutation of NVIDIA GPUs (Triton's libdevice has it by
name) takes four codes at once from eight entries, and a third one chooses between the halves of sixteen.  The planar storage
puts the codes of a word so that codes e = 0, 1 of a pair come out two bytes apart: code (i, e, h) lies at bit 16 * i + 8 * e +
4 * h (runtime/gpu/kernels/lanes.py says what i, e and h are).
"""

from qdsl.runtime.gpu.kernels.lanes import halves
from qdsl.runtime.gpu.triton import libdevice, tl, triton


@triton.jit
def table(g, N, t0: tl.constexpr, t1: tl.constexpr, t2: tl.constexpr, t3: tl.constexpr, h0: tl.constexpr = 0,
          h1: tl.constexpr = 0, h2: tl.constexpr = 0, h3: tl.constexpr = 0):
    """What bytes() and floats() take: the selectors of bytes 0 to 3, twice, and the words of a table, in registers."""
    g = g[:, :, None]
    return ((in_lane(0x32103210, g, N), in_lane(t0, g, N), in_lane(t1, g, N), in_lane(t2, g, N), in_lane(t3, g, N),
             in_lane(h0, g, N), in_lane(h1, g, N), in_lane(h2, g, N), in_lane(h3, g, N)),)


@triton.jit
def in_lane(word: tl.constexpr, g, N):
    """The constant in a register of every lane; a literal would be loaded into one for every use."""
    return tl.where(g < N + 8, word, 0)


@triton.jit
def entries(word, i: tl.constexpr, t0, t1, t2, t3, selectors):
    """Four codes' bytes of a table: code j of half i in byte j."""
    low = word & 0x77777777
    upper = ((word >> 1) & 0x44444444) | selectors               # byte j of the lower entries, or of the upper ones
    if i:
        low = low >> 16
        upper = upper >> 16
    return libdevice.byte_perm(libdevice.byte_perm(t0, t1, low), libdevice.byte_perm(t2, t3, low), upper)


@triton.jit
def bytes(word, h: tl.constexpr, i: tl.constexpr, table):
    """Pairs of integers from 0 to 255, times 2^-24 as float16."""
    codes = entries(word, i, table[1], table[2], table[3], table[4], table[0])
    return halves(libdevice.byte_perm(codes, 0, 0x4341 if h else 0x4240), tl.float16)


@triton.jit
def floats(word, h: tl.constexpr, i: tl.constexpr, table, F: tl.constexpr):
    """Pairs of 16-bit floats from their low and high bytes."""
    low = entries(word, i, table[1], table[2], table[3], table[4], table[0])
    high = entries(word, i, table[5], table[6], table[7], table[8], table[0])
    return halves(libdevice.byte_perm(low, high, 0x7351 if h else 0x6240), F)
