"""The encode schemes that a spec may name, each registered here once: roles, options, and the decode formula that it inverts.

The compiler reads this table.  qdsl/encode implements a scheme as the function of its name; `encode.scheme` checks its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qdsl.core.numbers import Number

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
    fields.  importance: it uses one.  own: options of the format, which callers cannot choose; overridable: numbers that callers
    may also choose.  which: the argument with the index of the matching expression in `inverts`.  of_integers: options that
    integer codes also need.  across: a block that shares a scale may span rows of the weight.  of_rows: its super-scale may be of
    whole rows.  kernel: the function of its name in runtime/gpu/kernels/encode.py does the same on a GPU, for rows of a cache.
    signs: roles, and tables of `inverts`, whose numbers must have both signs, or weights of one sign have no code.
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
    def arguments(self) -> tuple[set[str], set[str]]:
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


_TIES = ("even", "away", "up")
_POWERS = ("up", "floor", "ceil", "even", "half")
# Words of options that differ between float and integer codes.
_OF_FLOATS = {"ties": ("even", "zero")}
_OF_INTEGERS = {"ties": _TIES, "power": (), "zeros": ()}
_BY = ("stored", "exact", "inverse")

SCHEMES = {
    "absmax": Scheme({"code": "code", "scale": "power", "sums": "sums"}, ("code", "scale"),
                     {"divisor": None, "by": _BY, "ties": (*_TIES, "zero"), "lost": ("least", "zero"), "least": None,
                      "power": _POWERS, "zeros": ("signed", "negative", "positive")},
                     "scale = largest magnitude of the block / divisor", "scale * (code - offset)", own=("lost",),
                     overridable=("divisor", "least"), of_integers=("divisor",), kernel=True, signs=("code",)),
    "signmax": Scheme({"code": "code", "scale": "scale", "sums": "sums"}, ("code", "scale", "divisor"),
                      {"divisor": None, "by": (*_BY, "ratio"), "ties": _TIES},
                      "scale = the value of largest magnitude, sign and all, / divisor", "scale * (code - offset)",
                      importance=True, kernel=True, signs=("code",)),
    "nested_absmax": Scheme({"code": "code", "scale": "nested", "super_scale": "whole"},
                            ("code", "scale", "super_scale", "divisor", "empty"),
                            {"divisor": None, "empty": None, "least": None, "amax": None, "by": ("stored", "inverse"),
                             "ties": ("even", "zero"), "zeros": ("signed", "negative", "positive"),
                             "precision": ("f32", "own")},
                            "super-scale from the largest magnitude of the weight; scale = largest of the block / divisor, in "
                            "its units",
                            ("super_scale * scale * code", "scale / super_scale * code"), own=("precision",),
                            overridable=("empty", "least", "amax"), which="divided", signs=("code",)),
    "absmax_level": Scheme({"code": "count", "scale": "small"}, ("code", "scale"), {},
                           "scale = largest magnitude of the block / largest level; of levels the nearest, of two the first",
                           "scale * factor * level[code]", kernel=True, signs=("level",)),
    "minmax": Scheme({"code": "code", "zero": "zero", "scale": "scale"}, ("code", "zero", "scale"),
                     {"by": ("stored", "exact"), "symmetric": ("true", "false"), "rounds": ("quotient", "sum", "code"),
                      "span": ("found", "full", "tight", "signed")},
                     "scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0",
                     "(code - zero) * scale"),
    "scaled_zero": Scheme({"code": "count", "zero": "minimum", "scale": "scale"}, ("code", "zero", "scale"), {},
                          "scale = range of the block / (2^bits - 1); zero = -scale * the code of 0", "code * scale + zero"),
    "affine": Scheme({"code": "count", "scale": "scale", "min": "minimum"}, ("code", "scale", "min"), {},
                     "min = the least weight of the block; scale = its range / (2^bits - 1)", "scale * code + min",
                     importance=True),
    "edge_affine": Scheme({"code": "count", "scale": "scale", "min": "minimum"}, ("code", "scale", "min"), {},
                          "min = the end of the block of larger magnitude; scale = what makes 0 a code", "scale * code + min",
                          kernel=True),
    "meansign": Scheme({"code": "bit", "scale": "scale"}, ("code", "scale"), {},
                       "scale = the mean magnitude of the block; a code says that the weight is not negative",
                       "scale * (2 * code - 1)"),
    "ternary": Scheme({"code": "count", "scale": "scale"}, ("code", "scale"), {},
                      "scale = the mean magnitude of the block, or its inverse; codes of the nearest of -1, 0 and 1 times that",
                      ("scale * (code - 1)", "(code - 1) / scale"), which="divided"),
    "progressive": Scheme({"code": "count", "scale": "integer", "zero": "integer", "super_scale": "scale"},
                          ("code", "scale", "zero", "super_scale", "divisor"), {"divisor": None},
                          "weights in units of largest magnitude of the row / divisor are rounded, and these integers again by "
                          "their range", "super_scale * (scale * code + zero)", across=False, of_rows=True),
    "kquant_minmax": Scheme({"code": "count", "scale": "count", "min": "count", "super_scale": "scale", "super_min": "minimum"},
                            ("code", "scale", "min", "super_scale", "super_min", "first", "step", "steps"),
                            {"first": None, "step": None, "steps": None, "errors": ("squares", "magnitudes"), "spread": None},
                            "scale and min by search for the least error; both in steps of the super-block's largest",
                            "super_scale * scale * code - super_min * min", importance=True, own=("errors",), across=False),
    "kquant_signmax": Scheme({"code": "integer", "scale": "integer", "super_scale": "scale"},
                             ("code", "scale", "super_scale"),
                             {"by": ("trials", "exchange"), "spread": None},
                             "scale by search for the least error; in steps of the super-block's largest, sign and all",
                             "super_scale * (scale - scale_offset) * (code - offset)", importance=True, own=("by",),
                             across=False, signs=("code", "scale")),
    "block_levels": Scheme({"code": "count", "scale": "scale"}, ("code", "scale"), {},
                           "scale by search for the least error; codes of the nearest levels",
                           "scale * levels[code]", importance=True, across=False, signs=("levels",)),
    "kquant_levels": Scheme({"code": "count", "scale": "integer", "super_scale": "scale"}, ("code", "scale", "super_scale"), {},
                            "scale by search for the least error, in steps of the super-block's largest, sign and all; codes of "
                            "the nearest levels",
                            "super_scale * (scale - scale_offset) * levels[code]", importance=True, across=False,
                            signs=("scale", "levels")),
    "grid_signs": Scheme({"code": "row", "sign": "row", "scale": "count", "super_scale": "scale"},
                         ("code", "sign", "scale", "super_scale"), {},
                         "rows, signs and scales by search for the least error; super-scale by a fit to them",
                         ("super_scale * steps(scale) * grid[code, k] * signs[sign, k]",
                          "super_scale * steps(scale) * grid[code, k] * (1 - 2 * sign)"), importance=True, across=False),
    "grid_shifts": Scheme({"code": "row", "shift": "bit", "scale": "count", "super_scale": "scale"},
                          ("code", "shift", "scale", "super_scale"), {},
                          "rows, shifts and scales by search for the least error; super-scale by a fit to them",
                          "super_scale * steps(scale) * (grid[code, k] + shifts(shift))", importance=True, across=False,
                          signs=("grid",)),
    "unit_absmax": Scheme({"code": "integer", "scale": "scale"}, ("code", "scale"), {},
                          "scale = largest magnitude of the block; codes are w * (divisor / scale)", "scale * code / divisor",
                          signs=("code",)),
    "unit_level": Scheme({"code": "count", "scale": "scale"}, ("code", "scale"), {},
                         "scale = largest magnitude of the block; codes of the levels nearest to w * (1 / scale)",
                         "scale * level[code]", signs=("level",)),
    "unit_level_nested": Scheme({"code": "count", "scale": "count", "super_scale": "scale", "offset": "minimum"},
                                ("code", "scale", "super_scale", "offset"), {},
                                "codes as unit_level's; offset = the mean of its scales, which are coded so less the offset",
                                "level[code] * (entry[scale] * super_scale + offset)", signs=("level", "entry")),
    "float_zero": Scheme({"code": "count", "zero": "minimum", "scale": "scale"}, ("code", "zero", "scale"), {},
                         "scale = range of the block / (2^bits - 1); zero = -least / scale; codes by both, unrounded",
                         "(code - zero) * scale"),
    "float_middle": Scheme({"code": "count", "zero": "minimum", "scale": "scale"}, ("code", "zero", "scale"), {},
                           "scale = range of the block / (2^bits - 1); zero = least + offset * scale; codes by both, as stored",
                           ("(code - offset) * scale + zero", "(code - offset) * scale - zero"), which="negated", kernel=True),
    "kmeans": Scheme({"code": "count", "levels": "levels"}, ("code", "levels"), {},
                     "levels of a stored table by k-means of the weights that share it; codes of the nearest levels",
                     "levels[code]", importance=True),
    "scaled_kmeans": Scheme({"code": "count", "scale": "scale", "levels": "levels"}, ("code", "scale", "levels"), {},
                            "scale = largest magnitude of the block; levels of the one stored table by k-means of all weights "
                            "over their scales; codes of the nearest levels", "scale * levels[code]", importance=True),
    "least_squares": Scheme({"code": "code", "sign": "bit", "choice": "count", "scale": "power"}, ("code", "scale"), {},
                            "scale by search for the least squared error; codes of the nearest values, of any table or formula",
                            ("scale * values(code)", "scale * values(sign, code)", "scale * values(choice, code)",
                             "scale * values(choice, sign, code)"), importance=True, signs=("values",)),
    "least_squares_nested": Scheme({"code": "code", "sign": "bit", "choice": "count", "scale": "integer", "super_scale": "scale"},
                                   ("code", "scale", "super_scale"), {},
                                   "as least_squares; scales are steps of a super-scale of columns or of the row",
                                   ("super_scale * steps(scale) * values(code)",
                                    "super_scale * steps(scale) * values(sign, code)",
                                    "super_scale * steps(scale) * values(choice, code)",
                                    "super_scale * steps(scale) * values(choice, sign, code)"),
                                   importance=True, across=False, of_rows=True, signs=("values",)),
    "nearest": Scheme({"code": "float"}, ("code",), {}, "each weight is rounded to nearest, ties to even", "code"),
}
