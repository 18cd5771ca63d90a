"""Each setting of each producer, set to another of its values: used with effect, reported, or refused; and never ignored unseen.

A setting that repeats what tensors say has no effect of its own: TENSORS_DECIDE names those.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.detect.ledger import Finding
from qdsl.checkpoint.detect.ledger import Kind as FindingKind
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import Quantization, quantization
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from tests.support import producer_folders
from tests.support.paths import ROOT
from tests.support.producer_folders import KINDS, MLX, Kind, Stored

LAYER, OTHER = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
_INT = Stored("int_group", "gptq_v1", {"bits": 4, "group": 64, "symmetric": True})
# Producers that `producer_folders` has no model of.
MORE = {
    "quark fp8": Kind(Stored("fp8_tensor", "safetensors"), {"quant_method": "quark", "global_quant_config": {"weight": {
        "dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "group_size": None, "symmetric": True}}}),
    "auto-round": Kind(_INT, {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int",
                              "packing_format": "auto_round:auto_gptq"}),
    "fbgemm": Kind(Stored("fp8_channel", "safetensors"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "eetq": Kind(Stored("int8_channel", "eetq"), {"quant_method": "eetq", "weights": "int8"}),
    "mxfp8": Kind(Stored("ocp_mxfp8", "compressed_tensors", {"code": "e4m3"}), {
        "quant_method": "mxfp8", "weight_block_size": [1, 32], "fmt": "e4m3"}),
    "int8 block": Kind(Stored("int8_block", "safetensors", {"bn": 128, "bk": 128}), {
        "quant_method": "blockwise_int8", "weight_block_size": [128, 128]}),
    "modelopt awq": Kind(Stored("int_group", "modelopt", {"bits": 4, "group": 64, "symmetric": True}), {
        "quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False}),
    "mlx": MLX,
}
FOLDERS = {**{name: kind for name, kind in KINDS.items() if kind.settings is not None and not kind.converted}, **MORE}
METHODS: dict[str, Any] = {
    method: cls for method, cls in pytest.importorskip("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING.items()
    if not method.startswith("bitsandbytes_")} | {
        "bitsandbytes": pytest.importorskip("transformers.utils.quantization_config").BitsAndBytesConfig}
NESTED = {"nbits", "group_size", "view_as_float", "axis", "dynamic_config"}           # which HqqConfig writes into another key
# By the last part of their names: values that settings may have.
VALUES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 8), "w_bit": (8,), "num_bits": (4, 8), "nbits": (2, 8), "group_size": (-1, 16, 32, 128), "q_group_size": (32,),
    "axis": (0, 1), "strategy": ("tensor", "channel", "group", "block", "tensor_group"), "type": ("int", "float"),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "gptq_v2", "gemv", "marlin"),
    "checkpoint_format": ("gptq", "gptq_v2", "gptq_p", "gemv", "marlin"), "version": ("gemm", "gemv", "gemv_fast", "marlin"),
    "fmt": ("e5m2",), "quant_type": ("fp4",), "quantization_mode": ("online",), "linear_class": ("autobitlinear", "bitlinear"),
    "quant_algo": ("FP8", "NVFP4", "W4A16_AWQ", "FP8_PB_WO"), "mode": ("mxfp4", "nvfp4"), "weights": ("int4", "float8"),
    "bnb_4bit_quant_type": ("nf4", "fp4"), "weight_block_size": ([64, 128],), "block_structure": ([64, 64],),
    "actorder": ("group", "static"), "activation_scheme": ("static", "dynamic"), "dtype": ("int8", "fp4", "fp8_e5m2"),
    "qscheme": ("per_channel", "per_group"), "packing_format": ("auto_round:auto_awq", "auto_round"),
    "data_type": ("mx_fp", "fp8"), "pack_dtype": ("int8", "int16", "int64"),
    "num_codebooks": (1, 3), "nbits_per_codebook": (4,), "in_group_size": (4,), "out_group_size": (2,)}
# Settings that say again what tensors say, or that are of another kind of weight: scales by their shapes, zero points and
# the index of columns by being there, bitsandbytes by its JSON.  Of a group compressed-tensors takes its format, modelopt all.
TENSORS_DECIDE = {
    "compressed-tensors": {"format", "actorder", "group_size", "block_structure", "type", "num_bits"},
    "gptq": {"sym", "desc_act", "lm_head", "format"},
    "modelopt": {"num_bits", "block_structure", "strategy", "type", "group_size"},
    "bitsandbytes": {"load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
                     "bnb_4bit_use_double_quant"},
    "hqq": {"round_zero", "channel_wise"}, "quark": {"group_size", "symmetric"}, "auto-round": {"sym", "data_type", "fmt"},
    "fp8": {"group_size", "bits", "data_type"}}


ONLY = ("targets", "modules_in_block_to_quantize")               # lists of layers that are quantized


def folder(path: Path, kind: Kind) -> tuple[Path, str, str]:
    """A folder of one layer; the file and the key of its settings."""
    path.mkdir()
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    packed = kind.prepare(kind.stored, weight) if kind.prepare else kind.stored.pack(weight)
    extra = {f"{LAYER}.{leaf}": torch.tensor(number, dtype=torch.float32) for leaf, number in kind.extra.items()}
    write(path / "model.safetensors", {**producer_folders.named(LAYER, packed), **extra})
    key = kind.entry if kind.file == "config.json" else "quantization"
    whole = {"model_type": "toy", key: dict(kind.settings or {})} if kind.file == "config.json" else dict(kind.settings or {})
    (path / kind.file).write_text(json.dumps(whole))
    return path / kind.file, key, "modelopt" if kind.file != "config.json" else "mlx" if key == "quantization" else ""


def answer(path: Path) -> Any:
    """What is recognised, reported and refused of a folder."""
    try:
        with Folder(path) as source:
            every = detected_layers(source)
    except CheckpointError as error:
        return str(error)
    return [(own.name, own.format, own.storage, dict(own.params), own.why, own.problems, own.contradictions,
             dict(own.numbers), [transform.label for transform in own.transforms]) for own in every.layers], \
        [str(finding) for finding in every.findings], every.problems


def declared(read: Quantization) -> set[str]:
    """The settings that a producer's file names as used, of the whole checkpoint."""
    own = producers().of(read.method)
    rules = [key for every in own.formats.values() for rule in every for key in (*rule, *rule.get("fixed", {}))]
    return {key for key in (*own.used, *own.skipped, *own.only, *rules, *own.accepts) if key.rpartition(".")[2] in VALUES
            or key in own.skipped or key in own.only}


def settings_of(settings: Mapping[str, Any], start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in settings.items():
        yield from settings_of(value, (*start, key)) if isinstance(value, Mapping) else [(*start, key)]


def changed(settings: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *inner = keys
    return {**settings, first: changed(settings.get(first, {}), tuple(inner), value) if inner else value}


def others(settings: Mapping[str, Any], keys: tuple[str, ...], lists: set[str]) -> Iterator[Any]:
    """Values of a setting that are not its own."""
    now: Any = settings
    for key in keys:
        now = now.get(key) if isinstance(now, Mapping) else None
    if keys[-1] in lists:
        yield [LAYER]
    if keys[-1] in ONLY:
        yield [OTHER]
    if isinstance(now, bool):
        yield not now
    yield from (value for value in VALUES.get(keys[-1], ()) if value != now)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_value_is_ignored(name: str, tmp_path: Path) -> None:
    kind = FOLDERS[name]
    file, entry, method = folder(tmp_path / "in", kind)
    whole, before = json.loads(file.read_text()), answer(tmp_path / "in")
    settings, read = whole[entry], quantization(whole[entry], "", method)
    own = producers().of(read.method)
    tried, ignored = 0, {}
    for keys in {*settings_of(settings), *((key,) for key in declared(read) if "." not in key)}:
        label = ".".join(keys)
        for value in others(settings, keys, {*own.skipped}) if keys[-1] not in own.inert and label not in own.inert else ():
            tried += 1
            file.write_text(json.dumps({**whole, entry: changed(settings, keys, value)}))
            if answer(tmp_path / "in") == before and keys[-1] not in TENSORS_DECIDE.get(own.name, ()):
                ignored[label] = value
    assert not ignored and (tried or own.name == "fbgemm_fp8")


@pytest.mark.parametrize("format", ["nf4", "nf4_nested", "bnb_fp4", "bnb_fp4_nested"])
def test_no_value_of_json_next_to_a_weight_is_ignored(format: str, tmp_path: Path) -> None:
    """What bitsandbytes says of a weight: each key another value, or left out, and keys that nobody knows."""
    folder(tmp_path / "in", Kind(Stored(format, "bitsandbytes"), {"quant_method": "bitsandbytes", "load_in_4bit": True}))
    file, before = tmp_path / "in" / "model.safetensors", answer(tmp_path / "in")
    with Folder(file) as source:
        tensors = {name: source.tensor(name).clone() for name in source.names()}
    [name] = [name for name in tensors if ".quant_state." in name]
    state: dict[str, Any] = json.loads(bytes(tensors[name].tolist()))
    values: dict[str, tuple[Any, ...]] = {"quant_type": ("nf4", "fp4", "int8"), "blocksize": (32, 128), "shape": ([256, 128],),
                                          "dtype": ("int8", 3), "nested_blocksize": (64, 128), "nested_dtype": ("float16",),
                                          "nested_offset": (1.5, "1.5")}
    tries = [{**state, key: value} for key in state for value in values[key] if value != state[key]]
    tries += [{**state, "nobody": value} for value in (3, True, "word", [3], {"a": 1})]
    tries += [{own: state[own] for own in state if own != key} for key in {*state} - {"dtype"}]
    for changed in tries:
        write(file, {**tensors, name: torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)})
        assert answer(tmp_path / "in") != before, changed


@pytest.mark.parametrize("key", ["threads_per_block", "bytes_per_thread", "pattern_dict", "nobody"])
def test_no_setting_of_coded_groups_is_ignored(key: str, tmp_path: Path) -> None:
    """DFloat11's own folder; its blocks and windows are those of its tensors."""
    path = Path(shutil.copytree(ROOT / "tests" / "data" / "df11_package" / "file_per_group" / "language_model", tmp_path / "in"))
    whole = json.loads((path / "config.json").read_text())
    for value in {"threads_per_block": ([256], [100], [1024], 512.5), "bytes_per_thread": (4, 16, True), "pattern_dict": ({}, {
            pattern: names[:1] for pattern, names in whole["dfloat11_config"]["pattern_dict"].items()}), "nobody": (
            3, True, "word")}[key]:
        (path / "config.json").write_text(json.dumps({"dfloat11_config": {**whole["dfloat11_config"], key: value}}))
        with Folder(path) as source:
            every = detected_layers(source)
        assert [str(finding) for finding in every.findings if key in finding.key] or [
            text for group in every.groups for text in group.errors if key in text or "weights, and there are" in text], value


def findings_of(method: str, settings: Mapping[str, Any]) -> list[Finding]:
    return quantization({"quant_method": method, **settings}, "config.json", "").findings


@pytest.mark.parametrize("method", METHODS)
def test_each_key_of_transformers_classes_is_known(method: str) -> None:
    """Its class's own arguments: a value that is not the default, of some type, is declared; and what may act has a reason."""
    if not producers().is_known(method):
        [finding] = findings_of(method, {})
        assert finding.kind is FindingKind.ACTS and len(finding.effect) > 30 and method in str(finding)
        return
    keys = inspect.signature(METHODS[method].__init__).parameters
    for key in keys.keys() - {"self", "kwargs", "quant_method"} - (NESTED if method == "hqq" else set()):
        kinds = [{finding.kind for finding in findings_of(method, {key: value})} for value in (True, 3, "fp8", ["a"], {"a": 1})]
        assert any(FindingKind.UNKNOWN not in own for own in kinds), key


@pytest.mark.parametrize("key", ["num_bits", "strategy", "symmetric"])
def test_settings_of_a_group_elsewhere_are_refused(key: str) -> None:
    """compressed-tensors has these in groups alone, and takes its defaults where a group does not say them."""
    [finding] = findings_of("compressed-tensors", {"config_groups": {}, key: 4})
    assert finding.kind is FindingKind.UNKNOWN and finding.key == key


def test_weights_that_are_rounded_as_they_run_are_refused(tmp_path: Path) -> None:
    """BitNet as it is trained: plain weights, of which each forward takes three values."""
    write(tmp_path / "model.safetensors", {f"{LAYER}.weight": torch.ones(64, 64, dtype=torch.float32)})
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(CheckpointError, match="quantization_mode is 'online', which changes the weights of layers"):
        qdsl.load_weights_(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)), tmp_path, {LAYER: "0"})
