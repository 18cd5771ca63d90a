"""Folders with the settings of a producer that the caller chooses: the same weights, and a refusal before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qdsl
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.jobs.convert import run, target
from qdsl.jobs.demo import quickly_quantizes
from qdsl.jobs.engine import RewriteError
from tests.jobs.test_quantize_folder import COLUMNS, ROWS, check_opens, drawn, expected, plain_folder, quantize
from tests.support import folders
from tests.support.covering import quarter_of


@pytest.mark.parametrize(("to", "params", "producer"), [
    (f"{format}.{storage}", dict(where), producer) for format, storage, where, producer in (
        ("fp8_tensor", "safetensors", (), "fp8"), ("fp8_tensor", "safetensors", (), "modelopt"),
        ("fp8_tensor", "safetensors", (), "compressed-tensors"), ("fp8_block", "safetensors", (), "compressed-tensors"),
        ("fp8_block", "safetensors", (), "FP8"), ("fp8_channel", "safetensors", (), "modelopt"),
        ("ocp_mxfp8", "compressed_tensors", (("code", "e4m3"),), "modelopt"))])
def test_settings_of_a_chosen_producer(tmp_path: Path, to: str, params: dict[str, Any], producer: str) -> None:
    """Of plain layers, and of a folder that is quantized already: the same weights, and settings that detection reads alike."""
    tensors = {"up.weight": drawn(ROWS, COLUMNS), "lm_head.weight": drawn(96, COLUMNS)}
    path, out = plain_folder(tmp_path / "in", tensors), tmp_path / "out"
    chosen = target.parse_conversion(to, True, params, (), producer=producer)
    assert target.Conversion(**chosen.data()).producer == producer         # as `merge-index` reads it
    run.quantize(path, chosen, out)
    weights = {"up": expected(tensors["up.weight"], to, params)}
    check_opens(out, weights)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == producer.lower()
    if (to, producer) == ("fp8_tensor.safetensors", "fp8"):
        assert settings == {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"],
                            "ignored_layers": ["lm_head"]}
        with Folder(out) as folder:
            assert {name: entry.dtype for name, entry in ((name, folder.entry(name)) for name in folder.names())} == {
                "up.weight": "F8_E4M3", "up.weight_scale": "F32", "lm_head.weight": "BF16"}
    quantize(path, tmp_path / "default", to, params)
    with Folder(tmp_path / "default") as folder:
        run.convert(folder, layers(folder), target.parse_conversion(to.partition(".")[2], producer=producer), tmp_path / "again")
    check_opens(tmp_path / "again", weights)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == settings


LAYER = "blocks.0.pos.wte_proj"                                  # contains the name of a plain layer
OF_OMNI = "vLLM-Omni where its class quantizes the same layers"


@pytest.mark.parametrize(("to", "scales", "readers"), [
    ("fp8_block", {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}, f"qdsl, {OF_OMNI}"),
    ("fp8_tensor", {"activation_scheme": "dynamic"}, f"qdsl, {OF_OMNI}"), ("fp8_channel", {}, "qdsl alone")])
def test_models_of_diffusers(tmp_path: Path, to: str, scales: dict[str, Any], readers: str) -> None:
    """vLLM-Omni calls Fp8Config(**settings): no other names, and plain layers by whole names, even where others contain one."""
    tensors = {f"{LAYER}.weight": drawn(128, 256), "proj_out.weight": drawn(96, 256), "pos.wte.weight": drawn(64, 256)}
    path, out = plain_folder(tmp_path / "in", tensors, config={"_class_name": "FluxTransformer2DModel"}), tmp_path / "out"
    report = run.quantize(path, target.parse_conversion(to, True, {}, ["proj_out"], producer="fp8"), out)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings == {"quant_method": "fp8", **scales, "is_checkpoint_fp8_serialized": True,
                        "ignored_layers": ["pos.wte", "proj_out"]}
    assert report["readers"] == {"": readers} and "fp8" in report["not_read_by"][""]["diffusers"]
    assert ("vLLM-Omni" in report["not_read_by"][""]) == (readers == "qdsl alone")
    check_opens(out, {LAYER: expected(tensors[f"{LAYER}.weight"], to)})


@pytest.mark.parametrize("config", [{"model_type": "toy"}, {"_class_name": "FluxTransformer2DModel"}])
@pytest.mark.parametrize("static", [(), ("up",), ("up", "down")])
def test_scales_of_inputs(tmp_path: Path, static: tuple[str, ...], config: dict[str, str]) -> None:
    """`static` if every layer has one, `dynamic` if none has; a refusal, and nothing written, if only some have one."""
    tensors = {f"{name}.weight": drawn(ROWS, COLUMNS) for name in ("up", "down")}
    quantize(plain_folder(tmp_path / "in", tensors, config=config), tmp_path / "dynamic", "fp8_tensor")
    [file] = (tmp_path / "dynamic").glob("*.safetensors")
    scales = {f"{name}.input_scale": torch.tensor(0.5) for name in static}
    settings = json.loads((tmp_path / "dynamic" / "config.json").read_text())
    path = folders.folder(tmp_path / "static", {**load_file(file), **scales}, config=settings, index=False)
    out, chosen = tmp_path / "out", target.parse_conversion("safetensors", producer="fp8")
    with Folder(path) as folder:
        if len(static) == 1:
            with pytest.raises(RewriteError, match=r"'fp8' describe .*, some of which have input_scale and some not;"):
                run.convert(folder, layers(folder), chosen, out)
            assert not out.exists()
            return
        run.convert(folder, layers(folder), chosen, out)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["activation_scheme"] == (
        "static" if static else "dynamic")
    assert {name: float(tensor) for name, tensor in load_file(next(out.glob("*.safetensors"))).items()
            if name.endswith("input_scale")} == dict.fromkeys(scales, 0.5)
    check_opens(out, {name: expected(tensors[f"{name}.weight"], "fp8_tensor") for name in ("up", "down")})


@pytest.mark.parametrize(("to", "producer", "others"), [
    ("fp8_tensor", "gptq", "compressed-tensors, auto-round, fp8, modelopt"), ("int8_channel", "fp8", "compressed-tensors"),
    ("q4_k", "fp8", "qdsl")])
def test_a_producer_that_has_no_settings_for_the_storage(tmp_path: Path, to: str, producer: str, others: str) -> None:
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(ROWS, COLUMNS)})
    with pytest.raises(RewriteError, match=rf"no settings of '{producer}' describe its layers in {to}.*; those of {others}.* do"):
        run.quantize(path, target.parse_conversion(to, True, {}, (), producer=producer), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("producer", "near"), [("compresed-tensors", "compressed-tensors"), ("gptqq", "gptq")])
def test_a_producer_that_is_none(producer: str, near: str) -> None:
    with pytest.raises(RewriteError, match=rf"no producer '{producer}'; did you mean {near}"):
        target.parse_conversion("fp8_tensor", True, {}, (), producer=producer)


NOT_WRITTEN = {"fp8_ds_mla": "K = 512"}                           # formats of weights of one width
WIDER = {"any_precision": 1024}                                # of weights, where 256 do not fit
SMALL = {"vptq": {"bits": 12}, "vptq_residual": {"bits": 8, "more": 8}}      # tables, in place of large ones


def quantizers() -> list[str]:
    """Formats with a quantizer that loses something; without those whose tables take minutes."""
    variants = {name: own.variant(own.complete({})) for name in dir(qdsl.generated) if (own := qdsl.load(name).FORMAT)}
    return [name for name, own in variants.items() if name in SMALL or (own.copies is None and quickly_quantizes(own))]


@pytest.mark.parametrize("name", quarter_of(quantizers()))
def test_a_quantized_folder_fills_the_model(name: str, tmp_path: Path) -> None:
    """By the settings and names that are written for each format; or nothing is written, and the reason said."""
    path = plain_folder(tmp_path / "in", {"up.weight": drawn(128, k := WIDER.get(name, 256))})
    aim = target.parse_conversion(name, True, SMALL.get(name, {}), ())
    if name in NOT_WRITTEN:
        with pytest.raises(RewriteError, match=f"nothing to quantize: .*{NOT_WRITTEN[name]}"):
            run.quantize(path, aim, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    run.quantize(path, aim, tmp_path / "out")
    model, again = (torch.nn.ModuleDict({"up": torch.nn.Linear(k, 128, bias=False)}) for _ in range(2))
    assert qdsl.load_weights_(model, tmp_path / "out").packed == {"up": f"{name}.{aim.storage}"}
    quantized = torch.nn.ModuleDict({"up": torch.nn.Linear(k, 128, bias=False)})
    qdsl.quantize_(quantized, name, **SMALL.get(name, {}))
    qdsl.save_model(quantized, tmp_path / "saved")
    assert qdsl.load_weights_(again, tmp_path / "saved").packed == {"up": f"{name}.{aim.storage}"}
