"""csr: out + x @ s.T for a sparse s in rows, on any GPU, without matrix units.

A program takes one row of s and BM rows of x.  It walks the row's entries in blocks of BLOCK, in their order.

      start[n] ... start[n + 1]            x [BM, K]                       acc [BM, BLOCK], float32
     +---+---+---+---+---+---+-           +-------------------+           +---+---+---+---+
     | c | c | c | c | c | c |  columns   |   x     x  x    x | gathered  |   |   |   |   |  BM rows of x
     | v | v | v | v | v | v |  values    |                   | by column |   |   |   |   |  BLOCK entries
     +---+---+---+---+---+---+-           +-------------------+           +---+---+---+---+
       block 0         block 1

A thread keeps one sum per place in the block; the places are added up after the last block.  So a sum depends on the row
alone and is the same on every run.  Neighbouring threads load neighbouring columns and values, as stored; x is gathered from the
L1 cache.

Cost: a load of x and a multiply-add per entry and row of x.  Rows of x beyond BM read the entries again.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def csr(out, sums, x, start, column, value, M, N, K, BM: tl.constexpr, BLOCK: tl.constexpr):
    """sums[m, n] = out[m, n] + sum over the entries e of row n of x[m, column[e]] * value[e], rounded once."""
    n = tl.program_id(0)
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    first, last = tl.load(start + n), tl.load(start + n + 1)
    rows = x + m.to(tl.int64) * K
    acc = tl.zeros((BM, BLOCK), tl.float32)
    for begin in range(first, last, BLOCK):
        at = begin + lanes
        live = at < last
        k = tl.load(column + at, live, 0)
        weights = tl.load(value + at, live, 0).to(tl.float32)
        acc += weights * tl.load(rows + k, live & (m < M), 0).to(tl.float32)
    place = m.to(tl.int64) * N + n
    before = tl.load(out + place, m < M, 0).to(tl.float32)
    tl.store(sums + place, before + tl.sum(acc, 1)[:, None], m < M)
