"""A second reading of the side branches of a spec, one element at a time, and small fields to read.

It shares the parsed spec and qdsl/analyze/check/spec_bits.py with nothing of the compiler or the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits as oracle
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import model
from qdsl.compiler.spec.model import Spec
from tests.support.answers import stream

Fields = dict[str, Tensor]
RANK = 32                                                        # of factors; dense rows are two
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}


def branch_dtype(tensor: model.Tensor, params: Mapping[str, int | str]) -> torch.dtype:
    assert tensor.shape is not None
    return DTYPES[str(params.get(tensor.shape.type.name, tensor.shape.type.name))]


def items_of(tensor: model.Tensor) -> list[tuple[str, g.RecordItem, torch.dtype | None]]:
    """The fields of a tensor in the order of their bits, and their dtypes where they share its words."""
    (line,) = tensor.record
    items = [item for item in line.items if isinstance(item, g.RecordItem) and item.field is not None]
    assert len(items) == len(line.items)
    dtypes = [None] if len(items) == 1 else [torch.int32 if item.part == "lo" else torch.float16 for item in items]
    return [(item.field.name, item, dtype) for item, dtype in zip(items, dtypes, strict=True) if item.field is not None]


def branch_fields(spec: Spec, shape: tuple[int, int], params: Mapping[str, int | str], seed: int) -> Fields:
    """Fields of every branch of a spec, for a weight [N, K]: the last row has entries, is a dense row, and the first has none."""
    n, k = shape

    def numbers(*extents: int, count: int = 0) -> Tensor:
        data = stream(seed + len(extents), 2 * (count or prod(extents))).view("<u2").astype(np.int64)
        return torch.from_numpy(((data - 32768) / 9973).astype(np.float32)).view(extents)

    fields: Fields = {}
    for branch in spec.plus:
        if branch.kind.value == "low_rank":
            fields |= {"up": numbers(n, RANK), "down": numbers(RANK, k)}
        elif branch.kind.value == "dense_rows":
            fields |= {"row": torch.tensor([n - 1, 1], dtype=torch.int32), "row_value": numbers(2, k)}
        else:
            present = stream(seed + 7, n * k).reshape(n, k) % 16 == 3
            present[0] = False
            rows, columns = np.nonzero(present)
            start = np.concatenate([[0], np.cumsum(present.sum(1))])
            fields |= {"start": torch.from_numpy(start.astype(np.int32)), "column": torch.from_numpy(columns.astype(np.int32)),
                       "value": numbers(len(rows))}
    for tensor in spec.branch_tensors:
        for role, _, dtype in items_of(tensor):
            fields[role] = fields[role].to(dtype or branch_dtype(tensor, params))
    return fields


def pack_branches(spec: Spec, shape: tuple[int, int], params: Mapping[str, int | str], fields: Fields) -> dict[str, Tensor]:
    """The tensors that hold the fields, element by element."""
    tensors: dict[str, Tensor] = {}
    for tensor in spec.branch_tensors:
        items = items_of(tensor)
        assert tensor.shape is not None
        field = fields[items[0][0]]
        rank = fields["up"].shape[1] if "up" in fields else fields["row"].numel() if "row" in fields else 0
        env: dict[str, Any] = {"N": shape[0], "K": shape[1], "R": rank, "E": field.numel(),
                               **{name: value for name, value in params.items() if isinstance(value, int)}}
        digits = [digit for axis in tensor.shape.axes for digit in axis.digits if digit is not None]
        extents = [oracle.evaluate(digit.extent, env) for digit in digits]
        packed = torch.zeros(extents, dtype=branch_dtype(tensor, params))
        for places in product(*map(range, extents)):
            local = {**env, **{digit.name: place for digit, place in zip(digits, places, strict=True)}}
            values = [fields[role][tuple(oracle.evaluate(index, local) for index in item.index)] for role, item, _ in items]
            packed[places] = values[0] if len(values) == 1 else _word(values)
        seen = [rank if extent.value == "?" else env[extent.value] for extent in tensor.seen]
        axes = [prod(oracle.evaluate(digit.extent, env) for digit in axis.digits if digit is not None)
                for axis in tensor.shape.axes]
        tensors[tensor.name.value] = packed.reshape(seen or axes)
    return tensors


def _word(values: list[Tensor]) -> int:
    """An int32 of two numbers of 16 bits, the low one first."""
    data = b"".join(value.to(torch.int16 if value.dtype == torch.int32 else value.dtype).numpy().tobytes() for value in values)
    return int.from_bytes(data, "little", signed=True)


def add_branches(spec: Spec, fields: Fields, weight: Tensor) -> Tensor:
    """The weight with all branches, each product and each sum rounded to float32."""
    out: npt.NDArray[np.float32] = weight.numpy().copy()
    values = {role: field.float().numpy() if field.is_floating_point() else field.numpy() for role, field in fields.items()}
    for branch in spec.plus:
        if branch.kind.value == "low_rank":
            for n, r in np.ndindex(*values["up"].shape):         # one row of w at a time: its elements are apart
                out[n] = out[n] + (values["up"][n, r] * values["down"][r]).astype(np.float32)
        elif branch.kind.value == "dense_rows":
            for r, n in enumerate(values["row"]):
                for k in range(out.shape[1]):
                    out[n, k] = np.float32(out[n, k] + values["row_value"][r, k])
        else:
            for n in range(out.shape[0]):
                for e in range(values["start"][n], values["start"][n + 1]):
                    out[n, values["column"][e]] = np.float32(out[n, values["column"][e]] + values["value"][e])
    return torch.from_numpy(out)
