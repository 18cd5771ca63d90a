"""Codes from values: on every half-precision value, and where float32 comes closest to a tie.

Ties that go up are ggml's, whose sums round; its own bytes are compared in test_goldens.py."""

from __future__ import annotations

import pytest
import torch

from qdsl.encode.blocks import codes

ROUNDED = {
    "even": lambda x: x.round(),
    "away": lambda x: (x.abs() + 0.5).floor().copysign(x),
}


def close_to_ties() -> torch.Tensor:
    """float32 halves, from small to past the codes, with the two numbers on either side."""
    halves = (torch.arange(-300, 300) + 0.5).float()
    return torch.cat([(halves.view(torch.int32) + step).view(torch.float32) for step in (-2, -1, 0, 1, 2)])


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("code", ["i8", "u4", "u8"])
@pytest.mark.parametrize("ties", ROUNDED)
@pytest.mark.parametrize("values", [close_to_ties(), all_halves(torch.float16), all_halves(torch.bfloat16)],
                         ids=["f32", "f16", "bf16"])
def test_codes_are_the_nearest(values: torch.Tensor, ties: str, code: str) -> None:
    """Against float64, in which adding a half to any of these is exact."""
    low, high = (-128, 127) if code == "i8" else (0, (1 << int(code[1])) - 1)
    wanted = ROUNDED[ties](values.double()).clamp(low, high).to(torch.uint8 if code[0] == "u" else torch.int8)
    assert torch.equal(codes(values.clone(), code, ties), wanted)
