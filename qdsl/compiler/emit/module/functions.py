"""The functions and tables of a module, each printed once even if storages or variants share it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qdsl.compiler.emit.lines import WORD
from qdsl.compiler.emit.triton.matrix_unit_layout import argument
from qdsl.compiler.ir.program import Program

NAME = re.compile(r"^(?:def )?(\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or table of a module: its name and its lines."""

    name: str
    lines: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """Whether it is a constant, which functions may read."""
        return self.name.isupper()


def definition(lines: Sequence[str]) -> Definition:
    """Parses these lines as a function or table."""
    match = NAME.search("\n".join(lines))
    assert match is not None
    return Definition(match[1], tuple(lines))


def definitions(lines: Iterable[str]) -> list[Definition]:
    """Splits lines into functions at two empty lines."""
    texts = [text.strip("\n") for text in "\n".join(lines).split("\n\n\n")]
    return [definition(text.split("\n")) for text in texts if text]


def shared_by_storages(programs: Sequence[Program], printed: Sequence[list[Definition]],
                       ) -> tuple[list[Definition], dict[str, str]]:
    """The functions of all storages, without repetitions that differ only in tensor names, and for those the name to call.

    printed: the functions of each program.
    """
    kept: list[Definition] = []
    names: dict[str, str] = {}
    by_body: dict[tuple[str, ...], str] = {}
    for program, functions in zip(programs, printed, strict=True):
        places = {argument(tensor.name): f"${place}" for place, tensor in enumerate(program.tensors)}
        for function in functions:
            name = by_body.setdefault(_body(function, program.storage, places), function.name)
            if name == function.name:
                kept.append(function)
            else:
                names[function.name] = name
    return kept, names


def _body(function: Definition, storage: str, places: Mapping[str, str]) -> tuple[str, ...]:
    """A key of a function's behaviour: its kind, and its lines without docstring, with tensors replaced by their index."""
    quotes = [number for number, line in enumerate(function.lines) for _ in range(line.count('"""'))]
    text = "\n".join((*function.lines[:quotes[0]], *function.lines[quotes[1] + 1:])).replace(f"def {function.name}(", "def (")
    return function.name.removesuffix(f"_{storage}"), WORD.sub(lambda word: places.get(word[0], word[0]), text)


def renamed(lines: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """The lines with other names."""
    return [WORD.sub(lambda word: names.get(word[0], word[0]), line) for line in lines] if names else list(lines)


def shared_by_variants(modules: Mapping[str, tuple[Sequence[Definition], Sequence[str]]],
                       ) -> dict[str, tuple[list[Definition], dict[str, list[str]]]]:
    """What each module defines itself, and the names that it imports from earlier modules with the same definition.

    modules: by name, definitions and the lines after them.  Functions are the same only if the tables they read are.
    """
    origins: dict[tuple[Definition, ...], str] = {}
    shared: dict[str, tuple[list[Definition], dict[str, list[str]]]] = {}
    for module, (items, variant) in modules.items():
        tables = {item.name: item for item in items if item.is_table}
        own: list[Definition] = []
        imported: dict[str, list[str]] = {}
        for item in items:
            if not item.is_table:
                origin = origins.setdefault((item, *_tables_of(tables, "\n".join(item.lines))), module)
                if origin == module:
                    own.append(item)
                else:
                    imported.setdefault(origin, []).append(item.name)
        text = "\n".join([*(line for item in own for line in item.lines), *variant])
        shared[module] = [*_tables_of(tables, text), *own], imported
    return shared


def _tables_of(tables: Mapping[str, Definition], text: str) -> list[Definition]:
    """The tables that a text reads, directly or through other tables."""
    read: list[Definition] = []
    for name, table in reversed(list(tables.items())):
        if re.search(rf"\b{name}\b", text):
            read.insert(0, table)
            text += "\n".join(table.lines)
    return read
