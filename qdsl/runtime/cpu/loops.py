"""Compiled loops of packed weights on a CPU: products with few rows of x, and decoded rows, on as many threads as torch has."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdsl.core.shapes import extents
from qdsl.host import library
from qdsl.host.c_functions import address
from qdsl.runtime.cpu import threads
from qdsl.runtime.cpu.positions import Unprintable
from qdsl.runtime.cpu.printed import TYPES, DecodeReads
from qdsl.runtime.cpu.source import DECODE, Source, source_of
from qdsl.runtime.gpu.launch import read_tensors, size_arguments
from qdsl.runtime.gpu.tiles import grid_axes
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.settings import EnvironmentSetting

COMPILE = EnvironmentSetting(library.SETTING, ("auto", "always", "never"))
FEW = 8                                                          # rows of x for which one loop is faster than tiles
TOGETHER = 4                                                     # rows that share a pass over the weight; one or two do not
SMALL = 1 << 16                                                  # weights below which torch's own calls take less than compiling
TILE = 1 << 18                                                   # weights that a tile has: they fit a cache
OPTIONS = ("-O3", "-mprefer-vector-width=512")                  # scalars in loops become vectors
SHARE = 1 << 16                                                  # weights that are worth a thread of their own

_loops: dict[tuple[Any, ...], Loop | None] = {}
_fits: dict[tuple[Loop, tuple[int, int]], LoopFit | None] = {}   # by loop and shape; None where the loop does not fit


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A compiled loop, and its source.  arrange: prepares a row of x; None if the loop reads x unchanged."""

    source: Source
    run: Any
    arrange: Any


@dataclass(frozen=True, slots=True)
class LoopFit:
    """What a loop needs of a weight of a shape.  units: of a row.  stored: dtype and elements of each tensor that it reads."""

    units: int
    stored: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BoundLoop:
    """A loop with what it reads of a weight: the units of a row, the tensors, and their addresses."""

    loop: Loop
    units: int
    tensors: tuple[Tensor | None, ...]
    places: ctypes.Array[ctypes.c_void_p]


def row_decoder(packed: PackedWeight) -> Callable[[Tensor, int], None] | None:
    """A function of (out, start) that decodes the rows from `start` on into out, float32; None where the weight has no loop.

    start is a multiple of the rows of a step.
    """
    bound = find_loop(packed, DECODE)
    if bound is None:
        return None
    weight, sums, run = describe_product(packed, bound), packed.layout.kernels.sums, threads.functions().rows

    def rows(out: Tensor, start: int) -> None:
        first = address(out, "float32", out.shape[0] * packed.shape[1], True) - 4 * start * packed.shape[1]
        stop = start + out.shape[0]
        run(ctypes.byref(weight), bound.places, first, start // sums, stop // sums, torch.get_num_threads())

    return rows


def decoded_tiles(packed: PackedWeight) -> Iterator[tuple[int, Tensor]] | None:
    """The first row of every tile and its weights in float32, in memory that the next tile takes; None without a loop."""
    write, bound = row_decoder(packed), find_loop(packed, DECODE)
    if write is None or bound is None:
        return None
    n, k = packed.shape
    step = bound.loop.source.step * packed.layout.kernels.sums         # of which the first row is a multiple
    rows = max(1, TILE // k // step) * step

    def tiles() -> Iterator[tuple[int, Tensor]]:
        tile = torch.empty(min(rows, n), k, dtype=torch.float32, device="cpu")
        for start in range(0, n, rows):
            write(tile[:min(rows, n - start)], start)
            yield start, tile[:min(rows, n - start)]

    return tiles()


def has_vectors(packed: PackedWeight) -> bool:
    """Whether a loop decodes many weights at a time."""
    bound = find_loop(packed, DECODE)
    return bound is not None and bound.loop.source.has_vectors


def are_compiled(packed: PackedWeight) -> bool:
    """Whether the setting wants loops for a weight of this size.  Raises FormatError for an unknown QDSL_CPU_COMPILE."""
    choice = COMPILE.value(library.setting())
    return choice == "always" or (choice == "auto" and packed.shape[0] * packed.shape[1] >= SMALL)


def find_loop(packed: PackedWeight, rows: int) -> BoundLoop | None:
    """The loop that takes this weight, for so many rows of x at once; None where there is none.

    Raises UnfitArray for tensors that are shorter than the weight's shape says, or on another device.
    """
    if not packed.has_kernels or not all(tensor.is_contiguous() for tensor in packed.tensors.values()):
        return None
    tensors = read_tensors(packed)
    key = (packed.format, packed.storage, *packed.params.values(), *packed.sizes.values(),
           *(tensor is not None and tensor.dtype for tensor in tensors), rows, _capability())
    if key not in _loops:
        _loops[key] = _new_loop(packed, rows)
    loop = _loops[key]
    if loop is None:
        return None
    if (of := (loop, packed.shape)) not in _fits:
        _fits[of] = _fit_shape(packed, loop, tensors)
    fit = _fits[of]
    if fit is None:
        return None
    places = (ctypes.c_void_p * len(tensors))(*(0 if tensor is None else address(tensor, *stored)
                                                for tensor, stored in zip(tensors, fit.stored, strict=True)))
    return BoundLoop(loop, fit.units, tensors, places)


def _fit_shape(packed: PackedWeight, loop: Loop, tensors: Sequence[Tensor | None]) -> LoopFit | None:
    """What the loop needs of weights like this one; None where its blocks do not divide the shape."""
    tiles, units = grid_axes(packed)
    if packed.shape[1] % loop.source.divisor or packed.shape[0] != tiles * packed.layout.kernels.sums:
        return None
    coded = [packed.layout.tensors[name] for name in packed.layout.coded]
    counts = [math.prod(extents(stored.axes, *packed.shape, packed.sizes) or ()) for stored in coded]
    counts += [table.numel() for table in tensors[len(counts):] if table is not None]
    dtypes = ["" if tensor is None else str(tensor.dtype)[6:] for tensor in tensors]
    return LoopFit(units, tuple(zip(dtypes, counts, strict=True)))


def _capability() -> str:
    """Which vector instructions torch uses: 'AVX512', 'AVX2' or another word."""
    return torch.backends.cpu.get_cpu_capability()


def source_for(packed: PackedWeight, rows: int) -> Source:
    """The C source of the loop for a weight's storage.  Raises Unprintable for a decode function that has no form in C."""
    tensors, kernels = read_tensors(packed), packed.layout.kernels
    dtypes = tuple(None if tensor is None else str(tensor.dtype)[6:] for tensor in tensors)
    if any(dtype is not None and dtype not in TYPES for dtype in dtypes):
        raise Unprintable("a dtype that has no form in C")
    width = {"AVX512": 16, "AVX2": 8}.get(_capability(), 4)
    reads = DecodeReads(kernels.decode, dtypes, tuple(table.numbers for table in kernels.tables), size_arguments(packed),
                        kernels.sums, kernels.last == "n")
    return source_of(reads, rows, width)


def _new_loop(packed: PackedWeight, rows: int) -> Loop | None:
    """A compiled loop; None for a decode function that has no form in C, and, with a warning, where the compiler fails."""
    try:
        source = source_for(packed, rows)
        threads.functions()                                      # which call all loops
        functions = library.load(source.text, (*library.machine_options(_capability()), *OPTIONS))
    except Unprintable:
        return None
    except (library.NoCompiler, OSError) as error:
        warnings.warn(f"products on this CPU are not compiled: {error}", RuntimeWarning, stacklevel=2)
        return None
    return Loop(source, functions.run, functions.arrange if source.arranged else None)


def describe_product(packed: PackedWeight, bound: BoundLoop, together: int = 1) -> threads.Product:
    """The loop and the sizes of a weight as product.c takes them, but for types and tables.  together: rows of x at once."""
    loop, (n, k) = bound.loop, packed.shape
    run, arrange = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (loop.run, loop.arrange))
    return threads.Product(run=run, arrange=arrange, n=n, k=k, tiles=n // packed.layout.kernels.sums, units=bound.units,
                           step=loop.source.step, parts=threads.PARTS, share=SHARE, together=together,
                           arranged=k * (loop.source.arranged or 1), tensors=len(packed.layout.coded))
