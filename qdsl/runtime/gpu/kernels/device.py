"""Device functions that generated kernels share: bit patterns as numbers, fields that cross words, and the last step of a sum.

Every decoder is integer operations and one multiplication by a power of two, exact on every code (subnormals included), on
every GPU generation and in Triton's interpreter.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def rounded(value, type: tl.constexpr):
    """float32 values rounded to float16 or bfloat16, ties to even, as float32 again; unchanged for type float32."""
    if type == tl.bfloat16:                                      # by integers: Triton's interpreter truncates
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(type).to(tl.float32)


@triton.jit
def e4m3(code):
    """float32 of E4M3 codes (OCP): uint8, 0x7F and 0xFF are NaN."""
    code = code.to(tl.int32)
    value = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36        # 2^120
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def e5m2(code):
    """float32 of E5M2 codes (OCP): uint8, the upper half of a float16."""
    code = code.to(tl.int32)
    value = (((code & 127) << 21) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 5.192296858534828e33        # 2^112
    special = (((code & 127) << 21) | ((code & 128) << 24) | 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((code & 124) == 124, special, value)


@triton.jit
def e4m3fnuz(code):
    """float32 of E4M3FNUZ codes: uint8, 0x80 is NaN."""
    code = code.to(tl.int32)
    value = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 6.64613997892458e35         # 2^119
    return tl.where(code == 128, float("nan"), value)


@triton.jit
def e5m2fnuz(code):
    """float32 of E5M2FNUZ codes: uint8, 0x80 is NaN."""
    code = code.to(tl.int32)
    value = (((code & 127) << 21) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 2.596148429267414e33        # 2^111
    return tl.where(code == 128, float("nan"), value)


@triton.jit
def e3m2(code):
    """float32 of E3M2 codes: the low 6 bits."""
    code = code.to(tl.int32)
    return (((code & 31) << 21) | ((code & 32) << 26)).to(tl.float32, bitcast=True) * 2.1267647932558654e37          # 2^124


@triton.jit
def e2m3(code):
    """float32 of E2M3 codes: the low 6 bits."""
    code = code.to(tl.int32)
    return (((code & 31) << 20) | ((code & 32) << 26)).to(tl.float32, bitcast=True) * 8.507059173023462e37           # 2^126


@triton.jit
def e2m1(code):
    """float32 of E2M1 codes: the low 4 bits; code 8 is -0."""
    code = code.to(tl.int32)
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37             # 2^126


@triton.jit
def e8m0(code):
    """float32 of E8M0 codes: 2^(code - 127), 0 is the subnormal 2^-127, 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0h(code):
    """float32 of ggml's halves of E8M0: 2^(code - 128), 0 and 1 are subnormal, 255 is a number."""
    code = code.to(tl.int32)
    return tl.where(code < 2, 0x00200000 << code, (code - 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ue4m3(code):
    """float32 of ggml's unsigned E4M3: the magnitude of E4M3, bit 7 ignored, 0x7F is 0."""
    code = code.to(tl.int32)
    value = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36                                 # 2^120
    return tl.where(code == 127, 0.0, value)


@triton.jit
def scale(value):
    """float32 of a scale in a type that Triton has, or of E8M0 where it is uint8."""
    if value.dtype == tl.uint8:
        return e8m0(value)
    else:
        return value.to(tl.float32)


@triton.jit
def trit(byte, place):
    """The base-3 digit at a place, 0 to 4, of a byte, by the formula of runtime/weight/base3.py."""
    power = (1 + 2 * (place & 1)) * (1 + 4 * (place & 2)) * (1 + 20 * (place & 4))                  # 3^place
    return (byte.to(tl.int32) * power & 255) * 3 >> 8


@triton.jit
def bits(words, at: tl.constexpr, width: tl.constexpr):
    """`width` bits from bit `at` of a record in a tuple of 32-bit words, low bits first."""
    value = words[at // 32].to(tl.uint32, bitcast=True) >> (at % 32)
    if at % 32 + width > 32:
        value |= words[at // 32 + 1].to(tl.uint32, bitcast=True) << (32 - at % 32)
    return value & ((1 << width) - 1)


@triton.jit
def stream(words, step, at, width: tl.constexpr, word: tl.constexpr, live):
    """`width` bits, up to 32, from bit `at` of `word`-bit words `step` elements apart; loads only words with such bits."""
    shift = at % word
    value = (tl.load(words + at // word * step, live, 0).to(tl.int64) & ((1 << word) - 1)) >> shift
    for i in tl.static_range(1, (width + 2 * word - 2) // word):
        more = tl.load(words + (at // word + i) * step, live & (shift + width > i * word), 0)
        value |= (more.to(tl.int64) & ((1 << word) - 1)) << (i * word - shift)
    return (value & ((1 << width) - 1)).to(tl.int32)


@triton.jit
def store_sums(out, bias, n, N, sums):
    """out[n] = sums + bias[n], rounded once to the dtype of out."""
    if bias is not None:
        sums += tl.load(bias + n, n < N, 0).to(tl.float32)
    tl.store(out + n, sums, n < N)
