"""Linear layers over int4 weights for torch's fused operations, on a CPU and on an XPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.models.experts import Experts
from qdsl.runtime.cpu.int4 import (
    Int4Operation,
    check_groups,
    format_of,
    native_storage,
    operation_for,
    pad_groups,
    unpad_groups,
)
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.linear import check_bias, check_x
from qdsl.runtime.torch.model import Report, Skip, check_model, replace_layers
from qdsl.runtime.torch.ops import autocast, is_differentiated
from qdsl.runtime.weight.arrays import common_tensor
from qdsl.runtime.weight.convert import default_tensors
from qdsl.runtime.weight.packed import FormatError, PackedWeight

TERMS = 3                                                        # numbers of bfloat16 that a float32 is at most the sum of
CODES = "qweight"                                                # the parameter of a layer that holds codes


def _parts(packed: PackedWeight, operation: Int4Operation) -> list[PackedWeight]:
    """The weight in the operation's storage: whole tiles of rows, and the remaining rows.  Raises FormatError."""
    format, storage, n = format_of(operation), native_storage(operation), packed.shape[0]
    if n % operation.rows:
        raise FormatError(f"N = {n} is no multiple of {operation.rows}, which aten::{operation.name} needs")
    if not operation.tail:
        parts = [format.convert(packed, storage, **dict(operation.params))]
    else:
        tile = format.empty((1 << 12, 1 << 12), storage).step("N")
        whole = n // tile * tile
        parts = [format.convert(packed.shard("N", start, stop), kind, **dict(operation.params))
                 for start, stop, kind in ((0, whole, storage), (whole, n, operation.tail)) if start < stop]
    check_groups(parts[0], operation)
    return parts


class FusedLinear(QuantizedLinear):
    """A linear layer over an int4 weight that runs one of torch's own fused operations.

    Its parameters are the tensors that the operation takes: `qweight` as torch packs it, scales, and `ret_idx` where columns are
    stored by groups (act-order).  Codes of groups that are too short for the operation have words of zeros after them.
    `checkpoint_weight()` converts them back, bit for bit, to the weight it was made of.

    Forward calls the operation for x in the dtypes for which it is fast: on a CPU bfloat16, on an XPU float16, bfloat16 and
    float32.  For other dtypes, for many rows of x, where x needs gradients, in other modes and on other devices it runs
    the format's own `linear`.  On a CPU weights are exact, products and sums float32, and each term of the scales adds one
    rounding to bfloat16.  On an XPU the operation gets x and scales in x's dtype if scales have it too, else in float32.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None,
                 input_scale: Tensor | None = None) -> None:
        """packed: a weight [N, K] of any format.  input_scale: kept for saving.

        Raises FormatError where the operation of its device cannot hold the weight exactly.
        """
        nn.Module.__init__(self)
        self.register_buffer("input_scale", input_scale)
        self._x_scale = None
        check_bias(bias, packed.shape)
        self.out_features, self.in_features = packed.shape
        self.compute_dtype = dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        self.device_type, self.operation = packed.device.type, operation_for(packed.device)
        parts = _parts(packed, self.operation)
        self.format, self.group = parts[0].format, check_groups(parts[0], self.operation)
        self._layouts = [(part.derive({}), part.tensors[self.operation.arguments[0]].shape) for part in parts]
        self._packed = parts[0].derive({}, packed.shape)
        self._source = packed.apply(lambda tensor: tensor.to("meta"))
        codes, *others = self.operation.arguments
        order = [parts[0].layout.order] if parts[0].order is not None else []
        self._names = {codes: CODES, **{name: name for name in (*others, *order)}}
        for name, own in self._names.items():
            tensor = _joined(parts, name, name == codes)
            tensor = pad_groups(tensor, self._packed, self.group) if name == codes else tensor
            tensor = _split_scales(tensor, self.operation.dtypes[0]) if self._is_split(name) else tensor
            self.register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        self._dtypes = {name: tensor.dtype for name, tensor in self._stored_tensors().items()}
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        if different := _first_difference(packed, self.checkpoint_weight()):
            raise FormatError(f"{packed.format.name}.{packed.storage} would not come back bit for bit: '{different}' differs")
        self._specialize()

    # -- weights ------------------------------------------------------------------------------------------------------

    def parts(self) -> list[PackedWeight]:
        """The rows of the weight in whole tiles, and the remaining rows: views, with the terms of scales added."""
        return self._views(self._stored_tensors())

    def _is_split(self, name: str) -> bool:
        """Whether a tensor is stored as terms [terms, ...]."""
        return self.operation.split and name in self.operation.arguments[1:]

    def _views(self, tensors: Mapping[str, Tensor]) -> list[PackedWeight]:
        views, start = [], 0
        codes, *scales = self.operation.arguments
        whole = {name: _sum(tensor.detach()) if self._is_split(name) else tensor.detach() for name, tensor in tensors.items()}
        whole[codes] = unpad_groups(whole[codes], self._packed, self.group)
        for layout, shape in self._layouts:
            rows, part = layout.shape[0], dict(whole)
            part[codes] = part[codes].narrow(0, start, rows).view(shape)
            part |= {name: part[name].narrow(_rows_axis(layout, name), start, rows) for name in scales}
            views.append(layout.derive(part))
            start += rows
        return views

    @property
    def packed(self) -> PackedWeight:
        """The weight in the operation's format; a copy, in the storage without tiles, if N is not a multiple of a tile."""
        parts = self.parts()
        if len(parts) == 1:
            return parts[0]
        return PackedWeight.join([part.format.convert(part, self.operation.tail) for part in parts])

    def checkpoint_weight(self) -> PackedWeight:
        """A copy of the weight in its original format, storage and parameters."""
        source = self._source
        weight = source.format.convert(self.packed, source.storage, **source.params)
        tensors = {**weight.tensors, **default_tensors(weight, source.tensors.keys() - weight.tensors.keys())}
        return source.derive({name: tensors[name] for name in weight.layout.tensors if name in tensors})

    def _note(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, after a check.  Raises FormatError where they are not a valid weight."""
        for part in self._views(tensors):
            part.format.checked(part)
        return dict(tensors)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        """Load tensors of the same operation, or report what does not fit and load nothing; no dtype is converted."""
        current = self._stored_tensors()
        loaded = {name: state_dict[prefix + own] for name, own in self._names.items() if prefix + own in state_dict}
        wrong = [f"mismatch for {prefix}{self._names[name]}: the state_dict has {str(tensor.dtype)[6:]} {list(tensor.shape)}, "
                 f"the layer {str(current[name].dtype)[6:]} {list(current[name].shape)}" for name, tensor in loaded.items()
                 if (tensor.dtype, tensor.shape) != (current[name].dtype, current[name].shape)]
        try:
            if not wrong and not any(tensor.is_meta for tensor in (*current.values(), *loaded.values())):
                self._note({**current, **loaded})
        except FormatError as error:
            wrong.append(f"{prefix[:-1] or type(self).__name__}: {error}")
        if wrong:
            error_msgs += wrong
            return
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                        error_msgs)

    # -- products -----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """The linear layer: the fused operation where it supports x, else the format's own `linear`."""
        check_x(input, self.bias, self._packed.shape, self.get_parameter(CODES).device)
        x = autocast(input)
        return self._fused(x) if self._is_fusable(x) else self._ordinary(x)

    def _is_fusable(self, x: Tensor) -> bool:
        """Whether the operation supports x; it has no derivatives and no batching rules."""
        if self.batch_invariant or self.match_dense or x.dtype not in self.operation.dtypes:
            return False
        if x.device.type != self.device_type or not x.numel():
            return False
        most, scales = self.operation.most, self.get_parameter(self.operation.arguments[1])
        if most is not None and x.numel() * len(scales) > most * self.in_features:
            return False
        if torch.is_grad_enabled() and x.requires_grad:
            return False
        return torch.compiler.is_compiling() or not is_differentiated(x, None)

    def _fused(self, x: Tensor) -> Tensor:
        tensors = self._stored_tensors()
        codes, *scales = [tensors[name] for name in self.operation.arguments]
        order = tensors.get(self._packed.layout.order)
        rows = x.reshape(-1, self.in_features) if order is None else x.reshape(-1, self.in_features).index_select(1, order)
        rows = pad_groups(rows, self._packed, self.group)
        dtype = x.dtype if x.dtype == scales[0].dtype else torch.float32
        terms = [(term,) for term in scales[0]] if self.operation.split else [
            tuple(scale.to(dtype) if scale.is_floating_point() else scale for scale in scales)]
        product = getattr(torch.ops.aten, self.operation.name)
        out = _sum([product(rows.to(dtype).contiguous(), codes, self.group, *term) for term in terms])
        out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _ordinary(self, x: Tensor) -> Tensor:
        """The format's own `linear`, which is differentiable."""
        parts = self.parts()
        if self.match_dense:
            weight = torch.cat([part.format.dequantize(part, x.dtype) for part in parts])
            return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        rows = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if self.bias is None else torch.split(self.bias, rows)
        return torch.cat([part.format.linear(x, part, bias, batch_invariant=self.batch_invariant)
                          for part, bias in zip(parts, biases, strict=True)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, operation={self.operation.name}"


def _rows_axis(weight: PackedWeight, name: str) -> int:
    return next(place for place, axis in enumerate(weight.layout.tensors[name].axes) if axis.dim == "N")


def _joined(parts: Sequence[PackedWeight], name: str, is_codes: bool) -> Tensor:
    """A tensor of all parts as the operation takes it: codes [N, ...] concatenated, scales along their rows."""
    tensors = [part.tensors[name] for part in parts]
    if is_codes:
        rows = [tensor.reshape(part.shape[0], -1) for part, tensor in zip(parts, tensors, strict=True)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]
    return tensors[0] if len(parts) == 1 or name == parts[0].layout.order else torch.cat(tensors, _rows_axis(parts[0], name))


def _split_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Tensors [terms, ...] in a narrower dtype that sum exactly to `scales`.  Raises FormatError where there are none."""
    terms, left = [scales.to(dtype)], scales - scales.to(dtype)
    while bool((left != 0).any()) and len(terms) < TERMS:
        terms.append(left.to(dtype))
        left = left - terms[-1]
    if not torch.equal(_sum(terms), scales):
        raise FormatError(f"scales are no sums of {TERMS} numbers in {str(dtype)[6:]}")
    return torch.stack(terms)


def _sum(terms: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum in float32 of tensors, or over the first axis of a tensor, in order."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total


def _first_difference(before: PackedWeight, after: PackedWeight) -> str:
    """The first tensor that differs in bits; '' where there is none."""
    for name in {**before.tensors, **after.tensors}:
        pair = [weight.tensors[name] for weight in (before, after) if name in weight.tensors]
        if len(pair) < 2 or pair[0].dtype != pair[1].dtype or common_tensor(pair) is None:
            return name
    return ""


# -- models ------------------------------------------------------------------------------------------------------------


def fuse_model(model: nn.Module, skip: Skip = None) -> Report:
    """Replace a model's quantized linear layers with FusedLinear layers; `qdsl.fuse_` explains the arguments."""
    check_model(model)
    stacked = {id(part) for module in model.modules() if isinstance(module, Experts) for part in module.parts}
    owners = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())

    def fused(layer: QuantizedLinear) -> QuantizedLinear | str:
        if isinstance(layer, FusedLinear):
            return "fused already"
        if layer.quantize_x:
            return "x is quantized, and the operation takes floats"
        if layer.own_transforms:
            return "it transforms x, which the fused layer does not"
        if id(layer) in stacked:
            return "experts of a stack are multiplied together"
        if any(owners[id(tensor)] > 1 for tensor in layer._stored_tensors().values()):
            return "another module has the same tensors"
        try:
            return FusedLinear(layer.packed, layer.bias, layer.compute_dtype, layer.input_scale)
        except FormatError as error:
            return str(error)

    report = replace_layers(model, "stored for torch's fused int4 operations", fused, skip)
    for name in report.quantized:
        layer = model.get_submodule(name)
        assert isinstance(layer, FusedLinear)
        if layer.compute_dtype not in layer.operation.dtypes:
            fast = " and ".join(str(dtype)[6:] for dtype in layer.operation.dtypes)
            report.notes[name] = f"runs unfused in {str(layer.compute_dtype)[6:]}: cast the model to {fast}"
    return report
