"""Fills a model with a checkpoint's packed weights, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.checkpoint.detect.targets import with_storage
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.core.transforms import Transform
from qdsl.host import library
from qdsl.host.system import resident_bytes
from qdsl.models.base import complete_from
from qdsl.models.experts import Experts
from qdsl.models.findings import findings
from qdsl.models.fused import fuse_model
from qdsl.models.grouped import GroupedBlock, Member, hold_group
from qdsl.models.load_report import LoadReport, bytes_by_device, dense_bytes
from qdsl.models.names import Names
from qdsl.models.origin import record_origin, source_origin
from qdsl.models.packed_steps import PackedStep
from qdsl.models.plan import EncodedGroupStep, LoadError, LoadPlan, Rename, plan_load, renamed
from qdsl.models.stacks import Stacks, is_transposed, stacked_layer_shapes, usual_stacks
from qdsl.models.ties import keep_ties, recorded_ties, tie
from qdsl.models.transforms import folded_weight, place_transforms
from qdsl.runtime.cpu.int4 import OPERATIONS
from qdsl.runtime.cpu.linear import has_torch_kernels
from qdsl.runtime.gpu.placement import PLANAR, may_change_storage
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.torch.layers import QuantizedLinear, embedding_class, linear_class, replaced_by
from qdsl.runtime.torch.model import match_dense as match_dense_layers
from qdsl.runtime.torch.model import use_fastest_storages
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.torch.siblings import make_ready
from qdsl.runtime.weight.algebra import concatenate_rows
from qdsl.runtime.weight.arrays import aligned_copy, empty
from qdsl.runtime.weight.packed import FormatError, PackedWeight


@without_autocast
def load_weights(model: nn.Module, path: Path, rename: Rename | None = None, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None, verify: bool = False, copy: bool = False, format: str | None = None,
                 skip: Sequence[str] | None = None, base: str | Path | None = None, match_dense: bool = False,
                 allow_unknown: bool = False, **options: Any) -> LoadReport:
    """Fill a model; `qdsl.load_weights_` explains the arguments."""
    if verify:
        checksums.check(path, is_optional=True)
    with open_checkpoint(path) as checkpoint:
        if base is not None and isinstance(checkpoint.source, FolderSource):
            tie(model)
            complete_from(checkpoint.source, Names(model), base, rename)
        return fill_model(model, checkpoint, rename, device, dtype, verify, copy, format, skip, True, None, True, match_dense,
                          allow_unknown, **options)


@without_autocast
def fill_model(model: nn.Module, checkpoint: Checkpoint, rename: Rename | None = None, device: torch.device | str | None = None,
               dtype: torch.dtype | None = None, verify: bool = False, copy: bool = False, format: str | None = None,
               skip: Sequence[str] | None = None, plain: bool = True, stacks: Stacks | None = None, planar: bool = True,
               match_dense: bool = False, allow_unknown: bool = False, **options: Any) -> LoadReport:
    """Fill a model with the weights of an open checkpoint, as `load_weights` does.

    plain: False leaves plain tensors, other than those that are quantized, to a library that loads them after this.
    stacks: parameters [E, N, K] or [E, K, N] of the model -> for every expert, the layers of the checkpoint whose rows follow one
    another in it.  Those of usual names need not be stated.
    planar: whether weights become planar where that is faster; False leaves it to a library that moves them after this.
    """
    format, options = (None, options) if format is None else with_storage(format, options)
    _check_arguments(device, dtype, format, skip, options)
    tie(model)
    names = Names(model)
    stacks = {**usual_stacks(names.parameters, checkpoint.source, partial(renamed, rename=rename), format), **(stacks or {})}
    _pass_shapes(checkpoint, names, rename, stacks)
    plan = plan_load(names, checkpoint.source, rename, format, skip, plain, stacks)
    if plan.problems:
        raise LoadError("\n  ".join([f"{checkpoint.path} does not fill the model:", *plan.problems]))
    allowed = refuse_changes(checkpoint.path, findings(checkpoint, plan, names, rename, model if plain else None), allow_unknown)
    loader = _Loader(model, names, checkpoint, plan, _read_weights(checkpoint, plan, verify), device, dtype, copy, allowed)
    loader.fill_plain(format, options, plain)
    loader.fill_biases()
    for step in plan.packed:
        loader.place(step)
    for group in plan.groups:
        loader.place_group(group)
    for name, full in plan.transforms.items():
        loader.place_transforms(name, checkpoint.source.transforms[full])
    record_origin(model, loader.origin)
    if plain:
        keep_ties(model, recorded_ties(model))
    if match_dense:
        match_dense_layers(model)
    elif planar and "storage" not in options:
        use_planar(model, loader.report)
    return loader.finished()


def use_planar(model: nn.Module, report: LoadReport, devices: Sequence[str] = ()) -> list[nn.Module]:
    """Store packed layers of a report planar where that is faster on their device: the new modules.

    On a machine without a C compiler, layers on a CPU that torch's fused int4 operation can hold exactly are stored for that.
    devices: types of those whose layers are considered, all without.
    """
    def place(name: str) -> str:
        """The name in the report of a layer, which may be one of experts."""
        return name if name in report.packed else name.rpartition(".")[0]

    def is_left(layer: Any, name: str) -> bool:
        return place(name) not in report.packed or bool(devices and layer.device.type not in devices)

    def is_unfused(layer: Any, name: str) -> bool:
        is_fast = layer.device.type == "cpu" and layer.compute_dtype in OPERATIONS["cpu"].dtypes
        return not is_fast or is_left(layer, name) or not may_change_storage(layer)

    is_allowed = has_torch_kernels() and not library.has_compiler() and PLANAR.value() != "never"
    fused = fuse_model(model, is_unfused).quantized if is_allowed else {}
    changed = [*fused, *use_fastest_storages(model, is_left).quantized]
    make_ready(model, lambda name: not devices and place(name) in report.packed)
    layers: list[Any] = [model.get_submodule(name) for name in changed]
    for name, layer in zip(changed, layers, strict=True):
        report.packed[place(name)] = f"{layer.format.name}.{layer._packed.storage}"
    return layers


def _pass_shapes(checkpoint: Checkpoint, names: Names, rename: Rename | None, stacks: Stacks) -> None:
    """Pass the model's shapes to a checkpoint, for layers that do not state their own."""
    pieces = stacked_layer_shapes(names.parameters, stacks)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in checkpoint.layers.items():
        if name in pieces and (layer.why or math.prod(layer.shape) != math.prod(pieces[name])):
            shapes[name] = pieces[name]
            continue
        own = renamed(name, rename)
        tensors = [] if own is None else [names.tensor(key) for key in (f"{own}.weight".lstrip("."), own)]
        tensor = next((candidate for candidate in tensors if candidate is not None), None)
        numbers = math.prod(layer.shape) * (layer.experts or 1)
        if tensor is not None and tensor.dim() in (2, 3) and (layer.why or numbers != tensor.numel()):
            is_turned = tensor.dim() == 2 and own in names.modules and product_of(names.modules[own]) == "transposed"
            shapes[name] = tuple(tensor.shape)[::-1] if is_turned else tuple(tensor.shape)
    if shapes:
        checkpoint.use_shapes(shapes)


def _check_arguments(device: torch.device | str | None, dtype: torch.dtype | None, format: str | None, skip: Sequence[str] | None,
                     options: Mapping[str, Any]) -> None:
    """Raise LoadError for wrong arguments, and FormatError for unknown options of a format."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LoadError(f"dtype is that of plain numbers and of products: a torch dtype of floats, not {dtype!r}")
    if isinstance(skip, str):
        raise LoadError(f"skip is a list of patterns: give [{skip!r}]")
    for pattern in skip or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise LoadError(f"skip: {pattern!r} is not a regular expression: {error}") from None
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device {str(device)!r} cannot be used: {error}") from None
    if format is None and options:
        raise LoadError(f"{', '.join(options)}: options of a quantizer need format=")
    if format is not None:
        import_module(f"qdsl.generated.{format}").FORMAT.chosen(options)


def _read_weights(checkpoint: Checkpoint, plan: LoadPlan, verify: bool) -> dict[str, list[PackedWeight]]:
    """The weights of layers, by the names of their places, mapped; those of stacks are only checked.  The model is unchanged.

    verify: decode every stream, too.  Raises CheckpointError for what is damaged.
    """
    weights: dict[str, list[PackedWeight]] = {}
    for step in plan.packed:
        for layer in step.layers:
            read = checkpoint.source.weights(layer)
            if step.experts is None:
                weights[step.name] = read
            for weight in read if verify else ():
                try:
                    weight.format.checked(weight).decode_streams()
                except FormatError as error:
                    raise CheckpointError(f"{checkpoint.path}: layer {layer.name}: {error}") from None
    for group in plan.groups:
        checkpoint.source.group_weight(group.group)
        if verify:
            checkpoint.source.decoded(group.group)
    return weights


class _Loader:
    """Places weights in a model."""

    def __init__(self, model: nn.Module, names: Names, checkpoint: Checkpoint, plan: LoadPlan,
                 weights: Mapping[str, list[PackedWeight]], device: torch.device | str | None, dtype: torch.dtype | None,
                 copy: bool, allowed: list[str]) -> None:
        self.model, self.names, self.plan, self.weights = model, names, plan, weights
        self.source = checkpoint.source
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.copy = copy
        self.origin = source_origin(self.source)
        self.report = LoadReport(dense=dict(plan.dense), unused=list(plan.unused), allowed=allowed,
                                 bytes_before=dense_bytes(names, dtype))

    def finished(self) -> LoadReport:
        self.report.device_bytes = bytes_by_device(self.model)
        self.report.bytes_after, self.report.resident_bytes = sum(self.report.device_bytes.values()), resident_bytes()
        self.report.unread = list(self.source.folder.unread) if isinstance(self.source, FolderSource) else []
        return self.report

    # -- plain tensors ------------------------------------------------------------------------------------------------

    def fill_plain(self, format: str | None, options: Mapping[str, Any], plain: bool) -> None:
        """Fill parameters and buffers, if `plain`; then put Linears of a format in place of those that are to be quantized."""
        quantized = {f"{name}.weight".lstrip("."): name for name in self.plan.quantized}
        for name, full in self.plan.plain.items():
            if name in quantized or name in self.plan.stacks:
                continue
            if plain:
                self._fill(name, self.source.tensor(full))
            self.origin.plain[name] = full
        for name, module in quantized.items():
            self._quantize(module, self.plan.plain[name], str(format), options)
        for name, tensors in self.plan.stacks.items():
            try:
                self._quantize_experts(name, tensors, str(format), options)
            except FormatError as error:
                self.report.dense[name] = str(error)
                if plain:
                    self._fill_experts(name, tensors)

    def fill_biases(self) -> None:
        """Fill parameters [E, N] with biases of experts that the checkpoint stores one by one."""
        for name, biases in self.plan.biases.items():
            joined = torch.cat([self.source.tensor(full) for full in biases])
            self._fill(name, joined.view(self.names.parameters[name].shape))
            self.origin.biases[name] = biases

    def _fill(self, name: str, tensor: Tensor) -> None:
        """Set a parameter or buffer under all its names: in place, or with a new tensor where it is on meta."""
        old = self.names.tensor(name)
        assert old is not None
        device, dtype = self._device(old), self._dtype(old) if tensor.is_floating_point() else tensor.dtype
        if not old.is_meta and old.device == device and old.dtype == dtype and not self.names.is_untied(name):
            with torch.no_grad():
                old.copy_(tensor)
            return
        value = aligned_copy(self._moved(tensor, device, dtype))
        if name in self.names.buffers:
            self._set(name, value)
            return
        parameter = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
        for own in self.names.tied(name):
            self._set(own, parameter)

    def _set(self, name: str, tensor: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        owner = self.names.modules[module]
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor

    def _moved(self, tensor: Tensor, device: torch.device, dtype: torch.dtype, is_owned: bool = False) -> Tensor:
        if tensor.is_meta:                                       # of headers alone
            return tensor.to(dtype)
        moved = tensor.to(device, dtype)
        is_mapped = moved.data_ptr() == tensor.data_ptr()
        return empty(moved.shape, dtype, device).copy_(moved) if self.copy and is_mapped and not is_owned else moved

    def _device(self, old: Tensor) -> torch.device:
        return self.device or (torch.device("cpu") if old.is_meta else old.device)

    def _dtype(self, old: Tensor) -> torch.dtype:
        return self.dtype or (old.dtype if old.is_floating_point() else torch.get_default_dtype())

    def _quantize(self, name: str, full: str, format: str, options: Mapping[str, Any]) -> None:
        """Replace a dense Linear with one of a format, or leave it dense and report the reason."""
        old = self.names.modules[name]
        assert isinstance(old, nn.Linear)
        module = import_module(f"qdsl.generated.{format}")
        self.origin.plain[f"{name}.weight".lstrip(".")] = full
        try:
            weight = module.quantize(self.source.tensor(full).to(self._device(old.weight)), **options)
        except FormatError as error:
            self._fill(f"{name}.weight".lstrip("."), self.source.tensor(full))
            self.report.dense[name] = str(error)
            return
        self._replace(name, weight, self._dtype(old.weight))

    def _quantize_experts(self, name: str, tensors: Sequence[str], format: str, options: Mapping[str, Any]) -> None:
        """Replace a parameter with quantized experts.  Raises FormatError, with the model unchanged."""
        old = self.names.parameters[name]
        transposed = is_transposed(self.names.modules[name.rpartition(".")[0]], old)
        module, layers = import_module(f"qdsl.generated.{format}"), []
        weights: list[PackedWeight] = []
        for full in tensors:
            tensor = self.source.tensor(full)
            matrices = list(tensor.unbind()) if tensor.dim() == 3 else [tensor]
            for matrix in matrices:
                dense = matrix.to(self._device(old))
                weights.append(module.quantize(dense.t().contiguous() if transposed and tensor.dim() == 3 else dense, **options))
            first = weights[-1]
            layers.append(Layer(full.removesuffix(".weight"), format, first.storage, first.params, first.shape,
                                len(matrices) if tensor.dim() == 3 else None))
        joined = concatenate_rows(weights)
        self._hold_experts(name, Experts(weights if joined is None else joined, old.shape[0], transposed, self._dtype(old)))
        if layers[0].experts is None:
            self.origin.stacks[name] = tuple(layers)
        else:
            self.origin.layers[name] = layers[0]
        self.origin.changed = True

    def _fill_experts(self, name: str, tensors: Sequence[str]) -> None:
        """Fill a parameter of experts with plain numbers."""
        old, owner = self.names.parameters[name], self.names.modules[name.rpartition(".")[0]]
        rows = torch.cat([self.source.tensor(full) for full in tensors])
        needs_transpose = len(tensors) > 1 and is_transposed(owner, old)
        self._fill(name, rows.view(old.shape[0], -1, rows.shape[-1]).transpose(1, 2) if needs_transpose else rows)

    def _hold_experts(self, name: str, experts: Experts) -> None:
        """Replace a parameter with experts."""
        parent, _, leaf = name.rpartition(".")
        owner = self.names.modules[parent]
        del owner._parameters[leaf]
        owner.add_module(leaf, experts.train(owner.training))
        labels = (f"{part.format.name}.{part.packed.storage}" for part in experts._linears())
        self.report.packed[name] = " + ".join(dict.fromkeys(labels))

    # -- packed layers ------------------------------------------------------------------------------------------------

    def place(self, step: PackedStep) -> None:
        if step.kind == "dense":
            self._fill(step.name, self._decoded(step))
            if step.parts:
                self.origin.changed = True
            else:
                self.origin.decoded[step.name] = step.layer
            self.report.dense[step.name] = step.why
        elif step.kind == "experts":
            self._place_experts(step)
        else:
            self._place_module(step)

    def _place_module(self, step: PackedStep) -> None:
        old = self.names.modules[step.name]
        weight = self._owned(self.weights[step.name][0], self._target(old))
        self._replace(step.name, weight, self._compute_dtype(old))
        self.place_transforms(step.name, step.layer.transforms)
        self.origin.layers[step.name] = step.layer
        self._keep_settings(step)

    def place_transforms(self, name: str, transforms: Sequence[Transform]) -> None:
        """Make a module transform its input or output."""
        if transforms:
            module = self.model.get_submodule(name)
            place_transforms(module, transforms, self.source.tensor, self._target(module))

    def _replace(self, name: str, weight: PackedWeight, dtype: torch.dtype) -> None:
        """Replace a dense module, and all that share its weight, with packed ones that share the packed tensors."""
        old = self.names.modules[name]
        shared = [other.rpartition(".")[0] for other in self.names.tied(f"{name}.weight".lstrip("."))]
        new = first = self._packed_module(name, old, weight, dtype)
        for place in dict.fromkeys([name, *shared]):
            module = self.names.modules[place]
            if module is not old:
                new = self._packed_module(place, module, weight, dtype)
                new._parameters.update({own: first._parameters[own] for own in first._names.values()})
            if isinstance(new, QuantizedLinear):
                new.register_parameter("bias", module._parameters.get("bias"))
                new.replaced = replaced_by(module)
            new.train(module.training)
            vars(new).update({key: value for key, value in vars(module).items() if "_hooks" in key})
            self.model.set_submodule(place, new)
            self.report.packed[place] = f"{weight.format.name}.{weight.storage}"

    def _packed_module(self, name: str, old: nn.Module, weight: PackedWeight, dtype: torch.dtype) -> PackedModule:
        if isinstance(old, nn.Embedding):
            return embedding_class(weight.format)(weight, old.padding_idx, dtype, old.max_norm, old.norm_type,
                                                  old.scale_grad_by_freq, old.sparse)
        full = self.plan.scales.get(name)
        scale = None if full is None else self.source.tensor(full)
        if full is not None and scale is not None:
            scale = self._moved(scale, weight.device, scale.dtype)
            self.origin.plain[f"{name}.input_scale".lstrip(".")] = full
        return linear_class(weight.format)(weight, None, dtype, input_scale=scale)

    def _place_experts(self, step: PackedStep) -> None:
        old = self.names.parameters[step.name]
        weights = self._expert_weights(step, self._device(old))
        self._hold_experts(step.name, Experts(weights, int(step.experts or 1), step.transposed, self._dtype(old)))
        if step.parts:
            self.origin.stacks[step.name] = step.parts
        else:
            self.origin.layers[step.name] = step.layer
        self._keep_settings(step)

    def _expert_weights(self, step: PackedStep, device: torch.device) -> list[PackedWeight]:
        """The weights of experts, joined where their tensors allow it."""
        if not step.parts:
            try:
                return [self._owned(self.source.stacked(step.layer), device)]
            except FormatError:
                return [self._owned(weight, device) for weight in self.source.weights(step.layer)]
        weights = [weight for layer in step.parts for weight in self.source.weights(layer)]
        joined = concatenate_rows(weights)
        if joined is None:
            return [self._owned(weight, device) for weight in weights]
        mapped = {id(tensor) for tensor in weights[0].tensors.values()}            # those that all weights share are not copied
        return [joined.apply(lambda tensor: self._moved(tensor, device, tensor.dtype, is_owned=id(tensor) not in mapped))]

    def _decoded(self, step: PackedStep) -> Tensor:
        """The numbers of a layer in the shape of a parameter."""
        old = self.names.tensor(step.name)
        assert old is not None
        dense = [self._dense_rows(layer, weight, self._dtype(old))
                 for layer in step.layers for weight in self.source.weights(layer)]
        if step.experts is None:
            return dense[0].t() if step.transposed else dense[0].reshape(step.shape)
        whole = torch.cat(dense).view(step.stored)
        return whole.transpose(1, 2) if step.transposed else whole.reshape(step.shape)

    def _dense_rows(self, layer: Layer, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """The numbers [N, K] of a layer's weight, with the transforms of its input and output."""
        wide = torch.float32 if layer.transforms else dtype
        return folded_weight(weight.format.dequantize(weight, wide), layer.transforms, self.source.tensor).to(dtype)

    def _owned(self, weight: PackedWeight, device: torch.device) -> PackedWeight:
        return weight.apply(lambda tensor: self._moved(tensor, device, tensor.dtype))

    def _keep_settings(self, step: PackedStep) -> None:
        """Record tensors that no module stores, such as bitsandbytes' quant_state and unused scales, for saving."""
        unused = set(self.plan.unused)
        for layer in step.layers:
            for full in layer.settings:
                self.origin.settings[full] = self.source.tensor(full).clone()
            for full in layer.others.values():
                if full in unused:
                    self.origin.unused[full] = self.source.tensor(full).clone()

    def _target(self, old: nn.Module) -> torch.device:
        tensor = next(iter(old.parameters()), None)
        return self.device or torch.device("cpu") if tensor is None else self._device(tensor)

    def _compute_dtype(self, old: nn.Module) -> torch.dtype:
        own = old.compute_dtype if isinstance(old, PackedModule) else old.weight.dtype
        assert isinstance(own, torch.dtype)
        return self.dtype or (own if own.is_floating_point else torch.get_default_dtype())

    # -- groups -------------------------------------------------------------------------------------------------------

    def place_group(self, step: EncodedGroupStep) -> None:
        """Make a block decode its group whenever it runs; or decode the weights permanently."""
        if step.dense:
            self._decode_group(step)
            return
        block, first = self.names.modules[step.name], self.names.parameters[next(iter(step.members))]
        dtype = self._dtype(first)
        packed = self._owned(self.source.group_weight(step.group), self._device(first))
        names = {leaf: step.group.tensors[leaf].rpartition(".")[2] for leaf in packed.tensors}
        tensors = {names[leaf]: tensor for leaf, tensor in packed.tensors.items()}
        for leaf, full in step.group.tensors.items():
            if leaf not in packed.tensors:
                tensor = self.source.tensor(full)
                tensors[full.rpartition(".")[2]] = self._moved(tensor, packed.device, tensor.dtype)
        parameters = {own: nn.Parameter(tensor, requires_grad=False) for own, tensor in tensors.items()}
        members: dict[nn.Module, list[Member]] = {block: []}
        spans = step.spans()
        for weight, parts in step.members.items():
            for place in self.names.tied(weight):                # one that shares the weight may run outside of the block
                owner, _, leaf = place.rpartition(".")
                module = self.names.modules[owner]
                members.setdefault(block if place == weight else module, []).append(
                    Member(module, leaf, self.names.parameters[weight].shape, tuple(spans[part] for part in parts)))
            self.report.packed[weight.removesuffix(".weight")] = f"{step.group.format}.{packed.storage}"
        for runs, own_members in members.items():
            hold_group(runs, parameters, dtype)
            GroupedBlock(runs, packed, names, own_members).install()
        self.origin.groups[step.name] = step.group

    def _decode_group(self, step: EncodedGroupStep) -> None:
        decoded = self.source.decoded(step.group)
        for name, parts in step.members.items():
            old = self.names.tensor(name)
            assert old is not None
            self._fill(name, torch.cat([decoded[part] for part in parts]).view(old.shape))
            self.report.dense[name] = step.dense
        self.origin.changed = True
