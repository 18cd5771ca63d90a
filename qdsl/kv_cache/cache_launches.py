"""The launches of the store and attention kernels, and the constants that describe a cache's formats to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.core.schemes import SCHEMES
from qdsl.core.shapes import axis
from qdsl.kv_cache import places
from qdsl.kv_cache.cache import CachedRows, KVCache
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.gpu.kernels import encode, paged_attention, store_rows
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.arrays import cdiv, power
from qdsl.runtime.weight.layout import FLOATS

NUMBERS_IN_ORDER, NUMBERS = 1 << 14, 1 << 13                     # numbers in a tile of attention: codes in order, and decoded
LEAST_TOKENS = 16
WARPS = 4
LEAST_UNITS = 16                                                 # columns of an operand of a matrix instruction
TILE = 2048                                                      # weights in a tile of store, about
MOST_SPLITS = 32
HEADS, MOST_HEADS = 16, 64                                       # rows of a matrix instruction, and of a program
MOST_SUMS = 1 << 14                                              # sums in a program of 4 warps
SCALED = "scale * (code - offset)"


def why_not_store(cache: KVCache) -> str:
    """The reason why no kernel can encode for this cache; '' if one can."""
    return places.why_not_store(cache.keys) or places.why_not_store(cache.values)


def store_calls(cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, sequences: Tensor | None) -> Iterator[Call]:
    """Yields the launches of `store`, for tensors on any device, including meta; why_not_store(cache) must be ''."""
    if slots.numel():
        yield _store_call(cache, cache.keys, k.contiguous(), slots, sequences)
        if cache.tail is not None:
            group, d = cache.keys.group, cache.head_dim
            yield Call(store_rows.store_tail, (k.contiguous(), slots, cache.tail, sequences, slots.numel(), cache.heads),
                       {"D": d, "GROUP": group}, (slots.numel(), cache.heads), {"num_warps": 1})
        if v is not None:
            yield _store_call(cache, cache.values, v.contiguous(), slots, sequences)


def _store_call(cache: KVCache, cached: CachedRows, x: Tensor, slots: Tensor, sequences: Tensor | None) -> Call:
    """The launch that encodes keys or values."""
    where, (behind, appended) = places.places(cached), _appended_fields(cached)
    tokens = max(1, TILE // cached.packed.shape[1]) if cached.group == 1 else cached.group
    grouped = cached.group > 1
    constants = {"scheme": getattr(encode, cached.packed.variant.scheme), **encode_constants(cached), "STATIC": where.static,
                 "WHOLE": where.whole, "CODE": where.code, "UNITS": where.units, "BITS": where.bits, "NUMBERS": where.numbers,
                 "GROUPS": where.of_groups, "APPENDED": appended, "X": cache.head_dim, "D": cached.packed.shape[1],
                 "BLOCK": cache.block_size, "GROUP": cached.group, "G": where.groups, "U": where.units_of_group,
                 "E": where.codes_of_byte, "BR": tokens}
    count = slots.numel()
    return Call(store_rows.store_rows, (x, _tensors(cached), behind or None, slots, cache.tail if grouped else None,
                                        sequences if grouped else None, count, cache.heads), constants,
                (count if grouped else cdiv(count, tokens), cache.heads), {"num_warps": WARPS, "enable_fp_fusion": False})


def encode_constants(cached: CachedRows) -> dict[str, Any]:
    """The constants FLOAT to TYPE of a function in kernels/encode.py."""
    chosen, variant = cached.settings, cached.packed.variant
    kind = number(cached.code_type)
    levels: tuple[Any, ...] = ()
    divisor = chosen.get("divisor", kind.largest if kind.is_float else 1)
    factor = chosen.get("factor", 1)
    if "level" in chosen:
        levels = _level_borders(chosen["level"].numbers)
        divisor = max(map(abs, chosen["level"].numbers)) * factor
    types = {cached.type_of(field) for role, field in variant.roles.items() if role != "code"}
    low, high = (0, 0) if kind.is_float else (kind.low, kind.high)
    return {"FLOAT": kind.is_float, "LOW": low, "HIGH": high, "DIVISOR": float(divisor), "OFFSET": int(chosen.get("offset", 0)),
            "BY": str(chosen.get("by", "stored")), "TIES": str(chosen.get("ties", "even")), "FACTOR": float(factor),
            "LEAST": float(chosen.get("least", 0)), "LEVELS": levels, "TYPE": types.pop()}


def _level_borders(numbers: tuple[float, ...]) -> tuple[Any, ...]:
    """The first code of a table of levels, and its borders: (border, whether the level below has it, code above)."""
    first = {level: code for code, level in reversed(list(enumerate(numbers)))}
    levels = sorted(first)
    return first[levels[0]], *(((low + high) / 2, first[low] < first[high], first[high]) for low, high in pairwise(levels))


def _tensors(cached: CachedRows) -> tuple[Tensor | None, ...]:
    """A kernel's tensors in storage order: 8-bit floats as bytes, None for missing tensors."""
    return tuple(tensor.view(torch.uint8) if tensor is not None and tensor.dtype.itemsize == 1 and tensor.is_floating_point()
                 else tensor for tensor in map(cached.packed.tensors.get, cached.packed.layout.coded))


# -- attention -----------------------------------------------------------------------------------------------------------


def why_not_attend(cache: KVCache, q: Tensor) -> str:
    """The reason why no kernel can attend over this cache for q [B, query heads, head_dim]; '' if one can."""
    if q.dtype not in launch.TYPES:
        return f"q is {str(q.dtype)[6:]}"
    behind = sum(cache.keys.appended.values())
    sizes = {"head_dim": cache.head_dim - behind, "value_dim": cache.value_dim, "block_size": cache.block_size}
    if odd := [f"{name} is {size}" for name, size in sizes.items() if size & (size - 1) or size < LEAST_UNITS]:
        return odd[0] + (f" and {behind}" if behind and "head" in odd[0] else "")
    if cache.value_dim > cache.head_dim - behind:
        return f"values have the {behind} channels behind the others, too"
    for cached in (cache.keys, cache.values):
        kernels, name = cached.packed.layout.kernels, cached.packed.format.name
        units = _code_units(cached)
        if not _in_order(cached) and not _is_8_bit_block_scaled(cached) and (
                kernels.sums > 1 or cached.packed.layout.streams or cached.packed.shape[1] % units or units & (units - 1)
                or units < LEAST_UNITS):
            return f"a row of {name}.{cached.packed.storage} has {units} units of codes"
        if cached.appended and places.why_not_store(cached):
            return f"kernels do not find the numbers behind the columns of {name}.{cached.packed.storage}"
    return ""


def attention_calls(q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, out: Tensor, scale: float | None = None,
                    sequences: Tensor | None = None, splits: int | None = None) -> Iterator[Call]:
    """Yields the launches of `attention`, for tensors on any device, including meta; why_not_attend(cache, q) must be ''.

    splits: parts of a sequence; by default enough to give every multiprocessor two programs.
    """
    (b, heads, x), d, v = q.shape, cache.keys.packed.shape[1], cache.value_dim
    if not b:
        return
    in_order = all(_in_order(cached) or _is_8_bit_block_scaled(cached) for cached in (cache.keys, cache.values))
    tokens = max(LEAST_TOKENS, (NUMBERS_IN_ORDER if in_order else NUMBERS) // d)
    most = max(1, cdiv(block_tables.shape[1] * cache.block_size, tokens))
    group = heads // cache.heads
    rows = min(max(HEADS, power(group)), MOST_HEADS)
    programs = cache.heads * cdiv(group, rows)
    if splits is None:
        splits = min(most, MOST_SPLITS, cdiv(2 * configure.target(q.device).multiprocessors, b * programs))
    partial = torch.empty(b, heads, splits, v, dtype=torch.float32, device=q.device)
    weights = torch.empty(b, heads, splits, dtype=torch.float32, device=q.device)
    if cache.tail is not None and sequences is None:
        sequences = torch.arange(b, dtype=torch.int32, device=q.device)
    keys, values = (_read_operands(cached, q) for cached in (cache.keys, cache.values))
    behind, appended = _appended_fields(cache.keys)
    constants = {**{f"{half}_{name}" if name.islower() else f"{half.upper()}_{name}": value
                    for half, (_, described) in (("key", keys), ("value", values)) for name, value in described.items()},
                 "SCALE": (scale or x ** -0.5) / math.log(2), "D": d, "X": x, "V": v, "APPENDED": appended,
                 "SHARED": cache.is_shared, "BLOCK": cache.block_size, "GROUP": cache.keys.group, "BH": rows, "BT": tokens}
    sizes = [launch.size_arguments(cached.packed) for cached in (cache.keys, cache.values)]
    yield Call(paged_attention.paged_attention,
               (q, keys[0], values[0], behind or None, block_tables, seq_lens, cache.tail,
                sequences if cache.tail is not None else None, partial, weights, cache.keys.packed.shape[0],
                block_tables.shape[1], cache.heads, group, *sizes), constants, (b, programs, splits),
               {"num_warps": WARPS if rows * d <= MOST_SUMS else 2 * WARPS, "num_stages": 2})
    yield Call(paged_attention.combine, (partial, weights, out, splits), {"D": v, "BS": power(splits)}, (b * heads,),
               {"num_warps": WARPS})


def _read_operands(cached: CachedRows, q: Tensor) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The tensors of keys or values that attention reads, and the constants that describe them."""
    kernels, k = cached.packed.layout.kernels, cached.packed.shape[1]
    if _in_order(cached):
        matrix_unit, names = kernels.matrix_unit, cached.packed.layout.coded
        assert matrix_unit is not None and matrix_unit.eight is not None
        tensors = list(_tensors(cached))
        codes = names.index(matrix_unit.eight.codes)
        if configure.converts_fp8(q.device):
            tensors[codes] = cached.packed.tensors[names[codes]]
        fields = tuple(field.constants(names, cached.packed.sizes) for field in matrix_unit.sums.row_fields)
        adds = matrix_unit.sums.ones and not any(tensors[int(field[0])] is None and field[4] == 0 for field in fields)
        return tuple(tensors), {"decode": None, "finish": matrix_unit.sums.finish, "CODES": codes, "FIELDS": fields, "ADDS": adds,
                                "UNITS": k, "PARTS": 1, "ROW": k, "STEP": 1}
    if _is_8_bit_block_scaled(cached):
        where = places.places(cached)
        kind = torch.int8 if cached.code_type == "i8" else \
            FLOATS[cached.code_type] if configure.converts_fp8(q.device) else torch.uint8
        scale = cached.packed.variant.roles["scale"]
        operands = _row_plane(cached, where.code, k, kind)
        scales = _row_plane(cached, where.numbers[0], where.groups, FLOATS[cached.type_of(scale)])
        return (operands, scales), {"decode": None, "finish": paged_attention.scaled, "CODES": 0, "FIELDS": ((1, 1, 0, 0, 0.0),),
                                 "ADDS": False, "UNITS": k, "PARTS": where.groups, "ROW": operands.stride(0),
                                 "STEP": scales.stride(0)}
    units = _code_units(cached)
    return launch.read_tensors(cached.packed), {"decode": kernels.decode, "finish": None, "CODES": 0, "FIELDS": (), "ADDS": False,
                                                "UNITS": units, "PARTS": k // units, "ROW": k, "STEP": 1}


def _appended_fields(cached: CachedRows) -> tuple[tuple[Tensor, ...], tuple[tuple[int, int, int], ...]]:
    """The fields after the columns of keys: their tensors, and (first channel, count, stride of rows) of each."""
    if not cached.appended:
        return (), ()
    planes = [_row_plane(cached, place[:3], place[3], FLOATS[place[4]]) for place in places.places(cached).appended]
    first = accumulate((plane.shape[1] for plane in planes), initial=cached.packed.shape[1])
    return tuple(planes), tuple((at, plane.shape[1], plane.stride(0)) for at, plane in zip(first, planes, strict=False))


def _row_plane(cached: CachedRows, place: tuple[int, ...], count: int, dtype: torch.dtype) -> Tensor:
    """`count` neighbouring numbers of every row at a place, as a view [rows, count]."""
    tensor, first, row = place
    stored = cached.packed.tensors[cached.packed.layout.coded[tensor]].view(torch.uint8).flatten()
    return stored.as_strided((cached.packed.shape[0], count * dtype.itemsize), (row, 1), first).view(dtype)


def _in_order(cached: CachedRows) -> bool:
    """Whether codes are int8 or E4M3 in row order, and numbers are per row."""
    matrix_unit = cached.packed.layout.kernels.matrix_unit
    return matrix_unit is not None and matrix_unit.eight is not None and matrix_unit.sums.scale is None


def _is_8_bit_block_scaled(cached: CachedRows) -> bool:
    """Whether codes are int8 or E4M3 in row order, and the only numbers are scales of parts of rows."""
    if places.why_not_store(cached) or cached.group > 1 or cached.code_type not in ("i8", "e4m3"):
        return False
    where, k = places.places(cached), cached.packed.shape[1]
    size = FLOATS[cached.type_of(cached.packed.variant.roles["scale"])].itemsize
    return (SCHEMES[cached.packed.variant.scheme].patterns == (SCALED,) and not cached.settings.get("offset")
            and not cached.numbers and where.units == ((k, 1, 1),)
            and where.of_groups in ((), ((where.groups, 1, size),)) and k // where.groups >= LEAST_UNITS)


def _code_units(cached: CachedRows) -> int:
    units = axis(cached.packed.layout.kernels.units).extent(*cached.packed.shape, cached.packed.sizes)
    assert units is not None
    return units
