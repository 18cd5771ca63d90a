"""A stack of packed experts' weights [E, N, K] as a module that also behaves like the dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.models.offloaded import onloaded_by_hooks
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.experts import host_borders, is_on_gpu, matmul, route, weighted_sum
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.specialized import SpecializedModule
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.routing import Offsets


def routed_sum(x: Tensor, run: Callable[[Tensor, Offsets, Tensor | None], Tensor], experts: int, topk_weights: Tensor,
               topk_ids: Tensor, expert_map: Tensor | None = None, is_input_weighted: bool = False) -> Tensor:
    """The weighted sums of the outputs of a router's experts for tokens x [T, K]: [T, N] in x's dtype.

    run: computes experts' outputs from x, the E + 1 offsets of experts' rows, and the row of x of each row, sorted by expert
    (None: the rows of x in order).  Outputs behind the last offset count as 0.  topk_weights, topk_ids: [T, k].  expert_map: the
    local number of each expert among `experts`, -1 for experts of other ranks.  is_input_weighted: weight rows of x instead of
    outputs.  Sums are in the order of the ids.
    """
    routing = route(x, topk_ids, topk_weights, experts, expert_map)
    if routing is not None and is_input_weighted:
        pairs = (x[:, None] * topk_weights[..., None]).to(x.dtype).flatten(0, 1)
        rows = torch.empty_like(pairs)
        rows[routing.places] = pairs
        return weighted_sum(run(rows, routing, None), routing.places, torch.ones_like(topk_weights), routing.offsets).to(x.dtype)
    if routing is not None:
        return weighted_sum(run(x, routing, routing.tokens), routing.places, topk_weights, routing.offsets).to(x.dtype)
    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    ids, order = torch.sort(torch.where(ids < 0, experts, ids).reshape(-1), stable=True)
    offsets = torch.searchsorted(ids, torch.arange(experts + 1, device=ids.device))
    places = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    tokens = order // topk_ids.shape[1]
    if is_input_weighted:
        rows = (x[tokens] * topk_weights.reshape(-1)[order, None]).to(x.dtype)
        return weighted_sum(run(rows, offsets, None), places, torch.ones_like(topk_weights), offsets).to(x.dtype)
    return weighted_sum(run(x, offsets, tokens), places, topk_weights, offsets).to(x.dtype)


def _part_product(part: QuantizedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ w.T + bias for the weight of a part."""
    packed = part.packed
    out = part.format.linear(x, packed, bias)
    part.keep_plan(packed)
    return out


class Experts(SpecializedModule):
    """E packed weights [N, K], called as a layer or used as the dense tensor [E, N, K] that they stand for.

    `experts(x, offsets, bias)` multiplies rows of x, sorted by expert; a GPU needs one launch for few rows.  `experts[e]` decodes
    one expert; torch functions and a tensor's methods, such as `torch.bmm(x, experts)` and `experts.transpose(1, 2)`, decode all:
    a model written for a parameter runs unchanged.

    packed: one weight of E * N rows; or E, or E * P, weights where their tensors cannot be joined, as with a scale for each.  The
    rows of an expert are those of its P weights, one after the other; formats may differ.  transposed: the model has them as
    [E, K, N].  dtype: of decoded weights.  Raises FormatError where weights do not divide among the experts.
    """

    def __init__(self, packed: PackedWeight | Sequence[PackedWeight], experts: int, transposed: bool = False,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        weights = [packed] if isinstance(packed, PackedWeight) else list(packed)
        rows = sum(weight.shape[0] for weight in weights)
        if experts < 1 or rows % experts or (len(weights) > 1 and len(weights) % experts) or not weights:
            raise FormatError(f"{len(weights)} weights of {rows} rows together do not divide among {experts} experts")
        pieces = max(1, len(weights) // experts)
        sizes = {sum(weight.shape[0] for weight in weights[start:start + pieces]) for start in range(0, len(weights), pieces)}
        columns = {weight.shape[1] for weight in weights}
        if len(sizes) > 1 or len(columns) > 1:
            raise FormatError(f"experts have one shape [N, K]: N is {sorted(sizes)}, and K is {sorted(columns)}")
        self.experts, self.transposed = experts, transposed
        self.parts = nn.ModuleList([weight.format.Linear(weight, None, dtype) for weight in weights])
        self._specialize()

    def _description(self) -> Hashable:
        return (self.experts, self.transposed, *map(type, self.parts))

    @property
    def shape(self) -> torch.Size:
        """[E, N, K], or [E, K, N] where they are transposed."""
        n, k = sum(part.out_features for part in self._linears()) // self.experts, self._linears()[0].in_features
        return torch.Size((self.experts, k, n) if self.transposed else (self.experts, n, k))

    @property
    def dtype(self) -> torch.dtype:
        return self._linears()[0].compute_dtype

    @property
    def match_dense(self) -> bool:
        """Whether products have the bits of products with decoded weights, as of `linear`."""
        return self._linears()[0].match_dense

    @property
    def device(self) -> torch.device:
        return self._linears()[0].packed.device

    @property
    def ndim(self) -> int:
        return 3

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 3

    def __len__(self) -> int:
        return self.experts

    def weight(self, expert: int) -> PackedWeight:
        """The packed weight [N, K] of one expert.  Raises FormatError where its weights cannot be joined: see `weights`."""
        return PackedWeight.join(self.weights(expert))

    def weights(self, expert: int) -> list[PackedWeight]:
        """The packed weights whose rows together are those of one expert: usually one."""
        if not -self.experts <= expert < self.experts:
            raise IndexError(f"expert {expert} of {self.experts}")
        expert %= self.experts
        if len(self.parts) > 1:
            return [part.packed for part in self._linears_of(expert)]
        whole = self._linears()[0].packed
        n = whole.shape[0] // self.experts
        return [whole.shard("N", expert * n, (expert + 1) * n)]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """All weights, dense: [E, N, K], or [E, K, N] where they are transposed."""
        with onloaded_by_hooks(self._linears()):
            rows = torch.cat([part.dequantize(dtype or self.dtype) for part in self._linears()])
        dense = rows.view(self.experts, -1, rows.shape[1])
        return self._oriented(dense)

    def __getitem__(self, index: Any) -> Tensor:
        """The dense weights of an index of the first axis: one expert, a slice, or a tensor of experts."""
        if isinstance(index, tuple):
            return self[index[0]][(Ellipsis, *index[1:]) if index[0] is Ellipsis else index[1:]]
        if index is Ellipsis:
            return self.dequantize()
        chosen = torch.arange(self.experts, device="cpu")[index.cpu() if isinstance(index, Tensor) else index]
        if chosen.dim() == 0:
            return self._dense_expert(int(chosen))
        decoded = {expert: self._dense_expert(expert) for expert in sorted(set(chosen.flatten().tolist()))}
        dense = [decoded[expert] for expert in chosen.flatten().tolist()]
        whole = torch.stack(dense) if dense else torch.empty(0, *self.shape[1:], dtype=self.dtype, device=self.device)
        return whole.view(*chosen.shape, *self.shape[1:])

    def forward(self, x: Tensor, offsets: Offsets, bias: Tensor | None = None, partial: bool = False,
                rows: Tensor | None = None) -> Tensor:
        """Rows [offsets[e], offsets[e + 1]) of x [M, K] times the transpose of expert e's weight, plus bias[e]: [M, N].

        offsets: E + 1 integers from 0 to M.  bias: [E, N].  partial: results of rows behind the last offset are 0.  rows: int64
        [M], which row of x [T, K] each of the M rows is.  Differentiable in x and bias.
        """
        parts, x = self._linears(), ops.autocast(x)
        if len(parts) == 1:
            with onloaded_by_hooks(parts):
                packed = parts[0].packed
                out = packed.format.grouped_linear(x, packed, offsets, bias, partial, rows, self.match_dense)
                parts[0].keep_plan(packed)
                return out
        if len(offsets) != self.experts + 1:
            raise FormatError(f"{len(offsets)} offsets do not divide rows of x among {self.experts} experts")
        n = sum(part.out_features for part in self._linears_of(0))
        if bias is not None and bias.shape != (self.experts, n):
            raise FormatError(f"bias {list(bias.shape)} does not fit {self.experts} experts of {n} rows: expected "
                              f"[{self.experts}, {n}]")
        m = len(x if rows is None else rows)
        if is_on_gpu(x, bias) and not self.match_dense and (m >= self.experts or torch.cuda.is_current_stream_capturing()):
            out = x.new_zeros(m, n) if partial else x.new_empty(m, n)
            matmul(x.contiguous(), lambda start, stop: torch.cat([self._apart(e, x.dtype) for e in range(start, stop)]),
                   offsets, None if bias is None else bias.contiguous(), rows, out)
            return out
        x = x if rows is None else x[rows]
        borders = host_borders(offsets, len(x), partial)
        results = [self._product(x[start:stop], expert, None if bias is None else bias[expert])
                   for expert, (start, stop) in enumerate(pairwise(borders)) if start < stop]
        return torch.cat([*results, x.new_zeros(len(x) - borders[-1], n)])

    def _apart(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The dense rows [N, K] of one expert, of weights that are not joined."""
        parts = self._linears_of(expert)
        with onloaded_by_hooks(parts):
            return torch.cat([part.format.dequantize(part.packed, dtype) for part in parts])

    def _product(self, x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        """The matmul of x [M, K] with one expert's weights that are not joined, plus bias [N]: [M, N]."""
        if self.match_dense:
            return nn.functional.linear(x, self._apart(expert, x.dtype), None if bias is None else bias.to(x.dtype))
        parts = self._linears_of(expert)
        biases = [None] * len(parts) if bias is None else torch.split(bias, [part.out_features for part in parts])
        with onloaded_by_hooks(parts):
            return torch.cat([_part_product(part, x, own) for part, own in zip(parts, biases, strict=True)], -1)

    def __getattr__(self, name: str) -> Any:
        """A module's attribute; else a tensor's, of the dense weights."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
        return getattr(self.dequantize(), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """A torch function of the dense weights."""
        def dense(value: Any) -> Any:
            return value.dequantize() if isinstance(value, Experts) else value

        return function(*map(dense, args), **{name: dense(value) for name, value in (kwargs or {}).items()})

    def extra_repr(self) -> str:
        return f"shape={list(self.shape)}, transposed={self.transposed}"

    def _linears(self) -> list[QuantizedLinear]:
        return list(self.parts)  # type: ignore[arg-type]

    def _linears_of(self, expert: int) -> list[QuantizedLinear]:
        """The layers of one expert, of weights that are not joined."""
        pieces = len(self.parts) // self.experts
        return self._linears()[expert * pieces:(expert + 1) * pieces]

    def _dense_expert(self, expert: int) -> Tensor:
        packed = self._linears()[0].packed
        if len(self.parts) == 1 and packed.shape[0] // self.experts % packed.step("N"):
            return self.dequantize()[expert]                     # streams, whose rows are decoded together
        with onloaded_by_hooks(self._linears_of(expert) if len(self.parts) > 1 else self._linears()):
            rows = [weight.format.dequantize(weight, self.dtype) for weight in self.weights(expert)]
        dense = torch.cat(rows) if len(rows) > 1 else rows[0]
        return self._oriented(dense)

    def _oriented(self, dense: Tensor) -> Tensor:
        """Decoded weights [..., N, K] as the model has them; with `match_dense` in the layout of a parameter, for equal bits."""
        if not self.transposed:
            return dense
        return dense.mT.contiguous() if self.match_dense else dense.mT
