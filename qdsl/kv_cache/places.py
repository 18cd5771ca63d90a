"""Byte positions of a row's codes and numbers for the store kernel, from the digits of the layout (core/slices.py)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qdsl.core.numbers import find_number
from qdsl.core.schemes import SCHEMES
from qdsl.core.slices import FieldPiece
from qdsl.kv_cache.cache import CachedRows
from qdsl.runtime.weight.layout import FLOATS

Digit = tuple[int, int, int]                                     # extent, columns of a step, bytes or bits of a step
KNOWN_SETTINGS = {"divisor", "offset", "by", "ties", "level", "factor", "least"}
TYPES = ("f32", "f16", "bf16", "ue4m3")


@dataclass(frozen=True, slots=True)
class Places:
    """Constants of store_rows.  A place is (tensor, first byte, bytes of a row); of_groups: the places of groups' numbers.

    appended: for numbers after the columns also their count and their type.
    """

    static: int | None
    whole: int | None
    code: tuple[int, int, int]
    units: tuple[Digit, ...]
    bits: tuple[Digit, ...]
    numbers: tuple[tuple[int, int, int], ...]
    of_groups: tuple[Digit, ...]
    groups: int
    units_of_group: int
    appended: tuple[tuple[int, int, int, int, str], ...] = ()

    @property
    def codes_of_byte(self) -> int:
        """E: the number of codes in a byte."""
        return prod(extent for extent, _, _ in self.bits)


def why_not_store(cached: CachedRows) -> str:
    """The reason why no kernel can encode rows of these keys or values; '' if one can."""
    packed, variant = cached.packed, cached.packed.variant
    if not variant.scheme or "sums" in variant.roles:
        return f"{packed.format.name}: its scheme has no kernel"
    if unknown := [name for name in cached.settings if name not in KNOWN_SETTINGS]:
        return f"{packed.format.name}: kernels do not know '{unknown[0]}'"
    kind = find_number(cached.code_type)
    by = str(cached.settings.get("by", "stored"))
    if kind is None or (kind.is_float and kind.name != "e4m3") or by not in ("stored", "exact"):
        return f"{packed.format.name}: kernels do not encode {cached.code_type} so"
    numbers = [name for role, name in variant.roles.items() if role != "code" and name not in cached.numbers]
    if any(cached.type_of(name) not in TYPES for name in (*numbers, *variant.appended)):
        return f"{packed.format.name}: kernels do not store its scales"
    try:
        places(cached)
    except ValueError as error:
        return f"{packed.format.name}.{packed.storage}: {error}"
    return ""


def places(cached: CachedRows) -> Places:
    """The constants of the store kernel.  Raises ValueError for a layout in which rows, groups or codes are no runs of bytes."""
    packed, variant = cached.packed, cached.packed.variant
    k = packed.shape[1]
    code_field = variant.roles["code"]
    tensor, start, row, digits = _field_place(cached, code_field)
    units, bits = _split_digits(digits)
    numbers = [name for role, name in _ordered(cached) if role != "code" and name not in cached.numbers]
    columns = {_columns(cached, name) for name in numbers} or {k}
    if len(columns) > 1:
        raise ValueError("its numbers have different groups")
    size = columns.pop()
    if cached.group == 1 and any(extent * step > size for extent, step, _ in bits):
        raise ValueError("a byte holds codes of several groups")
    if cached.group > 1 and size != 1:
        raise ValueError(f"its tokens share numbers among {size} channels, too")
    groups = k // size if cached.group == 1 else 1
    stored = [_field_place(cached, name) for name in numbers]
    steps = {of_groups for *_, of_groups in stored} or {()}
    if len(steps) > 1 or any(step % 8 for of_groups in steps for _, _, step in of_groups):
        raise ValueError("its numbers do not lie alike, in bytes")
    of_groups = tuple((extent, weight, step // 8) for extent, weight, step in steps.pop())
    shared = {name: _tensor_of(cached, name)[0] for name in cached.numbers}
    scale = variant.roles.get("scale", "")
    whole = [place for name, place in shared.items() if name != scale]
    units_of_group = k // prod(extent for extent, _, _ in bits) // groups
    return Places(shared.get(scale), whole[0] if whole else None, (tensor, start, row), units, bits,
                  tuple((at, first, bytes_of_row) for at, first, bytes_of_row, _ in stored), of_groups, groups, units_of_group,
                  tuple(_appended_place(cached, name) for name in variant.appended))


def _appended_place(cached: CachedRows, name: str) -> tuple[int, int, int, int, str]:
    """The place of numbers after the columns, their count and type.  Raises ValueError if they are no run of bytes."""
    tensor, first, row, digits = _field_place(cached, name)
    extent, size = prod(extent for extent, _, _ in digits), FLOATS[cached.type_of(name)].itemsize
    if cached.group > 1 or extent & (extent - 1) or digits != ((extent, 1, 8 * size),):
        raise ValueError(f"'{name}' is no run of 2^n numbers of a token")
    return tensor, first, row, extent, cached.type_of(name)


def _ordered(cached: CachedRows) -> list[tuple[str, str]]:
    """The pairs of role and field, in the order in which the scheme returns them."""
    variant = cached.packed.variant
    return [(role, variant.roles[role]) for role in SCHEMES[variant.scheme].roles if role in variant.roles]


def _columns(cached: CachedRows, name: str) -> int:
    """The number of columns that share a number."""
    axes = cached.packed.variant.fields[name].axes
    return axes[1].by(cached.packed.sizes) if len(axes) > 1 else cached.packed.shape[1]


def _tensor_of(cached: CachedRows, name: str) -> tuple[int, FieldPiece]:
    """The index of a field's tensor, and the field's piece in it.  Raises ValueError if the field has several pieces."""
    layout = cached.packed.layout
    matches = [(at, piece) for at, tensor in enumerate(layout.coded) for piece in layout.tensors[tensor].slices
               if piece.field == name]
    if len(matches) != 1 or matches[0][1].width or matches[0][1].further or layout.tensors[layout.coded[matches[0][0]]].adds:
        raise ValueError(f"'{name}' lies in pieces")
    return matches[0]


def _field_place(cached: CachedRows, name: str) -> tuple[int, int, int, tuple[Digit, ...]]:
    """A field's tensor, its first byte, the bytes of a row, and the digits of its columns: (extent, columns, bits)."""
    packed = cached.packed
    at, piece = _tensor_of(cached, name)
    placed = packed.placed(packed.layout.coded[at], piece)
    if placed is None or len(placed.coordinates[0]) != 1 or placed.start % 8 or placed.coordinates[0][0][1] % 8:
        raise ValueError(f"rows of '{name}' do not lie one by one")
    digits, weight = [], 1
    for extent, step in placed.coordinates[1] if len(placed.coordinates) > 1 else ():
        digits.append((extent, weight, step))
        weight *= extent
    return at, placed.start // 8, placed.coordinates[0][0][1] // 8, tuple(digits)


def _split_digits(digits: tuple[Digit, ...]) -> tuple[tuple[Digit, ...], tuple[Digit, ...]]:
    """Splits digits of columns into those of bytes and those of bits in a byte.  Raises ValueError for codes that cross bytes."""
    units: list[Digit] = []
    bits: list[Digit] = []
    for extent, weight, step in digits:
        inside = min(extent, max(1, 8 // step)) if 8 % step == 0 or step % 8 == 0 else 0
        if not inside or extent % inside:
            raise ValueError("codes cross bytes")
        bits += [(inside, weight, step)] if step < 8 else []
        if step >= 8:
            units.append((extent, weight, step // 8))
        elif extent > inside:
            units.append((extent // inside, weight * inside, inside * step // 8))
    return tuple(units), tuple(bits)
