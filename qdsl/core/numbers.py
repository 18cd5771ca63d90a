"""Number types: every scalar type of a field, with its properties and exact decoders.

Floats of 8 bits and less are sign, exponent and mantissa of the stated widths; `specials` says which patterns are not
finite: 'ieee' (top exponent: infinities and NaN), 'nan' (all ones: NaN), 'fnuz' (only the pattern of -0: NaN) or 'none'.
e8m0 and e8m0h are powers of two, ue4m3 is ggml's unsigned E4M3.  Standard library only; torch and Triton forms of the same
decoders are in qdsl/runtime/weight/numbers.py and are tested against these on every code.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar type: `kind` is 'unsigned', 'signed' or 'float'; all below it is of floats.

    torch: the name of torch's dtype; '' where torch has none.
    """

    name: str
    bits: int
    kind: str
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    specials: str = "none"
    signed: bool = True
    source: str = ""
    torch: str = ""

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def low(self) -> int:
        """The smallest value of an integer type."""
        return -(1 << self.bits - 1) if self.kind == "signed" else 0

    @property
    def high(self) -> int:
        """The largest value of an integer type."""
        return (1 << self.bits - (self.kind == "signed")) - 1

    @property
    def largest(self) -> float:
        return self.decode(_largest_code(self)) if self.is_float else self.high

    def decode(self, code: int) -> float:
        """The value of a code, exactly.  Integer types return int."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} has {self.bits} bits, {code} does not fit")
        if self.kind == "signed":
            return code - (code >> self.bits - 1 << self.bits)
        if self.kind == "unsigned":
            return code
        if self.name == "e8m0":
            return math.nan if code == 255 else math.ldexp(1.0, code - 127)
        if self.name == "e8m0h":
            return math.ldexp(1.0, code - 128)
        if self.name == "ue4m3":
            return 0.0 if code == 0x7F else _small_float(code & 0x7F, 4, 3, 7)
        return self._decode_float(code)

    def _decode_float(self, code: int) -> float:
        magnitude = code & (1 << self.exponent + self.mantissa) - 1
        sign = -1.0 if code >> self.exponent + self.mantissa else 1.0
        top = magnitude >> self.mantissa == (1 << self.exponent) - 1
        if self.specials == "ieee" and top:
            return math.nan if magnitude & (1 << self.mantissa) - 1 else sign * math.inf
        if self.specials == "nan" and magnitude == (1 << self.exponent + self.mantissa) - 1:
            return math.nan
        if self.specials == "fnuz" and magnitude == 0 and sign < 0:
            return math.nan
        return sign * _small_float(magnitude, self.exponent, self.mantissa, self.bias)

    def encode(self, value: float) -> int:
        """The code nearest to a finite value, ties to even codes, values past the largest cut to it.

        -0.0 keeps its sign where the type has one, and a type without signs gives negative values its smallest code; the
        powers of two take ties upward, as torch does.
        Raises ValueError for NaN and infinities.
        """
        if not math.isfinite(value):
            raise ValueError(f"{value} has no code in {self.name}")
        if not self.is_float:
            return int(min(max(round(value), self.low), self.high)) & (1 << self.bits) - 1
        if self.mantissa == 0:
            fraction, power = math.frexp(value)                # value = fraction * 2^power, 0.5 <= fraction < 1
            code = power - (fraction < 0.75) + self.bias
            return min(max(code, 0), 254 + (self.specials == "none")) if value > 0 else 0
        magnitude = _nearest_code(abs(value) if self.signed else max(value, 0.0), self)
        if self.signed and math.copysign(1.0, value) < 0 and not (self.specials == "fnuz" and magnitude == 0):
            magnitude |= 1 << self.exponent + self.mantissa
        return magnitude


def _small_float(magnitude: int, exponent: int, mantissa: int, bias: int) -> float:
    """IEEE-like value of exponent and mantissa bits, subnormals included."""
    power, fraction = magnitude >> mantissa, magnitude & (1 << mantissa) - 1
    if power == 0:
        return math.ldexp(fraction, 1 - bias - mantissa)
    return math.ldexp(fraction + (1 << mantissa), power - bias - mantissa)


def _nearest_code(value: float, number: Number) -> int:
    """The magnitude code nearest to value >= 0, by exact arithmetic."""
    if value == 0:
        return 0
    power = max(math.frexp(value)[1] - 1, 1 - number.bias)
    steps = Fraction(value) / Fraction(2) ** (power - number.mantissa)
    whole = round(steps)                                       # Fraction rounds half to even, and a step is a code
    code = whole + ((power + number.bias - 1) << number.mantissa)
    return min(code, _largest_code(number))


def _largest_code(number: Number) -> int:
    codes = (1 << number.exponent + number.mantissa) - 1
    if number.specials == "ieee":
        return codes - (1 << number.mantissa)
    return codes - 1 if number.specials == "nan" or number.name == "ue4m3" else codes


def _floats() -> dict[str, Number]:
    rows = [
        ("f32", 8, 23, 127, "ieee", "IEEE 754 binary32", "float32"),
        ("f16", 5, 10, 15, "ieee", "IEEE 754 binary16", "float16"),
        ("bf16", 8, 7, 127, "ieee", "the upper half of binary32", "bfloat16"),
        ("e4m3", 4, 3, 7, "nan", "OCP 8-bit floating point, E4M3 (torch.float8_e4m3fn)", "float8_e4m3fn"),
        ("e5m2", 5, 2, 15, "ieee", "OCP 8-bit floating point, E5M2 (torch.float8_e5m2)", "float8_e5m2"),
        ("e4m3fnuz", 4, 3, 8, "fnuz", "E4M3 of AMD CDNA3 (torch.float8_e4m3fnuz)", "float8_e4m3fnuz"),
        ("e5m2fnuz", 5, 2, 16, "fnuz", "E5M2 of AMD CDNA3 (torch.float8_e5m2fnuz)", "float8_e5m2fnuz"),
        ("e3m2", 3, 2, 3, "none", "OCP Microscaling, FP6 E3M2", ""),
        ("e2m3", 2, 3, 1, "none", "OCP Microscaling, FP6 E2M3", ""),
        ("e2m1", 2, 1, 1, "none", "OCP Microscaling, FP4 E2M1", ""),
    ]
    floats = {name: Number(name, 1 + e + m, "float", e, m, bias, specials, True, source, torch)
             for name, e, m, bias, specials, source, torch in rows}
    floats["e8m0"] = Number("e8m0", 8, "float", 8, 0, 127, "nan", False, "OCP Microscaling, E8M0: 2^(code - 127), 255 is NaN",
                            "float8_e8m0fnu")
    floats["e8m0h"] = Number("e8m0h", 8, "float", 8, 0, 128, "none", False, "ggml MXFP4 scales: half of E8M0, 2^(code - 128)")
    floats["ue4m3"] = Number("ue4m3", 8, "float", 4, 3, 7, "none", False,
                            "ggml NVFP4 scales: the magnitude of E4M3, bit 7 ignored, 0x7F is 0")
    return floats


FLOATS = _floats()
TORCH_FLOATS = {name: number.torch for name, number in FLOATS.items() if number.torch}
_INTEGER = re.compile(r"([ui])([1-9][0-9]?)\Z")


def find_number(name: str) -> Number | None:
    """The type with this name: a float of FLOATS, u1 to u16, i2 to i32, or u32 for stored words; None if unknown."""
    match = _INTEGER.match(name)
    if not match:
        return FLOATS.get(name)
    bits = int(match[2])
    if match[1] == "u":
        return Number(name, bits, "unsigned", signed=False) if bits in (*range(17), 32) else None
    return Number(name, bits, "signed") if 2 <= bits <= 32 else None


def number(name: str) -> Number:
    """The type with this name.  Raises KeyError if there is none."""
    if (kind := find_number(name)) is None:
        raise KeyError(name)
    return kind


# What people call the types in other places: torch, numpy, C and papers.
_ALIASES = {"float": "f32", "single": "f32", "double": "f32", "half": "f16", "bool": "u1", "byte": "u8", "char": "i8",
            "ubyte": "u8", "nibble": "u4", "bfloat": "bf16", "float64": "f32", "f64": "f32", "e4m3fn": "e4m3", "e8m0fnu": "e8m0"}
_BY_BITS = {"4": "e2m1", "6": "e3m2", "8": "e4m3", "16": "f16", "32": "f32"}
KNOWN_TYPES = f"types are u1 to u16, i2 to i32, {', '.join(FLOATS)}"


def similar_type(word: str) -> str:
    """The type that a word of another language stands for, or '': int8 is i8, uint3 u3, float16 f16, fp8_e4m3fn e4m3."""
    plain = word.lower().replace("_t", "").replace("-", "_")
    of_torch = {number.torch: name for name, number in FLOATS.items() if number.torch}
    integer = re.fullmatch(r"(s|u|i|si|ui|uint|int|sint)_?([0-9]+)", plain)
    if integer and find_number(name := f"{'u' if integer[1].startswith('u') else 'i'}{integer[2]}"):
        return name
    float_type = re.fullmatch(r"b?f(?:loat|p)?_?([0-9]+)(?:_?(e[0-9]m[0-9])(?:fn)?)?", plain)
    candidates = [plain, of_torch.get(plain), _ALIASES.get(plain), float_type and (float_type[2] or {
        **_BY_BITS, "16": "bf16" if plain[0] == "b" else "f16"}.get(float_type[1])), 
        *get_close_matches(plain, [*FLOATS, "u4", "u8", "i4", "i8"], 1, 0.7)]
    return next((name for name in candidates if name and find_number(name) and name != word), "")


def round_to_f32(value: float) -> float:
    """The nearest float32, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
