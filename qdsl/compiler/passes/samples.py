"""Sample sizes at which a program's extents are compared: the smallest legal ones, whole and partial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice, product
from math import lcm

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Atom, Index, substitute
from qdsl.compiler.ir.program import Program

MAX_CHOICES = 128
UNLISTED = (48, 24)                                              # lengths of blocks that stand for all that a spec does not list
SampleSizes = tuple[tuple[str, str, tuple[int, ...]], ...]


def samples(program: Program, extents: Sequence[Index]) -> tuple[Mapping[str, int], ...]:
    """Values for N, K and the size parameters at which every one of `extents` is defined."""
    return samples_of(sample_sizes(program), tuple(dict.fromkeys(extents)))


def sample_sizes(program: Program) -> SampleSizes:
    """A program's size parameters, and the axes that it fixes: name, axis, values."""
    fixed = tuple((axis, axis, (extent,)) for axis, extent in program.spec.fixed.items())
    listed = {p.name.value: (*(v for v in p.values if isinstance(v, int)), *(UNLISTED if p.is_open else ()))
              for p in program.spec.params}
    return fixed + tuple((size, size_axis(program, size), listed[size]) for size in program.sizes)


@lru_cache(maxsize=32)                                           # tensors of a program have the same extents
def samples_of(sizes: SampleSizes, extents: tuple[Index, ...]) -> tuple[Mapping[str, int], ...]:
    """Values for N, K and `sizes` at which every one of `extents` is defined."""
    fixed = {name: list(values) for name, axis, values in sizes if name == axis}
    sizes = tuple(size for size in sizes if size[0] not in fixed)
    read = set[str]().union(*(extent.names() for extent in extents))
    chosen_samples: list[Mapping[str, int]] = []
    for values in islice(product(*(listed if size in read else listed[:1] for size, _, listed in sizes)), MAX_CHOICES):
        chosen = {size: value for (size, _, _), value in zip(sizes, values, strict=True) if value > 0}
        solid = [substitute(extent, {size: Index(value) for size, value in chosen.items()}) for extent in extents]
        whole = {axis: [axis, *(size for size, own, _ in sizes if own == axis and size not in chosen)] for axis in ("N", "K")}
        alone = {"N": [extent for extent in extents if extent.names().isdisjoint(whole["K"])],
                 "K": [extent for extent in extents if extent.names().isdisjoint(whole["N"])]}
        both = [extent for extent in extents if extent not in alone["N"] and extent not in alone["K"]]
        rows, columns = ([length for length in fixed.get(axis) or _candidates(axis_divisor(axis, solid), _large(solid))
                          if _are_defined(alone[axis], {**dict.fromkeys(whole[axis], length), **chosen})] for axis in ("N", "K"))
        for n, k in sorted(product(rows, columns), key=lambda shape: shape[0] * shape[1]):
            lengths = {size: {"N": n, "K": k}[axis] for size, axis, _ in sizes if size not in chosen}
            sample = {"N": n, "K": k, **chosen, **lengths}
            if _are_defined(both, sample):
                chosen_samples.append(sample)
    return tuple(chosen_samples)


def _are_defined(extents: Sequence[Index], sample: Mapping[str, int]) -> bool:
    try:
        return all(extent(sample) is not None for extent in extents)
    except ArithmeticError:
        return False


def distinct_samples(samples: Sequence[Mapping[str, int]], names: Sequence[str]) -> list[Mapping[str, int]]:
    """The samples without those that repeat an earlier one in the values of these names."""
    firsts: dict[tuple[int, ...], Mapping[str, int]] = {}
    for sample in samples:
        firsts.setdefault(tuple([sample[name] for name in names]), sample)
    return list(firsts.values())


def axis_divisor(axis: str, extents: Sequence[Index]) -> int:
    """The divisor of an axis that makes every exact division of it by a constant possible."""
    common = 1
    for extent in extents:
        for atom, _ in extent.terms:
            common = lcm(common, *_divisors(atom, axis))
    return common


def _divisors(atom: Atom, axis: str) -> list[int]:
    divisors = [d for argument in atom.args for inner, _ in argument.terms for d in _divisors(inner, axis)]
    if atom.op == "exact" and atom.args[1].is_const and atom.args[0] == Index(0, ((Atom("name", axis), 1),)):
        divisors.append(atom.args[1].const)
    return divisors


def _candidates(step: int, large: int) -> list[int]:
    return [step * i for i in (*((1, 2, 3, 5) if step > 1 else (1, 2, 3, 8, 33, 64)), large)]


def _large(extents: Sequence[Index]) -> int:
    """A size at which quotients by different constants differ: a multiple of them all, larger than any record's tile."""
    by = {atom.args[1].const for extent in extents for atom, _ in extent.terms if atom.args and atom.args[1].const > 1}
    return lcm(*by) << 14


def size_axis(program: Program, size: str) -> str:
    """The axis that a size parameter divides: 'N' or 'K'."""
    for field in program.fields:
        for index in field.index:
            if size in index.names():
                return "N" if "n" in index.names() and ix.flat_of(index) is None else "K"
    dims = [index for index in program.dims.values() if size in index.names()]
    return "N" if dims and "N" in dims[0].names() else "K"
