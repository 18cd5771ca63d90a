"""Plans where each weight of a checkpoint goes in a model, from names and shapes, before anything is read or changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.ignored import SKIPPED, is_skipped
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.sources import Source
from qdsl.checkpoint.files.safetensors import shown
from qdsl.checkpoint.report.shards import is_plain
from qdsl.models.names import Names
from qdsl.models.packed_steps import PackedStep, holds_numbers, orient_experts, orient_squares, swapped, takes_numbers
from qdsl.models.stacks import Stacks, piece_layer, why_no_stack
from qdsl.models.transforms import transform_problems
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.torch.weight_reads import weight_reads

Rename = Callable[[str], str | None] | Mapping[str, str]
SHOWN = 20                                                       # names that an error lists
SKIP = "left out by a pattern"


class LoadError(ValueError):
    """A model and a checkpoint that do not match; the message lists the problems, and the model is unchanged."""


@dataclass(frozen=True, slots=True)
class EncodedGroupStep:
    """A group (DF11) of weights, and the module that it belongs to.  dense: why its weights are decoded permanently."""

    group: Group
    name: str
    members: Mapping[str, tuple[str, ...]]                       # parameters of the model -> weights of the checkpoint
    dense: str = ""

    def spans(self) -> dict[str, slice]:
        """The range of each weight of the checkpoint in the group's row."""
        spans, start = {}, 0
        for part, count in self.group.parts.items():
            spans[part] = slice(start, start + count)
            start += count
        return spans


@dataclass(slots=True)
class LoadPlan:
    """All steps that fill a model.

    plain: plain tensors by the parameter or buffer that each fills.  biases: by the parameter [E, N] that they fill, the tensors
    of experts' biases in order, and their rows.  scales: static scales of activations, by the modules they belong to.
    transforms: plain modules with transforms, and their names in the checkpoint.
    quantized: Linear layers that are quantized on the way, by name.  dense: layers of plain numbers, and why.  unused: tensors
    that have no place in the model.  problems: what makes loading an error.
    """

    packed: list[PackedStep] = field(default_factory=list)
    groups: list[EncodedGroupStep] = field(default_factory=list)
    plain: dict[str, str] = field(default_factory=dict)
    biases: dict[str, dict[str, int]] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    transforms: dict[str, str] = field(default_factory=dict)
    quantized: list[str] = field(default_factory=list)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan_load(names: Names, source: Source, rename: Rename | None, format: str | None = None,
              skip: Sequence[str] | None = None, plain: bool = True, stacks: Stacks | None = None) -> LoadPlan:
    """The plan that fills a model; parameters with a weight of their own are untied.

    format: that in which plain Linear layers are quantized, None for none.  skip: patterns of layers that become dense; None
    for those of SKIPPED, which concern only layers that are quantized here.  plain: False where plain tensors are loaded by
    others, who then check that they fit and that no parameter is left.  stacks: of experts that the checkpoint has one by one.
    """
    planner = _Planner(names, source, rename, format, skip or (), plain)
    stacks = stacks or {}
    stacked = {name for experts in stacks.values() for pieces in experts for name in pieces}
    for layer in source.layers.values():
        if layer.name not in stacked:
            planner.add_layer(layer)
    for name, experts in stacks.items():
        planner.add_stack(name, experts)
    for group in source.groups:
        planner.add_group(group, stacks)
    placed = {full for step in planner.plan.packed for layer in step.parts for full in layer.tensors.values()}
    for name in source.plain:
        if name not in placed:
            planner.add_plain(name, name)
    planner.check_transforms()
    planner.sort_plain(format, SKIPPED if skip is None else skip)
    planner.plan.packed = orient_experts(planner.plan.packed)
    planner.orient_squares()
    if plain:
        planner.check_complete()
    if source.groups:
        planner.check_used()
    return planner.plan


def renamed(name: str, rename: Rename | None) -> str | None:
    """The model's name for a weight of the checkpoint; None for one to leave out.

    A mapping holds prefixes, of which the longest that fits is replaced; a prefix ends where a part of the name does.
    """
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    fitting = [prefix for prefix in rename if name.startswith(prefix) and (
        not prefix or prefix.endswith(".") or name[len(prefix):][:1] in ("", "."))]
    longest = max(fitting, key=len, default=None)
    return name if longest is None else rename[longest] + name[len(longest):]


class _Planner:
    def __init__(self, names: Names, source: Source, rename: Rename | None, format: str | None, skip: Sequence[str],
                 plain: bool) -> None:
        self.format = format
        self.skip = skip
        self.checks_plain = plain
        self.names = names
        self.source = source
        self.rename = rename
        self.plan = LoadPlan()
        self.filled: set[str] = set()                            # parameters and buffers of the model
        self.read_weights = weight_reads(names.modules)          # layers that stay plain, and why

    # -- layers -------------------------------------------------------------------------------------------------------

    def add_layer(self, layer: Layer) -> None:
        name = renamed(layer.name, self.rename) if layer.name else ""
        module = self.names.modules.get(name) if name is not None else None
        weight = next((key for key in (name, f"{name}.weight".lstrip(".")) if self.names.tensor(key) is not None), None) \
            if name is not None else None
        if name is None or (weight is None and not isinstance(module, PackedModule)):
            self.plan.unused += [*layer.tensors.values(), *layer.settings, *layer.others.values()]
            return
        if not name:
            self.plan.problems.append("the model is itself a layer, which cannot be replaced in place: "
                                      "wrap it in an nn.Sequential")
        if layer.why:
            self.plan.problems.append(f"{shown(layer.name)} is not recognised: {layer.why}")
            self._fill(weight or name)
            return
        step = self._step(layer, name, module, weight)
        if step is None:
            return
        self.plan.packed.append(step)
        self.names.untied.add(str(weight))
        self._fill(*self._parameters(name, module, weight))
        for leaf, full in layer.others.items():
            self._add_other(name, leaf, full, step)

    def _step(self, layer: Layer, name: str, module: nn.Module | None, weight: str | None) -> PackedStep | None:
        """The step for a layer; None, with a problem, where shapes differ."""
        tensor = self.names.tensor(str(weight))
        packed_shape = module._packed.shape if isinstance(module, PackedModule) else ()
        shape = packed_shape if tensor is None or packed_shape else tuple(tensor.shape)
        experts = layer.experts
        if experts is None and len(shape) == 3 and math.prod(shape[:2]) == layer.shape[0] and shape[2] == layer.shape[1]:
            experts = shape[0]                                   # a matrix of E * N rows
        stored = PackedStep(layer, name, "", shape, experts=experts).stored
        product = "" if module is None or experts is not None else product_of(module)
        if product == "transposed" and shape == stored[::-1] and not (shape == stored and holds_numbers(layer)):
            return self._transposed_step(layer, name, str(weight), shape)
        if shape not in (stored, swapped(stored)) and not _is_flattened(shape, stored):
            self.plan.problems.append(f"{shown(name)} is {list(shape)} in the model, and {list(stored)} in the checkpoint")
            return None
        why = self._why_decoded(layer, name, experts)
        if why and weight is not None:
            return PackedStep(layer, weight, "dense", shape, why, experts)
        if experts is not None and len(shape) == 3 and weight in self.names.parameters:
            return PackedStep(layer, weight, "experts", shape, experts=experts)
        if shape == stored and experts is None and module is not None:
            if isinstance(module, QuantizedLinear) or product == "linear":
                return PackedStep(layer, name, "linear", shape)
            if isinstance(module, QuantizedEmbedding) or (
                    isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward):
                return PackedStep(layer, name, "embedding", shape)
        return PackedStep(layer, str(weight), "dense", shape, takes_numbers(module), experts)

    def _transposed_step(self, layer: Layer, name: str, weight: str, shape: tuple[int, ...]) -> PackedStep:
        """The step for a layer [N, K] of a module with a weight [K, N], in whose place producers quantize an nn.Linear."""
        why = self._why_decoded(layer, name, None)
        return PackedStep(layer, weight if why else name, "dense" if why else "linear", shape, why, transposed=True)

    def _why_decoded(self, layer: Layer, name: str, experts: int | None) -> str:
        """Why a place takes the numbers of a layer that it could hold packed; '' where it holds it."""
        if layer.transforms and experts is not None:
            return f"the input of its experts is transformed ({layer.transforms[0].label})"
        return SKIP if is_skipped(name, self.skip) else self.read_weights.get(name, "")

    def add_stack(self, name: str, experts: Sequence[Sequence[str]]) -> None:
        """Plan a parameter filled from experts that the checkpoint stores one by one, unless all of them are plain."""
        packed = [layer for pieces in experts for piece in pieces if (layer := piece_layer(self.source, piece)) is not None]
        if all(is_plain(layer) for layer in packed):
            self._add_plain_stack(name, tuple(f"{piece}.weight" for pieces in experts for piece in pieces))
            return
        self._fill(name)
        if why := why_no_stack(self.names.parameters.get(name), self.source, experts):
            self.plan.problems.append(f"{shown(name)}: {why}")
            return
        shape = tuple(self.names.parameters[name].shape)
        why = self._why_decoded(max(packed, key=lambda layer: len(layer.transforms)), name, len(experts))
        self.names.untied.add(name)
        self.plan.packed.append(PackedStep(packed[0], name, "dense" if why else "experts", shape, why, len(experts),
                                           parts=tuple(packed)))
        self._add_biases(f"{name}_bias", packed)
        for layer in packed:
            self.plan.unused += [full for leaf, full in layer.others.items() if full not in layer.transform_tensors and not (
                leaf == "bias" and f"{name}_bias" in self.plan.biases)]

    def _add_plain_stack(self, name: str, tensors: tuple[str, ...]) -> None:
        """Plan experts that the checkpoint stores one by one to be quantized, if all of them are."""
        parameter = self.names.parameters.get(name)
        is_whole = parameter is not None and set(tensors) <= set(self.source.plain) and parameter.numel() == sum(
            math.prod(self.source.shape(full)) for full in tensors)
        if self.format is not None and is_whole and not is_skipped(name, self.skip):
            self.plan.stacks[name] = tensors
            self.names.untied.add(name)
            self._fill(name)

    def _add_biases(self, name: str, layers: Sequence[Layer]) -> None:
        """Plan a parameter [E, N] filled with biases of experts, where model and checkpoint have them."""
        biases = {full: layer.shape[0] for layer in layers if (full := layer.others.get("bias")) is not None}
        if not biases or name not in self.names.parameters:
            return
        self.plan.biases[name] = biases
        self._fill(name)
        wrong = [f"{shown(full)} {list(own)}" for full, rows in biases.items() if (own := self.source.shape(full)) != (rows,)]
        if len(biases) < len(layers):
            self.plan.problems.append(f"{shown(name)}: {len(biases)} of {len(layers)} layers of experts have a bias")
        elif wrong or self.names.parameters[name].numel() != sum(biases.values()):
            shape = list(self.names.parameters[name].shape)
            self.plan.problems.append(f"{shown(name)} is {shape} in the model, and layers of experts have {sum(biases.values())} "
                                      f"rows{', unlike ' if wrong else ''}{listed(wrong)}")

    def _parameters(self, name: str, module: nn.Module | None, weight: str | None) -> list[str]:
        """The parameters of the model that a layer fills."""
        if isinstance(module, PackedModule):
            return [f"{name}.{own}".lstrip(".") for own in module._names.values()]
        return [str(weight)]

    def _add_other(self, name: str, leaf: str, full: str, step: PackedStep) -> None:
        """Plan a tensor next to a layer's weight: a bias, a scale of activations, or an unused one."""
        own = renamed(full, self.rename)
        for key in (own, f"{name}.{leaf}".lstrip(".")):
            if key is not None and self.names.tensor(key) is not None:
                self._add_tensor(key, full)
                return
        if leaf == "input_scale" and step.kind == "linear" and math.prod(self.source.shape(full)) == 1:
            self.plan.scales[name] = full
        elif full not in step.layer.transform_tensors:
            self.plan.unused.append(full)

    def orient_squares(self) -> None:
        """Store square weights of modules with a weight [K, N] as the others of their class are."""
        self.plan.packed, problems = orient_squares(self.plan.packed, self.names.modules)
        self.plan.problems += problems

    def check_transforms(self) -> None:
        """Plan the transforms of plain modules; problems with those that neither modules apply nor dense weights contain."""
        plain = {own: name for name in self.source.transforms if (own := renamed(name, self.rename)) is not None}
        self.plan.transforms = {own: name for own, name in plain.items() if f"{own}.weight" in self.names.parameters}
        self.plan.problems += transform_problems(
            {own: (self.names.modules.get(own), self.source.transforms[name]) for own, name in self.plan.transforms.items()},
            {step.name: step.layers for step in self.plan.packed if step.kind != "linear"})

    # -- groups and plain tensors -------------------------------------------------------------------------------------

    def add_group(self, group: Group, stacks: Stacks) -> None:
        name = renamed(group.name, self.rename)
        if name is None:
            self.plan.unused += group.tensors.values()
            return
        members = self._members(group, stacks)
        wrong = group.errors
        for own, parts in members.items():
            tensor, numbers = self.names.tensor(own), sum(group.parts[part] for part in parts)
            if tensor is None:
                wrong.append(f"the model has no {shown(own)}")
            elif tensor.numel() != numbers:
                wrong.append(f"{shown(own)} is {list(tensor.shape)} in the model, and has {numbers} numbers here")
        if wrong:
            self.plan.problems += [f"group {shown(group.name)}: {problem}" for problem in wrong]
        others = [own for own in members if not self._is_inside(name, own)]
        why = f"{shown(others[0])} is not decoded when the module {shown(name)} runs" if others else ""
        self.plan.groups.append(EncodedGroupStep(group, name, members, why))
        self.names.untied.update(members)
        self._fill(*members)

    def _members(self, group: Group, stacks: Stacks) -> dict[str, tuple[str, ...]]:
        """The parameters that a group fills, experts of the checkpoint that are one parameter of the model together."""
        members: dict[str, tuple[str, ...]] = {}
        for name, experts in stacks.items():
            parts = tuple(f"{piece}.weight" for pieces in experts for piece in pieces)
            if group.parts.keys() >= set(parts):
                members[name] = parts
        stacked = {part for parts in members.values() for part in parts}
        return members | {renamed(part, self.rename) or part: (part,) for part in group.parts if part not in stacked}

    def _is_inside(self, block: str, weight: str) -> bool:
        """Whether a parameter belongs to a module inside a block, which decodes it before it runs."""
        runs = not isinstance(self.names.modules.get(block), NonDynamicallyQuantizableLinear | type(None))
        return runs and weight in self.names.parameters and (not block or weight.startswith(f"{block}."))

    def add_plain(self, name: str, full: str) -> None:
        own = renamed(name, self.rename)
        if own is not None and own not in self.names.transient and self.names.tensor(own) is not None:
            self._add_tensor(own, full)
        elif self.checks_plain:
            self.plan.unused.append(full)

    def _add_tensor(self, name: str, full: str) -> None:
        tensor = self.names.tensor(name)
        assert tensor is not None
        shapes = tuple(tensor.shape), tuple(self.source.shape(full))
        if shapes[0] != shapes[1] and self.checks_plain:
            self.plan.problems.append(f"{shown(name)} is {list(shapes[0])} in the model, and {list(shapes[1])} in the checkpoint")
        self.names.untied.add(name)
        if self.plan.plain.setdefault(name, full) != full:
            self.plan.problems.append(f"{shown(full)} and {shown(self.plan.plain[name])} are both {shown(name)} in the model")
        self._fill(name)

    def sort_plain(self, format: str | None, skip: Sequence[str]) -> None:
        """Plan which plain layers are quantized and which stay dense; a problem where layers are packed in another format."""
        for name in self.plan.plain:
            module, _, leaf = name.rpartition(".")
            owner = self.names.modules[module]
            why = self._why_dense(name, owner, format, skip)
            if not why:
                self.plan.quantized.append(module)
            elif isinstance(owner, nn.Linear | nn.Embedding) and leaf == "weight":
                self.plan.dense[module] = why
            elif format is not None and self._is_stack(name) and not is_skipped(name, skip):
                self.plan.stacks[name] = (self.plan.plain[name],)
            elif format is not None and name in self.names.parameters and self.names.parameters[name].dim() > 1:
                self.plan.dense[name] = why
        if format is None:
            return
        others = sorted({layer.format for step in self.plan.packed for layer in step.layers if layer.format != format}
                        | {step.group.format for step in self.plan.groups})
        if others:
            self.plan.problems.append(f"format={format!r} contradicts the checkpoint, whose layers are {', '.join(others)}: "
                                      "load it without format=, or convert it with `qdsl convert --requantize`")

    def _is_stack(self, name: str) -> bool:
        """Whether a parameter has the weights of all experts: three axes, in a module 'experts'."""
        return name in self.names.parameters and self.names.parameters[name].dim() == 3 and name.split(".")[-2:-1] == ["experts"]

    def _why_dense(self, name: str, owner: nn.Module, format: str | None, skip: Sequence[str]) -> str:
        """Why a plain tensor is not quantized; '' where it is."""
        module, _, leaf = name.rpartition(".")
        owners = [self.names.modules[other.rpartition(".")[0]] for other in self.names.tied(name)]
        if format is None:
            return "plain in the checkpoint"
        if leaf != "weight" or not isinstance(owner, nn.Linear) or not product_of(owner):
            return f"{type(owner).__name__} is no nn.Linear"
        if any(isinstance(other, nn.Embedding) for other in owners):
            return "shares the weight of an embedding"
        return SKIP if is_skipped(module, skip) else self.read_weights.get(module, "")

    # -- what is left -------------------------------------------------------------------------------------------------

    def _fill(self, *names: str) -> None:
        for name in names:
            self.filled.update(self.names.tied(name))

    def check_complete(self) -> None:
        """Report parameters without a weight, and buffers that stay on meta."""
        missing = [name for name in self.names.parameters if name not in self.filled]
        for module, packed in self.names.modules.items():
            stored = {f"{module}.{own}" for own in packed._names.values()} if isinstance(packed, PackedModule) else set()
            if isinstance(packed, PackedModule) and (not stored <= self.filled or stored & self.plan.plain.keys()):
                self.plan.problems.append(f"{shown(module)} holds a {packed.format.name} weight, for which the checkpoint has "
                                          "none: build the model anew")
                missing = [name for name in missing if name not in stored]
        if missing:
            hint = self._stack_hint(missing) or self._prefix_hint(missing)
            unused = f"; not used: {listed(self.plan.unused[:5])}, ..." if self.plan.unused else ""
            self.plan.problems.append(f"{len(missing)} parameters of the model have no weight in the checkpoint: "
                                      f"{listed(missing)}{hint}{unused}")
        empty = [name for name, buffer in self.names.buffers.items() if buffer.is_meta and name not in self.filled]
        if empty:
            self.plan.problems.append(
                f"{len(empty)} buffers are on meta and not in the checkpoint: {listed(empty)}; their modules compute them: "
                "build the model with parameters alone on meta, as accelerate.init_empty_weights() does")

    def check_used(self) -> None:
        """Report tensors without a place: files of weights that are coded together belong to exactly one model."""
        unused = [full for full in self.plan.unused if renamed(full, self.rename) is not None and not is_skipped(full, self.skip)]
        if unused:
            self.plan.problems.append(f"{len(unused)} tensors of the checkpoint have no place in the model: {listed(unused)}")

    def _stack_hint(self, missing: Sequence[str]) -> str:
        """A hint where the checkpoint stores experts one by one, and the model in one parameter."""
        for name in missing:
            first = f"{name.rpartition('.')[0]}.0."
            apart = next((other for other in self.plan.unused if other.startswith(first)), None)
            if self.names.parameters[name].dim() == 3 and apart is not None:
                why = ", and names do not tell the order of their rows: state it as stacks= of qdsl.models.load.fill_model" \
                    if f"{name}_bias" in self.names.parameters else ""
                return f"; the model holds experts in one parameter, and the checkpoint one by one, as {shown(apart)}{why}"
        return ""

    def _prefix_hint(self, missing: Sequence[str]) -> str:
        """A rename that would help, where names differ only in a prefix."""
        unused = [*self.plan.unused, *self.source.layers]
        for name in missing[:SHOWN]:
            for other in unused:
                for short, long, way in ((name, other, "remove"), (other, name, "add")):
                    if short and long.endswith(f".{short}"):
                        prefix = long[:-len(short)]
                        rename = {prefix: ""} if way == "remove" else {"": prefix}
                        return f"; names of the checkpoint differ in a prefix: pass rename={rename!r}"
        return "; tie a parameter that shares the weight of another before loading" if len(missing) == 1 else ""


def listed(names: Sequence[str]) -> str:
    """Some names as text."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def _is_flattened(shape: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """Whether a parameter's shape equals a weight's after joining axes, as of convolutions."""
    return len(shape) != len(stored) and math.prod(shape) == math.prod(stored)
