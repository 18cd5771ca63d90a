"""qdsl.save_model: the files that a model was loaded from, or settings with which it loads again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.generated import fp8_block, hlane, int8_channel, int_group, nf4, q4_0
from qdsl.models.plan import LoadError
from qdsl.models.save import SaveError
from tests.support.paths import ROOT
from tests.support.small_models import Mlp, files, folder, fp8_mlp, mlp, mlp_tensors, own_config, weight


def test_planar_weights_are_saved_as_they_came(tmp_path: Path) -> None:
    model = mlp()
    source = fp8_mlp(tmp_path / "in")
    qdsl.load_weights_(model, source)
    qdsl.planar_(model)
    assert model.up.packed.storage == "planar"
    assert qdsl.save_model(model, tmp_path / "out").exact
    assert files(tmp_path / "out") == files(source)


def test_an_index_in_order_is_written_again(tmp_path: Path) -> None:
    """Planar weights need none, and readers of GPTQ do."""
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}}
    packed = [int_group.quantize(weight(*shape), "gptq_v2", bits=4, group=32) for shape in ((256, 128), (128, 256))]
    source = folder(tmp_path / "in", mlp_tensors(*(weight.tensors for weight in packed)), config)
    assert "g_idx" in packed[0].tensors
    model = mlp()
    qdsl.load_weights_(model, source)
    qdsl.planar_(model)
    assert model.up.packed.storage == "planar" and qdsl.save_model(model, tmp_path / "out").exact
    assert files(tmp_path / "out") == files(source)


def test_what_was_decoded_without_loss_is_encoded_again(tmp_path: Path) -> None:
    """Such as a router, whose module is no nn.Linear."""
    packed = [hlane.quantize(weight(*shape)) for shape in ((256, 128), (128, 256))]
    source = folder(tmp_path / "in", mlp_tensors(*(weight.tensors for weight in packed)), own_config(packed[0]))
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        model = mlp()
        assert qdsl.load_weights_(model, source, dtype=dtype, skip=["up"]).dense.keys() == {"up.weight"}
        assert qdsl.save_model(model, tmp_path / str(number)).exact and files(tmp_path / str(number)) == files(source)
    with torch.no_grad():
        model.up.weight += 1e-7
    assert not qdsl.save_model(model, tmp_path / "trained").exact


def test_saved_models_state_checksums(tmp_path: Path) -> None:
    """Of the tensors that were saved, also where the checkpoint stated those of others."""
    packed = [hlane.quantize(weight(*shape)) for shape in ((256, 128), (128, 256))]
    source = folder(tmp_path / "in", mlp_tensors(*(weight.tensors for weight in packed)), own_config(packed[0]))
    model = mlp()
    qdsl.load_weights_(model, source)
    qdsl.save_model(model, tmp_path / "first")
    qdsl.load_weights_(model, tmp_path / "first", verify=True)
    with torch.no_grad():
        model.norm.weight += 1
    qdsl.save_model(model, tmp_path / "out")
    qdsl.load_weights_(mlp(), tmp_path / "out", verify=True)
    path = tmp_path / "out" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        qdsl.load_weights_(mlp(), tmp_path / "out", verify=True)
    qdsl.load_weights_(mlp(), tmp_path / "out")


def test_a_checkpoint_that_is_gone_is_noted(tmp_path: Path) -> None:
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))
    shutil.rmtree(tmp_path / "in")
    report = qdsl.save_model(model, tmp_path / "out")
    assert not report.exact and "is gone: its other files" in report.notes[0]


def test_trained_numbers_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"), copy=True)
    with torch.no_grad():
        model.norm.weight *= 2
    assert not qdsl.save_model(model, tmp_path / "out").exact


def test_a_model_that_was_quantized_here_states_all_that_a_reader_needs(tmp_path: Path) -> None:
    """Codes without settings load as numbers up to 448, or not at all."""
    model = Mlp().bfloat16()
    qdsl.quantize_(model, "fp8_block", lambda module, name: name != "up")
    qdsl.quantize_(model, "nf4", ["up"])
    before = {name: model.get_submodule(name).dequantize(torch.float32) for name in ("up", "down")}
    qdsl.planar_(model)
    assert not qdsl.save_model(model, tmp_path / "out", {"model_type": "toy"}).exact
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config["quantization_config"]["quantized_layers"]
    assert layers == {"up": {"format": "fp8_block", "storage": "safetensors", "bn": 128, "bk": 128, "scale_type": "f32"},
                      "down": {"format": "nf4", "storage": "bitsandbytes", "block": 64}}
    again = mlp()
    qdsl.load_weights_(again, tmp_path / "out")
    assert all(torch.equal(again.get_submodule(name).dequantize(torch.float32), numbers) for name, numbers in before.items())


def test_what_files_hold_in_groups_is_not_saved_by_layers(tmp_path: Path) -> None:
    model = Mlp().bfloat16()
    qdsl.quantize_(model, "df11")
    with pytest.raises(SaveError, match=r"layer 'up': files hold df11 in groups .* `qdsl compress --format df11`"):
        qdsl.save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_format_of_ones_own_is_not_saved_as_files(tmp_path: Path) -> None:
    (tmp_path / "own4.yaml").write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("format: q4_0", "format: own4", 1))
    model = Mlp().bfloat16()
    qdsl.quantize_(model, tmp_path / "own4.yaml")
    with pytest.raises(SaveError, match=r"own4 does not ship with qdsl.*QDSL_SPECS.*state_dict"):
        qdsl.save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_of_a_producer_are_kept(tmp_path: Path) -> None:
    """bitsandbytes' quant_state and quant_map lie in no module, and are in the files again."""
    packed = nf4.quantize(weight(128, 256))
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 256]}).encode()
    levels = next(description for description in descriptions() if description.name == "nf4").tables["levels"]
    tensors = {"weight": packed.tensors["weight"], "weight.absmax": packed.tensors["weight_absmax"],
               "weight.quant_map": torch.tensor(levels),
               "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8)}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    source = folder(tmp_path / "in", mlp_tensors({"weight": weight(256, 128)}, tensors), config)
    model = mlp()
    qdsl.load_weights_(model, source)
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_files_of_a_checkpoint_stay_divided(tmp_path: Path) -> None:
    tensors = mlp_tensors(*(fp8_block.quantize(weight(*shape)).tensors for shape in ((256, 128), (128, 256))))
    source = tmp_path / "in"
    source.mkdir()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, half in zip(names, halves, strict=True):
        write(source / name, half, {"format": "pt"})
    placed = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"kept": 1}, "weight_map": placed}))
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}')
    (source / "tokenizer.json").write_text("{}")
    model = mlp()
    qdsl.load_weights_(model, source)
    assert qdsl.save_model(model, tmp_path / "out").files == tuple(names)
    assert files(tmp_path / "out") == files(source)


def test_trained_numbers_are_saved_as_they_are(tmp_path: Path) -> None:
    """A plain tensor that bfloat16 cannot hold any more is written in the dtype that it has."""
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"), dtype=torch.float32, copy=True)
    with torch.no_grad():
        model.norm.weight += 1e-6
    assert not qdsl.save_model(model, tmp_path / "out").exact
    again = mlp()
    qdsl.load_weights_(again, tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.norm.weight, model.norm.weight)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    source = fp8_mlp(tmp_path / "in")
    model = mlp()
    qdsl.load_weights_(model, source)
    before = files(source)
    (tmp_path / "link").symlink_to(source)
    for wrong, message in ((source, "mapped from this folder"), (tmp_path / "link", "mapped from this folder"),
                           (source / "config.json", "is a file")):
        with pytest.raises(SaveError, match=message):
            qdsl.save_model(model, wrong)
    qdsl.save_model(model, tmp_path / "out")
    with pytest.raises(SaveError, match="holds weights already"):
        qdsl.save_model(model, tmp_path / "out")
    with pytest.raises(SaveError, match=r"'norm.weight' is on meta"):
        qdsl.save_model(mlp(), tmp_path / "empty")
    assert files(source) == before and not (tmp_path / "empty").exists()


def test_a_packed_model_takes_no_other_format(tmp_path: Path) -> None:
    model = mlp()
    qdsl.load_weights_(model, fp8_mlp(tmp_path / "in"))
    plain = folder(tmp_path / "plain", mlp_tensors({"weight": weight(256, 128)}, {"weight": weight(128, 256)}))
    with pytest.raises(LoadError, match=r"'up' holds a fp8_block weight, for which the checkpoint has none: build"):
        qdsl.load_weights_(model, plain)


@pytest.mark.parametrize("build", [lambda: int8_channel, lambda: q4_0, lambda: hlane])
def test_a_filled_model_can_be_filled_again(tmp_path: Path, build: Callable[[], Any]) -> None:
    packed = [build().quantize(weight(*shape, seed)) for seed in (0, 1) for shape in ((256, 128), (128, 256))]
    model = mlp()
    for number in (0, 1):
        source = folder(tmp_path / str(number), mlp_tensors(packed[2 * number].tensors, packed[2 * number + 1].tensors),
                        own_config(packed[0]))
        qdsl.load_weights_(model, source)
        assert torch.equal(model.up.dequantize(), packed[2 * number].format.dequantize(packed[2 * number]))
