"""Formats beside the packages that others use, live and on any numbers: gguf-py and torch, bit for bit.

Left out is what a reference does not define or gets wrong: gguf-py casts a float that is no integer where 1 / scale
overflows, and gives a Q4_0 block of zeros that begins with -0.0 a scale of +0.0 where ggml stores -0.0.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qdsl
from qdsl.generated import (
    bf16,
    f16,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_channel,
    int8_tensor,
)
from qdsl.runtime import FormatError
from tests.support.formats import ROOT, SHIPPED, canonical, module, raw, same_bits, spec

EVERY_HALF = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(256, 256)
LARGEST_F32 = float(np.finfo(np.float32).max)
TORCH_SCALES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

run = settings(max_examples=100, deadline=None, derandomize=True)


def numbers(largest: float = LARGEST_F32) -> st.SearchStrategy[float]:
    """float32 numbers: any up to a size, and the awkward ones more often."""
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -3e-39, 6e-8, 1.0, -1.0, 0.5, largest, -largest]
    largest = float(np.float32(largest))
    return st.one_of(st.floats(-largest, largest, width=32), st.floats(-2, 2, width=32), st.sampled_from(special))


def rows(length: int, largest: float = LARGEST_F32) -> st.SearchStrategy[Tensor]:
    """A few rows of a weight, each of a kind: numbers of every size, a Gaussian of some size, or few values in turn."""
    any_size = st.lists(numbers(largest), min_size=length, max_size=length)
    few = st.lists(numbers(largest), min_size=1, max_size=3).map(lambda v: (v * length)[:length])
    return st.lists(st.one_of(any_size, few, gauss(length, largest)), min_size=1, max_size=3).map(torch.tensor)


@st.composite
def gauss(draw: st.DrawFn, length: int, largest: float) -> list[float]:
    scale = draw(st.sampled_from([1e-42, 1e-30, 1e-6, 0.02, 1.0, 1e4]))
    values = np.random.default_rng(draw(st.integers(0, 1 << 32))).standard_normal(length) * scale
    return [float(value) for value in np.clip(values, -largest, largest).astype(np.float32)]


# -- gguf-py -----------------------------------------------------------------------------------------------------------


# Codes are weights by 1 / (the largest magnitude, or the range, / this).
DIVISORS = {"q4_0": 8, "q5_0": 16, "q8_0": 127, "tq1_0": 1, "tq2_0": 1, "q4_1": 15, "q5_1": 31}


def quantizes(kind: GGMLQuantizationType) -> bool:
    """Whether gguf-py has a quantizer for a type."""
    try:
        gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except NotImplementedError:
        return False
    return True


QUANTIZED = [(path, kind) for path in SHIPPED if "run: k" in path.read_text()
             and (kind := GGMLQuantizationType.__members__.get(path.stem.upper())) is not None and quantizes(kind)]
NAMES = [path.stem for path, _ in QUANTIZED]


def defined(path: Path, kind: GGMLQuantizationType, weight: Tensor) -> bool:
    """Whether gguf-py defines the bytes, and they are ggml's: no cast of what is out of range, no zeros of either sign."""
    blocks = weight.view(-1, gguf.GGML_QUANT_SIZES[kind][0]).numpy()
    largest, least = np.abs(blocks).max(1), blocks.min(1)
    if path.stem == "mxfp4":
        return not ((largest > 0) & (largest < 2.0 ** -125)).any()
    affine = path.stem.endswith("_1")
    with np.errstate(over="ignore", divide="ignore"):
        span = blocks.max(1) - least if affine else largest
        overflows = (span > 0) & np.isinf(np.float32(1) / (span / np.float32(DIVISORS[path.stem])))
    zeros = (least == 0) & ((blocks == 0) & np.signbit(blocks)).any(1) if affine else \
        (largest == 0) & np.signbit(blocks[:, 0]) & (path.stem in ("q4_0", "q5_0"))
    return not (overflows | zeros).any()


def compare_quantized(path: Path, kind: GGMLQuantizationType, weight: Tensor) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = gguf.quants.quantize(weight.numpy(), kind)
        values = torch.from_numpy(gguf.quants.dequantize(wanted, kind))
    if not bool(values.isfinite().all()):                        # gguf-py stores an infinite scale
        with pytest.raises(FormatError, match="does not fit f16"):
            module(path).quantize(weight)
        return
    packed = module(path).quantize(weight)
    assert same_bits(packed.tensors["blocks"], torch.from_numpy(wanted))
    assert same_bits(module(path).dequantize(packed, torch.float32), values)


@pytest.mark.parametrize(("path", "kind"), QUANTIZED, ids=NAMES)
@run
@given(data=st.data())
def test_gguf_quantizes_any_numbers_to_the_same_bytes(path: Path, kind: GGMLQuantizationType, data: st.DataObject) -> None:
    """And decodes them to the same weights; where its scale becomes infinite, ours is refused."""
    weight = data.draw(rows(max(64, gguf.GGML_QUANT_SIZES[kind][0])))
    kept = [row for row in weight if defined(path, kind, row)]
    if kept:
        compare_quantized(path, kind, torch.stack(kept))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.02, 1.0, 1e4])
@pytest.mark.parametrize(("path", "kind"), QUANTIZED, ids=NAMES)
def test_gguf_quantizes_many_weights_to_the_same_bytes(path: Path, kind: GGMLQuantizationType, scale: float) -> None:
    """Rounded to few bits, so that halves between two codes, and several largest values, are frequent."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    for variant in (weight, weight.bfloat16().float(), (weight * 8).round() / 8 + 0.0):
        compare_quantized(path, kind, variant * scale)


def decodes(kind: GGMLQuantizationType) -> bool:
    """Whether gguf-py has a decoder for a type."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


BLOCKS = [(path, kind) for path in SHIPPED if "run: k" in path.read_text()
          and (kind := GGMLQuantizationType.__members__.get(path.stem.upper())) is not None and decodes(kind)]


@pytest.mark.parametrize(("path", "kind"), BLOCKS, ids=[path.stem for path, _ in BLOCKS])
@settings(run, max_examples=40)
@given(data=st.data())
def test_gguf_decodes_any_bytes_to_the_same_weights(path: Path, kind: GGMLQuantizationType, data: st.DataObject) -> None:
    """Blocks of any bytes; of numbers that are none, the bits are not compared.  The fields of a block give its bytes."""
    generated = module(path)
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)) * gguf.GGML_QUANT_SIZES[kind][1])
    if data.draw(st.booleans()):
        content = data.draw(st.binary(min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    else:
        content = np.random.default_rng(data.draw(st.integers(0, 1 << 32))).bytes(shape[0] * shape[1])
    blocks = np.frombuffer(content, np.uint8).reshape(shape)
    packed = generated.wrap({"blocks": torch.from_numpy(blocks.copy())})
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    weight = generated.dequantize(packed, torch.float32)
    assert torch.equal(weight.isnan(), wanted.isnan())
    assert same_bits(weight.nan_to_num(0), wanted.nan_to_num(0))
    assert same_bits(generated.pack(generated.unpack(packed)).tensors["blocks"], canonical(packed)["blocks"])



@pytest.mark.parametrize(("module", "kind"), [(bf16, GGMLQuantizationType.BF16), (f16, GGMLQuantizationType.F16)],
                         ids=["bf16", "f16"])
@run
@given(rows(8, largest=65504.0))
def test_gguf_rounds_to_the_same_halves(module: ModuleType, kind: GGMLQuantizationType, weight: Tensor) -> None:
    packed = module.quantize(weight)
    wanted = gguf.quants.quantize(weight.numpy(), kind)
    assert torch.equal(raw(packed.tensors["weight"]), torch.from_numpy(wanted.view(np.uint8)).flatten())
    assert same_bits(module.dequantize(packed, torch.float32), torch.from_numpy(gguf.quants.dequantize(wanted, kind)))


# -- torch's own casts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "dtype"), [(bf16, torch.bfloat16), (f16, torch.float16)], ids=["bf16", "f16"])
def test_every_half_is_cast_as_torch_casts_it(module: ModuleType, dtype: torch.dtype) -> None:
    """Infinities and NaNs too.  To its own dtype it is copied: a NaN keeps its bits, which a cast may change."""
    halves = EVERY_HALF.view(dtype)
    packed = module.wrap({"weight": halves})
    assert same_bits(module.dequantize(packed, dtype), halves)
    for other in {torch.float32, torch.float16, torch.bfloat16} - {dtype}:
        decoded, wanted = module.dequantize(packed, other), halves.to(other)
        assert torch.equal(decoded.isnan(), wanted.isnan())
        assert same_bits(decoded.nan_to_num(0), wanted.nan_to_num(0))


@pytest.mark.parametrize(("module", "dtype"), [(bf16, torch.bfloat16), (f16, torch.float16)], ids=["bf16", "f16"])
@run
@given(rows(8))
def test_any_number_is_rounded_as_torch_rounds_it(module: ModuleType, dtype: torch.dtype, weight: Tensor) -> None:
    """Past the largest half, torch makes infinities; ours says which weight is too large."""
    rounded = weight.to(dtype)
    if bool(rounded.isinf().any()):
        row, column = (int(i) for i in torch.nonzero(rounded.isinf())[0])
        with pytest.raises(FormatError, match=f"at row {row}, column {column} does not fit {module.SPEC.name}"):
            module.quantize(weight)
    else:
        assert same_bits(module.quantize(weight).tensors["weight"], rounded)


@pytest.fixture(scope="module")
def e5m2_tensor(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """fp8_tensor with the other type of 8-bit floats, by two words of its spec."""
    text = (ROOT / "specs" / "fp8_tensor.yaml").read_text()
    for old, new in (("format: fp8_tensor", "format: e5m2_tensor"), ("e4m3", "e5m2")):
        assert old in text
        text = text.replace(old, new)
    spec = tmp_path_factory.mktemp("specs") / "e5m2_tensor.yaml"
    spec.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDSL_CACHE", str(spec.parent / "cache"))
        return qdsl.load(spec)


@pytest.fixture(scope="module", params=["e4m3", "e5m2"])
def fp8(request: pytest.FixtureRequest, e5m2_tensor: ModuleType) -> tuple[ModuleType, torch.dtype]:
    """A format of 8-bit floats with one scale, and torch's dtype of its codes."""
    return (fp8_tensor, torch.float8_e4m3fn) if request.param == "e4m3" else (e5m2_tensor, torch.float8_e5m2)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.0, 2.0 ** -149, 3e-39, 0.01, 1e30])
@pytest.mark.parametrize("scale_type", TORCH_SCALES)
def test_every_fp8_code_is_cast_as_torch_casts_it(fp8: tuple[ModuleType, torch.dtype], scale: float,
                                                  scale_type: str) -> None:
    """Times a scale in float32, rounded once; NaN where torch has NaN."""
    module, dtype = fp8
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16).view(dtype)
    stored = torch.tensor(scale).to(TORCH_SCALES[scale_type])
    packed = module.wrap({"weight": codes, "weight_scale": stored})
    assert packed.params["scale_type"] == scale_type
    exact = codes.float() * stored.float()
    for out in (torch.float32, torch.float16, torch.bfloat16):
        decoded, wanted = module.dequantize(packed, out), exact.to(out)
        assert torch.equal(decoded.isnan(), wanted.isnan())
        assert same_bits(decoded.nan_to_num(0), wanted.nan_to_num(0))


# -- torch's plain arithmetic ------------------------------------------------------------------------------------------


def plain(weight: Tensor, largest: Tensor, divisor: float, code: torch.dtype,
          scale_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales as the checkpoints' packages compute them, in the scale's dtype where the weight has it.

    largest: the largest magnitude of each weight's block, in the weight's shape.
    """
    dtype = weight.dtype if weight.dtype == scale_type else torch.float32
    exact = largest.to(dtype) / divisor
    scale = torch.where(exact == 0, torch.finfo(dtype).eps, exact).to(scale_type)
    scaled = weight.to(dtype) / scale.to(dtype)
    scaled = torch.where(scale == 0, 0, scaled)                  # where all of a block is too small for its scale
    if code == torch.int8:
        return scaled.round().clamp(-128, 127).to(code), scale
    limit = torch.finfo(code).max
    return scaled.clamp(-limit, limit).to(code), scale


def block_largest(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each weight's block, block by block."""
    largest = torch.empty_like(weight)
    for r in range(0, weight.shape[0], rows):
        for c in range(0, weight.shape[1], columns):
            largest[r:r + rows, c:c + columns] = weight[r:r + rows, c:c + columns].abs().max()
    return largest


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """A weight of some shape and dtype, up to sizes at which no scale leaves any dtype of scales."""
    weight = draw(rows(draw(st.integers(1, 24)), largest=30000.0))
    return weight.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))


@pytest.mark.parametrize("scale_type", TORCH_SCALES)
@pytest.mark.parametrize(("module", "code", "divisor", "channel"), [
    (fp8_tensor, torch.float8_e4m3fn, 448.0, False), (fp8_channel, torch.float8_e4m3fn, 448.0, True),
    (int8_tensor, torch.int8, 127.5, False), (int8_channel, torch.int8, 127.5, True),
], ids=["fp8_tensor", "fp8_channel", "int8_tensor", "int8_channel"])
@run
@given(weight=weights())
def test_quantizing_is_plain_arithmetic(module: ModuleType, code: torch.dtype, divisor: float, channel: bool,
                                        scale_type: str, weight: Tensor) -> None:
    largest = block_largest(weight, 1 if channel else weight.shape[0], weight.shape[1])
    codes, scale = plain(weight, largest, divisor, code, TORCH_SCALES[scale_type])
    packed = module.quantize(weight, scale_type=scale_type)
    assert same_bits(packed.tensors["weight"], codes)
    assert same_bits(packed.tensors["weight_scale"], scale[:, :1] if channel else scale[0, :1])
    assert torch.equal(module.dequantize(packed, torch.float32), codes.float() * scale.float())


@pytest.mark.parametrize("sizes", [(128, 128), (64, 128), (32, 64)], ids=str)
@pytest.mark.parametrize("scale_type", TORCH_SCALES)
def test_quantizing_in_blocks_is_plain_arithmetic(scale_type: str, sizes: tuple[int, int]) -> None:
    """Ragged along both axes, with a block of zeros."""
    bn, bk = sizes
    for seed, (n, k) in enumerate([(1, 1), (130, 257), (96, 333), (256, 128)]):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
        weight[:bn, :bk] = 0
        largest = block_largest(weight, bn, bk)
        codes, scale = plain(weight, largest, 448.0, torch.float8_e4m3fn, TORCH_SCALES[scale_type])
        packed = fp8_block.quantize(weight, bn=bn, bk=bk, scale_type=scale_type)
        assert same_bits(packed.tensors["weight"], codes)
        assert same_bits(packed.tensors["weight_scale_inv"], scale[::bn, ::bk].contiguous())
        assert torch.equal(fp8_block.dequantize(packed, torch.float32), codes.float() * scale.float())


@pytest.mark.parametrize("scale_type", TORCH_SCALES)
@pytest.mark.parametrize("zero", [None, "given"], ids=["without zero points", "with zero points"])
@run
@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 20), k=st.integers(1, 40))
def test_int8_decodes_by_plain_arithmetic(scale_type: str, zero: str | None, seed: int, n: int, k: int) -> None:
    """All codes with all zero points: the difference needs nine bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    zeros = torch.randint(-128, 128, (n, 1), generator=generator).to(torch.int8)
    scale = torch.randn(n, 1, generator=generator).to(TORCH_SCALES[scale_type])
    tensors = {"weight": codes, "weight_scale": scale, **({"weight_zero_point": zeros} if zero else {})}
    decoded = int8_channel.dequantize(int8_channel.wrap(tensors), torch.float32)
    difference = codes.int() - (zeros.int() if zero else 0)
    assert same_bits(decoded, difference.float() * scale.float())


@pytest.mark.parametrize("name", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"])
def test_grids_are_those_of_gguf_py(name: str) -> None:
    """Every row of a grid; signs are proved by decoding."""
    theirs = getattr(gguf.quants, name.upper())
    theirs.init_grid()
    table = spec(ROOT / "specs" / f"{name}.yaml").table("grid")
    assert np.array_equal(theirs.grid.reshape(table.shape), np.array(table.values).reshape(table.shape))
