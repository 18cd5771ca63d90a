"""Weights that other packages wrote, and what they decode to: bit for bit in float32, and back byte for byte.

tests/data/README.md says which package wrote which file.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.generated import (
    bf16,
    f16,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_channel,
    int8_tensor,
    int_group,
    mlx,
    nf4,
    nvfp4_ct,
    nvfp4_modelopt,
    ocp_mxfp4,
    ocp_mxfp6,
    ocp_mxfp8,
    openvino_nf4,
    qserve,
    quanto,
)
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from tests.support.formats import ROOT, SHIPPED, assert_same, canonical, module, raw, same_bits
from tests.support.interpreter import INTERPRETED, guarded

DATA = ROOT / "tests" / "data"
CHECKPOINTS = sorted(path for path in (DATA / "ckpt").glob("*.npz") if not path.name.startswith(("ct_pack_oldnew", "ao_int4")))
GGUF = {path.stem: module(path) for path in SHIPPED if "\n  gguf:\n" in path.read_text()}
BY_NAME = (("gptq", int_group), ("autogptq", int_group), ("awq", int_group), ("ct_pack", int_group),
           ("modelopt_int4awq", int_group), ("openvino_nf4", openvino_nf4), ("openvino_", int_group),
           ("trt_llm", int_group), ("ct_int8_tensor", int8_tensor),
           ("ct_int8", int8_channel), ("ct_fp8_block", fp8_block), ("ds_fp8_block", fp8_block), ("hf_fp8_block", fp8_block),
           ("ct_fp8_channel", fp8_channel), ("ct_fp8_tensor", fp8_tensor), ("hf_fp8_tensor", fp8_tensor),
           ("fp8_tensor", fp8_tensor), ("bnb_nf4", nf4), ("ct_nvfp4", nvfp4_ct), ("modelopt_nvfp4", nvfp4_modelopt),
           ("ao_nvfp4", nvfp4_modelopt), ("ct_mxfp4", ocp_mxfp4), ("modelopt_mxfp4", ocp_mxfp4), ("ao_mx_e2m1", ocp_mxfp4),
           ("gptoss", ocp_mxfp4), ("hf_fp8_expert_fp4", ocp_mxfp4), ("ct_mxfp6", ocp_mxfp6), ("ao_mx_e2m3", ocp_mxfp6),
           ("ao_mx_e3m2", ocp_mxfp6), ("ct_mxfp8", ocp_mxfp8), ("ao_mx_e4m3", ocp_mxfp8), ("ao_mx_e5m2", ocp_mxfp8),
           ("mlx_affine", mlx), ("mlx_mxfp4", ocp_mxfp4), ("mlx_mxfp8", ocp_mxfp8),
           ("mlx_nvfp4", nvfp4_modelopt), ("onnx_", int_group), ("quanto_qint8", int8_channel),
           ("quanto_qfloat8", fp8_channel), ("eetq_", int8_channel), ("quanto_", quanto), ("qserve_", qserve))
# How producers quantize where it is not the format's default.  transformers rounds an inverse first.
RULES: tuple[tuple[str, dict[str, str | bool]], ...] = (
    ("ct_pack*_sym", {"symmetric": True}),
    ("hf_", {"by": "inverse"}), ("ct_mxfp8", {"power": "half"}), ("ct_mxfp", {"power": "even"}),
    ("modelopt_mxfp4", {"power": "up", "ties": "zero", "zeros": "negative"}), ("ao_mx_*_rceil", {"power": "up"}),
    ("ao_mx_*_ceil", {"power": "ceil"}), ("ao_mx_*_even", {"power": "even"}), ("", {}))
# The producer stored a zero point of 0 one too small without carrying the borrow: no reader gets its weights back.
CORRUPT = "autogptq_v1_b4_ge0_g32_N64_K128"
# Its producer decoded rounded floats, of which some are -0.
NEGATIVE_ZEROS = ("ct_pack4_actorder_gidx_g32_N64_K128", "modelopt_int4awq_N32_K128")
# Quantized with zero points, which is another scheme than the format's own.
ASYMMETRIC = "ct_int8_channel_asym_N64_K96"


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in the dtypes that its description names."""
    with np.load(path) as file:
        dtypes = json.loads(str(file["meta"]))["dtypes"]
        named = {name: torch.from_numpy(file[name].copy()) for name in file.files if name != "meta"}
    special = {"bf16": torch.bfloat16, "f8_e4m3fn": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
               "f8_e8m0fnu": torch.float8_e8m0fnu}
    return {name: tensor.view(special[dtypes[name]]) if dtypes.get(name) in special else tensor for name, tensor in named.items()}


def disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("disk."): tensor for name, tensor in tensors.items() if name.startswith("disk.")}


def format_of(path: Path) -> ModuleType:
    return next(module for prefix, module in BY_NAME if path.name.startswith(prefix))


def storage_of(path: Path) -> str | None:
    if path.name.startswith("autogptq") or "_planar_" in path.name:
        return "gptq_v1" if path.name.startswith("autogptq") else "gptq_p"
    return "gptq_v2" if path.name.startswith("gptq") else None


def params_of(path: Path) -> dict[str, int | str]:
    """Parameters that the tensors do not say: of codes in bytes their type; 8 bits of one packing look like 7 of another."""
    if path.name.startswith("ao_mx_") and format_of(path) is not ocp_mxfp4:
        return {"code": path.name.split("_")[2]}
    if path.name.startswith("mlx_affine"):
        return {"bits": int(path.name[10]), "group": int(path.name.split("_")[2][1:])}
    return {"bits": int(path.name[7])} if path.name.startswith("ct_pack") else {}


def weight_of(tensors: dict[str, Tensor]) -> Tensor:
    """float32 [N, K]; experts one after the other, and of codes with scales what they come to."""
    if "scale_eff_NG" in tensors:
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        return tensors["scale_eff_NG"].repeat_interleave(16, 1) * levels[tensors["codes"].int()]
    return tensors["dequant_f32"] if "dequant_f32" in tensors else tensors["dequant_f32_EOI"].flatten(0, 1)


def check(module: ModuleType, packed: PackedWeight, weight: Tensor) -> None:
    """Reference and kernel give these weights, and packing the fields gives these bytes."""
    assert_same(module.dequantize(packed, torch.float32), weight, packed, "reference")
    assert_same(kernel(packed), weight, packed, "kernel")
    again = module.pack(module.unpack(packed), storage=packed.storage, **packed.params)
    assert again.tensors.keys() == packed.tensors.keys()
    assert all(same_bits(again.tensors[name], tensor) for name, tensor in packed.tensors.items())


def kernel(packed: PackedWeight) -> Tensor:
    device = "cpu" if INTERPRETED else "cuda"
    packed, columns = packed.to(device).as_stored(), packed.order
    out = torch.full(packed.shape, torch.nan, device=device)
    with guarded(packed, out):
        launch.dequantize(packed, out)
    return out.cpu() if columns is None else torch.empty(out.shape).index_copy_(1, columns.long(), out.cpu())


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_checkpoint(path: Path) -> None:
    tensors = read(path)
    module = format_of(path)
    weight = weight_of(tensors) + (0 if path.stem in NEGATIVE_ZEROS else -0.0)
    packed = module.wrap(disk(tensors), shape=tuple(weight.shape), storage=storage_of(path), **params_of(path))
    if path.stem == CORRUPT:
        again = module.pack(module.unpack(packed), storage="gptq_v1", **packed.params)
        assert all(same_bits(again.tensors[name], tensor) for name, tensor in packed.tensors.items())
        assert not same_bits(module.dequantize(packed), weight)
        return
    check(module, packed, weight)
    fields = module.unpack(packed)
    if "codes" in tensors:
        assert torch.equal(fields["q"].int(), tensors["codes"].int().view(weight.shape))
    if "codes_signed" in tensors and module is int_group:
        assert torch.equal(fields["q"].int() - 2 ** (int(packed.params["bits"]) - 1), tensors["codes_signed"].int())


@pytest.mark.parametrize("path", [p for p in CHECKPOINTS if p.name.startswith("gptq") and storage_of(p) == "gptq_v2"],
                         ids=lambda path: path.stem)
def test_both_versions_of_gptq_are_one_weight(path: Path) -> None:
    """gptq_v1 stores zero points less one, borrows and all; converting between the two gives the other's bytes."""
    tensors = read(path)
    new = int_group.wrap(disk(tensors), storage="gptq_v2")
    old = int_group.wrap({**disk(tensors), "qzeros": tensors["disk_v1.qzeros"]}, storage="gptq_v1")
    check(int_group, old, tensors["dequant_f32"])
    assert same_bits(int_group.convert(new, "gptq_v1").tensors["qzeros"], old.tensors["qzeros"])
    assert same_bits(int_group.convert(old, "gptq_v2").tensors["qzeros"], new.tensors["qzeros"])


@pytest.mark.parametrize("path", [p for p in CHECKPOINTS if "_act" in p.name], ids=lambda path: path.stem)
def test_act_order_goes_into_the_planar_storage_and_back(path: Path) -> None:
    tensors = read(path)
    packed = int_group.wrap(disk(tensors), storage=storage_of(path))
    planar = int_group.convert(packed, "planar")
    assert planar.order is not None
    check(int_group, planar, tensors["dequant_f32"] + (0 if path.stem in NEGATIVE_ZEROS else -0.0))
    back = int_group.convert(planar, packed.storage)
    assert back.tensors.keys() == packed.tensors.keys()
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())


@pytest.mark.parametrize("path", [p for p in CHECKPOINTS if "awq_gemm" in p.name], ids=lambda path: path.stem)
def test_awq_converts_to_gptq_without_a_change(path: Path) -> None:
    tensors = read(path)
    packed = int_group.wrap(disk(tensors))
    assert packed.storage == "awq"
    moved = int_group.convert(packed, "gptq_v2")
    check(int_group, moved, tensors["dequant_f32"])
    assert same_bits(int_group.convert(moved, "awq").tensors["qweight"], packed.tensors["qweight"])


@pytest.mark.parametrize("path", [p for p in CHECKPOINTS if "W" in read(p) and p.stem != ASYMMETRIC
                                  and format_of(p) is not nf4], ids=lambda path: path.stem)
def test_quantizing_gives_the_producers_bytes(path: Path) -> None:
    tensors = read(path)
    module = format_of(path)
    packed = module.wrap(disk(tensors), tuple(tensors["W"].shape), **params_of(path))
    options = next(rule for pattern, rule in RULES if fnmatch(path.name, f"{pattern}*"))
    quantized = module.quantize(tensors["W"], packed.storage, **{**packed.params, **options})
    assert quantized.tensors.keys() == packed.tensors.keys()
    assert all(same_bits(quantized.tensors[name], tensor) for name, tensor in packed.tensors.items())


@pytest.mark.parametrize("path", sorted((DATA / "ckpt").glob("ct_pack_oldnew*")), ids=lambda path: path.stem)
def test_bits_are_packed_in_two_ways(path: Path) -> None:
    """compressed-tensors before 0.18 and from there on: told apart by shape, and each made from the other; others in one."""
    tensors = read(path)
    codes = tensors["codes_signed"].int()
    bits = int(path.stem.split("_b")[1][0])
    storages = ["pack_quantized_0_17" if 32 % bits else "pack_quantized", "pack_quantized"]
    both = [int_group.wrap({"weight_packed": tensors[key], "weight_scale": torch.ones(len(codes), 1),
                            "weight_shape": torch.tensor(codes.shape)}, bits=bits)
            for key in ("old.weight_packed", "new.weight_packed")]
    assert [packed.storage for packed in both] == storages
    for packed, other in zip(both, reversed(both), strict=True):
        check(int_group, packed, codes.float())
        assert same_bits(int_group.convert(packed, other.storage).tensors["weight_packed"], other.tensors["weight_packed"])


def test_torchao_packs_for_xpu_as_the_storage_does() -> None:
    tensors = read(DATA / "ckpt" / "ao_int4_tinygemm_g32_N64_K128.npz")
    fields = {"q": tensors["codes"], "z": torch.full((64, 4), 8, dtype=torch.uint8), "s": torch.ones(64, 4)}
    packed = int_group.pack(fields, "xpu_int4pack", group=32)
    assert same_bits(packed.tensors["qweight"], tensors["xpu.int32"])
    assert packed.tensors["qzeros"].dtype == torch.int8 and set(packed.tensors["qzeros"].flatten().tolist()) == {8}


def test_the_shape_is_what_its_tensor_says() -> None:
    """And a part of the weight says its own."""
    tensors = disk(read(DATA / "ckpt" / "ct_pack4_channel_asym_oddN_N37_K90.npz"))
    packed = int_group.wrap(tensors)
    assert packed.shape == (37, 90)
    assert packed.cut("N", 8, 24).tensors["weight_shape"].tolist() == [16, 90]
    with pytest.raises(FormatError, match=r"'weight_shape' says \[37, 90\], not \[37, 96\]"):
        int_group.wrap(tensors, shape=(37, 96))
    with pytest.raises(FormatError, match="says"):
        int_group.FORMAT.checked(packed.derive({**packed.tensors, "weight_shape": torch.tensor([37, 96])}))


def test_marlin_has_other_scales_for_a_single_group() -> None:
    with pytest.raises(FormatError, match="of 2 or more"):
        int_group.quantize(torch.randn(64, 128), "marlin", group=-1, symmetric=True)


def test_every_type_of_blocks_has_goldens() -> None:
    assert set(GGUF) == {path.stem for path in (DATA / "gguf").glob("*.npz")} - {"bf16", "f16", "inputs"}


@pytest.mark.parametrize("rows", ["gauss", "edge"])
@pytest.mark.parametrize("name", sorted(GGUF.keys() - {"q8_1"}))      # ggml has no decoder for Q8_1
def test_gguf_rows(name: str, rows: str) -> None:
    with np.load(DATA / "gguf" / f"{name}.npz") as file:
        packed = GGUF[name].wrap({"blocks": torch.from_numpy(file[f"q_{rows}"])})
        check(GGUF[name], packed, torch.from_numpy(file[f"y_{rows}"]))


@pytest.mark.parametrize("rows", ["rand", "ext"])
@pytest.mark.parametrize("name", sorted(GGUF.keys() - {"q8_1"}))
def test_gguf_blocks_of_any_bytes(name: str, rows: str) -> None:
    """Scales that are subnormal, infinite or no number too; a NaN's bits are not compared."""
    with np.load(DATA / "gguf" / f"{name}.npz") as file:
        packed = GGUF[name].wrap({"blocks": torch.from_numpy(file[f"raw_{rows}"])})
        weight = torch.from_numpy(file[f"y_{rows}"]).view(packed.shape)
    for output in (GGUF[name].dequantize(packed, torch.float32), kernel(packed)):
        assert torch.equal(output.isnan(), weight.isnan())
        assert same_bits(output.nan_to_num(0), weight.nan_to_num(0))
    again = GGUF[name].pack(GGUF[name].unpack(packed))
    assert same_bits(again.tensors["blocks"], canonical(packed)["blocks"])


# Of the others errors are compared, in test_iq.py.
QUANTIZED = sorted(name for name, module in GGUF.items() if module.FORMAT.variant({}).encode is not None
                   and name not in json.loads((DATA / "gguf" / "errors.json").read_text()))


@pytest.mark.parametrize("rows", ["gauss", "edge"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_gguf_quantizes_to_the_same_bytes(name: str, rows: str) -> None:
    """But where C does not define the exponent: ggml casts a negative float to uint8 for MXFP4."""
    with np.load(DATA / "gguf" / "inputs.npz") as inputs, np.load(DATA / "gguf" / f"{name}.npz") as file:
        weight, wanted = torch.from_numpy(inputs[f"x_{rows}"]), torch.from_numpy(file[f"q_{rows}"])
        undefined = [list(inputs["edge_names"]).index("f32_subnormal")] if (name, rows) == ("mxfp4", "edge") else []
    blocks = GGUF[name].quantize(weight).tensors["blocks"]
    different = (blocks != wanted).any(1).nonzero().flatten().tolist()
    assert different == undefined


@pytest.mark.parametrize("rows", ["gauss_imones", "gauss_im"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_gguf_quantizes_with_an_importance_to_the_same_bytes(name: str, rows: str) -> None:
    """The files say which types an importance makes a difference for."""
    with np.load(DATA / "gguf" / "inputs.npz") as inputs, np.load(DATA / "gguf" / f"{name}.npz") as file:
        assert (f"q_{rows}" in file) == GGUF[name].FORMAT.variant({}).importance
        weight = torch.from_numpy(inputs["x_gauss"])
        wanted = torch.from_numpy(file[f"q_{rows}" if f"q_{rows}" in file else "q_gauss"])
        importance = torch.from_numpy(inputs["imatrix"]) if rows == "gauss_im" else torch.ones(512)
    assert same_bits(GGUF[name].quantize(weight, importance=importance).tensors["blocks"], wanted)


@pytest.mark.parametrize(("name", "module"), [("bf16", bf16), ("f16", f16)])
def test_gguf_halves(name: str, module: ModuleType) -> None:
    with np.load(DATA / "gguf" / "inputs.npz") as inputs, np.load(DATA / "gguf" / f"{name}.npz") as file:
        for rows in ("gauss", "edge"):
            packed = module.quantize(torch.from_numpy(inputs[f"x_{rows}"]))
            assert torch.equal(raw(packed.tensors["weight"]), torch.from_numpy(file[f"q_{rows}"]).flatten())
            check(module, packed, torch.from_numpy(file[f"y_{rows}"]))
