"""The quantization settings in a checkpoint's files: the layers that they apply to, and the unquantized layers."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qdsl.checkpoint.detect.ignored import Budget, Rule, Rules, rules
from qdsl.checkpoint.detect.ledger import Finding, findings
from qdsl.checkpoint.detect.producers import ConfigKeys, producers
from qdsl.checkpoint.detect.rules import at
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown, strict_json
from qdsl.core.producer import CONFIG_FILE, INLINE, GroupSettings, Producer
from qdsl.core.shapes import listed, values_text

METADATA = "quantization_config"                                 # the key of settings in configs, and in headers of files
Own = dict[str, Mapping[str, Any] | None]
Keys = tuple[str, ...]                                           # that lead to settings in a file
EMBEDDINGS = re.compile(r".*embed.*|wte|wpe|shared")             # the last part of the names of nn.Embedding
SPECIAL = frozenset("*+?^$()[]{}|\\")                            # what tells a regular expression from a name
INTEGER = re.compile(r"-?[0-9]{1,9}", re.ASCII)
LEFT_ALONE = "-:"                                                # prefix of patterns of unquantized layers


@dataclass(frozen=True, slots=True)
class Scheme:
    """A config's settings for a layer, None if it stays unquantized.  by: the rules or group that decide it."""

    settings: Mapping[str, Any] | None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with settings of their own, None if their weights stay unquantized.

    targets: None for all layers.  embeddings: it names their class.
    """

    name: str
    targets: Rules | None
    settings: Mapping[str, Any] | None
    embeddings: bool = False


@dataclass
class Quantization:
    """The quantization settings in one place of a checkpoint.

    source: the place.  method: the producer's name.  settings: of the whole checkpoint.  layers: settings of single layers, None
    if unquantized.  searched: the same by patterns, for layers without.  complete: maps that name every quantized layer.  lists:
    the list of unquantized layers, parsed in each dialect.  only: the only quantized layers; `only_key` is the setting that lists
    them.  dynamic: patterns, and settings of matching layers, None if unquantized.  problems: unreadable settings.  findings:
    settings with which qdsl does not compute.  is_of_part: they may speak of a part of the model alone, as in `vision_config`.
    """

    source: str
    method: str
    settings: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    layers: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    searched: list[tuple[Rules, Mapping[str, Any] | None]] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    lists: list[Rules] = field(default_factory=list)
    only: Rules | None = None
    only_key: str = ""
    dynamic: list[tuple[Rules, Mapping[str, Any] | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    is_of_part: bool = False
    budget: Budget = field(default_factory=Budget)

    @cached_property
    def _named(self) -> list[Group]:
        return [group for group in self.groups if group.targets is not None]

    def scheme(self, module: str) -> Scheme:
        """The settings of a module by its name.  Raises CheckpointError for slow patterns."""
        with self.budget:
            return self._scheme(module)

    def _scheme(self, module: str) -> Scheme:
        ignored = [rule for listed in self.lists if (rule := listed.first(module)) is not None]
        if ignored and len(ignored) == len(self.lists):
            return Scheme(None, str(ignored[0]))
        for patterns, overrides in self.dynamic:
            rule = patterns.first(module)
            if rule is not None:
                return Scheme(overrides, str(rule))
        if self.only is not None and self.only.first(module) is None:
            return Scheme(None, f"not in {self.only_key}")
        if module in self.layers:
            return Scheme(self.layers[module], "its own settings")
        for patterns, own in self.searched:
            if (rule := patterns.first(module)) is not None:
                return Scheme(own, str(rule))
        if not self.groups:
            return Scheme(None, f"not in {self.complete[0]}") if self.complete else Scheme(self.settings)
        matches = [(rule.pattern != module, place) for place, group in enumerate(self._named)
                   if group.targets and (rule := group.targets.first(module)) is not None]
        group = self._named[min(matches)[1]] if matches else None           # a whole name before expressions
        if group is None and EMBEDDINGS.fullmatch(module.rpartition(".")[2]):        # files do not state classes
            group = next((group for group in self.groups if group.embeddings), None)
        group = group or next((group for group in reversed(self.groups) if group.targets is None), None)   # the last one counts
        return Scheme(group.settings, group.name) if group else Scheme(None, "in no group")

    def has_8_bit_inputs(self, module: str) -> bool:
        scheme, groups = self.scheme(module), self.settings.get("config_groups")
        group = groups.get(scheme.by) if isinstance(groups, Mapping) else None
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        return (isinstance(inputs, Mapping) and inputs.get("num_bits") == 8) or bool(
            scheme.settings is not None and scheme.settings.get("activation_scheme"))

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Entries of the lists of unquantized layers that name none of these modules in any dialect.

        Empty if that would take long to find out.
        """
        by_entry: dict[str, list[Rule]] = {}
        for entries in (*self.lists, *(patterns for patterns, own in self.dynamic if own is None)):
            for rule in entries.rules:
                by_entry.setdefault(rule.pattern, []).append(rule)
        budget, unmatched = Budget(len(names)), []
        try:
            with budget:
                for entry, rules in by_entry.items():
                    if entry not in names and not any(_names(rule, name, budget) for name in names for rule in rules):
                        unmatched.append(entry)
        except CheckpointError:                                  # a slow or invalid expression, which is a problem elsewhere
            return []
        return unmatched

    def maybe(self, module: str) -> Rule | None:
        """The rule by which some dialects, but not all, leave a module unquantized."""
        with self.budget:
            ignored = [rule for listed in self.lists if (rule := listed.first(module)) is not None]
        return ignored[0] if 0 < len(ignored) < len(self.lists) else None


def _names(rule: Rule, module: str, budget: Budget) -> bool:
    budget.charge(rule.cost(module))
    return rule.matches(module)


def quantizations(folder: Folder) -> list[Quantization]:
    """The quantization settings of a folder's files, one per place, in the order in which loaders read them.

    Raises CheckpointError for invalid settings.
    """
    quantized, budget = [], Budget(len(folder.names()))
    modules = {name.rpartition(".")[0] for name in folder.names()}
    for place, method in producers().places:
        data: Any = folder.json(place.file)
        for key in place.at:
            data = data.get(key) if isinstance(data, Mapping) else None
        if data and not isinstance(data, Mapping):
            where = f"{folder.root / place.file}: {'.'.join(place.at)}"
            raise CheckpointError(f"{where} is {shown(str(data))}, no object of settings")
        if data:
            quantized.append(quantization(data, " ".join([f"{place.file}:", *place.at]).rstrip(": "), method, budget, modules))
    listed_places = {place.at for place, _ in producers().places}
    nested = [quantization(data, " ".join([f"{CONFIG_FILE}:", *keys]), "", budget, modules)
              for keys, data in nested_settings(folder.config) if keys not in listed_places]
    for own in nested if quantized else ():                      # the others decide
        own.is_of_part = True
    return [*quantized, *nested, *(quantization(data, source, "", budget, modules) for source, data in header_settings(folder))]


def nested_settings(config: Mapping[str, Any], start: Keys = ()) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Settings in a config, and in the configs of models in the model, with the keys that lead to them."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from [((*start, key), value)] if key == METADATA else nested_settings(value, (*start, key))


def header_settings(folder: Folder) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Settings in the files' own metadata, with their place."""
    for file in folder.files():
        if METADATA in file.header.metadata:
            source = f"{file.path.name}: {METADATA}"
            data = strict_json(file.header.metadata[METADATA].encode(), source, depth=64, constants=True)
            if isinstance(data, Mapping) and data:
                yield source, data


def quantization(data: Mapping[str, Any], source: str, method: str, budget: Budget | None = None,
                 modules: Collection[str] = ()) -> Quantization:
    """The settings of one place, in the form common to all producers.  modules: of the checkpoint, where it is known.

    Raises CheckpointError for slow patterns.
    """
    budget = budget or Budget()
    with budget:
        return _quantization(data, source, method, budget, modules)


def _quantization(data: Mapping[str, Any], source: str, method: str, budget: Budget, modules: Collection[str]) -> Quantization:
    registry = producers()
    method = str(data.get("quant_method") or _known_method(data) or method or registry.unnamed(data)).lower()
    names, keys = registry.of(method).settings, registry.keys(method)
    settings = {names.get(key, key): value for key, value in _with_integers(data).items()}
    for how in keys.groups.values():
        settings = how.expand_presets(settings)
    settings["quant_method"] = registry.of(method).name
    read = Quantization(source, method, settings, findings=findings(method, source, settings), budget=budget)
    read.lists = [rules(dialect, settings[key], budget) for key, dialects in keys.skipped.items() if settings.get(key)
                  for dialect in dialects]
    read.groups = [group for how in keys.groups.values() for group in _groups(settings, how, keys, budget)]
    by_name, by_pattern = _layers(settings, keys, modules)
    read.layers = by_name
    read.searched = [(rules("search", pattern, budget), own) for pattern, own in by_pattern.items()]
    read.complete = [*(f"{key} (exact)" for key, how in keys.layers.items() if how.complete and key in settings),
                     *(f"{key} ({how.dialect})" for key, how in keys.patterns.items() if how.complete
                       and isinstance(settings.get(key), Mapping) and settings[key].keys() - {*how.whole})]
    read.dynamic = list(_dynamic(settings, keys, budget))
    for key, dialect in keys.only.items():
        if settings.get(key):
            names_inside = [name for part in _listed(settings[key]) for name in _listed(part)]
            read.only, read.only_key = rules(dialect, names_inside, budget), f"{key} ({dialect})"
    read_rules = [*read.lists, *(patterns for patterns, _ in (*read.dynamic, *read.searched)),
                  *(group.targets for group in read.groups if group.targets), *([read.only] if read.only else [])]
    every = [settings, *(group.settings for group in read.groups), *read.layers.values(),
             *(own for _, own in (*read.dynamic, *read.searched))]
    problems = [*_misplaced(settings, keys), *_unaccepted(registry.of(method), [own for own in every if own is not None]),
                *(problem for listed in read_rules for problem in listed.problems)]
    read.problems = list(dict.fromkeys(f"{source}: {problem}" for problem in problems))
    return read


def _known_method(data: Mapping[str, Any]) -> str:
    """The producer that settings name as gptqmodel does, in `method`; '' for words of other meanings."""
    name = str(data.get("method") or "").lower()
    return name if producers().is_known(name) else ""


def _with_integers(value: Any) -> Any:
    """A setting with integers for whole numbers that are texts or have a point, as after edits by hand; lists stay."""
    if isinstance(value, Mapping):
        return {key: _with_integers(own) for key, own in value.items()}
    is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, str) and INTEGER.fullmatch(value)
    return int(value) if is_whole else value


def _listed(value: Any) -> list[Any]:
    """A list, or a single value as a list."""
    return value if isinstance(value, list) else [value]


def _misplaced(settings: Mapping[str, Any], keys: ConfigKeys) -> Iterator[str]:
    """Problems with layers' settings that are not JSON objects."""
    for key in (*keys.groups, *keys.patterns, *(key for key in keys.layers if key != INLINE)):
        value = settings.get(key)
        if value and not isinstance(value, Mapping):
            yield f"{key} is {shown(str(value))}, no object"
        pattern = keys.patterns.get(key)
        for name, own in value.items() if isinstance(value, Mapping) else ():
            if not isinstance(own, Mapping) and not (pattern and (own is False or name.startswith(LEFT_ALONE)
                                                                  or name in pattern.whole or (own is None and pattern.under))):
                preset = f", and {shown(name)} is no preset's name" if isinstance(own, list) else ""
                yield f"{key}: {shown(name)} is {shown(str(own))}, no object of settings{preset}"


def _unaccepted(producer: Producer, every: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Problems with block lengths that the producer's own code rejects.  every: the settings of all layers and of some."""
    for key, values in producer.accepts.items():
        for value in [length for settings in every for length in _listed(at(settings, key)) if length is not None]:
            if type(value) is not int or value not in listed(values):
                text = shown(value) if isinstance(value, str) else str(value)[:60]
                yield f"{key} is {text}; {producer.name} writes {values_text(listed(values))}"


def _dynamic(settings: dict[str, Any], keys: ConfigKeys, budget: Budget) -> Iterator[tuple[Rules, Mapping[str, Any] | None]]:
    """Complete settings by pattern, None for layers that stay unquantized."""
    for key, how in keys.patterns.items():
        by_pattern = settings.get(key)
        for pattern, own in by_pattern.items() if isinstance(by_pattern, Mapping) else ():
            left = pattern.startswith(LEFT_ALONE) or own is False or (own is None and how.under != "")
            if how.under and pattern not in how.whole:
                yield rules(how.dialect, pattern, budget), None if left else ChainMap({how.under: own}, settings)
            if how.under:
                continue
            yield (rules(how.dialect, re.sub(r"\A[-+]:", "", pattern), budget),
                   None if left else ChainMap(dict(own) if isinstance(own, Mapping) else {}, settings))


def _groups(settings: Mapping[str, Any], how: GroupSettings, keys: ConfigKeys, budget: Budget) -> list[Group]:
    """Groups of layers with their own settings."""
    by_name = settings.get(how.key)
    whole = {key: value for key, value in settings.items() if key != how.key and key not in keys.layers}
    groups: list[Group] = []
    for name, group in by_name.items() if isinstance(by_name, Mapping) else ():
        weights, targets = (group.get("weights"), group.get("targets")) if isinstance(group, Mapping) else (None, None)
        if weights or targets:
            targets = _listed(targets or [])
            own = {key: group[key] for key in how.repeated if group.get(key)}
            every = how.every in targets or not targets
            named = None if every else rules(how.targets, targets, budget)
            groups.append(Group(name, named, ChainMap(own, dict(weights), whole) if isinstance(weights, Mapping) else None,
                                how.embeddings in targets))
    return groups


def _layers(settings: Mapping[str, Any], keys: ConfigKeys, modules: Collection[str]) -> tuple[Own, Own]:
    """Settings of single layers, by full names and by patterns; None for layers that stay unquantized.

    modules: of the checkpoint; other names are patterns, too, where patterns are searched for.
    """
    whole = {key: value for key, value in settings.items() if key not in keys.layers}
    layers: Own = {}
    patterns: Own = {}
    for key, how in keys.layers.items():
        by_name = settings if key == INLINE else settings.get(key)
        for name, own in by_name.items() if isinstance(by_name, Mapping) else ():
            if isinstance(own, Mapping):
                is_plain = any(own.get(setting) in values for setting, values in how.plain.items())
                base = {"quant_method": settings["quant_method"]} if how.alone else whole
                place = patterns if how.searched and (SPECIAL & {*name} or (modules and name not in modules)) else layers
                place[name] = None if is_plain else ChainMap(dict(own), base)
    return layers, patterns
