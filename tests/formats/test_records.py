"""Where bits lie, for every storage of every format, against a second reading of the spec and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qdsl
from qdsl.analyze.check import cases as check_cases
from qdsl.analyze.check import spec_bits as oracle
from qdsl.analyze.check.stored_bits import StoredBits, bit_patterns
from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.runtime import FormatError, PackedWeight
from tests.support.blessing import prove_stored
from tests.support.covering import ALL, quarter_of
from tests.support.formats import Case, cases, is_held, random_fields, random_packed, raw, same_bits, shapes, smallest, spec
from tests.support.slow_reading import Reading

CASES = cases()
# As files have them: a planar storage has no digits and no stored operations.
WRITTEN = [case for case in CASES if case.storage != PLANAR]
# Bytes of base-3 digits are no bits of fields: all 256 are tried instead.
DIGITS = [case for case in WRITTEN if oracle.digit_fields(case.spec)]
# Codes that stand for rows hold no field's bits: test_row_codes.py.
BITS = [case for case in CASES if case not in DIGITS and not case.has_row_codes]
# A stored operation carries from bit to bit, so setting one bit alone does not move one bit alone.
LINEAR = [case for case in BITS if case not in WRITTEN or not any(
    tensor.stored for s in case.spec.storages if s.name.value == case.storage for tensor in s.tensors)]
ONE_BY_ONE = 2500                                                # bits that are set alone, one after the other


def stored_bits(case: Case, shape: tuple[int, int]) -> StoredBits:
    return StoredBits(check_cases.StorageCase(case.spec, case.module.FORMAT, case.storage, case.choice), shape)


@pytest.mark.parametrize("case", quarter_of(LINEAR), ids=str)
def test_every_bit_lands_where_the_spec_says(case: Case) -> None:
    """One-hot storage bits and field bits; larger storages by patterns that single out every bit as surely."""
    bits = stored_bits(case, smallest(case))
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
            copies = bits.copies[1][bits.copies[0] == hot].tolist()
            assert bits.pack(pattern).nonzero()[0].tolist() == sorted([at, *copies]), hot
    for pattern in bit_patterns(bits.size):
        assert (bits.unpack(pattern) == pattern[bits.source]).all()
    for pattern in bit_patterns(len(bits.source)):
        assert (bits.pack(pattern) == bits.expected_stored(pattern)).all()


@pytest.mark.parametrize("case", quarter_of(BITS[1:]), ids=str)
@pytest.mark.parametrize("seed", range(3 if ALL else 1))
def test_any_bytes_survive(case: Case, seed: int) -> None:
    """pack(unpack(bytes)) == bytes, in all bits that hold a field.

    Padding becomes zero, or what a stored sum makes of it, and copies are those of the bits that are read.
    """
    bits = stored_bits(case, smallest(case, tiles=2))
    pattern = np.random.default_rng(seed).integers(0, 2, bits.size, dtype=np.uint8)
    kept = bits.expected_stored(pattern[bits.source])
    again = bits.pack(bits.unpack(pattern))
    assert (again[bits.source] == kept[bits.source]).all()
    for name, tensor in bits.tensors.items():
        at = bits.stored_at[name]
        if not bits.layout.tensors[name].adds:
            assert (again[at:at + 8 * tensor.nbytes] == kept[at:at + 8 * tensor.nbytes]).all()
    assert (bits.pack(bits.unpack(again)) == again).all()


BETWEEN_BYTES = """
format: between_bytes
weight: [N, K]
fields:
  s: {kind}[n, k // 4]
  q: u3[n, k]
decode: s * q
storage:
  plain:
    codes:
      tensor: i32[n<N/2, t<K/4 word]
      record: |
        pad:4
        r<2 i<4: q[2*n + r, 4*t + i]
        r<2: again(s[2*n + r, t])
        r<2: s[2*n + r, t]
        r<2: again(s[2*n + r, t])
        pad:{padding}
"""


@pytest.mark.parametrize("kind", ["f16", "bf16", "u6"])
def test_numbers_between_bytes_and_their_copies(tmp_path: Path, kind: str) -> None:
    """The sign of a float stays in its place, and every copy is written."""
    path = tmp_path / "between_bytes.yaml"
    path.write_text(BETWEEN_BYTES.format(kind=kind, padding=32 if kind == "u6" else 4))
    bits = StoredBits(check_cases.StorageCase(spec(path), qdsl.load(path).FORMAT, "plain", {}), (4, 16))
    assert bits.copies.shape[1] == 2 * 16 * bits.widths["s"] and not bits.unpack_problem() and not bits.pack_problem()


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


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
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
