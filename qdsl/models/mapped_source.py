"""Presents the tensors of a file under the names and shapes of a library's model, combined by rules."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.gguf_keys import table
from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.sources import GgufSource, Shapes, Source
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.stored import INPUT_SCALE
from qdsl.core.text import counted
from qdsl.core.transforms import OUTPUT, Transform
from qdsl.models.gguf_maps import LATENT, RECORDED, VALUES, GgufMap, TensorRule, are_spans, joined_shape, pattern_of, row_order
from qdsl.models.names import Names
from qdsl.models.plan import LoadError, listed
from qdsl.models.ties import tie
from qdsl.models.transforms import folded_weight
from qdsl.runtime.weight.algebra import concatenate_rows
from qdsl.runtime.weight.packed import FormatError, PackedWeight

UNUSED = "scale_input"                                           # ComfyUI's, which is 1 where none is known
CHOICE = ".exp_probs_b"                                          # in names of biases by which experts are chosen
RUNS = 4                                                         # runs of consecutive rows of an expert that are cut one by one


class MappedSource:
    """A file as a checkpoint with the names and shapes of a model: a `Source`.

    file: a GGUF file, or safetensors.  rules: by the names of the model's parameters and buffers.  origin: the source of the
    rules, for messages.  unused: tensors of the file that the model does not use.  has_experts: whether tensors [E, N, K] are
    experts' weights.  zeros: parameters that are zero, because the file leaves them out.

    Layers with unchanged rows stay mapped from the file; rows of others are gathered on access.  Raises LoadError, which lists
    all problems, for parameters without a tensor and for different sizes.
    """

    def __init__(self, file: Source, rules: Mapping[str, TensorRule], model: nn.Module, config: object = None, *,
                 origin: str = "rules", problems: Sequence[str] = (), unused: Sequence[str] = (),
                 has_experts: bool = True, zeros: Sequence[str] = ()) -> None:
        self.zeros = frozenset(zeros)
        self.file, self.path, self.config, self.has_experts = file, file.path, config, has_experts
        self.groups: Sequence[Group] = ()
        self.problems: Sequence[str] = file.problems
        self.findings = file.findings
        tie(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.names = layers_by_tensor(file)
        self.rules = {name: rule for name, rule in rules.items()
                      if name in self._shapes and any(own in self.names for own in rule.sources)}
        self._scales: dict[str, str] = {}                        # names in the file, by those that layers give them
        self.unused = [name for name in unused if name not in self._shapes]
        problems = [*problems, *self._missing(Names(model), rules), *self._misfits()]
        if problems:
            raise LoadError("\n".join([f"{self.path} does not fill {type(model).__name__}, by {origin}:",
                                       *(f"  {problem}" for problem in problems)]))

    # -- what fits ----------------------------------------------------------------------------------------------------

    def _missing(self, names: Names, rules: Mapping[str, TensorRule]) -> list[str]:
        """Problems with parameters and buffers that no tensor fills."""
        filled = {own for name in (*self.rules, *self.zeros) for own in (name, *names.tied(name))}
        missing = [f"{name} ({', '.join(rules[name].sources)})" if name in rules else name
                   for name in self._shapes if name not in filled]
        return [f"{len(missing)} parameters have no tensor in the file: {listed(missing)}"] if missing else []

    def _misfits(self) -> list[str]:
        """Problems with parameters whose tensors have another size."""
        problems = []
        for name, rule in self.rules.items():
            shapes = {source: logical_shape(self.file, source, self.names[source]) for source in rule.sources
                      if source in self.names}
            count = sum(map(math.prod, shapes.values()))
            if are_spans(rule.rows):                             # which may leave rows out
                rows, columns = joined_shape(list(shapes.values()), rule.elements)
                count = len(row_order(rule.rows, self.config, rows)) * columns
            if len(shapes) < len(rule.sources):
                problems.append(f"{shown(name)} needs {', '.join(own for own in rule.sources if own not in shapes)}, too")
            elif count != math.prod(self._shapes[name]) or any(_has_other_columns(shape, self._shapes[name], rule)
                                                               for shape in shapes.values()):
                stored = ", ".join(f"{shown(source)} {list(shape)}" for source, shape in shapes.items())
                problems.append(f"{shown(name)} is {list(self._shapes[name])} in the model, and the file has {stored}")
        return problems

    # -- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        packed = [layer for name, rule in self.rules.items() if (layer := self._layer(name, rule)) is not None]
        return {layer.name: layer for layer in packed}

    def _layer(self, name: str, rule: TensorRule) -> Layer | None:
        """A parameter as a packed layer; None for one that takes numbers: plain, changed, or of several formats."""
        own = [layer for source in rule.sources if (layer := self.names[source]) is not None]
        shape = self._shapes[name]
        is_changed = rule.values or rule.elements or rule.rows == LATENT or (rule.transposed and len(shape) != 3)
        is_changed = is_changed or (isinstance(self.file, GgufSource) and any(map(self.file.is_reshaped, own)))
        if len(own) < len(rule.sources) or is_changed or not (self.has_experts or len(shape) == 2):
            return None
        if wrong := next((layer for layer in own if layer.why), None):
            return Layer(name.removesuffix(".weight"), others=wrong.others, why=wrong.why)
        if len({(layer.format, layer.storage, layer.shape[1]) for layer in own}) > 1:
            return None
        others = {leaf: full for layer in own for leaf, full in layer.others.items() if leaf == INPUT_SCALE}
        transforms = [transform for layer in own for transform in layer.transforms]
        if (len(own) > 1 and (others or transforms)) or (rule.rows and any(one.side == OUTPUT for one in transforms)):
            return None                                          # each has its own
        module = name.removesuffix(".weight")
        self._scales |= {f"{module}.{leaf}": full for leaf, full in others.items()}
        others = {leaf: f"{module}.{leaf}" for leaf in others}
        experts = shape[0] if len(shape) == 3 else None
        rows = math.prod(shape) // own[0].shape[1]
        return Layer(module, own[0].format, own[0].storage, own[0].params,
                     (rows // (experts or 1), own[0].shape[1]), experts, others=others, transforms=tuple(transforms))

    def _rule(self, layer: Layer) -> TensorRule:
        return self.rules.get(layer.name) or self.rules[f"{layer.name}.weight"]

    def weights(self, layer: Layer) -> list[PackedWeight]:
        if layer.why:
            raise CheckpointError(f"{self.path}: layer {shown(layer.name)}: {layer.why}")
        if layer.experts is None:
            return [self.stacked(layer)]
        parts, order = self._parts(layer)
        experts = [self._cuts(parts, rows) for rows in order.chunk(layer.experts)]
        if all(experts):
            return [weight for cuts in experts for weight in cuts]
        whole = self.stacked(layer)
        return [whole.shard("N", expert * layer.shape[0], (expert + 1) * layer.shape[0]) for expert in range(layer.experts)]

    def stacked(self, layer: Layer) -> PackedWeight:
        parts, order = self._parts(layer)
        if not self._rule(layer).rows:
            return PackedWeight.join(parts)
        cuts = [cut for rows in order.chunk(layer.experts or 1) for cut in self._cuts(parts, rows)]
        joined = concatenate_rows(cuts) if sum(cut.shape[0] for cut in cuts) == len(order) else None
        return PackedWeight.join(parts).rows(order) if joined is None else joined

    def _parts(self, layer: Layer) -> tuple[list[PackedWeight], Tensor]:
        """The weights of the file, and the order of their rows."""
        rule = self._rule(layer)
        parts = [self.file.stacked(own) for source in rule.sources if (own := self.names[source]) is not None]
        count = sum(part.shape[0] for part in parts)
        return parts, row_order(rule.rows, self.config, count) if rule.rows else torch.arange(count, device="cpu")

    def _cuts(self, parts: Sequence[PackedWeight], rows: Tensor) -> list[PackedWeight]:
        """Runs of consecutive rows of the parts, as views; [] where there are too many, or where blocks cross their ends."""
        starts = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
        if len(starts) - 1 > RUNS:
            return []
        cuts: list[PackedWeight] = []
        for start, stop in pairwise(starts):
            first, last = int(rows[start]), int(rows[stop - 1]) + 1
            base = 0
            for part in parts:
                begin, end = max(first, base) - base, min(last, base + part.shape[0]) - base
                if begin < end:
                    try:
                        cuts.append(part.cut("N", begin, end))
                    except FormatError:
                        return []
                base += part.shape[0]
        return cuts

    # -- plain tensors ------------------------------------------------------------------------------------------------

    @property
    def plain(self) -> Sequence[str]:
        filled = [name for name in self.rules if name not in self.layers and name.removesuffix(".weight") not in self.layers]
        return [*filled, *self.zeros, *self.unused]

    @property
    def transforms(self) -> Mapping[str, Sequence[Transform]]:
        plain = {f"{name}.weight": own for name, own in self.file.transforms.items()}
        return {name.removesuffix(".weight"): plain[source] for name, rule in self.rules.items() for source in rule.sources
                if source in plain}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self.rules or name in self.zeros else self.file.shape(self._scales.get(name, name))

    def nbytes(self, name: str) -> int:
        if name in self.zeros:
            return 0
        return sum(map(self.file.nbytes, self.rules[name].sources if name in self.rules else (self._scales.get(name, name),)))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a parameter as plain numbers."""
        if name in self.zeros:
            return torch.float32
        if name not in self.rules:
            return self.file.tensor(self._scales.get(name, name)).dtype
        rule = self.rules[name]
        dtypes = [self.file.tensor(source).dtype if self.names[source] is None else torch.float32 for source in rule.sources]
        return torch.float32 if rule.values else reduce(torch.promote_types, dtypes)

    def tensor(self, name: str) -> Tensor:
        """A parameter as plain numbers, decoded where the file has it packed."""
        if name in self.zeros:
            return torch.zeros(self._shapes[name], dtype=torch.float32, device="cpu")
        if name not in self.rules:
            return self.file.tensor(self._scales.get(name, name))
        rule, shape = self.rules[name], self._shapes[name]
        parts = [self._numbers(source) for source in rule.sources]
        tensor = parts[0]
        if rule.rows == LATENT:
            tensor = torch.cat([tensor.transpose(1, 2), parts[1]], 1)
        elif len(parts) > 1 or rule.rows:
            count, columns = joined_shape([tuple(part.shape) for part in parts], rule.elements)
            tensor = torch.cat([part.reshape(-1, columns) for part in parts])
            tensor = tensor[row_order(rule.rows, self.config, count)] if rule.rows else tensor
        if rule.transposed:
            tensor = tensor.reshape(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        return (VALUES[rule.values](tensor.float()) if rule.values else tensor).reshape(shape)

    def _numbers(self, source: str) -> Tensor:
        """A tensor of the file as plain numbers: decoded to float32 where it is packed."""
        layer = self.names[source]
        if layer is None:
            return self.file.tensor(source)
        weight = self.file.stacked(layer)
        dense = folded_weight(weight.format.dequantize(weight, torch.float32), layer.transforms, self.file.tensor)
        return dense.view(logical_shape(self.file, source, layer))

    # -- what such a file has not -------------------------------------------------------------------------------------

    def group_weight(self, group: Group) -> PackedWeight:
        return self.file.group_weight(group)

    def decoded(self, group: Group) -> dict[str, Tensor]:
        return self.file.decoded(group)

    def use_shapes(self, shapes: Shapes) -> None:
        """Does nothing: the file's blocks state their shapes."""

    def described(self) -> MappedSource:
        return self

    def close(self) -> None:
        self.file.close()


def gguf_source(path: Path, map: GgufMap, model: nn.Module, config: object, fills_biases: bool = False) -> MappedSource:
    """A GGUF file of a language model under the names of a model's parameters, which may be on meta.

    fills_biases: biases that llama.cpp does not need and the file leaves out, in all layers or in some, are zero.
    Raises LoadError where it does not fit, and for tensors that the model has no place for; CheckpointError for damage.
    """
    file = GgufSource(path)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."       # of a model without a head, whose names lack it
    rules = {name: rule for name in model.state_dict() if (rule := map.rule(name) or map.rule(prefix + name)) is not None}
    stored = layers_by_tensor(file)
    zeros = [name for name, rule in rules.items()
             if fills_biases and (name.endswith(".bias") or CHOICE in rule.sources[0]) and stored.keys().isdisjoint(rule.sources)
             and pattern_of(rule.sources[0])[0] not in table()["needed"].get(map.model_type, ())]
    try:
        return MappedSource(file, rules, model, config, origin=f"the map of {RECORDED}", zeros=zeros,
                            unused=[name for name in stored if is_input_scale(name, stored)],
                            problems=_unplaced_problems(stored, map, rules, model))
    except Exception:
        file.close()
        raise


def is_input_scale(name: str, stored: Container[str]) -> bool:
    """Whether a tensor is the scale of a weight's x, which NVFP4 files have, and llama.cpp and qdsl do not quantize by."""
    stem, _, leaf = name.rpartition(".")
    return leaf == INPUT_SCALE and f"{stem}.weight" in stored


def _unplaced_problems(stored: Mapping[str, object], map: GgufMap, rules: Mapping[str, TensorRule],
                       model: nn.Module) -> list[str]:
    """Problems with tensors of a file that the map does not know, or for which the model has no parameter.

    A model without a head needs none of the head's.
    """
    placed = {source for rule in rules.values() for source in rule.sources}
    is_headless = not any(map.rule(name) for name in model.state_dict())
    heads = {source for name, rule in map.rules.items() if name.startswith("lm_head.") for source in rule.sources}
    unknown = [name for name in stored if not map.is_recorded(name) and not is_input_scale(name, stored)]
    left = [name for name in stored if map.is_recorded(name) and name not in placed
            and not {name, pattern_of(name)[0]} & {*map.unused} and not (is_headless and name in heads)]
    problems = [f"{counted(len(unknown), 'tensor')} without a place in the recorded map of {map.model_type}: {listed(unknown)}"
                ] if unknown else []
    return problems + ([f"{counted(len(left), 'tensor')} for which {type(model).__name__} has no parameter with this config: "
                        f"{listed(left)}"] if left else [])


def layers_by_tensor(file: Source) -> dict[str, Layer | None]:
    """The names of a file's tensors as if nothing were packed, with the packed layer of each, None for plain ones."""
    names: dict[str, Layer | None] = dict.fromkeys(file.plain)
    for layer in file.layers.values():
        own = (*layer.tensors.values(), *layer.others.values())
        names[layer.name if layer.name in own else f"{layer.name}.weight"] = layer
        names |= {full: None for leaf, full in layer.others.items() if leaf not in (INPUT_SCALE, UNUSED, "weight")
                  and full not in layer.transform_tensors}
    return names


def _has_other_columns(stored: Sequence[int], wanted: Sequence[int], rule: TensorRule) -> bool:
    """Whether a tensor of as many axes as its parameter has other columns, without axes of length 1."""
    stored, wanted = ([extent for extent in shape if extent != 1] for shape in (stored, wanted))
    is_comparable = len(stored) == len(wanted) > 1 and not rule.elements and rule.rows != LATENT
    return is_comparable and stored[-1] != wanted[-2 if rule.transposed else -1]


def logical_shape(file: Source, name: str, layer: Layer | None) -> tuple[int, ...]:
    """The shape of a tensor's numbers: the one that the file states, unless that is of codes."""
    if layer is None or layer.why:
        return file.shape(name)
    own = layer.shape if layer.experts is None else (layer.experts, *layer.shape)
    stored = file.shape(name) if name in layer.tensors.values() else own
    return stored if math.prod(stored) == math.prod(own) else own
