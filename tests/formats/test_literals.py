"""The literal `PROGRAM` of generated modules says what their printed unpack and pack do."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import qdsl.generated
from qdsl.core import program
from qdsl.core.numbers import find_number
from qdsl.core.shapes import axis, extents
from qdsl.core.slices import Digit, FieldPiece
from qdsl.core.stored import Stored, element_dtype
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.format import Format

Bits = npt.NDArray[Any]
MODULES = program.program_files(qdsl.generated.__path__)
MOST = 1 << 16                                                   # codes to compare
SHAPES = ((4, 256), (16, 512), (64, 512), (256, 1024))           # the first that a storage supports


def weights(format: Format) -> Iterator[tuple[PackedWeight, dict[str, Tensor]]]:
    """A weight of every storage and variant, and its tensors, of random bytes; instead of streams the tensors that they hold."""
    for key, variant in format.variants.items():
        for storage, layout in variant.storages.items():
            optional = [name for name, stored in layout.tensors.items() if stored.optional]
            reason: FormatError | None = None
            for shape in (*SHAPES, tuple(layout.fixed.get(dim, 512) for dim in "NK")):
                try:
                    packed = format.empty(shape, storage, "cpu", optional, **dict(zip(format.by, key, strict=True)))
                except FormatError as error:
                    reason = error
                    continue
                for name in layout.decoded.coded if layout.streams else ():
                    stored = layout.decoded.tensors[name]
                    packed.tensors[name] = torch.empty(extents(stored.axes, *shape, packed.sizes) or (),
                                                       dtype=getattr(torch, element_dtype(stored.dtype)))
                yield packed, {name: random(packed.tensors[name]) for name in layout.decoded.coded}
                break
            else:
                raise AssertionError(f"{format.name}.{storage}: {reason}")


def some_fields(packed: PackedWeight) -> dict[str, Tensor]:
    """The fields of random bytes in the variant's first storage."""
    first, layout = next(iter(packed.variant.storages.items()))
    other = packed.format.empty(packed.shape, first, "cpu", **packed.params)
    return layout.fields_of([random(other.tensors[name]) for name in layout.coded], packed.extents)


def random(tensor: Tensor) -> Tensor:
    """A tensor of random bytes like another one."""
    draw = np.random.default_rng(54).integers(0, 256, tensor.nbytes, np.uint8)
    return torch.from_numpy(draw).view(tensor.dtype).view(tensor.shape)


def bits(tensor: Tensor) -> Bits:
    """The bits of a tensor's elements, low ones first: [*shape, bits]."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return np.unpackbits(raw, bitorder="little").reshape(*tensor.shape, 8 * tensor.element_size())


def bit_numbers(stored: Stored, piece: FieldPiece, tensor: Tensor, packed: PackedWeight) -> Bits:
    """The numbers of a tensor's bits [*axes, bits of a record] as the digits of a piece count them: of its section, for one."""
    size = 8 * tensor.element_size()
    numbers = np.arange(tensor.numel() * size).reshape(*tensor.shape, size)
    if (section := piece.further.get("section")) is not None:
        shapes = [extents(axes, *packed.shape, packed.sizes) for axes in stored.axes[-1].sections]
        first = sum(math.prod(shape) for shape in shapes[:section])
        inside = numbers[..., first:first + math.prod(shapes[section]), :]
        numbers = inside.reshape(*tensor.shape[:-1], *shapes[section], size)
    if (plane := piece.further.get("plane")) is not None:
        numbers = numbers.take(plane[1], plane[0])
    if stored.words:
        axis, count = stored.words
        missing = [(0, -numbers.shape[axis] % count if place == axis else 0) for place in range(numbers.ndim)]
        numbers = np.pad(numbers, missing)                       # the last record may be cut
        parts = numbers.reshape(*numbers.shape[:axis], -1, count, *numbers.shape[axis + 1:])
        numbers = np.moveaxis(parts, axis + 1, -2)
        numbers = numbers.reshape(*numbers.shape[:-2], count * size)
    return numbers


def number_of(text: int | str, packed: PackedWeight) -> int:
    """An extent or a step: a number, or an axis."""
    return text if isinstance(text, int) else axis(text).rounded(*packed.shape, packed.sizes)


def steps(digits: Sequence[Digit], index: Bits, whole: int, strides: Sequence[int], packed: PackedWeight) -> Bits:
    """The bit at which an element begins, by its index along one coordinate."""
    numbers = [number_of(digit.extent, packed) for digit in digits]
    missing = -(-whole // max(1, math.prod(extent or 1 for extent in numbers)))
    at = np.zeros_like(index)
    for place, (digit, extent) in enumerate(zip(digits, numbers, strict=True)):
        value = index if place == len(digits) - 1 else index % (extent or missing)
        index = index // (extent or missing)
        at += value * number_of(digit.step, packed) * (1 if digit.axis is None else strides[digit.axis])
    return at


def compare(piece: FieldPiece, stored: Stored, tensor: Tensor, codes: Tensor, width: int, packed: PackedWeight) -> int:
    """The number of bits that a piece places; fails unless they are those of the codes."""
    numbers = bit_numbers(stored, piece, tensor, packed)
    strides = [numbers.shape[-1] * math.prod(numbers.shape[axis + 1:-1]) for axis in range(numbers.ndim - 1)]
    codes = codes.reshape(-1) if len(piece.coordinates) < codes.dim() else codes
    indices = [np.arange(extent) for extent in codes.shape]
    since, whole = piece.further.get("part", (0, 0))
    if whole:
        several = math.prod(digit.extent for digit in piece.coordinates[-1] if isinstance(digit.extent, int) and digit.extent)
        indices[-1] = indices[-1][(indices[-1] % whole >= since) & (indices[-1] % whole < since + several)]
        codes = codes[..., indices[-1]]
        indices[-1] = indices[-1] // whole * several + indices[-1] % whole - since
    count = codes.numel()
    if count > MOST:                                             # of a large table, some entries
        indices[0] = indices[0][::count // MOST]
        codes = codes[indices[0]]
    at = np.full((1,) * len(indices), piece.start)
    for digits, index, extent in zip(piece.coordinates, np.ix_(*indices), codes.shape, strict=True):
        at = at + steps(digits, index, extent, strides, packed)
    raw = bits(tensor).ravel()
    if "places" in piece.further:
        first, coordinates = piece.further["places"]
        place = np.full_like(at, first)
        for digits, index in zip(coordinates, np.ix_(*indices), strict=True):
            place = place + steps([Digit(*digit) for digit in digits], index, 1, strides, packed)
        bytes_ = np.packbits(raw[numbers.ravel()[at[..., None] + np.arange(8)]], bitorder="little", axis=-1)[..., 0].astype(int)
        assert np.array_equal((bytes_ * 3 ** place & 255) * 3 >> 8, codes.numpy())
        return count * width
    flips, adds, full = piece.further.get("flips", 0), piece.further.get("adds", 0), piece.width or width
    codes = codes + adds & (1 << width) - 1 if adds else codes ^ flips if flips else codes
    expected = bits(codes)[..., piece.lo:piece.lo + full]
    assert np.array_equal(raw[numbers.ravel()[at[..., None] + np.arange(full)]], expected), piece
    return count * full


def compared(packed: PackedWeight, tensors: Mapping[str, Tensor], fields: Mapping[str, Tensor], copies: bool) -> set[str]:
    """The fields all of whose bits in `tensors` are those that the program says; fails for others.  copies: also of copies."""
    loops, placed, wanted = packed.variant.row_loops, Counter[str](), Counter[str]()
    for name, stored in packed.layout.decoded.tensors.items():
        tensor = tensors.get(name)
        for piece in (*stored.slices, *stored.row_codes) if tensor is not None else ():
            if piece.further.get("copy") and not copies:
                continue
            plain = tensor - stored.adds if stored.adds else tensor ^ stored.flips if stored.flips else tensor
            if piece in stored.row_codes:
                assert loops is not None and loops.row_codes is not None
                codes, width = loops.row_codes.codes(**fields), loops.bits
                names = [*loops.row_codes.rows]
            else:
                field = packed.variant.fields[piece.field]
                kind = find_number(str(packed.params.get(field.type, field.type)))
                codes, width = fields[piece.field], 32 if kind is None else kind.bits
                names = [piece.field]
            count = compare(piece, stored, plain, codes, width, packed)
            for name in names:
                placed[name] += count
                wanted[name] = codes.numel() * width
    return {name for name in wanted if placed[name] >= wanted[name]}     # some bits have copies


@pytest.mark.parametrize("name", MODULES)
def test_literals_say_what_unpack_and_pack_do(name: str) -> None:
    """Every tensor has positions, but an order of columns, the stored shape, and those of an entropy code."""
    format = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    for packed, tensors in weights(format):
        layout = packed.layout.decoded
        assert all(layout.tensors[name].slices or layout.tensors[name].row_codes for name in layout.coded), packed.storage
        if any(stored.row_codes for stored in layout.tensors.values()):
            tensors = layout.tensors_of(some_fields(packed), packed.extents)          # some codes stand for no fields
        fields = layout.fields_of([tensors[name] for name in layout.coded], packed.extents)
        wanted = {field: fields.get(field) for field in packed.variant.fields if field not in layout.where}
        assert compared(packed, tensors, fields, copies=False) == {*fields}
        assert compared(packed, layout.tensors_of(wanted, packed.extents), fields, copies=True) == {*fields}


def replace_positions(stored: Stored) -> Stored:
    """The description of a tensor without positions of its bits."""
    return Stored(stored.dtype, *(axis.text for axis in stored.axes), aliases=stored.aliases, optional=stored.optional,
                  words=stored.words, adds=stored.adds, flips=stored.flips, padding=stored.padding,
                  seen=[axis.text for axis in stored.seen], within=stored.within)


@pytest.mark.parametrize("name", MODULES)
def test_readers_take_the_program_from_the_text(name: str) -> None:
    """Readers of files take the same without positions of bits."""
    data = importlib.import_module(f"qdsl.generated.{name}").PROGRAM
    assert program.read_program(MODULES[name]) == data
    parts = program.read_program(MODULES[name], in_files=True), data
    short, whole = (program.program_description(part, in_files=True) for part in parts)
    assert not any(stored.slices for storages in short.variants.values() for tensors in storages.values()
                   for stored in tensors.values())
    without = {key: {storage: {name: replace_positions(stored) for name, stored in tensors.items()}
                     for storage, tensors in storages.items()} for key, storages in whole.variants.items()}
    assert short == replace(whole, variants=without)


def test_readers_of_programs_do_not_import_torch() -> None:
    code = "import sys; from qdsl.checkpoint.detect import descriptions as d; d.descriptions(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
