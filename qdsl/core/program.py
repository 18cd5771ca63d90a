"""The program of a format: the literal `PROGRAM` of its generated module, from which the module makes its FORMAT.

It has the format's name, formula, parameters and rules for checkpoints, and per variant the fields, and the tensors of every
storage with the positions of their bits.  Readers of checkpoints take it from the file's text, and so never import torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.core.branches import OPTIONAL
from qdsl.core.shapes import Axis, axis, listed
from qdsl.core.slices import called
from qdsl.core.stored import PLANAR, Description, Stored

START, END = "\nPROGRAM = ", "\n}\n"
# The last item of a mapping; the mappings inside of it have none inside.
_POSITIONS = re.compile(r'"(?:field|slices|row_codes)": [^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_PLANAR = re.compile(r'^( *)"planar": \{\n.*?^\1\},?\n', re.MULTILINE | re.DOTALL)
_lock = threading.Lock()                                         # threads must not parse in parallel: CPython 3.11 crashes


def program_files(folders: Iterable[str]) -> dict[str, Path]:
    """The file with the program of each format, by name, in these folders of generated modules."""
    paths = {path.parent.name if path.stem == "__init__" else path.stem: path for folder in folders
             for path in (*Path(folder).glob("[!_]*.py"), *Path(folder).glob("[!_]*/__init__.py"))}
    return dict(sorted(paths.items()))


def read_program(path: Path, in_files: bool = False) -> dict[str, Any]:
    """The program in a generated module.  in_files: without positions of bits and storage `planar`, for readers of files.

    Raises ValueError without one.
    """
    text = path.read_text()
    start = text.index(START) + len(START)
    text = text[start:text.index(END, start) + 2]
    with _lock:
        code = compile(_POSITIONS.sub("}", _PLANAR.sub(r'\1"planar": {"tensors": {}},\n', text)) if in_files else text,
                       str(path), "eval")
        if code.co_names:
            raise ValueError(f"{path}: PROGRAM is no literal")
        program: dict[str, Any] = eval(code, {})                            # noqa: S307  as ast.literal_eval, in half the time
    return program


def summary(program: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the list of formats."""
    return {**{key: program[key] for key in ("name", "title", "formula", "bits")}, "storages": storages(program)}


def storages(program: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for variant in program["variants"].values() for name in variant["storages"]))


def tensors(variant: Mapping[str, Any], storage: str) -> dict[str, Stored]:
    """The tensors that a weight in a storage may have: its own, then those of branches."""
    of_branches = [called(_of_branch, data) for _, parts, _ in variant.get("plus", ()) for data in parts.values()]
    return {**{name: called(Stored, data) for name, data in variant["storages"][storage]["tensors"].items()}, **dict(of_branches)}


def _of_branch(name: str, kind: str, *axes: str, aliases: Sequence[str] = (), **_: object) -> tuple[str, Stored]:
    return name, Stored(kind, *axes, aliases=aliases, optional=OPTIONAL)


def _axes(kind: str, *axes: str, groups: str = "") -> tuple[Axis, ...]:
    return tuple(map(axis, axes))


def program_description(program: Mapping[str, Any], in_files: bool = False) -> Description:
    """The description of a format for readers of tensors.  in_files: only with storages that files may have."""
    variants, left = program["variants"], {PLANAR}
    left |= {name for variant in variants.values() for name, storage in variant["storages"].items() if "transient" in storage}
    return Description(
        program["name"], {name: listed(values) for name, values in program.get("params", {}).items()},
        program.get("sizes", {}), program.get("by", ()),
        {key: {name: tensors(variant, name) for name in variant["storages"] if not in_files or name not in left}
         for key, variant in variants.items()},
        program.get("detect", {}), program.get("tables", {}),
        {key: {name: called(_axes, data) for name, data in variant["fields"].items()}
         for key, variant in variants.items() if variant.get("cuts", ("N", "K"))[1] != "1"},
        frozenset(key for key, variant in variants.items() if PLANAR in variant["storages"]),
        program.get("fixed", {}), tuple(name for name in storages(program) if name in left),
        {key: variant.get("options", {}) for key, variant in variants.items() if "only_read" not in variant})


def is_entropy_code(program: Mapping[str, Any], storage: str) -> bool:
    """Whether a storage holds plain numbers in an entropy code."""
    return any("copies" in variant and "streams" in variant["storages"].get(storage, ())
               for variant in program["variants"].values())
