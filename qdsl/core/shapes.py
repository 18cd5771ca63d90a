"""Shapes of stored tensors and fields: computed from N and K, and N and K computed from shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import gcd, lcm, prod

_AXIS = re.compile(r"(?:(?P<words>\d+)\*)?(?P<ceil>ceil\((?:(?P<some>\d+)\*)?)?(?P<dim>N\*K|N|K|1|\?|[a-z][a-z0-9_]*)"
                   r"(?:/(?P<by>[a-z0-9_*]+))?(?(ceil)\)(?:/(?P<over>[a-z0-9_*]+))?)\Z")

NEVER = 1 << 60                                                  # a step without legal slices
ANY = "any"                                                      # in a list of block lengths: any other positive one, too


class BlockLengths(tuple[int, ...]):
    """The listed lengths of a block, the default first, where any other positive length is valid, too."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or (type(value) is int and value > 0)


def listed(values: Sequence[int | str]) -> tuple[int | str, ...]:
    """The values of a parameter from their list in a spec or a generated file."""
    return BlockLengths(int(value) for value in values if value != ANY) if ANY in values else tuple(values)


def is_unlisted(values: Sequence[int | str], value: object) -> bool:
    """Whether a value is a valid length of a block that is not in the list."""
    return isinstance(values, BlockLengths) and value in values and not tuple.__contains__(values, value)


def own_value(values: tuple[int | str, ...], value: int | str) -> int | str:
    """A valid value as the list has it: 128 for 128.0."""
    return values[values.index(value)] if tuple.__contains__(values, value) else value


def values_text(values: Sequence[int | str]) -> str:
    """The values of a parameter, for messages."""
    return ", ".join(map(str, values)) + (" or any other positive number" if isinstance(values, BlockLengths) else "")


def compiled_step(values: Sequence[int | str], code_bits: Sequence[int]) -> int:
    """The number that kernels may assume to divide the lengths of blocks, apart from blocks of a whole axis.

    It divides all listed lengths.  Where others are valid, and a 32-bit word holds at most 8 codes, it is 8, so that no kernel
    gets slower: one word meets one block.  code_bits: of the integers of single weights, empty for planar.
    """
    step = gcd(*(value for value in values if isinstance(value, int) and value > 0))
    return gcd(step, 8) if isinstance(values, BlockLengths) and code_bits and all(bits in (4, 8) for bits in code_bits) else step


@dataclass(frozen=True, slots=True)
class Axis:
    """words * dim / step elements.  exact: step must divide dim; else the quotient is rounded up.

    dim: 'N', 'K', 'N*K', '1' or a size parameter, or '?' for an extent that these do not determine; step: a product of integers
    and size parameters.  short: the total is rounded up and not the quotient, as in 'ceil(3*K/32)', so that the last step has
    only the words it needs.  over: an exact divisor of these elements, as in '1024*ceil(K/1024)/group', if a step covers several
    elements.  sections: for an axis of consecutive sections, as in 'K + 8', the axes whose product each has; its `dim` is '+'.
    """

    dim: str
    step: tuple[int | str, ...]
    words: int
    exact: bool
    text: str
    short: bool = False
    over: tuple[int | str, ...] = ()
    sections: tuple[tuple[Axis, ...], ...] = ()

    @property
    def terms(self) -> tuple[Axis, ...]:
        """The axis itself, or those of its sections."""
        return tuple(term for section in self.sections for term in section) or (self,)

    @property
    def solved_dim(self) -> str:
        """The dim that an extent determines, if any: for sections the only one that they have."""
        return "".join({term.dim for term in self.terms} - {"1"}) if self.sections else self.dim

    def by(self, sizes: Mapping[str, int]) -> int:
        """The step, as a number."""
        return _product(self.step, sizes)

    def extent(self, n: int, k: int, sizes: Mapping[str, int]) -> int | None:
        """The number of elements; None if an exact step does not divide, or if N and K do not determine it."""
        if self.dim == "?":
            return None
        if self.sections:
            lengths = [extents(section, n, k, sizes) for section in self.sections]
            return None if None in lengths else sum(prod(length) for length in lengths if length is not None)
        whole = self.whole(n, k, sizes)
        by = self.by(sizes)
        left = whole % by if self.exact else -(-whole // by) * self.words % _product(self.over, sizes)
        return None if left else self.elements(whole, sizes)

    def wrong(self, n: int, k: int, sizes: Mapping[str, int]) -> str:
        """Why the number of elements does not exist."""
        if self.sections:
            return next(term for term in self.terms if term.extent(n, k, sizes) is None).wrong(n, k, sizes)
        if self.exact:
            return f"{self.dim} = {self.whole(n, k, sizes)} must be a multiple of {self.by(sizes)}"
        divisors = {name: sizes[name] for name in self.over if isinstance(name, str)}
        return f"{self.text} is no whole number of elements at " + ", ".join(
            f"{name} = {value}" for name, value in {self.dim: self.whole(n, k, sizes), **divisors}.items())

    def rounded(self, n: int, k: int, sizes: Mapping[str, int]) -> int:
        """The number of elements if the last step may be partial."""
        if self.sections:
            return sum(prod(term.rounded(n, k, sizes) for term in section) for section in self.sections)
        return self.elements(self.whole(n, k, sizes), sizes)

    def elements(self, whole: int, sizes: Mapping[str, int]) -> int:
        """The number of elements for `whole` of the dim, rounded up."""
        by = self.by(sizes)
        return -(-whole * self.words // by) if self.short else -(-whole // by) * self.words // _product(self.over, sizes)

    def whole(self, n: int, k: int, sizes: Mapping[str, int]) -> int:
        """The dim, as a number."""
        return {**sizes, "N": n, "K": k, "N*K": n * k, "1": 1}[self.dim]

    def solve(self, extent: int, sizes: Mapping[str, int] | None = None) -> int | None:
        """The dim that an extent determines uniquely, or None.  sizes: the known block lengths."""
        if self.sections:
            return self._solve_sections(extent, sizes or {})
        if not self.exact or self.dim not in ("N", "K", "N*K", "1") or extent % self.words or any(
                isinstance(part, str) and part not in (sizes or {}) for part in self.step):
            return None
        return extent // self.words * self.by(sizes or {})

    def _solve_sections(self, extent: int, sizes: Mapping[str, int]) -> int | None:
        """The dim from the length of sections that all have one exact axis."""
        if any(len(section) > 1 or section[0].solve(section[0].words, sizes) is None for section in self.sections):
            return None
        per_dim = sum(Fraction(term.words, term.by(sizes)) for term in self.terms if term.dim != "1")
        dim = (extent - sum(term.words for term in self.terms if term.dim == "1")) / per_dim if per_dim else Fraction(-1)
        return int(dim) if dim >= 0 and dim.denominator == 1 and self.solved_dim in ("N", "K") else None


@cache
def axis(text: str) -> Axis:
    """The axis that a text describes: 'N', '18*K/32', 'ceil(K/group)', 'ceil(3*K/32)', '1024*ceil(K/1024)/group' or '256'.

    'K + 8' is an axis of two sections, 'N/4 x 12*K + N' one whose first section has two axes in turn.
    """
    if " + " in text or " x " in text:
        sections = tuple(tuple(map(axis, section.split(" x "))) for section in text.split(" + "))
        return Axis("+", (), 1, False, text, sections=sections)
    match = _AXIS.match(f"{text}*1" if text.isdecimal() else text)
    if match is None:
        raise ValueError(f"not an axis: {text!r}")
    return Axis(match["dim"], _factors(match["by"]), int(match["words"] or match["some"] or 1), match["ceil"] is None, text,
                match["some"] is not None, _factors(match["over"]))


def _factors(text: str | None) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdigit() else part for part in (text or "1").split("*") if part != "1")


def _product(factors: tuple[int | str, ...], sizes: Mapping[str, int]) -> int:
    value = 1
    for part in factors:
        value *= sizes[part] if isinstance(part, str) else part
    return value


def is_axis(text: str) -> bool:
    """Whether a text describes an axis without sections."""
    return _AXIS.match(text) is not None


def extents(axes: Sequence[Axis], n: int, k: int, sizes: Mapping[str, int], actual: Sequence[int] = ()) -> tuple[int, ...] | None:
    """The shape; None if N or K does not divide as required.  actual: a tensor's own shape, which gives '?', else 0."""
    own = actual if len(actual) == len(axes) else [0] * len(axes)
    shape = [extent if axis.dim == "?" else axis.extent(n, k, sizes) for axis, extent in zip(axes, own, strict=True)]
    return None if None in shape else tuple(extent for extent in shape if extent is not None)


def shape_in_files(axes: Sequence[Axis], n: int, k: int, sizes: Mapping[str, int], count: int) -> tuple[int, ...] | None:
    """The shape of `count` elements in files: '?' is inferred from the other axes.  None if there is none."""
    fixed = extents([axis for axis in axes if axis.dim != "?"], n, k, sizes)
    if fixed is None or count % max(1, prod(fixed)) or (len(fixed) == len(axes) and count != prod(fixed)):
        return None
    others = iter(fixed)
    return tuple(count // max(1, prod(fixed)) if axis.dim == "?" else next(others) for axis in axes)


def slicing_step(axes: Sequence[Axis], dim: str, sizes: Mapping[str, int], other: int) -> int:
    """The step of rows (dim 'N') or columns ('K') at whose multiples all these axes can be sliced.

    A flat axis (N*K) can only be sliced between rows; `other` is K.  Sections that contain the dim cannot be sliced at all.
    """
    step = 1
    for axis in axes:
        if axis.sections and any(dim in term.dim for term in axis.terms):
            return NEVER
        if axis.dim == dim:
            step = lcm(step, axis.by(sizes))
        elif axis.dim == "N*K" and dim == "N":
            step = lcm(step, axis.by(sizes) // gcd(axis.by(sizes), other or 1))
    return step


def shared_blocks(step: int) -> str:
    """The text for experts whose rows are not a multiple of a granule."""
    return "all lie in the same regions" if step == NEVER else f"share blocks, which begin every {step} rows"
