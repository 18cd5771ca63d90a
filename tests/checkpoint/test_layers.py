"""Which layers of a checkpoint are quantized and how, found from tensors and configs of all dialects."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.report.contents import contents
from qdsl.checkpoint.report.survey import survey, tables
from qdsl.cli import app
from qdsl.core.program import program_description
from qdsl.generated import int_group
from tests.support import checkpoints
from tests.support.checkpoints import golden
from tests.support.formats import ROOT, module, same_bits
from tests.support.layer_configs import DOWN, UP, ct, fp8, gptq, one, read

# A golden file, its producer's config, and what it is: format.storage, parameters, shape.
DETECTED: dict[str, tuple[dict[str, Any], str, dict[str, int | str], tuple[int, int]]] = {
    "gptq_b4_asym_g32_N64_K128": (gptq(bits=4, group_size=32, checkpoint_format="gptq_v2"), "int_group.gptq_v2",
                                  {"bits": 4, "group": 32}, (64, 128)),
    "gptq_b4_asym1_g-1_N96_K128": (gptq(bits=4, group_size=-1, checkpoint_format="gptq_v2"), "int_group.gptq_v2",
                                   {"bits": 4, "group": -1}, (96, 128)),
    "gptq_b3_rand_g32_N32_K96": (gptq(bits=3, group_size=32, format="gptq_v2"), "int_group.gptq_v2",
                                 {"bits": 3, "group": 32}, (32, 96)),
    "autogptq_v1_b8_ge1_g32_N32_K96": (gptq(bits=8, group_size=32), "int_group.gptq_v1", {"bits": 8, "group": 32}, (32, 96)),
    "awq_gemm_g32_N64_K128": ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                                                       "version": "GEMM"}},
                              "int_group.awq", {"bits": 4, "group": 32}, (64, 128)),
    "awq_contiguous_b3_g32_N32_K64": ({"quantization_config": {
        "quant_method": "awq", "bits": 3, "group_size": 32, "zero_point": True, "version": "gemm", "pack_dtype": "int32"}},
        "int_group.awq_contiguous", {"bits": 3, "group": 32}, (32, 64)),
    "bnb_nf4_bs64_store-uint8_N64_K128": ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
                                          "nf4.bitsandbytes", {"block": 64}, (64, 128)),
    "bnb_fp4_bs64_store-uint8_N64_K128": ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
                                          "bnb_fp4.bitsandbytes", {"block": 64}, (64, 128)),
    "bnb_int8_N64_K96": ({"quantization_config": {"load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}}, "bnb_int8.bitsandbytes",
                         {}, (64, 96)),
    "bnb_nf4_bs64_nested_store-uint8_N64_K256": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                                 "bnb_4bit_use_double_quant": True}}, "nf4_nested.bitsandbytes", {"block": 64}, (64, 256)),
    "ds_fp8_block128_ragged_N144_K96": (fp8(weight_block_size=[128, 128]), "fp8_block.safetensors",
                                        {"bn": 128, "bk": 128}, (144, 96)),
    "hf_fp8_block64x32_N64_K128": (fp8(weight_block_size=[64, 32]), "fp8_block.safetensors", {"bn": 64, "bk": 32}, (64, 128)),
    "fp8_tensor_static_N64_K128": (fp8(), "fp8_tensor.safetensors", {}, (64, 128)),
    "ct_fp8_block128_ragged_N130_K134": (ct(type="float", num_bits=8, strategy="block", block_structure=[128, 128]),
                                         "fp8_block.safetensors", {"bn": 128, "bk": 128}, (130, 134)),
    "ct_fp8_channel_N64_K128": (ct(type="float", num_bits=8, strategy="channel"), "fp8_channel.safetensors", {}, (64, 128)),
    "gptq_b5_sym_g32_planar_N64_K128": (gptq(bits=5, group_size=32, checkpoint_format="gptq_p"), "int_group.gptq_p",
                                        {"bits": 5, "group": 32}, (64, 128)),
    "awq_marlin_g128_N64_K256": ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                                                          "version": "marlin"}}, "int_group.marlin", {"group": 128}, (64, 256)),
    "ct_pack4_g32_sym_N64_K128": (ct(type="int", num_bits=4, strategy="group", group_size=32, format="pack-quantized"),
                                  "int_group.pack_quantized", {"bits": 4, "group": 32}, (64, 128)),
    "ct_pack4_channel_asym_oddN_N37_K90": (ct(type="int", num_bits=4, strategy="channel", format="pack-quantized"),
                                           "int_group.pack_quantized", {"bits": 4, "group": -1}, (37, 90)),
    "ct_pack4_channel_sym_N64_K96": (ct(type="int", num_bits=4, strategy="channel", format="pack-quantized"),
                                     "int_group.pack_quantized", {"bits": 4, "group": -1}, (64, 96)),
    "ct_pack3_g32_sym_dense_N64_K128": (ct(type="int", num_bits=3, strategy="group", group_size=32, format="pack-quantized"),
                                        "int_group.pack_quantized", {"bits": 3, "group": 32}, (64, 128)),
    "ct_pack4_actorder_gidx_g32_N64_K128": (ct(type="int", num_bits=4, strategy="group", group_size=32, format="pack-quantized"),
                                            "int_group.pack_quantized", {"bits": 4, "group": 32}, (64, 128)),
    "modelopt_int4awq_N32_K128": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ",
                                                           "group_size": 64}}, "int_group.modelopt", {"group": 64}, (32, 128)),
    "ct_int8_channel_sym_N64_K128": (ct(type="int", num_bits=8, strategy="channel"), "int8_channel.safetensors", {}, (64, 128)),
    "hf_fp8_block128_ue8m0_N128_K128": (fp8(weight_block_size=[128, 128], scale_fmt="ue8m0"), "fp8_block.safetensors",
                                        {"scale_type": "e8m0"}, (128, 128)),
    "hf_fp8_expert_fp4_N32_K128": (fp8(weight_block_size=[128, 128], expert_dtype="fp4"), "ocp_mxfp4.deepseek", {}, (32, 128)),
    "ct_nvfp4_N64_K128": (ct(type="float", num_bits=4, strategy="tensor_group", format="nvfp4-pack-quantized"),
                          "nvfp4_ct.compressed_tensors", {}, (64, 128)),
    "ct_mxfp4_N64_K128": (ct(type="float", num_bits=4, strategy="group", format="mxfp4-pack-quantized"),
                          "ocp_mxfp4.compressed_tensors", {}, (64, 128)),
    "ct_mxfp6_N64_K128": (ct(type="float", num_bits=6, strategy="group", format="mxfp6-pack-quantized"),
                          "ocp_mxfp6.compressed_tensors", {}, (64, 128)),
    "ct_mxfp8_N64_K128": (ct(type="float", num_bits=8, strategy="group", format="mxfp8-quantized"),
                          "ocp_mxfp8.compressed_tensors", {}, (64, 128)),
    "modelopt_nvfp4_N64_K128": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
                                "nvfp4_modelopt.modelopt", {}, (64, 128)),
    "modelopt_mxfp4_N64_K128": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP4"}},
                                "ocp_mxfp4.modelopt", {}, (64, 128)),
    "ct_fp8_tensor_N64_K128": (ct(type="float", num_bits=8, strategy="tensor"), "fp8_tensor.safetensors", {}, (64, 128)),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", DETECTED)
def test_a_layer_of_each_producer(tmp_path: Path, name: str, shards: int) -> None:
    """Found with the producer's config, and beside plain tensors; `wrap` makes of its tensors what it is said to be."""
    config, label, params, shape = DETECTED[name]
    plain = {"model.embed_tokens": {"weight": torch.zeros(6, 4, dtype=torch.bfloat16)},
             "model.norm": {"weight": torch.ones(4, dtype=torch.bfloat16)}}
    tensors = golden(name) | {"bias": torch.zeros(shape[0])}
    path = checkpoints.folder(tmp_path, {**plain, UP: tensors}, config, shards)
    with Folder(path) as folder:
        detected = layers(folder)
        layer = one(detected)
        assert (layer.name, f"{layer.format}.{layer.storage}", layer.shape, layer.experts) == (UP, label, shape, None)
        assert params.items() <= layer.params.items() and layer.problems == () and layer.why == ""
        assert layer.others["bias"] == f"{UP}.bias"
        assert set(detected.plain) == {"model.embed_tokens.weight", "model.norm.weight"}
        generated = module(ROOT / "specs" / f"{layer.format}.yaml")
        stored = {own: folder.tensor(full) for own, full in layer.tensors.items()}
        stored |= {own: torch.tensor(number) for own, number in layer.numbers.items()}
        packed = generated.wrap(stored, layer.shape, layer.storage, **layer.params)
        assert packed.params == layer.params
        assert all(same_bits(packed.tensors[key].flatten(), stored[key].flatten()) for key in stored)


@pytest.mark.parametrize("name", [name for name in DETECTED if not any(word in name for word in ("gptq", "bnb", "contiguous"))])
def test_without_a_config_the_tensors_are_enough(tmp_path: Path, name: str) -> None:
    _, label, _, shape = DETECTED[name]
    layer = one(read(checkpoints.folder(tmp_path, {UP: golden(name)})))
    assert (f"{layer.format}.{layer.storage}", layer.shape, layer.why, layer.problems) == (label, shape, "", ())


@pytest.mark.parametrize(("name", "storage"), [("gptq_b4_sym_g32_N64_K128", "gptq_v2"), ("gptq_b8_sym_g64_N64_K128", "gptq_v2"),
                                               ("gptq_b4_rand_g32_N64_K96", "gptq_v1")])
def test_symmetric_zero_points_tell_the_version_that_a_config_leaves_open(tmp_path: Path, name: str, storage: str) -> None:
    """All 8 is a v2 file, all 7 a v1 file; where they vary, a config without the tag is of v1."""
    settings = {"bits": 8 if "b8" in name else 4, "group_size": 64 if "g64" in name else 32}
    for tag, wanted, problems in (({}, storage, 0), ({"checkpoint_format": "gptq_v2"}, "gptq_v2", 0),
                                  ({"checkpoint_format": "gptq"}, "gptq_v1", storage == "gptq_v2")):
        folder = tmp_path / "".join(tag.values() or ["none"])
        folder.mkdir()
        layer = one(read(checkpoints.folder(folder, {UP: golden(name)}, gptq(**settings, **tag))))
        assert (layer.storage, layer.why, len(layer.contradictions)) == (wanted, "", problems)
    tensors = golden(name)
    if storage == "gptq_v2":
        tensors["qzeros"] = tensors["qzeros"] - {8: 0x01010101, 4: 0x11111111}[settings["bits"]]
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors}, gptq(**settings))))
    assert (layer.storage, layer.problems) == ("gptq_v1", ())


def test_a_config_that_is_wrong_of_sizes_may_be_right_of_the_storage(tmp_path: Path) -> None:
    """Of gptq_v1 and gptq_v2, which fit alike, and the contradiction is of the layer as it is read."""
    tensors, group = golden("gptq_b4_rand_g32_N64_K96"), "config.json: quantization_config says group_size = 64; "
    for tag, storage in (({}, "gptq_v1"), ({"checkpoint_format": "gptq_v2"}, "gptq_v2")):
        folder = tmp_path / storage
        folder.mkdir()
        layer = one(read(checkpoints.folder(folder, {UP: tensors}, gptq(bits=4, group_size=64, **tag))))
        assert (layer.storage, layer.params["group"]) == (storage, 32)
        [problem] = layer.contradictions
        assert problem.startswith(f"{group}the tensors fit int_group.{storage} bits=4 group=32")
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors}, awq)))
    assert layer.format == "" and "nothing says which; config.json: quantization_config says quant_method = awq" in layer.why


@pytest.mark.parametrize("group", [256, 512, 1024])
def test_groups_of_many_columns(tmp_path: Path, group: int) -> None:
    """As gptqmodel makes them."""
    torch.manual_seed(0)
    packed = int_group.quantize(torch.randn(8, 2048), "gptq_v2", bits=4, group=group)
    config = gptq(bits=4, group_size=group, checkpoint_format="gptq_v2")
    layer = one(read(checkpoints.folder(tmp_path, {UP: dict(packed.tensors)}, config)))
    assert (layer.storage, layer.params["group"], layer.problems) == ("gptq_v2", group, ())
    fields = int_group.unpack(packed)
    scale, zero = (fields[name].float().repeat_interleave(group, 1) for name in ("s", "z"))
    assert int_group.dequantize(packed, torch.float32).equal((fields["q"].float() - zero) * scale)


def test_a_shape_that_does_not_fit_is_told_of_the_format_that_json_names(tmp_path: Path) -> None:
    tensors = golden("bnb_nf4_bs64_store-uint8_N64_K128")
    state = b'{"quant_type": "nf4", "blocksize": 64, "shape": [64, 130]}'
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    assert one(read(checkpoints.folder(tmp_path, {UP: tensors}))).why.startswith("nf4.bitsandbytes: tensor 'weight' has shape")


def test_json_beside_a_weight_says_its_shape_and_block(tmp_path: Path) -> None:
    tensors = golden("bnb_nf4_bs64_store-uint8_N64_K128")
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors})))
    assert layer.tensors == {"weight": f"{UP}.weight", "weight_absmax": f"{UP}.weight.absmax"}
    assert layer.settings == (f"{UP}.weight.quant_map", f"{UP}.weight.quant_state.bitsandbytes__nf4")
    assert layer.others == {} and layer.numbers == {}
    state = b'{"quant_type": "nf4", "blocksize": 64, "shape": [64, 129]}'
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    assert one(read(checkpoints.folder(tmp_path, {UP: tensors}))).format == ""
    for state, why in ((b'{"quant_type": "nf4", "blocksize": 48, "shape": [64, 128]}', "says block = 48"),
                       (b'{"quant_type": "fp4", "blocksize": 64, "shape": [64, 128]}', "other numbers"), (b"{", "not JSON"),
                       (b"[" * 5000, "nested deeper"), (b'{"shape": [-1, 1e999]}', "out of range"),
                       (b"[]", "not a JSON object"), (b"null", "not a JSON object"), (b'"x"', "not a JSON object"),
                       (b"5", "not a JSON object")):
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        layer = one(read(checkpoints.folder(tmp_path, {UP: tensors})))
        assert layer.format == "" and why in layer.why


@pytest.mark.parametrize(("axis", "bits", "group", "shape"), [(1, 2, 32, (64, 128)), (1, 3, 32, (64, 128)), (0, 4, 64, (64, 128)),
                                                              (0, 3, 64, (64, 96)), (1, 8, 64, (48, 128))])
def test_numbers_beside_a_weight_say_its_shape_and_axis(tmp_path: Path, axis: int, bits: int, group: int,
                                                        shape: tuple[int, int]) -> None:
    """HQQ saves what it knows of a weight as tensors, words too, letter by letter."""
    tensors = golden(f"hqq_b{bits}_axis{axis}_g{group}_N{shape[0]}_K{shape[1]}")
    says = {"axis": torch.tensor(axis, dtype=torch.int32), "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32), "shape": torch.tensor(shape)}
    others = {"packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8), "offload_meta": torch.tensor(0, dtype=torch.uint8)}
    config = {"quantization_config": {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
        "weight_quant_params": {"nbits": bits, "group_size": group, "axis": axis}}}}
    with Folder(checkpoints.folder(tmp_path, {UP: tensors | says | others}, config)) as folder:
        layer = one(layers(folder))
        assert (layer.format, layer.shape) == ("hqq" if axis else "hqq_axis0", shape)
        assert layer.params == {"bits": bits, "group": group, "scale_type": "f16"} and not layer.problems
        assert set(layer.settings) == {f"{UP}.{leaf}" for leaf in says} and set(layer.others) == set(others)
    says["shape"] = torch.tensor((shape[0], shape[1] + 1))
    assert one(read(checkpoints.folder(tmp_path, {UP: tensors | says}, config))).format == ""


def test_json_beside_a_weight_says_numbers_of_it(tmp_path: Path) -> None:
    """The mean of bitsandbytes' scales, which is in no tensor; what else is there must be what the format means."""
    name, state = "bnb_fp4_bs128_nested_store-uint8_N32_K256", "weight.quant_state.bitsandbytes__fp4"
    tensors = golden(name)
    with Folder(checkpoints.folder(tmp_path, {UP: tensors})) as folder:
        layer = one(layers(folder))
        assert (layer.format, layer.shape) == ("bnb_fp4_nested", (32, 256))
        assert layer.numbers == {"weight_nested_offset": 0.2301025390625}
        assert len(layer.settings) == 3 and not layer.others
        [weight] = weights(folder, layer)
    with np.load(next(path for path in checkpoints.GOLDENS if path.stem == name)) as file:
        assert same_bits(weight.format.dequantize(weight, torch.float32), torch.from_numpy(file["dequant_f32"]))
    fields = json.loads(bytes(tensors[state].tolist()))
    for wrong in ({**fields, "nested_offset": "0.2"}, {**fields, "nested_offset": True}, {**fields, "nested_blocksize": 128},
                  {**fields, "nested_offset": 1e39}, {**fields, "nested_offset": -10 ** 60},   # infinite in float32
                  {key: value for key, value in fields.items() if key != "nested_offset"}):
        other = tensors | {state: torch.tensor(list(json.dumps(wrong).encode()), dtype=torch.uint8)}
        assert one(read(checkpoints.folder(tmp_path, {UP: other}))).format == ""
    other = tensors | {"weight.nested_quant_map": tensors["weight.nested_quant_map"] * 2}
    assert "'weight.nested_quant_map' holds other numbers" in one(read(checkpoints.folder(tmp_path, {UP: other}))).why


def test_bytes_that_a_file_holds_as_larger_numbers(tmp_path: Path) -> None:
    """bitsandbytes' quant_storage: JSON says all there is, so that the dtype need not."""
    name = "bnb_nf4_bs64_nested_store-bfloat16_N64_K128"
    with Folder(checkpoints.folder(tmp_path, {UP: golden(name)}, {"quantization_config": {"load_in_4bit": True}})) as folder:
        layer = one(layers(folder))
        assert folder.entry(layer.tensors["weight"]).dtype == "BF16" and layer.format == "nf4_nested" and not layer.problems
        [weight] = weights(folder, layer)
    with np.load(next(path for path in checkpoints.GOLDENS if path.stem == name)) as file:
        assert same_bits(weight.format.dequantize(weight, torch.float32), torch.from_numpy(file["dequant_f32"]))
    for claimed in ({"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}):
        layer = one(read(checkpoints.folder(tmp_path, {UP: golden(name)}, {"quantization_config": claimed})))
        assert len(layer.contradictions) == 1
    alone = {"weight": golden(name)["weight"], "weight.absmax": golden(name)["weight.absmax"]}
    assert one(read(checkpoints.folder(tmp_path, {UP: alone}))).format == ""


@pytest.mark.parametrize(("bits", "k"), [(3, 90), (5, 30), (6, 15), (7, 15)])
@pytest.mark.parametrize("storage", ["pack_quantized", "pack_quantized_0_17"])
def test_padding_tells_packings_of_one_shape(tmp_path: Path, bits: int, k: int, storage: str) -> None:
    """compressed-tensors' old words and its new ones, of as many columns as take as many of both."""
    weight = torch.randn(40, k, generator=torch.Generator().manual_seed(0))
    packed = int_group.quantize(weight, storage, bits=bits, group=-1, symmetric=True)
    other = int_group.convert(packed, "pack_quantized" if "17" in storage else "pack_quantized_0_17")
    assert packed.tensors["weight_packed"].shape == other.tensors["weight_packed"].shape
    settings = ct(type="int", num_bits=bits, strategy="channel", format="pack-quantized")
    layer = one(read(checkpoints.folder(tmp_path, {UP: packed.tensors}, settings)))
    assert (layer.storage, layer.params["bits"], layer.problems) == (storage, bits, ())


@pytest.mark.parametrize("k", [64, 96, 128])
def test_one_group_is_that_of_the_settings(tmp_path: Path, k: int) -> None:
    """A scale for each row is that of a group of a channel, or of the columns that there are; and of several, of no channel."""
    packed = int_group.quantize(torch.randn(8, k), "pack_quantized", bits=4, group=128, symmetric=True)
    tensors = {UP: packed.tensors}
    for number, (config, group) in enumerate(((ct(type="int", num_bits=4, strategy="channel", format="pack-quantized"), -1),
                                              (ct(type="int", num_bits=4, strategy="group", group_size=128,
                                                  format="pack-quantized"), 128), (None, 128))):
        (tmp_path / str(number)).mkdir()
        layer = one(read(checkpoints.folder(tmp_path / str(number), tensors, config)))
        assert (layer.storage, layer.params["group"], layer.problems) == ("pack_quantized", group, ())
    several = int_group.quantize(torch.randn(8, k), "pack_quantized", bits=4, group=32, symmetric=True)
    layer = one(read(checkpoints.folder(tmp_path, {UP: several.tensors},
                                        ct(type="int", num_bits=4, strategy="channel", format="pack-quantized"))))
    assert layer.params["group"] == 32 and "strategy = channel" in layer.contradictions[0]


def test_thousands_of_layers_are_quick(tmp_path: Path) -> None:
    """As many as DeepSeek-V3 has in a few layers: headers alone, so that tensors may be tiny."""
    entries: dict[str, Any] = {}
    experts = [f"model.layers.{i}.mlp.experts.{e}" for i in range(10) for e in range(256)]
    for name in [f"{expert}.{leaf}_proj" for expert in experts for leaf in ("gate", "up")]:
        end = 6 * (len(entries) // 2)
        entries[f"{name}.weight"] = {"dtype": "F8_E4M3", "shape": [1, 2], "data_offsets": [end, end + 2]}
        entries[f"{name}.weight_scale_inv"] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [end + 2, end + 6]}
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3 * len(entries)))
    (tmp_path / "config.json").write_text(json.dumps(fp8(weight_block_size=[128, 128], modules_to_not_convert=["gate"])))
    with Folder(path) as folder:
        start = time.process_time()
        detected = layers(folder)
        assert len(detected.layers) == 5120 and time.process_time() - start < 2
        data = survey(folder, detected)
    (heads, rows, _), *_ = tables(data)
    assert heads[0] == "layers"
    kinds = [f"model.layers.{{0-9}}.mlp.experts.{{0-255}}.{name}_proj" for name in ("gate", "up")]
    assert [row[:2] for row in rows] == [[kind, "2560"] for kind in kinds]


def test_experts_one_after_the_other(tmp_path: Path) -> None:
    tensors = {leaf: torch.stack([tensor] * 3) for leaf, tensor in golden("hf_fp8_block128_N128_K128").items()}
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors}, fp8(weight_block_size=[128, 128]))))
    assert (layer.format, layer.shape, layer.experts) == ("fp8_block", (128, 128), 3)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    tensors = golden("gptoss_mxfp4_E2_O48_I64")
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}
    layer = one(read(checkpoints.folder(tmp_path, {"model.layers.0.mlp.experts": tensors}, config)))
    assert (layer.name, layer.format, layer.storage, layer.problems) == ("model.layers.0.mlp.experts.gate_up_proj", "ocp_mxfp4",
                                                                        "gpt_oss", ())
    assert (layer.shape, layer.experts) == ((48, 64), 2)


def test_inspect_prints_a_page_and_data(tmp_path: Path) -> None:
    """Layers that are alike are a line; names from files give a terminal no orders; JSON has all, and no Infinity."""
    whole, plain = golden("hf_fp8_block128_N128_K128"), {"weight": torch.zeros(128, 128)}
    modules = {"lm_head": plain, **{f"model.layers.{i}.mlp.up_proj": whole for i in range(4) if i != 2},
               "model.layers.2.mlp.up_proj": {"weight": whole["weight"]}}
    config = fp8(weight_block_size=[128, 128], modules_to_not_convert=["lm_head"], limit=float("inf"))
    other = {"hf_quant_config.json": {"quantization": {"quant_method": "\x1b[2J"}}}
    path = checkpoints.folder(tmp_path, modules, config, files=other)
    result = CliRunner().invoke(app, ["inspect", str(path)], catch_exceptions=False)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[lines.index("layers format shape bits parameters beside by") + 1:][:2] == [
        "model.layers.{0-1,3}.mlp.up_proj 3 fp8_block.safetensors 128 x 128 8.002 bn=128 bk=128 scale_type=f32", ""]
    assert "lm_head.weight 1 F32 128 x 128 lm_head (transformers)" in lines and all(map(str.isprintable, lines))
    assert lines[lines.index("warnings") + 1:][:2] == [
        "1 hf_quant_config.json: quantization says quant_method = \\x1b[2j, config.json: quantization_config fp8",
        "model.layers.2.mlp.up_proj 1 fp8_block.safetensors needs tensor 'weight_scale_inv'; given are weight"]
    data = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(path)]).stdout, parse_constant=pytest.fail)
    assert len(data["layers"]) == 4 and len(data["warnings"]) == 2 and data["contradictions"] == []
    assert data["quantization"][0]["settings"]["limit"] == "inf"
    assert data["layers"][0] == {
        "name": "model.layers.0.mlp.up_proj", "format": "fp8_block", "storage": "safetensors", "shape": [128, 128],
        "params": {"bn": 128, "bk": 128, "scale_type": "f32"}, "experts": None, "transposed": False, "settings": [], "others": {},
        "by": "", "bits_per_weight": 8 + 32 / 128 ** 2,
        "tensors": {leaf: f"model.layers.0.mlp.up_proj.{leaf}" for leaf in ("weight", "weight_scale_inv")}}
    assert {row["name"]: row["by"] for row in data["plain"]}["lm_head.weight"] == "lm_head (transformers)"


def test_inspect_says_what_lies_beside_a_weight(tmp_path: Path) -> None:
    """A bias, and scales of x, which a reader of the page is to know of."""
    tensors = {**golden("modelopt_int4awq_N32_K128"), "bias": torch.zeros(32), "pre_quant_scale": torch.ones(128)}
    path = checkpoints.folder(tmp_path, {UP: tensors})
    lines = CliRunner().invoke(app, ["inspect", str(path)]).stdout.splitlines()
    heads = next(line for line in lines if line.startswith("layers "))
    row = lines[lines.index(heads) + 1]
    others = row[heads.index("beside"):heads.index(" by")].strip()
    assert {*others.split(", ")} == {"bias", "multiply by pre_quant_scale"}


def test_ends_of_names(tmp_path: Path) -> None:
    """Two weights in one module, whose tensors differ by the ends of their last parts, as gpt-oss has its experts."""
    experts = program_description({"name": "x",
                                   "variants": {(): {"fields": {}, "cuts": ("N", "K"), "storages": {"s": {"tensors": {
        "blocks": ("u8", "N", "K/32", "16", {"aliases": ("_blocks",)}), "scales": ("u8", "N", "K/32", {"aliases": ("_scales",)}),
    }}}}}})
    leaves = {f"{name}_{leaf}": torch.zeros(2, n, 3, *more, dtype=torch.uint8)
              for name, n in (("gate_up_proj", 8), ("down_proj", 4)) for leaf, more in (("blocks", (16,)), ("scales", ()))}
    path = checkpoints.folder(tmp_path, {"mlp.experts": leaves | {"down_proj_bias": torch.zeros(2, 4)}})
    with Folder(path) as folder:
        detected = layers(folder, [experts])
    assert {layer.name: (layer.format, layer.shape, layer.experts, layer.tensors["blocks"]) for layer in detected.layers} == {
        "mlp.experts.gate_up_proj": ("x", (8, 96), 2, "mlp.experts.gate_up_proj_blocks"),
        "mlp.experts.down_proj": ("x", (4, 96), 2, "mlp.experts.down_proj_blocks")}
    assert detected.plain == ["mlp.experts.down_proj_bias"]


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    path = checkpoints.folder(tmp_path, {UP: golden("awq_gemm_g32_N64_K128")})
    program = ("import sys\nfrom qdsl.checkpoint.files.folder import Folder\nfrom qdsl.checkpoint.detect.layers import layers\n"
               f"assert layers(Folder({str(path)!r})).layers[0].storage == 'awq'\n"
               "assert not {'torch', 'numpy', 'yaml', 'jinja2'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# -- producers that are read in part -------------------------------------------------------------------------------------


def quark(exclude: list[str], layers: dict[str, object], **weight: object) -> dict[str, Any]:
    """A config as AMD Quark 0.13 writes it."""
    whole = {"bias": None, "input_tensors": None, "output_tensors": None, "target_device": None, "weight": {
        "block_size": None, "ch_axis": 0, "group_size": None, "is_dynamic": False, "is_scale_quant": False,
        "mx_element_dtype": None, "observer_cls": "PerChannelMinMaxObserver",
        "round_method": "half_even", "scale_format": None, "scale_type": "float",
        "symmetric": True, "zero_point_type": "int32", **weight}}
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
              "weight_merge_groups": None}
    return {"quantization_config": {
        "algo_config": None, "exclude": exclude, "export": export, "global_quant_config": whole, "kv_cache_post_rope": False,
        "kv_cache_quant_config": {}, "layer_quant_config": layers, "layer_type_quant_config": {}, "quant_method": "quark",
        "quant_mode": "eager_mode", "softmax_quant_spec": None, "version": "0.13"}}


BYTE_CODES, SIX_BITS = torch.zeros(64, 64, dtype=torch.int8), torch.zeros(64, 48, dtype=torch.uint8)
QUARK = {
    "fp8_tensor": ("fp8_e4m3", "per_tensor", {"weight": BYTE_CODES.to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}),
    "fp8_channel": ("fp8_e4m3", "per_channel", {"weight": BYTE_CODES.to(torch.float8_e4m3fn), "weight_scale": torch.ones(64)}),
    "int8_channel": ("int8", "per_channel", {"weight": BYTE_CODES, "weight_scale": torch.ones(64),
                                             "weight_zero_point": torch.zeros(64, dtype=torch.int8)}),
    "int8_tensor": ("int8", "per_tensor", {"weight": BYTE_CODES, "weight_scale": torch.ones(()),
                                           "weight_zero_point": torch.zeros((), dtype=torch.int8)}),
    "ocp_mxfp4": ("fp4", "per_group", {"weight": torch.zeros(64, 32, dtype=torch.uint8),
                                       "weight_scale": torch.zeros(64, 2, dtype=torch.uint8)}),
    "ocp_mxfp6": ("fp6_e3m2", "per_group", {"weight": SIX_BITS, "weight_scale": torch.zeros(64, 2, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("format", QUARK)
def test_quark(tmp_path: Path, format: str) -> None:
    """Its list is of names and of expressions; settings of single layers win over those of the whole."""
    dtype, scheme, tensors = QUARK[format]
    plain = {"weight": torch.ones(64, 64)}
    modules = {UP: {**tensors, "input_scale": torch.ones(())}, DOWN: plain, "lm_head": plain}
    config = quark(["lm_head", "re:.*down_proj"], {}, dtype=dtype, qscheme=scheme)
    detected = read(checkpoints.folder(tmp_path, modules, config))
    assert (one(detected).format, one(detected).problems, detected.problems) == (format, (), [])
    assert one(detected).params.get("code", "e3m2") == "e3m2"
    assert {left.name: (left.by, left.problem) for left in detected.left} == {
        DOWN: ("re:.*down_proj (regex)", ""), "lm_head": ("lm_head (glob)", "")}
    own = {"*up_proj": {"weight": {"dtype": dtype, "qscheme": scheme}}}
    config = quark(["lm_head", DOWN], own, dtype="int4", qscheme="per_group")
    assert one(read(checkpoints.folder(tmp_path, modules, config))).problems == ()


def test_a_shape_may_be_in_int32(tmp_path: Path) -> None:
    packed = int_group.quantize(torch.randn(64, 256), "pack_quantized", bits=4, group=128)
    tensors = {**packed.tensors, "weight_shape": packed.tensors["weight_shape"].int()}
    path = checkpoints.folder(tmp_path, {UP: tensors})
    layer = one(read(path))
    assert (layer.format, layer.storage, layer.why) == ("int_group", "pack_quantized", "")
    with qdsl.open(path) as checkpoint:
        assert checkpoint.weight(UP, dtype=torch.float32).equal(int_group.dequantize(packed, torch.float32))


EXL2 = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}


@pytest.mark.parametrize(("tensors", "config", "unknown_tensors"), [
    ({"weight": torch.zeros(64, 64, dtype=torch.int8)}, None, "weight I8 [64, 64]"),
    ({"qweight": torch.zeros(64, 32, dtype=torch.int8), "s_channel": torch.ones(1, 64)}, None,
     "s_channel F32 [1, 64], qweight I8 [64, 32]"),
    ({"q_weight": torch.zeros(8, 64, dtype=torch.int32), "q_groups": torch.ones(4, dtype=torch.int16)}, EXL2,
     "q_weight I32 [8, 64], q_groups I16 [4]"),
    ({"weight": torch.zeros(64, 8, dtype=torch.int32), "weight_scale": torch.ones(1, 64)},
     quark([], {}, dtype="uint4", qscheme="per_group"), "weight_scale F32 [1, 64], weight I32 [64, 8]"),
], ids=["weight", "qqq", "exl2", "quark"])
def test_unknown_ways_are_no_contradictions(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None,
                                            unknown_tensors: str) -> None:
    """And their words are no weights: sums are without them, and say so."""
    plain = {"weight": torch.ones(10, 8, dtype=torch.bfloat16)}
    report = contents(checkpoints.folder(tmp_path, {UP: tensors, "model.embed_tokens": plain}, config))
    [unknown], nbytes = report["unknown"], sum(tensor.nbytes for tensor in tensors.values())
    assert unknown["layer"] == UP and report["contradictions"] == []
    assert unknown["what"].startswith("quantized in a way that is not known: ")
    assert sorted(unknown["what"].split(": ")[1].split(", ")) == sorted(unknown_tensors.split(", "))
    assert (report["total"]["weights"], report["total"]["bits_per_weight"]) == (80, 16)
    assert report["notes"] == [f"bits per weight are without {nbytes} bytes of layers of no known format"]
