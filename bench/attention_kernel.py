"""A paged decode attention kernel written by hand for one layout, as the reference for kernels derived from a spec.

Codes are int8 or E4M3, [blocks, heads, block, D], with a float32 scale per token and head, [blocks, heads, block].  The kernel is
what serving engines write: a program per sequence, key head and part of the sequence; the heads of a group share loaded keys; two
tl.dot; online softmax.  Scales multiply scores and probabilities, and E4M3 becomes float16.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def hand_written(
    q, k, k_scale, v, v_scale, tables, lengths, partial, weights, PAGES, HEADS, G,
    SCALE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
):
    """partial [B, HEADS * G, SPLITS, D] and logarithms of weights [B, HEADS * G, SPLITS] of q [B, HEADS * G, D]."""
    b, head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    h, d = tl.arange(0, BH), tl.arange(0, D)
    query = tl.load(q + ((b * HEADS + head) * G + h[:, None]) * D + d[None, :], h[:, None] < G, 0)
    scale = tl.full((BH, 1), SCALE, tl.float32)
    if k.dtype.element_ty != tl.int8:
        largest = tl.max(tl.abs(query.to(tl.float32)), 1)[:, None]
        unit = tl.where(largest > 0, largest, 1)
        query = (query.to(tl.float32) / unit).to(tl.float16)
        scale *= unit
    length = tl.load(lengths + b)
    per = tl.cdiv(tl.cdiv(length, BT), splits) * BT
    most, weight = tl.full((BH,), float("-inf"), tl.float32), tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    for start in range(split * per, tl.minimum(split * per + per, length), BT):
        page = tl.load(tables + b * PAGES + start // BLOCK).to(tl.int64)
        t = start + tl.arange(0, BT)
        row = (page * HEADS + head) * BLOCK + tl.minimum(t, length - 1) % BLOCK
        keys = tl.load(k + row[:, None] * D + d[None, :]).to(query.dtype)
        score = tl.dot(query, tl.trans(keys)) * scale * tl.load(k_scale + row)[None, :]
        score = tl.where((t < length)[None, :], score, float("-inf"))
        new = tl.maximum(most, tl.max(score, 1))
        shrink = tl.exp2(most - new)
        p = tl.exp2(score - new[:, None])
        weight, most = weight * shrink + tl.sum(p, 1), new
        values = tl.load(v + row[:, None] * D + d[None, :]).to(query.dtype)
        acc = tl.dot((p * tl.load(v_scale + row)[None, :]).to(query.dtype), values, acc * shrink[:, None])
    at = ((b * HEADS + head) * G + h) * splits + split
    tl.store(partial + at[:, None] * D + d[None, :], acc / tl.where(weight > 0, weight, 1)[:, None], h[:, None] < G)
    tl.store(weights + at, most + tl.log2(weight), h < G)


@triton.jit
def hand_written_latent(
    q, codes, scales, rope, tables, lengths, partial, weights, PAGES, G,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
):
    """The same of multi-head latent attention, whose values are the first 512 numbers of its keys: partial [B, G, SPLITS, 512].

    A row of 656 bytes has 512 E4M3 codes, 4 float32 scales and 64 rotary numbers in bfloat16.
    """
    b, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    h, d, e = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, 128), tl.arange(0, 64)
    row_of_q = q + (b * G + h[:, None]) * 576
    live = h[:, None] < G
    q_rope = tl.load(row_of_q + 512 + e[None, :], live, 0)
    largest = tl.max(tl.abs(q_rope.to(tl.float32)), 1)
    for i in tl.static_range(4):
        part = tl.load(row_of_q + 128 * i + d[None, :], live, 0)
        largest = tl.maximum(largest, tl.max(tl.abs(part.to(tl.float32)), 1))
    unit = tl.where(largest > 0, largest, 1)[:, None]
    q_rope = (q_rope.to(tl.float32) / unit).to(rope.dtype.element_ty)
    query, acc = (), ()
    for i in tl.static_range(4):
        part = tl.load(row_of_q + 128 * i + d[None, :], live, 0)
        query, acc = query + ((part.to(tl.float32) / unit).to(tl.float16),), acc + (tl.zeros((BH, 128), tl.float32),)
    length = tl.load(lengths + b)
    per = tl.cdiv(tl.cdiv(length, BT), splits) * BT
    most, weight = tl.full((BH,), float("-inf"), tl.float32), tl.zeros((BH,), tl.float32)
    for start in range(split * per, tl.minimum(split * per + per, length), BT):
        page = tl.load(tables + b * PAGES + start // BLOCK).to(tl.int64)
        t = start + tl.arange(0, BT)
        row = page * BLOCK + tl.minimum(t, length - 1) % BLOCK
        score = tl.dot(q_rope, tl.trans(tl.load(rope + row[:, None] * 328 + e[None, :])))
        latent, scale = (), ()
        for i in tl.static_range(4):
            latent = latent + (tl.load(codes + row[:, None] * 656 + 128 * i + d[None, :]).to(tl.float16),)
            scale = scale + (tl.load(scales + row * 164 + i)[None, :],)
            score += tl.dot(query[i], tl.trans(latent[i])) * scale[i]
        score = tl.where((t < length)[None, :], score * (unit * SCALE), float("-inf"))
        new = tl.maximum(most, tl.max(score, 1))
        shrink = tl.exp2(most - new)
        p = tl.exp2(score - new[:, None])
        weight, most = weight * shrink + tl.sum(p, 1), new
        sums = ()
        for i in tl.static_range(4):
            sums = sums + (tl.dot((p * scale[i]).to(tl.float16), latent[i], acc[i] * shrink[:, None]),)
        acc = sums
    at = (b * G + h) * splits + split
    for i in tl.static_range(4):
        tl.store(partial + at[:, None] * 512 + 128 * i + d[None, :], acc[i] / tl.where(weight > 0, weight, 1)[:, None], live)
    tl.store(weights + at, most + tl.log2(weight), h < G)
