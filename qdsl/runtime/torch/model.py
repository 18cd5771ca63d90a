"""Quantizing the linear layers of a model in place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from qdsl.core.text import Displayed, byte_text, counted, did_you_mean
from qdsl.runtime.gpu.placement import fastest_storage, may_change_storage
from qdsl.runtime.torch.layers import QuantizedLinear, linear_class, replaced_by
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.torch.weight_reads import weight_reads
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat

Skip = str | Sequence[str] | Callable[[nn.Module, str], bool] | None

@dataclass(slots=True, repr=False)
class Report(Displayed):
    """The replaced and skipped linear layers of a model, by name; `done` is a summary.

    quantized: bytes of the weight before and after.  skipped: why a layer was not replaced.  notes: advice on a layer, or on a
    pattern that matches none.
    """

    done: str
    quantized: dict[str, tuple[int, int]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """The replaced layers with their sizes, then the others with the reasons, and notes on patterns."""
        rows: list[tuple[object, ...]] = [(name, byte_text(before), byte_text(after), self.notes.get(name, ""))
                                          for name, (before, after) in self.quantized.items()]
        others = {name: note for name, note in self.notes.items() if name not in self.quantized}
        rows += [(name, "", "", why) for name, why in {**self.skipped, **others}.items()]
        return str(self).splitlines()[0], ("layer", "before", "after", "note"), rows

    def __str__(self) -> str:
        before, after = (sum(sizes[i] for sizes in self.quantized.values()) for i in (0, 1))
        lines = [f"{counted(len(self.quantized), 'layer')} {self.done}: {before} bytes of weights are now {after}"]
        lines += [f"  {name}: {note}" for name, note in self.notes.items()]
        lines += [f"{counted(len(self.skipped), 'layer')} left unchanged"] if self.skipped else []
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def check_model(model: object) -> None:
    """Raises FormatError for what is no model."""
    if not isinstance(model, nn.Module):
        raise FormatError(f"a model is a torch.nn.Module, not a {type(model).__name__}")


def skip_rule(skip: Skip) -> Callable[[nn.Module, str], bool]:
    """Whether to leave a layer, as a function of it and its name.

    skip: a regular expression, or several, for whole names or for parts of them between dots; or such a function.  Raises
    FormatError for what is none of these.
    """
    if skip is None or callable(skip):
        return skip or (lambda layer, name: False)
    try:
        patterns = [re.compile(pattern) for pattern in ([skip] if isinstance(skip, str) else skip)]
    except (re.error, TypeError) as error:
        raise FormatError(f"skip is regular expressions of layers' names, or a function of a layer and its name, not {skip!r}: "
                          f"{error}") from None
    return lambda layer, name: any(pattern.fullmatch(part) for pattern in patterns for part in (name, *name.split(".")))


def unmatched_skips(skip: Skip, names: Iterable[str]) -> dict[str, str]:
    """Notes on patterns of `skip` that match none of the layers."""
    if skip is None or callable(skip):
        return {}
    parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
    return {f"skip {pattern!r}": f"matches no linear layer{did_you_mean(pattern, parts)}"
            for pattern in ([skip] if isinstance(skip, str) else skip) if not any(re.fullmatch(pattern, part) for part in parts)}


def quantize_model(model: nn.Module, format: WeightFormat, skip: Skip = None,
                   calibrated: Mapping[str, Callable[..., PackedWeight]] | None = None, **options: Any) -> Report:
    """Replace nn.Linear layers of a model by Linear layers of a format, one after the other.

    skip: the layers to leave, see `skip_rule`.  calibrated: by the names of layers, what quantizes them in place of the
    format's `quantize`, with the same arguments.  options: of the format's `quantize`.  Only one weight at a time exists in both
    forms.  If an error stops this, every layer is either unchanged or replaced; call again to do the rest.  A layer keeps its
    bias, device and mode.  Layers that cannot be replaced are skipped, and the report says why.  Raises FormatError, before
    anything changes, for options that the format does not have.
    """
    check_model(model)
    format.chosen(options)
    if isinstance(model, nn.Linear):
        raise FormatError("the model is itself a linear layer, which cannot be replaced in place: use Linear(quantize(...))")
    is_skipped, places = skip_rule(skip), _layer_names(model)
    report = Report(f"quantized to {format.name}", notes=unmatched_skips(skip, chain(*places)))
    reads = weight_reads(dict(model.named_modules(remove_duplicate=False)))
    for names in places:
        if not is_skipped(model.get_submodule(names[0]), names[0]):
            why = _why_kept(model.get_submodule(names[0])) or next((reads[name] for name in names if name in reads), "")
            why = why or _replace(model, names, format, calibrated or {}, options, report)
            report.skipped.update(dict.fromkeys(names, why) if why else {})
    return report                                                # no local variable kept a layer alive during the next one


def _layer_names(model: nn.Module) -> list[list[str]]:
    """The names of every linear layer; a layer that occurs several times has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
    return list(names.values())


def _why_kept(layer: nn.Module) -> str:
    """Why a layer cannot be replaced; '' if it can."""
    if isinstance(layer, QuantizedLinear):
        return f"holds a weight of {layer.format.name} already"
    if not product_of(layer):
        return f"a {type(layer).__name__} is more than a linear layer"
    if any(value for name, value in vars(layer).items() if name.endswith("_hooks")):
        return "has hooks, which would be lost"
    if not isinstance(layer.weight, Tensor) or layer.weight.is_meta:
        return "its weight is on meta"
    return ""


def _replace(model: nn.Module, names: list[str], format: WeightFormat, calibrated: Mapping[str, Callable[..., PackedWeight]],
             options: Mapping[str, Any], report: Report) -> str:
    """Quantize a layer and put the new one in all its places; returns why not, or ''."""
    old = model.get_submodule(names[0])
    assert isinstance(old, nn.Linear)
    try:
        quantize: Callable[..., PackedWeight] = calibrated.get(names[0], format.quantize)
        packed = quantize(old.weight, **options)
        packed = fastest_storage(packed) if "storage" not in options and may_change_storage(old) else packed
    except FormatError as error:
        return str(error)
    new = format.Linear(packed, old.bias, old.weight.dtype)
    new.bias = old.bias                                          # the same parameter, in case it is trained
    new.replaced = replaced_by(old)
    new.keeps_copy = may_change_storage(old)
    new.train(old.training)
    tied = [name for name, other in model.named_parameters(remove_duplicate=False)
            if other is old.weight and name.removesuffix(".weight") not in names]
    for name in names:
        model.set_submodule(name, new)
        report.quantized[name] = (old.weight.nbytes, packed.nbytes)
        if tied:
            report.notes[name] = f"its weight was also {', '.join(tied)}, and is no longer"
    return ""


def match_dense(model: nn.Module, on: bool = True) -> None:
    """Set `match_dense` of all packed linear layers of a model, those of experts too."""
    check_model(model)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.match_dense = on


def planar_model(model: nn.Module, skip: Skip = None, larger: bool = False) -> Report:
    """Convert the weights of a model's quantized layers to storage planar, one after the other.

    skip: the layers to leave, see `skip_rule`.  Layers without a planar form, or that would grow (Format.planar), are left, and
    the report says why.  larger: they may grow.
    """
    return replace_layers(model, "stored for matrix units", partial(_planar_layer, larger=larger), skip)


def _planar_layer(old: QuantizedLinear, larger: bool) -> QuantizedLinear | str:
    packed = old.packed
    if old.quantize_x:
        return f"{packed.storage} stays: x is quantized, which needs rows of 8 bits"
    if why := old.format.why_not_planar(packed, larger):
        return f"{packed.storage} stays: {why}"
    planar = old.format.planar(packed, larger)
    return linear_class(packed.format)(planar, old.bias, old.compute_dtype, input_scale=old.input_scale)


def use_fastest_storages(model: nn.Module, skip: Skip = None) -> Report:
    """Convert weights of quantized layers to planar if placement.fastest_storage does, in place, one at a time.

    skip: the layers to leave, see `skip_rule`.  Layers that share tensors with other modules, that accelerate offloads, or
    that FSDP shards are skipped.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values() if tensor is not None)

    def rule(old: QuantizedLinear) -> QuantizedLinear | str:
        if not may_change_storage(old) or any(owners[id(tensor)] > 1 for tensor in old._stored_tensors().values()):
            return "its module, or another one, relies on its tensors"
        packed = old.packed
        fastest = fastest_storage(packed, old.quantize_x)
        if fastest is packed:
            return f"{packed.storage} is not slower"
        return linear_class(packed.format)(fastest, old.bias, old.compute_dtype, input_scale=old.input_scale)

    return replace_layers(model, "stored planar", rule, skip)


def keep_copies(model: nn.Module, filter: Callable[[str], bool]) -> None:
    """Let products of quantized linear layers keep copies of weights on a CPU (runtime/cpu/rows.py).  filter(name): for which."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear) and filter(name) and may_change_storage(layer):
            layer.keeps_copy = True


def replace_layers(model: nn.Module, done: str, rule: Callable[[QuantizedLinear], QuantizedLinear | str],
                   skip: Skip = None) -> Report:
    """Replace a model's quantized linear layers by layers that store the same weights differently, in place, one at a time.

    rule(layer): the new layer, or why the old one stays.  done: the report's text for replaced layers.  skip: the layers to
    leave, see `skip_rule`.  A layer keeps its bias, mode and hooks.  Only one weight at a time exists in both storages.  Raises
    FormatError for a model that is itself a linear layer.
    """
    check_model(model)
    if isinstance(model, QuantizedLinear):
        raise FormatError("the model is itself a linear layer, which cannot be replaced in place: wrap it in an nn.Sequential")
    is_skipped, places = skip_rule(skip), _layer_names(model)
    report = Report(done, notes=unmatched_skips(skip, chain(*places)))
    for names in places:
        old = model.get_submodule(names[0])
        if isinstance(old, QuantizedLinear) and not is_skipped(old, names[0]):
            sizes = _replace_layer(model, names, old, rule)
            if isinstance(sizes, str):
                report.skipped.update(dict.fromkeys(names, sizes))
            else:
                report.quantized.update(dict.fromkeys(names, sizes))
        del old
    return report


def _replace_layer(model: nn.Module, names: list[str], old: QuantizedLinear,
                   rule: Callable[[QuantizedLinear], QuantizedLinear | str]) -> tuple[int, int] | str:
    """Put a new layer in all places of an old one; returns the bytes of both weights, or why the old one stays."""
    new = rule(old)
    if isinstance(new, str):
        return new
    new.bias = old.bias                                          # the same parameter, in case it is trained
    new.train(old.training)
    new.take_mode(old)
    vars(new).update({key: value for key, value in vars(old).items() if key.endswith("_hooks")})
    for name in names:
        model.set_submodule(name, new)
    return _nbytes(old), _nbytes(new)


def _nbytes(layer: QuantizedLinear) -> int:
    return sum(tensor.nbytes for tensor in layer._stored_tensors().values())
