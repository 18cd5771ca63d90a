"""Changes of storage at every shape that a layout tells apart: N and K modulo its words, records, blocks and groups."""

from __future__ import annotations

import math
import os

import pytest
import torch

from qdsl.runtime import FormatError, PackedWeight
from tests.formats.test_convert import in_order, pairs
from tests.support.covering import quarter_of
from tests.support.formats import Case, canonical, fixed_shape, random_packed, same_bits, shapes, smallest


def steps(case: Case, dim: str, shape: tuple[int, int]) -> set[int]:
    """The rows or columns of a layout's words, records, blocks and groups."""
    format = case.module.FORMAT
    sizes = format.sizes(format.complete(case.choice), shape)
    layout = format.variant(case.choice).storages[case.storage].decoded
    return {term.by(sizes) for stored in layout.tensors.values() for axis in stored.axes for term in axis.terms
            if dim in term.dim}


def residues(case: Case, storage: str, dim: str) -> list[tuple[int, int]]:
    """Shapes that both storages can hold: for each set of steps that divide N or K the first and last; all by QDSL_TEST_ALL."""
    both = case, Case(case.path, storage, case.params)
    least = fixed_shape(case, tuple(math.lcm(*sizes) for sizes in zip(*map(smallest, both), strict=True)))
    place = "NK".index(dim)
    if dim in case.spec.fixed:
        return [least]
    step, every = least[place], sorted(set().union(*(steps(own, dim, least) for own in both)))
    extents = range(step, step + math.lcm(*every) + 1, step)
    grown = [tuple(extent if i == place else least[i] for i in range(2)) for extent in extents]
    legal = [(n, k) for n, k in grown if all(any(shapes(own, (n,), (k,))) for own in both)]
    classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for shape in legal:
        classes.setdefault(tuple(shape[place] % size == 0 for size in every), []).append(shape)
    return legal if os.environ.get("QDSL_TEST_ALL") else [shape for group in classes.values() for shape in {group[0], group[-1]}]


def converted(packed: PackedWeight, storage: str) -> PackedWeight | None:
    try:
        return packed.format.convert(packed, storage)
    except FormatError:
        return None


@pytest.mark.parametrize(("case", "storage"), quarter_of([
    (case, storage) for case, storage in pairs() if case.storage < storage]), ids=str)
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
