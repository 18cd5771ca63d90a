"""Small kernels that each measure one property of the device; their loops contain little else."""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def multiply(codes, factors, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out[m, n] = sum over k of numbers with the bits codes[m, k], times factors[k, n] of the same type."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(codes + m[:, None] * K + k[None, :]).to(factors.dtype.element_ty, bitcast=True)
    b = tl.load(factors + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def convert(out, trips, ASM: tl.constexpr, PER: tl.constexpr):
    """PER conversions of each of 1024 numbers per trip, of numbers that a multiply-add makes anew; ASM None: without them."""
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    value = i * 40503
    bits = i
    for _ in range(trips):
        for _ in tl.static_range(PER):
            value = value * 69069 + 1
            if ASM is not None:
                bits = bits ^ tl.inline_asm_elementwise(ASM, "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
            else:
                bits = bits ^ value
    tl.store(out + i, bits)


@triton.jit
def matrix(out, trips, COLUMNS: tl.constexpr):
    """Four independent chains of products [16, 64] x [64, 8] per warp and trip, operands as the lane kernels have them:
    codes of 4 bits, and pairs of ones in the first COLUMNS columns.
    """
    p = tl.arange(0, 32)[:, None]
    word = (p * 16 + tl.arange(0, 16)[None, :] + tl.program_id(0)) * 40503
    words = tl.join(word, word * 69069)
    a = lanes.half_operand(lanes.halves(words & 0x000F000F, tl.float16), lanes.halves((words >> 8) & 0x000F000F, tl.float16))
    x = tl.where((p % 8 < COLUMNS) & (tl.arange(0, 4)[None, :] >= 0), 0x3C003C00, 0)
    b = lanes.columns(x, x, x, x, x, x, x, x, tl.float16)
    s0 = tl.zeros((4, 16, 8), tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    for _ in range(trips):
        s0 = tl.dot(a, b, s0)
        s1 = tl.dot(a, b, s1)
        s2 = tl.dot(a, b, s2)
        s3 = tl.dot(a, b, s3)
    w, row, column = tl.arange(0, 4)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    tl.store(out + tl.program_id(0) * 512 + w * 128 + row * 8 + column, s0 + s1 + s2 + s3)


@triton.jit
def read(data, out, chunks, W: tl.constexpr, TILED: tl.constexpr):
    """The exclusive or of a tile of 16 rows of `chunks` pieces of 16 words, W warps sharing the pieces.

    TILED: the pieces of 16 rows lie together, 1 KB; else rows lie one after the other, so that a warp's load meets 8 of them.
    """
    p = tl.arange(0, 8 * W)[:, None]
    warp, g, column = p // 8, p % 8, tl.arange(0, 16)[None, :]
    tile = tl.program_id(0).to(tl.int64)
    bits = tl.zeros((8 * W, 16), tl.int32)
    for start in range(0, chunks, 2 * W):
        for i in tl.static_range(2):
            chunk = start + 2 * warp + i
            if TILED:
                upper = (tile * chunks + chunk) * 256 + g * 16 + column
                lower = upper + 128
            else:
                upper = (tile * 16 + g) * (chunks * 16) + chunk * 16 + column
                lower = upper + 8 * (chunks * 16)
            bits ^= tl.load(data + upper) ^ tl.load(data + lower)
    tl.store(out + tile, tl.sum(tl.sum(bits, 1), 0))
