"""Codes of 6 to 8 bits into tables that kernels for matrix units load from memory: of a spec, and stored with a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.derive_planar import PLANAR, why_no_planar
from qdsl.compiler.spec.schema import load
from qdsl.generated import coreml_lut
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.weight.tables import Table
from tests.kernels.test_lanes import DEVICE, DTYPES, check, expected, product, x_of
from tests.support.formats import ROOT, Case, random_fields, same_bits

SPEC = """
format: long_table
weight: [N, K]
tables:
  levels: {numbers}
fields:
  s: {scale}
  q: u{bits}[n, k]
decode: levels[q] * s
storage:
  rows:
    codes: {{tensor: "u8[n<N, t<K/8 word]", record: "i<8: q[n, 8*t + i]"}}
    scales: {{tensor: "{scales}", record: "{record}"}}
"""
OF_GROUPS = {"scale": "f16[n, k // 32]", "scales": "f16[n<N, j<K/32]", "record": "s[n, j]"}
OF_ROWS = {"scale": "f16[n]", "scales": "f16[n<N]", "record": "s[n]"}


def posit(code: int, exponent_bits: int) -> float:
    """A posit of 8 bits by its definition: a run of equal bits, exponent, fraction; 0 for the code that is no number."""
    if code in (0, 128):
        return 0.0
    if code > 128:
        return -posit(256 - code, exponent_bits)
    bits = f"{code:07b}"
    run = len(bits) - len(bits.lstrip(bits[0]))
    tail = bits[run + 1:]
    exponent = int(tail[:exponent_bits].ljust(exponent_bits, "0") or "0", 2)
    fraction = tail[exponent_bits:]
    power = (run - 1 if bits[0] == "1" else -run) * 2 ** exponent_bits + exponent
    return (1 + (int(fraction, 2) / 2 ** len(fraction) if fraction else 0)) * 2.0 ** power


POSITS = {bits: [posit(code, bits) for code in range(256)] for bits in range(3)}
UNEVEN = [((37 * code) % 64 - 20) * (1.0 + code / 1000) for code in range(64)]    # no 16-bit float has most of them
COUNTED = [(5 * code) % 128 - 77 for code in range(128)]


def table_format(folder: Path, bits: int, numbers: list[Any], parts: dict[str, str]) -> tuple[Any, PackedWeight, Case]:
    """A format, a random weight of it, and its planar storage as a case."""
    path = folder / "long_table.yaml"
    path.write_text(SPEC.format(bits=bits, numbers=numbers, **parts))
    assert why_no_planar(compile_spec(load(path))) == ""
    module = qdsl.load(path)
    return module, module.pack(random_fields(Case(path, "rows", ()), (20, 256)), "rows"), Case(path, PLANAR, ())


TABLES = [(6, UNEVEN, OF_GROUPS), (7, COUNTED, OF_ROWS), (8, POSITS[0], OF_GROUPS), (8, POSITS[1], OF_ROWS)]


@pytest.mark.parametrize(("bits", "numbers", "parts"), TABLES, ids=["6", "7", "8", "8 of rows"])
def test_tables_of_a_spec(bits: int, numbers: list[Any], parts: dict[str, str], tmp_path: Path) -> None:
    module, packed, case = table_format(tmp_path, bits, numbers, parts)
    planar = module.convert(packed, PLANAR)
    assert same_bits(module.dequantize(planar, torch.float32), module.dequantize(packed, torch.float32))
    back = module.convert(planar, "rows")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    planar = planar.to(DEVICE)
    with configure.assumed(9, 132):
        for rows, dtype in ((1, DTYPES[bits % 2]), (5, DTYPES[1 - bits % 2]), (20, DTYPES[bits % 2])):
            check(case, planar.shape, {}, rows, dtype, bias=rows == 5, packed=planar)


@pytest.mark.parametrize("exponent_bits", [0, 1, 2])
def test_entries_are_rounded_once(exponent_bits: int, tmp_path: Path) -> None:
    """To x's type, divided by a power of two in float16, which has all of them then, or is not served."""
    module, _, _ = table_format(tmp_path, 8, POSITS[exponent_bits], OF_ROWS)
    kernels = module.FORMAT.variant({}).storages[PLANAR].kernels
    unit = kernels.matrix_unit.codes.unit[0]
    half, brain = kernels.matrix_unit.codes.stored_levels.values.view(2, 256)
    wanted = torch.tensor(POSITS[exponent_bits])
    assert torch.equal(brain.view(torch.bfloat16).float(), wanted)
    assert kernels.matrix_unit.tables == (kernels.matrix_unit.codes.stored_levels,)
    assert unit == (0.0 if exponent_bits == 2 else wanted.max() / 2 ** 14)
    assert torch.equal(half.view(torch.float16).float() * unit, wanted if unit else torch.zeros(256))


def test_numbers_too_far_apart_for_float16(tmp_path: Path) -> None:
    """Posits of the standard reach from 2^-24 to 2^24: bfloat16 x alone meets them on matrix units."""
    module, packed, case = table_format(tmp_path, 8, POSITS[2], OF_GROUPS)
    planar = module.convert(packed, PLANAR).to(DEVICE)
    assert [launch.fits_experts(x_of(1, 256, dtype), planar) for dtype in DTYPES] == [False, True]
    for rows in (1, 5):
        check(case, planar.shape, {}, rows, torch.bfloat16, packed=planar)


@pytest.fixture
def other_table(tmp_path: Path) -> Iterator[tuple[Case, PackedWeight]]:
    """A weight of 7-bit codes, whose kernels have a table of 256 numbers in place of the first 128: a mistake."""
    module, packed, case = table_format(tmp_path, 7, POSITS[1], OF_GROUPS)
    kernels = module.FORMAT.variant({}).storages[PLANAR].kernels
    matrix_unit = kernels.matrix_unit
    whole = Table("f32", *POSITS[1]).halves(256, matrix_unit.codes.unit[0])
    codes = replace(matrix_unit.codes, levels=replace(matrix_unit.codes.levels, stored=whole))
    object.__setattr__(kernels, "matrix_unit", replace(matrix_unit, codes=codes))
    yield case, module.convert(packed, PLANAR).to(DEVICE)
    object.__setattr__(kernels, "matrix_unit", matrix_unit)


def test_a_wrong_table_shows(other_table: tuple[Case, PackedWeight]) -> None:
    """In bfloat16, whose numbers lie behind float16's."""
    case, planar = other_table
    check(case, planar.shape, {}, 1, torch.float16, packed=planar)
    with pytest.raises(AssertionError):
        check(case, planar.shape, {}, 1, torch.bfloat16, packed=planar)


@pytest.mark.parametrize(("bits", "rows", "kind", "dtype"), [
    (8, -1, "f32", torch.bfloat16), (8, 16, "f32", torch.float16), (6, 16, "f16", torch.bfloat16), (6, -1, "f16", torch.float16)])
def test_stored_tables(bits: int, rows: int, kind: str, dtype: torch.dtype) -> None:
    """Exact there and back; a row of x with a single 1 reads entries, rounded to its type once."""
    case = Case(ROOT / "specs" / "coreml_lut.yaml", "coreml", (("bits", bits), ("rows", rows), ("level_type", kind)))
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (40, 256), generator=draw, dtype=torch.uint8)
    levels = torch.randn(1 if rows < 0 else 3, 1 << bits, generator=draw).to(torch.float16 if kind == "f16" else torch.float32)
    packed = coreml_lut.pack({"lut": levels, "q": codes}, "coreml", **case.choice)
    planar = coreml_lut.convert(packed, PLANAR)
    back = coreml_lut.convert(planar, "coreml")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    wanted = coreml_lut.dequantize(packed, torch.float32)
    assert same_bits(coreml_lut.dequantize(planar, torch.float32), wanted)
    x, planar = torch.eye(256, dtype=dtype, device=DEVICE)[3::37].contiguous(), planar.to(DEVICE)
    assert torch.equal(product(x, planar), wanted.t()[3::37].to(dtype))
    x = x_of(20, 256, dtype)
    exact, bound = expected(replace(case, storage=PLANAR), planar, x, None)
    with configure.assumed(9, 132):
        assert ((product(x, planar).double() - exact).abs() <= bound).all()
