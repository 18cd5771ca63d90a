"""Prints a generated module: reference, kernels and description of a format, in one file or a package.

It is a package with a file per value if parameters change the text; other parameters are arguments or types of tensors.  The text
depends only on the spec and the compiler.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import qdsl
from qdsl.compiler.emit.axes import axis_text, field_axes, field_kinds
from qdsl.compiler.emit.c.rows import row_functions
from qdsl.compiler.emit.lines import WIDTH, fold_line, names_read, wrap_items
from qdsl.compiler.emit.literals import literal_lines
from qdsl.compiler.emit.literals import literal_text as literal
from qdsl.compiler.emit.module.functions import (
    Definition,
    definition,
    definitions,
    renamed,
    shared_by_storages,
    shared_by_variants,
)
from qdsl.compiler.emit.module.program import digest_of, format_data, variant_data
from qdsl.compiler.emit.module.tables import constant_tables
from qdsl.compiler.emit.module.variant import variant_lines
from qdsl.compiler.emit.tensors import Unsupported
from qdsl.compiler.emit.torch.decode import decode_body
from qdsl.compiler.emit.torch.reference import decode_function, encode_function, reference_functions
from qdsl.compiler.emit.triton.kernel_functions import kernel_functions
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.check_claims import bits_text
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.reserved import KERNELS, RUNTIME
from qdsl.compiler.spec.source import Problem, SpecError
from qdsl.core.numbers import FLOATS
from qdsl.core.schemes import SCHEMES

RULE = "-" * 118
# The functions of its FORMAT that a module exports, by lines.
SURFACE = (("wrap", "pack", "unpack", "quantize", "dequantize"), ("convert", "requantize", "planar", "SPEC"),
           ("linear", "grouped_linear", "Linear", "Embedding"))


@dataclass(frozen=True, slots=True)
class ModulePart:
    """The programs of one choice of the parameters that change the text, and that text."""

    params: Mapping[str, int | str]
    programs: tuple[Program, ...]
    reference: tuple[Definition, ...]
    kernels: tuple[Definition, ...]
    variant: tuple[str, ...]
    data: Mapping[str, Any]

    @property
    def defined(self) -> list[Definition]:
        return [*self.reference, *self.kernels]

    @property
    def text(self) -> tuple[object, ...]:
        """All its printed text, as a key."""
        return self.reference, self.kernels, self.variant, literal(self.data)


def module_files(programs: Sequence[Program]) -> dict[str, str]:
    """The files of a format by path below the folder of generated modules: 'q4_0.py', or 'int_group/bits_4.py' and so on.

    Raises SpecError for a legal layout that views and shifts cannot express.
    """
    try:
        by, parts = _module_parts(programs)
    except Unsupported as error:
        raise SpecError([Problem(f"not supported: {error}", programs[0].spec.span)]) from None
    name = programs[0].spec.name.value
    if not by:
        lines = [*_body(parts[0], parts[0].defined), "", *_format_lines(parts, by, programs)]
        return {f"{name}.py": _finish([*_header(parts[0].programs), *_imports(lines), "", "", *lines])}
    files = {}
    modules = {_part_name(by, part): part for part in parts}
    shared = shared_by_variants({module: (part.defined, part.variant) for module, part in modules.items()})
    for module, part in modules.items():
        own, imported = shared[module]
        title = ", ".join(f"{key} = {part.params[key]}" for key in by)
        body = _body(part, own)
        lines = [*_variant_header(part.programs[0].spec, title), *_imports(body), *_sibling_imports(imported), "", "", *body]
        files[f"{name}/{module}.py"] = _finish(lines)
    different = [part.params for part in parts]
    header = _header([program for program in programs if program.params in different])
    lines = [*header, "from qdsl.runtime import Format", "", *_import(".", modules), "", *_format_lines(parts, by, programs)]
    files[f"{name}/__init__.py"] = _finish(lines)
    return files


def _part_name(by: Sequence[str], part: ModulePart) -> str:
    return "_".join(f"{key}_{part.params[key]}" for key in by)


def _finish(lines: Sequence[str]) -> str:
    return "\n".join(row.rstrip() for line in lines for row in fold_line(line)) + "\n"


def _import(source: str, words: Iterable[str]) -> list[str]:
    """An import of names, in parentheses if it does not fit a line."""
    one = f"from {source} import {', '.join(words)}"
    return [one] if len(one) <= WIDTH else wrap_items(f"from {source} import (", words, ")")


# -- variants ---------------------------------------------------------------------------------------------------------


def _module_parts(programs: Sequence[Program]) -> tuple[tuple[str, ...], list[ModulePart]]:
    """The parameters that change the text, and a part for each of their values."""
    choices: list[tuple[Mapping[str, int | str], list[Program]]] = []
    for program in programs:
        group = next((group for params, group in choices if params == program.params), None)
        if group is None:
            choices.append((program.params, [program]))
        else:
            group.append(program)
    variants = [_module_part(params, group) for params, group in choices]
    by = tuple(key for key in programs[0].params if any(
        a.text != b.text for a in variants for b in variants
        if all(a.params[other] == b.params[other] for other in a.params if other != key)))
    parts: dict[tuple[int | str, ...], ModulePart] = {}
    for part in variants:
        parts.setdefault(tuple(part.params[key] for key in by), part)
    return by, list(parts.values())


def _module_part(params: Mapping[str, int | str], programs: Sequence[Program]) -> ModulePart:
    first, decoded = programs[0], decode_body(programs)
    packing = (part for program in programs for part in reference_functions(program))
    lines = [*constant_tables(programs), *row_functions(programs), *packing, decode_function(programs, decoded),
             *([encode_function(first)] if first.encode is not None else [])]
    functions, names = shared_by_storages(programs, [definitions(kernel_functions(program)) for program in programs])
    return ModulePart(params, tuple(programs), tuple(map(definition, lines)), tuple(functions),
                      tuple(renamed(variant_lines(programs), names)), variant_data(programs, decoded))


def _body(part: ModulePart, own: Sequence[Definition]) -> list[str]:
    """The text of a variant without its header and imports.  own: definitions that it does not import from other variants."""
    lines: list[str] = []
    for title, items in (("reference", part.reference), ("kernels", part.kernels)):
        section = [item for item in items if item in own]
        if section:
            lines += [f"# -- {title} {RULE[len(title):112]}", ""]
            lines += [line for item in section for line in ("", *item.lines, "")]
            lines.append("")
    return [*lines, f"# -- format {RULE[:106]}", *part.variant]


def _format_lines(parts: Sequence[ModulePart], by: Sequence[str], programs: Sequence[Program]) -> list[str]:
    spec = programs[0].spec
    variants = {tuple(part.params[key] for key in by): part for part in parts}
    data = format_data(programs, by, {key: part.data for key, part in variants.items()})
    first, *others = literal_lines(data, len("PROGRAM = "))
    shown = [f"{literal(key)}: {f'{_part_name(by, part)}.' if by else ''}VARIANT" for key, part in variants.items()]
    lines = [f"PROGRAM = {first}", *others, "", *wrap_items("FORMAT = Format(PROGRAM, {", shown, "})")]
    offered = (f"{', '.join(names)} = {', '.join(f'FORMAT.{name.lower() if name.isupper() else name}' for name in names)}"
               for names in SURFACE)
    for_device = ["for_device = FORMAT.for_device"] if any(storage.transient for storage in spec.storages) else []
    return [*lines, *offered, *for_device]


# -- header -----------------------------------------------------------------------------------------------------------


def _title(spec: Spec, at: str = "") -> str:
    return f'"""{spec.name}{at}: {spec.title}.' if spec.title else f'"""{spec.name}{at}.'


def _origin(spec: Spec) -> list[str]:
    return [f"Built from the spec {spec.name} (sha256 {digest_of(spec)}) by qdsl {qdsl.__version__}.",
            "Do not edit: change the spec and run `qdsl build`.", '"""', ""]


def _variant_header(spec: Spec, title: str) -> list[str]:
    """The docstring of a variant; the package's docstring has the fields and storages."""
    return [_title(spec, f" at {title}"), "", f"    w = {spec.decode_text}", "", *_origin(spec)]


def _header(programs: Sequence[Program]) -> list[str]:
    spec = programs[0].spec
    lines = [_title(spec), "",
             f"    w = {spec.decode_text}", *(f"        + {branch.kind}({', '.join(tensor.name for tensor in branch.tensors)})"
                                             for branch in programs[0].plus),
             "    float32, rounded after each operation", ""]
    kinds = field_kinds(programs)
    width = max(len(kind) for kind in kinds.values())
    for field in programs[0].fields:
        kind = f"index into {axis_text(field.groups)} groups" if field.groups is not None else kinds[field.name]
        lines.append(f"    {field.name:<6} {kind:<{width}} [{', '.join(field_axes(programs, field))}]")
    lines.append("")
    sizes = [f"{p.name} = {p.values[0]}" for p in spec.params if p.name.value in programs[0].sizes]
    with_sizes = f" with {', '.join(sizes)}" if sizes else ""
    differ = [key for key in programs[0].params if any(p.params[key] != programs[0].params[key] for p in programs)]
    for storage in dict.fromkeys(program.storage for program in programs):
        first, *others = (program for program in programs if program.storage == storage)
        at = f" at {', '.join(f'{key} = {first.params[key]}' for key in differ)}" if differ else ""
        more = "".join(f", {bits_text(other).split()[0]} at {', '.join(str(other.params[key]) for key in differ)}"
                       for other in others)
        text = f"{storage}: {bits_text(first)}{at}{more}{',' if others and sizes else ''}{with_sizes}"
        lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return [*lines, "", *_origin(spec)]


def _sibling_imports(imported: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports of definitions from earlier variants."""
    lines: list[str] = []
    for module, names in imported.items():
        one = f"from .{module} import {', '.join(names)}"
        lines += [one] if len(one) <= WIDTH else wrap_items(f"from .{module} import (", names, ")")
    return ["", *lines] if lines else []


def _imports(body: Sequence[str]) -> list[str]:
    read = names_read(body)
    lines = ["from typing import Any", ""] if "Any" in read else []
    lines += ["import torch"] if "torch" in read else []
    sources = {"torch": ("Tensor",), "": (), "qdsl.encode": tuple(SCHEMES), "qdsl.runtime": RUNTIME,
               "qdsl.runtime.gpu.kernels": KERNELS, "qdsl.runtime.libraries.triton": ("tl", "triton"),
               "qdsl.runtime.weight.numbers": tuple(FLOATS)}
    for source, offered in sources.items():
        words = sorted(read & set(offered), key=lambda word: (word.lower() == word, word))
        lines += _import(source, words) if words else [] if source else [""]
    return lines


