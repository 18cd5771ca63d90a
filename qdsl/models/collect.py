"""Collects the tensors of a model with packed weights, under the names and in the storages of its checkpoint, to save them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import module_of
from qdsl.checkpoint.detect.rules import numbers, says_numbers
from qdsl.checkpoint.files.safetensors import shown, torch_dtypes
from qdsl.jobs.convert.change import small_tensors
from qdsl.jobs.convert.plan_conversion import full_name
from qdsl.jobs.engine import RewriteError
from qdsl.models.experts import Experts
from qdsl.models.origin import Origin
from qdsl.models.transforms import transform_tensors, transforms_of
from qdsl.runtime.libraries.private_apis import non_persistent_buffers
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.torch.transforms import LayerTransform
from qdsl.runtime.weight.convert import default_tensors, with_scales
from qdsl.runtime.weight.device_dtypes import as_stored
from qdsl.runtime.weight.layout import PLANAR
from qdsl.runtime.weight.packed import FormatError, PackedWeight


class SaveError(ValueError):
    """A model that cannot be saved, or a folder that it cannot be saved into; nothing has been written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be written.  read: returns its elements when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """The safetensors dtype, and the shape."""
        return next(name for name, dtype in torch_dtypes().items() if dtype == self.dtype), self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Rows:
    """A module's weight, or rows [start, stop) of it."""

    module: PackedModule
    start: int = 0
    stop: int | None = None

    def weight(self) -> PackedWeight:
        """These rows as a packed weight, in the storage that the module computes with."""
        whole = self.module.checkpoint_weight()
        return whole.shard("N", self.start, whole.shape[0] if self.stop is None else self.stop)


class CheckpointTensors:
    """The tensors of a model under the names of its checkpoint.

    settings: format, storage and parameters of each packed layer, by its name in the checkpoint.  dense: modules that are not
    packed.  transforms: of layers, by their names there.  changed: some layer is not what the checkpoint has there.
    """

    def __init__(self, model: nn.Module, origin: Origin) -> None:
        self.model, self.origin = model, origin
        self.tensors: dict[str, Stored] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.transforms: dict[str, list[dict[str, Any]]] = {}
        self.dense: list[str] = []
        self.changed = False
        self._written: set[int] = set()                          # parameters and buffers
        self._converted: tuple[_Rows, PackedWeight] | None = None
        self._recorded: set[str] = set()                         # layers that are what the checkpoint has
        self._kinds = origin.kinds()

    def collect(self) -> None:
        """Collect all tensors.  Raises SaveError for a model that cannot be saved."""
        experts = {name: module for name, module in self.model.named_modules() if isinstance(module, Experts)}
        for name, stack in experts.items():
            self._add_experts(name, stack)
        for name, module in self.model.named_modules():
            if isinstance(module, PackedModule):
                self._add_packed(name, module)
        for name, group in self.origin.groups.items():
            block = self.model.get_submodule(name)
            for full in group.tensors.values():
                self._add_plain(full, full, block.get_parameter(full.rpartition(".")[2]))
        for full, tensor in transform_tensors(self.model).items():
            self._add(full, tensor.dtype, tuple(tensor.shape), tensor.detach)
        self._written |= {id(buffer) for module in self.model.modules() if isinstance(module, LayerTransform)
                          for buffer in module.buffers()}
        self._add_unpacked()
        for full, tensor in self.origin.unused.items():
            self._add(full, tensor.dtype, tuple(tensor.shape), tensor.detach)
        every = self.origin.layers.keys() | self.origin.stacks.keys() | self.origin.decoded.keys()
        self.changed |= self.origin.changed or bool(every - self._recorded)

    def _add_unpacked(self) -> None:
        """Add parameters and buffers that hold plain numbers, under the names of the checkpoint."""
        transient = {f"{name}.{own}".lstrip(".") for name, module in self.model.named_modules()
                     for own in non_persistent_buffers(module)}
        plain: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        plain |= dict(self.model.named_buffers(remove_duplicate=False))
        others: dict[str, Tensor] = {}                           # those for which the checkpoint has no name
        for name, tensor in plain.items():
            full, is_shared = self.origin.plain.get(name, name), id(tensor) in self._written and name not in self.origin.plain
            if name in transient or full in self.tensors or is_shared or self._add_reencoded(name, tensor):
                continue
            if name in self.origin.biases:
                self._add_biases(name, tensor)
            elif name in self.origin.plain or self.origin.revert is None:
                self._add_plain(name, full, tensor)
            else:
                others[name] = tensor
        for full, tensor in (self.origin.revert(self.model, others) if self.origin.revert and others else {}).items():
            self._add_plain(full, full, tensor)

    def _add_packed(self, name: str, module: PackedModule) -> None:
        parameters = {id(parameter) for parameter in module._stored_tensors().values()}
        if parameters <= self._written and name not in self.origin.layers:
            return                                               # it shares the tensors of another layer
        self._written |= parameters
        self._add_layer(name, _Rows(module), self.origin.layers.get(name))

    def _add_layer(self, name: str, rows: _Rows, record: Layer | None) -> None:
        """Add a layer.  record: the checkpoint's layer, None for one that it does not have."""
        layer, storage = self._record(name, rows.weight(), record)
        weight = self._as_stored(name, rows, storage, record)
        for tensor, value in weight.tensors.items():
            if tensor not in numbers(_description(weight)):
                full, dtype, shape = self._full_name(layer, weight, tensor), value.dtype, tuple(value.shape)
                if dtype != (kept := self._kinds.get(full, (None,))[0]):             # which may have elements by themselves
                    # Words take the place of shorter integers, whose type the producer's settings may say.
                    self.changed |= dtype == torch.int32 and kept is not None and kept.itemsize < dtype.itemsize
                    kind, shape = weight.described[tensor].of_file(str(dtype)[6:], shape)
                    dtype = getattr(torch, kind)
                self._add(full, dtype, shape, partial(self._tensor, name, rows, storage, record, tensor, dtype))
        self._add_settings(layer, weight)

    def _add_experts(self, name: str, stack: Experts) -> None:
        record, layers = self.origin.layers.get(name), self.origin.stacks.get(name, ())
        if record is not None and record.experts is None:
            self._add_packed(name, stack.parts[0])               # type: ignore[arg-type]  # a matrix of E * N rows there, too
            return
        self._written |= {id(parameter) for part in stack.parts for parameter in part._parameters.values()}
        if layers and len(stack.parts) in (1, len(layers)):
            self._add_pieces(name, stack, layers)
            return
        try:
            first = stack.weight(0)
        except FormatError as error:
            raise SaveError(f"experts {shown(name)} have several weights each, which no file of stacks has: {error}") from None
        sizes = {tuple(tensor.shape for tensor in part.packed.tensors.values()) for part in stack._linears()}
        if len(sizes) > 1:
            raise SaveError(f"experts {shown(name)}: the tensors of {first.format.name} differ in size from expert to expert, "
                            "and a stack in a file has one size; leave the experts out when you quantize the model")
        layer, storage = self._record(name, first, record)
        weight = self._convert(name, first, storage, record)
        for tensor, value in weight.tensors.items():
            full = self._full_name(layer, weight, tensor)
            own = (stack.experts, *(value.t().shape if layer.transposed else value.shape))
            shape = self._stored_shape(full, value.dtype, own)
            self._add(full, value.dtype, shape, partial(self._stacked, name, stack, tensor, layer.transposed, storage, shape))
        self._add_settings(layer, weight)

    def _stacked(self, name: str, stack: Experts, tensor: str, is_transposed: bool, storage: str,
                 shape: tuple[int, ...]) -> Tensor:
        """A tensor of all experts in the shape of files; a single number that they share."""
        record = self.origin.layers.get(name)
        parts = [self._convert(name, stack.weight(expert), storage, record).tensors[tensor] for expert in range(stack.experts)]
        if math.prod(shape) == parts[0].numel() != stack.experts * parts[0].numel():
            return parts[0]
        return torch.stack([part.t() if is_transposed and part.dim() == 2 else part for part in parts])

    def _add_pieces(self, name: str, stack: Experts, layers: Sequence[Layer]) -> None:
        """Add experts that the checkpoint stores one by one: separate weights, or rows of the joined one."""
        modules = list(stack.parts) if len(stack.parts) == len(layers) else [stack.parts[0]] * len(layers)
        start = 0
        for layer, module in zip(layers, modules, strict=True):
            start, stop = (start, start + layer.shape[0]) if len(stack.parts) == 1 else (0, layer.shape[0])
            self._add_layer(name, _Rows(module, start, stop), layer)  # type: ignore[arg-type]  # parts are packed modules
            start = stop

    def _add_biases(self, name: str, bias: Tensor) -> None:
        """Add biases of experts that the checkpoint stores one by one."""
        rows = self.origin.biases[name]
        for full, part in zip(rows, torch.split(bias.flatten(), list(rows.values())), strict=True):
            self._add_plain(name, full, part)
        self._written.add(id(bias))

    def _record(self, name: str, weight: PackedWeight, record: Layer | None) -> tuple[Layer, str]:
        """A layer under the name and in the storage of the checkpoint.  record: the checkpoint's layer, if any."""
        original = record
        if record is not None and (record.format, dict(record.params)) == (weight.format.name, weight.params):
            self._recorded.add(name)
            storage = record.storage
        else:
            self.changed = True
            storage = weight.storage if weight.storage != PLANAR else next(iter(weight.variant.storages))
            own = self.origin.plain.get(f"{name}.weight".lstrip("."), name).removesuffix(".weight")
            record = Layer(record.name if record else own, weight.format.name, storage, weight.params, weight.shape)
        if record is not original and "parts" in _description(weight).detect:
            raise SaveError(f"layer {shown(name)}: files hold {weight.format.name} in groups of weights, and this is a layer by "
                            f"itself; `qdsl compress --format {weight.format.name}` writes them")
        self.settings[record.name] = {"format": weight.format.name, "storage": storage, **weight.params}
        if transforms := transforms_of(self.model.get_submodule(name)):
            self.transforms[record.name] = [transform.data() for transform in transforms]
        return record, storage

    def _as_stored(self, name: str, rows: _Rows, storage: str, record: Layer | None) -> PackedWeight:
        """A weight in the storage of files; the last converted one is cached."""
        if self._converted is None or self._converted[0] != rows:
            self._converted = None
            self._converted = rows, self._convert(name, rows.weight(), storage, record)
        return self._converted[1]

    def _tensor(self, name: str, rows: _Rows, storage: str, record: Layer | None, tensor: str, dtype: torch.dtype) -> Tensor:
        own = self._as_stored(name, rows, storage, record).tensors[tensor]
        return own if own.dtype == dtype else own.flatten().view(dtype)

    def _convert(self, name: str, weight: PackedWeight, storage: str, record: Layer | None) -> PackedWeight:
        """A weight in the storage of files, with default tensors, such as an index of columns in order, where the files had them.
        """
        try:
            stored = weight.format.convert(weight, storage)
        except FormatError as error:
            raise SaveError(f"layer {shown(name)}: {weight.format.name}.{weight.storage} cannot be written as {storage}: {error}"
                            ) from None
        dtypes = stored.dtypes                                   # a device may hold bytes in place of 8-bit floats
        stored = with_scales(stored.derive({own: as_stored(tensor, dtypes[own]) for own, tensor in stored.tensors.items()}))
        absent = [] if record is None else [key for key in record.tensors if key not in stored.tensors]
        return stored.derive({**stored.tensors, **default_tensors(stored, absent)}) if absent else stored

    def _full_name(self, layer: Layer, weight: PackedWeight, name: str) -> str:
        if name in layer.tensors:
            return layer.tensors[name]
        aliases = weight.described[name].aliases
        if layer.experts is None:
            return full_name(layer, name, aliases)
        stacked = Layer(layer.name, tensors={"": "."})           # a weight with a name of its own
        try:
            return {own: full_name(stacked, own, weight.described[own].aliases) for own in weight.tensors}[name]
        except RewriteError:                                     # a format whose tensors cannot be called after a parameter
            return full_name(Layer(layer.name), name, aliases)

    def _add_settings(self, layer: Layer, weight: PackedWeight) -> None:
        """Add the small tensors that files store with a layer."""
        kept = {full: self.origin.settings[full] for full in layer.settings if full in self.origin.settings}
        if not kept and not (layer.experts is not None and says_numbers(_description(weight))):
            names = numbers(_description(weight))
            values = {name: float(weight.tensors[name]) for name in names if name in weight.tensors}
            small = small_tensors(layer, weight.format, weight.params, {}, values)
            kept = {full_name(layer, name): torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
                    for name, (dtype, shape, data) in small.items()}
        for full, tensor in kept.items():
            self._add(full, tensor.dtype, tuple(tensor.shape), tensor.detach)

    def _add_reencoded(self, name: str, tensor: Tensor) -> bool:
        """Encode a layer again that the checkpoint stores without loss and the model as plain numbers; False where it cannot."""
        layer = self.origin.decoded.get(name)
        format = module_of(layer).FORMAT if layer is not None and layer.experts is None else None
        if layer is None or format is None or not format.variant(layer.params).copies or tensor.numel() != math.prod(layer.shape):
            return False
        try:
            weight = format.quantize(tensor.detach().reshape(layer.shape), layer.storage, **layer.params)
        except FormatError:                                      # numbers that were trained since
            return False
        same = torch.equal(format.dequantize(weight, torch.float32), tensor.detach().reshape(layer.shape).float())
        if not same or weight.tensors.keys() != layer.tensors.keys():
            return False
        self._written.add(id(tensor))
        self._recorded.add(name)
        for key, value in weight.tensors.items():
            self._add(layer.tensors[key], value.dtype, tuple(value.shape), value.detach)
        self._add_settings(layer, weight)
        self.settings[layer.name] = {"format": layer.format, "storage": layer.storage, **layer.params}
        return True

    def _add_plain(self, name: str, full: str, tensor: Tensor) -> None:
        """Add a plain tensor, in the dtype of the checkpoint where that represents its numbers exactly."""
        if tensor.is_meta:
            raise SaveError(f"{shown(name)} is on meta: fill the model before it is saved")
        self._written.add(id(tensor))
        dtype, _ = self._kinds.get(full, (tensor.dtype, ()))
        if dtype != tensor.dtype and not _is_exact(tensor.detach(), dtype):
            dtype = tensor.dtype
        self._add(full, dtype, tuple(tensor.shape), lambda: tensor.detach().to(dtype))
        if name.endswith(".weight") and tensor.dim() == 2:
            self.dense.append(full.removesuffix(".weight"))
            if transforms := transforms_of(self.model.get_submodule(name.removesuffix(".weight"))):
                self.transforms[full.removesuffix(".weight")] = [transform.data() for transform in transforms]

    def _add(self, full: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        if full in self.tensors:
            raise SaveError(f"two tensors of the model are called {shown(full)}")
        stored_shape = self._stored_shape(full, dtype, shape)
        self.tensors[full] = Stored(dtype, stored_shape if math.prod(stored_shape) == math.prod(shape) else shape, read)

    def _stored_shape(self, full: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor in the checkpoint, if it has this dtype there; else `shape`."""
        stored_dtype, stored = self._kinds.get(full, (dtype, shape))
        return stored if stored_dtype == dtype else shape


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not tensor.is_floating_point():
        return False
    same = tensor.to(dtype).to(tensor.dtype)
    return bool(((same == tensor) | (same.isnan() & tensor.isnan())).all())


def _description(weight: PackedWeight) -> Any:
    """The description of a weight's format.  Raises SaveError for a spec of the caller's own, which no reader of files knows."""
    description = next((format for format in descriptions() if format.name == weight.format.name), None)
    if description is None:
        raise SaveError(f"{weight.format.name} does not ship with qdsl, so no reader of its files would know it: start Python "
                        "with QDSL_SPECS, the folder of its spec; or save the model's state_dict, and quantize a new model in "
                        "this format before you load it")
    return description
