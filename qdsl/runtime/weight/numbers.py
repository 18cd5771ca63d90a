"""Decodes bit patterns to float32 tensors, and encodes values: the torch forms of qdsl/core/numbers.py.

Decoders take codes as uint8 or in torch's own 8-bit float dtypes and return float32, exact on every code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.libraries.private_apis import FakeTensor


def _codes(code: Tensor) -> Tensor:
    """The bits as int32, sign-extended from bit 7."""
    return code.view(torch.int8).to(torch.int32)


def _bits_to_float(code: Tensor, mantissa: int, bias: int, sign: int) -> Tensor:
    """Sign, exponent and mantissa moved to their places in float32, and scaled by a power of two: exact, also for subnormals.

    Works in place on `code`, an int32 tensor of the caller.
    """
    bits = code.bitwise_left_shift_(23 - mantissa)
    bits &= (1 << 23 - mantissa + sign) - 1 | -(1 << 31)
    return bits.view(torch.float32).mul_(2.0 ** (127 - bias))


def _has_largest_code(codes: Tensor, code: int) -> bool:
    """Whether some code is `code`, the largest possible: one fast pass decides whether special codes need work.

    True in a traced program, whose codes are not known.
    """
    return isinstance(codes, FakeTensor) or (bool(codes.numel()) and not codes.is_meta and int(codes.amax()) == code)


def e4m3(code: Tensor) -> Tensor:
    """float32 of E4M3 codes (OCP): 0x7F and 0xFF are NaN."""
    value = _bits_to_float(_codes(code), 3, 7, 7)
    size = code.view(torch.uint8) & 127
    return value.masked_fill_(size == 127, torch.nan) if _has_largest_code(size, 127) else value


def e5m2(code: Tensor) -> Tensor:
    """float32 of E5M2 codes (OCP): the upper half of a float16."""
    return (code.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).float()


def e4m3fnuz(code: Tensor) -> Tensor:
    """float32 of E4M3FNUZ codes: 0x80 is NaN."""
    value = _bits_to_float(_codes(code), 3, 8, 7)
    lone = code.view(torch.uint8) ^ 127                          # turns 0x80 into the largest code
    return value.masked_fill_(lone == 255, torch.nan) if _has_largest_code(lone, 255) else value


def e5m2fnuz(code: Tensor) -> Tensor:
    """float32 of E5M2FNUZ codes: 0x80 is NaN."""
    value = _bits_to_float(_codes(code), 2, 16, 7)
    lone = code.view(torch.uint8) ^ 127
    return value.masked_fill_(lone == 255, torch.nan) if _has_largest_code(lone, 255) else value


def e3m2(code: Tensor) -> Tensor:
    """float32 of E3M2 codes: the low 6 bits of uint8."""
    return _bits_to_float(_codes(code << 2) >> 2, 2, 3, 5)


def e2m3(code: Tensor) -> Tensor:
    """float32 of E2M3 codes: the low 6 bits of uint8."""
    return _bits_to_float(_codes(code << 2) >> 2, 3, 1, 5)


def e2m1(code: Tensor) -> Tensor:
    """float32 of E2M1 codes: the low 4 bits of uint8; code 8 is -0."""
    return _bits_to_float(_codes(code << 4) >> 4, 1, 1, 3)


def e8m0(code: Tensor) -> Tensor:
    """float32 of E8M0 codes: 2^(code - 127), 0 is the subnormal 2^-127, 255 is NaN."""
    wide = code.view(torch.uint8).to(torch.int32)
    return (wide << 23).masked_fill_(wide == 0, 0x00400000).masked_fill_(wide == 255, 0x7FC00000).view(torch.float32)


def e8m0h(code: Tensor) -> Tensor:
    """float32 of ggml's halves of E8M0: 2^(code - 128), 0 and 1 are subnormal, 255 is a number."""
    wide = code.view(torch.uint8).to(torch.int32)
    return (wide - 1 << 23).masked_fill_(wide == 0, 0x00200000).masked_fill_(wide == 1, 0x00400000).view(torch.float32)


def ue4m3(code: Tensor) -> Tensor:
    """float32 of ggml's unsigned E4M3: the magnitude of E4M3, bit 7 ignored, 0x7F is 0."""
    return _bits_to_float(code.view(torch.uint8).to(torch.int32) & 127, 3, 7, 7).masked_fill_(code.view(torch.uint8) == 127, 0)


_MINIFLOATS = {"e3m2": (2, 3, 28.0, 32), "e2m3": (3, 1, 7.5, 32), "e2m1": (1, 1, 6.0, 8), "e4m3": (3, 7, 448.0, 128),
               "e5m2": (2, 15, 57344.0, 128)}
_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def to_minifloat(value: Tensor, kind: str, ties: str = "even") -> Tensor:
    """Codes of e3m2, e2m3, e2m1 (uint8), e4m3 or e5m2 nearest to float32 values, clamped to the largest; -0 keeps its sign.

    ties: 'even', or 'zero' for towards zero.
    """
    mantissa, bias, largest, sign = _MINIFLOATS[kind]
    size = value.abs().clamp(max=largest)
    power = torch.where(size > 0, torch.frexp(size).exponent - 1, 1 - bias).clamp(min=1 - bias)
    exact = torch.ldexp(size, (mantissa - power).float())        # of integers torch makes the default dtype
    steps = torch.round(exact) if ties == "even" else torch.ceil(exact - 0.5)
    code = steps.to(torch.int32) + (power + bias - 1 << mantissa)
    codes = (code | torch.signbit(value).to(torch.int32) * sign).to(torch.uint8)
    return codes.view(_TORCH[kind]) if kind in _TORCH else codes
