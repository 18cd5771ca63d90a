"""torchao beside us, live: it decodes what we read of its files to the same bits, and loads what we write.

Needs that package: `make live` installs it into an environment of its own; without it nothing here is run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer_weights import module_of, weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import TensorFile, write
from qdsl.generated import (
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_channel,
    int8_tensor,
    int_group,
    nvfp4_modelopt,
    ocp_mxfp4,
    ocp_mxfp6,
    ocp_mxfp8,
)
from qdsl.jobs.convert.run import convert
from qdsl.jobs.convert.target import parse_conversion
from tests.support.formats import same_bits

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("default")


def torchao_weight(kind: str, w: Tensor) -> Any:
    """A weight [N, K], or those of experts [E, N, K], as torchao quantizes it."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MappingType
    from torchao.quantization.granularity import PerBlock, PerGroup, PerRow, PerTensor

    mx = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2",
          "fp4": torch.float4_e2m1fn_x2}
    asymmetric = {"mapping_type": MappingType.ASYMMETRIC}
    front = [1] * (w.dim() - 2)
    makers: dict[str, Callable[[], Any]] = {
        "int8 row": lambda: Int8Tensor.from_hp(w, PerRow()), "int8 tensor": lambda: Int8Tensor.from_hp(w, PerTensor()),
        "int8 group": lambda: Int8Tensor.from_hp(w, PerGroup(32)),
        "int8 asymmetric": lambda: Int8Tensor.from_hp(w, PerGroup(64), **asymmetric),
        "intx": lambda: IntxUnpackedToInt8Tensor.from_hp(w.float(), (*front, 1, 32), torch.int4, **asymmetric),
        "float8 row": lambda: Float8Tensor.from_hp(w, granularity=PerRow()),
        "float8 tensor": lambda: Float8Tensor.from_hp(w, granularity=PerTensor()),
        "float8 block": lambda: Float8Tensor.from_hp(w, granularity=PerBlock([*front, 32, 64])),
        **{f"mx {name}{end}": lambda dtype=dtype, end=end: MXTensor.to_mx(w, dtype, is_swizzled_scales=end != "")
           for name, dtype in mx.items() for end in ("", " swizzled")},
        **{f"nvfp4 {name}{end}": lambda name=name, end=end: NVFP4Tensor.to_nvfp4(
            w, is_swizzled_scales=end != "",
            per_tensor_scale=per_tensor_amax_to_scale(w.abs().max()) if name == "scaled" else None)
           for name in ("plain", "scaled") for end in ("", " swizzled")}}
    return makers[kind]()


KINDS = ["int8 row", "int8 tensor", "int8 group", "int8 asymmetric", "intx", "float8 row", "float8 tensor", "float8 block",
         *(f"mx {name}{end}" for name in ("fp8", "e5m2", "e2m3", "e3m2", "fp4") for end in ("", " swizzled")),
         *(f"nvfp4 {name}{end}" for name in ("plain", "scaled") for end in ("", " swizzled"))]


@pytest.mark.parametrize("kind", KINDS)
def test_its_files_are_read(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    @settings(max_examples=10, deadline=None)
    @given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1 << 30))
    def check(rows: int, columns: int, seed: int) -> None:
        torch.manual_seed(seed)
        w = (torch.randn(32 * rows, 64 * columns) * torch.randn(32 * rows, 1).exp()).to(torch.bfloat16)
        theirs = torchao_weight(kind, w)
        tensors, metadata = flatten_tensor_state_dict({"a.weight": theirs, "a.bias": torch.zeros(4)})
        path = tmp_path_factory.mktemp("ao")
        save_file(tensors, path / "model.safetensors", metadata=metadata)
        with Folder(path) as folder:
            (layer,) = layers(folder).layers
            assert layer.why == "" and layer.shape == tuple(w.shape)
            decoded = module_of(layer).dequantize(weights(folder, layer)[0], torch.float32)
        wanted = theirs.dequantize().float() if kind == "intx" else theirs.dequantize(torch.float32)
        assert same_bits(decoded, wanted)

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "swizzled" not in kind])
def test_its_experts_are_read(tmp_path: Path, kind: str) -> None:
    """In one tensor [E, N, K], whose name is that of the weight; one scale may be that of all."""
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    torch.manual_seed(0)
    theirs = torchao_weight(kind, (torch.randn(3, 32, 128) * torch.randn(3, 32, 1).exp()).to(torch.bfloat16))
    tensors, metadata = flatten_tensor_state_dict({"a.experts.gate_up_proj": theirs})
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    with Folder(tmp_path) as folder:
        (layer,) = layers(folder).layers
        assert (layer.name, layer.why, layer.shape, layer.experts) == ("a.experts.gate_up_proj", "", (32, 128), 3)
        decoded = torch.stack([module_of(layer).dequantize(expert, torch.float32) for expert in weights(folder, layer)])
    assert same_bits(decoded, theirs.dequantize().float() if kind == "intx" else theirs.dequantize(torch.float32))


def test_experts_have_no_scales_in_tiles() -> None:
    """Which is why none are written."""
    with pytest.raises(RuntimeError):
        torchao_weight("mx fp8 swizzled", torch.randn(2, 64, 128).bfloat16())


# A format's storage that others write, and what becomes of it.
WRITTEN = [(int8_channel, "safetensors", "torchao", {}), (int8_tensor, "safetensors", "torchao", {}),
           (int_group, "int_quantized", "torchao_int8", {"bits": 8, "group": 32}),
           (fp8_channel, "safetensors", "torchao", {"scale_type": "f32"}), (fp8_tensor, "safetensors", "torchao", {}),
           (fp8_block, "safetensors", "torchao", {"bn": 32, "bk": 64}), (nvfp4_modelopt, "modelopt", "torchao", {}),
           (nvfp4_modelopt, "modelopt", "torchao_swizzled", {}),
           *((format, "compressed_tensors", to, options) for to in ("torchao", "torchao_swizzled") for format, options in (
               (ocp_mxfp4, {}), (ocp_mxfp6, {"code": "e2m3"}), (ocp_mxfp6, {"code": "e3m2"}), (ocp_mxfp8, {"code": "e4m3"}),
               (ocp_mxfp8, {"code": "e5m2"})))]


@pytest.mark.parametrize(("format", "storage", "to", "options"), WRITTEN)
def test_it_loads_what_is_written(tmp_path: Path, format: Any, storage: str, to: str, options: dict[str, Any]) -> None:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

    packed = format.quantize(torch.randn(96, 192), storage, **options)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", {**{f"m.a.{name}": tensor for name, tensor in packed.tensors.items()},
                                                  "m.norm.weight": torch.ones(8)}, {"format": "pt"})
    says = {"quant_method": "qdsl", "format": format.FORMAT.name, "storage": storage, **packed.params}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": says}))
    with Folder(tmp_path / "in") as folder:
        convert(folder, layers(folder), parse_conversion(to), tmp_path / "out")
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        assert is_metadata_torchao(file.header.metadata)
        loaded, unread = unflatten_tensor_state_dict({name: file.tensor(name) for name in file.names()}, file.header.metadata)
    assert unread == {} and loaded.keys() == {"m.a.weight", "m.norm.weight"} and loaded["m.a.weight"].shape == (96, 192)
    assert same_bits(loaded["m.a.weight"].dequantize(torch.float32), format.dequantize(packed, torch.float32))


@pytest.mark.parametrize(("format", "storage", "to", "options"), [
    case for case in WRITTEN if "swizzled" not in case[2] and case[0] is not nvfp4_modelopt])
def test_it_loads_experts_that_are_written(tmp_path: Path, format: Any, storage: str, to: str, options: dict[str, Any]) -> None:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    packed = [format.quantize(torch.randn(96, 192), storage, **options) for _ in range(2)]
    tensors = {name: torch.stack([one.tensors[name] for one in packed]) for name in packed[0].tensors}
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "model.safetensors", {
        f"m.up{name.removeprefix('weight')}": tensor for name, tensor in tensors.items()})
    says = {"quant_method": "qdsl", "format": format.FORMAT.name, "storage": storage, **packed[0].params}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": says}))
    with Folder(tmp_path / "in") as folder:
        convert(folder, layers(folder), parse_conversion(to), tmp_path / "out")
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        loaded, unread = unflatten_tensor_state_dict({name: file.tensor(name) for name in file.names()}, file.header.metadata)
    assert unread == {} and loaded.keys() == {"m.up"} and loaded["m.up"].shape == (2, 96, 192)
    wanted = torch.stack([format.dequantize(one, torch.float32) for one in packed])
    assert same_bits(loaded["m.up"].dequantize(torch.float32), wanted)


def test_its_configs_are_what_pages_say() -> None:
    """The quant_type that is written becomes an object of theirs, of the version that they have."""
    from torchao.core.config import config_from_dict

    configs = [rule["with"]["quant_type"]["default"] for format in descriptions() for rule in _rules(format.detect.get("config"))
               if "quant_type" in rule.get("with", {})]
    assert {settings["_type"] for settings in configs} >= {"Int8WeightOnlyConfig", "MXDynamicActivationMXWeightConfig"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")                           # of another version
        for settings in configs:
            assert type(config_from_dict(settings)).__name__ == settings["_type"]


def _rules(rules: Any) -> list[dict[str, Any]]:
    return rules if isinstance(rules, list) else [rules] if rules else []
