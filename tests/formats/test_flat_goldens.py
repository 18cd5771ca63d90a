"""Weights of packages that store them flat, rows far apart together, or by codebooks: bit for bit, and back byte for byte.

bitsandbytes, HQQ, AWQ for gemv kernels, BitNet, AQLM and Core ML; tests/data/README.md says which package wrote which file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.formats.test_goldens import check, disk, read
from tests.support.formats import ROOT, module, same_bits

DATA = ROOT / "tests" / "data"
FILES = sorted((DATA / "ckpt_flat").glob("*.npz"))
BITSANDBYTES = [*(path for path in FILES if path.name.startswith("bnb_")), *sorted((DATA / "ckpt").glob("bnb_*.npz"))]


def meta(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        about: dict[str, Any] = json.loads(str(file["meta"]))
    return about


def format_of(path: Path) -> Any:
    """The format, as the package's description names it."""
    about = meta(path)
    if path.name.startswith("bnb_"):
        kind = {"nf4": "nf4", "fp4": "bnb_fp4", None: "bnb_int8"}[about.get("quant_type")]
        name = f"{kind}_nested" if about.get("nested") else kind
    else:
        name = {"hqq": "hqq" if about.get("axis") else "hqq_axis0", "aqlm": "aqlm_2x8", "awq_gemv": "int_group"}.get(
            about["format"], about["format"])
    return module(ROOT / "specs" / f"{name}.yaml")


def params(path: Path) -> dict[str, int]:
    about = meta(path)
    param_names = {"blocksize": "block", "group_size": "group", "nbits": "bits", "rows": "rows"}
    return {param_names[key]: value for key, value in about.items() if key in param_names}


def tensors(path: Path) -> dict[str, Tensor]:
    """Those on disk, with the offset of nested scales, which is a number of the file's description, and codes as bytes."""
    stored = disk(read(path))
    about = json.loads(meta(path).get("quant_state_json", "{}"))
    if "nested_offset" in about:
        stored["nested_offset"] = torch.tensor(about["nested_offset"])
    if "quant_state_json" in meta(path):
        stored["weight"] = stored["weight"].view(torch.uint8).reshape(-1, 1)
    return stored


@pytest.mark.parametrize("path", [path for path in FILES if "bitnet" not in path.name and "gemv_fast" not in path.name],
                         ids=lambda path: path.stem)
def test_checkpoint(path: Path) -> None:
    golden, format = read(path), format_of(path)
    packed = format.wrap(tensors(path), shape=tuple(golden["dequant_f32"].shape), **params(path))
    check(format, packed, golden["dequant_f32"])
    if "codes" in golden and "q" in packed.variant.fields:
        assert torch.equal(format.unpack(packed)["q"].int(), golden["codes"].int())


def test_awq_gemv_fast() -> None:
    """The codes; the file's weights are (q - z) * s with the zero point recovered, which is not what the format says."""
    path = next(path for path in FILES if "gemv_fast" in path.name)
    golden, format = read(path), format_of(path)
    packed = format.wrap(disk(golden), shape=tuple(golden["codes"].shape), **params(path))
    fields = format.unpack(packed)
    assert torch.equal(fields["q"], golden["codes"])
    assert torch.equal(fields["s"].float(), golden["scale_NG"])
    assert same_bits(fields["z"], -(golden["scale_NG"] * golden["zero_NG"]).half())
    size = params(path)["group"]
    scale, zero = (fields[name].float().repeat_interleave(size, 1) for name in "sz")
    check(format, packed, golden["codes"].float() * scale + zero)


@pytest.mark.parametrize(("name", "key"), [("bitnet", "bitlinear"), ("bitnet_offline", "autobitlinear")])
def test_bitnet(name: str, key: str) -> None:
    golden = read(next(path for path in FILES if "bitnet" in path.name))
    format: Any = module(ROOT / "specs" / f"{name}.yaml")
    packed = format.wrap(disk(golden), shape=tuple(golden["codes_signed"].shape))
    check(format, packed, golden[f"dequant_f32_{key}"])
    assert torch.equal(format.unpack(packed)["q"].int() - 1, golden["codes_signed"].int())


@pytest.mark.parametrize("path", [path for path in (*BITSANDBYTES, *FILES) if "W" in read(path)],
                         ids=lambda path: path.stem)
def test_quantizing_gives_the_producers_bytes(path: Path) -> None:
    golden, format = read(path), format_of(path)
    wanted = format.wrap(tensors(path), shape=tuple(golden["W"].shape), **params(path))
    packed = format.quantize(golden["W"], **wanted.params)
    assert all(same_bits(packed.tensors[name], tensor) for name, tensor in wanted.tensors.items())


@pytest.mark.parametrize("shape", [(33, 96), (3, 8), (5, 128)])
def test_blocks_over_the_ends_of_rows(shape: tuple[int, int]) -> None:
    """A weight is one row of all its weights: the same codes and scales, and each weight where it was."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for name in ("nf4", "nf4_nested", "bnb_fp4"):
        format: Any = module(ROOT / "specs" / f"{name}.yaml")
        packed, row = format.quantize(weight, block=64), format.quantize(weight.view(1, -1), block=64)
        assert all(same_bits(packed.tensors[key], tensor) for key, tensor in row.tensors.items())
        assert same_bits(format.dequantize(packed, torch.float32).view(1, -1), format.dequantize(row, torch.float32))
        apart = torch.empty(shape[1], shape[0]).t()              # rows that do not follow one another
        assert torch.equal(format.dequantize(packed, out=apart), format.dequantize(packed, torch.float32))


def test_tables_are_those_of_bitsandbytes() -> None:
    for path in BITSANDBYTES:
        format = format_of(path)
        for name, table in (("weight.quant_map", "levels"), ("weight.nested_quant_map", "steps")):
            stored = disk(read(path)).get(name)
            if stored is not None:
                values = next(value.values for key, value in vars(format).items() if key == table.upper())
                assert same_bits(values, stored), path.name
