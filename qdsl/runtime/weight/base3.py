"""Packs up to five base-3 digits in a byte, the most significant first.

Digits d0 to d4 are (d0*81 + d1*27 + d2*9 + d3*3 + d4) / 243 * 256, rounded up.  A digit is found without division: multiply by 3
for each digit before it, modulo 256; the overflow of one more multiplication by 3 is the digit.  All 256 bytes decode; the 243
that `base3` makes are canonical.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qdsl.runtime.libraries.private_apis import FakeTensor
from qdsl.runtime.weight.packed import FormatError


def first_trit(bytes_: Tensor) -> Tensor:
    """The first digit of uint8 bytes, uint8 of the same shape; it is digit i for bytes times 3 ** i, modulo 256."""
    if isinstance(bytes_, FakeTensor) or bytes_.device.type != "cpu":
        return (bytes_.to(torch.int16) * 3 >> 8).to(torch.uint8)
    # numpy divides bytes by a constant in vector code: 86 is the least byte of digit 1, 171 of 2.
    digits = bytes_.clamp_min(1).numpy()
    digits -= 1
    digits //= 85
    return torch.from_numpy(digits)


def base3(digits: Sequence[Tensor], name: str) -> Tensor:
    """The bytes of up to five tensors of digits, uint8 of one shape; missing digits are 0.

    Raises FormatError with the field's name for digits other than 0, 1 or 2.
    """
    most = max((int(digit.max()) for digit in digits if digit.numel()), default=0)
    if most > 2:
        raise FormatError(f"field '{name}' is stored as digits of base 3, which are 0, 1 or 2, not {most}")
    value = torch.zeros_like(digits[0])
    for place in range(5):
        value = value * 3 + digits[place] if place < len(digits) else value * 3
    wide = value.to(torch.int16)
    return (wide + (wide * 13 + 242) // 243).to(torch.uint8)     # ceil(value * 256 / 243)
