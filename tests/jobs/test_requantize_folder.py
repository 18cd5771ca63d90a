"""Folders in other numbers, and layers that stay as they are: what is written, told and refused."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.generated import fp8_block, fp8_tensor, int_group
from qdsl.jobs.convert import run
from qdsl.jobs.convert.run import merge
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.gguf.quality import Sums, quantization_error
from tests.support import folders
from tests.support.converted_folders import requantized, two_layers, weight
from tests.support.formats import same_bits
from tests.support.jobs import command

weights = pytest.fixture(two_layers)


def test_requantized_layers(tmp_path: Path) -> None:
    """Of every format, of what they stand for; with what that cost, the config that belongs to it, and all else as it was."""
    weights = {"up": weight(), "down": weight(seed=1)}
    path = folders.folder(tmp_path / "in", {**folders.named(weights), "head.weight": torch.ones(2, 3)})
    report = requantized(path, tmp_path / "out", "fp8_block", {"bn": 32, "bk": 32})
    costs = []
    with Folder(tmp_path / "out") as folder:
        for name, quantized in weights.items():
            dense = int_group.dequantize(quantized, torch.float32)
            packed = fp8_block.quantize(dense, bn=32, bk=32)
            assert all(folder.tensor(f"{name}.{key}").equal(tensor) for key, tensor in packed.tensors.items())
            costs.append(quantization_error(dense, fp8_block.dequantize(packed, torch.float32)))
            assert report["requantized"][name] == costs[-1].data()
        assert len(folder.names()) == 5 and folder.tensor("head.weight").equal(torch.ones(2, 3))
        assert [(layer.format, layer.params["bn"], layer.problems) for layer in layers(folder).layers] == [
            ("fp8_block", 32, ())] * 2
        settings = folder.config["quantization_config"]
        assert settings == {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic",
                            "modules_to_not_convert": ["head"], "ignored_layers": ["head"]}
    assert report["snr_db"] == pytest.approx(sum(costs, Sums()).data()["snr_db"])
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "fp8_block.safetensors", "count": 2}]


@pytest.mark.parametrize(("name", "more"), [("nf4", {}), ("bnb_fp4_nested", {
    "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": None})])
def test_small_tensors_that_a_producer_puts_beside_a_weight(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    """JSON of what is known, and tables; under the names that files have, and with a config that says whose they are."""
    kind = name[4:7] if "fp4" in name else name
    config = {**({"dtype": "float16"} if more else {}), "quantization_config": folders.GPTQ}
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}) | {"head.weight": torch.ones(2, 3)}, config=config)
    requantized(path, tmp_path / "out", name, {"block": 32})
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        packed = import_module(f"qdsl.generated.{name}").quantize(int_group.dequantize(weight(), torch.float32), block=32)
        quant_state = json.loads(bytes(folder.tensor(f"up.weight.quant_state.bitsandbytes__{kind}").tolist()))
        assert list(quant_state) == ["quant_type", "blocksize", "dtype", "shape", *more]
        nested = {"nested_offset": float(packed.tensors["weight_nested_offset"])} if more else {}
        assert quant_state == {"quant_type": kind, "blocksize": 32, "dtype": config.get("dtype", "bfloat16"), "shape": [16, 64],
                               **more, **nested}
        leaves = ["weight", "weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{kind}"]
        leaves += ["weight.nested_absmax", "weight.nested_quant_map"] if more else []
        assert {leaf.removeprefix("up.") for leaf in folder.names()} == {*leaves, "head.weight"}
        assert folder.tensor("up.weight.absmax").equal(packed.tensors["weight_absmax"])
        [again] = layer_weights.weights(folder, layer)
        assert all(same_bits(again.tensors[key], tensor) for key, tensor in packed.tensors.items())
        assert folder.config["quantization_config"] == {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": bool(more), "llm_int8_skip_modules": ["head"]}
        assert layer.problems == () and not layer.others


def test_int8_of_bitsandbytes_has_the_config_that_it_loads(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"up": weight()}) | {"head.weight": torch.ones(2, 3)})
    requantized(path, tmp_path / "out", "bnb_int8", {})
    with Folder(tmp_path / "out") as folder:
        [layer] = layers(folder).layers
        assert (layer.format, layer.problems) == ("bnb_int8", ())
        assert set(folder.names()) == {"up.weight", "up.SCB", "head.weight"}
        assert folder.config["quantization_config"] == {"quant_method": "bitsandbytes", "load_in_8bit": True,
                                                        "llm_int8_skip_modules": ["head"]}


def test_requantized_in_parts(tmp_path: Path) -> None:
    """Their costs are kept until all is there; layers that have the format and its parameters change exactly, or not at all."""
    weights = {"up": weight(), "wide": int_group.quantize(torch.randn(8, 64), "gptq_v2", bits=8, group=32)}
    config = {"quantization_config": {**folders.GPTQ, "dynamic": {"wide": {"bits": 8}}}}
    every = folders.named(weights)
    shards = [{key: tensor for key, tensor in every.items() if key.startswith(name)} for name in weights]
    path = folders.folder(tmp_path / "in", *shards, config=config)
    options = {"bits": 4, "group": 32}
    requantized(path, tmp_path / "out", "int_group.gptq_v1", options, part=(1, 2))
    requantized(path, tmp_path / "out", "int_group.gptq_v1", options, part=(2, 2))
    report = merge(tmp_path / "out")
    assert list(report["requantized"]) == ["wide"] and 10 < report["snr_db"] < 40
    with Folder(tmp_path / "out") as folder:
        exact = int_group.convert(weights["up"], "gptq_v1")
        assert all(folder.tensor(f"up.{key}").equal(tensor) for key, tensor in exact.tensors.items())
        assert folder.entry("wide.qweight").shape == (8, 8)


def test_what_cannot_be_requantized(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}))
    for to, bits, message in (("nope", 4, "no format 'nope'"), ("int_group", 9, "bits is one of"),
                              ("int_group.nope", 8, "int_group has no storage 'nope'"),
                              ("int_group.planar", 8, "when a checkpoint is loaded")):
        with pytest.raises(RewriteError, match=message):
            requantized(path, tmp_path / "out", to, {"bits": bits})
    with pytest.raises(RewriteError, match="cannot be cpu_avx2: it is made when a checkpoint is loaded"):
        requantized(path, tmp_path / "out", "int4pack.cpu_avx2", {})
    assert not (tmp_path / "out").exists()


# -- layers that stay, and what is told ------------------------------------------------------------------------------------


def awkward(path: Path) -> Path:
    """Two layers of which AWQ can hold one: the other's rows are no multiple of 8."""
    torch.manual_seed(0)
    weights = {"model.up": int_group.quantize(torch.randn(16, 256), "gptq_v2", group=64),
               "model.down": int_group.quantize(torch.randn(12, 256), "pack_quantized", group=64)}
    return folders.folder(path, folders.named(weights))


def test_one_awkward_layer_does_not_stop_a_folder(tmp_path: Path) -> None:
    """Its bytes stay what they were, and the report says why; without the option a message says the option."""
    path = awkward(tmp_path / "in")
    refused = command("convert", path, "--to", "awq", "-o", tmp_path / "out")
    assert refused.exit_code == 1 and "layer 'model.down'" in refused.stderr and "--keep-misfits leaves them" in refused.stderr
    asked = ("convert", path, "--to", "awq", "-o", tmp_path / "out", "--jobs", "1", "--json")
    report = json.loads(command(*asked, "--keep-misfits").stdout)
    assert list(report["left"]) == ["model.down"] and report["layers"][0]["count"] == 1
    with qdsl.open(path) as before, qdsl.open(tmp_path / "out") as after:
        storages = {name: layer.storage for name, layer in after.layers.items()}
        assert storages == {"model.up": "awq", "model.down": "pack_quantized"}
        for name in before.layers:
            assert same_bits(before.weight(name, dtype=torch.float32), after.weight(name, dtype=torch.float32))


def test_a_pattern_leaves_layers_as_they_are(tmp_path: Path) -> None:
    """Parts that are merged know it, too."""
    path = awkward(tmp_path / "in")
    asked = ("convert", path, "--requantize", "fp8_block", "--skip", "down", "-o", tmp_path / "out", "-j", "1")
    assert command(*asked, "--shard", "1/1").exit_code == 0
    report = json.loads(command("merge-index", tmp_path / "out", "--json").stdout)
    assert report["left"] == {"model.down": "a pattern names it"} and report["readers"] == {"": "qdsl alone"}
    assert report["not_read_by"][""] == dict.fromkeys(["transformers", "vLLM"], "its own loaders know no settings of qdsl")
    with qdsl.open(tmp_path / "out") as after:
        formats = {name: layer.format for name, layer in after.layers.items()}
        assert formats == {"model.up": "fp8_block", "model.down": "int_group"}
    wrong = command("convert", path, "--to", "awq", "--skip", "(", "-o", tmp_path / "out")
    assert wrong.exit_code == 2 and "--skip '(' is no regular expression" in wrong.stderr


def test_packed_words_of_compressed_tensors_are_symmetric_by_default(tmp_path: Path) -> None:
    """For its readers want no zero points; weights that are such already stay exact, and a parameter wins."""
    weights = {"model.up": fp8_block.quantize(torch.randn(16, 256))}
    path = folders.folder(tmp_path / "in", folders.named(weights))
    for params, names in (({}, False), ({"symmetric": False}, True)):
        requantized(path, tmp_path / f"out{names}", "int_group.pack_quantized", params)
        with Folder(tmp_path / f"out{names}") as folder:
            assert ("weight_zero_point" in layers(folder).layers[0].tensors) is names
    exact = awkward(tmp_path / "exact")
    report = requantized(exact, tmp_path / "same", "int_group.pack_quantized", {"group": 64})
    assert not report["requantized"] and qdsl.open(exact).weight("model.up", dtype=torch.float32).equal(
        qdsl.open(tmp_path / "same").weight("model.up", dtype=torch.float32))


def test_what_was_copied_and_is_stale_is_told(tmp_path: Path) -> None:
    """Scales of inputs, Mistral's own config, and settings that are of more than weights."""
    tensors = folders.named({"model.up": fp8_tensor.quantize(torch.randn(16, 256))}) | {"model.up.input_scale": torch.ones(1)}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "version": "0.12", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights}}, "kv_cache_scheme": {"num_bits": 8},
        "sparsity_config": {"format": "dense"}}
    path = folders.folder(tmp_path / "in", tensors, config={"quantization_config": settings})
    (path / "params.json").write_text(json.dumps({"dim": 256, "quantization": {"qformat_weight": "fp8_e4m3"}}))
    notes = requantized(path, tmp_path / "out", "int8_channel")["notes"]
    assert notes == ["the settings do not say kv_cache_scheme any more",
                     "1 tensor such as model.up.input_scale scale inputs of the old weights, and were copied",
                     "params.json says quantization of the old weights, and was copied",
                     "pytorch_model.bin holds other weights, and was not copied"]


@pytest.mark.parametrize(("format", "is_searched"), [("fp8_tensor", False), ("iq4_nl", True)])
def test_few_weights_take_one_process_unless_codes_are_searched(format: str, is_searched: bool, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    weights = two_layers()
    monkeypatch.setattr(run, "affordable", lambda _, work: asked.append(work) or 1)
    requantized(folders.folder(tmp_path / "in", folders.named(weights)), tmp_path / "out", format, jobs=None)
    assert asked == [None if is_searched else sum(packed.shape[0] * packed.shape[1] for packed in weights.values())]
