"""Layers as reports of other programs' users describe them: their weights come out right, or a sentence says why not.

Each row is a storage, what is changed in its tensors, and the config.  The weight is that of the tensors as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.rules import says_extents, says_numbers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from qdsl.models.load import LoadError
from tests.support import producer_folders

Settings = Mapping[str, Any]
LAYER = "model.layers.0.mlp.up_proj"
N = K = 64
FP8_SCALE = {"weight_scale_inv": "weight_scale"}                # a name of other producers


def factors() -> Tensor:
    return torch.linspace(0.5, 2, K)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}}


def of(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


def quark(**weight: Any) -> dict[str, Any]:
    return of("quark", global_quant_config={"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", **weight}}, export={})


def hqq(nbits: int = 4, group_size: int = 32, axis: int = 1, **more: Any) -> dict[str, Any]:
    """Settings as hqq has them of all layers, or under the tag of some."""
    weight = {"nbits": nbits, "group_size": group_size, "axis": axis, "channel_wise": True, "optimize": True, "round_zero": True}
    return {"weight_quant_params": weight, "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False, **more}


def tags(**by_tag: Any) -> dict[str, Any]:
    return of("hqq", skip_modules=["lm_head"], quant_config={tag.replace("__", "."): own for tag, own in by_tag.items()})


INT4 = ("int_group", "pack_quantized", {"bits": 4, "group": 32, "symmetric": True, "scale_type": "bf16"})
GPTQ = ("int_group", "gptq_v1", {"bits": 4, "group": 32, "symmetric": True})
AWQ = ("int_group", "awq", {"bits": 4, "group": 32})
AWQ8 = ("int_group", "awq_contiguous", {"bits": 8, "group": 32})
INT8_GROUP = ("int_group", "int_quantized", {"bits": 8, "group": 32, "symmetric": True, "scale_type": "f32"})
FP8_CHANNEL, FP8_TENSOR = ("fp8_channel", "safetensors", {}), ("fp8_tensor", "safetensors", {})
BLOCKS = ("fp8_block", "safetensors", {"bn": 32, "bk": 32, "scale_type": "f32"})
ROWS = ("fp8_block", "safetensors", {"bn": 1, "bk": 32, "scale_type": "f32"})
INT8 = ("int8_channel", "safetensors", {})
NVFP4, MXFP4 = ("nvfp4_modelopt", "modelopt", {}), ("ocp_mxfp4", "modelopt", {})
INT4_AWQ = ("int_group", "modelopt", {"bits": 4, "group": 32, "symmetric": True})
W4 = {"num_bits": 4, "group_size": 32}
GPTQ_SETTINGS = {"bits": 4, "group_size": 32}
AUTO_ROUND = {"autoround_version": "0.16.1", "sym": True, "iters": 200, "block_name_to_quantize": "model.layers"}
FP8_STATIC = {**AUTO_ROUND, "bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8, "act_data_type": "fp",
              "act_dynamic": False, "fmt": "e4m3", "activation_scheme": "static"}
AWQ_SETTINGS = {**GPTQ_SETTINGS, "zero_point": True, "version": "gemm"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.29.0"}, "ignore": ["lm_head"]}
HQQ, NF4 = ("hqq", "hqq", {"bits": 4, "group": 32}), ("nf4", "bitsandbytes", {"block": 128})
NF4_SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
ROTATED = {"transform_config": {"config_groups": {"R1": {"type": "of tomorrow", "apply": []}}}}

# name -> storage, new tensors (None: left out), config
RIGHT: dict[str, tuple[tuple[str, str, Settings], Mapping[str, Any], Settings]] = {
    "the strategy of a whole weight is the default": (FP8_TENSOR, FP8_SCALE, compressed("float-quantized", type="float")),
    "that of groups follows from their length": (INT4, {}, compressed("pack-quantized", **W4)),
    "zero points of zeros": (INT4, {"weight_zero_point": torch.zeros(N, K // 32, dtype=torch.int8)},
                             compressed("pack-quantized", strategy="group", **W4)),
    "zero points of zeros beside FP8": (FP8_CHANNEL, {**FP8_SCALE, "weight_zero_point": torch.zeros(N, 1, dtype=torch.int8)},
                                        compressed("float-quantized", type="float", strategy="channel")),
    "blocks as text": (BLOCKS, FP8_SCALE, compressed("float-quantized", type="float", strategy="block", block_structure="32x32")),
    "FP8 in groups": (ROWS, FP8_SCALE, compressed("float-quantized", type="float", strategy="group", group_size=32)),
    "W4A8 by rows": (INT8, {}, compressed("int-quantized", num_bits=4, strategy="channel")),
    "W4A8 in groups": (INT8_GROUP, {}, compressed("int-quantized", strategy="group", **W4)),
    "settings of a model in the model": (FP8_CHANNEL, {}, {"thinker_config": {"text_config": compressed(
        "float-quantized", type="float", strategy="channel")}}),
    "W4A16_NVFP4": (NVFP4, {}, of("modelopt", quant_algo="W4A16_NVFP4", group_size=16)),
    "NVFP4_AWQ": (NVFP4, {"pre_quant_scale": factors()}, of("modelopt", quant_algo="NVFP4_AWQ", group_size=16,
                                                           pre_quant_scale=True)),
    "SmoothQuant": (INT8, {"pre_quant_scale": factors()}, of("modelopt", quant_algo="W8A8_SQ_PER_CHANNEL")),
    "W4A8_AWQ": (INT4_AWQ, {"weight_scale_2": torch.tensor(0.5)}, of("modelopt", quant_algo="W4A8_AWQ", group_size=32)),
    "modelopt without quant_method": (NVFP4, {}, {"quantization_config": {
        **MODELOPT, "quant_algo": "NVFP4", "quant_library": "modelopt", "config_groups": {"group_0": {"weights": {
            "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}}}}),
    "exponents of a type of their own": (MXFP4, {"weight_scale": lambda own: own.view(torch.float8_e8m0fnu)}, of(
        "quark", global_quant_config={"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}})),
    "auto-round's FP8": (FP8_CHANNEL, {"input_scale": torch.ones(1)}, of("auto-round", packing_format="auto_round:fp8_static",
                                                                        **FP8_STATIC)),
    "auto-round's blocks": (BLOCKS, {}, of("fp8", weight_block_size=[32, 32], **{**FP8_STATIC, "group_size": [32, 32]})),
    "names that auto-round searches for": (("int_group", "gptq_v1", {"bits": 8, "group": 32, "symmetric": True}), {}, of(
        "auto-round", bits=4, group_size=32, packing_format="auto_round:auto_gptq", extra_config={"up_proj": {"bits": 8}},
        **AUTO_ROUND)),
    "W4A8_NVFP4_FP8": (NVFP4, {"pre_quant_scale": factors(), "input_scale": torch.tensor(0.1)}, of(
        "modelopt", quant_algo="W4A8_NVFP4_FP8", group_size=16, has_zero_point=False, pre_quant_scale=True)),
    "an index of 64 bits": (GPTQ, {"g_idx": lambda own: own.long()}, of("gptq", **GPTQ_SETTINGS)),
    "an index of no columns": (GPTQ, {"g_idx": torch.zeros(0, dtype=torch.int32)}, of("gptq", **GPTQ_SETTINGS)),
    "an index of rows in one group": (("int_group", "gptq_v2", {"bits": 4, "group": -1}), {"g_idx": None}, of(
        "gptq", bits=4, group_size=-1, desc_act=True, checkpoint_format="gptq_v2")),
    "FP8 in blocks of Quark": (BLOCKS, FP8_SCALE, quark(qscheme="per_block", block_size=[32, 32])),
    "awq of 8 bits by gptqmodel": (AWQ8, {}, of("awq", pack_dtype="int32", **{**AWQ_SETTINGS, "bits": 8})),
    "a name of vLLM's for awq": (AWQ, {}, of("awq_marlin", **AWQ_SETTINGS)),
    "a name of vLLM's for gptq": (GPTQ, {}, of("gptq_marlin", **GPTQ_SETTINGS)),
    "a name of transformers' for bitsandbytes": (("bnb_int8", "bitsandbytes", {}), {}, of(
        "bitsandbytes_8bit", load_in_8bit=True)),
    "a word of TensorRT-LLM's": (MXFP4, {}, of("modelopt", quant_algo="W4A8_MXFP4_MXFP8", group_size=32)),
    "compressed-tensors as its module is called": (INT4, {}, {"quantization_config": {
        **compressed("pack-quantized", strategy="group", **W4)["quantization_config"], "quant_method": "compressed_tensors"}}),
    "numbers as text": (GPTQ, {}, of("gptq", bits="4", group_size="32")),
    "numbers with a point": (INT4, {}, compressed("pack-quantized", num_bits=4.0, group_size=32.0)),
    "awq by a kernel's name": (AWQ, {}, of("awq", **{**AWQ_SETTINGS, "version": "exllama"})),
    "a method without a quant_method": (GPTQ, {}, {"quantization_config": {"method": "gptq", "format": "gptq", **GPTQ_SETTINGS}}),
    "hqq under tags": (HQQ, {}, tags(mlp__up_proj=hqq(), self_attn__q_proj=hqq(8))),
    "hqq of another tag alone": (HQQ, {}, tags(self_attn__q_proj=hqq(8))),
    "hqq of all layers and a tag": (HQQ, {}, tags(mlp__up_proj=hqq(), **hqq(8))),
    "hqq of a tag that is null": (HQQ, {}, tags(mlp__up_proj=None, self_attn__q_proj=hqq(8))),
    "hqq under the tags of experts": (HQQ, {}, tags(mlp__experts__up_proj=hqq(2), mlp__up_proj=hqq())),
    "blocks of bitsandbytes": (NF4, {}, of("bitsandbytes", bnb_4bit_blocksize=128, **NF4_SETTINGS)),
    "tables of rotary positions": (FP8_CHANNEL, {"cos_cached": torch.ones(4, 4)}, of("fp8", activation_scheme="dynamic"))}
# name -> storage, new tensors, config, part of the sentence
REFUSED: dict[str, tuple[tuple[str, str, Settings], Mapping[str, Any], Settings, str]] = {
    "FP8 beside a scale of no known meaning": (FP8_CHANNEL, {"weight_scale": None, "quant_scale": torch.ones(N)}, {},
                                               "needs a scale"),
    "a packed and a plain weight": (GPTQ, {"weight": torch.ones(N, K)}, of("gptq", bits=4, group_size=32), "'weight', too"),
    "an index of 64 bits that names no groups": (GPTQ, {"g_idx": lambda own: own.long() + (1 << 32)}, of("gptq", **GPTQ_SETTINGS),
                                                 "g_idx"),
    "an index that settings say, and is not there": (GPTQ, {"g_idx": None}, of("gptq", desc_act=True, **GPTQ_SETTINGS),
                                                     "desc_act = True, but there is no 'g_idx'"),
    "scales along the other axis": (FP8_CHANNEL, FP8_SCALE, quark(ch_axis=1), "ch_axis = 1"),
    "a transform in the config of a model in the model": (FP8_CHANNEL, {}, {
        **of("fp8", activation_scheme="dynamic"), "vision_config": {"quantization_config": {"quant_method": "fp8", **ROTATED}}},
        "R1"),
    "blocks as texts": (BLOCKS, {}, of("fp8", weight_block_size=["32", "32"], activation_scheme="dynamic"), r"\['32', '32'\]"),
    "awq of 8 bits by nobody": (AWQ8, {}, of("awq", **{**AWQ_SETTINGS, "bits": 8}), "awq_contiguous.*nothing says that they are"),
    "three scales of joined layers": (FP8_TENSOR, {"weight_scale": torch.ones(3)}, of("fp8", activation_scheme="static"),
                                      r"'weight_scale' has shape \[3\]; the format needs \[1\]"),
    "channels of blocks": (BLOCKS, FP8_SCALE, compressed("float-quantized", type="float", strategy="channel",
                                                         block_structure=[32, 32]), r"'weight_scale' \[2, 2\] is \[N, 1\]"),
    "gptq without zero points": (GPTQ, {"qzeros": None}, of("gptq", **GPTQ_SETTINGS), "gptq_v1 bits=4 needs tensor 'qzeros'"),
    "awq without zero points": (AWQ, {"qzeros": None}, of("awq", **AWQ_SETTINGS), "awq bits=4 needs tensor 'qzeros'"),
    **{f"hqq under a tag, {key} {value}": (HQQ, {}, tags(mlp__up_proj=hqq(**{key: value})), f"{key} = {value}")
       for key, value in (("nbits", 8), ("nbits", 3), ("group_size", 64), ("axis", 0))},
    "hqq under a tag, and what nobody knows": (HQQ, {}, tags(mlp__up_proj=hqq(levels=3)), "mlp.up_proj.levels is 3"),
    "hqq under a tag, and a number": (HQQ, {}, tags(mlp__up_proj=4), "'mlp.up_proj' is '4', no object"),
    **{f"blocks of {size} of bitsandbytes": (NF4, {}, of("bitsandbytes", bnb_4bit_blocksize=size, **NF4_SETTINGS),
                                             f"bnb_4bit_blocksize = {size}, but the tensors fit nf4 of 128")
       for size in (32, 64, 256, 4096, 129, True)},
    "weight formats of bitsandbytes that are tiles": (("bnb_int8", "bitsandbytes", {}), {"weight_format": torch.tensor(
        2, dtype=torch.uint8)}, of("bitsandbytes", load_in_8bit=True), "weight_format"),
    "zero points of ones beside FP8": (FP8_CHANNEL, {**FP8_SCALE, "weight_zero_point": torch.ones(N, 1, dtype=torch.int8)},
                                       compressed("float-quantized", type="float", strategy="channel"), "weight_zero_point"),
    "a norm that settings do not say": (("bitnet", "transformers", {}), {"rms_norm.weight": factors()}, of(
        "bitnet", linear_class="bitlinear", quantization_mode="offline"), "rms_norm.weight"),
    "a rotation that settings do not say": (FP8_CHANNEL, {**FP8_SCALE, "shared_input_rotation_32": torch.eye(32)}, quark(),
                                            "shared_input_rotation_32"),
    "a second scale of ModelOpt's in another's": (INT4, {"weight_scale_2": torch.tensor(0.5)}, compressed(
        "pack-quantized", strategy="group", **W4), "weight_scale_2"),
    "another second scale": (FP8_CHANNEL, {"weight_scale_2": torch.tensor(0.5)}, of(
        "modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "weight_scale_2")}


def folder(path: Path, stored: tuple[str, str, Settings], changes: Mapping[str, Any], config: Settings) -> Tensor:
    """Write a folder with one layer; returns its weight."""
    format, storage, params = stored
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    packed = import_module(f"qdsl.generated.{format}").quantize(weight, storage, **params)
    says = description_of(format)
    tensors = {name.removeprefix(f"{LAYER}."): own for name, own in producer_folders.named(LAYER, packed).items()} \
        if says_numbers(says) or says_extents(says) else {**packed.tensors}
    for name, change in changes.items():
        if isinstance(change, str):
            tensors[change] = tensors.pop(name, tensors.get(change))
        else:
            tensors[name] = change(tensors[name]) if callable(change) else change
    path.mkdir()
    write(path / "model.safetensors", {f"{LAYER}.{name}": own.contiguous() for name, own in tensors.items() if own is not None})
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    dense: Tensor = packed.format.dequantize(packed, torch.float32)
    return dense * changes["pre_quant_scale"] if "pre_quant_scale" in changes else dense


def computed(path: Path) -> Tensor:
    """What qdsl multiplies by.  Raises the error of a refusal."""
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    qdsl.load_weights_(model, path, {LAYER: "0"})
    with torch.no_grad():
        return model.float()(torch.eye(K)).t()


@pytest.mark.parametrize("name", RIGHT)
def test_the_weight_is_right(name: str, tmp_path: Path) -> None:
    """As it is loaded, and after a conversion to another format of 8 bits."""
    wanted = folder(tmp_path / "in", *RIGHT[name])
    assert (computed(tmp_path / "in") - wanted).norm() <= 1e-6 * wanted.norm()
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion("q8_0", True), tmp_path / "out")
    assert (computed(tmp_path / "out") - wanted).norm() <= 2e-2 * wanted.norm()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    *stored, sentence = REFUSED[name]
    folder(tmp_path / "in", *stored)
    with pytest.raises((CheckpointError, LoadError), match=sentence):
        computed(tmp_path / "in")


# A plain weight among quantized layers, which no list excludes, and what stands beside it; part of the sentence.
ONE = torch.ones(())
_OF_BLOCKS = of("fp8", weight_block_size=[32, 32])
_OF_NVFP4 = of("modelopt", quant_algo="NVFP4", group_size=16)
NEXT_TO_PLAIN: dict[str, tuple[tuple[str, str, Settings], Settings, Mapping[str, Tensor], str]] = {
    "FP8 cast to bfloat16, and its scales": (BLOCKS, _OF_BLOCKS, {"weight_scale_inv": torch.ones(2, 2)},
                                             "'weight' has dtype bfloat16; the format needs float8_e4m3fn"),
    "scales of gptq": (GPTQ, of("gptq", **GPTQ_SETTINGS), {"scales": torch.ones(2, N)}, "scales"),
    "an index of gptq": (GPTQ, of("gptq", **GPTQ_SETTINGS), {"g_idx": torch.zeros(K, dtype=torch.int32)}, "needs tensor"),
    "scales of rows": (INT8, compressed("int-quantized", strategy="channel"), {"weight_scale": torch.ones(N, 1)}, "weight_scale"),
    "maxima of bitsandbytes": (NF4, of("bitsandbytes", **NF4_SETTINGS), {"weight.absmax": torch.ones(32)}, "needs uint8"),
    "what modelopt measured": (NVFP4, _OF_NVFP4, {"weight_quantizer._amax": ONE}, "_amax"),
    "a global scale": (NVFP4, _OF_NVFP4, {"weight_scale_2": ONE}, "needs tensor"),
    "a scale of another name": (BLOCKS, _OF_BLOCKS, {"scale_weight": ONE}, "scale_weight")}


@pytest.mark.parametrize("name", NEXT_TO_PLAIN)
def test_a_plain_weight_among_quantized_ones(name: str, tmp_path: Path) -> None:
    """Alone it is what it is, and reports say so.  What belongs to codes beside it means that its numbers are others."""
    stored, config, tensors, sentence = NEXT_TO_PLAIN[name]
    folder(tmp_path / "in", stored, {}, config)
    other = LAYER.replace("0", "1")
    plain = {f"{other}.weight": torch.randn(N, K, generator=torch.Generator().manual_seed(2), dtype=torch.float32).bfloat16()}
    write(tmp_path / "in" / "more.safetensors", plain)
    model = torch.nn.ModuleList(torch.nn.Linear(K, N, bias=False) for _ in range(2))
    with Folder(tmp_path / "in") as read:
        [module] = layers(read).left
    assert module.problem.startswith("plain, though config.json") and module.name == other
    qdsl.load_weights_(model, tmp_path / "in", {LAYER: "0", other: "1"})
    assert model[1].weight.equal(plain[f"{other}.weight"].float())
    write(tmp_path / "in" / "more.safetensors", {**plain, **{f"{other}.{leaf}": tensor for leaf, tensor in tensors.items()}})
    with pytest.raises((CheckpointError, LoadError), match=sentence):
        qdsl.load_weights_(torch.nn.ModuleList(torch.nn.Linear(K, N, bias=False) for _ in range(2)), tmp_path / "in",
                           {LAYER: "0", other: "1"})


STRATEGIES: Mapping[str, tuple[Mapping[str, Any], list[int]]] = {       # of 8 bits: further settings, and the shape of scales
    "tensor": ({}, [1]), "channel": ({}, [N, 1]), "group": ({"group_size": 32}, [N, K // 32]),
    "block": ({"block_structure": [32, 32]}, [N // 32, K // 32])}
BY_STRATEGY = {"float": (FP8_TENSOR, FP8_CHANNEL, ROWS, BLOCKS),
               "int": (("int8_tensor", "safetensors", {}), INT8, INT8_GROUP)}
MISMATCHES = [(kind, claimed, stored, own) for kind, every in BY_STRATEGY.items()
              for stored, own in zip(STRATEGIES, every, strict=False) for claimed in STRATEGIES if claimed != stored]


@pytest.mark.parametrize(("kind", "claimed", "stored", "own"), MISMATCHES, ids=["-".join(own[:3]) for own in MISMATCHES])
def test_a_strategy_that_the_scales_contradict(kind: str, claimed: str, stored: str, own: tuple[str, str, Settings],
                                               tmp_path: Path) -> None:
    """The sentence has the strategy, and the scales' own name and shape beside what the strategy needs."""
    settings, needed = STRATEGIES[claimed]
    folder(tmp_path / "in", own, FP8_SCALE, compressed(f"{kind}-quantized", type=kind, strategy=claimed, **settings))
    with pytest.raises(CheckpointError) as error:
        computed(tmp_path / "in")
    text = str(error.value)
    if (claimed, stored) == ("block", "group") and kind == "float":                   # of one storage, the length alone is wrong
        assert "says block_structure = [32, 32]; the tensors fit fp8_block.safetensors bn=1 bk=32" in text
    elif (kind, claimed) == ("int", "block"):
        assert "strategy = block" in text and "the tensors fit" in text
    else:
        assert f"strategy = {claimed}" in text and "'weight_scale' " in text and str(STRATEGIES[stored][1]) in text
        assert f"= {needed} for N = {N}" in text or (claimed == "channel" and "is [N, 1]" in text)


@pytest.mark.parametrize("keys", [("text_config",), ("llm_config",), ("vision_config",), ("thinker_config", "audio")])
def test_settings_of_two_places_that_read_tensors_otherwise(keys: tuple[str, ...], tmp_path: Path) -> None:
    """They are refused.  Those of a part that the tensors do not fit are of other layers; a conversion rewrites all places."""
    def config(**part: Any) -> dict[str, Any]:
        inner: dict[str, Any] = of("gptq", **{**GPTQ_SETTINGS, **part})
        for key in reversed(keys):
            inner = {key: inner}
        return {**of("gptq", **GPTQ_SETTINGS), **inner}

    folder(tmp_path / "wrong", GPTQ, {}, config(checkpoint_format="gptq_v2"))
    with pytest.raises(CheckpointError, match=f"{' '.join(keys)} .*says.* checkpoint_format = gptq_v2.*gptq_v1"):
        computed(tmp_path / "wrong")
    wanted = folder(tmp_path / "in", GPTQ, {}, config(**({"bits": 8} if keys[0] not in ("text_config", "llm_config") else {})))
    assert computed(tmp_path / "in").equal(wanted)
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion("gptq_v2"), tmp_path / "out")
    assert computed(tmp_path / "out").equal(wanted)


def test_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    wanted = folder(tmp_path / "in", GPTQ, {}, of("gptq", **GPTQ_SETTINGS))
    config = tmp_path / "in" / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert computed(tmp_path / "in").equal(wanted)


# -- of other shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp8_channel", "int8_channel"])
@pytest.mark.parametrize("is_stack", [False, True], ids=["matrix", "stack"])
def test_scales_of_rows_in_a_row(format: str, is_stack: bool, tmp_path: Path) -> None:
    """[1, N], or [E, 1, N] of experts, as of weights that a kernel takes transposed."""
    name, shape = ("experts.up_proj", (N // 2, K)) if is_stack else (LAYER, (N // 2, K))
    module = import_module(f"qdsl.generated.{format}")
    parts = [module.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32))
             for seed in range(3 if is_stack else 1)]
    weight = torch.stack([part.tensors["weight"].view(torch.uint8) for part in parts]).view(parts[0].tensors["weight"].dtype)
    scale = torch.stack([part.tensors["weight_scale"].t() for part in parts])
    dense = torch.stack([part.format.dequantize(part, torch.float32) for part in parts])
    one = {f"{name}.weight": weight[0], f"{name}.weight_scale": scale[0]}
    write(tmp_path / "model.safetensors", {name: weight, f"{name}_scale": scale} if is_stack else one)
    with qdsl.open(tmp_path / "model.safetensors") as checkpoint:
        [layer] = checkpoint.layers.values()
        assert (layer.format, layer.shape, layer.experts) == (format, shape, 3 if is_stack else None)
        for expert, own in enumerate(checkpoint.source.weights(layer)):
            assert own.format.dequantize(own, torch.float32).equal(dense[expert])
        whole = checkpoint.source.stacked(layer)
        assert whole.format.dequantize(whole, torch.float32).equal(dense.flatten(0, 1))


CT = "compressed_tensors"


@pytest.mark.parametrize("stored", [NVFP4, MXFP4, ("nvfp4_ct", CT, {}), ("ocp_mxfp6", CT, {})], ids=str)
def test_codes_of_types_under_a_byte(stored: tuple[str, str, Settings], tmp_path: Path) -> None:
    """F4 and F6, as safetensors has torch.float4_e2m1fn_x2: with the extents of the weight."""
    wanted = folder(tmp_path / "in", stored, {}, {})
    path = tmp_path / "in" / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    [codes] = [name for name in (f"{LAYER}.weight", f"{LAYER}.weight_packed") if name in header]
    header[codes] |= {"dtype": "F6_E2M3" if stored[0] == "ocp_mxfp6" else "F4", "shape": [N, K]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])
    assert (computed(tmp_path / "in") - wanted).norm() <= 1e-6 * wanted.norm()
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion("q8_0", True), tmp_path / "out")
    assert (computed(tmp_path / "out") - wanted).norm() <= 2e-2 * wanted.norm()


def test_low_rank_beside_nvfp4(tmp_path: Path) -> None:
    """ModelOpt's NVFP4_SVD: factors of x meet the low rank, too (modelopt 0.47 nn/modules/quant_linear.py SVDQuantLinear)."""
    generator = torch.Generator().manual_seed(5)
    down, up = (torch.randn(shape, generator=generator, dtype=torch.float32).bfloat16() for shape in ((16, K), (N, 16)))
    config = of("modelopt", quant_algo="NVFP4_SVD", group_size=16, has_zero_point=False, pre_quant_scale=True, lora_rank=16)
    base = folder(tmp_path / "in", NVFP4, {"svdquant_lora_a": down, "svdquant_lora_b": up, "pre_quant_scale": factors()}, config)
    wanted = base + up.float() @ down.float() * factors()
    assert (computed(tmp_path / "in") - wanted).norm() <= 1e-6 * wanted.norm()
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion("q8_0", True), tmp_path / "out")
    assert (computed(tmp_path / "out") - wanted).norm() <= 2e-2 * wanted.norm()
