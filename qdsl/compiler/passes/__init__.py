"""The compiler's passes, which turn a spec into programs, in order; each has a file of its name."""

from __future__ import annotations

from collections.abc import Callable

from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.check_claims import check_claims
from qdsl.compiler.passes.check_coverage import check_coverage
from qdsl.compiler.passes.check_encode import check_encode
from qdsl.compiler.passes.choose_units import choose_units
from qdsl.compiler.passes.derive_planar import derive_planar
from qdsl.compiler.passes.factor_decode import factor_decode
from qdsl.compiler.passes.infer_layouts import infer_layouts
from qdsl.compiler.passes.list_programs import list_programs
from qdsl.compiler.passes.read_branches import read_branches
from qdsl.compiler.passes.read_records import read_records
from qdsl.compiler.passes.type_decode import type_decode
from qdsl.compiler.passes.type_fields import type_fields
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.source import Problems

Pass = Callable[[Program, Problems], Program]

PASSES: tuple[Pass, ...] = (
    type_fields,        # dims, types and subscripts of the fields
    read_records,       # tensors, variables, records, stored operations
    read_branches,      # terms added to the decoded weight, and their tensors
    check_coverage,     # every bit placed once, every extent filled
    infer_layouts,      # records become strided bit layouts
    type_decode,        # the decode expression as typed values with ranges
    factor_decode,      # decode as scale * (code + zero) + offset
    check_encode,       # roles and options of the encode scheme, and that it inverts decode
    check_claims,       # bytes and bits per weight
    choose_units,       # words, units and lanes of the kernels
)


def compile_spec(spec: Spec, after: Callable[[str, Program], None] | None = None) -> tuple[Program, ...]:
    """The programs of a spec, the derived planar storages last.

    Raises SpecError with the problems of all programs at the first pass that finds any.  after(name, program): called when a pass
    has finished a program; tests check the program there.
    """
    problems = Problems()
    authored = list_programs(spec, problems)
    problems.stop()
    programs = _run_passes(authored, problems, after)
    choices: dict[tuple[tuple[str, int | str], ...], list[Program]] = {}
    for program in programs:
        choices.setdefault(tuple(program.params.items()), []).append(program)
    for group in choices.values():
        _check_defaults(group, problems)
    problems.stop()
    derived = [planar for group in choices.values() if (planar := derive_planar(group)) is not None]
    return (*programs, *_run_passes(derived, problems, after))


def _check_defaults(programs: list[Program], problems: Problems) -> None:
    """All storages must agree on the value of a field that they do not hold: decode is the same for all."""
    defaults: dict[str, Index] = {}
    for program in programs:
        for field, value in program.unstored.items():
            if defaults.setdefault(field, value) != value:
                problems.add(program.authored.name.span, f"'{field}' is {value} where this storage does not hold it, and "
                                                         f"{defaults[field]} in another")


def _run_passes(programs: list[Program], problems: Problems, after: Callable[[str, Program], None] | None) -> list[Program]:
    for step in PASSES:
        programs = [step(program, problems) for program in programs]
        problems.stop()
        if after is not None:
            for program in programs:
                after(step.__name__, program)
    return programs
