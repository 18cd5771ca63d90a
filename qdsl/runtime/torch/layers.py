"""torch's Linear and Embedding layers over packed weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from qdsl.core.transforms import INPUT, OUTPUT
from qdsl.runtime.libraries.private_apis import is_autocast_enabled, is_direct
from qdsl.runtime.torch.linear import INVARIANT, QUANTIZE_X, check_bias
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.torch.ops import autocast, is_plain
from qdsl.runtime.torch.products import Product, product_of, without_settings
from qdsl.runtime.torch.transforms import LayerTransform, transformed, with_tensors
from qdsl.runtime.weight import eight
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat, check_weight
from qdsl.runtime.weight.products import run_prepared
from qdsl.runtime.weight.transforms import fold_transforms, folded_bias


class QuantizedLinear(PackedModule, nn.Linear):
    """nn.Linear over a packed weight [N, K].  The product has the dtype of x, not compute_dtype.

    input_scale: a checkpoint's static scale of x, a buffer of one float, saved and loaded like a bias.  With quantize_x it
    replaces the scale per row; without, it is ignored.
    transforms: what the layer does to x before the product and to the result after it (`set_transforms`), else absent.
    """

    input_scale: Tensor | None
    quantize_x: bool = False                                     # these three as in `linear`; may be changed at any time
    batch_invariant: bool = False
    match_dense: bool = False
    replaced: tuple[nn.Module, Product] | None = None            # a module of another class, without its weight
    siblings: Any = None                                         # layers that multiply the same x (siblings.py), or None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None,
                 quantize_x: bool = False, input_scale: Tensor | None = None) -> None:
        check_weight(packed, self.format)
        nn.Module.__init__(self)                                 # nn.Linear.__init__ would allocate a dense weight
        if input_scale is not None and (why := _why_wrong_scale(input_scale)):
            raise FormatError(f"input_scale {why}")
        self.register_buffer("input_scale", input_scale)
        self._x_scale: str | None = None                         # read once, because reading waits for the GPU
        self.out_features, self.in_features = packed.shape
        check_bias(bias, packed.shape)
        if quantize_x:
            eight.check_quantize_x(packed)
            self.quantize_x = True
        self.compute_dtype = dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        self._hold(packed)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self._read_scale()

    @classmethod
    def empty(cls, shape: tuple[int, int], storage: str | None = None, bias: bool = False, device: torch.device | str = "meta",
              dtype: torch.dtype | None = None, optional: Sequence[str] | None = None, **params: int | str) -> QuantizedLinear:
        """A layer for a weight [N, K] that load_state_dict(assign=True) fills later; on meta by default.

        dtype: compute_dtype, and the bias's dtype.  optional: the optional tensors to include, by default scales.  A state_dict
        may add an input_scale.  Raises FormatError.
        """
        packed = cls.format.empty(shape, storage, device, optional, **params)
        return cls(packed, torch.empty(shape[0], dtype=dtype, device=device) if bias else None, dtype)

    def set_transforms(self, transforms: Sequence[LayerTransform]) -> None:
        """Apply these to x and to the result from now on, in order; none removes them."""
        self._modules.pop("transforms", None)
        if transforms:
            self.transforms = nn.ModuleList(transforms)
        self._specialize()

    @property
    def own_transforms(self) -> list[LayerTransform]:
        """The transforms of the layer, in order; [] for most layers."""
        transforms: Any = self._modules.get("transforms")
        return [] if transforms is None else [*transforms]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K] by which a dense layer multiplies x: with the transforms.  Raises FormatError for a norm of x."""
        if not self.own_transforms:
            return super().dequantize(dtype)
        return fold_transforms(super().dequantize(torch.float32), *with_tensors(self.own_transforms)).to(dtype)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """An nn.Linear that computes the same, for example to merge a LoRA; in compute_dtype by default.

        Transforms become a part of its weight.  Raises FormatError for a norm of x.
        """
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.dequantize(dtype or self.compute_dtype), requires_grad=False)
        dense.bias = self.bias
        if self.bias is not None and any(own.transform.side == OUTPUT for own in self.own_transforms):
            dense.bias = nn.Parameter(folded_bias(self.bias.detach(), *with_tensors(self.own_transforms)), requires_grad=False)
        return dense

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] times the weight's transpose, plus the bias: [..., N]."""
        transforms: Any = self._modules.get("transforms")
        if transforms is not None:
            return transformed(transforms, self._linear(transformed(transforms, input, INPUT)), OUTPUT)
        return self._linear(input)

    def _linear(self, input: Tensor) -> Tensor:
        """The product with the packed weight, plus the bias."""
        if not is_dynamo_compiling():
            own = self.__dict__                                  # attribute lookups of nn.Module cost more
            siblings = own.get("siblings")
            if siblings is not None and (out := siblings.take(self, input)) is not None:
                return out                                       # type: ignore[no-any-return]
            plan, parameters = own["_packed"].plan, own["_parameters"]
            is_quick = own["_x_scale"] is None and not (self._has_branch or self.match_dense)
            if plan is not None and "bias" in parameters and is_quick:
                bias = parameters["bias"]
                if is_direct(input, bias) and (tensors := self._unchanged(plan.names)) is not None:
                    x = autocast(input) if is_autocast_enabled() else input
                    mode = QUANTIZE_X if self.quantize_x else INVARIANT if self.batch_invariant else ""
                    if siblings is not None and not mode and (out := siblings.compute(self, input)) is not None:
                        return out                               # type: ignore[no-any-return]
                    if (out := run_prepared(x, plan, tensors, bias, mode)) is not None:
                        return out
        return self._product(input)

    def take_mode(self, other: QuantizedLinear) -> None:
        """Compute as another layer, but for its `quantize_x`, and in place of the same module."""
        self.batch_invariant, self.match_dense = other.batch_invariant, other.match_dense
        self.replaced = other.replaced
        if transforms := other.own_transforms:
            self.set_transforms(transforms)

    def _product(self, input: Tensor) -> Tensor:
        """The product without the fast path, for any x and current tensors."""
        if self.quantize_x and self._x_scale is None and self.input_scale is not None:
            self._read_scale()
        packed = self.packed
        scale = None if self._x_scale is None else float(self._x_scale)
        out = self.format.linear(input, packed, self.bias, self.quantize_x, self.batch_invariant, scale, self.match_dense)
        self.keep_plan(packed)
        return out

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        """As in PackedModule; an input_scale keeps its stored shape and dtype."""
        own, scale = self.input_scale, state_dict.get(prefix + "input_scale")
        errors = len(error_msgs)
        if scale is not None and (why := _why_wrong_scale(scale)):
            error_msgs.append(f"{prefix}input_scale {why}")
            return
        if scale is not None:
            self.input_scale = torch.empty_like(scale, device=self.device)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if len(error_msgs) > errors:
            self.input_scale = own

    def _validate(self) -> None:
        super()._validate()
        self._read_scale()

    def _uncast_tensors(self) -> list[Tensor]:
        return [*super()._uncast_tensors(), *([] if self.input_scale is None else [self.input_scale])]

    def _read_scale(self) -> None:
        scale = self.input_scale                                 # as text, which torch.compile never takes for a variable
        self._x_scale = None if scale is None or not is_plain(scale) else repr(float(scale))
        if self.quantize_x and self._x_scale is not None:
            self._specialize()

    def _description(self) -> Hashable:
        transforms = tuple(own.description for own in self.own_transforms)
        return super()._description(), self.__dict__.get("_x_scale") if self.quantize_x else None, transforms

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "quantize_x" and "_names" in self.__dict__:
            if value and (storage := eight.storage_for(self._packed)):
                self._store_as(storage)                          # loaders store weights planar, which serves x as it is
            self._specialize()                                   # a program has the static scale of x

    def _store_as(self, storage: str) -> None:
        """Hold the same weight in another storage."""
        packed = self.format.convert(self.packed, storage)
        for name in self.stored_parameters():
            del self._parameters[name]
        del self._names                                          # until it holds the other tensors, as a new layer
        self._hold(packed)

    def extra_repr(self) -> str:
        """Features, format and bias, as print(model) shows them."""
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"format={self.format.name}.{self._packed.storage}{', quantize_x=True' if self.quantize_x else ''}")


def replaced_by(module: nn.Module) -> tuple[nn.Module, Product] | None:
    """What a packed layer in place of a module stands for, to be dense again as that; None for an nn.Linear."""
    if isinstance(module, QuantizedLinear):
        return module.replaced
    return None if type(module) is nn.Linear else (without_settings(module), product_of(module))


class QuantizedEmbedding(PackedModule, nn.Embedding):
    """nn.Embedding over a packed weight [num_embeddings, embedding_dim]; returns compute_dtype.

    Rows are decoded as in Format.dequantize_rows.  max_norm scales the decoded rows; nn.Embedding would change its table in
    place, but the packed table stays unchanged.  padding_idx, scale_grad_by_freq and sparse affect gradients of the table, which
    does not exist here: dense() and adapters use them.
    """

    def __init__(self, packed: PackedWeight, padding_idx: int | None = None, dtype: torch.dtype | None = None,
                 max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
                 ) -> None:
        check_weight(packed, self.format)
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packed.shape
        if padding_idx is not None and not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise FormatError(f"padding_idx {padding_idx} is not among {self.num_embeddings} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % self.num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.compute_dtype = dtype or torch.get_default_dtype()
        self._hold(packed)

    @classmethod
    def empty(cls, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              dtype: torch.dtype | None = None, optional: Sequence[str] | None = None, **params: int | str) -> QuantizedEmbedding:
        """A layer for a weight [num_embeddings, embedding_dim] that is loaded later, as Linear.empty."""
        return cls(cls.format.empty(shape, storage, device, optional, **params), dtype=dtype)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An nn.Embedding with the decoded weight; compute_dtype by default."""
        dense = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, self.max_norm, self.norm_type,
                             self.scale_grad_by_freq, self.sparse, device="meta")
        dense.weight = nn.Parameter(self.dequantize(dtype or self.compute_dtype), requires_grad=False)
        return dense

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the weight: [*index.shape, K]."""
        rows = self.format.dequantize_rows(self.packed, input, self.compute_dtype)
        return rows if self.max_norm is None else _renormed(rows, self.max_norm, self.norm_type)

    def extra_repr(self) -> str:
        """Sizes and format, as print(model) shows them."""
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}.{self._packed.storage}"


def _renormed(rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows [..., K] scaled down to at most this norm, by the formula of nn.Embedding."""
    norms = torch.linalg.vector_norm(rows, norm_type, -1, keepdim=True)
    return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


def _why_wrong_scale(scale: Tensor) -> str:
    """Why a tensor is not a static scale of x; '' if it is one."""
    if not isinstance(scale, Tensor) or not scale.is_floating_point() or scale.numel() != 1:
        shown = f"{str(scale.dtype)[6:]} {list(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        return f"is one float, not {shown}"
    return ""


@cache
def linear_class(format: WeightFormat) -> type[QuantizedLinear]:
    return type("Linear", (QuantizedLinear,), {"format": format, "__module__": format.__module__,
                                               "__doc__": f"A linear layer with a {format.name} weight."})


@cache
def embedding_class(format: WeightFormat) -> type[QuantizedEmbedding]:
    return type("Embedding", (QuantizedEmbedding,), {"format": format, "__module__": format.__module__,
                                                     "__doc__": f"An embedding with a {format.name} weight."})
