"""Reads transformers' conversion map: the model's names for a checkpoint's weights, and which weights it joins."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from qdsl.checkpoint.checkpoint import open_checkpoint
from qdsl.checkpoint.detect.sources import Source
from qdsl.checkpoint.files.safetensors import shown
from qdsl.models.plan import LoadError
from qdsl.models.private_apis import may_be_missing
from qdsl.models.stacks import usual_stacks


class Conversions:
    """The model's parameter names for a checkpoint's names, by the rules with which transformers loads it.

    model: as transformers built it, before any layer is replaced.  rules: renamings and converters, in their order.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Any]) -> None:
        self.model: Any = model
        self.renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.tensors: dict[str, Tensor] = model.state_dict()
        self.modules = {name for name, _ in model.named_modules(remove_duplicate=False)}

    @classmethod
    def of(cls, model: Any) -> Conversions:
        """The names of a model by the rules that transformers has for its class."""
        return cls(model, get_model_conversion_mapping(model))

    def rename(self, name: str) -> str | None:
        """The model's name of a tensor or module of the checkpoint; None where there is none, or it is joined with others."""
        for suffix in ("", ".weight"):
            target, converter = self.target(name + suffix)
            if converter is None and target in self.tensors:
                return target.removesuffix(suffix)
        weight, converter = self.target(f"{name}.weight")
        if converter is not None:                                # it may permute rows, as for rotary embeddings
            return None
        module = weight.removesuffix(".weight")
        prefix = f"{self.model.base_model_prefix}."
        places = (module, module.removeprefix(prefix), prefix + module)
        return next((place for place in places if place in self.modules and place), None)

    def target(self, name: str) -> tuple[str, str | None]:
        """The model's name of a tensor, and the pattern of the converter that joins it with others, or None."""
        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(name, self.renamings, self.converters, prefix, self.tensors)
        if target not in self.tensors and name in self.tensors:
            target, pattern = rename_source_key(name, [], [], prefix, self.tensors)
        return target, pattern

    def place(self, name: str) -> str | None:
        """The model's name of a layer, whether the model has it or not; None for one that is joined with others."""
        target, converter = self.target(f"{name}.weight")
        return target.removesuffix(".weight") if converter is None else None

    def stacks(self, shapes: Mapping[str, Sequence[int]], packed: Collection[str] | None = None) -> dict[str, list[list[str]]]:
        """Parameters whose experts consist of one or more weights: names of layers, expert by expert.

        shapes: of all weights, (N, K), by the names of their layers; (N * K,) of those that state no more.  packed: layers of
        which a parameter must have one, None for all parameters.  transformers' own operations are run on the numbers of rows.
        Raises LoadError where the result is no such stack.
        """
        sources: dict[str, list[tuple[str, str]]] = {}           # parameter -> layers, and patterns that they match
        for name in sorted(shapes, key=dot_natural_key):
            target, pattern = self.target(f"{name}.weight")
            if pattern is not None and target in self.tensors:
                sources.setdefault(target, []).append((name, pattern))
        return {target: self._stack(target, members, shapes) for target, members in sources.items()
                if packed is None or any(name in packed for name, _ in members)}

    def _stack(self, target: str, members: Sequence[tuple[str, str]], shapes: Mapping[str, Sequence[int]]) -> list[list[str]]:
        by_pattern = {pattern: rule for rule in self.converters for pattern in rule.source_patterns}
        converter = copy.deepcopy(by_pattern[members[0][1]])
        rows: dict[str, range] = {}                              # numbers of the rows of all layers
        count = 0
        for name, pattern in members:
            n = shapes[name][0] if len(shapes[name]) > 1 else shapes[name][0] // self.tensors[target].shape[-1]
            rows[name] = range(count, count + n)
            converter.add_tensor(target, f"{name}.weight", pattern, torch.arange(count, count + n, device="cpu")[:, None])
            count += n
        try:
            result = converter.convert(target, model=self.model, config=self.model.config)
            value = next(iter(result.values()))
            order = (value[0] if isinstance(value, list) else value).flatten(1).tolist()
        except Exception as error:
            raise LoadError(f"{shown(target)}: transformers cannot join {shown(members[0][0])} with others: {error}") from error
        firsts = {own[0]: name for name, own in rows.items()}
        stack = [[firsts[row] for row in expert if row in firsts] for expert in order]
        if len(result) > 1 or [[row for name in expert for row in rows[name]] for expert in stack] != order:
            raise LoadError(f"{shown(target)}: transformers makes it of {shown(members[0][0])} and others in a way that packed "
                            "weights cannot follow: name it in skip= and give plain numbers")
        return stack


def layer_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of packed weights, and of plain ones, by layer name."""
    shapes: dict[str, tuple[int, ...]] = {name: layer.shape for name, layer in source.layers.items()
                                          if layer.experts is None and all(layer.shape)}
    for group in source.groups:
        shapes |= {part.removesuffix(".weight"): (count,) for part, count in group.parts.items()}
    plain = [name for name in source.plain if name.endswith(".weight")]
    return shapes | {name.removesuffix(".weight"): own for name in plain if len(own := source.shape(name)) == 2}


def stored_names(model: nn.Module, path: Path) -> dict[str, str]:
    """The model's names of weights, as `calibrate` has them, by the names of layers in its folder.

    An expert of a stacked parameter 'up_proj' is 'up_proj.3'; in files with stacks layer and expert are joined so, too.
    """
    names = Conversions.of(model)
    with open_checkpoint(path) as checkpoint:
        source = checkpoint.source
        stacks = {**usual_stacks(dict(model.named_parameters()), source, names.place, ""), **names.stacks(layer_shapes(source))}
        layers = {*source.layers, *(full.removesuffix(".weight") for full in source.plain)}
    stored = {piece: f"{stack}.{expert}" for stack, experts in stacks.items() for expert, pieces in enumerate(experts)
             for piece in pieces}
    for layer in layers - stored.keys():
        if (name := names.rename(layer)) is not None and (tensor := names.tensors.get(name)) is not None and tensor.dim() == 3:
            stored |= {f"{layer}.{expert}": f"{name}.{expert}" for expert in range(len(tensor))}
        elif name is not None:
            stored[layer] = name
    return stored


def reverted(model: nn.Module, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Plain tensors of a model under the checkpoint's names, with joined tensors divided again."""
    plain: Mapping[str, Tensor] = revert_weight_conversion(model, tensors)
    return plain


def ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a parameter's whole name, or a part of it between dots."""
    return any(re.fullmatch(pattern, part) for pattern in patterns
               for part in (name, name.removesuffix(".weight"), *name.split(".")))


def missing_parameters(model: Any, missing: set[str], skip: Sequence[str]) -> list[str]:
    """Parameters that were not loaded, and share no loaded tensor."""
    shared: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        shared.setdefault(source, {source}).add(target)
    loaded = {name for group in shared.values() if not group <= missing for name in group}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    return sorted(name for name in missing - loaded if name in tensors
                  and not ignored(name, skip) and not any(re.search(pattern, name) for pattern in may_be_missing(model)))
