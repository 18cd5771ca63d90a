"""The literal `PROGRAM` of generated modules says what their printed unpack and pack do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import qdsl.generated
from qdsl.core import program
from qdsl.core.numbers import number
from qdsl.core.shapes import Axis
from qdsl.core.slices import Piece, place
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.format import Format

Bits = npt.NDArray[np.uint8]
MODULES = program.modules(qdsl.generated.__path__)
SHAPES = ((4, 256), (16, 512), (64, 512), (256, 1024))           # the first that a storage supports


def weights(format: Format) -> Iterator[PackedWeight]:
    """A weight of every storage and variant, its tensors of random bytes."""
    draw = np.random.default_rng(54)
    for key, variant in format.variants.items():
        for storage, layout in variant.storages.items():
            if not any(stored.slices for stored in layout.tensors.values()):
                continue
            for shape in SHAPES:
                try:
                    packed = format.empty(shape, storage, "cpu", list(layout.tensors), **dict(zip(format.by, key, strict=True)))
                except FormatError:
                    continue
                for tensor in packed.tensors.values():
                    raw = tensor.view(-1).view(torch.uint8)
                    raw.copy_(torch.from_numpy(draw.integers(0, 256, raw.numel(), np.uint8)))
                yield packed
                break


def bits(tensor: Tensor) -> Bits:
    """The bits of a tensor's elements, low ones first: [*shape, bits]."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return np.unpackbits(raw, bitorder="little").reshape(*tensor.shape, 8 * tensor.element_size())


def read_bits(piece: Piece, tensor: Tensor, width: int, axes: Sequence[Axis], packed: PackedWeight) -> Bits | None:
    """The bits of a field that its piece places in a tensor; None if the last record is partial."""
    size = 8 * tensor.element_size()
    extents = [axis.rounded(*packed.shape, packed.sizes) for axis in axes]
    placed = place(piece, tensor.shape, size, extents)
    if placed is None:
        return None
    at = np.full((1,) * len(extents) + (width,), placed.start) + np.arange(width)
    for axis, digits in enumerate(placed.coordinates):
        steps = np.zeros(1, np.int64)
        for extent, step in digits:                              # fastest first
            steps = (np.arange(extent)[:, None] * step + steps).ravel()
        at = at + steps.reshape([-1 if other == axis else 1 for other in range(len(extents))] + [1])
    return bits(tensor).ravel()[at]


def compared(packed: PackedWeight, tensors: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> int:
    """The number of pieces whose bits in `tensors` are those of `fields`; fails for others."""
    count = 0
    for name, stored in packed.layout.tensors.items():
        for piece in stored.slices if name in tensors else ():
            field = packed.variant.fields[piece.field]
            kind = number(str(packed.params.get(field.type, field.type)))
            width = piece.width or (32 if kind is None else kind.bits)
            tensor = tensors[name] - stored.adds if stored.adds else tensors[name]
            expected = bits(fields[piece.field])[..., piece.lo:piece.lo + width]
            inside = read_bits(piece, tensor, width, field.axes, packed)
            if inside is not None:
                cut = inside[tuple(map(slice, expected.shape))]  # records may be padded
                assert np.array_equal(cut, expected), f"{packed.format.name}.{packed.storage} {name}: {piece}"
                count += 1
    return count


@pytest.mark.parametrize("name", MODULES)
def test_literals_say_what_unpack_and_pack_do(name: str) -> None:
    format = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    for packed in weights(format):
        tensors = dict(packed.tensors)
        fields = packed.layout.fields_of([tensors[name] for name in packed.layout.coded], packed.extents)
        wanted = {field: fields.get(field) for field in packed.variant.fields if field not in packed.layout.where}
        pieces = sum(len(stored.slices) for stored in packed.layout.tensors.values())
        assert compared(packed, tensors, fields) == pieces
        assert compared(packed, packed.layout.tensors_of(wanted, packed.extents), fields) == pieces


@pytest.mark.parametrize("name", MODULES)
def test_readers_take_the_program_from_the_text(name: str) -> None:
    """`ast.literal_eval` gives what the module has."""
    assert program.read(MODULES[name]) == importlib.import_module(f"qdsl.generated.{name}").PROGRAM


def test_readers_of_programs_do_not_import_torch() -> None:
    code = "import sys; from qdsl.checkpoint.detect import descriptions as d; d.descriptions(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
