"""What a checkpoint's files say of its quantization: settings, for which layers, and which layers are left as they were."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qdsl.checkpoint.detect.ignored import Budget, Rule, Rules, rules
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown, strict_json

MLX = "mlx"                                                      # whose layers have settings under their names, among the others
# Where settings lie: a file, the keys on the way to them, and whose they are where they do not say so.
PLACES = (
    ("config.json", ("quantization",), MLX), ("config.json", ("quantization_config",), ""),
    ("config.json", ("text_config", "quantization_config"), ""),
    ("config.json", ("llm_config", "quantization_config"), ""), ("config.json", ("compression_config",), "compressed-tensors"),
    ("quantize_config.json", (), "gptq"), ("quant_config.json", (), "awq"),
    ("hf_quant_config.json", ("quantization",), "modelopt"),
)
METADATA = "quantization_config"                                 # the key of a safetensors header that may hold them, too
# What producers call the same setting.
NAMES = {"gptq": {"format": "checkpoint_format"}, "awq": {"w_bit": "bits", "q_group_size": "group_size"}}
# How each producer's list of layers that are left alone is read; where readers of it differ, in several ways.
LISTS = {
    "modules_to_not_convert": ("transformers", "substring"), "llm_int8_skip_modules": ("transformers",),
    "skip_modules": ("transformers", "substring"), "ignored_layers": ("exact", "substring"), "ignore": ("regex",),
    "exclude_modules": ("glob",), "exclude": ("quark",),
}
GLOBS = ("modelopt", "modelopt_fp4", "modelopt_mixed")           # whose 'ignore', too, is of wildcards
QUARK = "quark"                                                  # whose settings of single layers are those of the whole, too
LAYERS = ("quantized_layers", "extra_config")                    # maps of single layers to their settings: modelopt, auto-round
WHOLE = (16, 32)                                                 # bits of layers that auto-round leaves as they were
LINEAR = "Linear"                                                # the class that targets mean by themselves


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a config says of a layer: settings, None where it is left alone; by: the rules or the group that say so."""

    settings: Mapping[str, Any] | None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that a config gives settings of their own: all, where `targets` is None or names their class."""

    name: str
    targets: Rules | None
    settings: Mapping[str, Any]


@dataclass
class Quantization:
    """What a checkpoint says of its quantization, in one place.

    source: the place.  method: the producer's name for it.  settings: those of the whole.  lists: the readings of the list of
    layers left alone, one for each dialect.  problems: what cannot be read.
    """

    source: str
    method: str
    settings: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    layers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    lists: list[Rules] = field(default_factory=list)
    only: Rules | None = None
    dynamic: list[tuple[Rules, Mapping[str, Any] | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)

    @cached_property
    def _named(self) -> list[Group]:
        return [group for group in self.groups if group.targets is not None]

    def scheme(self, module: str) -> Scheme:
        """What is said of a module, by its name.  Raises CheckpointError where that takes long."""
        with self.budget:
            return self._scheme(module)

    def _scheme(self, module: str) -> Scheme:
        ignored = [rule for each in self.lists if (rule := each.first(module)) is not None]
        if ignored and len(ignored) == len(self.lists):
            return Scheme(None, str(ignored[0]))
        for each, overrides in self.dynamic:
            rule = each.first(module)
            if rule is not None:
                return Scheme(None if overrides is None else ChainMap(dict(overrides), self.settings), str(rule))
        if self.only is not None and self.only.first(module) is None:
            return Scheme(None, "not in modules_in_block_to_quantize (suffix)")
        if module in self.layers:
            own = self.layers[module]
            return Scheme(None if own.get("bits") in WHOLE else own, "its own settings")
        if not self.groups:
            mixed = "quantized_layers" in self.settings
            return Scheme(None, "not in quantized_layers (exact)") if mixed else Scheme(self.settings)
        found = next((each for each in self._named if each.targets and each.targets.first(module) is not None), None)
        found = found or next((each for each in self.groups if each.targets is None), None)
        return Scheme(found.settings, found.name) if found else Scheme(None, "in no group")

    def has_8_bit_inputs(self, module: str) -> bool:
        """Whether a module's products take x in 8 bits."""
        scheme, groups = self.scheme(module), self.settings.get("config_groups")
        group = groups.get(scheme.by) if isinstance(groups, Mapping) else None
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        return (isinstance(inputs, Mapping) and inputs.get("num_bits") == 8) or bool(
            scheme.settings is not None and scheme.settings.get("activation_scheme"))

    def maybe(self, module: str) -> Rule | None:
        """The rule by which some readers of the list leave a module alone, and others do not."""
        with self.budget:
            ignored = [rule for each in self.lists if (rule := each.first(module)) is not None]
        return ignored[0] if 0 < len(ignored) < len(self.lists) else None


def quantizations(folder: Folder) -> list[Quantization]:
    """What a folder's files say, the first of them in the order of PLACES; several, where they are in several places.

    Raises CheckpointError where settings are none.
    """
    found, budget = [], Budget(len(folder.names()))
    for file, keys, method in PLACES:
        data: Any = folder.json(file)
        for key in keys:
            data = data.get(key) if isinstance(data, Mapping) else None
        if data and not isinstance(data, Mapping):
            raise CheckpointError(f"{folder.root / file}: {'.'.join(keys)} is {shown(str(data))}, no object of settings")
        if data:
            found.append(quantization(data, " ".join([f"{file}:", *keys]).rstrip(": "), method, budget))
    return [*found, *(quantization(data, source, "", budget) for source, data in in_headers(folder))]


def in_headers(folder: Folder) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Settings in the files' own metadata, and where they are."""
    for file in folder.files():
        if METADATA in file.header.metadata:
            source = f"{file.path.name}: {METADATA}"
            data = strict_json(file.header.metadata[METADATA].encode(), source, depth=64, constants=True)
            if isinstance(data, Mapping) and data:
                yield source, data


def quantization(data: Mapping[str, Any], source: str, method: str, budget: Budget | None = None) -> Quantization:
    """One place's settings as all the others have them.  Raises CheckpointError for patterns that take long."""
    budget = budget or Budget()
    with budget:
        return _quantization(data, source, method, budget)


def _quantization(data: Mapping[str, Any], source: str, method: str, budget: Budget) -> Quantization:
    method = str(data.get("quant_method") or method or _unnamed(data)).lower()
    names = NAMES.get(method, {})
    settings = {names.get(key, key): value for key, value in data.items()} | {"quant_method": method}
    found = Quantization(source, method, settings, budget=budget)
    for key in LISTS:
        if settings.get(key):
            found.lists += [rules(dialect, settings[key], budget) for dialect in dialects(key, method)]
    found.groups = _groups(settings, budget)
    found.layers = _layers(settings)
    dynamic = settings.get("dynamic")
    for pattern, overrides in dynamic.items() if isinstance(dynamic, Mapping) else ():
        found.dynamic.append((rules("dynamic", re.sub(r"\A[-+]:", "", pattern), budget),
                              None if pattern.startswith("-:") or overrides is False else
                              overrides if isinstance(overrides, Mapping) else {}))
    of_layers = settings.get("layer_quant_config") if method == QUARK else None
    for pattern, own in of_layers.items() if isinstance(of_layers, Mapping) else ():
        found.dynamic.append((rules("glob", pattern, budget), {"global_quant_config": own}))
    inside = settings.get("modules_in_block_to_quantize")
    if inside:
        found.only = rules("suffix", [name for each in _listed(inside) for name in _listed(each)], budget)
    read_rules = [*found.lists, *(each for each, _ in found.dynamic), *(each.targets for each in found.groups if each.targets),
                  *([found.only] if found.only else [])]
    problems = [*_misplaced(settings), *(problem for each in read_rules for problem in each.problems)]
    found.problems = list(dict.fromkeys(f"{source}: {problem}" for problem in problems))
    return found


def _listed(value: Any) -> list[Any]:
    """A list, or one of what stands by itself where a list should."""
    return value if isinstance(value, list) else [value]


def _misplaced(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are of layers, and not the objects that they should be."""
    for key in ("config_groups", "dynamic", *LAYERS):
        value = settings.get(key)
        if value and not isinstance(value, Mapping):
            yield f"{key} is {shown(str(value))}, no object"
        for name, each in value.items() if isinstance(value, Mapping) else ():
            if not (isinstance(each, Mapping) or (key == "dynamic" and (each is False or name.startswith("-:")))):
                yield f"{key}: {shown(name)} is {shown(str(each))}, no object of settings"


def dialects(key: str, method: str) -> tuple[str, ...]:
    """How a producer's list of layers that are left alone is read, by its key."""
    if method == OWN:
        return ("exact",)                                        # no other loader reads it
    return ("glob",) if key == "ignore" and method in GLOBS else LISTS[key]


def _unnamed(data: Mapping[str, Any]) -> str:
    """Whose settings are that do not say so."""
    if data.get("load_in_4bit") or data.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in data else MLX if {"bits", "group_size"} <= data.keys() else ""


def _groups(settings: Mapping[str, Any], budget: Budget) -> list[Group]:
    """compressed-tensors' groups of layers."""
    groups = settings.get("config_groups")
    rest = {key: value for key, value in settings.items() if key not in ("config_groups", *LAYERS)}
    found: list[Group] = []
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            own = {"format": group["format"]} if group.get("format") else {}
            targets = _listed(group.get("targets") or [])
            every = LINEAR in targets or not targets
            found.append(Group(name, None if every else rules("regex", targets, budget), ChainMap(own, dict(weights), rest)))
    return found


def _layers(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Settings of single layers, by their whole names."""
    rest = {key: value for key, value in settings.items() if key not in LAYERS}
    return {name: ChainMap(dict(layer), rest) for key in LAYERS if isinstance(settings.get(key), Mapping)
            for name, layer in settings[key].items() if isinstance(layer, Mapping)} | \
        {name: ChainMap(dict(layer), rest) for name, layer in settings.items()
         if settings["quant_method"] == MLX and isinstance(layer, Mapping)}
