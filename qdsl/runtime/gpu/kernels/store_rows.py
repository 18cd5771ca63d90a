"""store_rows: encodes tokens into the rows of a paged cache.

A program takes BR tokens of one head; if GROUP tokens share numbers, the tokens of the group that its token completes.

          x [T, heads, D]                  tile: rows, groups, units, E               row of the cache, bytes

          +---------------+               group 0        group 1                     +----+-----------+----+------
    t     | columns 0..D  |              +---+---+- -   +---+---+- -                 | s0 | codes     | s1 | codes
          +---------------+     ->    r  |k=0|k=1|      |   |   |           ->       +----+-----------+----+------
    t+1   |               |              |E=1|   |      |   |   |                    numbers of a group, and its codes:
          +---------------+              +---+---+- -   +---+---+- -                 E codes are added up to a byte

A unit is a byte of E codes, so that packing is a sum along the tile's last axis.  The digits of the layout give their columns:
UNITS (extent, columns, bytes) and BITS (extent, columns, bits), fastest first.  A scheme of encode.py chooses the codes and
numbers of a tile at once.

If keys share numbers among tokens, a program works only if its token is the last of a group.  The other tokens of the group
come from x, or from the tail if an earlier launch got them.  `store_tail` keeps tokens of incomplete groups, in a later launch,
because it may write where this one reads.

A thread holds whole bytes, so that no code changes threads: E is the fastest axis of the tile.  Codes are packed by a sum rather
than a chain of shifts, because Triton makes a tree of a sum.

Cost: x is read once and the row is written once.  Bytes are stored one by one; the L2 cache merges them to sectors.
"""

from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def first_rows(slot, head, HEADS, BLOCK: tl.constexpr):
    """The row of a slot of a head."""
    slot = slot.to(tl.int64)
    return (slot // BLOCK * HEADS + head) * BLOCK + slot % BLOCK


@triton.jit
def columns_and_bytes(j, digits: tl.constexpr):
    """The columns and places that numbers j stand for, by digits (extent, columns, places), fastest first."""
    k, place = tl.zeros_like(j), tl.zeros_like(j)
    for i in tl.static_range(len(digits)):
        digit = j % digits[i][0]
        j = j // digits[i][0]
        k += digit * digits[i][1]
        place += digit * digits[i][2]
    return k, place


@triton.jit
def store_rows(
    x, tensors, behind, slots, tail, sequences, T, HEADS,
    scheme: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr, STATIC: tl.constexpr, WHOLE: tl.constexpr, CODE: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    NUMBERS: tl.constexpr, GROUPS: tl.constexpr, APPENDED: tl.constexpr, X: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, U: tl.constexpr, E: tl.constexpr, BR: tl.constexpr,
):
    """Encode D columns of x [T, HEADS, X] into the rows of slots [T], and copy the plain numbers behind them.

    scheme: a function of encode.py, which defines FLOAT to TYPE.  STATIC, WHOLE: the tensors of a scale, and of a factor of all
    scales, that all rows share, or None.  CODE: (tensor, first byte, bytes of a row).  NUMBERS: the same for every number.
    GROUPS: digits of the groups of numbers (extent, groups, bytes).  behind, APPENDED: plain numbers behind the columns; for each
    the first column in x, the count, and the row stride.
    """
    head = tl.program_id(1)
    r = tl.arange(0, BR)
    if GROUP == 1:
        t = tl.program_id(0) * BR + r
        slot = tl.load(slots + t, t < T, -1)
        live = slot >= 0
    else:
        last = tl.load(slots + tl.program_id(0))
        if (last < 0) | (last % GROUP != GROUP - 1):
            return
        t = tl.program_id(0) - (GROUP - 1) + r
        slot = last - (GROUP - 1) + r
        live = (t >= 0) & (tl.load(slots + tl.maximum(t, 0)) == slot)                             # tokens that are in x
    row = first_rows(tl.maximum(slot, 0), head, HEADS, BLOCK)[:, None, None, None]
    unit, place = columns_and_bytes(tl.reshape(tl.arange(0, G * U), (1, G, U, 1)), UNITS)
    more, shift = columns_and_bytes(tl.reshape(tl.arange(0, E), (1, 1, 1, E)), BITS)
    k = unit + more
    from_x = live[:, None, None, None]
    at = (tl.maximum(t, 0).to(tl.int64) * HEADS + head)[:, None, None, None] * X
    value = tl.load(x + (at + k), from_x & (k < D), 0).to(tl.float32)
    if GROUP > 1:
        base = (tl.load(sequences + tl.program_id(0)).to(tl.int64) * HEADS + head) * (GROUP * D)
        before = tl.load(tail + (base + r[:, None, None, None] * D + k), (from_x == 0) & (k < D), 0)
        value = tl.where(from_x, value, before.to(tl.float32))
        from_x = from_x | (from_x == 0)
    if WHOLE is not None:
        value = tl.math.div_rn(value, tl.load(tensors[WHOLE]).to(tl.float32))
    static = tl.load(tensors[STATIC]).to(tl.float32) + tl.zeros((1, 1, 1, 1), tl.float32) if STATIC is not None else None
    codes, numbers = scheme(value, k, static, GROUP > 1, FLOAT, LOW, HIGH, DIVISOR, OFFSET, BY, TIES, FACTOR, LEAST, LEVELS, TYPE)
    packed = tl.sum((codes & ((1 << (8 // E)) - 1)) << shift, 3, keep_dims=True)
    target = tensors[CODE[0]].to(tl.pointer_type(tl.uint8)) + CODE[1]
    tl.store(target + (row * CODE[2] + place), packed.to(tl.uint8), from_x)
    for i in tl.static_range(len(NUMBERS)):
        store_number(tensors[NUMBERS[i][0]], numbers[i], row, from_x, k, NUMBERS, i, GROUPS, G, GROUP)
    for i in tl.static_range(len(APPENDED)):
        j = tl.reshape(tl.arange(0, APPENDED[i][1]), (1, 1, 1, APPENDED[i][1]))
        kind: tl.constexpr = behind[i].dtype.element_ty
        number = device.rounded(tl.load(x + (at + (APPENDED[i][0] + j)), from_x, 0).to(tl.float32), kind)
        tl.store(behind[i] + (row * APPENDED[i][2] + j), number.to(kind), from_x)


@triton.jit
def store_number(
    tensor, number, row, live, k, NUMBERS: tl.constexpr, i: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store the numbers of groups: [rows, G, 1, 1], or of columns [1, 1, U, E] where rows share them."""
    kind: tl.constexpr = number.dtype
    size: tl.constexpr = kind.primitive_bitwidth // 8
    target = tensor.to(tl.pointer_type(kind))
    if GROUP == 1:
        _, byte = columns_and_bytes(tl.reshape(tl.arange(0, G), (1, G, 1, 1)), GROUPS)
        tl.store(target + (row * (NUMBERS[i][2] // size) + (NUMBERS[i][1] + byte) // size), number, live)
    else:                                                        # a number per column, of the first row
        _, byte = columns_and_bytes(k, GROUPS)
        first = tl.min(row, 0, keep_dims=True) // GROUP
        tl.store(target + (first * (NUMBERS[i][2] // size) + (NUMBERS[i][1] + byte) // size), number)


@triton.jit
def store_tail(x, slots, tail, sequences, T, HEADS, D: tl.constexpr, GROUP: tl.constexpr):
    """Store token `program_id(0)` of a head in the tail, if its group is not complete after this call."""
    t, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + t)
    end = t + GROUP - 1 - slot % GROUP
    closes = tl.load(slots + tl.minimum(end, T - 1)) == slot + (GROUP - 1 - slot % GROUP)
    if (slot < 0) | ((end < T) & closes):
        return
    d = tl.arange(0, D)
    base = ((tl.load(sequences + t).to(tl.int64) * HEADS + head) * GROUP + slot % GROUP) * D
    tl.store(tail + base + d, tl.load(x + (t.to(tl.int64) * HEADS + head) * D + d).to(tail.dtype.element_ty))
