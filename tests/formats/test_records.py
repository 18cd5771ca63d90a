"""Where bits lie, for every storage of every format, against a second reading of the spec and against itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.runtime import FormatError, PackedWeight
from tests.support import oracle
from tests.support.blessing import prove_stored
from tests.support.covering import ALL
from tests.support.formats import Case, cases, is_held, random_fields, random_packed, raw, same_bits, shapes, smallest
from tests.support.slow_reading import Reading

CASES = cases()
# As files have them: a planar storage has no digits and no stored operations.
WRITTEN = [case for case in CASES if case.storage != PLANAR]
# Bytes of base-3 digits are no bits of fields: all 256 are tried instead.
DIGITS = [case for case in WRITTEN if oracle.digit_fields(case.spec)]
BITS = [case for case in CASES if case not in DIGITS]
# A stored operation carries from bit to bit, so setting one bit alone does not move one bit alone.
LINEAR = [case for case in BITS if case not in WRITTEN or not any(
    tensor.stored for s in case.spec.storages if s.name.value == case.storage for tensor in s.tensors)]
ONE_BY_ONE = 2500                                                # bits that are set alone, one after the other


class Bits:
    """All bits of a storage's codes and of its fields as two flat arrays, and which is which by the oracle."""

    def __init__(self, case: Case, shape: tuple[int, int], params: dict[str, int | str]) -> None:
        self.packed = random_packed(case, shape, params=params).decode_streams()
        self.fields = random_fields(case, shape, params=params)
        self.layout = self.packed.layout
        self.tensors = {name: tensor for name, tensor in self.packed.tensors.items() if name in self.layout.coded}
        self.shape = shape
        self.widths = {name: oracle.width_of(case.spec, name, params) for name in self.fields}
        self.stored_at = _starts({name: 8 * t.element_size() for name, t in self.tensors.items()}, self.tensors)
        self.field_at = _starts(self.widths, self.fields)
        storage = next(s for s in case.spec.storages if s.name.value == case.storage)
        sizes = case.module.FORMAT.sizes(params, shape)
        self.extents = {**sizes, "N": shape[0], "K": shape[1]}
        env = oracle.environment(case.spec, *shape, params, sizes)
        self.source = np.full(self.field_at[""], -1)             # for each field bit, the storage bit that holds it
        for name, element, bit, (field, index, low) in oracle.bits(case.spec, storage, env, params):
            stored = self.tensors[name]
            at = self.stored_at[name] + _flat(stored.shape, element) * 8 * stored.element_size() + bit
            to = self.field_at[field] + _flat(self.fields[field].shape, index) * self.widths[field] + low
            assert self.source[to] == -1, f"bit {low} of {field}{list(index)} is stored twice"
            self.source[to] = at
        assert (self.source >= 0).all(), "a field bit is not stored"

    @property
    def size(self) -> int:
        return self.stored_at[""]

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        """Storage bits through the generated unpack."""
        tensors = {name: _from_bits(bits[self.stored_at[name]:], t) for name, t in self.tensors.items()}
        fields = self.layout.fields_of((tensors.get(name) for name in self.layout.coded), self.extents)
        return np.concatenate([_to_bits(fields[name], self.widths[name]) for name in self.fields])

    def pack(self, bits: np.ndarray) -> np.ndarray:
        """Field bits through the generated pack."""
        fields = {}
        for name, field in self.fields.items():
            width, start = self.widths[name], self.field_at[name]
            wide = np.zeros((field.numel(), 8 * field.element_size()), np.uint8)
            wide[:, :width] = bits[start:start + field.numel() * width].reshape(-1, width)
            if field.dtype == torch.int8:                        # signed codes are held with their sign in every bit above
                wide[:, width:] = wide[:, width - 1:width]
            fields[name] = _from_bits(wide.ravel(), field)
        tensors = self.layout.tensors_of(fields, self.extents)
        return np.concatenate([_to_bits(tensors[name], 8 * t.element_size()) for name, t in self.tensors.items()])


def _starts(widths: dict[str, int], tensors: dict[str, Tensor]) -> dict[str, int]:
    """Where each tensor's bits begin in a flat array; '' is the end."""
    starts: dict[str, int] = {}
    at = 0
    for name, tensor in tensors.items():
        starts[name] = at
        at += tensor.numel() * widths[name]
    return {**starts, "": at}


def _flat(shape: torch.Size, index: tuple[int, ...]) -> int:
    at = 0
    for extent, i in zip(shape, index, strict=True):
        at = at * extent + i
    return at


def _from_bits(bits: np.ndarray, like: Tensor) -> Tensor:
    count = like.numel() * like.element_size() * 8
    return torch.from_numpy(np.packbits(bits[:count], bitorder="little")).view(like.dtype).view(like.shape)


def _to_bits(tensor: Tensor, width: int) -> np.ndarray:
    bits = np.unpackbits(raw(tensor).numpy(), bitorder="little").reshape(tensor.numel(), 8 * tensor.element_size())
    return bits[:, :width].ravel()


def _patterns(size: int) -> Iterator[np.ndarray]:
    """Patterns that tell every bit from every other: the digits of its number, and their complements; then some at random."""
    number = np.arange(size)
    for digit in range(max(1, size.bit_length())):
        pattern = (number >> digit & 1).astype(np.uint8)
        yield pattern
        yield 1 - pattern
    generator = np.random.default_rng(0)
    for _ in range(8):
        yield generator.integers(0, 2, size, dtype=np.uint8)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_every_bit_lands_where_the_spec_says(case: Case) -> None:
    """One-hot storage bits and field bits; larger storages by patterns that single out every bit as surely."""
    bits = Bits(case, smallest(case), case.choice)
    target = np.full(bits.size, -1)
    target[bits.source] = np.arange(len(bits.source))
    if bits.size <= ONE_BY_ONE:
        for hot in range(bits.size):
            pattern = np.zeros(bits.size, np.uint8)
            pattern[hot] = 1
            assert bits.unpack(pattern).nonzero()[0].tolist() == ([target[hot]] if target[hot] >= 0 else []), hot
        for hot, at in enumerate(bits.source):
            pattern = np.zeros(len(bits.source), np.uint8)
            pattern[hot] = 1
            assert bits.pack(pattern).nonzero()[0].tolist() == [at], hot
    for pattern in _patterns(bits.size):
        assert (bits.unpack(pattern) == pattern[bits.source]).all()
    for pattern in _patterns(len(bits.source)):
        wanted = np.zeros(bits.size, np.uint8)
        wanted[bits.source] = pattern
        assert (bits.pack(pattern) == wanted).all()


@pytest.mark.parametrize("case", BITS, ids=str)
@pytest.mark.parametrize("seed", range(3 if ALL else 1))
def test_any_bytes_survive(case: Case, seed: int) -> None:
    """pack(unpack(bytes)) == bytes, in all bits that hold a field; padding becomes zero, or what a stored sum makes of it."""
    bits = Bits(case, smallest(case, tiles=2), case.choice)
    pattern = np.random.default_rng(seed).integers(0, 2, bits.size, dtype=np.uint8)
    kept = np.zeros(bits.size, np.uint8)
    kept[bits.source] = pattern[bits.source]
    again = bits.pack(bits.unpack(pattern))
    assert (again[bits.source] == kept[bits.source]).all()
    for name, tensor in bits.tensors.items():
        at = bits.stored_at[name]
        if not bits.layout.tensors[name].adds:
            assert (again[at:at + 8 * tensor.nbytes] == kept[at:at + 8 * tensor.nbytes]).all()
    assert (bits.pack(bits.unpack(again)) == again).all()


@pytest.mark.parametrize("case", DIGITS, ids=str)
def test_every_byte_has_its_digits(case: Case) -> None:
    """All 256 in every byte of digits, beside any other bits: read, and written again, as by exact fractions."""
    packed = random_packed(case, smallest(case, tiles=2), params=case.choice)
    read = Reading(case.spec, case.storage, packed.shape, case.choice, packed.sizes)
    generator = torch.Generator().manual_seed(1)
    first = {name: torch.randint(0, 256, raw(t).shape, generator=generator).to(torch.uint8) for name, t in packed.tensors.items()}
    for step in range(256):
        tensors = {name: (first[name] + step).view(t.dtype).view(t.shape) for name, t in packed.tensors.items()}
        prove_stored(read, case.module.wrap(tensors, shape=packed.shape, storage=case.storage, **case.choice))


@pytest.mark.parametrize("case", DIGITS, ids=str)
def test_what_is_no_digit_is_refused(case: Case) -> None:
    fields = random_fields(case, smallest(case), params=case.choice)
    for name in oracle.digit_fields(case.spec):
        wrong = fields[name].clone()
        wrong[-1, -1] = 3
        with pytest.raises(FormatError, match=f"field '{name}' is stored as digits of base 3, which are 0, 1 or 2, not 3"):
            case.module.pack({**fields, name: wrong}, storage=case.storage, **case.choice)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=12 if ALL else 6, deadline=None, derandomize=True)
@given(data=st.data())
def test_fields_survive(case: Case, data: st.DataObject) -> None:
    """unpack(pack(fields)) == fields over odd, ragged and empty shapes, and wrap takes back what pack makes."""
    rows, columns = (0, 1, 2, 3, 5, 7, 8, 16, 32, 64, 96), (0, 1, 2, 7, 8, 16, 31, 32, 33, 64, 90, 128, 256, 320, 512)
    sizes = {name: data.draw(st.sampled_from([value for value in case.module.FORMAT.params[name]
                                              if is_held(case, {**case.choice, name: value})]))
             for name in case.module.FORMAT.size_axes}
    params = {**case.choice, **sizes}
    columns += tuple(times * size for size in sizes.values() if size > 0 for times in (1, 2))
    shape = data.draw(st.sampled_from(list(shapes(case, rows, columns, params))))
    fields = random_fields(case, shape, data.draw(st.integers(0, 1 << 30)), params)
    packed = case.module.pack(fields, storage=case.storage, **params)
    unpacked = case.module.unpack(packed)
    assert unpacked.keys() == fields.keys()
    assert [name for name, field in fields.items() if not same_bits(unpacked[name], field)] == []
    wrapped = case.module.wrap(packed.tensors, shape=shape, storage=case.storage, **params)
    assert isinstance(wrapped, PackedWeight) and wrapped.shape == shape
    assert all(same_bits(wrapped.tensors[name], tensor) for name, tensor in packed.tensors.items())
