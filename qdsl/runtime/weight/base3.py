"""Up to five base-3 digits in a byte, the most significant first: d0 to d4 are (d0*81 + d1*27 + d2*9 + d3*3 + d4) / 243 as
a fraction of 256, rounded up, so that a digit is found without division: times 3 for each place before it, modulo 256, and
of that times 3 what is beyond the byte.  All 256 bytes have digits; those that `base3` makes are the canonical 243.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qdsl.runtime.torch.private_apis import FakeTensor
from qdsl.runtime.weight.packed import FormatError


def first_trit(bytes_: Tensor) -> Tensor:
    """The first digit of uint8 bytes, uint8 of their shape; of bytes times 3 ** i, modulo 256, it is digit i."""
    if isinstance(bytes_, FakeTensor) or bytes_.device.type != "cpu":
        return (bytes_.to(torch.int16) * 3 >> 8).to(torch.uint8)
    # The same in bytes, by numpy, whose division by a constant is vector code: 86 is the least byte of digit 1, 171 of 2.
    digits = bytes_.clamp_min(1).numpy()
    digits -= 1
    digits //= 85
    return torch.from_numpy(digits)


def base3(digits: Sequence[Tensor], name: str) -> Tensor:
    """The bytes of up to five tensors of digits, uint8 of one shape; places without a tensor are 0.

    Raises FormatError, with the field's name, for digits that are not 0, 1 or 2.
    """
    most = max((int(digit.max()) for digit in digits if digit.numel()), default=0)
    if most > 2:
        raise FormatError(f"field '{name}' is stored as digits of base 3, which are 0, 1 or 2, not {most}")
    value = torch.zeros_like(digits[0])
    for place in range(5):
        value = value * 3 + digits[place] if place < len(digits) else value * 3
    wide = value.to(torch.int16)
    return (wide + (wide * 13 + 242) // 243).to(torch.uint8)     # ceil(value * 256 / 243)
