"""Every encode scheme against types of its fields of each sign and width: what compiles quantizes, and what is refused would not.

A spec is built for every combination.  A weight is lost if the quantizer refuses it, if all weights of one sign are, or if the
error is far above that of the first, good combination of the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.compiler.passes import check_encode
from qdsl.compiler.passes.encode_ranges import CHECKS
from qdsl.compiler.spec.source import SpecError
from qdsl.core.numbers import number
from qdsl.core.schemes import SCHEMES
from tests.support.formats import SHIPPED, spec

AXES = {"n, k": ("n<N, k<K", "n, k"), "n, k // 32": ("n<N, b<K/32", "n, b"), "n, k // 128": ("n<N, s<K/128", "n, s"),
        "n": ("n<N", "n"), "(n*K + k) // 32": ("i<N*K/32", "i"), "(n*K + k) // 128": ("i<N*K/128", "i"), "": ("", "")}
CODE, BLOCK, SUPER, FLAT, FLAT_SUPER = "n, k", "n, k // 32", "n, k // 128", "(n*K + k) // 32", "(n*K + k) // 128"
WEIGHT = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
BOTH, POSITIVE, NEGATIVE = "-8, -3, -1, 0, 1, 2, 4, 7", "0, 1, 2, 3, 5, 8, 10, 12", "-12, -9, -6, -4, -3, -2, -1, 0"
UNITS, UP, STEEP = "-1, -0.5, -0.2, 0, 0.1, 0.3, 0.6, 1", "0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1", BOTH


@dataclass(frozen=True)
class Case:
    """A scheme with texts in which {1}, {2}, ... stand for types, numbers or tables; the first choice is good.

    fields: 'NAME TYPE', and the subscript.  good, bad: what stands for {1}, {2}, ...
    """

    scheme: str
    fields: tuple[tuple[str, str], ...]
    decode: str
    arguments: str
    good: Sequence[tuple[str, ...]]
    bad: Sequence[tuple[str, ...]] = ()
    tables: tuple[str, ...] = ()

    def text(self, choice: tuple[str, ...]) -> str:
        """The spec."""
        def filled(text: str) -> str:
            for i, word in enumerate(choice, 1):
                text = text.replace(f"{{{i}}}", word)
            return text

        fields = [(*filled(field).split(), index) for field, index in self.fields]
        lines = ["format: ranges", "weight: [N, K]", *(["tables:"] if self.tables else []),
                 *(f"  {filled(table)}" for table in self.tables), "fields:",
                 *(f"  {name}: {kind}[{index}]" for name, kind, index in fields), f"decode: {filled(self.decode)}",
                 f"encode: {self.scheme}({filled(self.arguments)})", "storage:", "  plain:",
                 *(stored(name, kind, index) for name, kind, index in fields)]
        return "\n".join(lines) + "\n"


def stored(name: str, kind: str, index: str) -> str:
    """A tensor of a field: floats as they are, integers in bytes."""
    axes, place = AXES[index]
    field = number(kind)
    assert field is not None
    tensor = kind if field.is_float else f"{kind[0]}8" if field.bits == 8 else "u8"
    padding = f" pad:{8 - field.bits}" if not field.is_float and field.bits < 8 else ""
    return f"    {name}_: {{tensor: '{tensor}[{axes}]', record: '{name}{f'[{place}]' if place else ''}{padding}'}}"


SCALED = (("s f16", BLOCK), ("q {1}", CODE))
WITH_MIN = (("s f16", BLOCK), ("m f16", BLOCK), ("q {1}", CODE))
SIGNED = [("u4", "(q - 8)", "7"), ("i4", "q", "7"), ("u3", "(q - 4)", "3"), ("i8", "q", "127"), ("i2", "q", "1")]
ONE_SIGN = [("u4", "q", "7"), ("u1", "q", "1"), ("u8", "q", "127"), ("u4", "(q - 15)", "7"), ("u1", "(q - 1)", "1")]
STEPS = [("u6", "(sc - 32)"), ("i6", "sc"), ("i2", "sc"), ("u6", "(sc - 1)"), ("i8", "sc")]
ONE_SIGN_STEPS = [("u6", "sc"), ("u1", "sc"), ("u4", "(sc - 15)"), ("u6", "(sc - 63)"), ("u1", "(sc - 1)")]
COUNTS = [("u4",), ("u2",), ("u8",)]
SUPERS = (("d f16", SUPER), ("sc {1}", BLOCK), ("q {3}", CODE))

CASES = [
    Case("absmax", SCALED, "s * {2}", "code=q, scale=s, divisor={3}", SIGNED, [*ONE_SIGN, ("i4", "q", "127")]),
    Case("signmax", SCALED, "s * {2}", "code=q, scale=s, divisor={3}",
         [("u4", "(q - 8)", "-8"), ("i4", "q", "-8"), ("i8", "q", "-127"), ("i2", "q", "-2")],
         [("u4", "q", "-8"), ("u1", "(q - 1)", "-1"), ("i4", "q", "-127")]),
    Case("nested_absmax", (("g f32", ""), ("s e4m3", BLOCK), ("q {1}", CODE)), "s * g * {2}",
         "code=q, scale=s, super_scale=g, divisor={3}, empty=1", [("i4", "q", "7"), ("i8", "q", "127"), ("i2", "q", "1")],
         [("u4", "q", "7"), ("u8", "q", "127"), ("i4", "q", "127")]),
    Case("unit_absmax", (("s f32", BLOCK), ("q {1}", CODE)), "q * s / {2}", "code=q, scale=s",
         [("i8", "127"), ("i4", "7"), ("i8", "7")], [("u8", "127"), ("i4", "127"), ("u4", "7")]),
    Case("minmax", (("s f16", BLOCK), ("z {2}", BLOCK), ("q {1}", CODE)), "(q - z) * s", "code=q, zero=z, scale=s",
         [("u4", "u4"), ("u4", "i6"), ("u4", "u8"), ("i4", "i4"), ("u2", "i3")],
         [("u4", "u3"), ("u4", "i4"), ("i4", "u4"), ("i4", "u8"), ("u4", "u1"), ("u4", "i2")]),
    *(Case(scheme, WITH_MIN, decode, f"code=q, scale=s, {role}=m", [("u4",), ("u3",), ("u8",)]) for scheme, decode, role in [
        ("affine", "s * q + m", "min"), ("edge_affine", "s * q + m", "min"), ("scaled_zero", "q * s + m", "zero"),
        ("float_zero", "(q - m) * s", "zero"), ("float_middle", "(q - 8) * s + m", "zero")]),
    Case("meansign", SCALED, "s * (2 * q - 1)", "code=q, scale=s", [("u1",)]),
    Case("ternary", SCALED, "s * (q - 1)", "code=q, scale=s", [("u2",), ("u4",)], [("u1",)]),
    Case("progressive", (("d f16", "n"), ("sc {2}", BLOCK), ("z {3}", BLOCK), ("q {1}", CODE)), "(q * sc + z) * d",
         "code=q, scale=sc, zero=z, super_scale=d, divisor={4}", [("u4", "i8", "i8", "119"), ("u4", "u5", "i8", "119"),
                                                                 ("u8", "u3", "i8", "127")],
         [("u4", "i8", "u8", "119"), ("u4", "i8", "i7", "119"), ("u4", "u3", "i8", "119"), ("u2", "u8", "i8", "119")]),
    Case("kquant_minmax", (("d f16", SUPER), ("e f16", SUPER), ("sc {1}", BLOCK), ("mn {2}", BLOCK), ("q {3}", CODE)),
         "d * sc * q - e * mn", "code=q, scale=sc, min=mn, super_scale=d, super_min=e, first=-1, step=0.1, steps=20",
         [*product(("u6", "u1"), ("u6", "u1"), ("u4", "u8"))]),
    *(Case("kquant_signmax", SUPERS, "d * {2} * {4}", f"code=q, scale=sc, super_scale=d, by={by}",
           [(*steps, *code) for steps, code in product(STEPS, (("u4", "(q - 8)"), ("i3", "q")))],
           [*((*steps, "i4", "q") for steps in ONE_SIGN_STEPS), (*STEPS[0], "u4", "q"), (*STEPS[0], "u4", "(q - 15)")])
      for by in ("trials", "exchange")),
    Case("block_levels", SCALED, "s * levels[q]", "code=q, scale=s", [("u3", BOTH)], [("u3", POSITIVE), ("u3", NEGATIVE)],
         ("levels: [{2}]",)),
    Case("kquant_levels", SUPERS, "d * {2} * levels[q]", "code=q, scale=sc, super_scale=d",
         [(*steps, "u3", BOTH) for steps in STEPS],
         [*((*steps, "u3", BOTH) for steps in ONE_SIGN_STEPS), (*STEPS[0], "u3", POSITIVE)], ("levels: [{4}]",)),
    Case("absmax_level", (("s e8m0h", BLOCK), ("q {1}", CODE)), "s * level[q]", "code=q, scale=s", [("u3", BOTH)],
         [("u3", POSITIVE), ("u3", NEGATIVE)], ("level: [{2}]",)),
    Case("unit_level", (("s f32", BLOCK), ("q {1}", CODE)), "s * level[q]", "code=q, scale=s", [("u3", UNITS)],
         [("u3", UP), ("u3", STEEP), ("u3", "-0.5, -0.3, -0.1, 0, 0.1, 0.2, 0.3, 0.5")], ("level: [{2}]",)),
    Case("unit_level_nested", (("o f32", ""), ("t f32", FLAT_SUPER), ("s u3", FLAT), ("q u3", CODE)),
         "level[q] * (entry[s] * t + o)", "code=q, scale=s, super_scale=t, offset=o", [(UNITS, UNITS)],
         [(UP, UNITS), (STEEP, UNITS)],
         ("level: [{1}]", "entry: [{2}]")),
    Case("least_squares", (("s {2}", BLOCK), ("q u3", CODE)), "s * level[q]", "code=q, scale=s", [(BOTH, "f16"), (BOTH, "e8m0")],
         [(POSITIVE, "f16"), (NEGATIVE, "f16"), (POSITIVE, "e8m0")], ("level: [{1}]",)),
    Case("least_squares_nested", SUPERS, "d * {2} * level[q]", "code=q, scale=sc, super_scale=d",
         [(*steps, "u3", BOTH) for steps in (*STEPS, *ONE_SIGN_STEPS)], [(*STEPS[0], "u3", POSITIVE)], ("level: [{4}]",)),
]
# Schemes of tables that the weight chooses, of codes without scales, and of rows of grids: by formats that ship.
BY_FORMATS = {"kmeans", "scaled_kmeans", "vector_kmeans", "nearest", "grid_signs", "grid_shifts", "least_squares_even"}


def losses(case: Case, choice: tuple[str, ...], path: Path) -> tuple[float, float]:
    """The error of all weights over their norm, and the larger of that of either sign; infinite if the quantizer refuses."""
    path.write_text(case.text(choice))
    module = qdsl.load(path)
    try:
        error = module.dequantize(module.quantize(WEIGHT), torch.float32) - WEIGHT
    except qdsl.FormatError:
        return float("inf"), float("inf")
    signs: list[Any] = [WEIGHT < 0, WEIGHT > 0]
    return float(error.norm() / WEIGHT.norm()), max(float(error[sign].norm() / WEIGHT[sign].norm()) for sign in signs)


def named(kind: str) -> list[Any]:
    return [pytest.param(case, id=f"{case.scheme}{i}") for i, case in enumerate(CASES) if getattr(case, kind)]


def test_every_scheme_is_here() -> None:
    shipped = {scheme for path in SHIPPED if (call := spec(path).encode) is not None for scheme in [call.name]}
    assert {case.scheme for case in CASES} | BY_FORMATS == SCHEMES.keys() and shipped >= BY_FORMATS
    wanted = {name for name, scheme in SCHEMES.items() if scheme.signs or name in CHECKS}
    assert {case.scheme for case in CASES if case.bad} == wanted - BY_FORMATS


@pytest.mark.parametrize("case", named("good"))
def test_what_compiles_quantizes(case: Case, tmp_path: Path) -> None:
    for choice in case.good:
        whole, of_sign = losses(case, choice, tmp_path / "ranges.yaml")
        assert whole < 0.75 and of_sign < 0.8, (choice, whole, of_sign)


@pytest.mark.parametrize("case", named("bad"))
def test_what_is_refused_would_not(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message stands at a line of the spec, with a remedy; without the check, weights are lost."""
    path = tmp_path / "ranges.yaml"
    good, _ = losses(case, case.good[0], path)
    for choice in case.bad:
        path.write_text(case.text(choice))
        with pytest.raises(SpecError) as caught:
            qdsl.load(path)
        [problem] = caught.value.problems
        assert problem.span.column > 1 and problem.notes, str(problem)
    monkeypatch.setitem(check_encode.__globals__, "check_ranges", lambda *_: None)
    for choice in case.bad:
        whole, of_sign = losses(case, choice, path)
        assert of_sign > 0.9 or whole > 1.4 * good, (choice, whole, of_sign, good)
