"""Device functions for products of 8-bit codes, and the kernel that quantizes x to 8 bits (weight/eight.py is its reference).

A program of `quantize` takes BR groups of L columns of x, BK columns in a step, twice.

               x: groups of L columns                     codes                       scales, sums [K / L, M]

              BK      BK                                  BK      BK
            +-------+-------+- -                        +-------+-------+- -         +---+
    group r |       |       |    -> largest -> scale    | bytes |       |            | r |  one number per group
            +-------+-------+- -    of the group        +-------+-------+- -         +---+
    r + 1   |       |       |                           |       |       |
            +-------+-------+- -                        +-------+-------+- -

The first pass finds the largest magnitude, as an integer: bits of floats order as they do, and NaN stands above infinity.  The
second pass multiplies by the inverse and rounds.  x comes from the L1 or L2 cache by then.

- Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.  A conversion would run at a quarter of
  the rate.  E4M3 is rounded the same way, below its normal numbers, and by an integer addition above.
- Matrix units multiply E4M3 and int8.  On GPUs without E4M3 units its values become float16, exactly.

Cost: x is loaded twice and its codes are stored once; a separate launch, which `w8a8` waits for.
"""


from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def quantize(x, codes, scales, sums, M, K, L, LARGEST: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """codes [M, K], scales [K / L, M] and, if wanted, sums of codes [K / L, M] of x [M, K] in groups of L columns.

    A program takes BR groups.  codes: int8, uint8 that are E4M3, or float16 with the values of E4M3.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    live = r < M * (K // L)
    at = r.to(tl.int64) * L
    most = tl.zeros((BR, BK), tl.int32)                          # as integers, NaN is above infinity, which is above the rest
    for start in range(0, L, BK):
        k = start + tl.arange(0, BK)[None, :]
        v = tl.load(x + (at + k), live & (k < L), 0).to(tl.float32)
        most = tl.maximum(most, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    finite, scale, inverse = scale_of(tl.max(most, 1)[:, None], LARGEST)
    place = r % (K // L) * M + r // (K // L)
    tl.store(scales + place, scale, live)
    total = tl.zeros((BR, BK), tl.int32)
    for start in range(0, L, BK):
        k = start + tl.arange(0, BK)[None, :]
        v = tl.load(x + (at + k), live & (k < L), 0).to(tl.float32)
        v = tl.where(finite, v * inverse, 0)
        if codes.dtype.element_ty == tl.int8:
            code = (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000              # 1.5 * 2^23: rounds to integers
            total += code
            tl.store(codes + (at + k), code.to(tl.int8), live & (k < L))
        elif codes.dtype.element_ty == tl.uint8:
            tl.store(codes + (at + k), e4m3_code(v).to(tl.uint8), live & (k < L))
        else:
            tl.store(codes + (at + k), device.e4m3(e4m3_code(v)).to(tl.float16), live & (k < L))
    if sums is not None:
        tl.store(sums + place, tl.sum(total, 1)[:, None].to(tl.float32), live)


@triton.jit
def scale_of(top, LARGEST: tl.constexpr):
    """From the bits of groups' largest magnitudes: whether they are finite, the scales, and the factors for x."""
    top = top.to(tl.float32, bitcast=True)
    finite = top < float("inf")
    scale = tl.where(finite, tl.maximum(tl.math.div_rn(top, LARGEST), 1.1754943508222875e-38), float("nan"))
    return finite, scale, tl.math.div_rn(1.0, scale)


@triton.jit
def quantized(x, LARGEST: tl.constexpr, to: tl.constexpr):
    """Codes of type `to` and scales [1, BM] of x [128, BM] with a group per column, equal to those of quantize()."""
    v = x.to(tl.float32)
    finite, scale, inverse = scale_of(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)[None, :], LARGEST)
    v = tl.where(finite, v * inverse, 0)
    if to == tl.int8:
        return ((v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8), scale
    else:
        return to_e4m3(v, to), scale


@triton.jit
def to_e4m3(value, to: tl.constexpr):
    """E4M3 codes nearest to float32 values of at most 448, by the two-number conversion of GPUs from sm_89 on."""
    return value.to(to)


@triton.jit
def plain_e4m3(value, to: tl.constexpr):
    """The same by integers, for the interpreter, whose conversion does not round to even."""
    return e4m3_code(value).to(tl.uint8).to(to, bitcast=True)


@triton.jit
def e4m3_code(value):
    """E4M3 codes, in int32, nearest to float32 values, ties to even, clamped to 448."""
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000                     # 2^14: rounds to multiples of 2^-9
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    return tl.where(size < 0.015625, small, large) | ((value.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def halves(code):
    """uint8 E4M3 codes as float16, times 2^-8; exact, except for NaN."""
    code = code.to(tl.int16)
    return (((code & 127) << 7) | ((code & 128) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def product(w, x):
    """w [BN, 128] @ x [128, BM] in float32: both int8, both E4M3, or w uint8 E4M3 codes and x float16."""
    if w.dtype == tl.int8:
        return tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
    elif w.dtype == tl.uint8:
        return tl.dot(halves(w), x) * 256.0
    else:
        return tl.dot(w, x)


@triton.jit
def added(acc, w, x):
    """acc + w @ x: int8 in int32, which is exact; the others in float32, 128 columns at a time.

    Hopper's E4M3 MMAs sum in fewer bits than float32, so that no sum of theirs may be longer.
    """
    if w.dtype == tl.int8:
        return tl.dot(w, x, acc, out_dtype=tl.int32)
    else:
        return acc + product(w, x)


@triton.jit
def zeros(BN: tl.constexpr, BM: tl.constexpr, exact: tl.constexpr):
    """A zero accumulator for `added`."""
    return tl.zeros((BN, BM), tl.int32 if exact else tl.float32)


@triton.jit
def block(n, m, rows: tl.constexpr, BN: tl.constexpr):
    """The blocks of `rows` rows that rows n [BN, 1] are in; 0 is one block of all rows.

    If all n are in one block, it is returned for each of m [1, BM], or as one number if m is None: per-n values would cost a
    multiplication each.
    """
    if rows == 1:
        return n
    elif rows % BN == 0:                                         # also rows == 0
        block = tl.program_id(0) * BN // rows if rows > 0 else 0
        return block if m is None else tl.zeros_like(m) + block
    else:
        return n // rows
