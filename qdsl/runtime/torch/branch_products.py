"""Products with the side branches of a weight, added to the product with its base.

    low_rank      y += (x @ down.T) @ up.T              x += ... by their transposes, for gradients
    csr           y += x @ s.T, a kernel on a GPU that sums the entries of a row in their order
    dense_rows    y[:, row] += x @ row_value.T

The product with the base is rounded to x's dtype.  Branches are added in float32, or wider, and the sum is rounded once.  On a
GPU bfloat16 factors multiply bfloat16 x directly, which also rounds the product with `down`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from qdsl.runtime.gpu.branch_launches import has_csr, run_csr
from qdsl.runtime.torch.linear import INVARIANT, tile_weights
from qdsl.runtime.weight.branch_kinds import Fields, row_numbers
from qdsl.runtime.weight.branch_pieces import branch_fields
from qdsl.runtime.weight.packed import PackedWeight

MOST = 1 << 22                                                   # products of entries and rows of x that are in memory at a time


def add_branches(out: Tensor, x: Tensor, packed: PackedWeight, transposed: bool, mode: str) -> Tensor:
    """out [..., N], or [..., K] if transposed, plus the products of x with the branches of a weight.

    mode: of the product; a batch-invariant mode multiplies each row of x alone.
    """
    present = [(branch.kind, fields) for branch in packed.variant.plus
               if (fields := branch_fields(branch, packed, False)) is not None]
    wide = out.dtype if _is_native(x, present) else torch.promote_types(out.dtype, torch.float32)
    rows, sums = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1]).to(wide)
    step = 1 if mode == INVARIANT else max(1, rows.shape[0])
    for kind, fields in present:
        add = (TRANSPOSED if transposed else PRODUCTS)[kind]
        parts = [add(sums[i:i + step], rows[i:i + step], fields) for i in range(0, rows.shape[0], step)]
        sums = parts[0] if len(parts) == 1 else torch.cat([sums[:0], *parts])
    return sums.to(out.dtype).view(out.shape)


def _is_native(x: Tensor, present: Sequence[tuple[str, Fields]]) -> bool:
    """Whether a GPU multiplies x by the factors in their stored dtype: all are bfloat16, with float32 sums."""
    dtypes = {x.dtype, *(field.dtype for kind, fields in present if kind == "low_rank" for field in fields.values())}
    return x.device.type != "cpu" and dtypes == {torch.bfloat16} and all(kind == "low_rank" for kind, _ in present)


def _low_rank(sums: Tensor, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """sums [M, N] + (x [M, K] @ down.T) @ up.T, for down [R, K] and up [N, R]."""
    return torch.addmm(sums, x.to(sums.dtype) @ down.to(sums.dtype).t(), up.to(sums.dtype).t())



def _one_hot(fields: Fields, n: int) -> Tensor:
    """A one-hot matrix [N, R] with 1 at (row[r], r)."""
    row = fields["row"].long()
    return torch.zeros(n, row.numel(), dtype=torch.float32, device=row.device).scatter_(0, row[None], 1.0)



def _add_entries(out: Tensor, x: Tensor, fields: Fields) -> Tensor:
    """out [M, N] plus the products with the entries, added in order within each row of w."""
    if has_csr(x):
        return run_csr(out, x, fields["start"], fields["column"], fields["value"])
    column, value = fields["column"].long(), fields["value"]
    return _add_gathered(out, x, column, row_numbers(fields["start"], column.numel()), value)


def _add_gathered(out: Tensor, x: Tensor, source: Tensor, target: Tensor, value: Tensor) -> Tensor:
    """out[:, target[e]] + x[:, source[e]] * value[e] for all entries, some rows of x at a time."""
    sums = torch.empty_like(out)
    step = max(1, MOST // max(1, source.numel()))
    for i in range(0, x.shape[0], step):
        products = x[i:i + step].to(out.dtype).t()[source] * value.to(out.dtype)[:, None]
        sums[i:i + step] = out[i:i + step].t().index_add(0, target, products).t()
    return sums


def _add_entries_transposed(out: Tensor, x: Tensor, fields: Fields) -> Tensor:
    """out [M, K] + x [M, N] @ s, by dense tiles of s, so that sums are the same on every run, also on a GPU."""
    for start, stop, tile in _dense_tiles(fields, out.shape[1], tile_weights(x), out.dtype):
        out = torch.addmm(out, x[:, start:stop].to(out.dtype), tile)
    return out


def _dense_tiles(fields: Fields, k: int, weights: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Rows [start, stop) of the entries as dense matrices of about `weights` elements."""
    first, column, value = fields["start"], fields["column"].long(), fields["value"]
    row = row_numbers(first, column.numel())
    n, step = first.numel() - 1, max(1, weights // max(1, k))
    for start in range(0, n, step):
        stop = min(n, start + step)
        begin, end = int(first[start]), int(first[stop])
        tile = torch.zeros(stop - start, k, dtype=dtype, device=value.device)
        tile[row[begin:end] - start, column[begin:end]] = value[begin:end].to(dtype)
        yield start, stop, tile


Product = Callable[[Tensor, Tensor, Fields], Tensor]
PRODUCTS: dict[str, Product] = {
    "low_rank": lambda out, x, fields: _low_rank(out, x, fields["up"], fields["down"]),
    "csr": _add_entries,
    "dense_rows": lambda out, x, fields: _low_rank(out, x, _one_hot(fields, out.shape[1]), fields["row_value"])}
TRANSPOSED: dict[str, Product] = {
    "low_rank": lambda out, x, fields: _low_rank(out, x, fields["down"].t(), fields["up"].t()),
    "csr": _add_entries_transposed,
    "dense_rows": lambda out, x, fields: _low_rank(out, x, fields["row_value"].t(), _one_hot(fields, x.shape[1]).t())}
