"""Checks side branches: pack and unpack keep their fields, and the added terms equal plain arithmetic, also for slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qdsl.analyze.check.cases import StorageCase
from qdsl.analyze.check.compare import describe_difference, differing_mask
from qdsl.core.branches import BRANCHES
from qdsl.runtime.weight.layout import Branch

RANK, ROWS = 32, 2                                               # of factors, and dense rows
Shape = tuple[int, int]


def check_storage_branches(case: StorageCase) -> tuple[str, str]:
    """(problem or '', what was checked) of a storage with side branches."""
    shape = _shape(case)
    base = case.format.pack(case.fields(shape), storage=case.storage, **case.params)
    plus = case.format.variant(case.params).plus
    fields = {role: value for branch in plus for role, value in random_branch_fields(branch, shape, case.params).items()}
    packed = case.format.pack({**case.format.unpack(base), **fields}, storage=case.storage, **case.params)
    again = case.format.unpack(case.format.wrap(packed.tensors, shape, case.storage, **dict[str, Any](case.params)))
    for role, value in fields.items():
        if again[role].shape != value.shape or differing_mask(again[role], value).any():
            return f"'{role}' is another after pack, wrap and unpack", ""
    wanted = case.format.dequantize(base, torch.float32)
    for branch in plus:
        wanted = _add_branch(branch.kind, fields, wanted)
    problem = describe_difference(case.format.dequantize(packed, torch.float32), wanted, packed, case.spec)
    for dim, start, stop in _pieces(packed.step("N"), packed.step("K"), shape):
        part = case.format.dequantize(packed.cut(dim, start, stop), torch.float32)
        rows = wanted[start:stop] if dim == "N" else wanted[:, start:stop]
        problem = problem or ("" if torch.equal(part, rows) else f"{dim} from {start} to {stop} is another weight")
    return problem, f"{', '.join(branch.kind for branch in plus)} of {list(shape)}: fields survive, and the sum is exact"


def _shape(case: StorageCase) -> Shape:
    """A shape of the storage with whole tiles of factors."""
    return next((shape for shape in case.shapes((32, 64, 128), (64, 128, 256, 512))), case.two_block_shape)


def _pieces(rows: int, columns: int, shape: Shape) -> list[tuple[str, int, int]]:
    """A slice along either axis, if the storage can be sliced."""
    pieces = [("N", rows, shape[0])] if rows < shape[0] else []
    return pieces + ([("K", columns, shape[1])] if columns < shape[1] else [])


def random_branch_fields(branch: Branch, shape: Shape, params: Mapping[str, int | str], seed: int = 0) -> dict[str, Tensor]:
    """Random fields of a branch of a weight [N, K]."""
    n, k = shape
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < 0.1
    row, column = present.nonzero(as_tuple=True)
    extents = {"N": n, "K": k, "N + 1": n + 1, "R": ROWS if branch.kind == "dense_rows" else RANK, "E": row.numel()}
    sizes = {role: [extents[extent] for extent in kind.extents] for role, kind in BRANCHES[branch.kind].roles.items()}
    fields = {role: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for role, size in sizes.items()}
    start = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), present.sum(1).cumsum(0)])
    rows = torch.randint(0, max(1, n), (extents["R"],), generator=generator, device="cpu")
    indices = {"start": start, "column": column, "row": rows}
    return {role: indices.get(role, value).to(branch.tensors[role].dtype(params)) for role, value in fields.items()}


def _add_branch(kind: str, fields: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """The weight plus a branch, by the formula of core/branches.py, in float32."""
    weight = weight.clone()
    if kind == "low_rank":
        for r in range(fields["down"].shape[0]):
            weight = weight + torch.outer(fields["up"][:, r].float(), fields["down"][r].float())
    elif kind == "dense_rows":
        for n, values in zip(fields["row"].tolist(), fields["row_value"].float(), strict=True):
            weight[n] = weight[n] + values
    else:
        first = fields["start"].tolist()
        for n in range(weight.shape[0]):
            for e in range(first[n], first[n + 1]):
                weight[n, fields["column"][e]] += fields["value"][e].float()
    return weight
