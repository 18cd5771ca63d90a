"""The bit picture of one storage at one choice of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from qdsl.compiler.emit.module.program import digest_of
from qdsl.compiler.emit.show import page, picture
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import load
from qdsl.compiler.spec.source import SpecError
from qdsl.core.places import UnknownSpec, find_spec


def drawing(name: str, digest: str, path: str, storage: str, params: Mapping[str, int | str]) -> str:
    """The SVG of a storage of a format.  path: its spec's file, '' for a format that qdsl knows by name.

    Raises UnknownSpec if the spec is not there or is another one by now, OSError if it cannot be read.
    """
    programs = _programs(path or str(find_spec(name)), digest)
    chosen = [program for program in programs
              if program.storage == storage and all(params[key] == value for key, value in program.params.items()
                                                    if isinstance(value, int))]
    return picture.svg_picture(page.distinct_layouts(chosen)) if chosen else ""


@lru_cache(maxsize=8)
def _programs(path: str, digest: str) -> tuple[Program, ...]:
    try:
        spec = load(Path(path))
    except SpecError as error:
        raise UnknownSpec(f"{path}: the spec has changed") from error
    if digest_of(spec) != digest:
        raise UnknownSpec(f"{path}: the spec has changed")
    return compile_spec(spec)
