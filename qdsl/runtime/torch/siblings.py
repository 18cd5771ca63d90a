"""Layers of a model that multiply the same x, such as q, k and v: one product on a CPU computes the results of all.

The layers stay modules with their own weights, hooks and names.  The first that is called with an x computes all results, and the
others take theirs if they get the same object, unchanged.  Every other call computes alone, and so do calls that something
differentiates, observes or compiles.  Results have the bits that each layer's own product has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.core.siblings import SIBLINGS
from qdsl.runtime.cpu import kept, loops, rows
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu.joined import JoinedCopies, Run, join_copies
from qdsl.runtime.gpu.placement import may_change_storage
from qdsl.runtime.libraries.private_apis import is_autocast_enabled, is_direct
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.model import keep_copies
from qdsl.runtime.torch.ops import is_plain
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.products import Prepared, prepared

_Tensor = tuple[str, Tensor | None, int, int]                    # a layer's by name, its version and address when it was joined
MOST_MISSES = 8                                                  # times in a row that a result was not taken: the layers separate


@dataclass(frozen=True, slots=True)
class _Results:
    """The results for an x that layers have not taken yet.  version: of x."""

    x: Tensor
    version: int
    waiting: dict[QuantizedLinear, Tensor]


@dataclass(frozen=True, slots=True)
class _Product:
    """A prepared product for x of one shape and dtype.  ready: that of each layer alone, in its plan."""

    run: Run
    ready: dict[QuantizedLinear, Prepared]


class Siblings:
    """Layers that multiply the same x.  A layer refers to this; copies and pickles of layers do not."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers = tuple(layers)
        self._joined: JoinedCopies | None = None
        self._tensors: dict[QuantizedLinear, list[_Tensor]] = {}
        self._products: dict[tuple[Any, ...], _Product] = {}                  # by shape and dtype of x
        self._results: _Results | None = None
        self._misses, self._alone = 0, 0

    def place(self) -> bool:
        """Join the copies of the layers' weights now; False, and the layers separate, where that is not possible."""
        self._products, self._results = {}, None
        try:
            self._joined = None if any(layer.own_transforms or layer.packed.has_branch for layer in self.layers) else \
                join_copies([layer.packed for layer in self.layers])
        except FormatError:
            self._joined = None
        if self._joined is None:
            self.separate()
            return False
        self._tensors = {layer: list(_tensors_of(layer)) for layer in self.layers}
        return True

    def separate(self) -> None:
        """Let every layer compute alone from now on."""
        for layer in self.layers:
            layer.__dict__.pop("siblings", None)

    def take(self, layer: QuantizedLinear, x: Tensor) -> Tensor | None:
        """The result of a layer that an earlier call computed for this x; None where there is none."""
        results = self._results
        if results is None or results.x is not x:
            return None
        out = results.waiting.pop(layer, None)
        if not results.waiting:
            self._results, self._misses = None, 0
        bias = layer.__dict__["_parameters"].get("bias")
        if out is None or x._version != results.version or not is_direct(x, bias) or is_autocast_enabled():
            return None
        return out if self._is_usual(layer) else None

    def compute(self, layer: QuantizedLinear, x: Tensor) -> Tensor | None:
        """The result of a layer, and those of the others for later; None where the layer has to compute alone.

        x: one that the layer could multiply directly.
        """
        if x.numel() > rows.FEW * layer.in_features or not x.is_contiguous() or x.is_inference() or is_autocast_enabled():
            return None
        product = None if self._alone == id(x) else self._products.get((x.shape, x.dtype)) or self._prepare(x)
        if product is None:
            self._alone = id(x)                                  # for which the first layer prepares, the next ones do not begin
            return None
        self._alone = 0
        plan = layer._packed.plan
        if plan is None or prepared(plan, x, layer.__dict__["_parameters"].get("bias"), "") is not product.ready[layer]:
            self._products = {}                                  # settings are read again
            return None
        biases: list[int] = []
        for own in self.layers:
            bias = own.__dict__["_parameters"].get("bias")
            if not self._is_usual(own) or not (bias is None or is_direct(x, bias)):
                return None
            biases.append(0 if bias is None else bias.data_ptr())
        if self._results is not None and self._count_miss(layer, self._results):
            return None
        waiting = dict(zip(self.layers, product.run(x, biases), strict=True))
        out = waiting.pop(layer)
        self._results = _Results(x, x._version, waiting)
        return out

    def _count_miss(self, layer: QuantizedLinear, results: _Results) -> bool:
        """Count a result that nobody took; whether the layer has to compute alone, as it had one for another x."""
        is_own = results.waiting.pop(layer, None) is not None
        self._misses += 1
        if not results.waiting or not is_own:
            self._results = None
        if self._misses >= MOST_MISSES:
            self.separate()
        return is_own or self._misses >= MOST_MISSES

    def _is_usual(self, layer: QuantizedLinear) -> bool:
        """Whether a layer computes in no other mode, and has the tensors whose copies were joined."""
        attributes = layer.__dict__
        if layer.quantize_x or layer.batch_invariant or layer.match_dense or attributes["_x_scale"] is not None \
                or "transforms" in attributes["_modules"]:
            return False
        parameters = attributes["_parameters"]
        for name, tensor, version, address in self._tensors[layer]:
            own = parameters.get(name)
            if own is not tensor or (own is not None and (own._version != version or own.data_ptr() != address)):
                self._joined, self._products = None, {}
                return False
        return True

    def _prepare(self, x: Tensor) -> _Product | None:
        """The product for an x, if each layer has one of its own for it."""
        ready: dict[QuantizedLinear, Prepared] = {}
        rounds: set[bool] = set()
        dtypes: set[torch.dtype] = set()
        for layer in self.layers:
            plan, bias = layer._packed.plan, layer.bias
            own = None if plan is None else prepared(plan, x, bias, "")
            if not isinstance(own, rows.RowProduct):
                return None
            ready[layer] = own
            rounds.add(own.rounds_x)
            dtypes |= set() if bias is None else {bias.dtype}
        if len(rounds) > 1 or len(dtypes) > 1 or (self._joined is None and not self.place()):
            return None
        assert self._joined is not None
        run = self._joined.prepare(x.shape, x.dtype, next(iter(dtypes), None), rounds.pop())
        product = None if run is None else _Product(run, ready)
        if product is not None:
            self._products[x.shape, x.dtype] = product
        return product


def _tensors_of(layer: QuantizedLinear) -> Iterator[_Tensor]:
    own: dict[str, Any] = layer.__dict__["_parameters"]
    for name in dict.fromkeys([*layer.stored_parameters(), "bias"]):
        tensor = own.get(name)
        yield name, tensor, 0 if tensor is None else tensor._version, 0 if tensor is None else tensor.data_ptr()


def make_ready(model: nn.Module, filter: Callable[[str], bool]) -> None:
    """Let layers keep copies of their weights on a CPU; make these and their loops now, and join layers with the same x.

    filter(name): of which layers.  Where there is an accelerator, to which the model may be moved, the first product does it.
    """
    keep_copies(model, filter)
    if torch.accelerator.is_available() or kept.INTERLEAVE.value() == "never":
        return
    groups = siblings_of(model, filter)
    together = {id(layer) for group in groups for layer in group.layers}
    layers = [layer for name, layer in model.named_modules()
              if isinstance(layer, QuantizedLinear) and filter(name) and layer.keeps_copy and not layer.match_dense]
    layers.sort(key=lambda layer: id(layer) in together)         # loops are compiled for the first of a kind, which gets a copy
    tasks = [group.place for group in groups]
    for dtype in dict.fromkeys(layer.compute_dtype for layer in layers):
        every = [layer.packed for layer in layers if layer.compute_dtype == dtype and _is_filled(layer)]
        cpu.make_ready((packed if packed.order is None else packed.as_stored() for packed in every), dtype, tasks)
        tasks = []


def _is_filled(layer: QuantizedLinear) -> bool:
    """Whether all tensors of a layer are in memory, not on meta."""
    return all(tensor.device.type == "cpu" and is_plain(tensor) for tensor in layer._stored_tensors().values())


def siblings_of(model: nn.Module, filter: Callable[[str], bool]) -> list[Siblings]:
    """Layers of a model that may have the same x, by their names; they refer to one another from now on."""
    groups: list[Siblings] = []
    for parent, module in list(model.named_modules()):
        for names in SIBLINGS:
            layers = {f"{parent}.{name}".lstrip("."): module._modules.get(name) for name in names}
            own = [layer for name, layer in layers.items()
                   if isinstance(layer, QuantizedLinear) and _may_join(layer) and filter(name)]
            if len(own) > 1 and len({id(layer) for layer in own}) == len(own):
                groups.append(Siblings(own))
                for layer in own:
                    layer.__dict__["siblings"] = groups[-1]
    return groups


def _may_join(layer: QuantizedLinear) -> bool:
    """Whether a layer keeps a copy of its weight, and has no columns in another order."""
    return layer.keeps_copy and may_change_storage(layer) and _is_filled(layer) and \
        loops.are_compiled(layer.packed) and layer.packed.order is None
