"""What is written loads in transformers, and gives the logits of the weights that it stands for.

Needs transformers and compressed-tensors, in versions that few others want: without them nothing here is run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.guard import SENTENCE, with_guard, without_guard
from qdsl.checkpoint.detect.ignored import Rule
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import fp8_block, fp8_channel, int8_channel, int_group, ocp_mxfp4
from qdsl.jobs.compress import run as compressing
from qdsl.jobs.compress.units import FORMATS, Compression
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import Conversion, parse_conversion
from tests.support import folders

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


def compressed(format: str, type: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": type, "symmetric": True, "strategy": "channel"}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": format}}}


def tiny(tied: bool = False) -> Any:
    """A Qwen3 of two layers, with sizes that blocks of 32 divide."""
    config = transformers.Qwen3Config(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
                                      num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval()


def quantized(path: Path, module: Any, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A folder of the model with its projections quantized; and the model, with the weights that they stand for."""
    model = tiny()
    tensors = {}
    for name, parameter in model.state_dict().items():
        if "_proj" in name:
            packed = module.quantize(parameter, **options)
            tensors |= folders.named({name.removesuffix(".weight"): packed})
            parameter.copy_(module.dequantize(packed, torch.float32))
        else:
            tensors[name] = parameter.clone()
    write(path / "model.safetensors", tensors, {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"], "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config, default=str))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, -1)).logits


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def check_converted(path: Path, aim: Conversion, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """A model of GPTQ's, converted, is the one of its decoded weights, which a folder without quantization has.

    options: of the weights that are converted.
    """
    (path / "gptq").mkdir()
    options = {"bits": 4, "group": 32, **options}
    settings = {**folders.GPTQ, "bits": options["bits"], "group_size": options["group"]}
    model = quantized(path / "gptq", int_group, {"storage": "gptq_v2", **options}, settings)
    with Folder(path / "gptq") as folder:
        run.convert(folder, layers(folder), aim, path / "out")
    check_decoded(path / "out", model, dtype)


def check_decoded(path: Path, model: Any, dtype: torch.dtype = torch.float32) -> None:
    """A folder is the model with the weights that it stands for; inputs are not quantized for this, where its config says so."""
    with Folder(path) as folder:
        for layer in layers(folder).layers:
            [weight] = weights(folder, layer)
            model.get_submodule(layer.name).weight.data.copy_(weight.format.dequantize(weight, torch.float32))
    model.save_pretrained(path.parent / "decoded")
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        if group["input_activations"] is not None:               # of int8: what vLLM needs; transformers loads it, too
            scheme = loaded(path, dtype).model.layers[0].mlp.up_proj.quantization_scheme
            assert scheme.input_activations.dynamic and scheme.input_activations.strategy == "token"
            group["input_activations"] = None
            (path / "config.json").write_text(json.dumps(config))
    assert logits(loaded(path, dtype)).equal(logits(loaded(path.parent / "decoded", dtype)))


@pytest.mark.parametrize(("module", "options", "settings"), [
    (fp8_block, {"bn": 32, "bk": 32}, FP8),
    (fp8_channel, {"scale_type": "f32"}, compressed("float-quantized", "float")),
    (int8_channel, {"scale_type": "f32"}, compressed("int-quantized", "int")),
], ids=["fp8", "float-quantized", "int-quantized"])
def test_logits_are_those_of_the_decoded_weights(tmp_path: Path, module: Any, options: dict[str, Any], settings: dict[str, Any],
                                                 ) -> None:
    if settings["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = quantized(tmp_path, module, options, settings)
    assert logits(loaded(tmp_path)).equal(logits(model))


@pytest.mark.parametrize("group", [32, -1])
def test_gptq_in_the_storage_of_compressed_tensors(tmp_path: Path, group: int) -> None:
    """The same numbers, read by another package; of codes with zero points, 0.20 expects tensors that it does not write."""
    pytest.importorskip("compressed_tensors")
    (tmp_path / "gptq").mkdir()
    options = {"storage": "gptq_v2", "bits": 4, "group": group, "scale_type": "f32", "symmetric": True}
    model = quantized(tmp_path / "gptq", int_group, options, {**folders.GPTQ, "group_size": group})
    with Folder(tmp_path / "gptq") as folder:
        run.convert(folder, layers(folder), parse_conversion("pack_quantized"), tmp_path / "out")
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


@pytest.mark.parametrize(("to", "params"), [
    ("fp8_block", {"bn": 32, "bk": 32}),
    *((to, {"scale_type": "f32"}) for to in ("fp8_channel", "fp8_tensor", "int8_channel", "int8_tensor"))])
def test_a_converted_folder_loads(tmp_path: Path, to: str, params: dict[str, Any]) -> None:
    """With the config that `convert` writes."""
    pytest.importorskip("compressed_tensors")
    check_converted(tmp_path, parse_conversion(to, True, params))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("to", "params", "dtype"), [
    ("fp8_block", {"bn": 32, "bk": 32}, torch.float32), ("fp8_channel", {"scale_type": "f32"}, torch.float32),
    ("int8_channel", {"scale_type": "f32"}, torch.float32), ("nvfp4_ct", {}, torch.bfloat16),
    ("int_group.pack_quantized", {"symmetric": True, "group": 32, "scale_type": "f32"}, torch.float32),
    ("int_group.pack_quantized", {"symmetric": True, "group": -1, "bits": 8, "scale_type": "f32"}, torch.float32)])
def test_a_plain_folder_quantized(tmp_path: Path, to: str, params: dict[str, Any], dtype: torch.dtype, tied: bool) -> None:
    """By transformers' own loaders, with the config that `qdsl quantize` writes; a tied head has no weight of its own."""
    pytest.importorskip("compressed_tensors")
    model = tiny(tied)
    model.save_pretrained(tmp_path / "plain")
    report = run.quantize(tmp_path / "plain", parse_conversion(to, True, params, ()), tmp_path / "out")
    assert len(report["quantized"]) == 14 and report["readers"][""].startswith("qdsl, ")
    check_decoded(tmp_path / "out", model, dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_bytes_with_and_without_zero_points(tmp_path: Path, group: int, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    check_converted(tmp_path, parse_conversion("int_quantized"), bits=8, group=group, scale_type="f32", symmetric=symmetric)


@pytest.mark.parametrize("says", [{}, {"format": "pack-quantized"}])
def test_another_storage_of_compressed_tensors(tmp_path: Path, says: dict[str, Any]) -> None:
    """Whether groups say the format or not."""
    pytest.importorskip("compressed_tensors")
    (tmp_path / "in").mkdir()
    settings = compressed("pack-quantized", "int")
    del settings["config_groups"]["group_0"]["format"]
    settings["config_groups"]["group_0"] |= says
    options = {"storage": "pack_quantized", "bits": 8, "group": -1, "scale_type": "f32", "symmetric": True}
    model = quantized(tmp_path / "in", int_group, options, settings)
    with Folder(tmp_path / "in") as folder:
        run.convert(folder, layers(folder), parse_conversion("int_quantized"), tmp_path / "out")
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


@pytest.mark.parametrize("to", ["nvfp4_ct", "ocp_mxfp4.compressed_tensors", "ocp_mxfp6.compressed_tensors",
                                "ocp_mxfp8.compressed_tensors"])
def test_small_floats_load(tmp_path: Path, to: str) -> None:
    """compressed-tensors decodes them to bfloat16."""
    pytest.importorskip("compressed_tensors")
    check_converted(tmp_path, parse_conversion(to, True), torch.bfloat16)


def test_experts_in_one_tensor_are_those_of_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has them, byte for byte; without one, 5.23 decodes all else, and takes experts' codes for weights."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    config = transformers.Qwen3MoeConfig(vocab_size=96, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=1,
                                         head_dim=32, num_attention_heads=2, num_key_value_heads=1, num_experts=3)
    tensors = transformers.Qwen3MoeForCausalLM(config).state_dict()
    stacks = [name for name, tensor in tensors.items() if tensor.dim() == 3]
    assert len(stacks) == 2
    (tmp_path / "in").mkdir()
    for name in stacks:
        packed = [ocp_mxfp4.quantize(expert, "deepseek") for expert in tensors.pop(name)]
        tensors |= {name + end: torch.stack([expert.tensors[key] for expert in packed])
                    for end, key in (("", "weight"), ("_scale_inv", "weight_scale_inv"))}
    write(tmp_path / "in" / "model.safetensors", tensors, {"format": "pt"})
    config_dict = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config_dict, default=str))
    with Folder(tmp_path / "in") as folder:
        run.convert(folder, layers(folder), parse_conversion("fp8_block", True, {"bn": 32, "bk": 32}), tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"]
    with Folder(tmp_path / "out") as folder:
        written = layers(folder).layers
        assert {layer.name: (layer.format, layer.experts) for layer in written} == dict.fromkeys(stacks, ("fp8_block", 3))
        for layer in written:
            for full in layer.tensors.values():
                assert model.get_parameter(full).dtype == folder.tensor(full).dtype
                assert model.get_parameter(full).data.view(torch.uint8).equal(folder.tensor(full).view(torch.uint8))


WORDS = ("lm_head", "model.layers.1", "layers.1", "model.layers.1.", "mlp.gate", "model.layers.11.mlp.gate", "proj", "mod",
         "model.*gate", "model.layers.(1|11)", "lm|model.layers.1|x", "model", ".*", r".*\.mlp", "[a-z]*", "q_proj$", "e")


@pytest.mark.parametrize("word", WORDS)
def test_a_list_leaves_alone_what_transformers_does(word: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name in ("lm_head", "model.lm_head", "model", "model.layers.1", "model.layers.1.mlp.gate", "layers.1.x", "mlp.gate", "",
                 "model.layers.11.mlp.gate_proj", "model.layers.11.mlp.gate.proj", "model.layers.1.self_attn.q_proj"):
        assert Rule("transformers", word).matches(name) is not should_convert_module(name, [word]), name


# Loaders without qdsl

# Prints, for every class, path and options, the error of from_pretrained, or 'loaded'.
LOADER = """
import importlib, json, sys

sys.modules["qdsl"] = None                                       # whose import is an error
outcomes = []
for library, name, path, options in json.loads(sys.argv[1]):
    try:
        getattr(importlib.import_module(library), name).from_pretrained(path, **options)
        outcomes.append("loaded")
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}")
print(json.dumps(outcomes))
"""
ALONE = dict.fromkeys(("transformer", "vae", "tokenizer", "scheduler"))       # components that a pipeline is to do without
REFUSED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    **{f"causal {name}": ("transformers", "AutoModelForCausalLM", name, {}) for name in (*FORMATS, "xpu_int4pack")},
    **{f"base {name}": ("transformers", "AutoModel", name, {}) for name in (*FORMATS, "xpu_int4pack")},
    "a class of the model": ("transformers", "Qwen3ForCausalLM", "df11", {}),
    "vision and text": ("transformers", "AutoModelForImageTextToText", "gemma3", {}),
    "text alone": ("transformers", "Gemma3ForCausalLM", "gemma3", {}),
    "text alone, base": ("transformers", "Gemma3TextModel", "gemma3", {}),
    "vision alone": ("transformers", "SiglipVisionModel", "gemma3", {}),
    "text encoder": ("transformers", "Qwen3Model", "pipeline", {"subfolder": "text_encoder"}),
    "text encoder of df11": ("transformers", "AutoModel", "pipeline df11", {"subfolder": "text_encoder"}),
    **({"pipeline": ("diffusers", "DiffusionPipeline", "pipeline", ALONE)} if find_spec("diffusers") else {}),
}
LOADED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "before": ("transformers", "AutoModelForCausalLM", "qwen3", {}),
    "text alone, before": ("transformers", "Gemma3ForCausalLM", "gemma3 before", {}),
    "hlane, without the guard": ("transformers", "AutoModelForCausalLM", "hlane unguarded", {}),
    "df11, without the guard": ("transformers", "AutoModelForCausalLM", "df11 unguarded", {}),
}


def gemma3() -> Any:
    """A model of text and images with a layer for either."""
    text = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90,
                                       boi_token_index=91, eoi_token_index=92)
    return transformers.Gemma3ForConditionalGeneration(config)


def outcomes(root: Path, loads: dict[str, tuple[str, str, str, dict[str, Any]]]) -> dict[str, str]:
    """The errors of loaders in a process of their own, where qdsl cannot be imported."""
    arguments = [(library, name, str(root / path), options) for library, name, path, options in loads.values()]
    process = subprocess.run([sys.executable, "-c", LOADER, json.dumps(arguments)], cwd=root, check=True, stdout=subprocess.PIPE)
    return dict(zip(loads, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def without_qdsl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of every case of REFUSED and LOADED."""
    root = tmp_path_factory.mktemp("without")
    tiny().bfloat16().save_pretrained(root / "qwen3")
    for name in FORMATS:
        compressing.compress(root / "qwen3", Compression(name), root / name)
    for name in ("hlane", "df11"):
        shutil.copytree(root / name, root / f"{name} unguarded")
        config = json.loads((root / name / "config.json").read_text())
        (root / f"{name} unguarded" / "config.json").write_text(json.dumps(without_guard(config)))
    (root / "gptq").mkdir()
    quantized(root / "gptq", int_group, {"storage": "gptq_v2", "bits": 4, "group": 32, "symmetric": True}, folders.GPTQ)
    with Folder(root / "gptq") as folder:
        run.convert(folder, layers(folder), parse_conversion("xpu_int4pack"), root / "xpu_int4pack")
    gemma3().bfloat16().save_pretrained(root / "gemma3 before")
    compressing.compress(root / "gemma3 before", Compression("hlane"), root / "gemma3")
    shutil.copytree(root / "qwen3", root / "plain" / "text_encoder")
    components = {key: [None, None] for key in ALONE} | {"text_encoder": ["transformers", "Qwen3Model"]}
    (root / "plain" / "model_index.json").write_text(json.dumps({"_class_name": "ZImagePipeline", **components}))
    compressing.compress(root / "plain", Compression("hlane"), root / "pipeline")
    compressing.compress(root / "plain", Compression("df11"), root / "pipeline df11")
    return outcomes(root, REFUSED | LOADED)


@pytest.mark.parametrize("case", REFUSED)
def test_a_loader_without_qdsl_names_the_package(case: str, without_qdsl: dict[str, str]) -> None:
    assert without_qdsl[case].startswith("ValueError: ") and without_qdsl[case].endswith(f" {SENTENCE}")


@pytest.mark.parametrize("case", LOADED)
def test_the_guard_alone_stops_a_loader(case: str, without_qdsl: dict[str, str]) -> None:
    """The models themselves load; and so, with random weights, does a compressed one without a guard."""
    assert without_qdsl[case] == "loaded"


def test_diffusers_refuses_the_settings_without_a_guard(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
                                             joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12))
    model.bfloat16().save_pretrained(tmp_path / "model")
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    for format in FORMATS:
        compressing.compress(tmp_path / "model", Compression(format), tmp_path / format)
    assert with_guard(before) == before
    name = "FluxTransformer2DModel"
    texts = outcomes(tmp_path, {path: ("diffusers", name, path, {}) for path in ("model", *FORMATS)})
    assert texts.pop("model") == "loaded"
    assert all(text.startswith("ValueError: Unknown quantization type, got qdsl") for text in texts.values()), texts
