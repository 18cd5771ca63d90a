"""Device functions of tile_gemm and w8a8: tiles of w in registers, tiles of x in shared memory.

A warp has 16 rows of a tile of w, with words as in lanes.py.  Unlike there, every code becomes one number, and the MMA takes
columns in order.
"""


from qdsl.runtime.gpu.kernels import group_numbers, lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def first_span(words, chunk, steps: tl.constexpr):
    """The words of a chunk, by plane, at the bits of a span's first chunk; steps: by how much the second's are higher."""
    moved = ()
    for i in tl.static_range(len(words)):
        moved = moved + (shifted_down(words[i], chunk % 2, steps[i]),)
    return moved


@triton.jit
def shifted_down(word, times, step: tl.constexpr):
    """word >> times * step"""
    if step == 0:
        return word
    else:
        return word >> (times * step)


@triton.jit
def scaled(value, place: tl.constexpr, zero: tl.constexpr, F: tl.constexpr):
    """Numbers whose code is at bit `place`, scaled as for bit 0, plus zero; exact in both types."""
    if F == tl.float16:
        if place:
            value = value * (1.0 / (1 << place))
        if zero != 0:
            value = value + zero * 2.0 ** -24
    elif zero != 0:
        value = value + zero
    return value


@triton.jit
def chunk_operand(v00, v01, v10, v11):
    """The rows [16 * W, 128] of w from numbers [8 * W, 16, 2, 2] of (h, i), columns in order."""
    W: tl.constexpr = v00.shape[0] // 8
    v = tl.join(tl.join(v00, v10), tl.join(v01, v11)).reshape(W, 8, 4, 4, 2, 2, 2, 2)       # w g c u r e h i
    return v.permute(0, 4, 1, 3, 7, 6, 2, 5).reshape(W * 16, 128)


@triton.jit
def group_operand(v00, v01, v10, v11):
    """The rows [16 * W, 32] of w from numbers [8 * W, 4, 2, 2] of (h, i), columns in order."""
    W: tl.constexpr = v00.shape[0] // 8
    v = tl.join(tl.join(v00, v10), tl.join(v01, v11)).reshape(W, 8, 4, 2, 2, 2, 2)          # w g c r e h i
    return v.permute(0, 3, 1, 6, 5, 2, 4).reshape(W * 16, 32)


@triton.jit
def short_operand(v0, v1):
    """The rows [16 * W, 16] of w from numbers [8 * W, 4, 2, 2] of h, columns in order."""
    W: tl.constexpr = v0.shape[0] // 8
    v = tl.join(v0, v1).reshape(W, 8, 4, 2, 2, 2)                                           # w g c r e h
    return v.permute(0, 3, 1, 5, 2, 4).reshape(W * 16, 16)


@triton.jit
def points(plane, row, count, column, block: tl.constexpr, size: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """Unsigned zero points of rows g and g + 8 at a column, in the number form of codes of `bits`: [8 * W, 16 or 4, 2, 2]."""
    at = column // block + tl.zeros((1, 4), tl.int32)
    v = tl.join(tl.load(plane + (row[0] * count + at)), tl.load(plane + (row[1] * count + at))).to(tl.int32)
    if size == 128:
        v = tl.join(tl.join(v, v), tl.join(v, v)).permute(0, 1, 3, 4, 2).reshape(v.shape[0], 16, 2)
    v = v | (v << 16)
    if F == tl.bfloat16 and bits == 8:
        return lanes.whole_bytes(v, (0x43004300, 0x43804380))
    else:
        return lanes.halves(v | 0x43004300 if F == tl.bfloat16 else v, F)


@triton.jit
def block_values_at_pairs(plane, row, chunk, stored, i: tl.constexpr, block: tl.constexpr, kind: tl.constexpr):
    """A field's values at pairs i of a chunk's words, [8 * W, 16, 2, 1]; `block` columns share one, 0: all of K.

    row: rows g and g + 8, or the blocks of rows that they are in.
    """
    if block == 0 or block >= 128:
        at = tl.zeros((1, 4), tl.int32)
        count = 1
        if block != 0:
            at += chunk * 128 // block
            count = group_numbers.count(stored, block)
        v = tl.join(group_numbers.loaded(plane, row[0] * count + at, kind),
                    group_numbers.loaded(plane, row[1] * count + at, kind))
        v = tl.join(tl.join(v, v), tl.join(v, v)).permute(0, 1, 3, 4, 2).reshape(v.shape[0], 16, 2)
    else:
        count = group_numbers.count(stored, block)
        v = tl.join(at_pairs(group_numbers.of_chunk(plane, row[0] * count, chunk, block, kind), i, block),
                    at_pairs(group_numbers.of_chunk(plane, row[1] * count, chunk, block, kind), i, block))
    return v[:, :, :, None]


@triton.jit
def at_pairs(values, i: tl.constexpr, block: tl.constexpr):
    """The values of a chunk's blocks, [8 * W, 4] each, at pairs i of its words: [8 * W, 16]; word u begins at column 32 * u."""
    even = tl.join(values[16 * i // block], values[(64 + 16 * i) // block])
    odd = tl.join(values[(32 + 16 * i) // block], values[(96 + 16 * i) // block])
    return tl.join(even, odd).reshape(values[0].shape[0], 16)


@triton.jit
def zero_points(tensors, fields: tl.constexpr, i: tl.constexpr, at, field: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """The zero points of field i in the number form of codes; the default as a number if it has no tensor."""
    if tensors[fields[i][0]] is None:
        default: tl.constexpr = fields[i][4]
        base: tl.constexpr = -128.0 if bits == 8 else 128.0
        number: tl.constexpr = default * 2.0 ** -24 if F == tl.float16 else default + base
        return tl.full((1, 1, 1, 1), number, tl.float32).to(F)
    else:
        return group_numbers.value(tensors, fields, i, at, field)


@triton.jit
def less(value, point):
    """value - point; value if point is None."""
    if point is None:
        return value
    else:
        return value - point


@triton.jit
def w_operand(codes: tl.constexpr, w, flip, zero: tl.constexpr, point, width: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """The rows of w in a chunk, or a group of 32 columns, as numbers: codes plus zero, minus a zero point."""
    v00 = numbers(codes, w, 0, 0, flip, zero, point, width, bits, F)
    v01 = numbers(codes, w, 0, 1, flip, zero, point, width, bits, F)
    v10 = numbers(codes, w, 1, 0, flip, zero, point, width, bits, F)
    v11 = numbers(codes, w, 1, 1, flip, zero, point, width, bits, F)
    if w[0].shape[1] == 16:
        return chunk_operand(v00, v01, v10, v11)
    else:
        return group_operand(v00, v01, v10, v11)


@triton.jit
def numbers(codes: tl.constexpr, w, h: tl.constexpr, i: tl.constexpr, flip, zero: tl.constexpr, point, width: tl.constexpr,
            bits: tl.constexpr, F: tl.constexpr):
    """The numbers of pairs i of half h: codes plus zero, minus a zero point."""
    bytes: tl.constexpr = bits == 8 and F == tl.bfloat16
    all: tl.constexpr = 2 if bits < 0 or bytes else 0            # the digit that holds the whole code
    place: tl.constexpr = width * h if F == tl.float16 and width < 8 and width + bits <= 10 else 0
    masks = (flip[0], flip[2]) if bytes else flip[1 if place else 0]
    return less(scaled(codes(w, h, i, all, place, masks, F), place, zero, F), point)


@triton.jit
def as_float32(value, F: tl.constexpr):
    """Numbers of type F in float32.  A shift of bfloat16 joins the one that took a pair apart: one instruction for a number."""
    if F == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def rows_product(codes: tl.constexpr, words, u: tl.constexpr, x, flip, zero: tl.constexpr, point,
                 width: tl.constexpr, bits: tl.constexpr, size: tl.constexpr, F: tl.constexpr):
    """The product of a chunk's rows of w, or of its group u of columns, with x [size, BM]: [16 * W, BM].

    zero: is added to every code; it accounts for the difference of operands and codes.  point: zero points to subtract, or None.
    """
    if size == 16:
        w = short_operand(numbers(codes, words[u // 2], 0, u % 2, flip, zero, point, width, bits, F),
                          numbers(codes, words[u // 2], 1, u % 2, flip, zero, point, width, bits, F))
    else:
        w = w_operand(codes, words if size == 128 else words[u], flip, zero, point, width, bits, F)
    return tl.dot(w, x)


@triton.jit
def column_sums(x, count: tl.constexpr, unit: tl.constexpr, F: tl.constexpr):
    """The column sums of x [size, BM] divided by `unit`, repeated in `count` rows."""
    return tl.dot(tl.full((count, x.shape[0]), 1.0 / unit, tl.float32).to(F), x)


@triton.jit
def block(n, rows: tl.constexpr, N):
    """The blocks of `rows` rows that rows n are in; 0 is one block of all N rows."""
    if rows == 0:
        return n // N
    elif rows == 1:
        return n
    else:
        return n // rows


@triton.jit
def of_rows(plane, row, count, column, block: tl.constexpr, kind: tl.constexpr):
    """A field's value at a column in rows [16 * W, 1]; `block` columns share one, and a row has `count`."""
    return group_numbers.loaded(plane, row * count + column // block, kind)


@triton.jit
def store_tile(sum, bias, out, n, m, M, N):
    """Store the sums [rows of w, rows of x] from row n of w and m of x on."""
    n += tl.arange(0, sum.shape[0])[:, None]
    m += tl.arange(0, sum.shape[1])[None, :]
    if bias is not None:
        sum += tl.load(bias + n, n < N, 0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, sum, (n < N) & (m < M))


@triton.jit
def store_rows(sum, bias, out, m, n, M, N):
    """Store the sums [rows of x, rows of w] at rows m [rows of x, 1] of x and n [1, rows of w] of w."""
    if bias is not None:
        sum += tl.load(bias + n, n < N, 0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, sum, (m < M) & (n < N))


@triton.jit
def part_of_k(s, chunks, SPLIT: tl.constexpr):
    """The chunks of K for program s of SPLIT, as (first, end)."""
    if SPLIT == 1:
        return 0, chunks
    else:
        count = tl.cdiv(chunks, SPLIT)
        return s * count, tl.minimum(s * count + count, chunks)


@triton.jit
def store_part(sum, parts, at):
    """Store the sums [rows of w, rows of x] as tile `at` of a workspace."""
    i = tl.arange(0, sum.shape[0])[:, None] * sum.shape[1] + tl.arange(0, sum.shape[1])[None, :]
    tl.store(parts + at * (sum.shape[0] * sum.shape[1]) + i, sum)


@triton.jit
def is_last(arrivals, SPLIT: tl.constexpr):
    """Whether this program is the last of SPLIT to finish a tile, and so sees all stored parts.  Resets the counter to 0."""
    tl.debug_barrier()                                           # all threads must have stored before one counts
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT - 1:
        tl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
    return arrived == SPLIT - 1


@triton.jit
def sum_of_parts(parts, R: tl.constexpr, SPLIT: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """The sum of every R-th tile [rows, columns] of a workspace, in order; loads bypass L1, which may hold older data."""
    i = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    total = tl.load(parts + i, cache_modifier=".cg")
    for s in tl.static_range(1, SPLIT):
        total += tl.load(parts + s * (R * rows * columns) + i, cache_modifier=".cg")
    return total


@triton.jit
def tiles(R: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """R zero accumulators [rows, columns]."""
    acc = ()
    for _ in tl.static_range(R):
        acc = acc + (tl.zeros((rows, columns), tl.float32),)
    return acc


@triton.jit
def tile_of_x(x, M, K, rows: tl.constexpr, size: tl.constexpr, W: tl.constexpr, whole: tl.constexpr):
    """Pointers to a program's rows of x [M, K], and offsets of `size` columns of them, transposed [size, rows].

    A thread copies 8 elements of every 256 * W // size rows.  If whole, their offsets are one offset plus constants.  Else rows
    past M are clamped to the last one.
    """
    k = tl.arange(0, size)[:, None]
    m = tl.arange(0, rows)[None, :]
    if whole:
        run: tl.constexpr = 256 * W // size
        return x + tl.program_id(1).to(tl.int64) * (rows * K), m // run * (run * K) + m % run * K + k
    else:
        return x + (lanes.within(tl.program_id(1) * rows + m, M).to(tl.int64) * K + k), 0


@triton.jit
def rows_of_tile(first, W: tl.constexpr, N, whole: tl.constexpr):
    """Rows g and g + 8 of every warp's 16 rows, from row `first` on: [8 * W, 1] int64."""
    p = tl.arange(0, 8 * W)[:, None]
    n = p // 8 * 16 + p % 8
    if whole:
        n = n.to(tl.int64) + first
        return n, n + 8
    else:
        return lanes.rows(first + n, N)


@triton.jit
def tile_of_rows(first, W: tl.constexpr, N, whole: tl.constexpr):
    """16 * W rows from row `first` on: [16 * W, 1] int64."""
    n = tl.arange(0, 16 * W)[:, None]
    if whole:
        return first.to(tl.int64) + (n // 16 * 16 + n % 8).to(tl.int64) + (n // 8 % 2 * 8).to(tl.int64)
    else:
        return lanes.within(first + n, N).to(tl.int64)


@triton.jit
def parts(x, at, size: tl.constexpr):
    """The columns of a chunk, transposed [size, BM], split into groups of `size`."""
    groups = ()
    for u in tl.static_range(128 // size):
        groups = groups + (tl.load(x + u * size + at),)
    return groups
