"""Shapes of stored tensors and fields: what they are for given N and K, and which N and K a given shape allows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm, prod

_AXIS = re.compile(r"(?:(?P<words>\d+)\*)?(?P<ceil>ceil\((?:(?P<some>\d+)\*)?)?(?P<dim>N\*K|N|K|1|\?|[a-z][a-z0-9_]*)"
                   r"(?:/(?P<by>[a-z0-9_*]+))?(?(ceil)\)(?:/(?P<over>[a-z0-9_*]+))?)\Z")


@dataclass(frozen=True, slots=True)
class Axis:
    """words * dim / step elements, where `exact` says that step must divide dim and otherwise the quotient is rounded up.

    `dim` is 'N', 'K', 'N*K', '1' or a size parameter, or '?' for an extent that these do not decide; `step` is a product of
    integers and size parameters.  short: not the quotient but the whole is rounded up, as 'ceil(3*K/32)': the last step has no
    more words than it needs.  over: what these elements are divided by, exactly, as '1024*ceil(K/1024)/group', where a step is
    longer than what an element stands for.
    """

    dim: str
    step: tuple[int | str, ...]
    words: int
    exact: bool
    text: str
    short: bool = False
    over: tuple[int | str, ...] = ()

    def by(self, sizes: Mapping[str, int]) -> int:
        """The step, as a number."""
        return _product(self.step, sizes)

    def extent(self, n: int, k: int, sizes: Mapping[str, int]) -> int | None:
        """How many elements the axis has; None where an exact step does not divide, and where N and K do not decide it."""
        if self.dim == "?":
            return None
        whole = self.whole(n, k, sizes)
        by = self.by(sizes)
        left = whole % by if self.exact else -(-whole // by) * self.words % _product(self.over, sizes)
        return None if left else self.elements(whole, sizes)

    def wrong(self, n: int, k: int, sizes: Mapping[str, int]) -> str:
        """Why there is no such number of elements."""
        if self.exact:
            return f"{self.dim} = {self.whole(n, k, sizes)} must be a multiple of {self.by(sizes)}"
        divisors = {name: sizes[name] for name in self.over if isinstance(name, str)}
        return f"{self.text} is no whole number of elements at " + ", ".join(
            f"{name} = {value}" for name, value in {self.dim: self.whole(n, k, sizes), **divisors}.items())

    def rounded(self, n: int, k: int, sizes: Mapping[str, int]) -> int:
        """How many elements the axis has where the last step may be short."""
        return self.elements(self.whole(n, k, sizes), sizes)

    def elements(self, whole: int, sizes: Mapping[str, int]) -> int:
        """How many elements so much of the dim takes, rounded up."""
        by = self.by(sizes)
        return -(-whole * self.words // by) if self.short else -(-whole // by) * self.words // _product(self.over, sizes)

    def whole(self, n: int, k: int, sizes: Mapping[str, int]) -> int:
        """The dim, as a number."""
        return {**sizes, "N": n, "K": k, "N*K": n * k, "1": 1}[self.dim]

    def solve(self, extent: int, sizes: Mapping[str, int] | None = None) -> int | None:
        """The dim that an extent means, where it can mean only one.  sizes: the block lengths that are fixed."""
        if not self.exact or self.dim not in ("N", "K", "N*K", "1") or extent % self.words or any(
                isinstance(part, str) and part not in (sizes or {}) for part in self.step):
            return None
        return extent // self.words * self.by(sizes or {})


@cache
def axis(text: str) -> Axis:
    """The axis that a text describes: 'N', '18*K/32', 'ceil(K/group)', 'ceil(3*K/32)', '1024*ceil(K/1024)/group' or '256'."""
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
    """Whether a text describes an axis."""
    return _AXIS.match(text) is not None


def extents(axes: Sequence[Axis], n: int, k: int, sizes: Mapping[str, int], actual: Sequence[int] = (),
            ) -> tuple[int, ...] | None:
    """The shape, or None where N or K does not divide as it must.  actual: a tensor's own shape, which decides '?', else 0."""
    own = actual if len(actual) == len(axes) else [0] * len(axes)
    shape = [extent if axis.dim == "?" else axis.extent(n, k, sizes) for axis, extent in zip(axes, own, strict=True)]
    return None if None in shape else tuple(extent for extent in shape if extent is not None)


def seen_shape(axes: Sequence[Axis], n: int, k: int, sizes: Mapping[str, int], count: int) -> tuple[int, ...] | None:
    """The shape in which files show `count` elements: '?' is what the other axes leave.  None where there is no such shape."""
    fixed = extents([axis for axis in axes if axis.dim != "?"], n, k, sizes)
    if fixed is None or count % max(1, prod(fixed)) or (len(fixed) == len(axes) and count != prod(fixed)):
        return None
    others = iter(fixed)
    return tuple(count // max(1, prod(fixed)) if axis.dim == "?" else next(others) for axis in axes)


def granule(axes: Sequence[Axis], dim: str, sizes: Mapping[str, int], other: int) -> int:
    """The number of rows (dim 'N') or columns ('K') at whose multiples all these axes can be cut.

    A flat axis (N*K) can be cut between rows only; `other` is K.
    """
    step = 1
    for axis in axes:
        if axis.dim == dim:
            step = lcm(step, axis.by(sizes))
        elif axis.dim == "N*K" and dim == "N":
            step = lcm(step, axis.by(sizes) // gcd(axis.by(sizes), other or 1))
    return step
