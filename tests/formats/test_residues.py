"""Changes of storage at every K that a layout tells apart: K modulo the columns of its words, records and groups."""

from __future__ import annotations

import math
import os

import pytest
import torch

from qdsl.runtime import FormatError, PackedWeight
from tests.formats.test_convert import in_order, pairs
from tests.support.formats import Case, canonical, fixed_shape, random_packed, same_bits, shapes, smallest

CLASSES = 1 << 20 if os.environ.get("QDSL_TEST_ALL") else 4      # of K, for each pair of storages


def period(case: Case, k: int) -> int:
    """The columns after which a layout begins again."""
    format = case.module.FORMAT
    sizes = format.sizes(format.complete(case.choice), (1, k))
    layout = format.variant(case.choice).storages[case.storage].decoded
    return math.lcm(*(term.by(sizes) for stored in layout.tensors.values() for axis in stored.axes for term in axis.terms
                      if "K" in term.dim))


def residues(case: Case, storage: str) -> list[tuple[int, int]]:
    """A shape of each class of K that both storages can hold, with few rows; some of them where there are many."""
    both = case, Case(case.path, storage, case.params)
    n, k = (math.lcm(*sizes) for sizes in zip(*map(smallest, both), strict=True))
    last = k + math.lcm(*(period(own, k) for own in both))
    columns = [fixed_shape(case, (n, k))[1]] if case.spec.fixed.get("K") else range(k, last + 1, k)
    legal = [shape for shape in ((n, k) for k in columns) if all(list(shapes(own, *zip(shape))) for own in both)]
    step = max(1, -(-len(legal) // CLASSES))
    return [*legal[1::step], legal[0]]                           # the first one is whole records of most layouts


def converted(packed: PackedWeight, storage: str) -> PackedWeight | None:
    try:
        return packed.format.convert(packed, storage)
    except FormatError:
        return None


@pytest.mark.parametrize(("case", "storage"), [(case, storage) for case, storage in pairs() if case.storage < storage], ids=str)
def test_weights_are_the_same_at_every_residue_of_k(case: Case, storage: str) -> None:
    """None is left on meta, and the way back gives the same tensors."""
    for shape in residues(case, storage):
        packed = in_order(random_packed(case, shape))
        if (other := converted(packed, storage)) is None:        # it has fewer fields: from it to this one, then
            packed = in_order(random_packed(Case(case.path, storage, case.params), shape))
            other = packed.format.convert(packed, case.storage)
        assert {name: tensor.device.type for name, tensor in other.tensors.items()} == dict.fromkeys(other.tensors, "cpu"), shape
        wanted = packed.format.dequantize(packed, torch.float32)
        assert same_bits(packed.format.dequantize(other, torch.float32), wanted), shape
        back, before = packed.format.convert(other, packed.storage), canonical(packed)
        assert {name for name in back.tensors if not same_bits(back.tensors[name], before[name])} == set(), shape
