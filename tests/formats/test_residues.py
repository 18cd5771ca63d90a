"""Changes of storage at every shape that a layout tells apart: N and K modulo its words, records, blocks and groups."""

from __future__ import annotations

import math
import os

import pytest
import torch

from qdsl.runtime import FormatError, PackedWeight
from tests.formats.test_convert import in_order, pairs
from tests.support.formats import Case, canonical, fixed_shape, random_packed, same_bits, shapes, smallest

CLASSES = 1 << 20 if os.environ.get("QDSL_TEST_ALL") else 5      # of each dim, for each pair of storages


def period(case: Case, dim: str, shape: tuple[int, int]) -> int:
    """The rows or columns after which a layout begins again."""
    format = case.module.FORMAT
    sizes = format.sizes(format.complete(case.choice), shape)
    layout = format.variant(case.choice).storages[case.storage].decoded
    return math.lcm(*(term.by(sizes) for stored in layout.tensors.values() for axis in stored.axes for term in axis.terms
                      if dim in term.dim))


def residues(case: Case, storage: str, dim: str) -> list[tuple[int, int]]:
    """The smallest shape that both storages can hold, and one of each class of N or K; some of them where there are many."""
    both = case, Case(case.path, storage, case.params)
    least = fixed_shape(case, tuple(math.lcm(*sizes) for sizes in zip(*map(smallest, both), strict=True)))
    place = "NK".index(dim)
    if dim in case.spec.fixed:
        return [least]
    step, every = least[place], math.lcm(*(period(own, dim, least) for own in both))
    grown = [tuple(extent if i == place else least[i] for i in range(2)) for extent in range(step, step + every + 1, step)]
    legal = [(n, k) for n, k in grown if all(any(shapes(own, (n,), (k,))) for own in both)]
    return [*legal[1::-(-len(legal) // CLASSES)], legal[0]]


def converted(packed: PackedWeight, storage: str) -> PackedWeight | None:
    try:
        return packed.format.convert(packed, storage)
    except FormatError:
        return None


@pytest.mark.parametrize(("case", "storage"), [(case, storage) for case, storage in pairs() if case.storage < storage], ids=str)
def test_weights_are_the_same_at_every_residue_of_their_shape(case: Case, storage: str) -> None:
    """None is left on meta, and the way back gives the same tensors."""
    for shape in {*residues(case, storage, "N"), *residues(case, storage, "K")}:
        packed = in_order(random_packed(case, shape))
        if (other := converted(packed, storage)) is None:        # it has fewer fields: from it to this one, then
            packed = in_order(random_packed(Case(case.path, storage, case.params), shape))
            other = packed.format.convert(packed, case.storage)
        assert {name: tensor.device.type for name, tensor in other.tensors.items()} == dict.fromkeys(other.tensors, "cpu"), shape
        wanted = packed.format.dequantize(packed, torch.float32)
        assert same_bits(packed.format.dequantize(other, torch.float32), wanted), shape
        back, before = packed.format.convert(other, packed.storage), canonical(packed)
        assert {name for name in back.tensors if not same_bits(back.tensors[name], before[name])} == set(), shape
