"""Integer expressions over N, K, n, k, parameters and loop variables, in a normal form.

An `Index` is a constant plus integer multiples of atoms.  An atom is a name, a quotient, a remainder, a ceiling or a product that
cannot be split further.  Building an Index simplifies it with the possible values of its names (`Domain`).  `//` and `%` of a
mixed-radix number become its digits, so that addresses derived from layouts become short text again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import gcd


@dataclass(frozen=True, slots=True)
class Domain:
    """The possible values of names: inclusive bounds (None: no upper bound) and divisors.  An unlisted name is at least 0.

    blocks: for lengths that may be a whole axis, their divisor if they are not; if they are, all quotients by them are 0.
    """

    bounds: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    divisors: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)


class _HashCached:
    """Caches the hash of an expression, which is needed often because expressions nest."""

    __slots__ = ("_hash",)
    _hash: int

    def _of(self, *fields: object) -> int:
        value = hash(fields)
        object.__setattr__(self, "_hash", value)
        return value


@dataclass(frozen=True, slots=True)
class Atom(_HashCached):
    """`op` is 'name', 'div' (floor), 'mod', 'ceil' (ceiling division), 'exact' (division that must divide) or 'mul'."""

    op: str
    name: str = ""
    args: tuple[Index, ...] = ()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self._of(self.op, self.name, self.args)

    @property
    def key(self) -> tuple[bool, str, tuple[str, ...]]:
        """Names first, then by operation and text: the order of terms with equal coefficients."""
        return (self.op != "name", self.name or self.op, tuple(str(argument) for argument in self.args))


@dataclass(frozen=True, slots=True)
class Index(_HashCached):
    """A constant plus integer multiples of atoms, in normal form."""

    const: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self._of(self.const, self.terms)

    def __str__(self) -> str:
        return text(self)

    @property
    def is_const(self) -> bool:
        return not self.terms

    @property
    def size(self) -> int:
        """The number of names and constants in it."""
        return 1 + sum(sum(argument.size for argument in atom.args) or 1 for atom, _ in self.terms)

    def names(self) -> set[str]:
        """Every name in the expression."""
        names: set[str] = set()
        for atom, _ in self.terms:
            names |= {atom.name} if atom.op == "name" else set().union(*(a.names() for a in atom.args))
        return names

    def __add__(self, other: Index | int) -> Index:
        return Index(self.const + other, self.terms) if isinstance(other, int) else combine([(self, 1), (other, 1)])

    def __sub__(self, other: Index | int) -> Index:
        return combine([(self, 1), (as_index(other), -1)])

    def __mul__(self, other: Index | int) -> Index:
        return multiply(self, as_index(other))

    def __call__(self, values: Mapping[str, int]) -> int:
        """The value for given values of all names.  Raises ArithmeticError if an exact division leaves a remainder."""
        total = self.const
        for atom, coefficient in self.terms:                     # takes half the time of a sum that calls each name
            total += coefficient * (values[atom.name] if atom.op == "name" else _evaluate_atom(atom, values))
        return total


def flat_of(index: Index) -> Atom | None:
    """The quotient or remainder of the flat position n * K + k, if the index is one; else None."""
    atom, coefficient = index.terms[0] if len(index.terms) == 1 and not index.const else (None, 0)
    return atom if atom is not None and coefficient == 1 and atom.op in ("div", "mod") and atom.args[0] == FLAT else None


def block_of(index: Index) -> tuple[str, Index] | None:
    """The axis, 'n' or 'k', and the block of a subscript of whole rows or columns: k // 32, or n, whose block is 1; else None."""
    atom, coefficient = index.terms[0] if len(index.terms) == 1 and not index.const else (None, 0)
    if atom is None or coefficient != 1 or atom.op not in ("name", "div"):
        return None
    top, by = (index, Index(1)) if atom.op == "name" else atom.args
    return next(((axis, by) for axis in ("n", "k") if top == name(axis)), None)


def gathered_by(index: Index) -> str | None:
    """The index field that a subscript is; None for other subscripts."""
    atom = index.terms[0][0] if index.terms else None
    return str(index) if atom is not None and atom.op == "name" and block_of(index) is None else None


def digit_of(index: Index) -> tuple[int, int] | None:
    """(a, m) if an index is the digit k // a % m of the column; else None."""
    atom, coefficient = index.terms[0] if len(index.terms) == 1 and not index.const else (None, 0)
    if atom is None or coefficient != 1 or atom.op != "mod" or not atom.args[1].is_const:
        return None
    top, extent = atom.args
    by = top.terms[0][0].args[1].const if len(top.terms) == 1 and top.terms[0][0].op == "div" else 1
    return (by, extent.const) if by and top == div(name("k"), by) else None


def as_index(value: Index | int) -> Index:
    """An integer as an Index; an Index unchanged."""
    return Index(value) if isinstance(value, int) else value


@cache
def name(word: str) -> Index:
    return Index(0, ((Atom("name", word), 1),))


def combine(parts: list[tuple[Index, int]]) -> Index:
    """The sum of coefficient * part."""
    parts = [(part, factor) for part, factor in parts if factor and (part.terms or part.const)]
    if len(parts) == 1:                                          # its terms are in order
        [(part, factor)] = parts
        return Index(factor * part.const, tuple((atom, factor * coefficient) for atom, coefficient in part.terms))
    const = 0
    terms: dict[Atom, int] = {}
    for part, factor in parts:
        const += factor * part.const
        for atom, coefficient in part.terms:
            terms[atom] = terms.get(atom, 0) + factor * coefficient
    kept = [term for term in terms.items() if term[1]]
    if len(kept) > 1:
        if len({abs(coefficient) for _, coefficient in kept}) < len(kept):
            kept.sort(key=lambda term: term[0].key)              # only equal coefficients compare texts
        kept.sort(key=lambda term: -abs(term[1]))
    return Index(const, tuple(kept))


def multiply(left: Index, right: Index) -> Index:
    """The product, distributed over sums if one side allows it."""
    if left.is_const:
        return combine([(right, left.const)])
    if right.is_const:
        return combine([(left, right.const)])
    if len(left.terms) == 1 and not left.const and left.terms[0][1] != 1:
        atom, coefficient = left.terms[0]
        return combine([(multiply(Index(0, ((atom, 1),)), right), coefficient)])
    if len(right.terms) == 1 and not right.const and right.terms[0][1] != 1:
        atom, coefficient = right.terms[0]
        return combine([(multiply(left, Index(0, ((atom, 1),))), coefficient)])
    return Index(0, ((Atom("mul", args=(left, right)), 1),))


def product_of(factors: Iterable[Index]) -> Index:
    result = Index(1)
    for factor in factors:
        result = result * factor
    return result


def div(top: Index, bottom: Index | int, domain: Domain = Domain()) -> Index:
    bottom = as_index(bottom)
    if not bottom.is_const:
        return _div_by_name(top, bottom, domain)
    by = bottom.const
    if by == 1:
        return top
    whole, remainder = _split(top, by)
    low, high = value_bounds(remainder, domain)
    if low is not None and high is not None and low // by == high // by:
        return whole + low // by
    for step in _steps(remainder, by):
        big, small = _split(remainder, step)
        low, high = value_bounds(small, domain)
        if low is not None and high is not None and low >= 0 and high < step:
            return whole + div(big, by // step, domain)
    return whole + Index(0, ((Atom("div", args=(remainder, bottom)), 1),))


def mod(top: Index, bottom: Index | int, domain: Domain = Domain()) -> Index:
    """Remainder, with the sign of a positive divisor."""
    bottom = as_index(bottom)
    if not bottom.is_const:
        return Index(0, ((Atom("mod", args=(top, bottom)), 1),))
    by = bottom.const
    _, remainder = _split(top, by)
    low, high = value_bounds(remainder, domain)
    if low is not None and high is not None and low // by == high // by:
        return remainder - by * (low // by)
    for step in _steps(remainder, by):
        big, small = _split(remainder, step)
        low, high = value_bounds(small, domain)
        if low is not None and high is not None and low >= 0 and high < step:
            return mod(big, by // step, domain) * step + small
    return Index(0, ((Atom("mod", args=(remainder, bottom)), 1),))


def ceil(top: Index, bottom: Index | int) -> Index:
    """Ceiling division; ceil(ceil(a / b) / c) becomes ceil(a / (b * c))."""
    bottom = as_index(bottom)
    if bottom == Index(1):
        return top
    if len(top.terms) == 1 and not top.const and top.terms[0][1] == 1 and top.terms[0][0].op == "ceil":
        inner, by = top.terms[0][0].args
        return ceil(inner, by * bottom)
    if top.is_const and bottom.is_const:
        return Index(-(-top.const // bottom.const))
    return Index(0, ((Atom("ceil", args=(top, bottom)), 1),))


def exact(top: Index, bottom: Index | int) -> Index:
    """Division without remainder; an exact quotient is divided by the product of both divisors."""
    bottom = as_index(bottom)
    if len(top.terms) == 1 and not top.const and top.terms[0][1] == 1 and top.terms[0][0].op == "exact":
        inner, by = top.terms[0][0].args
        return exact(inner, by * bottom)
    if bottom.is_const and bottom.const and top.const % bottom.const == 0 \
            and all(coefficient % bottom.const == 0 for _, coefficient in top.terms):
        return Index(top.const // bottom.const, tuple((a, c // bottom.const) for a, c in top.terms))
    return Index(0, ((Atom("exact", args=(top, bottom)), 1),))


def substitute(index: Index, values: Mapping[str, Index], domain: Domain = Domain()) -> Index:
    """Replaces names, and simplifies the result."""
    parts = [(Index(index.const), 1)]
    for atom, coefficient in index.terms:
        if atom.op == "name":
            parts.append((values.get(atom.name, Index(0, ((atom, 1),))), coefficient))
        else:
            left, right = (substitute(argument, values, domain) for argument in atom.args)
            parts.append((_rebuild(atom.op, left, right, domain), coefficient))
    return combine(parts)


def _rebuild(op: str, left: Index, right: Index, domain: Domain) -> Index:
    if op == "div":
        return div(left, right, domain)
    return mod(left, right, domain) if op == "mod" else {"ceil": ceil, "exact": exact, "mul": multiply}[op](left, right)


def value_bounds(index: Index, domain: Domain) -> tuple[int | None, int | None]:
    """Inclusive bounds; None for an unbounded side."""
    low: int | None = index.const
    high: int | None = index.const
    for atom, coefficient in index.terms:
        first, last = _atom_bounds(atom, domain)
        if coefficient < 0:
            first, last = last, first
        low = None if low is None or first is None else low + coefficient * first
        high = None if high is None or last is None else high + coefficient * last
    return low, high


def divisor(index: Index, domain: Domain) -> int:
    """A number that divides every value; 0 for the constant 0."""
    common = index.const
    for atom, coefficient in index.terms:
        factor = domain.divisors.get(atom.name, 1) if atom.op == "name" else 1
        if atom.op == "mul":
            factor = divisor(atom.args[0], domain) * divisor(atom.args[1], domain)
        common = gcd(common, coefficient * factor)
    return common


def _evaluate_atom(atom: Atom, values: Mapping[str, int]) -> int:
    if atom.op == "name":
        return values[atom.name]
    first, second = atom.args
    left, right = first(values), second(values)
    if atom.op == "mul":
        return left * right
    if right == 0:
        raise ArithmeticError(f"division by zero in {text(Index(0, ((atom, 1),)))}")
    if atom.op == "exact" and left % right:
        raise ArithmeticError(f"{left} is not a multiple of {right}")
    return -(-left // right) if atom.op == "ceil" else left % right if atom.op == "mod" else left // right


def _split(index: Index, by: int) -> tuple[Index, Index]:
    """(whole, remainder) with index == by * whole + remainder, where no coefficient of the remainder is a multiple of `by`."""
    whole = tuple((atom, c // by) for atom, c in index.terms if c % by == 0)
    return Index(index.const // by, whole), Index(index.const % by, tuple((atom, c) for atom, c in index.terms if c % by))


def _steps(index: Index, by: int) -> list[int]:
    """Divisors of `by` at which a sum may split into coarse and fine digits, coarsest first."""
    return sorted({step for _, c in index.terms if 1 < (step := gcd(c, by)) < by}, reverse=True)


def _div_by_name(top: Index, bottom: Index, domain: Domain) -> Index:
    """`(8*t + i) // group` is `t // (group // 8)` if 8 divides all groups and i < 8; `8*t // group` if one may be the axis."""
    common = divisor(bottom, domain)
    alone = bottom.terms[0][0].name if len(bottom.terms) == 1 and not bottom.const and bottom.terms[0][1] == 1 else ""
    for step in sorted({gcd(c, domain.blocks.get(alone, common)) for _, c in top.terms}, reverse=True):
        big, small = _split(top, step)
        low, high = value_bounds(small, domain)
        if step > 1 and low is not None and high is not None and low >= 0 and high < step:
            if common % step == 0:
                return Index(0, ((Atom("div", args=(big, div(bottom, step, domain))), 1),))
            top = big * step
            break
    return top if top == Index(0) else Index(0, ((Atom("div", args=(top, bottom)), 1),))


def _atom_bounds(atom: Atom, domain: Domain) -> tuple[int | None, int | None]:
    if atom.op == "name":
        return domain.bounds.get(atom.name, (0, None))
    (low, high), (small, large) = (value_bounds(argument, domain) for argument in atom.args)
    if atom.op == "mod" and large is not None:
        return 0, large - 1 if high is None or low is None or low < 0 else min(high, large - 1)
    if low is None or small is None or low < 0 or small < 0:
        return None, None
    if atom.op == "mul":
        return low * small, None if high is None or large is None else high * large
    if atom.op == "mod":
        return 0, high
    up = high if small == 0 or high is None else -(-high // small) if atom.op == "ceil" else high // small
    return 0, up


_PRECEDENCE = {"mul": 2, "div": 2, "mod": 2, "exact": 2, "ceil": 4, "name": 4}


def text(index: Index, tight: int = 0, cdiv: str = "cdiv") -> str:
    """Python text of the expression, with `cdiv` as the ceiling division.

    tight: its surroundings: 0 none, 2 the left side of a product, 3 its right side.
    """
    if not index.terms:
        return str(index.const) if index.const >= 0 or tight < 2 else f"({index.const})"
    rows = [("-" if factor < 0 else "+", _atom_text(atom, 0, cdiv) if abs(factor) == 1 else
             f"{abs(factor)} * {_atom_text(atom, 3, cdiv)}") for atom, factor in index.terms]
    if index.const:
        rows.append(("-" if index.const < 0 else "+", str(abs(index.const))))
    if rows[0][0] == "-":                                       # a leading minus would bind tighter than // and %
        rows.sort(key=lambda row: row[0] == "-")
    sign, first = rows[0]
    joined = first if sign == "+" else f"-({first})"
    joined += "".join(f" {sign} {row}" for sign, row in rows[1:])
    if len(rows) > 1 or sign == "-":
        return f"({joined})" if tight >= 2 else joined
    level = _PRECEDENCE[index.terms[0][0].op] if index.terms[0][1] == 1 else 2
    return f"({joined})" if tight > level else joined


def _atom_text(atom: Atom, tight: int, cdiv: str) -> str:
    if atom.op == "name":
        return atom.name
    left, right = atom.args
    if atom.op == "ceil":
        return f"{cdiv}({text(left, 0, cdiv)}, {text(right, 0, cdiv)})"
    op = {"mul": "*", "div": "//", "mod": "%", "exact": "//"}[atom.op]
    body = f"{text(left, 2, cdiv)} {op} {text(right, 3, cdiv)}"
    return f"({body})" if tight > 2 else body


FLAT = name("n") * name("K") + name("k")                         # the position of a weight in row-major order
