"""GPTQ's codes in integers of 8 and 16 bits: the numbers of words of 32 bits, wherever a folder is read, converted or saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from qdsl.models.load import LoadError
from qdsl.runtime import PackedWeight
from tests.support.producer_folders import Stored

N, K = 64, 128
LAYER = "model.layers.0.mlp.up_proj"
TYPES = {"int8": torch.int8, "int16": torch.int16}


def packed_rows(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Codes [K, N] in integers along K, the first in the lowest bits, as gptqmodel packs them one by one."""
    count = torch.iinfo(dtype).bits // bits
    rows = codes.long().view(-1, count, codes.shape[1])
    return sum(rows[:, place] << bits * place for place in range(count)).to(dtype)      # type: ignore[union-attr]


def tensors_of(packed: PackedWeight, bits: int, dtype: torch.dtype, is_v1: bool) -> dict[str, Tensor]:
    """A weight's tensors with shorter words.  Zero points of the first release are one less in each integer, borrows and all."""
    fields = packed.format.unpack(packed)
    zeros = packed_rows(fields["z"], bits, dtype).t()
    ones = sum(1 << bits * place for place in range(torch.iinfo(dtype).bits // bits))
    return {**packed.tensors, "qweight": packed_rows(fields["q"].t(), bits, dtype), "qzeros": (zeros - ones * is_v1).contiguous()}


def folder(path: Path, bits: int, kind: str, version: str, **more: Any) -> Tensor:
    """Write a folder of one layer; returns its weight.  Some zero points are 0, so that integers of the first release borrow."""
    packed = Stored("int_group", version, {"bits": bits, "group": 32}).pack(
        torch.randn(N, K, generator=torch.Generator().manual_seed(bits), dtype=torch.float32).abs())
    path.mkdir()
    tensors = tensors_of(packed, bits, TYPES[kind], version == "gptq_v1")
    write(path / "model.safetensors", {f"{LAYER}.{leaf}": own.contiguous() for leaf, own in tensors.items()})
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False, "pack_dtype": kind,
                "checkpoint_format": "gptq" if version == "gptq_v1" else version, **more}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    assert int(packed.format.unpack(packed)["z"].min()) == 0
    return packed.format.dequantize(packed, torch.float32)


def loaded(path: Path) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    qdsl.load_weights_(model, path, {LAYER: "0"})
    return model


def computed(path: Path) -> Tensor:
    with torch.no_grad():
        return loaded(path).float()(torch.eye(K)).t()


@pytest.mark.parametrize("version", ["gptq_v1", "gptq_v2"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_weight_is_that_of_whole_words(bits: int, kind: str, version: str, tmp_path: Path) -> None:
    wanted = folder(tmp_path / "in", bits, kind, version)
    assert computed(tmp_path / "in").equal(wanted)
    other = "gptq_v1" if version == "gptq_v2" else "gptq_v2"
    with Folder(tmp_path / "in") as read:
        run.convert(read, layers(read), parse_conversion(other), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert computed(tmp_path / "out").equal(wanted) and "pack_dtype" not in settings
    qdsl.save_model(loaded(tmp_path / "in"), tmp_path / "saved")
    assert torch.equal(computed_of(tmp_path / "saved"), wanted)


def computed_of(path: Path) -> Tensor:
    """The weight of a folder with the names of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    qdsl.load_weights_(model, path, {LAYER: "0"} if any(LAYER in name for name in names(path)) else None)
    with torch.no_grad():
        return model.float()(torch.eye(K)).t()


def names(path: Path) -> list[str]:
    with Folder(path) as read:
        return [*read.names()]


@pytest.mark.parametrize(("kind", "claim", "is_right"), [
    ("int8", None, True), ("int16", None, True), ("int8", "INT8", True), ("int8", "int16", False), ("int16", "int8", False),
    ("int8", "int32", False), ("int16", "int64", False), ("int8", 8, False)])
def test_the_type_that_settings_say(kind: str, claim: Any, is_right: bool, tmp_path: Path) -> None:
    folder(tmp_path / "in", 4, kind, "gptq_v2", pack_dtype=claim)
    with Folder(tmp_path / "in") as read:
        [layer] = detected_layers(read).layers
    assert layer.format == "int_group" and bool(layer.contradictions) != is_right
    if not is_right:
        with pytest.raises(CheckpointError, match=f"pack_dtype = {claim}, but 'qweight' is {kind}"):
            computed(tmp_path / "in")


def test_what_nobody_packs_so_is_refused(tmp_path: Path) -> None:
    """Codes of 3 bits in bytes, bytes that are no whole word, words of 64 bits, and one of two tensors."""
    folder(tmp_path / "in", 8, "int8", "gptq_v2")
    file = tmp_path / "in" / "model.safetensors"
    with Folder(file) as read:
        whole = {name: read.tensor(name).clone() for name in read.names()}
    codes, zeros = f"{LAYER}.qweight", f"{LAYER}.qzeros"
    for change in ({codes: whole[codes].long()}, {codes: whole[codes][:-2].contiguous()}, {codes: whole[codes][None]},
                   {codes: whole[codes].view(torch.uint8)}, {zeros: whole[zeros][:, :-1].contiguous()},
                   {codes: whole[codes].view(torch.float8_e4m3fn)}):
        write(file, {**whole, **change})
        with pytest.raises((CheckpointError, LoadError), match=r"q(weight|zeros)|tensors"):
            computed(tmp_path / "in")
