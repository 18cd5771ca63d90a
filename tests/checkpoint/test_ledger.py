"""Every setting of every producer is used, inert, coarser, acts or is not understood; the last two are refused.

tests/data/producer_settings.json has what the packages of producers write, with all keys of their classes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.detect.ledger import Kind, refuse_changes
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.core.producer import INLINE
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from tests.support import folders, producer_folders
from tests.support.converted_folders import weight
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data"
WRITTEN: list[dict[str, Any]] = json.loads((DATA / "producer_settings.json").read_text())
# Folders whose settings are changed: one of each producer that has other keys.
KINDS = ("fp8 block", "compressed-tensors fp8 channel", "compressed-tensors int4", "modelopt fp8", "modelopt nvfp4", "gptq v1",
         "awq", "bitsandbytes nf4", "hqq", "bitnet", "aqlm 2x8", "own int_group")
PLACES = [producer for producer in producers().every if producer.formats and not producer.common]


def refused(settings: Mapping[str, Any], method: str = "") -> list[str]:
    return [str(finding) for finding in quantization(settings, "config.json: quantization_config", method).findings
            if finding.is_refused]


def others(value: Any) -> Iterator[Any]:
    """Values that are not a setting's own."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield "another"
    else:
        yield from ({"another": 1}, ["another"], True, 7)


def leaves(settings: Mapping[str, Any], start: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All settings, with the keys that lead to them; objects too."""
    for key, value in settings.items():
        yield (*start, key), value
        if isinstance(value, Mapping):
            yield from leaves(value, (*start, key))


def changed(settings: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *inner = keys
    return {**settings, first: changed(settings[first], tuple(inner), value) if inner else value}


@pytest.mark.parametrize("written", WRITTEN, ids=[written["source"] for written in WRITTEN])
def test_what_producers_write_is_understood(written: dict[str, Any]) -> None:
    assert refused(written["settings"]) == []


def test_what_transformers_writes_is_understood() -> None:
    """The defaults of its classes, of all producers whose weights qdsl reads."""
    configs = pytest.importorskip("transformers.utils.quantization_config")
    methods = set()
    for name, cls in inspect.getmembers(configs, inspect.isclass):
        if not issubclass(cls, configs.QuantizationConfigMixin) or name in ("QuantizationConfigMixin", "VptqLayerConfig"):
            continue
        try:
            config = cls(bits=4) if name == "GPTQConfig" else cls()
        except (ImportError, TypeError):                         # of packages that are not installed
            continue
        settings = json.loads(config.to_json_string(use_diff=False))
        if producers().is_known(settings["quant_method"]):
            methods.add(settings["quant_method"])
            assert refused(settings) == [], name
    assert {"gptq", "awq", "fp8", "bitsandbytes", "bitnet", "auto-round", "mxfp4", "eetq", "quanto"} <= methods


def test_files_of_packages_are_understood() -> None:
    """All of tests/data that packages of producers wrote; the one file of transforms alone belongs to another test."""
    files = {path.parent if (path.parent / "config.json").exists() else path for path in DATA.rglob("*.safetensors")}
    files -= {DATA / "transforms" / "answers.safetensors"}
    assert {path: texts for path in files if (texts := [
        str(finding) for finding in detected(path).findings if finding.is_refused])} == {} and len(files) > 15


@pytest.mark.parametrize("kind", [kind for kind in producer_folders.KINDS if kind not in KINDS])
def test_true_folders_are_understood(tmp_path: Path, kind: str) -> None:
    producer_folders.write_folder(tmp_path / "in", kind, "qwen3")
    assert [finding for finding in detected(tmp_path / "in").findings if finding.is_refused] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_of_each_producer(tmp_path: Path, kind: str) -> None:
    """True folders are never refused.  A changed setting gives the same layers, or is refused by its name and value."""
    producer_folders.write_folder(tmp_path / "in", kind, "qwen3")
    file = tmp_path / "in" / ("hf_quant_config.json" if (tmp_path / "in" / "hf_quant_config.json").exists() else "config.json")
    whole = json.loads(file.read_text())
    place = "quantization" if file.name != "config.json" else "quantization_config"
    true = detected(tmp_path / "in")
    assert [finding for finding in true.findings if finding.is_refused] == []
    settings = whole.get(place, {})
    for keys, value in [*leaves(settings), (("nobody_knows_this",), None)]:
        for other in others(value):
            now = changed(settings, keys, other)
            answers = refused(now, "modelopt" if place == "quantization" else "")
            if keys == ("nobody_knows_this",):
                assert len(answers) == 1 and keys[0] in answers[0]
            elif not answers:
                file.write_text(json.dumps({**whole, place: now}))
                assert same_or_contradicted(tmp_path / "in", true), f"{'.'.join(keys)} = {other} in place of {value}"


def detected(path: Path) -> Layers:
    with Folder(path) as folder:
        return detected_layers(folder)


def same_or_contradicted(path: Path, true: Layers) -> bool:
    """Whether layers come out as before, or are refused, or are those of another layout that tensors fit."""
    try:
        with Folder(path) as folder:
            now = layers(folder)
    except CheckpointError:
        return True
    return [(layer.name, layer.tensors) for layer in now.layers if layer.format] == [
        (layer.name, layer.tensors) for layer in true.layers] or any(layer.why for layer in now.layers)


@pytest.mark.parametrize("producer", PLACES, ids=[producer.name for producer in PLACES])
def test_what_nobody_knows_is_refused_wherever_it_stands(producer: Any) -> None:
    method, keys = producer.name, producers().keys(producer.name)
    wholes: list[tuple[str, dict[str, Any]]] = [("", {})]
    wholes += [(f"{key}.up.", {key: {"up": {}}}) for key in keys.layers if key != INLINE]
    wholes += [(f"{key}.up.", {key: {"up": {}}}) for key in keys.patterns]
    wholes += [(f"{key}.group_0.weights.", {key: {"group_0": {"weights": {}}}}) for key in keys.groups]
    for start, whole in wholes:
        for value in ("word", 3, True, {"a": 1}, ["a"]):
            answers = refused(into(whole, {"nobody": value}), method)
            if "*" in producer.open and isinstance(value, str | int) and value is not True:
                assert answers == []
                continue
            assert len(answers) == 1 and f"{start}nobody" in answers[0] and "which may change" in answers[0], (start, value)
        for nothing in (None, "", False, [], {}, {"a": None}):
            assert refused(into(whole, {"nobody": nothing}), method) == []


def into(whole: dict[str, Any], leaf: dict[str, Any]) -> dict[str, Any]:
    """An object with a leaf in its innermost object."""
    return {key: into(value, leaf) for key, value in whole.items()} if whole else leaf


def test_numbers_and_words_of_open_objects_are_warnings(tmp_path: Path) -> None:
    """Each release of auto-round, and of gptqmodel under `meta`, adds keys; objects and switches there may change a model."""
    for settings in ({"quant_method": "auto-round", "added": "word"}, {"quant_method": "gptq", "meta": {"added": 0.5}}):
        kinds = [finding.kind for finding in quantization(settings, "config.json", "").findings]
        assert kinds == [Kind.NEW]
    assert refused({"quant_method": "gptq", "meta": {"added": {"rotate": 3}}})
    assert refused({"quant_method": "auto-round", "added": True})


@pytest.mark.parametrize(("settings", "key"), [
    ({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"config_groups": {"R4": {"twist": 2}}}},
     "transform_config.config_groups.R4.twist"),
    ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm"),
    ({"quant_method": "auto-round", "rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config"),
    ({"quant_method": "gptq", "rotation": "hadamard"}, "rotation"),
    ({"quant_method": "quark", "algo_config": [{"name": "rotation", "r1": True, "r4": True}]}, "algo_config.0.r4"),
    ({"quant_method": "quark", "algo_config": [{"name": "of tomorrow"}]}, "algo_config.0.name"),
    ({"quant_method": "quark", "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int8"}}}}, "layer_type_quant_config"),
    ({"quant_method": "of tomorrow", "bits": 4}, "quant_method"),
])
def test_what_acts_on_x_is_refused(settings: dict[str, Any], key: str) -> None:
    [answer] = refused(settings)
    assert f": {key} is " in answer and "change" in answer


def two(path: Path, more: Mapping[str, torch.Tensor] | None = None, **settings: Any) -> Path:
    own = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "sym": False}
    tensors = {**folders.named({"model.up": weight()}), **(more or {})}
    return folders.folder(path, tensors, config={"quantization_config": {**own, **settings}})


def test_whoever_runs_or_rewrites_a_folder_refuses_it(tmp_path: Path) -> None:
    """load_weights_ and convert; with allow_unknown both go on, and say so.  Contradictions are refused all the same."""
    import qdsl

    path = two(tmp_path / "in", mystery="word")
    model = torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False))
    rename = {"model.up": "0"}
    with pytest.raises(CheckpointError, match="mystery is 'word', which may change the weights of layers"):
        qdsl.load_weights_(model, path, rename)
    report = qdsl.load_weights_(model, path, rename, allow_unknown=True)
    assert len(report.allowed) == 1 and "mystery" in report.allowed[0] and "not computed: config.json" in str(report)
    with Folder(path) as folder, pytest.raises(CheckpointError, match="mystery"):
        run.convert(folder, layers(folder), parse_conversion("gptq_v1"), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with Folder(path) as folder:
        written = run.convert(folder, layers(folder), parse_conversion("gptq_v1", allow_unknown=True), tmp_path / "out")
    assert any("mystery" in note for note in written["notes"])
    wrong = two(tmp_path / "wrong", mystery="word")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({"quantization_config": {**config["quantization_config"], "bits": 8}}))
    with pytest.raises(CheckpointError, match="bits"):
        qdsl.load_weights_(model, wrong, rename, allow_unknown=True)


def test_conversions_keep_what_nobody_understands_and_say_what_they_drop(tmp_path: Path) -> None:
    unknown = {"twist": 3}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "int"}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
                "mystery": unknown, "kv_cache_scheme": {"num_bits": 8}}
    path = folders.folder(tmp_path / "in", folders.named({"model.up": weight(storage="pack_quantized")}),
                          config={"quantization_config": settings})
    for number, aim in enumerate((parse_conversion("fp8_block", True), parse_conversion("gptq_v2"))):
        out = tmp_path / str(number)
        with Folder(path) as folder, pytest.raises(CheckpointError, match="mystery is"):
            run.convert(folder, layers(folder), aim, out)
        with Folder(path) as folder:
            allowed = parse_conversion(aim.label, aim.requantize, aim.params, allow_unknown=True)
            notes = run.convert(folder, layers(folder), allowed, out)["notes"]
        assert json.loads((out / "config.json").read_text())["quantization_config"]["mystery"] == unknown
        assert {f"the settings do not say {name} any more" for name in ("input_activations", "kv_cache_scheme")} <= {*notes}
        assert any("mystery" in note for note in notes)
        with Folder(out) as folder, pytest.raises(CheckpointError, match="mystery"):
            refuse_changes(out, layers(folder).findings, allow_unknown=False)


@pytest.mark.parametrize(("name", "kind"), [
    ("model.up.act_scales", Kind.UNKNOWN), ("model.up.input_scale", Kind.COARSER), ("model.act.scales", Kind.ACTS),
    ("model.up.input_quantizer._pre_quant_scale", Kind.ACTS), ("model.up.weight_quantizer._svdquant_lora_a", Kind.ACTS),
    ("model.up.bias", None), ("model.norm.weight", None)])
def test_tensors_next_to_weights(tmp_path: Path, name: str, kind: Kind | None) -> None:
    path = two(tmp_path / "in", {name: torch.ones(16)})
    assert [(finding.key, finding.kind) for finding in detected(path).findings] == ([] if kind is None else [(name, kind)])


def test_a_tensor_that_its_module_does_not_compute_with_is_refused(tmp_path: Path) -> None:
    """Where the model has the module; tensors of other modules, such as a second model's, are reported as not used."""
    import qdsl

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = torch.nn.Linear(64, 16, bias=False), torch.nn.LayerNorm(16, bias=False)
            self.layers = torch.nn.ModuleList([torch.nn.Module()])

    own = {"norm.weight": torch.ones(16)}
    for name, is_refused in (("norm.bias", True), ("norm.factor", True), ("up.bias", True), ("other.weight", False),
                             ("norm.inv_freq", False), ("layers.0.norm.weight", True), ("layers.1.norm.weight", False),
                             ("layers.0.self_attn.rotary_emb.inv_freq", False)):
        path = two(tmp_path / name, {f"model.{key}": tensor for key, tensor in {**own, name: torch.ones(16)}.items()})
        if is_refused:
            with pytest.raises(CheckpointError, match=f"tensor model.{name}"):
                qdsl.load_weights_(Block(), path, {"model.": ""})
        report = qdsl.load_weights_(Block(), path, {"model.": ""}, allow_unknown=is_refused)
        assert report.unused == [f"model.{name}"] and bool(report.allowed) is is_refused


def test_what_the_model_has_a_place_for_is_no_finding(tmp_path: Path) -> None:
    """AutoAWQ's ScaledActivation divides by `scales`, where a model has it."""
    import qdsl

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = torch.nn.Linear(64, 16, bias=False), torch.nn.Module()
            self.act.scales = torch.nn.Parameter(torch.zeros(16))

    path = two(tmp_path / "in", {"model.act.scales": torch.ones(16)})
    model = Scaled()
    assert qdsl.load_weights_(model, path, {"model.": ""}).allowed == [] and model.act.scales.sum() == 16
