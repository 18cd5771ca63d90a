"""The encode schemes that a spec may name: their roles and options, as qdsl/encode implements them (tests compare)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qdsl.numbers import Number


@dataclass(frozen=True, slots=True)
class Scheme:
    """roles: the fields that it chooses, as it returns them.  options: argument -> allowed words, None: a number.

    inverts: the decode expression that it is the inverse of.
    """

    roles: tuple[str, ...]
    required: tuple[str, ...]
    options: Mapping[str, tuple[str, ...] | None]
    summary: str
    inverts: str = "scale * (code - constant)"

    def open(self, code: Number) -> tuple[str, ...]:
        """Options that a caller of quantize may give too: words, and `ties` for integers.  Numbers belong to the format."""
        return tuple(option for option, words in self.options.items()
                     if words is not None and not (option == "ties" and code.is_float))


_TIES = ("even", "away", "up")

SCHEMES = {
    "absmax": Scheme(("code", "scale"), ("code", "scale", "divisor"),
                     {"divisor": None, "by": ("stored", "exact", "inverse"), "ties": _TIES},
                     "scale = largest magnitude of the block / divisor"),
    "signmax": Scheme(("code", "scale"), ("code", "scale", "divisor"),
                      {"divisor": None, "by": ("stored", "exact", "inverse"), "ties": _TIES},
                      "scale = the value of largest magnitude, sign and all, / divisor"),
    "minmax": Scheme(("code", "zero", "scale"), ("code", "zero", "scale"),
                     {"by": ("stored", "exact"), "symmetric": ("true", "false")},
                     "scale = range of the block, zero included, / (2^bits - 1); zero = the code of 0",
                     inverts="(code - zero) * scale"),
    "nearest": Scheme(("code",), ("code",), {}, "each weight is rounded to nearest, ties to even", inverts="code"),
}
