"""Loads the numbers of groups, such as scales, from a plane by rows or columns, in the layout of the accumulator.

An accumulator [W, 16, 8] has 16 rows of w and 8 columns for each of W warps: lane 4 * g + c has rows g and g + 8, columns 2 * c
and 2 * c + 1 (lanes.py).  A number that all columns of a lane share is loaded once, [8 * W, 4], and `spread` over them.
"""

from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def blocks(row, size: tl.constexpr):
    """The blocks of `size` rows that two rows are in; block 0 for a size of 0, one block of all rows."""
    if size == 0:
        return tl.zeros_like(row[0]), tl.zeros_like(row[1])
    elif size == 1:
        return row
    else:
        return row[0] // size, row[1] // size


@triton.jit
def count(K, block: tl.constexpr):
    """The number of blocks of columns; K is a multiple of 128."""
    if block <= 128:
        return K // 128 * (128 // block)
    else:
        return tl.cdiv(K, block)


@triton.jit
def spread(upper, lower):
    """Numbers of rows g and g + 8, [8 * W, 8], or [8 * W, 4] for both columns of lane c, as [W, 16, 8]."""
    W: tl.constexpr = upper.shape[0] // 8
    v = tl.join(upper, lower)
    if upper.shape[1] == 4:
        v = tl.join(v, v).permute(0, 1, 3, 2)
    return v.reshape(W, 8, 8, 2).permute(0, 3, 1, 2).reshape(W, 16, 8)


@triton.jit
def number(value, kind: tl.constexpr):
    """A stored number as float32.  kind 0: a float, by its dtype.  Below 0: bytes, as layout.SMALL_FLOATS lists them.

    Kinds 1 to 31: an integer of so many bits, up to 23; it enters the mantissa of 2^23, because a cast would be slow.  From 32
    on: an integer of kind % 32 bits from bit kind // 32 - 1 on.
    """
    if kind == 0:
        return device.scale(value)
    elif kind == -1:
        return device.e8m0(value)
    elif kind == -2:
        return device.e8m0h(value)
    elif kind == -3:
        return device.ue4m3(value)
    elif kind == -4:
        return device.e4m3(value)
    else:
        return (field_bits(value, kind).to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def field_bits(value, kind: tl.constexpr):
    """A stored integer; if other fields share its bytes, the bits of this field, as number() defines kinds."""
    if kind >= 32:
        return (value >> (kind // 32 - 1)) & ((1 << kind % 32) - 1)
    else:
        return value


@triton.jit
def loaded(plane, at, kind: tl.constexpr):
    """float32 of the numbers at places of a plane, stored as number() says.

    Kind -5: integers that index a table; the plane is (integers and table, kind of the integers).  Kind -6: a float that several
    places share; the plane is (plane, how many).
    """
    if kind == -5:
        return tl.load(plane[1] + field_bits(tl.load(plane[0] + at), plane[2]).to(tl.int32)).to(tl.float32)
    elif kind == -6:
        return device.scale(tl.load(plane[0] + at.to(tl.uint64) // plane[1]))
    else:
        return number(tl.load(plane + at), kind)


@triton.jit
def loaded_from(plane, first, at, kind: tl.constexpr):
    """float32 of the numbers at first + at.  Adding `first` to the pointer saves one addition outside of loops."""
    if kind == -5 or kind == -6:
        return loaded(plane, first + at, kind)
    else:
        return loaded(plane + first, at, kind)


@triton.jit
def values(tensors, fields: tl.constexpr, at, field: tl.constexpr):
    """The numbers of fields (GroupField.constants), loaded by the family's function field(plane, at, rows, columns, kind)."""
    numbers = ()
    for i in tl.static_range(len(fields)):
        numbers = numbers + (value(tensors, fields, i, at, field),)
    return numbers


@triton.jit
def value(tensors, fields: tl.constexpr, i: tl.constexpr, at, field: tl.constexpr):
    """The numbers of field i; its default if it has no tensor."""
    if tensors[fields[i][0]] is None:
        default: tl.constexpr = fields[i][4]
        return default
    elif fields[i][3] == -5:
        kind: tl.constexpr = fields[i][6]
        return field((tensors[fields[i][0]], tensors[fields[i][5]], kind), at, fields[i][1], fields[i][2], fields[i][3])
    elif fields[i][3] == -6:
        shared: tl.constexpr = fields[i][5]
        return field((tensors[fields[i][0]], shared), at, fields[i][1], fields[i][2], fields[i][3])
    else:
        return field(tensors[fields[i][0]], at, fields[i][1], fields[i][2], fields[i][3])


@triton.jit
def of_rows(plane, row, size: tl.constexpr, kind: tl.constexpr):
    """A field with one value per `size` rows, as [W, 16, 8]; one number for a size of 0."""
    if size == 0:
        return loaded(plane, 0, kind)
    else:
        block = blocks(row, size)
        zero = tl.zeros((1, 4), tl.int32)
        return spread(loaded(plane, block[0] + zero, kind), loaded(plane, block[1] + zero, kind))


@triton.jit
def by_column(plane, row, count, stored, chunk, K, step: tl.constexpr, block: tl.constexpr, kind: tl.constexpr):
    """A field with one value per `block` columns and `count` per row, as [W, 16, 8].

    Column j of the result is the value of the `step` columns of w from 128 * chunk + step * j on; past K the last value is
    repeated.  A row begins `stored` values after the previous one.
    """
    if block == step:
        pair = tl.minimum(chunk * (64 // step) + tl.arange(0, 8)[None, :] // 2, count // 2 - 1)
        at = pair * 2 + tl.arange(0, 8)[None, :] % 2
    elif block < 128:
        at = tl.minimum(chunk * (128 // block) + 2 * step * tl.arange(0, 4)[None, :] // block, count - 1)
    else:
        at = tl.minimum(chunk * 128 + 2 * step * tl.arange(0, 4)[None, :], K - 1) // block
    return spread(loaded(plane, row[0] * stored + at, kind), loaded(plane, row[1] * stored + at, kind))


@triton.jit
def by_group(plane, row, count, chunk, size: tl.constexpr, block: tl.constexpr, kind: tl.constexpr):
    """The field's values in the groups of `size` columns of a chunk, a tuple of [W, 16, 8]; `block` columns share one."""
    values = ()
    if block >= 128:
        at = chunk * 128 // block + tl.zeros((1, 4), tl.int32)
        one = spread(loaded(plane, row[0] * count + at, kind), loaded(plane, row[1] * count + at, kind))
        for i in tl.static_range(128 // size):
            values = values + (one,)
    else:
        upper = of_chunk(plane, row[0] * count, chunk, block, kind)
        lower = of_chunk(plane, row[1] * count, chunk, block, kind)
        for i in tl.static_range(128 // size):
            values = values + (spread(upper[i * size // block], lower[i * size // block]),)
    return values


@triton.jit
def of_chunk(plane, first, chunk, block: tl.constexpr, kind: tl.constexpr):
    """The 128 // block values of a chunk, from `first` on: tuples of [8 * W, 4], the same in all lanes of a row."""
    count: tl.constexpr = 128 // block
    width: tl.constexpr = 2 if count == 2 else 4                 # a lane loads at most 16 bytes at a time
    at = chunk * count + tl.arange(0, 4 * width)[None, :] % width
    value = loaded_from(plane, first, at, kind)
    R: tl.constexpr = value.shape[0]
    if count == 2:
        return tl.split(value.reshape(R, 4, 2))
    elif count == 4:
        return in_four(value.reshape(R, 4, 2, 2))
    else:
        other = loaded_from(plane, first, at + 4, kind)
        return in_four(value.reshape(R, 4, 2, 2)) + in_four(other.reshape(R, 4, 2, 2))


@triton.jit
def in_four(value):
    """The four elements of [..., 2, 2] in order."""
    even, odd = tl.split(value)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
