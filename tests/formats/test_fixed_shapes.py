"""Formats whose weights all have one K, and what refuses another; stored operations that flip bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qdsl.analyze.check.formats import check_format
from qdsl.core.program import program_description
from qdsl.runtime import FormatError, PackedWeight
from tests.support.formats import EXTRA, module, same_bits, spec

ROWS = next(path for path in EXTRA if path.stem == "short_rows")
FLIPPED = next(path for path in EXTRA if path.stem == "flipped_words")


def packed(columns: int = 64) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    fields = {"s": torch.rand(4, columns // 16, generator=generator).half(),
              "extra": torch.randint(0, 256, (4, 3), generator=generator).byte(),
              "q": torch.randint(-128, 128, (4, columns), generator=generator, dtype=torch.int8)}
    weight: PackedWeight = module(ROWS).pack(fields)
    return weight


def test_tensors_need_not_say_what_is_fixed() -> None:
    weight = packed()
    assert list(weight.tensors) == ["rows"] and weight.tensors["rows"].shape == (4, 64 + 12)
    again = module(ROWS).wrap(weight.tensors)
    assert again.shape == (4, 64) and same_bits(again.format.unpack(again)["extra"], weight.format.unpack(weight)["extra"])


@pytest.mark.parametrize(("refused", "message"), [
    (lambda rows, weight: packed(80), "rows: it is for weights with K = 64, not [4, 80]"),
    (lambda rows, weight: rows.wrap(weight.tensors, shape=(4, 80)), "rows is for weights with K = 64, not [4, 80]"),
    (lambda rows, weight: rows.FORMAT.empty((4, 32)), "rows: it is for weights with K = 64, not [4, 32]"),
    (lambda rows, weight: weight.shard("K", 0, 32), "it is for weights with K = 64, not [4, 32]"),
], ids=["pack", "wrap", "empty", "shard"])
def test_another_shape_is_refused(refused: Callable[[ModuleType, PackedWeight], object], message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        refused(module(ROWS), packed())


def test_rows_are_cut() -> None:
    weight = packed()
    whole = module(ROWS).dequantize(weight, torch.float32)
    assert same_bits(module(ROWS).dequantize(weight.cut("N", 1, 3), torch.float32), whole[1:3])


def test_readers_of_checkpoints_know_what_is_fixed() -> None:
    assert program_description(module(ROWS).PROGRAM, in_files=True).fixed == {"K": 64}


@pytest.mark.parametrize("path", [ROWS, FLIPPED], ids=lambda path: path.stem)
def test_derived_tests_pass(path: Path) -> None:
    checks = list(check_format(spec(path), module(path).FORMAT))
    assert [check for check in checks if check.status != "ok"] == [] and len(checks) == 2


def test_flipped_bits() -> None:
    flipped = module(FLIPPED)
    zeros = {"d": torch.zeros(1, 1).byte(), "q": torch.zeros(1, 32).byte(), "r": torch.zeros(1, 32).byte()}
    weight = flipped.pack(zeros)
    assert [int(word) & 0xFFFFFFFF for word in weight.tensors["q"][0]] == [0x88888888] * 4
    assert weight.tensors["d"].tolist() == [[0x81]] and int(weight.tensors["r"][0, 0]) & 31 == 20
    assert all(same_bits(flipped.unpack(weight)[name], field) for name, field in zeros.items())
