"""The encode schemes that a spec may name: roles, options, and the decode formula that each inverts, by schemes.toml.

The compiler reads this table.  qdsl/encode implements a scheme as the function of its name; `encode.scheme` checks its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qdsl.core.numbers import Number
from qdsl.core.places import table_of

# Arguments of every scheme's function: the blocks that share a value, and the axes of a scale.
BLOCK_SIZES = ("rows", "columns", "super_columns", "super_axes", "shift_columns", "sums_columns", "axes")
# Requirements on the field of a role: a description, and the test.
KINDS: dict[str, tuple[str, Callable[[Number], bool]]] = {
    "scale": ("a scale is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "power": ("a scale is f32, f16, bf16 or e8m0",
              lambda number: number.is_float and (number.bits >= 16 or number.name == "e8m0")),
    "minimum": ("a minimum is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "zero": ("a zero point is an integer", lambda number: not number.is_float),
    "code": ("a code is an integer or a float of at most 8 bits", lambda number: not number.is_float or number.bits <= 8),
    "count": ("expected an unsigned integer of at most 8 bits", lambda number: number.kind == "unsigned" and number.bits <= 8),
    "nested": ("a scale of two levels is e4m3", lambda number: number.name == "e4m3"),
    "whole": ("a super-scale of the whole weight is f32", lambda number: number.name == "f32"),
    "levels": ("levels are f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "small": ("a scale of levels is e8m0h or ue4m3", lambda number: number.name in ("e8m0h", "ue4m3")),
    "bit": ("a sign is u1", lambda number: number.kind == "unsigned" and number.bits == 1),
    "row": ("a code of rows is an unsigned integer", lambda number: number.kind == "unsigned"),
    "integer": ("expected an integer of at most 8 bits", lambda number: not number.is_float and number.bits <= 8),
    "float": ("a code is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "sums": ("sums of codes are a signed integer, f32, f16 or bf16",
             lambda number: number.kind == "signed" or (number.is_float and number.bits >= 16)),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """roles: the fields that it chooses, in the order of its results, and the kind (of KINDS) of each.

    options: argument -> allowed words, None: a number.  required: roles and options that a spec must give.  A field of `sums` is
    computed from the codes.  inverts: the decode expressions that it inverts, over roles, optional constants, and tables.
    `level[code]` is a number; `levels[code]` is one of rising integers, or an entry of a stored table if that is a role;
    `grid[code, k]` is an entry of a row; `steps(scale)`, `values(sign, code)` stand for any value that depends only on those
    fields, and `place()` for any of the column alone.  importance: it uses one.  own: options of the format, which callers
    cannot choose; overridable: numbers that callers may also choose.  which: the argument with the index of the matching
    expression in `inverts`.  of_integers: options that integer codes also need.  across: a block that shares a scale may span
    rows of the weight.  of_rows: its super-scale may be of whole rows.  kernel: the function of its name in
    runtime/gpu/kernels/encode.py does the same on a GPU, for rows of a cache.  signs: roles, and tables of
    `inverts`, whose numbers must have both signs, or weights of one sign have no code.
    """

    roles: Mapping[str, str]
    required: tuple[str, ...]
    options: Mapping[str, tuple[str, ...] | None]
    summary: str
    inverts: str | tuple[str, ...]
    importance: bool = False
    own: tuple[str, ...] = ()
    overridable: tuple[str, ...] = ()
    which: str = ""
    of_integers: tuple[str, ...] = ()
    across: bool = True
    of_rows: bool = False
    kernel: bool = False
    signs: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The decode expressions that the scheme inverts, as a tuple."""
        return (self.inverts,) if isinstance(self.inverts, str) else self.inverts

    @property
    def argument_names(self) -> tuple[set[str], set[str]]:
        """The required arguments of its function besides the weight, and the optional ones."""
        read = {word for pattern in self.patterns for word in re.findall("[a-z_]+", pattern)}
        offered = {*self.roles, *self.options, *(("importance",) if self.importance else ())}
        return offered, {*offered, *read, *BLOCK_SIZES, *((self.which,) if self.which else ())}

    def words(self, option: str, code: Number) -> tuple[str, ...]:
        """The allowed words of an option for codes of a type; none for numbers, and for options of other code types."""
        words = self.options[option] or ()
        allowed = _OF_FLOATS if code.is_float else _OF_INTEGERS
        return tuple(word for word in words if word in allowed.get(option, words))

    def takes_importance(self, code: Number) -> bool:
        """Whether it uses an importance for codes of a type: with 256 codes there is nothing to search, except rows of a grid."""
        return self.importance and not code.is_float and (code.bits < 8 or self.roles["code"] == "row")

    def open(self, code: Number) -> tuple[str, ...]:
        """Options that callers of quantize may set."""
        return tuple(option for option in self.options
                     if option in self.overridable or (option not in self.own and len(self.words(option, code)) > 1))


# Words of options that differ between float and integer codes.
_OF_FLOATS = {"ties": ("even", "zero")}
_OF_INTEGERS = {"ties": ("even", "away", "up"), "power": (), "zeros": ()}


def _scheme(row: Mapping[str, Any]) -> Scheme:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    values["options"] = {option: None if words == "number" else tuple(words) for option, words in row.get("options", {}).items()}
    return Scheme(**values)


SCHEMES = {name: _scheme(row) for name, row in table_of(__file__).items()}
