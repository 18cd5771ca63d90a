"""What of a checkpoint becomes smaller: matrices that are held together, as bytes of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.checkpoint.components import within
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.safetensors import Entry
from qdsl.compress import patterns
from qdsl.compress.codecs import NUMPY, Shape
from qdsl.entropy.huffman_windows import THREADS
from qdsl.rewrite import RewriteError

FORMATS = ("hlane", "fix4", "df11")


@dataclass(frozen=True, slots=True)
class Aim:
    """What matrices are to become.

    threads: of a block, in DF11.  patterns: of its groups, None for those that names suggest.  by_group: files as dfloat11 cuts
    them with save_single_file=False.  only: the models of a pipeline that are meant, none for all.  plain_config: config.json as
    the dfloat11 package writes it, without settings that name qdsl and without a guard.
    """

    format: str
    threads: int = THREADS
    patterns: Mapping[str, Sequence[str]] | None = None
    by_group: bool = False
    only: tuple[str, ...] = ()
    plain_config: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether what takes more room than before is held so nevertheless, because the patterns ask for it."""
        return self.patterns is not None

    def means(self, model: str) -> bool:
        return not self.only or model in self.only


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor in a file."""

    path: Path
    dtype: str
    shape: Shape
    start: int
    nbytes: int

    def read(self) -> NDArray[Any]:
        """Mapped: what is not touched is not read, and the system may take back what is."""
        if not self.nbytes:
            return np.empty(self.shape, NUMPY[self.dtype])
        return np.memmap(self.path, NUMPY[self.dtype], "r", self.start, self.shape)


def bytes_of(folder: Folder, name: str) -> Bytes:
    entry = folder.entry(name)
    return placed(folder.file(name).path, entry)


def placed(path: Path, entry: Entry) -> Bytes:
    return Bytes(path, entry.dtype, entry.shape, entry.start, entry.nbytes)


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that are held together, by their names.  model: the folder of a pipeline's model, ''.  name: of the module."""

    model: str
    name: str
    parts: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.parts.values())

    @property
    def label(self) -> str:
        """What it is called in the folder of all models."""
        return within(self.model, self.name)

    def full(self, leaf: str) -> str:
        """What a tensor of it is called."""
        return f"{self.name}.{leaf}" if self.name else leaf


def units(models: Mapping[str, Folder], aim: Aim) -> tuple[list[Unit], dict[str, dict[str, list[str]]]]:
    """What becomes smaller, in the order of the files, and by model the patterns of DF11's groups.

    Raises RewriteError where nothing does, and for patterns that do not fit.
    """
    if unknown := [name for name in aim.only if name not in models]:
        raise RewriteError(f"no model {unknown[0]!r}: there are {', '.join(filter(None, models)) or 'not several here'}")
    made: list[Unit] = []
    used: dict[str, dict[str, list[str]]] = {}
    for model, folder in models.items():
        if not aim.means(model):
            continue
        if aim.format == "df11":
            chosen = patterns.found(patterns.matrices(folder), patterns.modules(folder)) if aim.patterns is None else {
                key: list(each) for key, each in aim.patterns.items()}
            held = patterns.matched(folder, chosen)
            used |= {model: chosen} if held else {}
        else:
            held = {name.removesuffix(patterns.WEIGHT): [name] for name in folder.names()
                    if patterns.is_matrix(folder, name) or patterns.is_stack(folder, name)}
        made += [Unit(model, name, {each: bytes_of(folder, each) for each in parts}) for name, parts in held.items()]
    if not made:
        where = ", ".join(str(folder.path) for folder in models.values())
        what = "no pattern names a module" if aim.patterns else "no bfloat16 matrix, whose exponents could be coded"
        raise RewriteError(f"{where}: {what}")
    return made, used


def left(models: Mapping[str, Folder], aim: Aim, made: Iterable[Unit]) -> list[str]:
    """What of the models that are meant stays as it is, in words; of tensors with one axis it goes without saying."""
    held = {(unit.model, name) for unit in made for name in unit.parts}
    sums: dict[tuple[str, str, int], list[int]] = {}
    for model, folder in models.items():
        for name in folder.names() if aim.means(model) else ():
            entry = folder.entry(name)
            if len(entry.shape) > 1 and (model, name) not in held:
                sums.setdefault((model, entry.dtype, len(entry.shape)), []).append(entry.nbytes)
    kinds = "not of Linear or Embedding" + ("" if aim.format == "df11" else ", nor experts")
    plain = "no pattern names them" if aim.patterns else kinds
    others = [f"{model}: stays as it is; `--component {model}` compresses it" for model in models if not aim.means(model)]
    described = (f"{model}{': ' * bool(model)}tensors of {dtype} with {axes} axes stay as they are, {len(sizes)} of "
                 f"{sum(sizes)} bytes: {plain if dtype == 'BF16' else 'not bfloat16'}"
                 for (model, dtype, axes), sizes in sums.items())
    return [*others, *described]


def needed(nbytes: int) -> int:
    """Bytes of memory of a process, for matrices of so many that are held together."""
    return 5 * nbytes // 2 + 100_000_000
