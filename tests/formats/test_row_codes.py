"""Codes of single weights in place of rows of tables: which formats get them, how large they are, and rows that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl.analyze.check import spec_bits as oracle
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.derive_planar import PLANAR, why_no_planar
from qdsl.compiler.spec.schema import load
from qdsl.generated import iq2_s, iq2_xxs, iq3_xxs
from qdsl.runtime import FormatError, PackedWeight
from tests.support.blessing import codes, reading
from tests.support.formats import Case, cases, random_packed, same_bits

CASES = [case for case in cases() if case.has_row_codes]

# Rows of four of {0, 1.5, 3}, and half for two columns where `up` says so, over scales of 32.
SPEC = """
format: {name}
title: rows of a grid
weight: [N, K]
tables:
  codes: {{file: codes.txt}}
  grid: "{grid}"
fields:
  s: f16[n, k // 32]
  g: u4[n, k // 4]
  up: u1[n, k // 2]
decode: {decode}
storage:
  rows:
    g: {{tensor: "u8[n<N, t<K/32, word]", record: "i<8: g[n, 8*t + i]"}}
    up: {{tensor: "u8[n<N, t<K/32, word]", record: "i<16: up[n, 16*t + i]"}}
    s: {{tensor: "f16[n<N, j<K/32]", record: "s[n, j]"}}
"""
GRID = "i<16 j<4: 2 * (codes[4 * i + j])"
DECODE = "s * (grid[g, k % 4] * 0.75 + 0.5 * up)"


def written(folder: Path, grid: str = GRID, decode: str = DECODE, alike: bool = False) -> Path:
    """A spec whose rows are the numbers 0 to 15 in base 3, or those of 0 to 14 and one of them again."""
    rows = [i % 15 if alike else i for i in range(16)]
    (folder / "codes.txt").write_text(" ".join(str(row // 3 ** j % 3) for row in rows for j in range(4)))
    (folder / "rows.yaml").write_text(SPEC.format(name="rows", grid=grid, decode=decode))
    return folder / "rows.yaml"


def random_rows(n: int, k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"s": torch.randn(n, k // 32, generator=generator).half(),
            "g": torch.randint(0, 16, (n, k // 4), generator=generator).to(torch.uint8),
            "up": torch.randint(0, 2, (n, k // 2), generator=generator).to(torch.uint8)}


def test_a_grid_of_no_known_format(tmp_path: Path) -> None:
    """Six numbers in 3 bits: decoded to the same bits, and rows are found again."""
    module = qdsl.load(written(tmp_path))
    packed = module.pack(random_rows(16, 256))
    planar = module.planar(packed, larger=True)
    assert planar.storage == PLANAR and set(planar.tensors) == {"q_0", "q_1", "s"}
    assert module.planar(packed) is packed and "bytes would become" in module.FORMAT.why_not_planar(packed)
    assert same_bits(module.dequantize(planar, torch.float32), module.dequantize(packed, torch.float32))
    assert all(same_bits(tensor, packed.tensors[name]) for name, tensor in module.convert(planar, "rows").tensors.items())
    assert module.unpack(module.pack(random_rows(0, 256), storage=PLANAR))["g"].shape == (0, 64)
    half = planar.cut("N", 3, 9)
    assert same_bits(module.dequantize(half, torch.float32), module.dequantize(packed, torch.float32)[3:9])


@pytest.mark.parametrize(("grid", "decode", "alike", "message"), [
    (GRID, DECODE, True, "two rows of 'grid' are alike, and 'g' could not be found again"),
    (GRID, "s * grid[g, k % 4] + s * (grid[g, k % 4] + up)", False, "decode reads g, up in several parts of its formula"),
    (GRID, "(grid[g, k % 4] * up + grid[g, k % 4]) * s", False, "decode reads 'g' more than once"),
    (GRID, "grid[g, k % 4] * s * (1 - 2 * up)", False, "decode reads g, up in several parts of its formula"),
    ("i<16 j<4: codes[4 * i + j] + 100 * i + 7 * j * j", DECODE, False, "rows of 'grid' have too many different entries"),
])
def test_why_there_are_none(grid: str, decode: str, alike: bool, message: str, tmp_path: Path) -> None:
    assert why_no_planar(compile_spec(load(written(tmp_path, grid, decode, alike)))) == message


BITS = {"iq1_s": 2.3125, "iq1_m": 3.5625, "iq2_xxs": 3.3125, "iq2_xs": 3.5625, "iq2_s": 3.5625, "iq3_xxs": 4.3125,
        "iq3_s": 4.3125, "nf4": 4.5, "nf4_nested": 4.125 + 2 ** -9 + 2 ** -15, "openvino_nf4": 4.25}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_per_weight(case: Case) -> None:
    """Of rows of at most 8 numbers 3 bits each, of ternary ones 2, with scales in bytes; 4 of NF4."""
    weight: PackedWeight = case.module.FORMAT.empty((256, 4096), PLANAR, "meta")
    assert 8 * weight.nbytes / (256 * 4096) == BITS[case.path.stem]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_as_a_second_reading_has_them(case: Case) -> None:
    """The bits that lie where the derived spec says are codes, which its decode turns into the weights of the rows."""
    shape = (1, 512)
    packed = random_packed(case, shape)
    read = reading(case, case.choice, shape)
    fields: dict[str, dict[tuple[int, ...], int]] = {}
    storage = next(storage for storage in case.spec.storages if storage.name.value == PLANAR)
    for name, element, bit, (field, at, place), kind in oracle.stored(case.spec, storage, read.env, case.choice):
        assert kind == oracle.PLAIN
        stored = int(codes(packed.tensors[name], 8 * packed.tensors[name].element_size())[element])
        fields.setdefault(field, {}).setdefault(at, 0)
        fields[field][at] |= (stored >> bit & 1) << place
    extents = {field: [max(axis) + 1 for axis in zip(*values, strict=True)] for field, values in fields.items()}
    read_codes = {field: np.array([values[at] for at in sorted(values)]).reshape(extents[field])
                  for field, values in fields.items()}
    assert same_bits(torch.from_numpy(read.decode(read_codes)), case.module.dequantize(packed, torch.float32))


def test_rows_that_are_none() -> None:
    """Bits that were changed in a planar weight make a code, a row or signs that the format does not have."""
    packed = iq2_xxs.planar(iq2_xxs.quantize(torch.randn(4, 256)), larger=True)
    for name, value, message in (("q_1", -1, "codes of n = 2, k = "), ("q_0", 0, "are no row of '[gs]' that the format has")):
        tensors = {key: tensor.clone() for key, tensor in packed.tensors.items()}
        tensors[name][2] = value
        with pytest.raises(FormatError, match=message):
            iq2_xxs.convert(iq2_xxs.wrap(tensors, (4, 256), PLANAR), "gguf")
    top = torch.full_like(packed.tensors["q_0"], -1)
    with pytest.raises(FormatError, match="codes of n = 0, k = 0 are no code that the format has"):
        iq2_xxs.unpack(iq2_xxs.wrap({**packed.tensors, "q_0": top, "q_1": torch.full_like(packed.tensors["q_1"], -1)},
                                    (4, 256), PLANAR))


def test_a_model_may_grow() -> None:
    """`planar_` leaves layers that would take more memory, unless it is told that they may."""
    model = torch.nn.Sequential(iq3_xxs.Linear(iq3_xxs.quantize(torch.randn(64, 256))),
                                iq2_s.Linear(iq2_s.quantize(torch.randn(32, 256))))
    x, before = torch.randn(3, 256), model[0](torch.ones(1, 256))
    stays = qdsl.planar_(model)
    assert not stays.quantized and stays.skipped["1"] == "gguf stays: 2624 bytes would become 4672"
    assert list(qdsl.planar_(model, larger=True).quantized) == ["0", "1"] and model[1].packed.storage == PLANAR
    assert torch.equal(model[0](torch.ones(1, 256)), before) and model[1](x).shape == (3, 32)
