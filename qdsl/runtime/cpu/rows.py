"""Weights with rows interleaved by 16, as a CPU reads them fastest, and products with these (row_groups.h has the layout).

`interleaved_copy` makes that copy of a weight at its first product, from the fields.  It lives as long as the weight's memory.
The weight itself stays as it is, so that files, slices and conversions do not change.  A format whose decode is affine in a code
has such loops; its generated module has their C functions.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.host import library
from qdsl.host.system import allow_tiles, is_intel, processor_flags
from qdsl.runtime.cpu import kept, memory, threads
from qdsl.runtime.cpu.prepared import TYPES, PreparedProduct, Run
from qdsl.runtime.cpu.source import VECTORS
from qdsl.runtime.libraries.private_apis import allocator
from qdsl.runtime.weight.layout import RowLoops
from qdsl.runtime.weight.matrix_unit import SMALL_FLOATS
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import unpack

GROUPS, LOOPS = (Path(__file__).with_name(name) for name in ("row_groups.h", "row_loops.h"))
ROWS, BLOCK, MOST_FIELDS, TABLE, SPACE = 16, 32, 8, 64, 64       # as in row_groups.h and row_loops.h
FEW = 8                                                          # rows of x that `dot` takes; more have tiles
TILE = 1 << 20                                                   # weights placed at a time
SHARE = 1 << 17                                                  # products of weights and x that are worth a thread of their own
KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.uint8: "uint8", torch.int8: "int8"}

_libraries: dict[tuple[Any, ...], ctypes.CDLL | None] = {}


class Weight(ctypes.Structure):
    """`Weight` of row_groups.h."""

    _fields_ = (("codes", ctypes.c_void_p), ("levels", ctypes.c_void_p), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64),
                ("fields", ctypes.c_void_p * MOST_FIELDS), ("bytes", ctypes.c_int64 * MOST_FIELDS),
                ("shift", ctypes.c_int64 * MOST_FIELDS))


@dataclass(frozen=True, slots=True)
class _GroupField:
    """A number of groups: values [rows, groups], and how many columns share one; 0 for all.  kind: how C reads them."""

    values: Tensor
    columns: int
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class InterleavedWeight:
    """An interleaved weight, with the library of its loops.

    sums: groups of columns whose sums of x a weight with offsets needs; 0 for one without.  factor: by which x is multiplied.
    codes, levels, fields: the memory that `weight` refers to; groups of 16 rows come first in codes and fields.
    """

    functions: ctypes.CDLL
    weight: Weight
    shape: tuple[int, int]
    sums: int
    factor: Tensor | None
    codes: Tensor
    levels: Tensor | None
    fields: tuple[Tensor, ...]

    @property
    def columns(self) -> int:
        """K, rounded up to whole blocks."""
        return int(self.weight.columns)

    def product(self, x: Tensor, bias: Tensor | None, rounds_x: bool = False) -> Tensor:
        """x [M, K] @ w.T + bias: [M, N] in x's dtype.  rounds_x: up to 8 rows are rounded to 8 bits."""
        way = RowLoopChoice.of(self, x.shape[0], x.dtype, None if bias is None else bias.dtype, rounds_x)
        return way.product(self, x, bias, (x.shape[0], self.shape[0]))


@dataclass(frozen=True, slots=True)
class RowLoopChoice:
    """How x of one shape and dtype is multiplied: few rows by exact weights, bfloat16 rows by weights rounded to that.

    described: the loop, for product.c.  dtype: of x as the loop takes it.  result: of out as the loop writes it.
    """

    described: threads.Product
    rows: int
    dtype: torch.dtype
    result: torch.dtype

    @classmethod
    def of(cls, placed: InterleavedWeight, m: int, dtype: torch.dtype, bias: torch.dtype | None,
           rounds_x: bool = False) -> RowLoopChoice:
        """The way for m rows of a dtype, and a bias of one.  rounds_x: few rows are rounded to 8 bits."""
        n, k = placed.shape
        is_known = dtype in TYPES and bias in TYPES
        few = threads.Product(n=n, k=k, step=1, parts=threads.PARTS, share=SHARE, together=m, units=m, tensors=1)
        if m <= FEW:
            kind = dtype if is_known and placed.factor is None else torch.float32
            few.tiles, few.type, few.bias_type = -(-n // ROWS), TYPES[kind], TYPES[bias if bias in TYPES else torch.float32]
            loop, arrange, few.arranged = _few_rows_loop(placed, kind, rounds_x)
            few.run, few.arrange = _address_of(loop), _address_of(arrange) if arrange else 0
            return cls(few, m, kind, kind)
        is_narrow = dtype == torch.bfloat16 and hasattr(placed.functions, "gemm_bfloat16") and placed.factor is None
        kind, name = (torch.bfloat16, "bfloat16") if is_narrow else (torch.float32, "float32")
        few.run, few.arrange = (_address_of(getattr(placed.functions, f"{step}_{name}")) for step in ("gemm", "arrange"))
        few.arranged = (placed.columns * kind.itemsize + SPACE) // 4
        few.tiles, few.share, few.type, few.tensors, few.is_whole = -(-n // (2 * ROWS)), max(1, SHARE // m), TYPES[kind], 2, 1
        return cls(few, m, kind, kind)

    def product(self, placed: InterleavedWeight, x: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """x, contiguous, times a weight: a tensor of these sizes, in x's dtype.  bias [N], contiguous."""
        dtype = x.dtype
        if placed.factor is not None:
            x = x.float() * placed.factor
        x = x if x.dtype is self.dtype else x.to(self.dtype)
        x = x if x.is_contiguous() else x.contiguous()
        if bias is not None and (self.described.is_whole or bias.dtype not in TYPES):
            bias = bias.float()
        out = _empty(sizes, self.result)
        added = 0 if bias is None else bias.data_ptr()
        places = [ctypes.addressof(placed.weight), added if self.described.is_whole else 0, 0, 0, 0, 0, 0, 0]
        if threads.functions().product(ctypes.byref(self.described), x.data_ptr(), 0 if self.described.is_whole else added,
                                       out.data_ptr(), self.rows, torch.get_num_threads(), *places):
            raise MemoryError(f"no memory for {self.rows} rows of x in float32")
        return out if out.dtype is dtype else out.to(dtype)


def _few_rows_loop(placed: InterleavedWeight, dtype: torch.dtype, rounds_x: bool) -> tuple[Any, Any, int]:
    """The loop for few rows, what arranges a row of x for it or None, and how many numbers an arranged row has."""
    functions, columns = placed.functions, placed.columns
    if rounds_x:
        return functions.run_bytes, functions.arrange_bytes, columns // 4 + columns // BLOCK * 3
    if dtype == torch.bfloat16 and hasattr(functions, "run_pairs"):
        return functions.run_pairs, functions.arrange_pairs, columns + placed.sums + columns // 2 + 1
    is_arranged = placed.sums or placed.shape[1] != columns
    return functions.run, functions.arrange if is_arranged else None, columns + placed.sums


def _empty(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor, without an operator of torch where that is possible."""
    allocate = allocator("cpu")
    return torch.empty(sizes, dtype=dtype, device="cpu") if allocate is None else allocate(sizes, strides_of(sizes), dtype)


def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([math.prod(sizes[axis + 1:]) for axis in range(len(sizes))])


class RowProduct(PreparedProduct):
    """A prepared product with copies.  rounds_x: whether few rows are rounded to 8 bits."""

    __slots__ = ("rounds_x",)

    def __init__(self, make_run: Callable[[tuple[int, ...]], Run], sizes: tuple[int, ...], rounds_x: bool) -> None:
        super().__init__(make_run, sizes)
        self.rounds_x = rounds_x

    def reshaped(self, sizes: tuple[int, ...]) -> RowProduct:
        """The same product for an x with other leading axes."""
        return RowProduct(self.make_run, sizes, self.rounds_x)


def prepare(packed: PackedWeight, m: int, dtype: torch.dtype, bias: torch.dtype | None, is_permuted: bool,
            rounds_x: bool = False) -> RowProduct | None:
    """x [m, K] @ w.T + bias for all weights of one description that have copies; None where this one has none.

    bias: its dtype, or None.  is_permuted: `run` gets the permutation of columns after the weight's tensors.  rounds_x: up to 8
    rows are rounded to 8 bits.
    """
    first, description = interleaved_copy(packed), kept.description_number(packed)
    if first is None:
        return None
    way, n, allocate = RowLoopChoice.of(first, m, dtype, bias, rounds_x), packed.shape[0], allocator("cpu")
    is_plain = first.factor is None and way.dtype is dtype and not way.described.is_whole
    is_direct = allocate is not None and is_plain and bias in TYPES
    call, described, places = threads.functions().product, ctypes.byref(way.described), [0] * (threads.MOST_TENSORS - 1)

    def make_run(sizes: tuple[int, ...]) -> Run:
        strides = strides_of(sizes)

        def run(x: Tensor, tensors: Sequence[Tensor], added: Tensor | None) -> Tensor | None:
            own = tensors[:-1] if is_permuted else tensors
            try:
                entry = kept.find(own, description)
                if entry is None or not x.is_cpu or not (source := x.data_ptr()):
                    return None
            except RuntimeError:                                 # tensors of autograd's vmap have no memory
                return None
            if added is not None and (added.shape != (n,) or not added.is_contiguous() or not added.is_cpu):
                return None
            if not is_direct or is_permuted or not x.is_contiguous():
                return way.product(entry.copy, x.index_select(-1, tensors[-1]) if is_permuted else x, added, sizes)
            out = allocate(sizes, strides, dtype)                # type: ignore[misc]
            if call(described, source, 0 if added is None else added.data_ptr(), out.data_ptr(), m, torch.get_num_threads(),
                    entry.address, *places):
                raise MemoryError(f"no memory for {m} rows of x in float32")
            return out

        return run

    return RowProduct(make_run, (m, n), rounds_x and m <= FEW)


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def has_bfloat16() -> bool:
    """Whether the processor multiplies pairs of bfloat16, and torch uses its vectors."""
    return "avx512_bf16" in processor_flags() and _capability() == "AVX512"


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), and the system lets this process do so."""
    return "amx_bf16" in processor_flags() and allow_tiles()


def _capability() -> str:
    """Which vector instructions torch uses: 'AVX512', 'AVX2' or another word."""
    return torch.backends.cpu.get_cpu_capability()


def code_bytes(packed: PackedWeight) -> int:
    """The bytes of the codes of a weight's copy; 0 for one that has none."""
    (n, k), loops = packed.shape, packed.variant.row_loops
    return 0 if loops is None else -(-n // ROWS) * -(-k // BLOCK) * 4 * ROWS * loops.bits


def interleaved_copy(packed: PackedWeight, into: Tensor | None = None) -> InterleavedWeight | None:
    """The interleaved copy of a weight, made at the first call; None for a weight that has none.

    into: memory for the codes [code_bytes] of a new copy, which takes the place of one that was made before.
    """
    if packed.variant.row_loops is None or not library.has_compiler():
        return None
    entry = kept.get_copy(packed, partial(_interleave, packed, into), into is not None)
    return None if entry is None else entry.copy


def takes_bytes(packed: PackedWeight) -> bool:
    """Whether a copy's loops multiply x in 8 bits: numbers of codes are small integers."""
    return packed.variant.row_loops is not None and "#define BASE" in packed.variant.row_loops.source


# -- placing -----------------------------------------------------------------------------------------------------------


def entry_of(copy: InterleavedWeight) -> kept.KeptCopy[InterleavedWeight]:
    """A copy as one that is kept."""
    return kept.KeptCopy(copy, ctypes.addressof(copy.weight))


def _interleave(packed: PackedWeight, into: Tensor | None) -> kept.KeptCopy[InterleavedWeight] | None:
    """A new interleaved copy; None where groups of columns are too short or uneven, or without a compiler.

    into: memory for its codes, where those of others are.
    """
    loops = packed.variant.row_loops
    assert loops is not None
    n, k = packed.shape
    codes, group = memory.zero_bytes(code_bytes(packed)) if into is None else into, code_bytes(packed) // -(-n // ROWS)
    parts: list[dict[str, _GroupField]] = []
    functions: ctypes.CDLL | None = None
    levels = factor = None
    for start, stop in _row_ranges(packed):
        part = packed if (start, stop) == (0, n) else packed.cut("N", start, stop)
        fields = {**_defaults(packed), **unpack(part)}
        groups = _group_fields(loops, packed, fields, (start, stop))
        if groups is None or any(packed.variant.fields[name].type == "index" for name in fields):
            return None
        parts.append(groups)
        functions = functions or _compile_loops(packed, loops, list(groups.values()))
        if functions is None:
            return None
        own = loops.row_codes.codes(**{name: fields[name] for name in loops.row_codes.rows}) if loops.row_codes \
            else fields[loops.code]
        own = own.contiguous().view(torch.uint8)
        functions.interleave(own.data_ptr(), codes.data_ptr() + start // ROWS * group, stop - start, k,
                             -(-(stop - start) // ROWS))
        levels = torch.nn.functional.pad(fields[loops.levels].float(), (0, TABLE - (1 << loops.bits))) if loops.levels else None
        factor = _column_factor(loops, fields)
    if functions is None:
        return None
    return entry_of(_assemble(packed, loops, functions, codes, parts, levels, factor, into is None))


def _row_ranges(packed: PackedWeight) -> list[tuple[int, int]]:
    """Ranges of rows that are whole groups, as the storage allows."""
    n, k = packed.shape
    least = math.lcm(packed.step("N"), ROWS)
    rows = max(1, TILE // max(1, k) // least) * least
    is_whole = packed.step("N") >= n
    return [(0, n)] if is_whole else [(start, min(n, start + rows)) for start in range(0, n, rows)]


def _defaults(packed: PackedWeight) -> dict[str, Tensor]:
    """Optional numbers that are not stored."""
    return {name: torch.tensor(float(value), dtype=torch.float32, device="cpu")
            for name, value in packed.variant.defaults.items() if value is not None}


def _column_factor(loops: RowLoops, fields: Mapping[str, Tensor]) -> Tensor | None:
    """The factor of each column of x."""
    if not loops.columns:
        return None
    values = fields[loops.columns.removeprefix("/")].float()
    return 1 / values if loops.columns[0] == "/" else values


def _group_fields(loops: RowLoops, packed: PackedWeight, fields: Mapping[str, Tensor], rows: tuple[int, int],
                  ) -> dict[str, _GroupField] | None:
    """The numbers of groups of some rows; None where groups have no multiple of 16 columns."""
    groups: dict[str, _GroupField] = {}
    for name in loops.fields:
        group = _group_field(packed, name, fields[name], rows)
        if group is None:
            return None
        if name in loops.lookups:
            values = loops.lookups[name].values[group.values.long()]
            is_byte = not values.is_floating_point() and bool((values.abs() < 128).all())
            dtype, kind = (torch.int8, "int8") if is_byte else (torch.float32, "float32")
            group = _GroupField(values.to(dtype), group.columns, kind)
        groups[name] = group
    return groups


def _group_field(packed: PackedWeight, name: str, values: Tensor, rows: tuple[int, int]) -> _GroupField | None:
    """A field of groups, [rows, groups]; None where it is no number of 8 bits or a float, or its groups are too short."""
    field, k = packed.variant.fields[name], packed.shape[1]
    axes = field.axes if values.dim() else ()
    kind = field.type if field.type in SMALL_FLOATS else KINDS.get(values.dtype, "")
    if not kind or any(axis.words != 1 or axis.over or axis.sections for axis in axes):
        return None
    values = values.view(torch.uint8) if field.type in SMALL_FLOATS and values.dtype.itemsize == 1 else values
    kind = kind if values.dtype.itemsize == 1 or kind not in SMALL_FLOATS else KINDS[values.dtype]
    steps = {axis.dim: axis.by(packed.sizes) for axis in axes}
    count = rows[1] - rows[0]
    if "N*K" in steps:
        columns = math.gcd(k, steps["N*K"])
        first = rows[0] * k // steps["N*K"] * steps["N*K"]       # where a slice of rows begins
        at = torch.arange(*rows, device="cpu").unsqueeze(1) * k + torch.arange(0, k, columns, device="cpu") - first
        values = values[at.div_(steps["N*K"], rounding_mode="floor")]
    else:
        columns = min(steps.get("K", k), k)
        values = values if "K" in steps else values.unsqueeze(-1)
        if "N" in steps:
            at = torch.arange(*rows, device="cpu") // steps["N"] - rows[0] // steps["N"]
            values = values if steps["N"] == 1 else values.index_select(0, at)
        else:
            values = values.expand(count, values.shape[-1])
    if columns >= k:
        return _GroupField(values, 0, kind)
    even = columns & -columns                                    # the largest power of two that divides it
    if even < ROWS:
        return None
    return _GroupField(values if even == columns else values.repeat_interleave(columns // even, 1), even, kind)


def _assemble(packed: PackedWeight, loops: RowLoops, functions: ctypes.CDLL, codes: Tensor, parts: list[dict[str, _GroupField]],
              levels: Tensor | None, factor: Tensor | None, is_alone: bool) -> InterleavedWeight:
    """The copy, with numbers of groups interleaved like rows; if it is alone, these are in huge pages."""
    n, k = packed.shape
    columns, shifts, fields = -(-k // BLOCK) * BLOCK, [], []
    shortest = min((group.columns for group in parts[0].values() if group.columns), default=columns)
    for name in loops.fields:
        own = parts[0][name].columns
        groups = -(-columns // own) if own else 1
        values = torch.cat([part[name].values[:, :groups] for part in parts])
        padded = torch.nn.functional.pad(values, (0, groups - values.shape[1], 0, -n % ROWS))
        interleaved = padded.view(-1, ROWS, groups).transpose(1, 2)
        fields.append(memory.concatenate([interleaved]) if is_alone else interleaved.contiguous())
        shifts.append(own.bit_length() - 1 if own else 62)
    sums = -(-columns // shortest) if "#define HAS_OFFSET" in loops.source else 0
    weight = described_weight(codes, levels, fields, shifts, n, columns)
    return InterleavedWeight(functions, weight, packed.shape, sums, factor, codes, levels, tuple(fields))


def described_weight(codes: Tensor, levels: Tensor | None, fields: Sequence[Tensor], shifts: Sequence[int], n: int,
                     columns: int) -> Weight:
    """The addresses of an interleaved weight's tensors as loops take them."""
    weight = Weight(codes=codes.data_ptr(), levels=None if levels is None else levels.data_ptr(), rows=n, columns=columns)
    for place, (field, shift) in enumerate(zip(fields, shifts, strict=True)):
        weight.fields[place], weight.bytes[place] = field.data_ptr(), field.stride(0) * field.element_size()
        weight.shift[place] = shift
    return weight


def _compile_loops(packed: PackedWeight, loops: RowLoops, groups: list[_GroupField]) -> ctypes.CDLL | None:
    """The compiled loops of a format; None where the compiler fails."""
    capability = _capability()
    span = min((group.columns for group in groups if group.columns), default=0)
    key = (loops.source, capability, span, *(group.kind for group in groups))
    if key not in _libraries:
        try:
            _libraries[key] = _compiled(source_of(loops, [group.kind for group in groups], span), capability)
        except (library.NoCompiler, OSError):                    # other loops come next, and say it
            _libraries[key] = None
    return _libraries[key]


def interleaved_source(packed: PackedWeight) -> str:
    """The C source of the loops for a weight that has a copy."""
    loops, shape = packed.variant.row_loops, packed.shape
    part = packed.cut("N", 0, min(shape[0], math.lcm(packed.step("N"), ROWS)))
    groups = None if loops is None else _group_fields(loops, packed, {**_defaults(packed), **unpack(part)}, (0, part.shape[0]))
    assert loops is not None and groups is not None, "only weights with copies have these loops"
    return source_of(loops, [group.kind for group in groups.values()],
                     min((group.columns for group in groups.values() if group.columns), default=0))


def source_of(loops: RowLoops, kinds: list[str], span: int) -> str:
    """The C source of a format's loops.  kinds: of its numbers of groups.  span: columns of the shortest group; 0 for all."""
    lanes = {"AVX512": 16, "AVX2": 8}.get(_capability(), 4)
    lines = [f"#define LANES {lanes}", f"#define SPAN {span}",
             *(f"#define KIND_{place} {kind}" for place, kind in enumerate(kinds))]
    files = [path.read_text(encoding="utf-8") for path in (VECTORS, GROUPS, LOOPS)]
    return "\n".join([*lines, files[0], loops.source.partition("INLINE")[0], files[1],
                      "INLINE" + loops.source.partition("INLINE")[2], files[2]])


def _compiled(source: str, capability: str) -> ctypes.CDLL:
    """The library of loops; without instructions for bfloat16 where the compiler does not know them."""
    options = (*library.machine_options(capability), *(["-DINTEL"] if is_intel() else []))
    narrow = ("-mavx512bf16", *(("-mamx-tile", "-mamx-bf16") if has_tiles() else ())) if has_bfloat16() else ()
    try:
        functions = library.load(source, (*options, *narrow))
    except library.NoCompiler:
        if not narrow:
            raise
        functions = library.load(source, options)
    functions.interleave.restype, functions.interleave.argtypes = None, [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3
    return functions
