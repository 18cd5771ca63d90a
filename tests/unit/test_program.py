"""The typed program between spec and text: legal after every pass, readable, and equal to the blessed text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest

import qdsl.encode
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Program
from qdsl.compiler.ir.text import text
from qdsl.compiler.passes import PASSES, compile_spec
from qdsl.compiler.spec.schema import load
from qdsl.core.layout import Layout
from qdsl.core.schemes import SCHEMES
from qdsl.encode.scheme import scheme
from tests.support.formats import ROOT, SPECS
from tests.support.program_rules import RULES, IllegalProgram, check

GOLDEN = ROOT / "tests" / "golden"
# Straddling words and stored rules, two-dimensional blocks, split fields, flat positions, planes: every kind of layout once.
STAGES = ("fp8_block", "int_group", "q4_k", "flat_nibbles", "planes")
SHOWN = {"int_group": ("gptq_v1",)}                              # of many storages, those whose stages are blessed


def stages(path: Path, storages: Collection[str] = ()) -> dict[str, list[str]]:
    """The text of every program after every pass, checked on the way; of types that differ in nothing else, the first."""
    texts: dict[str, list[str]] = {}

    def after(name: str, program: Program) -> None:
        check(program, name)
        texts.setdefault(name, []).append(text(program))

    whole = load(path, f"{path.stem}.yaml")
    params = tuple(replace(param, values=param.values[:1] if isinstance(param.values[0], str) else param.values)
                   for param in whole.params)
    kept = tuple(storage for storage in whole.storages if not storages or storage.name.value in storages)
    compile_spec(replace(whole, params=params, storages=kept), after)
    return texts


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_programs_are_legal_after_every_pass(path: Path) -> None:
    assert list(stages(path)) == [step.__name__ for step in PASSES]


@pytest.mark.parametrize("path", [path for path in SPECS if path.stem in STAGES], ids=lambda path: path.stem)
def test_stages_are_as_blessed(path: Path, bless: bool) -> None:
    """After each pass, what it changed in the program; `pytest --bless` writes the files anew."""
    lines: list[str] = []
    before: list[str] = []
    for name, programs in stages(path, SHOWN.get(path.stem, ())).items():
        now = "\n".join(programs).split("\n")
        changed = unified_diff(before, now, lineterm="", n=0)
        lines += [f"=== {name}", *(line for line in changed if not line.startswith(("---", "+++", "@@")))]
        before = now
    golden = GOLDEN / f"{path.stem}.txt"
    if bless:
        golden.write_text("\n".join(lines) + "\n")
    assert golden.read_text() == "\n".join(lines) + "\n"


def program() -> Program:
    return compile_spec(load(ROOT / "specs" / "q4_k.yaml"))[0]


def with_tensor(change: Callable[[Program], dict[str, object]]) -> Callable[[Program], Program]:
    """A program whose first tensor is changed."""
    return lambda p: replace(p, tensors=(replace(p.tensors[0], **change(p)), *p.tensors[1:]))  # type: ignore[arg-type]


def moved_slice(p: Program) -> dict[str, object]:
    first, *others = p.tensors[0].placements
    part = first.slices[0]
    return {"placements": (replace(first, slices=(replace(part, offset=part.offset + 1),)), *others)}


def value(p: Program, number: int, **changes: object) -> Program:
    values = list(p.values)
    values[number] = replace(values[number], **changes)  # type: ignore[arg-type]
    return replace(p, values=tuple(values))


def at(p: Program, op: str) -> int:
    return next(i for i, v in enumerate(p.values) if v.op == op)


BREAKS: dict[str, Callable[[Program], Program]] = {
    "subscripts-are-known": lambda p: replace(p, fields=(
        replace(p.fields[0], index=(ix.name("n"), ix.name("t"))), *p.fields[1:])),
    "positions-are-at-most-weights": lambda p: replace(p, fields=(
        replace(p.fields[0], index=(ix.name("n"), ix.name("n") * ix.name("k") * ix.name("n"))), *p.fields[1:])),
    "placements-are-of-fields": with_tensor(lambda p: {"placements": (
        replace(p.tensors[0].placements[0], digits=(("n", ""), ("z", ""))), *p.tensors[0].placements[1:])}),
    "slices-say-what-records-say": with_tensor(moved_slice),
    "fields-are-stored-once": lambda p: replace(p, where={"d": ix.name("k")}),
    "values-refer-back": lambda p: value(p, at(p, "*"), args=(len(p.values), 0)),
    "types-agree": lambda p: value(p, at(p, "*"), args=(0, p.values[at(p, "float")].args[0])),
    "integers-are-in-range": lambda p: value(p, p.values[at(p, "float")].args[0], range=(0, 1 << 25)),
    "units-fill-their-tiles": lambda p: replace(p, units=replace(p.units, lanes=())),  # type: ignore[type-var]
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_named(rule: str) -> None:
    with pytest.raises(IllegalProgram, match=rf"after a test: {rule} is violated"):
        check(BREAKS[rule](program()), "a test")


def test_every_rule_is_broken_once() -> None:
    assert list(BREAKS) == list(RULES)


def test_layouts_in_a_program_are_those_of_the_design() -> None:
    """Q4_K's scales: the low bits of eight scales in two rows of four bytes, the high bits of the last four elsewhere."""
    blocks = program().tensors[0]
    parts = {p.field: [(part.lo, part.width, str(part)) for part in p.slices] for p in blocks.placements}
    assert parts["q"] == [(0, 4, str(Layout(((32, 8), (2, 4), (4, 256)), 128)))]
    assert [width for _, width, _ in parts["sc"]] == [4, 2]
    assert parts["d"] == [(0, 16, "(1):(0)@0")]


def test_schemes_are_what_encode_implements() -> None:
    """Each has a function, and a function whose arguments are not its roles and options cannot be defined."""
    assert set(SCHEMES) == set(qdsl.encode.__all__)

    def nearest(weight: object, *, code: str) -> None:
        pass

    def unit_level(weight: object, *, code: str, rows: int, other: int) -> None:
        pass

    assert scheme(nearest) is nearest
    with pytest.raises(TypeError, match=r"unit_level and its entry in core/schemes\.toml differ: other, scale"):
        scheme(unit_level)
