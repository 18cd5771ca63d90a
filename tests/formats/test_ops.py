"""Operations of decode in torch, in Triton and in C, against plain arithmetic; and what a new operation needs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.compiler.spec.source import SpecError
from qdsl.core.ops import OPS, Op
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.gpu import launch
from tests.support.formats import ROOT, same_bits
from tests.support.interpreter import INTERPRETED, guarded

DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPE = (32, 64)
SPEC = """\
format: {name}
weight: [N, K]
fields:
  q: i8[n, k]
  z: i8[n, k // 32]
  s: f32[n, k // 32]
decode: {decode}
storage:
  p:
    q: {{tensor: "i8[n<N, k<K]", record: "q[n, k]"}}
    z: {{tensor: "i8[n<N, g<K/32]", record: "z[n, g]"}}
    s: {{tensor: "f32[n<N, g<K/32]", record: "s[n, g]"}}
"""
# `max`, as an engineer would add it: the vectors of C have no ternary operator.
MAX = Op("max", 2, max, lambda left, right: (max(left[0], right[0]), max(left[1], right[1])), "maximum", "tl.maximum",
         "({0} > {1} ? {0} : {1})", "{0} - (({0} - {1}) & ({0} - {1}) >> 31)",
         "(vf)(((vi)({0}) & ({0} > {1})) | ((vi)({1}) & ~({0} > {1})))")
FORMULAS = ("abs(s) * q", "s * abs(q)", "abs(s * (q - z))", "s * (abs(q - z) - abs(z) // 3)",
            "abs(abs(s * q) - 1.5) / abs(z - 200)")
NEW = ("s * max(q, z)", "max(s * q, -0.25) * max(z, 3)", "max(s, abs(s * q))")


@pytest.fixture
def loops() -> Iterator[None]:
    """Products and decoding by compiled loops."""
    cpu.compile_products()
    yield
    cpu.compile_products(False)


def check(decode: str, folder: Path, functions: dict[str, Any]) -> None:
    """Weights of a format with this formula in torch, by a kernel and by loops in C; codes have all values, -128 too."""
    path = folder / "formula.yaml"
    path.write_text(SPEC.format(name="formula", decode=decode))
    module = qdsl.load(path)
    draw = torch.Generator().manual_seed(0)
    q, z = (torch.randint(-128, 128, shape, dtype=torch.int8, generator=draw) for shape in (SHAPE, (SHAPE[0], 2)))
    s = torch.randn(z.shape, generator=draw)
    q[0, :2] = torch.tensor([-128, 127])
    whole = {"q": q.int(), **{name: field.repeat_interleave(32, 1) for name, field in (("z", z.int()), ("s", s))}}
    exact: Tensor = eval(decode, functions, whole)  # noqa: S307
    packed = module.pack({"q": q, "z": z, "s": s})
    cpu.compile_products(False)
    assert same_bits(module.dequantize(packed, torch.float32), exact), "torch"
    cpu.compile_products()
    out = torch.full(SHAPE, torch.nan)
    assert cpu.decode_into(packed, out) and same_bits(out, exact), "C"
    packed = packed.to(DEVICE)
    out = torch.full(packed.shape, torch.nan, device=DEVICE)
    with guarded(packed, out):
        launch.dequantize(packed, out)
    assert same_bits(out.cpu(), exact), "Triton"


@pytest.mark.parametrize("decode", FORMULAS)
@pytest.mark.usefixtures("loops")
def test_an_operation_is_the_same_on_every_target(decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    check(decode, tmp_path, {"abs": torch.abs})


@pytest.mark.parametrize("decode", NEW)
@pytest.mark.usefixtures("loops")
def test_a_new_operation_is_one_row(decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exercise: nothing but the row of `max` is new, and all stages take it."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "formula.yaml"
    path.write_text(SPEC.format(name="formula", decode=decode))
    with pytest.raises(SpecError, match="unknown function 'max' in decode"):
        qdsl.load(path)
    monkeypatch.setitem(OPS, "max", MAX)

    def largest(left: Tensor, right: Tensor | float) -> Tensor:
        return torch.maximum(left, torch.as_tensor(right, dtype=left.dtype))

    check(decode, tmp_path, {"max": largest, "abs": torch.abs})


@pytest.mark.parametrize(("decode", "problem"), [
    ("s * abs(q, z)", "abs takes one value"), ("s * abs()", "abs takes one value"), ("abs(s) // 2 * q", "'//' is for integers"),
    ("s * (abs(q) * 16777216 * 128)", "32 bits cannot hold"), ("s * asb(q)", "did you mean 'abs'"),
    ("s * abs(r)", "unknown in decode")])
def test_what_an_operation_refuses(decode: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "formula.yaml"
    path.write_text(SPEC.format(name="formula", decode=decode))
    with pytest.raises(SpecError, match=problem):
        qdsl.load(path)


def test_an_operation_is_named_in_at_most_six_files() -> None:
    """Its row, its second reading, the language's page, and tests."""
    command = ["git", "grep", "-lE", '"abs"|`abs\\(', "--", "qdsl/compiler", "qdsl/core", "qdsl/runtime", "docs", "tests"]
    code = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "qdsl/core/ops.py" in code
    assert len(code) <= 6, code
