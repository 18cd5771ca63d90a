"""Configs of folders that qdsl alone reads: what stops other loaders, where it stands, and how it goes away again."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from qdsl.checkpoint.detect.guard import FIELD, REPLACED, SENTENCE, has_own_settings, with_guard, without_guard
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.files.folder import ORIGINAL, Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.generated import fp8_block, int8_channel, int_group
from qdsl.jobs.compress import restore, run
from qdsl.jobs.compress.units import FORMATS, Compression
from qdsl.jobs.convert import run as converting
from qdsl.jobs.convert.target import parse_conversion
from qdsl.jobs.engine import RewriteError, stage
from qdsl.runtime import PackedWeight
from tests.support import folders

GUARD = {FIELD: SENTENCE}
ROPE = {"rope_type": "yarn", "factor": 4.0}
VISION: dict[str, Any] = {
    "model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 2},
    "text_config": {"model_type": "gemma3_text", "rope_scaling": ROPE}, "dtype": "bfloat16"}


def matrix(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02).bfloat16()


def integers(storage: str = "gptq_v2", **options: Any) -> PackedWeight:
    """Codes of 4 bits whose zero points are all 8, which every storage holds."""
    packed = int_group.quantize(matrix(64, 128).float(), "gptq_v2", **{"bits": 4, "group": 32, **options})
    fields = int_group.unpack(packed)
    fields["z"] = torch.full_like(fields["z"], 8)
    return int_group.pack(fields, storage, **packed.params)


def convert(path: Path, out: Path, to: str) -> dict[str, Any]:
    """The config of the folder that `convert` writes."""
    with Folder(path) as folder:
        converting.convert(folder, layers(folder), parse_conversion(to), out)
    return config(out)


def config(path: Path) -> dict[str, Any]:
    """The data of a config.json whose text is laid out as qdsl lays it out."""
    text = (path / "config.json").read_text()
    data: dict[str, Any] = json.loads(text)
    assert text == json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return data


def recognised(path: Path) -> Layers:
    with Folder(path) as folder:
        return detected_layers(folder)


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


# The sentence


def test_the_sentence_is_no_name_of_a_file() -> None:
    """transformers takes names with these ends for files, and looks for them."""
    assert not SENTENCE.endswith((".safetensors", ".safetensors.index.json", ".bin"))
    assert "`pip install .` in a clone" in SENTENCE and "`import qdsl.models.transformers`" in SENTENCE
    assert "`qdsl.load_weights_(model, folder)`" in SENTENCE


@pytest.mark.parametrize(("key", "value", "is_model"), [
    ("text_config", {"model_type": "llama"}, True),
    ("encoder", {"model_type": "bert"}, True),                   # of encoder-decoder, whose keys have no ending
    ("vision_config", {"depth": 32, "embed_dim": 1280}, True),   # Qwen2-VL's, without a type
    ("talker_config", {"text_config": {"model_type": "talker_text"}}, True),     # Qwen3-Omni's has a type of no letters
    ("code2wav_config", {"model_type": "", "num_hidden_layers": 8}, True),
    ("attn_config", {"model_type": "", "clip_qkv": 8}, False),   # DBRX's, which refuses fields that it does not know
    ("ffn_config", {"ffn_hidden_size": 64}, False),
    ("rope_scaling", ROPE, False), ("quantization_config", {"model_type": "x", "num_layers": 2}, False),
    ("generation_config", {"model_type": "llama"}, False), ("dfloat11_config", {"num_layers": 2}, False),
    ("text_config", None, False), ("text_config", [{"model_type": "llama"}], False), ("text_config", "llama", False),
])
def test_which_objects_are_models(key: str, value: Any, is_model: bool) -> None:
    got = with_guard({key: value})
    assert got == {key: with_guard(value) if is_model else value, **GUARD}
    assert without_guard(got) == {key: value}


def test_models_within_models() -> None:
    thinker: dict[str, Any] = {"model_type": "thinker", "text_config": {"model_type": "text", "rope_parameters": ROPE}}
    got = with_guard({"model_type": "omni", "thinker_config": thinker})
    assert got == {"model_type": "omni", **GUARD, "thinker_config": {
        **thinker, **GUARD, "text_config": {**thinker["text_config"], **GUARD}}}


VALUES = st.recursive(st.sampled_from([None, True, 0, 7, "", "llama", "model.fp16.safetensors"]),
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
                          st.sampled_from(["model_type", "text_config", "decoder", "depth", "quantization_config", FIELD]), inner,
                          max_size=4), max_leaves=8)


@given(st.dictionaries(st.sampled_from(["text_config", "vision_config", "encoder", "a", FIELD]), VALUES, max_size=4))
def test_there_and_back(data: dict[str, Any]) -> None:
    """In the same order, from any config; a second call changes nothing, and neither changes what it is given."""
    before = copy.deepcopy(data)
    once = with_guard(data)
    assert with_guard(once) == once and data == before
    assert json.dumps(without_guard(once)) == json.dumps(data)
    assert without_guard(data) == data


def test_a_file_that_the_config_names_comes_back(tmp_path: Path) -> None:
    """It is transformers' own field; the sentence has to stand in its place, or the named file is loaded."""
    own: dict[str, Any] = {"model_type": "toy", FIELD: "model.fp16.safetensors", "quantization_config": folders.GPTQ,
           "text_config": {"model_type": "toy_text", FIELD: None}}
    path = folders.folder(tmp_path / "in", folders.named({"up": integers()}), config=own)
    data = convert(path, tmp_path / "xpu", "xpu_int4pack")
    assert (data[FIELD], data[REPLACED]) == (SENTENCE, own[FIELD])
    assert data["text_config"] == {**own["text_config"], FIELD: SENTENCE, REPLACED: None}
    back = convert(tmp_path / "xpu", tmp_path / "gptq", "gptq_v2")
    assert {**back, "quantization_config": folders.GPTQ} == own and list(back) == list(own)
    assert convert(path, tmp_path / "awq", "awq")[FIELD] == own[FIELD]


# Convert


def test_convert_guards_what_no_producer_has_words_for(tmp_path: Path) -> None:
    """Settings state the format, the storage and all parameters; in a producer's storage nothing of the guard is left."""
    before = {**VISION, "quantization_config": folders.GPTQ}
    path = folders.folder(tmp_path / "in", folders.named({"up": integers()}), config=before)
    settings = {"quant_method": "qdsl", "format": "int_group", "storage": "xpu_int4pack", "bits": 4, "group": 32,
                "scale_type": "f16"}
    data = convert(path, tmp_path / "xpu", "xpu_int4pack")
    assert data == {**VISION, "quantization_config": settings, **GUARD, "text_config": {**VISION["text_config"], **GUARD},
                    "vision_config": {**VISION["vision_config"], **GUARD}}
    assert list(data)[-1] == FIELD and has_own_settings(data)
    for to, method in (("gptq_v2", "gptq"), ("awq", "awq"), ("pack_quantized", "compressed-tensors")):
        data = convert(tmp_path / "xpu", tmp_path / to, to)
        assert data["quantization_config"]["quant_method"] == method and not has_own_settings(data)
        assert {key: value for key, value in data.items() if key != "quantization_config"} == VISION


def test_plain_floats_are_not_guarded(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": integers()}))
    convert(path, tmp_path / "xpu", "xpu_int4pack")
    with Folder(tmp_path / "xpu") as folder:
        converting.convert(folder, layers(folder), parse_conversion("bf16", True), tmp_path / "out")
    assert config(tmp_path / "out") == {"model_type": "toy", "architectures": ["Toy"]}


def test_settings_of_a_nested_model_guard_it_and_the_whole(tmp_path: Path) -> None:
    nested = {**VISION["text_config"], "quantization_config": folders.GPTQ}
    path = folders.folder(tmp_path / "in", folders.named({"up": integers()}), config={**VISION, "text_config": nested})
    data = convert(path, tmp_path / "out", "xpu_int4pack")
    assert data["text_config"]["quantization_config"]["quant_method"] == "qdsl" and "quantization_config" not in data
    assert [model[FIELD] for model in (data, data["text_config"], data["vision_config"])] == [SENTENCE] * 3


def test_layers_that_differ_are_guarded(tmp_path: Path) -> None:
    several = {"up": integers(), "other": int8_channel.quantize(torch.randn(8, 64))}
    path = folders.folder(tmp_path / "in", folders.named(several))
    assert convert(path, tmp_path / "out", "int_group.awq")[FIELD] == SENTENCE


def test_a_folder_without_a_config_gets_none_for_the_guard(tmp_path: Path) -> None:
    """One with settings in a file of their own gets a config where these are now, and its guard."""
    path = folders.folder(tmp_path / "in", folders.named({"up": integers("awq")}))
    (path / "config.json").unlink()
    with Folder(path) as folder:
        converting.convert(folder, layers(folder), parse_conversion("xpu_int4pack"), tmp_path / "none")
    assert not (tmp_path / "none" / "config.json").exists()
    (path / "quantize_config.json").write_text(json.dumps({"quant_method": "awq", "bits": 4, "group_size": 32}))
    assert {*convert(path, tmp_path / "out", "xpu_int4pack")} == {"quantization_config", FIELD}


# Compress


@pytest.mark.parametrize("index", [True, False], ids=["index", "file"])
@pytest.mark.parametrize("format", FORMATS)
def test_compressed_and_restored(format: str, index: bool, tmp_path: Path) -> None:
    """With a config whose bytes no writer of JSON makes again."""
    path = folders.folder(tmp_path / "in", {"a.up.weight": matrix(64, 96), "head.bias": matrix(9)}, index=index, config=VISION)
    text = json.dumps(VISION, indent=3).replace("0000", "0e3") + "\n\n"
    (path / "config.json").write_text(text)
    run.compress(path, Compression(format), tmp_path / "out")
    data = config(tmp_path / "out")
    groups = {"dfloat11_config": {"version": "0.5.0", "threads_per_block": [512], "bytes_per_thread": 8,
                                  "pattern_dict": {r"a\.up": []}}} if format == "df11" else {}
    settings = {"quant_method": "qdsl", "format": format, "storage": format, "version": 1}
    assert data == {**with_guard(VISION), **groups, "quantization_config": settings}
    assert [*data] == [*VISION, *groups, "quantization_config", FIELD]
    assert data["text_config"] == {**VISION["text_config"], **GUARD}
    got = recognised(tmp_path / "out")
    problems = [*got.problems, *(problem for one in (*got.layers, *got.groups) for problem in one.problems)]
    assert len(got.layers) + len(got.groups) == 1 and problems == []
    report = command("inspect", tmp_path / "out").stdout
    assert "contradictions" not in report and format in report
    assert command("verify", "--decoded", path, tmp_path / "out", "-j", 1).stdout == "equal\n"
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_text() == text
    (tmp_path / "out" / ORIGINAL).unlink()
    restore.decompress(tmp_path / "out", tmp_path / "again", like=path)
    assert config(tmp_path / "again") == VISION


def test_a_config_of_the_dfloat11_package(tmp_path: Path) -> None:
    """By an option, which other formats refuse; work that was begun without it is not completed with it."""
    path = folders.folder(tmp_path / "in", {"a.up.weight": matrix(64, 96)}, index=False, config={"model_type": "töy"})
    arguments = ("compress", path, "-f", "df11", "--plain-config", "-j", 1)
    assert command(*arguments, "-o", tmp_path / "out").exit_code == 0
    settings = {"version": "0.5.0", "threads_per_block": [512], "bytes_per_thread": 8, "pattern_dict": {r"a\.up": []}}
    assert (tmp_path / "out" / "config.json").read_text() == json.dumps({"dfloat11_config": settings}, indent=2)
    assert not recognised(tmp_path / "out").problems
    refused = command("compress", path, "-f", "hlane", "--plain-config", "-o", tmp_path / "no")
    assert refused.exit_code == 2 and "--file-per-group and --plain-config are of df11" in refused.stderr
    run.compress(path, Compression("df11", plain_config=True), tmp_path / "part", part=(1, 1))
    assert stage.read_request(tmp_path / "part")["plain_config"] is True
    with pytest.raises(RewriteError, match="a compression to df11 was begun here"):
        run.compress(path, Compression("df11"), tmp_path / "part")
    run.merge(tmp_path / "part")
    assert folders.files(tmp_path / "part") == folders.files(tmp_path / "out")


@pytest.mark.parametrize("format", FORMATS)
def test_models_of_a_pipeline(format: str, tmp_path: Path) -> None:
    """Every compressed model of transformers has a guard of its own; diffusers needs none, and others keep their bytes."""
    configs = {"transformer": {"_class_name": "Transformer"}, "text_encoder": VISION, "vae": {"_class_name": "VAE"}}
    for name, data in configs.items():
        (tmp_path / "pipe" / name).mkdir(parents=True)
        weight = matrix(4, 4, 3, 3) if name == "vae" else matrix(64, 96)
        write(tmp_path / "pipe" / name / "model.safetensors", {"up.weight": weight})
        (tmp_path / "pipe" / name / "config.json").write_text(json.dumps(data))
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "Pipe"}')
    run.compress(tmp_path / "pipe", Compression(format), tmp_path / "out")
    assert config(tmp_path / "out" / "text_encoder").items() >= with_guard(VISION).items()
    assert config(tmp_path / "out" / "transformer").keys() >= {"quantization_config"}
    assert FIELD not in config(tmp_path / "out" / "transformer")
    before, after = folders.files(tmp_path / "pipe"), folders.files(tmp_path / "out")
    assert all(before[name] == after[name] for name in ("model_index.json", "vae/config.json", "vae/model.safetensors"))
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == before


@pytest.mark.parametrize("place", ["config", "text_config", "file"])
@pytest.mark.parametrize("format", FORMATS)
def test_settings_of_other_layers_stay_alone(format: str, place: str, tmp_path: Path) -> None:
    """Wherever they lie: the first settings that a folder has speak for all of it."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["head"]}
    before = {"config": {"quantization_config": settings}, "text_config": {"text_config": {"quantization_config": settings}},
              "file": {}}[place] | {"model_type": "toy"}
    every = {"head.weight": matrix(128, 64), **folders.named({"up": fp8_block.quantize(torch.randn(128, 256))})}
    path = folders.folder(tmp_path / "in", every, index=False, config=before)
    if place == "file":
        (path / "quantize_config.json").write_text(json.dumps(settings))
    run.compress(path, Compression(format), tmp_path / "out")
    data = config(tmp_path / "out")
    assert data.get("quantization_config") == (settings if place == "config" else None) and data[FIELD] == SENTENCE
    got = recognised(tmp_path / "out")
    assert not got.problems and {(layer.format, layer.problems) for layer in got.layers} == (
        {("fp8_block", ())} | ({(format, ())} if format != "df11" else set()))
    (tmp_path / "out" / ORIGINAL).unlink()
    restore.decompress(tmp_path / "out", tmp_path / "back", like=path)
    assert config(tmp_path / "back") == before


def test_a_guard_from_before_stays(tmp_path: Path) -> None:
    """Of a folder that was converted first: what compress added goes, and the settings and the guard of before do not."""
    every = {**folders.named({"up": integers()}), "head.weight": matrix(64, 96)}
    path = folders.folder(tmp_path / "in", every, index=False)
    before = convert(path, tmp_path / "xpu", "xpu_int4pack")
    run.compress(tmp_path / "xpu", Compression("hlane"), tmp_path / "out")
    assert config(tmp_path / "out") == before
    assert {(layer.name, layer.format, layer.problems) for layer in recognised(tmp_path / "out").layers} == {
        ("up", "int_group", ()), ("head", "hlane", ())}
    (tmp_path / "out" / ORIGINAL).unlink()
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert config(tmp_path / "back") == before


def test_what_lies_beside_groups_is_converted_under_a_guard(tmp_path: Path) -> None:
    """The folder still needs a reader of DF11, whoever reads the other layers."""
    path = folders.folder(tmp_path / "in", {**folders.named({"up": integers()}), "head.weight": matrix(64, 96)}, index=False)
    run.compress(path, Compression("df11"), tmp_path / "df11")
    assert convert(tmp_path / "df11", tmp_path / "out", "awq")[FIELD] == SENTENCE


# Settings of qdsl that state too little, or something else


OWN = {"quant_method": "qdsl"}


def storage_of(path: Path, packed: PackedWeight, settings: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """The storage of the only layer, why there is none, and its contradictions."""
    folders.folder(path, folders.named({"w": packed}), config={"quantization_config": {**OWN, **settings}})
    [layer] = recognised(path).layers
    return layer.storage, layer.why, layer.contradictions


@pytest.mark.parametrize("settings", [{}, {"format": "int_group"}, {"bits": 4, "group": 32}, {"storage": "awq"},
                                      {"format": "int_group", "group": 32}])
def test_tensors_that_fit_one_way_need_not_be_stated(settings: dict[str, Any], tmp_path: Path) -> None:
    assert storage_of(tmp_path / "in", integers("awq"), settings) == ("awq", "", ())


def test_a_storage_that_has_to_be_stated(tmp_path: Path) -> None:
    """GPTQ's zero points differ by one, where its two storages have the same tensors; words that only one has tell, too."""
    packed = int_group.quantize(matrix(64, 128).float(), "gptq_v2", bits=4, group=32)
    fit = "the tensors fit int_group.gptq_v2 and int_group.gptq_v1, and nothing says which"
    remedy = f"{fit}: state 'storage' in config.json: quantization_config"
    assert storage_of(tmp_path / "none", packed, {}) == ("", remedy, ())
    assert storage_of(tmp_path / "format", packed, {"format": "int_group", "bits": 4, "group": 32}) == ("", remedy, ())
    assert storage_of(tmp_path / "words", integers(), {"format": "int_group", "bits": 4, "group": 32}) == ("gptq_v2", "", ())
    for storage in ("gptq_v1", "gptq_v2"):
        assert storage_of(tmp_path / storage, packed, {"storage": storage}) == (storage, "", ())


@pytest.mark.parametrize("settings", [{"format": "int_group", "storage": "gptq_v1"}, {"storage": "nope"}, {"format": "fp8_block"},
                                      {"format": "hlane", "storage": "hlane"}, {"group": 64}])
def test_settings_that_tensors_contradict(settings: dict[str, Any], tmp_path: Path) -> None:
    storage, why, problems = storage_of(tmp_path / "in", integers("awq"), settings)
    claimed = settings if "group" in settings else {**OWN, **settings}
    text = ", ".join(f"{key} = {value}" for key, value in claimed.items())
    fit = "the tensors fit int_group.awq bits=4 group=32 scale_type=f16"
    assert (storage, why, problems) == ("awq", "", (f"config.json: quantization_config says {text}; {fit}",))


def test_settings_of_layers_that_are_gone(tmp_path: Path) -> None:
    """Groups of DF11 do not excuse a producer's settings of which there is no layer."""
    path = folders.folder(tmp_path / "in", {"a.up.weight": matrix(64, 96)}, index=False)
    run.compress(path, Compression("df11"), tmp_path / "out")
    [problem] = recognised(tmp_path / "out").problems
    assert problem.startswith("config.json: quantization_config says quant_method = gptq") and "no tensor is quantized" in problem


@pytest.mark.parametrize("format", FORMATS)
def test_settings_of_another_format_than_the_streams(format: str, tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", {"a.up.weight": matrix(64, 96)}, index=False, config={})
    run.compress(path, Compression(format), tmp_path / "out")
    data = config(tmp_path / "out")
    data["quantization_config"] |= {"format": "int_group", "storage": "awq"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(data))
    [problem] = recognised(tmp_path / "out").contradictions
    assert problem.endswith(f"says quant_method = qdsl, format = int_group, storage = awq, version = 1; the tensors fit {format}")
