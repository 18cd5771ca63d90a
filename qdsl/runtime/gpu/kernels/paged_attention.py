"""paged_attention: one query token per sequence against keys and values that a paged cache holds packed.

A program takes up to BH of the G query heads that share a key head, and one of SPLITS parts of a sequence, BT tokens at a time.

         queries             keys, packed              scores          values, packed            sums, float32

           D channels          D channels              BT tokens         D channels               D channels
         +-----------+      +-----------+             +---------+      +-----------+            +-----------+
    G    | q         |   t  | k of t    |         G   | q k^T   |   t  | v of t    |       G    | p v       |
  heads  |           |  t+1 | k of t+1  |   ->  heads | -> p    |  t+1 | v of t+1  |  ->  heads |           |
         +-----------+      |           |             +---------+      |           |            +-----------+
                            +-----------+             max and sum      +-----------+
                            row of token t:           of a head
                            (table[t // BLOCK] * heads + head) * BLOCK + t % BLOCK

A page holds the tokens of one head contiguously, so that the codes of a tile of one page are one range of memory, and so are
its scales.  Tokens may share a scale.

Both products are MMAs.  Heads are padded to their 16 rows, and meet all tokens of a tile at once.
A format completes the kernel in one of two ways:

- Byte codes in row order, with scales of rows or of PARTS parts of a row (int8, fp8): codes are the operand.  `finish` computes
  a part's scores from its numbers, the sum of codes times q, and the sum of q.  It is linear in both sums.  For values its factor
  multiplies p, and its offset per token is added to all channels.  E4M3 becomes float16, at half an instruction per code;
  bfloat16 would take two.  q of a head is then divided by a power of 2, so that float16 holds it.
- Any other storage: `decode` gives the columns of a unit part by part, [tokens, units] in float32.  A part is rounded to the
  dtype of q and multiplied by its columns of q.  Sums of values are kept by part; a last call of `decode` gives their columns.

If values are the first columns of keys, they are loaded and converted once for both.  Plain numbers behind the columns are
rounded to the dtype of q and add to scores only.

Softmax is online, in powers of 2, in float32; p is rounded to the dtype of q.  With keys in groups of tokens the last, open
group of a sequence is in `tail`, as numbers: the first split takes it.

Every split stores its normalised sums and the logarithm of its weight; `combine` adds the splits by these weights.

Cost: a byte is loaded once.  Most instructions per byte convert it and move it through shared memory into the MMA's layout.
"""

from qdsl.runtime.gpu.kernels import group_numbers
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def row_number(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A number per row of `at`: one for all rows if `rows` is 0, else one per `rows` rows."""
    if rows == 0:
        return group_numbers.number(tl.load(plane), kind)
    elif rows == 1:
        return group_numbers.number(tl.load(plane + at), kind)
    else:
        return group_numbers.number(tl.load(plane + at // rows), kind)


@triton.jit
def scaled(fields, sums, total, k):
    """The share of a part whose only number is a scale."""
    return sums * fields[0]


@triton.jit
def operand(codes, F: tl.constexpr):
    """Codes as numbers, exactly: int8 of type F; E4M3 of float16, by the GPU's conversion or, from uint8, by shifts."""
    if codes.dtype == tl.int8:
        return codes.to(F)
    elif codes.dtype == tl.uint8:
        code = codes.to(tl.int16)
        value = (((code & 127) << 7) | ((code & 128) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 127) == 127, float("nan"), value)
    else:
        return codes.to(tl.float16)


@triton.jit
def query(q, codes: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, APPENDED: tl.constexpr):
    """q as operands: a tuple of its parts, the operand for appended numbers, and the factor of scores, [heads, 1].

    codes: the dtype of codes.  E4M3 codes become float16, so q is divided by a power of 2 to fit float16.
    """
    W: tl.constexpr = D // PARTS
    F: tl.constexpr = q.dtype.element_ty
    parts, behind = (), ()
    unit, inverse = tl.full((q.shape[0], 1), 1.0, tl.float32), tl.full((q.shape[0], 1), 1.0, tl.float32)
    if codes is not None and codes != tl.int8:
        most = tl.zeros((q.shape[0],), tl.float32)
        for i in tl.static_range(PARTS):
            most = tl.maximum(most, tl.max(tl.abs(tl.load(q + (i * W + tl.arange(0, W))[None, :]).to(tl.float32)), 1))
        for i in tl.static_range(len(APPENDED)):
            numbers = tl.load(q + (APPENDED[i][0] + tl.arange(0, APPENDED[i][1]))[None, :])
            most = tl.maximum(most, tl.max(tl.abs(numbers.to(tl.float32)), 1))
        unit, inverse = power_of_two(most[:, None])
    for i in tl.static_range(PARTS if codes is not None else 0):
        part = tl.load(q + (i * W + tl.arange(0, W))[None, :])
        parts = parts + (part if codes == tl.int8 else (part.to(tl.float32) * inverse).to(tl.float16),)
    for i in tl.static_range(len(APPENDED)):
        numbers = tl.load(q + (APPENDED[i][0] + tl.arange(0, APPENDED[i][1]))[None, :])
        behind = behind + ((numbers.to(tl.float32) * inverse).to(F),)
    return parts, behind, unit


@triton.jit
def power_of_two(value):
    """The power of 2 at or below a positive float32, at most 2^126 and 1 where it has none, and its inverse."""
    bits = tl.minimum(value.to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
    bits = tl.where(bits > 0, bits, 127 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def add_scores(state, k, w, live, row: tl.constexpr = 0):
    """Add q[k] times keys w [tokens, units] to the scores; state: (column 0 of q [heads, 1], scores [heads, tokens], keys)."""
    q, sums, parts = state
    w = w.to(q.dtype.element_ty)
    return q, tl.dot(tl.load(q + k), tl.trans(w), sums), parts + (w,)


@triton.jit
def add_values(state, k, w, live, row: tl.constexpr = 0):
    """Add p times values w [tokens, units] to the sums of the next part; state: (p, sums to do, sums done)."""
    p, sums, new = state
    return p, sums, new + (tl.dot(p, w.to(p.dtype), sums[len(new)]),)


@triton.jit
def store_part(state, k, w, live, row: tl.constexpr = 0):
    """Store the sums of the next part in its columns; state: (column 0 of out, columns, head mask, sums, columns done)."""
    out, columns, heads, sums, done = state
    tl.store(out + k, sums[len(done)], heads & (k < columns))
    return out, columns, heads, sums, done + (k,)


@triton.jit
def load_codes(tensors, n, i: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr):
    """Part i of rows n as an operand, [tokens, W]."""
    return operand(tl.load(tensors[CODES] + (n[:, None] * ROW + (i * W + tl.arange(0, W))[None, :])), F)


@triton.jit
def scores(
    tensors, behind, q, tile, tile_behind, total, n, N, D: tl.constexpr, sizes,
    decode: tl.constexpr, finish: tl.constexpr, CODES: tl.constexpr, FIELDS: tl.constexpr, ADDS: tl.constexpr,
    UNITS: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr, APPENDED: tl.constexpr,
):
    """q times the keys in rows n [heads, tokens], and the keys' parts as operands; codes come with the numbers of rows.

    q: pointers to column 0, [heads, 1].  tile, tile_behind: q as operands.  total: its sums, [heads, 1].
    """
    H: tl.constexpr = q.shape[0]
    T: tl.constexpr = n.shape[0]
    F: tl.constexpr = q.dtype.element_ty
    if decode is None:
        parts = ()
        for i in tl.static_range(PARTS):
            codes = load_codes(tensors, n, i, F, CODES, D // PARTS, ROW)
            fields = group_numbers.values(tensors, FIELDS, n[None, :] * STEP + i, row_number)
            part = tl.dot(tile[i], tl.trans(codes))
            if finish is not None:
                part = finish(fields, part, total if ADDS else 0.0, 0)
            if i == 0:
                sums = part
            else:
                sums += part
            parts = parts + ((codes, fields),)
    else:
        live = tl.full((1, 1), 1, tl.int1)
        u = tl.arange(0, UNITS)[None, :]
        _, sums, parts = decode(tensors, n[:, None], u, live, N, D, sizes, add_scores, (q, tl.zeros((H, T), tl.float32), ()))
    for i in tl.static_range(len(APPENDED)):
        numbers = tl.load(behind[i] + (n[:, None] * APPENDED[i][2] + tl.arange(0, APPENDED[i][1])[None, :]))
        sums = tl.dot(tile_behind[i], tl.trans(numbers.to(F)), sums)
    return sums, parts


@triton.jit
def add_tile(
    tensors, parts, p, sums, unit, shrink, n, N, D: tl.constexpr, sizes, F: tl.constexpr,
    decode: tl.constexpr, finish: tl.constexpr, CODES: tl.constexpr, FIELDS: tl.constexpr, ADDS: tl.constexpr,
    UNITS: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr,
):
    """sums * shrink + p times the values in rows n: a tuple of [heads, columns of a part].  p: float32 [heads, tokens].

    parts: the operands from `scores` if values are part of keys, else ().  unit: of the sums; the new unit is the second result.
    """
    if decode is None:
        numbers = ()
        for i in tl.static_range(PARTS):
            numbers = numbers + (parts[i][1] if len(parts) > 0 else
                                 group_numbers.values(tensors, FIELDS, n[None, :] * STEP + i, row_number),)
        factors, more, new_unit = factors_of(numbers, unit, F, tensors[CODES].dtype.element_ty, finish)
        shrink = (shrink * (unit / new_unit))[:, None]
        new = ()
        for i in tl.static_range(PARTS):
            total = sums[i] * shrink
            if ADDS:                                             # an offset per token
                total += tl.sum(p * more[i], 1)[:, None]
            v = parts[i][0] if len(parts) > 0 else load_codes(tensors, n, i, F, CODES, D // PARTS, ROW)
            new = new + (tl.dot((p * factors[i]).to(v.dtype), v, total),)
        return new, new_unit
    elif len(parts) > 0:
        new = ()
        for i in tl.static_range(len(parts)):
            new = new + (tl.dot(p.to(F), parts[i], sums[i] * shrink[:, None]),)
        return new, unit
    else:
        live = tl.full((1, 1), 1, tl.int1)
        u = tl.arange(0, UNITS)[None, :]
        return decode(tensors, n[:, None], u, live, N, D, sizes, add_values, (p.to(F), shrunk(sums, shrink), ()))[2], unit


@triton.jit
def factors_of(numbers, unit, F: tl.constexpr, codes: tl.constexpr, finish: tl.constexpr):
    """The factor of p and the offset per token, [1, tokens] of every part, and the unit that both are divided by.

    float16 loses precision of p times a small factor.  So the unit is the largest power of 2 of a factor until now; it may be too
    large for tokens whose factors are below 2^-14 of it.
    """
    one, zero = tl.full((1, 1), 1.0, tl.float32), tl.zeros((1, 1), tl.float32)
    factors, more, inverse = (), (), 1.0
    for i in tl.static_range(len(numbers)):
        factors = factors + (one if finish is None else finish(numbers[i], one, zero, 0),)
        more = more + (zero if finish is None else finish(numbers[i], zero, one, 0),)
    if finish is None:
        return factors, more, unit
    elif codes == tl.int8 and F == tl.bfloat16:
        return factors, more, tl.full((1,), 1.0, tl.float32)
    else:
        largest = tl.abs(factors[0])
        for i in tl.static_range(1, len(numbers)):
            largest = tl.maximum(largest, tl.abs(factors[i]))
        unit, inverse = power_of_two(tl.maximum(tl.max(largest, 1), unit))
        scaled_factors, scaled_more = (), ()
        for i in tl.static_range(len(numbers)):
            scaled_factors, scaled_more = scaled_factors + (factors[i] * inverse,), scaled_more + (more[i] * inverse,)
        return scaled_factors, scaled_more, unit


@triton.jit
def softmax(score, live, most, weight):
    """p of a tile, the new maxima and weights of heads, and the factor by which old sums shrink; scores are in powers of 2."""
    score = tl.where(live, score, float("-inf"))
    new = tl.maximum(most, tl.max(score, 1))
    shrink = tl.exp2(most - new)
    p = tl.exp2(score - new[:, None])
    return p, new, weight * shrink + tl.sum(p, 1), shrink


@triton.jit
def shrunk(sums, factor):
    """All parts of the sums, multiplied by a factor per head."""
    new = ()
    for i in tl.static_range(len(sums)):
        new = new + (sums[i] * factor[:, None],)
    return new


@triton.jit
def rows_of(tables, t, head, HEADS, BLOCK: tl.constexpr, BT: tl.constexpr):
    """The rows of tokens t of a head, int64; t begins at a multiple of BT."""
    if BLOCK % BT == 0:                                          # one page holds all tokens of the tile
        page = tl.load(tables + tl.min(t, 0) // BLOCK).to(tl.int64)
    else:
        page = tl.load(tables + t // BLOCK).to(tl.int64)
    return (page * HEADS + head) * BLOCK + t % BLOCK


@triton.jit
def paged_attention(
    q, keys, values, behind, tables, lengths, tail, sequences, partial, weights, N, PAGES, HEADS, G, key_sizes, value_sizes,
    key_decode: tl.constexpr, key_finish: tl.constexpr, KEY_CODES: tl.constexpr, KEY_FIELDS: tl.constexpr,
    KEY_ADDS: tl.constexpr, KEY_UNITS: tl.constexpr, KEY_PARTS: tl.constexpr, KEY_ROW: tl.constexpr, KEY_STEP: tl.constexpr,
    value_decode: tl.constexpr, value_finish: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_FIELDS: tl.constexpr,
    VALUE_ADDS: tl.constexpr, VALUE_UNITS: tl.constexpr, VALUE_PARTS: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, X: tl.constexpr, V: tl.constexpr, APPENDED: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
):
    """partial [B, HEADS * G, SPLITS, V] and base-2 log weights [B, HEADS * G, SPLITS] of queries q [B, HEADS * G, X].

    keys, values: tensors of N rows of D columns.  SHARED: values are the first V columns of keys.  behind, APPENDED: plain
    numbers behind the columns of keys; for each the first column in q, the count, and the row stride.  tables: int32 [B, PAGES],
    the blocks of a sequence; lengths: int32 [B].  tail: [S, HEADS, GROUP, D], the open groups of S sequences, if GROUP tokens
    share numbers of keys; else GROUP is 1.  sequences: int32 [B], the sequence of S that a query belongs to.  SCALE: of scores,
    times log2(e).
    """
    b, split, SPLITS = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    head, first = tl.program_id(1) // tl.cdiv(G, BH), tl.program_id(1) % tl.cdiv(G, BH) * BH
    F: tl.constexpr = q.dtype.element_ty
    g = first + tl.arange(0, BH)[:, None]
    q += ((b * HEADS + head) * G + tl.minimum(g, G - 1)).to(tl.int64) * X
    codes: tl.constexpr = keys[KEY_CODES].dtype.element_ty if key_decode is None else None
    tile, tile_behind, unit = query(q, codes, D, KEY_PARTS, APPENDED)
    total = tl.sum(tile[0].to(tl.float32), 1)[:, None] if KEY_ADDS else 0.0
    length = tl.load(lengths + b)
    full = length // GROUP * GROUP
    per = tl.cdiv(tl.cdiv(full, BT), SPLITS) * BT
    tables += b.to(tl.int64) * PAGES
    most, weight = tl.full((BH,), float("-inf"), tl.float32), tl.zeros((BH,), tl.float32)
    scaled_sums: tl.constexpr = value_decode is None and value_finish is not None
    sums, unit_of_sums = (), tl.full((1,), 2.0 ** -126 if scaled_sums else 1.0, tl.float32)
    for _ in tl.static_range(VALUE_PARTS):
        sums = sums + (tl.zeros((BH, D // VALUE_PARTS), tl.float32),)
    for start in range(split * per, tl.minimum(split * per + per, full), BT):
        t = start + tl.arange(0, BT)
        n = rows_of(tables, tl.minimum(t, full - 1), head, HEADS, BLOCK, BT)   # past the end the last token, whose p is 0
        score, parts = scores(keys, behind, q, tile, tile_behind, total, n, N, D, key_sizes, key_decode, key_finish, KEY_CODES,
                              KEY_FIELDS, KEY_ADDS, KEY_UNITS, KEY_PARTS, KEY_ROW, KEY_STEP, APPENDED)
        p, most, weight, shrink = softmax(score * (unit * SCALE), (t < full)[None, :], most, weight)
        sums, unit_of_sums = add_tile(values, parts if SHARED else (), p, sums, unit_of_sums, shrink, n, N, D, value_sizes, F,
                                      value_decode, value_finish, VALUE_CODES, VALUE_FIELDS, VALUE_ADDS, VALUE_UNITS,
                                      VALUE_PARTS, VALUE_ROW, VALUE_STEP)
    if GROUP > 1:
        tail += (tl.load(sequences + b).to(tl.int64) * HEADS + head) * (GROUP * D)
        whole = tl.load(q + tl.arange(0, D)[None, :])
        for start in range(full, tl.where(split == 0, length, full), GROUP):
            t = start + tl.arange(0, GROUP)
            n = rows_of(tables, tl.minimum(t, length - 1), head, HEADS, BLOCK, GROUP)
            k = tl.load(tail + (tl.arange(0, GROUP)[:, None] * D + tl.arange(0, D)[None, :]), (t < length)[:, None], 0)
            p, most, weight, shrink = softmax(tl.dot(whole, tl.trans(k.to(F))) * SCALE, (t < length)[None, :], most, weight)
            sums, unit_of_sums = add_tile(values, (), p, sums, unit_of_sums, shrink, n, N, D, value_sizes, F, value_decode,
                                          value_finish, VALUE_CODES, VALUE_FIELDS, VALUE_ADDS, VALUE_UNITS, VALUE_PARTS,
                                          VALUE_ROW, VALUE_STEP)
    at = ((b * HEADS + head) * G + g).to(tl.int64) * SPLITS + split
    sums = shrunk(sums, 1 / tl.where(weight > 0, weight, 1))
    if value_decode is None:
        W: tl.constexpr = D // VALUE_PARTS
        for i in tl.static_range(VALUE_PARTS):
            columns = i * W + tl.arange(0, W)[None, :]
            tl.store(partial + (at * V + columns), sums[i] * unit_of_sums, (g < G) & (columns < V))
    else:                                                        # only for the columns: nothing of row 0 is loaded
        u = tl.arange(0, VALUE_UNITS)[None, :]
        value_decode(values, tl.zeros((1, 1), tl.int64), u, tl.full((1, 1), 1, tl.int1), N, D, value_sizes, store_part,
                     (partial + at * V, V, g < G, sums, ()))
    tl.store(weights + at, (most + tl.log2(weight))[:, None], g < G)


@triton.jit
def combine(partial, weights, out, SPLITS, D: tl.constexpr, BS: tl.constexpr):
    """out [M, D] from partial [M, SPLITS, D] and its base-2 log weights [M, SPLITS]; 0 for no tokens."""
    m = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, BS)[:, None], tl.arange(0, D)[None, :]
    weight = tl.load(weights + m * SPLITS + split, split < SPLITS, float("-inf"))
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0)[None, :], -3e38))
    part = tl.load(partial + (m * SPLITS + split) * D + d, split < SPLITS, 0)
    total = tl.sum(weight, 0)
    tl.store(out + m * D + tl.arange(0, D), tl.sum(part * weight, 0) / tl.where(total > 0, total, 1))
