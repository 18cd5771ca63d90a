"""compressed-tensors beside us, live: the same bytes from the same weights, and the same weights from the same bytes.

Needs that package, which few others want beside them: `make live` installs it into an environment of its own; without it nothing
here is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.checkpoint.detect.producers import producers
from qdsl.generated import (
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_channel,
    int8_tensor,
    int_group,
    nvfp4_ct,
    ocp_mxfp4,
    ocp_mxfp6,
    ocp_mxfp8,
)
from tests.support.formats import same_bits

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("default")

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A scheme of theirs, and what it is here.  columns: what K is a multiple of."""

    format: str
    weights: dict[str, Any]
    module: ModuleType
    storage: str
    options: dict[str, Any] = field(default_factory=dict)
    columns: int = 1


def integers(bits: int, strategy: str, symmetric: bool) -> Case:
    group = {"group_size": 32} if strategy == "group" else {}
    options = {"bits": bits, "group": group.get("group_size", -1), "symmetric": symmetric, "span": "full", "rounds": "sum"}
    return Case("pack-quantized", {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **group},
                int_group, "pack_quantized", options, group.get("group_size", 1))


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


MX = {"group_size": 32, "scale_dtype": torch.uint8}
PLUS = {"zeros": "positive"}                                      # they add a zero point, 0; of FP6 they do not
BYTE = {"num_bits": 8, "type": "int", "symmetric": True}
CASES = {
    **{f"pack{bits}-{strategy}-{'sym' if symmetric else 'asym'}": integers(bits, strategy, symmetric)
       for bits in range(2, 9) for strategy in ("group", "channel") for symmetric in (True, False)},
    "int8-channel": Case("int-quantized", {**BYTE, "strategy": "channel"}, int8_channel, "safetensors"),
    "int8-tensor": Case("int-quantized", {**BYTE, "strategy": "tensor"}, int8_tensor, "safetensors"),
    "fp8-channel": Case("float-quantized", floats(8, "channel"), fp8_channel, "safetensors", PLUS),
    "fp8-tensor": Case("float-quantized", floats(8, "tensor"), fp8_tensor, "safetensors", PLUS),
    "fp8-block": Case("float-quantized", floats(8, "block", block_structure=[32, 64]), fp8_block, "safetensors",
                      {"bn": 32, "bk": 64, **PLUS}),
    "nvfp4": Case("nvfp4-pack-quantized", floats(4, "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn), nvfp4_ct,
                  "compressed_tensors", {}, 16),
    "mxfp4": Case("mxfp4-pack-quantized", floats(4, "group", **MX), ocp_mxfp4, "compressed_tensors", {"power": "even", **PLUS},
                  32),
    "mxfp6": Case("mxfp6-pack-quantized", floats(6, "group", **MX), ocp_mxfp6, "compressed_tensors", {"power": "even"}, 32),
    "mxfp8": Case("mxfp8-quantized", floats(8, "group", **MX), ocp_mxfp8, "compressed_tensors", {"power": "half", **PLUS}, 32),
}


def compressed(case: Case, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What they store of a weight, and what they read of that: ranges by the whole, row, block or group."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**case.weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    blocks = cut(weight, args)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    whole = {"global_scale": generate_gparam(low.min(), high.max())} if args.strategy == "tensor_group" else {}
    scale, zero = calculate_qparams(low, high, args, **whole)
    tensors = {"weight": weight, "weight_scale": scale.reshape(1) if args.strategy == "tensor" else scale,
               "weight_zero_point": zero.reshape(1) if args.strategy == "tensor" else zero,
               **{f"weight_{name}": value for name, value in whole.items()}}
    compressor = BaseCompressor.get_value_from_registry(case.format)
    stored = compressor.compress(tensors, scheme)
    readable = {name: tensor.t().clone(memory_format=torch.contiguous_format).t() if name == "weight_zero_point" else tensor
                for name, tensor in stored.items()}
    return stored, compressor.decompress(readable, scheme)["weight"]     # 0.20 turns it over, and views it as bytes


def cut(weight: Tensor, args: Any) -> Tensor:
    """[N / rows, rows, K / columns, columns], the last blocks filled up with zeros."""
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "block": args.block_structure}.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_same_bytes_and_same_weights(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    n, k = data.draw(st.integers(1, 40)), case.columns * data.draw(st.integers(1, 160 // case.columns))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    small = [] if dtype == "f16" and case.weights.get("scale_dtype") == torch.uint8 else [1e-6]     # powers of two underflow
    weight = (torch.randn(n, k) * data.draw(st.sampled_from([*small, 0.02, 1.0, 30.0]))).to(DTYPES[dtype])
    weight[torch.rand(n, k) < data.draw(st.sampled_from([0.0, 0.3]))] = data.draw(st.sampled_from([0.0, -0.0]))
    theirs, read = compressed(case, weight)
    scale_type = {"scale_type": dtype} if "scale_type" in case.module.SPEC.params else {}
    ours = case.module.quantize(weight, case.storage, **case.options, **scale_type)
    renamed = {leaf.replace("scale_inv", "scale"): tensor for leaf, tensor in ours.tensors.items()}      # an alias there
    assert renamed.keys() == theirs.keys()
    for leaf, tensor in theirs.items():
        assert same_bits(renamed[leaf].view(tensor.shape), tensor), leaf
    assert same_bits(case.module.dequantize(ours, read.dtype) + 0.0, read + 0.0)


def test_presets_are_theirs() -> None:
    """Each name of their table stands here for the same settings, but for how they observe x."""
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme

    groups = producers().of("compressed-tensors").groups
    assert groups is not None and groups.presets.keys() == PRESET_SCHEMES.keys()

    def without_observers(scheme: Any) -> Any:
        exclude = {"observer", "zp_dtype"}
        return scheme.model_dump(exclude={"weights": exclude, "input_activations": exclude})

    for name, own in groups.presets.items():
        ours = QuantizationScheme(targets=["Linear"], **own)
        assert without_observers(ours) == without_observers(preset_name_to_scheme(name, ["Linear"])), name
