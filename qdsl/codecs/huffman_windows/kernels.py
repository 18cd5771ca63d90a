"""Kernel of `huffman_windows` (qdsl/codecs/huffman_windows/reference.py): a thread decodes a window, twice.

A program has a block of T windows, of 64 bits each.  A thread's codes are those that begin in its window.

             window 0          window 1          window 2                     out: symbols
            +-----------------+-----------------+-----------------+- -       +---------+-------+---------+- -
    data    |  codes of       |..|  codes of    |....|            |          | of 0    | of 1  | of 2    |
            +-----------------+-----------------+-----------------+- -       +---------+-------+---------+- -
                               gap 1             gap 2                        e of 0    e of 1  e of 2
            thread 0           thread 1          thread 2
            count 9            count 7           count 9      -> running sum plus the block's position

First a thread counts its symbols.  The prefix sum of the counts over the program's threads gives the position of each window's
symbols; then the thread decodes again and writes them.

- A thread holds 96 bits: its window, and the following bits that its last code may reach.  Two shifts give 32 bits at any place.
- A code has up to 32 bits, 8 in each row of the tables: LEVELS loads, of which later ones are masked in most threads.  The length
  is one more load.  All tables are a few KB and stay in the L1 cache.
- Loops have as many steps as a window can have codes.  Threads that are done go on without effect, so that no warp diverges.
- Decoding twice costs only arithmetic; keeping the symbols instead would need memory of unknown size.

Cost: two chains of dependent loads per symbol.  Loop counts depend on the weights, so `qdsl analyze` counts nothing per weight.
"""


from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def load_word(data, at, size):
    """Bytes [at, at + 4) of the data, the first one highest; 0 for those from `size` on."""
    value = tl.zeros_like(at).to(tl.uint32)
    for i in tl.static_range(4):
        value = (value << 8) | tl.load(data + at + i, at + i < size, 0).to(tl.uint32)
    return value


@triton.jit
def look_up_symbol(tables, last, bits, LEVELS: tl.constexpr):
    """The symbol whose code begins the upper of 32 bits, and its length, by LEVELS rows of the tables and the row of lengths."""
    symbol = tl.load(tables + (bits >> 24)).to(tl.int32)
    for level in tl.static_range(1, LEVELS):
        further = symbol >= 240
        row = tl.load(tables + ((256 - symbol) * 256 + ((bits >> (24 - 8 * level)) & 255).to(tl.int32)), further, 0).to(tl.int32)
        symbol = tl.where(further, row, symbol)
    return symbol, tl.load(last + symbol).to(tl.int32)


@triton.jit
def bits_from(first, second, third, at):
    """32 bits from bit `at` of 96."""
    upper = tl.where(at < 32, first, second).to(tl.uint64)
    lower = tl.where(at < 32, second, third).to(tl.uint64)
    return ((((upper << 32) | lower) << (at & 31).to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def load_position(positions, place):
    """Entry `place` of unaligned u32 in bytes."""
    p = positions + place * 4
    return tl.load(p).to(tl.int32) | (tl.load(p + 1).to(tl.int32) << 8) | (tl.load(p + 2).to(tl.int32) << 16) | (
        tl.load(p + 3).to(tl.int32) << 24)


@triton.jit
def symbols(tables, data, positions, gaps, out, size, blocks, five, rows, steps, T: tl.constexpr, LEVELS: tl.constexpr):
    """out[e]: the symbols of a block of T windows of the `size` bytes of data.

    blocks: how many; `positions` has one more.  five: the bytes of `gaps`, which has five bits per window.  A window has at most
    `steps` codes.  Writes only inside of positions.
    """
    block = tl.program_id(0)
    window = lanes.within(block * T + tl.arange(0, T), tl.cdiv(size, 8))     # past the end the last window again; writes nothing
    at = window * 8
    first, second, third = load_word(data, at, size), load_word(data, at + 4, size), load_word(data, at + 8, size)
    bit = window.to(tl.int64) * 5
    byte = (bit // 8).to(tl.int32)
    pair = (tl.load(gaps + byte, byte < five, 0).to(tl.int32) << 8) | tl.load(gaps + byte + 1, byte + 1 < five, 0).to(tl.int32)
    gap = (pair >> (11 - (bit % 8).to(tl.int32))) & 31
    stop = tl.minimum(8, size - at) * 8                          # no code begins after the data
    last = tables + (rows - 1) * 256
    p = gap
    count = tl.zeros_like(gap)
    for _ in range(steps):
        _, length = look_up_symbol(tables, last, bits_from(first, second, third, p), LEVELS)
        count += (p < stop).to(tl.int32)
        p += length
    e = load_position(positions, tl.minimum(block, blocks)) + tl.cumsum(count, 0) - count
    end = tl.minimum(e + count, load_position(positions, tl.minimum(block + 1, blocks)))
    p = gap
    for _ in range(steps):
        symbol, length = look_up_symbol(tables, last, bits_from(first, second, third, p), LEVELS)
        tl.store(out + e, symbol.to(tl.uint8), e < end)
        e += 1
        p += length
