"""The encode schemes that a spec may name: their roles and options, as qdsl/encode implements them (tests compare)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qdsl.numbers import Number

# What a field must be to play a role: words for it, and the test.
KINDS: dict[str, tuple[str, Callable[[Number], bool]]] = {
    "scale": ("a scale is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "minimum": ("a minimum is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
    "zero": ("a zero point is an integer", lambda number: not number.is_float),
    "code": ("a code is an integer or a float of at most 8 bits", lambda number: not number.is_float or number.bits <= 8),
    "count": ("a code is an unsigned integer of at most 8 bits", lambda number: number.kind == "unsigned" and number.bits <= 8),
    "bit": ("a code is u1", lambda number: number.kind == "unsigned" and number.bits == 1),
    "integer": ("a code is an integer of at most 8 bits", lambda number: not number.is_float and number.bits <= 8),
    "float": ("a code is f32, f16 or bf16", lambda number: number.is_float and number.bits >= 16),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """roles: the fields that it chooses, as it returns them, and of which of KINDS each is.

    options: argument -> allowed words, None: a number.  required: roles and options that must be given.
    inverts: the decode expression that it is the inverse of, over roles and integer constants that may be missing.
    importance: it takes one.  own: options that belong to the format, which no caller gives.
    """

    roles: Mapping[str, str]
    required: tuple[str, ...]
    options: Mapping[str, tuple[str, ...] | None]
    summary: str
    inverts: str
    importance: bool = False
    own: tuple[str, ...] = ()

    def open(self, code: Number) -> tuple[str, ...]:
        """Options that a caller of quantize may give too: words, and `ties` for integers.  Numbers belong to the format."""
        return tuple(option for option, words in self.options.items()
                     if words is not None and option not in self.own and not (option == "ties" and code.is_float))


_TIES = ("even", "away", "up")
_BY = ("stored", "exact", "inverse")

SCHEMES = {
    "absmax": Scheme({"code": "code", "scale": "scale"}, ("code", "scale", "divisor"),
                     {"divisor": None, "by": _BY, "ties": _TIES, "lost": ("least", "zero")},
                     "scale = largest magnitude of the block / divisor", "scale * (code - offset)", own=("lost",)),
    "signmax": Scheme({"code": "code", "scale": "scale"}, ("code", "scale", "divisor"),
                      {"divisor": None, "by": _BY, "ties": _TIES},
                      "scale = the value of largest magnitude, sign and all, / divisor", "scale * (code - offset)",
                      importance=True),
    "minmax": Scheme({"code": "code", "zero": "zero", "scale": "scale"}, ("code", "zero", "scale"),
                     {"by": ("stored", "exact"), "symmetric": ("true", "false")},
                     "scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0",
                     "(code - zero) * scale"),
    "affine": Scheme({"code": "count", "scale": "scale", "min": "minimum"}, ("code", "scale", "min"), {},
                     "min = the least weight of the block; scale = its range / (2^bits - 1)", "scale * code + min",
                     importance=True),
    "meansign": Scheme({"code": "bit", "scale": "scale"}, ("code", "scale"), {},
                       "scale = the mean magnitude of the block; a code says that the weight is not negative",
                       "scale * (2 * code - 1)"),
    "kquant_minmax": Scheme({"code": "count", "scale": "count", "min": "count", "super_scale": "scale", "super_min": "minimum"},
                            ("code", "scale", "min", "super_scale", "super_min", "first", "step", "steps"),
                            {"first": None, "step": None, "steps": None, "errors": ("squares", "magnitudes"), "spread": None},
                            "scale and min by search for the least error; both in steps of the super-block's largest",
                            "super_scale * scale * code - super_min * min", importance=True, own=("errors",)),
    "kquant_signmax": Scheme({"code": "integer", "scale": "integer", "super_scale": "scale"},
                             ("code", "scale", "super_scale"),
                             {"by": ("trials", "exchange"), "spread": None},
                             "scale by search for the least error; in steps of the super-block's largest, sign and all",
                             "super_scale * (scale - scale_offset) * (code - offset)", importance=True, own=("by",)),
    "nearest": Scheme({"code": "float"}, ("code",), {}, "each weight is rounded to nearest, ties to even", "code"),
}
