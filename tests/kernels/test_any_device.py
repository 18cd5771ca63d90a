"""Devices of torch without kernels: every format decodes and multiplies by torch's own operations, with the bits of a CPU.

torch cannot forget a device, so these run in the process that tests/kernels/test_machines.py starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from qdsl import save_model
from qdsl.generated import fp8_block, hlane, int_group, q4_k
from qdsl.runtime.libraries.triton import is_installed
from qdsl.runtime.weight import device_dtypes
from tests.support.covering import by_turns
from tests.support.formats import Case, cases, random_packed, same_bits, smallest
from tests.support.other_device import HAS_BACKENDS, OtherTensor, other_device

pytestmark = [pytest.mark.own_state, pytest.mark.skipif(is_installed, reason="in a process of their own"),
              pytest.mark.skipif(not HAS_BACKENDS, reason="this torch has no backends in Python")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with other_device() as device:
        yield device


@pytest.mark.parametrize("case, dtype", by_turns(cases(), DTYPES), ids=str)
def test_a_format_on_a_device_without_kernels(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    packed, format = random_packed(case, smallest(case, 2)), case.module.FORMAT
    moved = packed.to(device)
    assert moved.device == device and not any(device_dtypes.is_float8(tensor.dtype) for tensor in moved.tensors.values())
    back = moved.to("cpu")
    assert all(same_bits(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype
               for name, tensor in packed.tensors.items())
    weight = format.dequantize(packed, dtype)
    decoded = format.dequantize(moved, dtype)
    assert isinstance(decoded, OtherTensor) and same_bits(decoded.cpu(), weight)
    x = torch.randn(3, packed.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    out = format.linear(x.to(device), moved)
    assert isinstance(out, OtherTensor) and out.dtype == dtype
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    error = (out.cpu().double() - exact).abs()
    finite = size.isfinite() & (exact.abs() < torch.finfo(dtype).max / 2)
    assert bool((error <= size * packed.shape[1] * 2 ** -24 + exact.abs() * torch.finfo(dtype).eps)[finite].all())


@pytest.mark.parametrize("module", [q4_k, fp8_block, hlane, int_group], ids=lambda module: module.FORMAT.name)
def test_a_layer_on_a_device_without_kernels(module: Any, device: torch.device) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = module.quantize(weight)
    layer = module.Linear(packed)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    layer.to(device)
    x_there = x.to(device).requires_grad_()
    out = layer(x_there)
    assert torch.equal(out.detach().cpu(), expected.detach())
    out.sum().backward()
    assert x_there.grad is not None
    torch.testing.assert_close(x_there.grad.cpu(), module.dequantize(packed, torch.float32).sum(0).expand(2, 256))
    assert torch.equal(layer.to("cpu")(x).detach(), expected.detach())


def test_a_state_dict_has_the_stored_dtypes(device: torch.device, tmp_path: Path) -> None:
    """A layer on a device without 8-bit floats saves them, and loads what it saved, raw bytes, and new parameters."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(fp8_block.Linear(fp8_block.quantize(weight)))
    expected, other = model.state_dict(), fp8_block.Linear(fp8_block.quantize(2 * weight)).state_dict(prefix="0.")
    model.to(device)
    assert dict(model.named_parameters())["0.weight"].dtype == torch.uint8
    save_model(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert same_bits(file.get_tensor("0.weight"), expected["0.weight"])
    saved = model.state_dict()
    for name, tensor in expected.items():
        assert saved[name].dtype == tensor.dtype and same_bits(saved[name].cpu(), tensor)
    for state in (other, {**other, "0.weight": other["0.weight"].view(torch.uint8)}):
        model.load_state_dict(saved)
        assert same_bits(model.state_dict()["0.weight"], expected["0.weight"])
        model.load_state_dict(state)
        assert model[0].device == device and same_bits(model.state_dict()["0.weight"], other["0.weight"])
    model.load_state_dict(saved, assign=True)
    assert same_bits(model.to("cpu").state_dict()["0.weight"], expected["0.weight"])


def test_rows_and_experts_on_a_device_without_kernels(device: torch.device) -> None:
    format = q4_k.FORMAT
    packed = format.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
    moved, index = packed.to(device), torch.tensor([3, 0, 255])
    rows = format.dequantize_rows(moved, index.to(device))
    assert same_bits(rows.cpu(), format.dequantize_rows(packed, index))
    x, offsets = torch.randn(5, 256), torch.tensor([0, 2, 2, 4, 5])
    out = format.grouped_linear(x.to(device), moved, offsets.to(device))
    assert torch.equal(out.cpu(), format.grouped_linear(x, packed, offsets))
