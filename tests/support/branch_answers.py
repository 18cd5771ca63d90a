"""Known answers of weights with side branches: the stored tensors of branches in full, their fields, and the sum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qdsl.compiler.passes.derive_planar import PLANAR
from tests.support.answers import Answers, all_as_text, as_data, as_text, canonical
from tests.support.formats import Case, random_packed, same_bits
from tests.support.slow_branches import add_branches, branch_fields, pack_branches

SHAPE = (32, 64)


def has_own_branches(case: Case) -> bool:
    """Whether branches of a case are unlike those of the cases with default parameters: of another type.

    The storage `planar` has the same tensors of branches; tests/formats/test_branches.py converts them.
    """
    kinds = {tensor.shape.type.name for tensor in case.spec.branch_tensors if tensor.shape is not None}
    format = case.module.FORMAT
    changed = {name for name, value in case.choice.items() if name not in format.by and value != format.params[name][0]}
    return bool(case.spec.plus) and case.storage != PLANAR and changed <= kinds


def branch_case(case: Case, params: Mapping[str, int | str], seed: int) -> Answers:
    """A weight with branches.  Raises AssertionError where the code and the second reading of the spec differ."""
    format, spec = case.module.FORMAT, case.spec
    base = random_packed(case, SHAPE, seed, params)
    fields = branch_fields(spec, SHAPE, params, seed)
    tensors = pack_branches(spec, SHAPE, params, fields)
    packed = format.wrap({**base.tensors, **tensors}, SHAPE, case.storage, **params)
    unpacked, again = format.unpack(packed), format.pack(format.unpack(packed), case.storage, **params)
    weight = format.dequantize(packed, torch.float32)
    assert all(same_bits(unpacked[name], field) for name, field in fields.items()), "unpack reads branches otherwise"
    assert all(same_bits(again.tensors[name], tensor) for name, tensor in tensors.items()), "pack writes branches otherwise"
    assert same_bits(weight, add_branches(spec, fields, format.dequantize(base, torch.float32))), "another sum"
    return {"storage": case.storage, "params": dict(params), "shape": list(SHAPE), "seed": seed,
            "base": {name: as_data(tensor) for name, tensor in base.tensors.items()},
            "tensors": {name: as_data(tensor) for name, tensor in tensors.items()}, "fields": all_as_text(fields),
            "weight": as_text(canonical(weight))}
