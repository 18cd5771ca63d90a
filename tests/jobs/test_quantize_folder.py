"""Plain folders quantized as a whole: the weights, what their producers' configs say, and that nothing half-done is left."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import qdsl
from qdsl.checkpoint.detect.guard import FIELD, SENTENCE
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.cli import app
from qdsl.host.files import OutputError
from qdsl.jobs.convert import run, target
from qdsl.jobs.engine import RewriteError, stage
from qdsl.runtime import PackedWeight
from tests.support import folders, language_models
from tests.support.formats import same_bits

ROWS, COLUMNS = 64, 256
CONFIG = {"model_type": "toy", "architectures": ["Toy"], "vocab_size": 96}
DTYPES = {"up": torch.bfloat16, "down": torch.float16, "gate_proj": torch.float32}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(0.05).to(dtype)


def model(rows: int = ROWS) -> dict[str, Tensor]:
    """A head, an embedding, a norm, a router, and a block of Linear layers of several dtypes, one with a bias."""
    tensors = {f"model.layers.0.{name}.weight": drawn(rows, COLUMNS, dtype=dtype, seed=seed)
               for seed, (name, dtype) in enumerate(DTYPES.items())}
    return {"model.embed_tokens.weight": drawn(96, COLUMNS), "model.norm.weight": torch.ones(COLUMNS).bfloat16(), **tensors,
            "model.layers.0.gate.weight": drawn(4, COLUMNS), "model.layers.0.up.bias": drawn(rows),
            "lm_head.weight": drawn(96, COLUMNS)}


def plain_folder(path: Path, tensors: dict[str, Tensor], shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    """A folder of these tensors, cut into files."""
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[number::shards]} for number in range(shards)]
    return folders.folder(path, *parts, config=CONFIG if config is None else config, index=shards > 1)


def quantize(path: Path, out: Path, to: str, params: dict[str, Any] | None = None, *, ignore: tuple[str, ...] = (),
             only: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    return run.quantize(path, target.parse_conversion(to, True, params, ignore, only), out, **options)


def refused(path: Path, to: str, params: dict[str, Any] | None = None, **options: Any) -> str:
    """The message; and nothing is written."""
    out = path.parent / "refused"
    with pytest.raises(RewriteError) as error:
        quantize(path, out, to, params, **options)
    assert not out.exists()
    return str(error.value)


def expected(values: Tensor, to: str, params: dict[str, Any] | None = None) -> PackedWeight:
    name, _, storage = to.partition(".")
    packed: PackedWeight = import_module(f"qdsl.generated.{name}").quantize(values, storage or None, **(params or {}))
    return packed


def check_opens(out: Path, weights: dict[str, PackedWeight]) -> None:
    """The folder opens, its layers are these, bit for bit, and nothing contradicts them."""
    with Folder(out) as folder:
        assert layers(folder).problems == []
    with qdsl.open(out) as checkpoint:
        assert checkpoint.layers.keys() == weights.keys()
        for name, packed in weights.items():
            layer, read = checkpoint.layers[name], checkpoint.weight(name)
            assert (layer.format, layer.storage, layer.problems) == (packed.format.name, packed.storage, ())
            assert all(same_bits(read.tensors[key], tensor) for key, tensor in packed.tensors.items())


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("fp8_block", {"bn": 32, "bk": 32}, "fp8"), ("fp8_channel", {}, "compressed-tensors"),
    ("fp8_tensor", {}, "compressed-tensors"), ("int8_channel", {}, "compressed-tensors"),
    ("int_group.pack_quantized", {"symmetric": True}, "compressed-tensors"),
    ("int_group", {"bits": 4, "group": 64}, "gptq"), ("int_group.awq", {}, "awq"), ("nvfp4_ct", {}, "compressed-tensors"),
    ("nvfp4_modelopt", {}, "modelopt"), ("nf4", {}, "bitsandbytes"), ("ocp_mxfp4.compressed_tensors", {}, "compressed-tensors"),
    ("fp8_block.torchao", {"bn": 1, "bk": 128}, "torchao"), ("q4_k", {}, "qdsl"), ("hqq", {"group": 64}, "qdsl"),
    ("fp8_channel", {"scale_type": "e8m0"}, "compressed-tensors")]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("to", "params", "method"), CASES)
def test_weights_and_settings_of_the_producer(tmp_path: Path, to: str, params: dict[str, Any], method: str, shards: int) -> None:
    """The weights that `quantize` makes of the file's own dtype; all else byte for byte; a list that names what stays plain."""
    tensors = model()
    path = plain_folder(tmp_path / "in", tensors, shards)
    report = quantize(path, tmp_path / "out", to, params)
    names = [f"model.layers.0.{name}" for name in DTYPES]
    check_opens(tmp_path / "out", {name: expected(tensors[f"{name}.weight"], to, params) for name in names})
    with Folder(tmp_path / "out") as folder:
        for name in tensors:
            assert name.removesuffix(".weight") in names or same_bits(folder.tensor(name), tensors[name])
        config = folder.config
    assert {row["name"] for row in report["quantized"]} == set(names) and all(row["snr_db"] > 10 for row in report["quantized"])
    settings = config.pop("quantization_config")
    assert settings["quant_method"] == method and (FIELD in config) == (method == "qdsl")
    assert report["readers"] == {"": "qdsl alone"} if method == "qdsl" else report["readers"][""].startswith("qdsl, ")
    read = quantization(settings, "config.json", "")
    plain = {name for name in report["left"] if read.scheme(name).settings is None or read.maybe(name)}
    assert plain >= ({"model.layers.0.gate"} if method == "gptq" else report["left"].keys())
    assert not any(read.scheme(name).settings is None or read.maybe(name) for name in names)
    names = {"config.json", checksums.FILE, *report["shards"], "tokenizer", "tokenizer.json", *([INDEX] if shards > 1 else [])}
    assert sorted(os.listdir(tmp_path / "out")) == sorted(names)


@pytest.mark.parametrize("to", ["nvfp4_ct", "nvfp4_modelopt"])
def test_layers_that_engines_fuse_share_a_super_scale(tmp_path: Path, to: str) -> None:
    """Those of q, k and v, of gate and up, and of an expert's w1 and w3, in any file; a single layer has its own."""
    families = [["attn.q_proj", "attn.k_proj", "attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"],
                ["mlp.experts.0.w1", "mlp.experts.0.w3"], ["mlp.experts.1.w1", "mlp.experts.1.w3"]]
    names = [f"model.layers.0.{name}" for family in families for name in family]
    tensors = {f"{name}.weight": drawn(ROWS, COLUMNS, seed=seed) * 2.0 ** (seed % 3) for seed, name in enumerate(names)}
    quantize(plain_folder(tmp_path / "in", tensors, 3), tmp_path / "out", to)
    weights = {}
    for family in families:
        members = {f"model.layers.0.{name}": tensors[f"model.layers.0.{name}.weight"] for name in family}
        amax = max(float(values.abs().max()) for values in members.values())
        weights |= {name: expected(values, to, {"amax": amax}) for name, values in members.items()}
        assert len({float(weights[name].format.unpack(weights[name])["g"]) for name in members}) == 1
    check_opens(tmp_path / "out", weights)
    zeros = {f"attn.{name}.weight": torch.zeros(ROWS, COLUMNS).bfloat16() for name in ("q_proj", "k_proj", "v_proj")}
    quantize(plain_folder(tmp_path / "zeros", zeros), tmp_path / "none", to)
    check_opens(tmp_path / "none", {name.removesuffix(".weight"): expected(values, to) for name, values in zeros.items()})


def test_settings_word_for_word(tmp_path: Path) -> None:
    """Those that vLLM and transformers load: INT8 with inputs that are quantized per token, of which vLLM has no other kind."""
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(ROWS, COLUMNS), "lm_head.weight": drawn(96, COLUMNS)})
    for to, params in (("fp8_block", {}), ("int8_channel", {}), ("int_group.pack_quantized", {"symmetric": True})):
        quantize(path, tmp_path / to, to, params)
    settings = {to: json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
                for to in ("fp8_block", "int8_channel", "int_group.pack_quantized")}
    assert settings["fp8_block"] == {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
                                     "modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    for to, format, weights, of_inputs in (
            ("int8_channel", "int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, inputs),
            ("int_group.pack_quantized", "pack-quantized", {"num_bits": 4, "symmetric": True, "strategy": "group",
                                                            "group_size": 128}, None)):
        group = {"targets": ["Linear"], "weights": weights, "input_activations": of_inputs, "output_activations": None,
                 "format": format}
        assert settings[to] == {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
                                "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(("to", "symmetric", "readers"), [
    ("int_group", True, "gptqmodel, vLLM"), ("int_group", False, "gptqmodel"), ("int_group.pack_quantized", False, "vLLM"),
    ("int_group.pack_quantized", True, "compressed-tensors, transformers with it, vLLM")])
def test_who_reads_zero_points(tmp_path: Path, to: str, symmetric: bool, readers: str) -> None:
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(ROWS, COLUMNS)})
    assert quantize(path, tmp_path / "out", to, {"symmetric": symmetric})["readers"] == {"": f"qdsl, {readers}"}


@pytest.mark.parametrize(("config", "has_tokenizer", "readers", "why"), [
    (CONFIG, False, "qdsl, transformers", "the folder has no tokenizer"),
    ({"model_type": "toy"}, True, "qdsl, transformers", "config.json does not say architectures"),
    ({}, True, "qdsl alone", "config.json does not say model_type")])
def test_programs_are_named_that_have_what_they_need(tmp_path: Path, config: dict[str, Any], has_tokenizer: bool, readers: str,
                                                     why: str) -> None:
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(128, 256)}, config=config)
    if not has_tokenizer:
        (path / "tokenizer.json").unlink()
    report = quantize(path, tmp_path / "out", "fp8_block")
    assert report["readers"] == {"": readers} and report["not_read_by"][""]["vLLM"] == why


@pytest.mark.parametrize(("shape", "reads"), [((64, 256), True), ((256, 384), True), ((192, 256), False), ((256, 576), False)])
def test_who_reads_blocks_that_are_not_whole(tmp_path: Path, shape: tuple[int, int], reads: bool) -> None:
    """transformers divides N by the number of scales to get the rows of a block: right for one block, wrong for 192 rows."""
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(*shape)})
    report = quantize(path, tmp_path / "out", "fp8_block")
    assert report["readers"] == {"": "qdsl, transformers, vLLM" if reads else "qdsl, vLLM"}
    assert ("last block" in report["not_read_by"][""].get("transformers", "")) != reads


def test_a_file_by_itself_gets_a_config(tmp_path: Path) -> None:
    """So that a storage whose tensors fit several ways is read."""
    write(tmp_path / "model.safetensors", {"up.weight": drawn(ROWS, COLUMNS)}, {"format": "pt"})
    quantize(tmp_path / "model.safetensors", tmp_path / "out", "int_group.gptq_v1", {"bits": 3, "group": 32})
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", checksums.FILE]
    check_opens(tmp_path / "out", {"up": expected(drawn(ROWS, COLUMNS), "int_group.gptq_v1", {"bits": 3, "group": 32})})


def test_errors_are_those_of_what_is_stored(tmp_path: Path) -> None:
    tensors = model()
    report = quantize(plain_folder(tmp_path / "in", tensors), tmp_path / "out", "int8_channel")
    signal = noise = 0.0
    for row in report["quantized"]:
        weight = tensors[f"{row['name']}.weight"]
        stored = expected(weight, "int8_channel")
        error = (stored.format.dequantize(stored, torch.float32) - weight.float()).double().square().sum()
        signal, noise = signal + float(weight.double().square().sum()), noise + float(error)
        assert row["snr_db"] == pytest.approx(10 * math.log10(float(weight.double().square().sum() / error)), abs=1e-5)
        assert row["relative_rms"] == pytest.approx(math.sqrt(float(error / weight.double().square().sum())), rel=1e-5)
        assert (row["shape"], row["nbytes"]) == ([ROWS, COLUMNS], stored.nbytes)
    assert report["snr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    assert report["bits_per_weight"] == pytest.approx(8 + 8 * 8 / 3 / COLUMNS, abs=0.05)


# What stays plain


def test_what_is_no_linear_layer_stays_plain(tmp_path: Path) -> None:
    """By names, by the config's vocabulary, and by biases: those of GPT-2's layers [K, N] have K numbers."""
    matrix = drawn(128, 256)
    tensors = {"h.0.attn.c_attn.weight": matrix, "h.0.attn.c_attn.bias": drawn(256), "h.0.mlp.c_attn.weight": drawn(256, 256),
               "shared.weight": matrix, "decoder.block.0.relative_attention_bias.weight": matrix,
               "tokens.weight": drawn(96, 256), "conv.weight": drawn(8, 8, 3), "A_log": matrix,
               "empty.weight": drawn(0, 256), "up.weight": matrix,
               "mlp.odd.weight": drawn(16, 250), "blocks.1.down.weight": matrix}
    path = plain_folder(tmp_path / "in", tensors)
    report = quantize(path, tmp_path / "out", "q4_0", ignore=(r"blocks\.\d+\..*",))
    assert [row["name"] for row in report["quantized"]] == ["up"]
    heads = "heads, embeddings, norms and routers stay plain"
    assert report["left"] == {
        "h.0.attn.c_attn": "its bias has K numbers: it is no Linear layer, or is [K, N]",
        "h.0.mlp.c_attn": "its bias has K numbers: it is no Linear layer, or is [K, N]",
        "shared": heads, "decoder.block.0.relative_attention_bias": heads, "tokens": heads, "empty": "it has no numbers",
        "mlp.odd": "q4_0.gguf: K = 250 must be a multiple of 32", "blocks.1.down": "a pattern names it"}
    with Folder(tmp_path / "out") as folder:
        assert all(same_bits(folder.tensor(name), tensor) for name, tensor in tensors.items() if name != "up.weight")


@pytest.mark.parametrize("skip", [False, True])
def test_a_tied_head_is_named(tmp_path: Path, skip: bool) -> None:
    """transformers would make an FP8 layer of it, for which there is no weight."""
    tensors = {"model.embed_tokens.weight": drawn(96, 128), "model.layers.0.up.weight": drawn(128, 128)}
    if skip:
        tensors["model.layers.0.down.weight"] = drawn(128, 128)
    quantize(plain_folder(tmp_path / "in", tensors), tmp_path / "out", "fp8_block", ignore=("down",) if skip else ())
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["model.embed_tokens", *(["model.layers.0.down"] if skip else []), "lm_head"]


def experts(transposed: bool, count: int = 3) -> dict[str, Tensor]:
    up, down = drawn(count, 256, 128), drawn(count, 128, 128, seed=1)
    return {"mlp.experts.gate_up_proj": up.transpose(1, 2).contiguous() if transposed else up, "mlp.experts.down_proj": down,
            "mlp.up.weight": drawn(128, 128)}


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor(tmp_path: Path, transposed: bool) -> None:
    """Each by itself, [E, N, K] or [E, K, N] as the two weights of a module tell."""
    tensors = experts(transposed)
    report = quantize(plain_folder(tmp_path / "in", tensors), tmp_path / "out", "fp8_block", {"bn": 64, "bk": 64})
    assert report["left"] == {} and report["quantized"][0]["shape"][0] == 3
    with Folder(tmp_path / "out") as folder:
        by_name = {layer.name: layer for layer in layers(folder).layers}
        assert {name: layer.transposed for name, layer in by_name.items()} == {
            "mlp.experts.gate_up_proj": transposed, "mlp.experts.down_proj": transposed, "mlp.up": False}
        for name, end in (("mlp.experts.gate_up_proj", ""), ("mlp.experts.down_proj", "")):
            for expert, values in enumerate(tensors[name]):
                packed = expected(values.t().contiguous() if transposed else values, "fp8_block", {"bn": 64, "bk": 64}).tensors
                for leaf, full in (("weight", name + end), ("weight_scale_inv", f"{name}_scale_inv")):
                    stored = folder.tensor(full)[expert]
                    assert same_bits(stored.t().contiguous() if transposed else stored, packed[leaf])


@pytest.mark.parametrize(("to", "why"), [("int8_channel", "compressed-tensors has no names for experts in one tensor"),
                                         ("q4_0", "no rule gives the name of 'blocks'")])
def test_experts_that_have_no_names_stay_plain(tmp_path: Path, to: str, why: str) -> None:
    report = quantize(plain_folder(tmp_path / "in", experts(False)), tmp_path / "out", to)
    assert [row["name"] for row in report["quantized"]] == ["mlp.up"] and len(report["left"]) == 2
    assert all(why in reason for reason in report["left"].values())


def test_experts_whose_order_of_axes_nothing_tells_stay_plain(tmp_path: Path) -> None:
    tensors = {"mlp.experts.gate_proj": drawn(3, 128, 256), "mlp.experts.down_proj": drawn(3, 256, 128),
               "up.weight": drawn(128, 128)}
    report = quantize(plain_folder(tmp_path / "in", tensors), tmp_path / "out", "fp8_block")
    assert set(report["left"].values()) == {"nothing tells whether its experts are [E, N, K] or [E, K, N]"}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["mlp.experts"]


# Several models


def pipeline(path: Path) -> Path:
    """A pipeline whose two text encoders have the same names."""
    for number, name in enumerate(("text_encoder", "text_encoder_2", "transformer")):
        tensors = {"up.weight": drawn(128, 128, seed=number), "norm.weight": torch.ones(4)}
        plain_folder(path / name, tensors, 2, {"_class_name": "FluxTransformer2DModel"} if name == "transformer" else CONFIG)
    (path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    return path


def test_models_of_a_pipeline(tmp_path: Path) -> None:
    """Those that are named, each with a config of its own."""
    path = pipeline(tmp_path / "in")
    report = quantize(path, tmp_path / "out", "fp8_block", only=("text_encoder_2", "transformer"))
    assert {row["name"] for row in report["quantized"]} == {"text_encoder_2/up", "transformer/up"}
    assert report["readers"] == {"text_encoder_2": "qdsl, transformers, vLLM", "transformer":
                                 "qdsl, vLLM-Omni where its class quantizes the same layers"}
    for number, name in enumerate(("text_encoder", "text_encoder_2", "transformer")):
        weights = {} if number == 0 else {"up": expected(drawn(128, 128, seed=number), "fp8_block")}
        check_opens(tmp_path / "out" / name, weights)
    assert (tmp_path / "out" / "model_index.json").read_bytes() == (path / "model_index.json").read_bytes()
    assert (tmp_path / "out/text_encoder/config.json").read_bytes() == (path / "text_encoder/config.json").read_bytes()
    folders.folder(path / "vae", {"query.weight": drawn(128, 128)}, config={"_class_name": "AutoencoderKL"}, index=False)
    every = quantize(path, tmp_path / "every", "fp8_block")
    assert len(every["requantized"]) == 3 and every["left"]["vae/"] == "`--component vae` quantizes it"
    assert quantize(path, tmp_path / "vae", "fp8_block", only=("vae",))["requantized"].keys() == {"vae/query"}
    wrong = refused(path, "fp8_block", only=("unet",))
    assert "no model 'unet': there are text_encoder, text_encoder_2, transformer, vae" in wrong


# Work that is broken off


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader takes what is left for a checkpoint, and the next process makes the same bytes of it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    tensors = {"up.weight": drawn(128, 128), "down.weight": drawn(128, 128, seed=1), "norm.weight": torch.ones(3)}
    path = plain_folder(tmp_path / "in", tensors, 2)
    reports = list(folders.killed_everywhere(lambda out: quantize(path, out, "fp8_block"), tmp_path))
    costs = quantize(path, tmp_path / "again", "fp8_block")["quantized"]
    resumed = [report["quantized"] for report in reports if report["quantized"]]
    assert resumed == [costs] * len(resumed) and len(resumed) > 20 // folders.KILLED
    assert len(reports) - len(resumed) < 12 // folders.KILLED                       # they were complete before


def test_parts_and_processes_make_the_same_bytes(tmp_path: Path) -> None:
    path = plain_folder(tmp_path / "in", model(), 3)
    whole = quantize(path, tmp_path / "whole", "fp8_block")
    quantize(path, tmp_path / "jobs", "fp8_block", jobs=2)
    assert folders.files(tmp_path / "jobs") == folders.files(tmp_path / "whole")
    for number in (2, 1, 3):
        report = quantize(path, tmp_path / "parts", "fp8_block", part=(number, 3))
        assert len(report["shards"]) == 1 and not (tmp_path / "parts" / "config.json").exists()
    merged = run.merge(tmp_path / "parts")
    assert folders.files(tmp_path / "parts") == folders.files(tmp_path / "whole")
    assert sorted(merged["quantized"], key=str) == sorted(whole["quantized"], key=str) and merged["left"] == whole["left"]


def test_another_work_in_the_folder_is_refused(tmp_path: Path) -> None:
    path = plain_folder(tmp_path / "in", model(), 2)
    quantize(path, tmp_path / "out", "fp8_block", part=(1, 2))
    for to, ignore in (("fp8_channel", ()), ("fp8_block", ("up",))):
        with pytest.raises(RewriteError, match=r"a quantization to fp8_block\.safetensors was begun here"):
            quantize(path, tmp_path / "out", to, ignore=ignore)
    quantize(path, tmp_path / "out", "fp8_block")
    with pytest.raises(RewriteError, match="exists already"):
        quantize(path, tmp_path / "out", "fp8_block")


# Hostile inputs


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    """No checkpoint is left behind, and the message says how the others are quantized."""
    tensors = {"up.weight": drawn(128, 128), "down.weight": drawn(128, 128)}
    tensors["down.weight"][70, 5] = value
    path = plain_folder(tmp_path / "in", tensors)
    with pytest.raises(RewriteError, match=rf"layer 'down'.*{value} at row 70, column 5; `--skip down` leaves it plain"):
        quantize(path, tmp_path / "out", "fp8_block")
    assert os.listdir(tmp_path / "out") == [stage.STAGE]
    report = quantize(path, tmp_path / "again", "fp8_block", ignore=("down",))
    assert report["left"] == {"down": "a pattern names it"}


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_errors_of_numbers_whose_squares_leave_float32(tmp_path: Path, scale: float) -> None:
    tensors = {"up.weight": drawn(128, 128).float() * scale}
    report = quantize(plain_folder(tmp_path / "in", tensors), tmp_path / "out", "fp8_block")
    assert 25 < report["snr_db"] < 40


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(64, 100), "norm.weight": torch.ones(3)})
    assert "nothing to quantize: q4_0.gguf: K = 100 must be a multiple of 32" in refused(path, "q4_0")
    assert "nothing to quantize: it is made when a checkpoint is loaded" in refused(path, "q4_0.planar")
    assert "no format 'q9'" in refused(path, "q9")
    assert "`qdsl compress --format hlane`" in refused(path, "hlane")
    assert "bf16 is a format of plain numbers" in refused(path, "bf16")
    assert "has no parameter 'bits'" in refused(path, "fp8_block", {"bits": 3})
    with pytest.raises(OutputError, match="the output "):
        quantize(path, path / "out", "fp8_block")
    with pytest.raises(OutputError, match="the output "):
        quantize(path, path, "fp8_block")
    for name in ("out.gguf", "out.safetensors"):
        with pytest.raises(OutputError, match=rf"{name}: the output is a folder, and this is the name of a file"):
            quantize(path, tmp_path / name, "fp8_block")
    norms = plain_folder(tmp_path / "norms", {"norm.weight": torch.ones(3)})
    assert "nothing to quantize: no plain Linear layer" in refused(norms, "fp8_block")
    quantize(plain_folder(tmp_path / "plain", model()), tmp_path / "fp8", "fp8_block")
    assert re.search(r"layer '.*' is quantized already; `qdsl convert --requantize`", refused(tmp_path / "fp8", "q4_0"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"nor a \.safetensors file; `qdsl dequantize` makes one"):
        quantize(tmp_path / "model.gguf", tmp_path / "out", "fp8_block")


# The command


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.parametrize(("options", "message"), [
    ((), "say what to write: --type Q4_K_M, or another mix, writes a GGUF file; --format fp8_block"),
    (("--type", "q8_0", "--format", "fp8_block"), "--type writes a GGUF file and --format a folder of safetensors: give one"),
    (("--type", "q8_0", "--skip", "up"), "--skip is for --format"), (("--type", "q8_0", "--shard", "1/2"), "--shard is for"),
    (("--format", "fp8_block", "--pure"), "--pure is for --type"), (("--format", "fp8_block", "--arch", "flux"), "--arch is for"),
    (("--format", "fp8_block"), "give --out with the folder to write"),
    (("--format", "fp8", "--out", "x"), "no format 'fp8'; did you mean fp8_block, fp8_channel, "),
    (("--format", "bitsandbytes", "--out", "x"), "did you mean bnb_fp4, bnb_fp4_nested, bnb_int8, nf4 or nf4_nested?"),
    (("--format", "Q4_K_M", "--out", "x"), "Q4_K_M is a name of --type, which writes a GGUF file: x does not end in .gguf"),
    (("--type", "gptq", "--out", "x.gguf"), "gptq is a name of --format, which writes a folder, not x.gguf"),
    (("--format", "fp8_blok", "--out", "x"), "did you mean fp8_block"), (("--format", "xyz", "--out", "x"), "'xyz'; `qdsl list`"),
    (("--format", "fp8_block", "--out", "x", "--skip", "("), "--skip '(' is no regular expression"),
    (("--format", "fp8_block", "--out", "x", "--shard", "3/2"), "--shard is I/N"),
    (("--format", "fp8_block", "--out", "x", "--param", "bn"), "--param is key=value")])
def test_options_that_do_not_go_together(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = command("quantize", tmp_path / "in", *options)
    assert result.exit_code == 2 and message in result.stderr and not Path("x").exists()


def test_the_command_says_what_became_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain_folder(tmp_path / "in", model(), 3)
    options = ("quantize", "in", "--format", "int_group", "--storage", "gptq_v2", "--param", "bits=8", "--param", "group=32",
               "--jobs", "1", "--skip", "down")
    result = command(*options, "--out", "out", "--svg", "cost.svg")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines.pop(0) == "note: pytorch_model.bin holds other weights, and was not copied"
    assert lines[0].split() == ["layers", "count", "shape", "from", "MiB", "SNR", "dB", "relative", "RMS"]
    assert [line.split()[0] for line in lines[1:4]] == ["model.layers.*.gate_proj", "model.layers.*.up", "all"]
    assert "plain: 'model.layers.0.down': a pattern names it" in lines
    assert "read by: qdsl, gptqmodel" in lines and any(line.startswith("written  out: 3 files") for line in lines)
    assert "model.layers.0.up" in Path("cost.svg").read_text()
    for number in (1, 2, 3):
        assert command(*options, "--out", "parts", "--shard", f"{number}/3").exit_code == 0
    merged = command("merge-index", "parts", "--json")
    assert json.loads(merged.stdout)["schema"] == 1 and folders.files(Path("parts")) == folders.files(Path("out"))


def test_errors_of_the_command(tmp_path: Path) -> None:
    path = plain_folder(tmp_path / "in", model())
    result = command("quantize", path, "--format", "q9", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "error: no format 'q9'" in result.stderr
    result = command("convert", path, "--requantize", "fp8_block", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "no quantized layer; `qdsl quantize FOLDER --format FORMAT` quantizes plain ones" in result.stderr
    assert not (tmp_path / "out").exists()


# Models that run


@pytest.mark.parametrize(("kind", "to", "params"), [
    ("qwen3", "fp8_block", {"bn": 64, "bk": 64}), ("tied", "q4_0", {}), ("moe", "int_group", {"storage": "gptq_v2", "group": 32}),
    ("qwen3", "fp8_channel", {})])
def test_a_folder_runs_in_transformers(tmp_path: Path, kind: str, to: str, params: dict[str, Any]) -> None:
    """As the model that is quantized while it is loaded."""
    plugin = pytest.importorskip("qdsl.models.transformers")
    path = language_models.write_plain(tmp_path / "in", kind)
    storage = params.get("storage", "")
    options = {key: option for key, option in params.items() if key != "storage"}
    quantize(path, tmp_path / "out", f"{to}.{storage}".rstrip("."), options)
    model = plugin.from_pretrained(tmp_path / "out")
    online = type(model).from_pretrained(path, quantization_config=plugin.QdslConfig(to, **params))
    assert language_models.logits(model).equal(language_models.logits(online))
    assert len(model.hf_quantizer.report.packed) > 10
    if to == "q4_0":
        assert json.loads((tmp_path / "out" / "config.json").read_text())[FIELD] == SENTENCE
    model.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "in")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
