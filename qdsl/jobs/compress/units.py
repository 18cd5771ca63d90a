"""Units of compression: matrices that are encoded together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdsl.checkpoint.files.components import within
from qdsl.codecs.huffman_windows.reference import THREADS
from qdsl.jobs.compress import patterns
from qdsl.jobs.compress.model import WEIGHT, Model
from qdsl.jobs.compress.tensors import Data, EncodedMatrices, EncodedMatrix
from qdsl.jobs.engine import RewriteError

FORMATS = ("hlane", "fix4", "fix3", "df11")
THREAD_COUNTS = tuple(1 << power for power in range(3, 11))


@dataclass(frozen=True, slots=True)
class Compression:
    """The target format of a compression and its options.

    threads: per block, in DF11.  patterns: of DF11's groups, None for `default_patterns`.  by_group: one file per group, as
    dfloat11 writes with save_single_file=False.  only: the models of a pipeline to compress, () for all.
    plain_config: config.json as the dfloat11 package writes it, which may be its settings alone.
    """

    format: str
    threads: int = THREADS
    patterns: Mapping[str, Sequence[str]] | None = None
    by_group: bool = False
    only: tuple[str, ...] = ()
    plain_config: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether units are encoded even if that takes more bytes, because the patterns ask for it."""
        return self.patterns is not None

    def includes(self, model: str) -> bool:
        return not self.only or model in self.only


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that are encoded together, by name.  model: the subfolder of a pipeline's model, ''.  name: of the module.

    number: its place in the order of the files.  plain: why it is not encoded, '' for one that is.
    """

    model: str
    name: str
    parts: Mapping[str, Data]
    number: int = 0
    plain: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def source(self) -> EncodedMatrices | None:
        """The encoded matrices that its first matrix is decoded from; None for plain ones."""
        first = next(iter(self.parts.values()))
        return first.coded if isinstance(first, EncodedMatrix) else None

    @property
    def nbytes_read(self) -> int:
        """Bytes of all matrices that are in memory at once, including others that are decoded together with its own."""
        return max([self.nbytes, *(part.coded.nbytes for part in self.parts.values() if isinstance(part, EncodedMatrix))])

    @property
    def label(self) -> str:
        """Its name relative to the folder of all models."""
        return within(self.model, self.name)

    def full(self, leaf: str) -> str:
        """The full name of one of its tensors."""
        return f"{self.name}.{leaf}" if self.name else leaf


def compression_units(models: Mapping[str, Model], aim: Compression) -> tuple[list[Unit], dict[str, dict[str, list[str]]]]:
    """The units of all models in the order of the files, and the patterns of DF11's groups by model.

    Raises RewriteError where nothing does, and for patterns that do not fit.
    """
    if unknown := [name for name in aim.only if name not in models]:
        raise RewriteError(f"no model {unknown[0]!r}: there are {', '.join(filter(None, models)) or 'not several here'}")
    result: list[Unit] = []
    used: dict[str, dict[str, list[str]]] = {}
    for name, model in models.items():
        if not aim.includes(name):
            continue
        if aim.format == "df11":
            chosen = patterns.default_patterns(patterns.matrices(model), patterns.modules(model)) if aim.patterns is None else {
                key: list(names) for key, names in aim.patterns.items()}
            groups = patterns.matching_modules(model, chosen)
            used |= {name: chosen} if groups else {}
        else:
            groups = {own.removesuffix(WEIGHT): [own] for own in model.names()
                      if patterns.is_matrix(model, own) or patterns.is_stack(model, own)}
        coded = {own for weights in groups.values() for own in weights}
        result += [Unit(name, own, {weight: model.data[weight] for weight in weights}) for own, weights in groups.items()]
        result += [Unit(name, own, {own: data}, plain="it is no part of a unit that is encoded")
                   for own, data in model.data.items() if isinstance(data, EncodedMatrix) and own not in coded]
    if all(unit.plain for unit in result):
        where = ", ".join(str(model.path) for model in models.values())
        what = "no pattern names a module" if aim.patterns else "no bfloat16 matrix, whose exponents could be coded"
        raise RewriteError(f"{where}: {what}")
    return [replace(unit, number=number) for number, unit in enumerate(result)], used


def uncompressed_notes(models: Mapping[str, Model], aim: Compression, encoded: Iterable[Unit]) -> list[str]:
    """Notes on tensors with two or more axes that are not compressed."""
    coded = {(unit.model, name) for unit in encoded for name in unit.parts}
    sums: dict[tuple[str, str, int], list[int]] = {}
    for own, model in models.items():
        for name in model.names() if aim.includes(own) else ():
            entry = model.entry(name)
            if len(entry.shape) > 1 and (own, name) not in coded:
                sums.setdefault((own, entry.dtype, len(entry.shape)), []).append(entry.nbytes)
    kinds = "not of Linear or Embedding" + ("" if aim.format == "df11" else ", nor experts")
    plain = "no pattern names them" if aim.patterns else kinds
    others = [f"{own}: stays as it is; `--component {own}` compresses it" for own in models if not aim.includes(own)]
    described = (f"{own}{': ' * bool(own)}tensors of {dtype} with {axes} axes stay as they are, {len(sizes)} of "
                 f"{sum(sizes)} bytes: {plain if dtype == 'BF16' else 'not bfloat16'}"
                 for (own, dtype, axes), sizes in sums.items())
    return [*others, *described]
