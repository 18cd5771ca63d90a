"""Device functions for eight neighbouring columns as four words, whose halves are columns 2j and 2j + 1."""


from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def moved(word, by: tl.constexpr):
    """word * 2^by"""
    if by < 0:
        return word >> -by
    else:
        return word << by


@triton.jit
def columns(p0, p1, p2, p3):
    """Halves [..., 8] as 16 bits."""
    q = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.join((q & 0xFFFF).to(tl.uint16), (q >> 16).to(tl.uint16)).reshape(p0.shape + [8])


@triton.jit
def interleave_words(p0, p1, p2, p3):
    """The words one after the other, along the last axis."""
    four = tl.join(tl.join(p0, p2), tl.join(p1, p3)).to(tl.int32, bitcast=True)
    if len(p0.shape) == 1:
        return four.reshape(4 * p0.shape[0])
    else:
        return four.reshape(p0.shape[0], 4 * p0.shape[1])


@triton.jit
def apart(v):
    """Of words [..., 16], four of every lane: the first, second, third and fourth, [..., 4] each."""
    even, odd = tl.split(v.reshape(v.shape[0], 4, 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def weights(upper, lower, F: tl.constexpr):
    """w's operand [W, 16, 32] of the eight columns of each lane in rows g and g + 8: four words of each."""
    return lanes.word_operand(lanes.halves(tl.join(upper[0], lower[0]), F), lanes.halves(tl.join(upper[1], lower[1]), F),
                              lanes.halves(tl.join(upper[2], lower[2]), F), lanes.halves(tl.join(upper[3], lower[3]), F))


@triton.jit
def one(p, k):
    """The half of column k of four words."""
    j = k // 2 % 4
    word = tl.where(j < 2, tl.where(j == 0, p[0], p[1]), tl.where(j == 2, p[2], p[3]))
    return (word >> (k % 2 * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def number(bits, F: tl.constexpr):
    """16 bits as float32."""
    return bits.to(tl.uint16).to(F, bitcast=True).to(tl.float32)
