"""What contradicts tensors, and scales that are NaN or infinite: every reader refuses both, with the words of `qdsl inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.core.numbers import FLOATS
from qdsl.core.stored import PLANAR
from qdsl.generated import fp8_block, int8_channel, int_group
from qdsl.models.served import Served
from qdsl.runtime.weight.finite_scales import scale_error
from tests.support import producer_folders
from tests.support.formats import Case, cases, random_fields, smallest
from tests.support.layer_configs import ct, fp8
from tests.support.paths import ROOT

PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "format": "pack-quantized"}


def command(*words: str) -> Callable[[Path, Path], object]:
    """A command on a folder.  Raises RuntimeError with what it prints where it fails."""
    def run(path: Path, out: Path) -> None:
        result = CliRunner().invoke(app, [str({"IN": path, "OUT": out}.get(word, word)) for word in words],
                                    catch_exceptions=False)
        if result.exit_code:
            raise RuntimeError(result.output)
    return run


class Model(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 128, bias=False)


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load_weights_": lambda path, out: qdsl.load_weights_(Model(), path),
    "open": lambda path, out: qdsl.open(path).weight("up"),
    "convert": command("convert", "IN", "--to", "awq", "--out", "OUT"),
    "requantize": command("convert", "IN", "--requantize", "q8_0", "--out", "OUT"),
    "quantize": command("quantize", "IN", "--format", "q8_0", "--out", "OUT"),
    "quantize to GGUF": command("quantize", "IN", "--type", "Q8_0", "--out", "OUT"),
    "compress": command("compress", "IN", "--format", "hlane", "--out", "OUT"),
    "verify --decoded": command("verify", "--decoded", "IN", "IN"),
    "serve-check": command("serve-check", "IN", "--tp", "1"),
    "engines": lambda path, out: Served.of_folder(path),
}


def int8_codes() -> dict[str, torch.Tensor]:
    """Integers of compressed-tensors in bytes without a sign, which would be read as FP8."""
    packed = int8_channel.quantize(torch.randn(128, 256))
    return {**packed.tensors, "weight": packed.tensors["weight"].view(torch.uint8)}


FOLDERS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "uint8 codes": (int8_codes, ct(num_bits=8, type="int", strategy="channel", format="int-quantized"),
                    "the tensors fit fp8_channel.safetensors"),
    "block size": (lambda: fp8_block.quantize(torch.randn(128, 256), bn=128, bk=128).tensors, fp8(weight_block_size=[64, 64]),
                   "weight_block_size = [64, 64]; the tensors fit fp8_block.safetensors bn=128 bk=128"),
    "symmetric": (lambda: int_group.quantize(torch.randn(128, 256), "pack_quantized", bits=4, group=32, symmetric=True).tensors,
                  ct(**PACKED, symmetric=False), "symmetric = False, but there is no 'weight_zero_point'"),
    "quant_method": (lambda: int_group.quantize(torch.randn(128, 256), "awq", bits=4, group=32).tensors,
                     {"quantization_config": {"quant_method": "another", "bits": 4, "group_size": 32}},
                     "quant_method = another, bits = 4, group_size = 32; the tensors fit int_group.awq"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_reader_says_what_inspect_says(tmp_path: Path, kind: str) -> None:
    tensors, config, says = FOLDERS[kind]
    (path := tmp_path / "in").mkdir()
    plain = {"norm.weight": torch.ones(256, 256, dtype=torch.bfloat16)}
    write(path / "model.safetensors", plain | {f"up.{leaf}": tensor for leaf, tensor in tensors().items()})
    (path / "config.json").write_text(json.dumps(config))
    shown = CliRunner().invoke(app, ["inspect", str(path), "--json"], catch_exceptions=False)
    [contradiction] = json.loads(shown.stdout)["contradictions"]
    assert shown.exit_code == 3 and says in contradiction["what"]
    for name, read in READERS.items():
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            read(path, tmp_path / "out")
        assert contradiction["what"] in str(refusal.value).replace("\n", " "), name
        assert not (tmp_path / "out").exists(), name


# Scales


def special(case: Case, fields: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor] | None:
    """The fields with a NaN as the last number of a field of floats; None for another field, and for a type without NaN."""
    field = case.module.FORMAT.variant(case.choice).fields[name]
    kind = str(case.choice.get(field.type, field.type))
    if kind not in FLOATS or name not in fields or [axis.text for axis in field.axes] == ["N", "K"] or not fields[name].numel():
        return None
    changed = fields[name].clone().reshape(-1)
    if changed.element_size() > 1:
        changed[-1] = torch.nan
    else:
        codes = [code for code in range(256) if FLOATS[kind].decode(code) != FLOATS[kind].decode(code)]
        if not codes:
            return None
        changed.view(torch.uint8)[-1] = codes[0]
    return {**fields, name: changed.view(fields[name].shape)}


def test_a_scale_that_is_not_finite_is_seen_in_every_storage() -> None:
    """Also within records, and in the last of several; finite ones are never taken for such.  Files have no planar storages."""
    every = {(case.path, case.storage): case for case in cases()
             if case.storage != PLANAR and case.path.is_relative_to(ROOT / "specs")}
    for case in every.values():
        fields = random_fields(case, smallest(case, 2))
        params = dict(case.params)
        assert scale_error(case.module.pack(fields, storage=case.storage, **params)) == "", case
        for name in case.module.FORMAT.variant(case.choice).fields:
            if (changed := special(case, fields, name)) is not None:
                packed = case.module.pack(changed, storage=case.storage, **params)
                assert f"'{name}' is nan at" in scale_error(packed), (case, name)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_folders_with_such_scales_are_refused_where_they_are_read(tmp_path: Path, number: float) -> None:
    packed = int_group.quantize(torch.randn(128, 256), "awq", bits=4, group=32)
    packed.tensors["scales"][3, 5] = number
    (path := tmp_path / "in").mkdir()
    write(path / "model.safetensors", producer_folders.named("up", packed))
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}))
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 0        # which reads headers alone
    shown = CliRunner().invoke(app, ["inspect", "--check", str(path), "--json"], catch_exceptions=False)
    [contradiction] = json.loads(shown.stdout)["contradictions"]
    assert shown.exit_code == 3 and contradiction["what"].startswith(f"'s' is {number} at [5, 3]")
    for name in ("load_weights_", "open", "requantize", "verify --decoded"):
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            READERS[name](path, tmp_path / "out")
        assert contradiction["what"] in str(refusal.value).replace("\n", " "), name
