"""Settings of a checkpoint's layers: which a config says, which follow from tensors, and what is told where both differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.cli import app
from qdsl.generated import fp8_block, int_group
from tests.support import checkpoints
from tests.support.checkpoints import golden
from tests.support.layer_configs import DOWN, UP, ct, fp8, gptq, one, read


@pytest.mark.parametrize(("name", "overwritten"), [
    ("autogptq_v1_b4_ge0_g32_N64_K128", True), ("autogptq_v1_b4_ge1_g32_N64_K128", False),
    ("autogptq_v1_b3_ge1_g32_N64_K96", False)])
def test_zero_points_that_were_lost_are_told(tmp_path: Path, name: str, overwritten: bool) -> None:
    """auto-gptq writes a zero point of 0 over those above it; a warning, and the weight is read as it is."""
    tensors = golden(name)
    path = checkpoints.folder(tmp_path, {UP: tensors}, gptq(bits=int(name[13]), group_size=32))
    layer = one(read(path))
    assert layer.storage == "gptq_v1" and len(layer.problems) == overwritten
    assert all(problem.startswith(f"{UP}.qzeros: a -1 was written over the fields above it") for problem in layer.problems)
    shown = CliRunner().invoke(app, ["inspect", str(path)], catch_exceptions=False)
    assert shown.exit_code == 0 and ("written over" in shown.stdout) == overwritten
    packed = int_group.wrap(tensors, storage="gptq_v1", bits=layer.params["bits"])
    notes = [note for note in packed.notes if "written" in note]
    assert [note.startswith("tensor 'qzeros': a -1 was written") for note in notes] == [True] * overwritten


def test_what_nothing_decides_is_said(tmp_path: Path) -> None:
    layer = one(read(checkpoints.folder(tmp_path, {UP: golden("gptq_b4_asym_g32_N64_K128")})))
    assert layer.why == "the tensors fit int_group.gptq_v2 and int_group.gptq_v1, and nothing says which"
    assert layer.format == "" and set(layer.others) >= {"qweight", "qzeros", "scales"}


def test_settings_that_the_tensors_do_not_bear_out(tmp_path: Path) -> None:
    config = fp8(weight_block_size=[128, 128])
    layer = one(read(checkpoints.folder(tmp_path, {UP: golden("hf_fp8_block64x32_N64_K128")}, config)))
    assert (layer.format, layer.params["bn"], layer.params["bk"]) == ("fp8_block", 128, 32)
    assert layer.contradictions == ("config.json: quantization_config says weight_block_size = [128, 128]; the tensors fit "
                              "fp8_block.safetensors bn=128 bk=32 scale_type=f32",)


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "format": "pack-quantized"}
ASYMMETRIC = "ct_pack4_g128_asym_N64_K128", {**PACKED, "group_size": 128}
ORDERED = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}


@pytest.mark.parametrize(("name", "config", "says"), [
    (ASYMMETRIC[0], ct(**ASYMMETRIC[1], symmetric=True), "symmetric = True, but 'weight_zero_point' is there"),
    (ASYMMETRIC[0], ct(**ASYMMETRIC[1], symmetric=False, actorder=None), ""),
    ("ct_pack4_g32_sym_N64_K128", ct(**PACKED, symmetric=False), "symmetric = False, but there is no 'weight_zero_point'"),
    ("ct_pack4_g32_sym_N64_K128", ct(**PACKED, symmetric=True, actorder=None), ""),
    ("ct_pack4_g32_sym_N64_K128", ct(**PACKED, symmetric=True, actorder="weight"), ""),    # of which no tensor tells
    ("ct_pack4_g32_sym_N64_K128", ct(**PACKED, actorder="group"), "actorder = group, but there is no 'weight_g_idx'"),
    ("ct_pack4_actorder_gidx_g32_N64_K128", ct(**PACKED, actorder="group"), ""),
    ("ct_pack4_actorder_gidx_g32_N64_K128", ct(**PACKED, actorder=None), "actorder = None, but 'weight_g_idx' is there"),
    ("gptq_b4_asym1_g32_act_N64_K128", gptq(**ORDERED, desc_act=False), "desc_act = False, but 'g_idx' is not in order"),
    ("gptq_b4_asym1_g32_act_N64_K128", gptq(**ORDERED, desc_act=True), ""),
    ("gptq_b4_asym_g32_N64_K128", gptq(**ORDERED, desc_act=False), ""),
    ("gptq_b4_asym_g32_N64_K128", gptq(**ORDERED, sym=True), "sym = True, but 'qzeros' is not 0x88888888 throughout"),
    ("gptq_b4_asym_g32_N64_K128", gptq(**ORDERED, sym=False), ""),
    ("gptq_b4_sym_g32_N64_K128", gptq(**ORDERED, sym=True), ""),
    ("gptq_b4_sym_g32_N64_K128", gptq(**ORDERED, sym=False), ""),                          # as they may be by chance
    ("gptq_b4_asym_g32_N64_K128", gptq(**ORDERED, desc_act=True), ""),                     # also where they came out in order
])
def test_settings_that_follow_from_tensors(tmp_path: Path, name: str, config: dict[str, Any], says: str) -> None:
    layer = one(read(checkpoints.folder(tmp_path, {UP: golden(name)}, config)))
    assert layer.format == "int_group"
    texts = (f"config.json: quantization_config says {says}",) if says else ()
    is_harmless = "'g_idx' is not" in says or "'weight_g_idx' is there" in says      # an index is used, whatever settings say
    assert (layer.contradictions, layer.problems) == (((), texts) if is_harmless else (texts, ()))


@pytest.mark.parametrize(("zero", "rows", "says"), [
    (0x88888888, 64, ""), (0x77777777, 64, "but its words are those of int_group.gptq_v1"),
    (0x66666666, 64, "sym = True, but 'qzeros' is not 0x88888888 throughout"), (0, 0, "")])
def test_zero_points_of_symmetric_codes(tmp_path: Path, zero: int, rows: int, says: str) -> None:
    """A config that says v2 of tensors of v1 is wrong about that alone; of no tensors nothing is said."""
    tensors = int_group.quantize(torch.zeros(rows, 128), "gptq_v2", bits=4, group=32).tensors
    words = torch.full(tensors["qzeros"].shape, zero, dtype=torch.int64).to(torch.int32)
    layer = one(read(checkpoints.folder(tmp_path, {UP: {**tensors, "qzeros": words}}, gptq(**ORDERED, sym=True))))
    assert len(layer.contradictions) == bool(says) and says in "".join(layer.contradictions) and not layer.problems


@pytest.mark.parametrize(("group", "bits", "says"), [
    (16, 4, []), (None, None, []), (32, 4, ["group_size = 32, but the tensors fit nvfp4_ct of 16"]),
    (16, 8, ["num_bits = 8, but the tensors fit nvfp4_ct of 4"]),
])
def test_numbers_that_a_format_has_for_good(tmp_path: Path, group: int | None, bits: int | None, says: list[str]) -> None:
    rule = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "fixed": {"num_bits": 4, "group_size": 16}, "with": {"dynamic": False, "type": "float"}}
    format = replace(next(candidate for candidate in descriptions() if candidate.name == "nvfp4_ct"), detect={"config": [rule]})
    config = ct(format="nvfp4-pack-quantized", group_size=group, num_bits=bits, dynamic=True, type="any")
    with Folder(checkpoints.folder(tmp_path, {UP: golden("ct_nvfp4_N64_K128")}, config)) as folder:
        contradictions = one(detected_layers(folder, [format])).contradictions
    assert contradictions == tuple(f"config.json: quantization_config says {text}" for text in says)


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (6,), (6, 1), (1, 6), (3, 2)])
def test_scales_of_blocks_tell_rows_from_columns(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Flat, as well as turned, they may mean other blocks; who says N and K may give them flat."""
    tensors = fp8_block.quantize(torch.randn(256, 384), bn=128, bk=128).tensors
    tensors = {**tensors, "weight_scale_inv": tensors["weight_scale_inv"].reshape(shape)}
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors}, fp8(weight_block_size=[128, 128]))))
    if len(shape) > 1 and shape[-2:] == (2, 3):
        assert (layer.format, layer.problems) == ("fp8_block", ())
    else:
        assert layer.format == "" and f"'weight_scale_inv' has shape {list(shape)}" in layer.why
    if shape == (6,):
        assert fp8_block.wrap(tensors, (256, 384), bn=128, bk=128).shape == (256, 384)


def test_a_missing_scale(tmp_path: Path) -> None:
    tensors = golden("hf_fp8_block128_N128_K128")
    del tensors["weight_scale_inv"]
    layer = one(read(checkpoints.folder(tmp_path, {UP: tensors}, fp8(weight_block_size=[128, 128]))))
    assert layer.format == "" and layer.why == "fp8_block.safetensors needs tensor 'weight_scale_inv'; given are weight"


def test_a_scale_without_codes(tmp_path: Path) -> None:
    """Of a layer whose weight is a plain one, or in no file."""
    whole = golden("hf_fp8_block128_N128_K128")
    half = whole | {"weight": whole["weight"].bfloat16()}
    detected = read(checkpoints.folder(tmp_path, {UP: whole, DOWN: half, "norm": {"weight": torch.ones(4)}}))
    by_name = {layer.name: layer for layer in detected.layers}
    assert by_name[UP].format == "fp8_block" and by_name[DOWN].format == "" and detected.plain == ["norm.weight"]
    assert by_name[DOWN].why == "fp8_block.safetensors: tensor 'weight' has dtype bfloat16; the format needs float8_e4m3fn"


def test_a_scale_in_a_shard_that_is_missing(tmp_path: Path) -> None:
    path = checkpoints.folder(tmp_path, {UP: golden("hf_fp8_block128_N128_K128"), "norm": {"weight": torch.ones(4)}}, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        Folder(path)
    with Folder(path, partial=True) as folder:
        detected = layers(folder)
    assert one(detected).why == "'weight_scale_inv' lies in model-00002-of-00002.safetensors, which is missing"
    assert detected.problems == ["model-00002-of-00002.safetensors is missing, with 1 tensor"]


def test_layers_that_contradict_the_config(tmp_path: Path) -> None:
    """Plain where others of their kind are quantized, quantized though left alone; and a list that is heeded is none."""
    whole, plain = golden("hf_fp8_block128_N128_K128"), {"weight": torch.zeros(128, 128)}
    config = fp8(weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "layers.2.mlp.up_proj"])
    modules = {"lm_head": plain, **{f"model.layers.{i}.mlp.up_proj": whole for i in (0, 2)}, "model.layers.1.mlp.up_proj": plain,
               "model.embed_tokens": plain}
    detected = read(checkpoints.folder(tmp_path, modules, config))
    assert [(left.name, bool(left.by), bool(left.problem)) for left in detected.left] == [
        ("lm_head", True, False), ("model.embed_tokens", False, False), ("model.layers.1.mlp.up_proj", False, True)]
    assert {layer.name: layer.problems for layer in detected.layers} == {
        "model.layers.0.mlp.up_proj": (),
        "model.layers.2.mlp.up_proj": ("its config leaves it as it is, by layers.2.mlp.up_proj (transformers)",)}


def test_a_config_without_quantized_tensors(tmp_path: Path) -> None:
    detected = read(checkpoints.folder(tmp_path, {UP: {"weight": torch.zeros(8, 8)}}, gptq(bits=4, group_size=128)))
    assert detected.problems == ["config.json: quantization_config says quant_method = gptq, bits = 4, group_size = 128, but no "
                                 "tensor is quantized"]


def test_settings_of_single_layers_that_are_not_so(tmp_path: Path) -> None:
    """ModelOpt's mixed precision and auto-round's exceptions: plain, not there, and left alone with 16 bits."""
    other = "model.layers.0.mlp.gate_proj"
    modules = {UP: golden("hf_fp8_block128_N128_K128"), other: {"weight": torch.zeros(128, 128)}}
    own = {name: {"quant_algo": "FP8"} for name in (UP, other, "model.layers.0.mlp", "model.layers.9.mlp.gate_proj")}
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": own}}
    detected = read(checkpoints.folder(tmp_path, modules, config))
    assert [left.problem for left in detected.left] == ["plain, though config.json: quantization_config has settings for it"]
    assert detected.problems == ["config.json: quantization_config has settings for 'model.layers.9.mlp.gate_proj', of which "
                                 "there is no tensor"]
    config = {"quantization_config": {"quant_method": "auto-round", "bits": 4, "extra_config": {other: {"bits": 16}}}}
    [left] = read(checkpoints.folder(tmp_path, modules, config)).left
    assert (left.by, left.problem) == ("its own settings", "")


@pytest.mark.parametrize("settings", [["awq"], "awq", 4])
def test_settings_that_are_none(tmp_path: Path, settings: object) -> None:
    path = checkpoints.folder(tmp_path, {UP: golden("hf_fp8_block128_N128_K128")}, {"quantization_config": settings})
    with pytest.raises(CheckpointError, match=r"config.json: quantization_config is .* no object of settings"):
        read(path)


@pytest.mark.parametrize(("file", "data"), [
    ("config.json", {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}}),
    ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
])
def test_where_settings_lie(tmp_path: Path, file: str, data: dict[str, Any]) -> None:
    path = checkpoints.folder(tmp_path, {UP: golden("autogptq_v1_b4_ge1_g32_N64_K128")}, files={file: data})
    detected = read(path)
    assert (one(detected).storage, detected.quantizations[0].method) == ("gptq_v1", "gptq")
    assert detected.quantizations[0].source.startswith(file)


def test_settings_of_autoawq(tmp_path: Path) -> None:
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    layer = one(read(checkpoints.folder(tmp_path, {UP: golden("awq_gemm_g32_N64_K128")}, files={"quant_config.json": settings})))
    assert (layer.storage, layer.params["group"], layer.problems) == ("awq", 32, ())
