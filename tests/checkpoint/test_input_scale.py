"""FP8 and INT8 beside their codes: static scales of x, and codes that are no numbers."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdsl.generated import fp8_block, fp8_channel, fp8_tensor
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.weight import eight
from tests.support.formats import same_bits
from tests.support.interpreter import INTERPRETED
from tests.support.packed_layers import module_of, quantized, sample


def reference(x: Tensor, packed: PackedWeight, scale: float) -> Tensor:
    """x / scale as codes, and the product in float64."""
    units = x.float() / torch.tensor(scale)
    codes = units.clamp(-448, 448).to(torch.float8_e4m3fn) if "fp8" in packed.format.name else units.round().clamp(-128, 127)
    return codes.double() * scale @ packed.format.dequantize(packed, torch.float32).double().t()


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "int8_tensor", "int8_channel", "int8_block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_scale_takes_the_place_of_scales_per_row(name: str, dtype: torch.dtype) -> None:
    """Values beyond the type's range are cut; eager, compiled and exported."""
    torch.compiler.reset()
    packed, x = quantized(name), (4 * sample(5, 128)).to(dtype)
    scale = torch.tensor(0.006 if "fp8" in name else 0.02)
    layer = module_of(name).Linear(packed, quantize_x=True, input_scale=scale, dtype=dtype)
    result, wanted = layer(x), reference(x, packed, float(scale))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), wanted, rtol=2e-5 if dtype == torch.float32 else 8e-3, atol=2e-4)
    assert (x.float() / scale).abs().max() > (448 if "fp8" in name else 128)
    assert same_bits(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), result)
    assert same_bits(torch.export.export(layer, (x,)).module()(x), result)
    layer.quantize_x = False
    assert same_bits(layer(x), packed.format.linear(x, packed))


def test_a_static_scale_is_kept_loaded_and_saved() -> None:
    """In its own shape and dtype, into a layer that has none, and through casts."""
    packed, x = quantized("fp8_tensor"), sample(3, 128)
    for scale in (torch.tensor(0.02), torch.tensor([0.02]), torch.tensor(0.02).bfloat16()):
        layer = fp8_tensor.Linear(packed, input_scale=scale)
        assert list(layer.state_dict()) == ["weight", "weight_scale", "input_scale"]
        for device, assign in (("meta", True), ("cpu", False)):
            empty = fp8_tensor.Linear.empty((64, 128), device=device)
            empty.load_state_dict(layer.state_dict(), assign=assign)
            assert same_bits(empty.half().state_dict()["input_scale"], scale)
            empty.quantize_x = True
            assert same_bits(empty(x), fp8_tensor.linear(x, packed, quantize_x=True, input_scale=float(scale)))
    layer = fp8_tensor.Linear(packed, quantize_x=True, input_scale=torch.tensor(0.02))
    for wrong, message in ((torch.ones(2), r"one float, not float32 \[2\]"), (torch.tensor(1), "one float, not int64")):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict({**layer.state_dict(), "input_scale": wrong})
        with pytest.raises(FormatError, match=message):
            fp8_tensor.Linear(packed, input_scale=wrong)
    assert float(layer.input_scale) == pytest.approx(0.02)
    layer.load_state_dict({**layer.state_dict(), "input_scale": torch.tensor(0.5)})
    assert same_bits(copy.deepcopy(layer)(x), fp8_tensor.linear(x, packed, quantize_x=True, input_scale=0.5))
    layer.load_state_dict({**layer.state_dict(), "input_scale": torch.tensor(0.0)})
    with pytest.raises(FormatError, match="input_scale is 0; a scale is positive"):
        layer(x)


def test_a_static_scale_beside_numbers_that_are_none() -> None:
    """Infinities are cut to the largest code; a NaN makes its row, or its 128 columns, NaN."""
    x = sample(3, 256)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    for kind, largest in (("e4m3", 448.0), ("i8", 127.0)):
        codes, scales = eight.quantize_x(x, kind, True, 0.5)
        assert float(codes[0, 3]) == largest and scales.isnan().tolist() == [[False, False], [True, False], [False, False]]
        assert (codes[1, :128].float() == 0).all() and (scales[0] == 0.5).all()


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block", "int8_channel"])
def test_kernels_take_a_static_scale(name: str) -> None:
    """The kernel that multiplies 8 bits with 8 bits, with x quantized by torch."""
    device = "cpu" if INTERPRETED else "cuda"
    packed, x = quantized(name, 128, 256).to(device), (4 * sample(5, 256)).to(device, torch.bfloat16)
    out = torch.full((5, 128), torch.nan, dtype=torch.bfloat16, device=device)
    calls = list(launch.quantized_calls(x, packed, None, out, 0.02))
    assert [call.family for call in calls] == ["w8a8"]
    calls[0].run()
    wanted = reference(x.cpu(), packed.to("cpu"), float(torch.tensor(0.02)))
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=8e-3, atol=2e-3)


# -- NaN codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", range(256))
def test_codes_that_are_no_numbers(code: int) -> None:
    """Every code alone among zeros."""
    packed = quantized("fp8_channel")
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    codes[5, 7] = code
    weight = packed.derive({**packed.tensors, "weight": codes.view(torch.float8_e4m3fn)})
    assert weight.known_finite is None and weight.finite == (code & 127 != 127) and weight.known_finite == weight.finite


def test_nobody_reads_the_codes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wrap, a layer, its product, its copies or its compiled form; matrix-unit kernels do, once for a weight."""
    torch.compiler.reset()
    reads: list[str] = []
    amax = torch.Tensor.amax

    def noted(values: torch.Tensor, *axes: int, **options: bool) -> torch.Tensor:
        reads.extend(["read"] if values.dtype == torch.int8 else [])
        return amax(values, *axes, **options)

    monkeypatch.setattr(torch.Tensor, "amax", noted)
    packed = fp8_channel.wrap(quantized("fp8_channel", 64, 256).tensors)
    layer, x = fp8_channel.Linear(packed), sample(2, 256).bfloat16()
    layer(x)
    copy.deepcopy(layer).half()(x)
    layer.load_state_dict(layer.state_dict())
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert not reads
    if INTERPRETED:
        assert launch.fits_experts(x, packed) and launch.fits_experts(x, packed) and launch.has_quantized(x, packed)
        assert reads == ["read"]


def resident(memory: mmap.mmap) -> float:
    """The share of a mapping's pages that the file cache holds."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), pages):
        pytest.skip("mincore does not answer here")
    return sum(page & 1 for page in pages) / len(pages)


def test_wrapping_a_mapped_file_reads_nothing(tmp_path: Path) -> None:
    """A sparse file's pages are in no cache until somebody reads them."""
    with open(tmp_path / "codes", "wb") as file:
        file.truncate(1 << 24)
    with open(tmp_path / "codes", "r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)) as memory:
        if resident(memory) > 0.01:
            pytest.skip("the file system has fresh files in its cache")
        codes = torch.frombuffer(memory, dtype=torch.float8_e4m3fn).view(4096, 4096)
        tensors = {"weight": codes, "weight_scale_inv": torch.ones(32, 32)}
        packed = fp8_block.wrap(tensors)
        layer = fp8_block.Linear(packed)
        fp8_block.Linear.empty((4096, 4096)).load_state_dict(tensors, assign=True)
        assert resident(memory) < 0.01
        layer(sample(1, 4096))
        assert resident(memory) > 0.9
        del codes, packed, layer
