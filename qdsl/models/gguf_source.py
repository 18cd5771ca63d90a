"""The tensors of a GGUF file under the names of a transformers model, as a recorded map combines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from qdsl.checkpoint.groups import Group
from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.safetensors import CheckpointError, shown
from qdsl.checkpoint.sources import GgufSource, Shapes
from qdsl.models.gguf_maps import LATENT, VALUES, GgufMap, TensorRule, joined_shape, row_order
from qdsl.models.plan import LoadError, Names, listed
from qdsl.runtime.algebra import concatenated
from qdsl.runtime.packed import FormatError, PackedWeight

RUNS = 4                                                         # runs of consecutive rows of an expert that are cut one by one


class GgufModelSource:
    """A GGUF file as a checkpoint with the names and shapes of a model: a `Source`.

    Layers whose rows come as they are stay mapped from the file; others are gathered when they are read.  Raises LoadError,
    which lists all of it, for tensors that the map does not know, parameters without a tensor, and sizes that differ.
    """

    def __init__(self, file: GgufSource, recorded: GgufMap, model: nn.Module, config: object) -> None:
        self.file, self.path, self.config = file, file.path, config
        self.groups: Sequence[Group] = ()
        self.problems: Sequence[str] = file.problems
        if callable(tie := getattr(model, "tie_weights", None)):
            tie()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        rules = {name: rule for name in self._shapes if (rule := recorded.rule(name)) is not None}
        self.rules = {name: rule for name, rule in rules.items() if any(own in file.file.tensors for own in rule.sources)}
        problems = [*self._unknown(recorded), *self._missing(Names(model)), *self._misfits()]
        if problems:
            raise LoadError("\n".join([f"{self.path} does not fill {type(model).__name__}, by the map of {recorded.recorded}:",
                                       *(f"  {problem}" for problem in problems)]))

    # -- what fits ----------------------------------------------------------------------------------------------------

    def _unknown(self, recorded: GgufMap) -> list[str]:
        """Tensors of the file that the map does not know."""
        scales = {full for layer in self.file.layers.values() for full in list(layer.tensors.values())[1:]}
        unknown = [name for name in self.file.file.tensors if not recorded.is_recorded(name) and name not in scales]
        return [f"{len(unknown)} tensors are in no recorded map of {recorded.model_type}: {listed(unknown)}"] if unknown else []

    def _missing(self, names: Names) -> list[str]:
        """Parameters and buffers that no tensor fills, nor one that they share their numbers with."""
        filled = {own for name in self.rules for own in (name, *names.tied(name))}
        missing = [name for name in self._shapes if name not in filled]
        return [f"{len(missing)} parameters have no tensor in the file: {listed(missing)}"] if missing else []

    def _misfits(self) -> list[str]:
        """Parameters of another size than their tensors."""
        problems = []
        for name, rule in self.rules.items():
            shapes = {source: self.file.shape(source) for source in rule.sources if source in self.file.file.tensors}
            if len(shapes) < len(rule.sources):
                problems.append(f"{shown(name)} needs {', '.join(own for own in rule.sources if own not in shapes)}, too")
            elif sum(map(math.prod, shapes.values())) != math.prod(self._shapes[name]):
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
        own = [layer for source in rule.sources if (layer := self._file_layer(source)) is not None]
        shape = self._shapes[name]
        is_changed = rule.values or rule.elements or rule.rows == LATENT or (rule.transposed and len(shape) != 3)
        if len(own) < len(rule.sources) or is_changed:
            return None
        if wrong := next((layer for layer in own if layer.why), None):
            return Layer(name.removesuffix(".weight"), others=wrong.others, why=wrong.why)
        if len({(layer.format, layer.storage, layer.shape[1]) for layer in own}) > 1:
            return None
        experts = shape[0] if len(shape) == 3 else None
        rows = sum(layer.shape[0] * (layer.experts or 1) for layer in own)
        return Layer(name.removesuffix(".weight"), own[0].format, own[0].storage, own[0].params,
                     (rows // (experts or 1), own[0].shape[1]), experts)

    def _file_layer(self, source: str) -> Layer | None:
        return self.file.layers.get(source.removesuffix(".weight"))

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
        joined = concatenated(cuts) if sum(cut.shape[0] for cut in cuts) == len(order) else None
        return PackedWeight.join(parts).rows(order) if joined is None else joined

    def _parts(self, layer: Layer) -> tuple[list[PackedWeight], Tensor]:
        """The weights of the file, and the order in which their rows are taken."""
        rule = self._rule(layer)
        parts = [self.file.stacked(own) for source in rule.sources if (own := self._file_layer(source)) is not None]
        count = sum(part.shape[0] for part in parts)
        return parts, row_order(rule.rows, self.config, count) if rule.rows else torch.arange(count)

    def _cuts(self, parts: Sequence[PackedWeight], rows: Tensor) -> list[PackedWeight]:
        """Runs of consecutive rows of the parts, mapped; none where there are many, or where blocks go over their ends."""
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
        return [name for name in self.rules if name not in self.layers and name.removesuffix(".weight") not in self.layers]

    def shape(self, name: str) -> tuple[int, ...]:
        self._known(name)
        return self._shapes[name]

    def nbytes(self, name: str) -> int:
        return sum(self.file.nbytes(source) for source in self._known(name).sources)

    def tensor(self, name: str) -> Tensor:
        rule, shape = self._known(name), self._shapes[name]
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

    def _known(self, name: str) -> TensorRule:
        if name not in self.rules:
            raise CheckpointError(f"{self.path}: no tensor for {shown(name)}")
        return self.rules[name]

    def _numbers(self, source: str) -> Tensor:
        """A tensor of the file in plain numbers: decoded to float32 where it is packed."""
        layer = self._file_layer(source)
        if layer is None:
            return self.file.tensor(source)
        weight = self.file.stacked(layer)
        return weight.format.dequantize(weight, torch.float32).view(self.file.shape(source))

    # -- what a GGUF file has not -------------------------------------------------------------------------------------

    def group_weight(self, group: Group) -> PackedWeight:
        return self.file.group_weight(group)

    def decoded(self, group: Group) -> dict[str, Tensor]:
        return self.file.decoded(group)

    def use_shapes(self, shapes: Shapes) -> None:
        """Blocks state their shapes."""

    def close(self) -> None:
        self.file.close()
