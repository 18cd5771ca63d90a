"""A storage's bits and its fields' bits as flat arrays, with the mapping between them from the spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits
from qdsl.analyze.check.cases import Shape, StorageCase
from qdsl.analyze.check.compare import field_spec_line

Bits = npt.NDArray[np.uint8]
ALONE = 512                                                      # bits of a weight that are also tested one by one


class StoredBits:
    """All bits of a weight's stored tensors and of its fields, as flat arrays of 0 and 1.

    source: int64, for each field bit its stored bit by the spec.  copies: int64 [2, copies], field bits and the places of their
    copies.  Raises AssertionError for a field bit that the spec stores twice or nowhere.
    """

    def __init__(self, case: StorageCase, shape: Shape) -> None:
        self.case = case
        self.fields = case.fields(shape)
        self.layout = case.layout
        self.extents = {**case.format.sizes(case.params, shape), "N": shape[0], "K": shape[1]}
        fields = {name: self.fields.get(name) for name in case.format.variant(case.params).fields
                  if name not in self.layout.where}
        self.tensors = {name: tensor.contiguous() for name, tensor in self.layout.tensors_of(fields, self.extents).items()}
        self.widths = {name: spec_bits.field_bits(case.spec, name, case.params) for name in self.fields}
        sizes = {name: 8 * tensor.element_size() for name, tensor in self.tensors.items()}
        self.stored_at = _first_bits(sizes, self.tensors)
        self.field_at = _first_bits(self.widths, self.fields)
        self.source = np.full(self.field_at[""], -1)
        self._stored = {name: (tuple(tensor.shape), sizes[name]) for name, tensor in self.tensors.items()}
        self._fields = {name: (tuple(field.shape), self.widths[name]) for name, field in self.fields.items()}
        storage = next(declared for declared in case.spec.storages if declared.name.value == case.storage)
        env = spec_bits.size_environment(case.spec, *shape, case.params, case.format.sizes(case.params, shape))
        copies = []
        for stored in spec_bits.stored(case.spec, storage, env, case.params):
            if stored[4] == spec_bits.AGAIN:
                copies.append(self._bit_indices(*stored[:4]))
            elif stored[4] == spec_bits.PLAIN:
                target, place = self._bit_indices(*stored[:4])
                assert self.source[target] == -1, f"bit {stored[3][2]} of {stored[3][0]}{list(stored[3][1])} is stored twice"
                self.source[target] = place
        self.copies = np.array(copies, np.int64).reshape(-1, 2).T
        assert (self.source >= 0).all(), "a field bit is not stored"

    def _bit_indices(self, name: str, element: tuple[int, ...], bit: int, what: spec_bits.Bit) -> tuple[int, int]:
        """The indices of a field bit and of a stored bit."""
        field, index, low = what
        (shape, width), (stored, size) = self._fields[field], self._stored[name]
        target = _flat_index(index, shape) * width + low
        return self.field_at[field] + target, self.stored_at[name] + _flat_index(element, stored) * size + bit

    @property
    def size(self) -> int:
        """The number of stored bits, padding included."""
        return self.stored_at[""]

    def unpack(self, bits: Bits) -> Bits:
        """Field bits that the generated unpack reads from stored bits."""
        tensors = {name: _from_bits(bits[self.stored_at[name]:], tensor) for name, tensor in self.tensors.items()}
        fields = self.layout.fields_of((tensors.get(name) for name in self.layout.coded), self.extents)
        return np.concatenate([_to_bits(fields[name], self.widths[name]) for name in self.fields])

    def pack(self, bits: Bits) -> Bits:
        """Stored bits that the generated pack writes of field bits."""
        fields = {}
        for name, field in self.fields.items():
            width, start = self.widths[name], self.field_at[name]
            wide = np.zeros((field.numel(), 8 * field.element_size()), np.uint8)
            wide[:, :width] = bits[start:start + field.numel() * width].reshape(-1, width)
            if field.dtype == torch.int8:                        # signed codes have their sign in every bit above
                wide[:, width:] = wide[:, width - 1:width]
            fields[name] = _from_bits(wide.ravel(), field)
        tensors = self.layout.tensors_of(fields, self.extents)
        return np.concatenate([_to_bits(tensors[name], 8 * tensor.element_size()) for name, tensor in self.tensors.items()])

    def expected_stored(self, bits: Bits) -> Bits:
        """Stored bits of field bits, as the spec says; padding is zero."""
        stored = np.zeros(self.size, np.uint8)
        stored[self.source] = bits
        stored[self.copies[1]] = bits[self.copies[0]]
        return stored

    def unpack_problem(self) -> str:
        """A description of field bits that unpack reads at the wrong stored bit; '' if none."""
        wrong = np.zeros(len(self.source), np.bool_)
        for pattern in bit_patterns(self.size):
            wrong |= self.unpack(pattern) != pattern[self.source]
        return f"unpack reads {self._describe_wrong_bits(wrong)}" if wrong.any() else ""

    def pack_problem(self) -> str:
        """A description of stored bits that pack writes differently from the spec, padding included; '' if none."""
        wrong = np.zeros(self.size, np.bool_)
        for pattern in bit_patterns(len(self.source)):
            wrong |= self.pack(pattern) != self.expected_stored(pattern)
        if not wrong.any():
            return ""
        if wrong[self.source].any():
            return f"pack writes {self._describe_wrong_bits(wrong[self.source])}"
        return f"pack sets {int(wrong.sum())} of the bits that are padding; first: {self._stored_bit_name(int(wrong.argmax()))}"

    def bytes_problem(self) -> str:
        """Stored bits that unpack and pack change, if a stored operation changes several bits at once; '' if none."""
        pattern = next(_random(self.size))
        again = self.pack(self.unpack(pattern))
        wrong = again[self.source] != pattern[self.source]
        return f"pack(unpack(bytes)) changes {self._describe_wrong_bits(wrong)}" if wrong.any() else ""

    def _describe_wrong_bits(self, wrong: npt.NDArray[np.bool_]) -> str:
        """How many field bits are wrong, the first one, its place, and the line of the spec."""
        bit = int(wrong.argmax())
        field = max((name for name in self.fields if self.field_at[name] <= bit), key=lambda name: self.field_at[name])
        element, low = divmod(bit - self.field_at[field], self.widths[field])
        index = [int(i) for i in np.unravel_index(element, tuple(self.fields[field].shape))]
        place = self._stored_bit_name(int(self.source[bit]))
        line = field_spec_line(self.case.spec, self.case.storage, place.split("[")[0].rpartition(" ")[2], field)
        return (f"{int(wrong.sum())} of {wrong.size} field bits wrongly; first: bit {low} of {field}{index}, stored in {place}; "
                f"{line}")

    def _stored_bit_name(self, bit: int) -> str:
        """A stored bit as text: 'bit 4 of codes[0, 1]'."""
        name = max((name for name in self.tensors if self.stored_at[name] <= bit), key=lambda name: self.stored_at[name])
        tensor = self.tensors[name]
        element, low = divmod(bit - self.stored_at[name], 8 * tensor.element_size())
        return f"bit {low} of {name}{[int(i) for i in np.unravel_index(element, tuple(tensor.shape))]}"


def bit_patterns(size: int) -> Iterator[Bits]:
    """Bit patterns that distinguish every bit from every other: digits of its index, their complements, and random patterns.

    If there are few bits, each is also set alone.
    """
    number = np.arange(size)
    for digit in range(max(1, size.bit_length())):
        pattern = (number >> digit & 1).astype(np.uint8)
        yield pattern
        yield 1 - pattern
    yield from _random(size)
    if size <= ALONE:
        yield from np.eye(size, dtype=np.uint8)


def _random(size: int) -> Iterator[Bits]:
    generator = np.random.default_rng(0)
    for _ in range(8):
        yield generator.integers(0, 2, size, dtype=np.uint8)


def _flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The position of an element in order.  Raises ValueError outside of the shape."""
    position = 0
    for i, extent in zip(index, shape, strict=True):
        if not 0 <= i < extent:
            raise ValueError(f"{list(index)} in {list(shape)}")
        position = position * extent + i
    return position


def _first_bits(widths: Mapping[str, int], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The first bit of each tensor in a flat array; '' is the end."""
    starts: dict[str, int] = {}
    start = 0
    for name, tensor in tensors.items():
        starts[name] = start
        start += tensor.numel() * widths[name]
    return {**starts, "": start}


def _from_bits(bits: Bits, like: Tensor) -> Tensor:
    count = like.numel() * like.element_size() * 8
    return torch.from_numpy(np.packbits(bits[:count], bitorder="little")).view(like.dtype).view(like.shape)


def _to_bits(tensor: Tensor, width: int) -> Bits:
    raw = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor).flatten().view(torch.uint8)
    bits = np.unpackbits(raw.numpy(), bitorder="little").reshape(tensor.numel(), 8 * tensor.element_size())
    return bits[:, :width].ravel()
