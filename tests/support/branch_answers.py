"""Known answers of weights with side branches: the stored tensors of branches in full, their fields, and the sum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qdsl.compiler.passes.derive_planar import PLANAR
from tests.support.answers import Answers, all_as_text, as_data, as_text, canonical, inputs
from tests.support.formats import Case, random_packed, same_bits, shapes
from tests.support.slow_branches import add_branches, branch_fields, pack_branches


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
    shape = next(shapes(case, (32, 128), (64, 128), params))
    answer: Answers = {"storage": case.storage, "params": dict(params), "shape": list(shape), "seed": seed}
    answer["tensors"] = all_as_text(random_packed(case, shape, params=params).tensors)
    base = format.wrap(inputs(answer), shape, case.storage, **params)
    answer["tensors"] = all_as_text(base.tensors)
    fields = branch_fields(spec, shape, params, seed)
    tensors = pack_branches(spec, shape, params, fields)
    packed = format.wrap({**base.tensors, **tensors}, shape, case.storage, **params)
    unpacked, again = format.unpack(packed), format.pack(format.unpack(packed), case.storage, **params)
    weight = format.dequantize(packed, torch.float32)
    assert all(same_bits(unpacked[name], field) for name, field in fields.items()), "unpack reads branches otherwise"
    assert all(same_bits(again.tensors[name], tensor) for name, tensor in tensors.items()), "pack writes branches otherwise"
    wanted = add_branches(spec, fields, format.dequantize(base, torch.float32))
    assert same_bits(canonical(weight), canonical(wanted)), "another sum"
    written = all_as_text(again.tensors)                         # where bits stand again, those of the first
    answer |= {"packed": written} if written != all_as_text(packed.tensors) else {}
    return {**answer, "added": {name: as_data(tensor) for name, tensor in tensors.items()}, "fields": all_as_text(fields),
            "weight": as_text(canonical(weight))}
