"""Merging LoRA and DoRA adapters of the peft package into packed base weights.

Import this module before adapters are added: then DoRA works on every format, and what packed weights cannot do is an error that
names the remedy (qdsl/models/lora.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from qdsl.core.text import Displayed, counted
from qdsl.core.transforms import OUTPUT
from qdsl.models.dense import embeddings
from qdsl.models.lora import AdapterError as AdapterError
from qdsl.models.lora import is_packed, register
from qdsl.models.private_apis import forget_adapters
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear, embedding_class, linear_class
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.requantize import Report, weight_error

__all__ = ["AdapterError", "MergeReport", "merge"]

# Variants of LoRA whose merged weight does not depend on x, by the names of peft's classes.
MERGEABLE = ("NoneType", "DoraLinearVariant", "DoraEmbeddingVariant", "VeloraLinearVariant", "MiCALinearVariant",
             "MiCAEmbeddingVariant")

register()


@dataclass(frozen=True, slots=True, repr=False)
class MergeReport(Displayed):
    """The result of `merge`.

    model: the base model, without peft's layers.  into: "dense" or "same".  errors: of each merged packed layer, how far the
    stored weight is from the base weight plus adapters in float32.  dense: layers that were dense before, which peft merged.
    notes: what else to know.
    """

    model: nn.Module
    into: str
    errors: dict[str, Report] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """The merged layers and their errors, the largest first."""
        worst = sorted(self.errors.items(), key=lambda pair: -pair[1].relative)
        return str(self).splitlines()[0], ("layer", "relative error", "largest error"), [
            *((name, f"{error.relative:.3g}", f"{error.largest:.3g}") for name, error in worst),
            *((name, "dense", "") for name in self.dense)]

    def __str__(self) -> str:
        kind = "dense layers" if self.into == "dense" else "layers of the same format"
        worst = sorted(self.errors.items(), key=lambda pair: -pair[1].relative)[:5]
        lines = [f"{counted(len(self.errors), 'packed layer')} merged into {kind}, and {counted(len(self.dense), 'dense layer')}"]
        lines += [f"  {name}: relative error {error.relative:.3g}, largest {error.largest:.3g}" for name, error in worst]
        return "\n".join([*lines, *self.notes])


def merge(model: nn.Module, into: str = "dense", dtype: torch.dtype | None = None) -> MergeReport:
    """Merge the active LoRA and DoRA adapters of a model into its base weights, in place, and remove peft's layers.

    model: a PeftModel, or a model with injected adapters.  into: "dense" puts nn.Linear and nn.Embedding in place of packed
    layers; "same" quantizes merged weights in their format, storage and parameters, and the report states what that costs.
    dtype: of dense weights, by default each layer's compute_dtype.  All merged layers exist before the first one is put in place:
    an error leaves the model unchanged.  Raises AdapterError with the layer and the reason.
    """
    if into not in ("dense", "same"):
        raise AdapterError(f"into is 'dense' or 'same', not {into!r}")
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    report = MergeReport(base, into)
    if not (places := _adapted_layers(base)):
        raise AdapterError("the model has no adapters to merge")
    with torch.no_grad():
        merged = {layer: _merged(names[0], layer, into, dtype, report) for layer, names in places.items()}
    for layer, names in places.items():
        for name in names:
            base.set_submodule(name, merged[layer])
    _forget_adapters(base, report)
    return report


def _adapted_layers(model: nn.Module) -> dict[Any, list[str]]:
    """The layers that peft has wrapped, outermost only, with all their names."""
    places: dict[Any, list[str]] = {}
    names: set[str] = set()                                      # of these layers and all inside of them
    for name, module in model.named_modules(remove_duplicate=False):
        parent = name.rpartition(".")[0]
        is_outermost = parent not in names and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        names |= {name} if is_outermost or parent in names else set()
        if is_outermost:
            places.setdefault(module, []).append(name)
    return places


def _merged(name: str, layer: Any, into: str, dtype: torch.dtype | None, report: MergeReport) -> nn.Module:
    """The merged layer that replaces one of peft's layers."""
    base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    if not isinstance(base, PackedModule):
        report.dense.append(name)
        return _merged_by_peft(name, layer)
    if not isinstance(layer, LoraLayer):
        raise AdapterError(f"{name}: merge() takes LoRA and DoRA, not {type(layer).__name__} over a packed weight")
    if base.device.type == "meta":
        raise AdapterError(f"{name}: its weight is on meta or offloaded; load the model onto one device and merge there")
    transforms = base.own_transforms if isinstance(base, QuantizedLinear) else []
    has_output = any(own.transform.side == OUTPUT for own in transforms)
    if transforms and (into != "dense" or has_output):
        remedy = "" if has_output else "; merge(model, into='dense') makes that a part of the weight"
        raise AdapterError(f"{name}: the layer transforms x ({transforms[0].transform.label}), and an adapter takes x as it "
                           f"is{remedy}")
    weight, bias = _merged_weight(name, layer, base)
    merged: Any
    if into == "dense":
        merged = base.dense(dtype)
        merged.weight = nn.Parameter(weight.to(merged.weight.dtype), requires_grad=False)
        report.errors[name] = weight_error(weight, merged.weight)
    else:
        try:
            packed = _requantized(weight, base.checkpoint_weight())
        except FormatError as error:
            raise AdapterError(f"{name}: {error}; merge(model, into='dense') works for every format") from None
        merged = _packed_layer(packed, base)
        report.errors[name] = weight_error(weight, packed)
    if isinstance(base, QuantizedLinear):
        merged.bias = base.bias if bias is None else nn.Parameter(bias.to(dtype or base.compute_dtype), requires_grad=False)
    return merged.train(base.training)  # type: ignore[no-any-return]


def _merged_by_peft(name: str, layer: Any) -> nn.Module:
    """A copy of one of peft's layers over a dense base layer, merged."""
    if isinstance(layer, BaseTunerLayer) and is_packed(layer.get_base_layer()):
        raise AdapterError(f"{name}: its weight is coded together with others of its block; run `qdsl decompress` on the "
                           "checkpoint, and merge the adapter into the model that it writes")
    try:
        layer = copy.deepcopy(layer)                             # the model keeps its own until all layers are merged
        if hasattr(layer, "unload_and_optionally_merge_module"):
            return layer.unload_and_optionally_merge_module(True, True, None)  # type: ignore[no-any-return]
        layer.merge(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise AdapterError(f"{name}: {error}") from error
    return layer.get_base_layer()  # type: ignore[no-any-return]


def _merged_weight(name: str, layer: Any, base: Any) -> tuple[Tensor, Tensor | None]:
    """The base weight with all active adapters added in float32, and the bias if adapters change it."""
    weight, bias = base.dequantize(torch.float32), None
    for adapter in [adapter for adapter in layer.active_adapters if adapter in layer.r]:
        variant = type(layer.lora_variant.get(adapter)).__name__
        if variant not in MERGEABLE:
            raise AdapterError(f"{name}: adapter {adapter!r} is a {variant}, which no weight can hold: its result depends on x")
        is_embedding = adapter in layer.lora_embedding_A
        left, right = (layer.lora_embedding_A[adapter].t(), layer.lora_embedding_B[adapter].t()) if is_embedding else (
            layer.lora_B[adapter].weight, layer.lora_A[adapter].weight)
        delta = left.float() @ right.float() * layer.scaling[adapter]
        weight += delta
        if adapter in layer.lora_magnitude_vector:               # norms of rows, of columns in an embedding, as peft has them
            whole = delta.add_(base.dequantize(base.compute_dtype))
            norm = torch.linalg.vector_norm(whole, dim=int(not is_embedding), keepdim=True)
            weight *= layer.lora_magnitude_vector[adapter].weight.float().view_as(norm) / norm
        if layer.lora_bias[adapter]:
            own = layer.lora_B[adapter].bias.float() * layer.scaling[adapter]
            bias = own if bias is None and base.bias is None else own + (base.bias.float() if bias is None else bias)
    if not torch.isfinite(weight).all():
        raise AdapterError(f"{name}: an adapter holds numbers that are not finite")
    return weight, bias


def _requantized(weight: Tensor, packed: PackedWeight) -> PackedWeight:
    """A float weight quantized to the format, storage and parameters of a packed one; symmetric if that one is."""
    options: dict[str, Any] = dict(packed.params)
    has_choice = "symmetric" in packed.variant.options
    quantized = packed.format.quantize(weight, packed.storage, **options | ({"symmetric": True} if has_choice else {}))
    if has_choice and not _has_zeros_of(packed, quantized):
        quantized = packed.format.quantize(weight, packed.storage, **options, symmetric=False)
    quantized.names.update(packed.names)
    return quantized


def _has_zeros_of(packed: PackedWeight, symmetric: PackedWeight) -> bool:
    """Whether a weight has the zero points of a symmetric one: none, or all equal."""
    before, after = (weight.format.unpack(weight) for weight in (packed, symmetric))
    zeros = [key for key, field in after.items() if not field.is_floating_point() and bool((field == field.flatten()[0]).all())]
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in zeros)


def _packed_layer(packed: PackedWeight, base: Any) -> nn.Module:
    """A packed layer of a weight, with the settings of another layer."""
    if isinstance(base, QuantizedEmbedding):
        return embedding_class(packed.format)(packed, base.padding_idx, base.compute_dtype, base.max_norm, base.norm_type,
                                              base.scale_grad_by_freq, base.sparse)
    layer = linear_class(packed.format)(packed, None, base.compute_dtype, base.quantize_x, base.input_scale)
    layer.take_mode(base)
    return layer


def _forget_adapters(model: Any, report: MergeReport) -> None:
    """Remove the records of peft and transformers about adapters; report a head that is no longer tied."""
    vars(model).pop("peft_config", None)
    forget_adapters(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        shared = [{tensor.data_ptr() for tensor in end.parameters()} for end in embeddings(model)]
        if len(shared) == 2 and not shared[0] & shared[1]:
            config.tie_word_embeddings = False
            report.notes.append("the head is no longer tied to the embedding: pass a config with tie_word_embeddings=False "
                                "to save_model")
