"""Kernels that decode exponents by codes that do not ship, only for their instruction counts (bench/codes.py)."""

from qdsl.codecs.huffman_lanes.kernels import refill_bits, start_lane
from qdsl.runtime.gpu.kernels import pairs
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def looked_up(table, index):
    """Words of a table, whose address ends in zeros, at indices of words."""
    return tl.load((table | (index << 2).to(tl.uint64)).to(tl.pointer_type(tl.uint32)))


@triton.jit
def two_by_two(table, bits, left, state, LONGEST: tl.constexpr):
    """Four symbols, as pairs, of a Huffman code of at most LONGEST bits: a lookup gives two symbols and the bits of both."""
    MASK: tl.constexpr = (1 << 2 * LONGEST) - 1
    first = looked_up(table, (bits >> (left + 8 - 2 * LONGEST).to(tl.uint64)).to(tl.uint32) & MASK)
    left -= (first & 31).to(tl.int32)
    second = looked_up(table, (bits >> (left + 8 - 2 * LONGEST).to(tl.uint64)).to(tl.uint32) & MASK)
    return first & 0x7F807F80, second & 0x7F807F80, left - (second & 31).to(tl.int32), state


@triton.jit
def by_state(table, bits, left, state):
    """A symbol at bit 7 of an entry of tANS, whose bits 0 to 3 say how many bits follow, and 16 on the next state's base."""
    entry = looked_up(table, state)
    left -= (entry & 15).to(tl.int32)
    following = (bits >> (left + 8).to(tl.uint64)).to(tl.uint32) & ((1 << (entry & 15)) - 1)
    return entry & 0x7F80, left, (entry >> 16) + following


@triton.jit
def four_by_state(table, bits, left, state, LONGEST: tl.constexpr):
    """Four symbols, as pairs, of tANS."""
    s0, left, state = by_state(table, bits, left, state)
    s1, left, state = by_state(table, bits, left, state)
    s2, left, state = by_state(table, bits, left, state)
    s3, left, state = by_state(table, bits, left, state)
    return s0 | (s1 << 16), s2 | (s3 << 16), left, state


@triton.jit
def decode(words, starts, table, uncoded, out, total, N, K8, groups, runs, next_four: tl.constexpr, to_weights: tl.constexpr,
           LONGEST: tl.constexpr, R: tl.constexpr, BN: tl.constexpr):
    """Writes the bfloat16 weights of BN rows, as kernels.dequantize of huffman_lanes does, by another code."""
    lane = tl.arange(0, BN * R)
    n = tl.program_id(0) * BN + lane // R
    ROWS: tl.constexpr = 32 // R
    address, last = table.to(tl.uint64), (words + (total - 1).to(tl.int64) * 32).to(tl.uint64)
    at, bits, left = start_lane(words, starts, total, n // ROWS, groups, lane % 32)
    state = (bits >> 20).to(tl.uint32) & 255
    uncoded += n.to(tl.int64) * K8 + lane % R
    four = tl.arange(0, BN * R * 4)
    row = tl.program_id(0) * BN + four // (4 * R)
    place = out + (row.to(tl.int64) * (4 * K8) + four % (4 * R))
    for _ in range(0, runs):
        more = tl.load(uncoded)
        inside = at.to(tl.uint64) < last
        at, bits, left = refill_bits(at, inside, bits, left)
        p0, p1, left, state = next_four(address, bits, left, state, LONGEST)
        at, bits, left = refill_bits(at, inside, bits, left)
        p2, p3, left, state = next_four(address, bits, left, state, LONGEST)
        p = to_weights((p0, p1, p2, p3), more.to(tl.uint32), (more >> 32).to(tl.uint32))
        tl.store(place, pairs.interleave_words(p[0], p[1], p[2], p[3]), row < N)
        uncoded += R
        place += 4 * R
