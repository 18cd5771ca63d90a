"""Writes a folder's quantization settings for another storage, by the rules of its producer.

If no producer describes the storage, the settings name format and storage in qdsl's own terms, and the config is guarded, so that
loaders without qdsl refuse it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from qdsl.checkpoint.detect.descriptions import description_of, descriptions
from qdsl.checkpoint.detect.guard import has_own_settings, with_guard, without_guard
from qdsl.checkpoint.detect.ignored import rules
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import LEFT_ALONE, header_settings, nested_settings, quantization
from qdsl.checkpoint.detect.rules import OWN, is_same
from qdsl.checkpoint.detect.transforms import OWN_TRANSFORMS
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import shown
from qdsl.checkpoint.report.verify_decoded import same_bits
from qdsl.core.producer import ABOUT_RULE, WORDS, Producer, Refusal, SettingsPlace
from qdsl.core.stored import INPUT_SCALE, Description
from qdsl.core.text import counted
from qdsl.core.transforms import Transform
from qdsl.jobs.convert.plain import SUFFIX, is_matrix
from qdsl.jobs.convert.plan_conversion import Plan
from qdsl.jobs.convert.target import Conversion
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.engine.heads import config_with_ties

CONFIG = "config.json"
INPUTS = "input_"                                                # prefix of scales of activations
MISTRAL = "params.json"                                          # the config of Mistral's own programs
PROGRAMS, PROGRAMS_OF_DIFFUSERS = ("transformers", "vLLM"), ("diffusers",)        # programs to report if they cannot read it
DIFFUSERS = "_class_name"
HEAD, EMBEDDING = "lm_head", "embed_tokens"


def readers(folder: Folder, plan: Plan, layers: Layers) -> tuple[str, dict[str, str]]:
    """The packages that read a folder in the new storage, qdsl first; and those that do not, with the reason."""
    of_diffusers = DIFFUSERS in folder.config
    programs = PROGRAMS_OF_DIFFUSERS if of_diffusers else PROGRAMS
    if "safetensors" in description_of(plan.format).detect and not plan.kept:
        return _complete(folder, list(programs), {})
    settings = _settings(folder, {}, "", plan, layers)[0]
    method = settings.get("quant_method", OWN)
    loading = producers().of(method).readers
    others = list(loading.diffusers if of_diffusers else loading.programs)
    shapes = [layer.shape for layer in (*plan.changed, *plan.kept)]
    why = dict.fromkeys(programs, "its own loaders know no settings of qdsl" if method == OWN else
                        f"its loaders know no quant_method {method}")
    for refusal in loading.refuses:
        removed = refusal.removes or (refusal.program,)
        wrong = _refused_setting(refusal, settings, shapes)
        if wrong and not {*removed}.isdisjoint(others):
            others = [program for program in others if program not in removed]
            why[refusal.program] = refusal.why or f"its loaders know no {method} with {wrong}"
    why |= {program: note for program, note in loading.notes.items() if program in why}
    return _complete(folder, others, why)


def _complete(folder: Folder, programs: Sequence[str], why: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The programs of which a folder has all that they need, as text, and why it is none of the others."""
    lacking = {program: lack for program in programs if (lack := _missing_need(folder, program))}
    named = ", ".join(program for program in programs if program not in lacking)
    return (", ".join(["qdsl", named]) if named else "qdsl alone",
            {program: reason for program, reason in {**why, **lacking}.items() if program not in named})


def _missing_need(folder: Folder, program: str) -> str:
    """What a program needs that a folder does not have; '' for nothing."""
    every = [needs for own in producers().every for name, needs in own.needs.items() if f"{program} ".startswith(f"{name} ")]
    for needs in every if DIFFUSERS not in folder.config else ():
        if absent := next((key for key in needs.config if not folder.config.get(key)), ""):
            return f"config.json does not say {absent}"
        if needs.files and not any((folder.root / file).exists() for file in needs.files):
            return f"the folder has no {needs.name}"
    return ""


def _refused_setting(refusal: Refusal, settings: Mapping[str, Any], shapes: Sequence[tuple[int, int]]) -> str:
    """The first setting that a program refuses, with its value; '' if some setting, or all shapes, are what it accepts.

    Settings of groups count like those of the whole checkpoint.  shapes: (N, K) of the weights.
    """
    groups = [group["weights"] for key in producers().keys(settings["quant_method"]).groups
              for group in _mappings(settings.get(key)) if isinstance(group.get("weights"), Mapping)]
    for whole in ([{**settings, **weights} for weights in groups] or [dict(settings)]):
        blocks = whole.get(refusal.uneven) or ()
        uneven = next((f"{refusal.uneven} {whole[refusal.uneven]} for {N} x {K}" for N, K in shapes for extent, block in
                       zip((N, K), blocks, strict=False) if extent > block > 0 and extent % block), "")
        if (not refusal.uneven or uneven) and all(any(is_same(whole.get(key), value) for value in values)
                                                  for key, values in refusal.when.items()):
            return uneven or next((f"{key} {whole.get(key)}" for key in refusal.when), "")
    return ""


def changed_configs(folder: Folder, plan: Plan, layers: Layers) -> tuple[dict[str, str | None], list[str]]:
    """The files that change with the storage, with new text or None for a file to remove; and notes."""
    if not plan.changed:
        return {}, []
    wholes: dict[str, dict[str, Any]] = {}
    touched: list[str] = []
    notes: list[str] = []
    nested = [(SettingsPlace(CONFIG, keys), "") for keys, _ in nested_settings(folder.config)]
    for place, producer in dict.fromkeys([*producers().places, *nested]):
        file, keys = place.file, place.at
        whole = wholes.setdefault(file, copy.deepcopy(folder.json(file)))
        container, settings = _settings_at(whole, keys)
        if container is None:
            continue
        touched.append(file)
        new, more = _settings(folder, settings, quantization(settings, file, producer).method, plan, layers)
        notes += more
        stays = bool(new) and (not producer or is_same(quantization(settings, file, producer).method, new["quant_method"]))
        if not keys:
            wholes[file] = new if stays else {}
        elif stays:
            container[keys[-1]] = new
        else:                                                    # an unused place of the producer's settings
            del container[keys[-1]]
            wholes[file] = whole if file == CONFIG else {}
    headers = [settings for _, settings in header_settings(folder)]
    has_settings = touched or headers or plan.aim.is_from_plain or (folder.root / CONFIG).exists()
    is_unplaced = all(_settings_at(wholes[CONFIG], place.at)[0] is None
                      for place, _ in producers().places if place.file == CONFIG)
    if has_settings and is_unplaced:
        old = headers[0] if headers else {}
        new, more = _settings(folder, old, quantization(old, CONFIG, "").method, plan, layers)
        notes += more
        wholes[CONFIG] |= {"quantization_config": new} if new else {}
        touched += [CONFIG] if new else []
    if wholes[CONFIG]:
        settings = wholes[CONFIG].get("quantization_config", {})
        for place in producers().of(settings.get("quant_method")).places:
            if place.repeat and place.file == CONFIG:
                wholes[CONFIG][place.at[0]] = {key: value for key, value in settings.items() if key != "quant_method"}
        is_ours = has_own_settings(wholes[CONFIG]) or bool(layers.groups)
        config = (with_guard if is_ours else without_guard)(wholes[CONFIG])
        weights = _weights(folder, layers)
        config = config_with_ties(config, weights, partial(_is_same, folder, weights, {layer.name for layer in plan.changed}))
        touched += [CONFIG] if config != wholes[CONFIG] else []
        wholes[CONFIG] = config
    texts = {file: json.dumps(wholes[file], indent=2, ensure_ascii=False) + "\n" if wholes[file] else None for file in touched}
    return texts, list(dict.fromkeys(notes))


def _weights(folder: Folder, layers: Layers) -> dict[str, dict[str, str]]:
    """The stored tensors of all weights by module: their names in files by their last parts."""
    packed = {layer.name: {leaf: full for leaf, full in {**layer.others, **layer.tensors}.items() if leaf != "bias"}
              for layer in layers.layers}
    plain = {full.removesuffix(".weight"): {"weight": full} for full in layers.plain
             if full.endswith(".weight") and full in folder}
    return {**plain, **packed}


def _is_same(folder: Folder, weights: Mapping[str, Mapping[str, str]], changed: Collection[str], one: str, other: str) -> bool:
    """Whether two modules keep the same stored tensors.  changed: names of layers that get another storage."""
    own, others = weights[one], weights[other]
    return (one in changed) == (other in changed) and own.keys() == others.keys() and all(
        folder.entry(own[leaf]).shape == folder.entry(others[leaf]).shape
        and same_bits(folder.tensor(own[leaf]), folder.tensor(others[leaf])) for leaf in own)


def _settings_at(whole: dict[str, Any], keys: tuple[str, ...]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The mapping that contains settings, and the settings; (None, {}) if there are none."""
    place: Any = whole
    for key in keys[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    settings = place.get(keys[-1]) if keys and isinstance(place, dict) else place
    return (place, settings) if isinstance(place, dict) and isinstance(settings, dict) and settings else (None, {})


def _settings(folder: Folder, old: Mapping[str, Any], method: str, plan: Plan, layers: Layers,
              ) -> tuple[dict[str, Any], list[str]]:
    """The settings for the new storage, empty for plain floats, and notes on them.

    What nobody understands is kept, so that no reader takes the new folder for one without it.
    """
    refused = {own.key for own in layers.findings if own.is_refused}
    claims = [own for own in (quantization(old, "", method).findings if old else ()) if not own.is_refused or own.key in refused]
    is_plain = "safetensors" in description_of(plan.format).detect
    new, note = ({}, "") if is_plain else _settings_and_note(folder, old, method, plan, layers)
    absent = [own.key for own in claims if own.is_refused and own.key in old.keys() - new]
    kept = {} if is_plain else {key: old[key] for key in absent}
    after = {own.key.rpartition(".")[2] for own in quantization(new | kept, "", "").findings} if new else set()
    before = dict.fromkeys(own.key.rpartition(".")[2] for own in claims)
    return new | kept, [*([note] if note else []),
                        *(f"the settings keep {key}, which their readers may not know" for key in kept),
                        *(f"the settings do not say {name} any more" for name in before if name not in after)]


def stale_notes(folder: Folder, plan: Plan) -> list[str]:
    """Notes on files and tensors that describe the old weights."""
    scales = [full for layer in plan.changed for leaf, full in layer.others.items() if leaf.startswith(INPUTS)]
    were = "copied" if any(scales[0] in shard.tensors for shard in plan.shards if scales) else "left out"
    old_quantization = folder.json(MISTRAL).get("quantization") if plan.changed else None
    return [*([f"{counted(len(scales), 'tensor')} such as {scales[0]} scale inputs of the old weights, and were {were}"]
              if scales else []),
            *([f"{MISTRAL} says quantization of the old weights, and was copied"] if old_quantization else [])]


def _settings_and_note(folder: Folder, old: Mapping[str, Any], method: str, plan: Plan,
                       layers: Layers) -> tuple[dict[str, Any], str]:
    """The settings for the new storage, and a note, or ''."""
    rules = _rules(folder, plan, method)
    own = [rule for rule in rules if _is_own(rule, method, plan)]
    first, *others = plan.params
    rule = next(iter(own or (rules if all(params == first for params in others) else [])), None)
    if rule is None:
        alike = len({*plan.storages}) == 1
        why = f"layers differ in {'parameters' if alike else 'format'}" if rules or not alike else \
            f"qdsl knows no other loader of {plan.format}.{plan.aim.storage}"
        return _qdsl_settings(folder, plan, layers), f"{why}: the config says qdsl"
    transforms, producer = _transforms(plan, layers), _written_as(folder, rule["quant_method"])
    if _is_own(rule, method, plan):
        return _adapted_settings(old, rule, first), ""
    kept = {key: old[key] for key in _scheme_keys(producer) if is_same(method, rule["quant_method"]) and old.get(key)}
    unstated = [] if kept else [name for name, own in transforms.items() if not all(map(producer.states, own))]
    if unstated:                                                 # a loader that does not know them would ignore them
        label = transforms[unstated[0]][0].label
        return _qdsl_settings(folder, plan, layers), (
            f"layers transform x, as {shown(unstated[0])} ({label}) and {len(unstated) - 1} more, which loaders of "
            f"{rule['quant_method']} do not: the config says qdsl")
    plain, wrong = unquantized_modules(folder, layers, rule["quant_method"])
    note = f"{producer.skip_list} of the config cannot name {', '.join(wrong)} to all readers" if wrong else ""
    return _new_settings(dict(_rule_settings(rule, first)), producer, plain) | kept, note


def _transforms(plan: Plan, layers: Layers) -> dict[str, tuple[Transform, ...]]:
    """The transforms of packed and of plain layers, by name."""
    packed = {layer.name: layer.transforms for layer in (*plan.changed, *plan.kept) if layer.transforms}
    return {**layers.transforms, **packed}


def _scheme_keys(producer: Producer) -> list[str]:
    """The settings in which a producer states transforms by schemes."""
    return [] if producer.schemes is None else [producer.schemes.key]


def _written_as(folder: Folder, method: str) -> Producer:
    """The producer of a quant_method, as it describes a model of the folder's kind."""
    producer = producers().of(method)
    return producer.of_diffusers if DIFFUSERS in folder.config else producer


def _qdsl_settings(folder: Folder, plan: Plan, layers: Layers) -> dict[str, Any]:
    """qdsl's own settings: common ones, unquantized modules, and per-layer settings if layers differ."""
    names = [layer.name for layer in (*plan.changed, *plan.kept)]
    settings = {name: {"format": format, "storage": storage, **params}
                for name, (format, storage), params in zip(names, plan.storages, plan.params, strict=True)}
    transforms = {name: [own.data() for own in every] for name, every in _transforms(plan, layers).items()}
    return own_settings(settings, unquantized_modules(folder, layers, OWN)[0], transforms)


def own_settings(layers: Mapping[str, Mapping[str, Any]], plain: Sequence[str],
                 transforms: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> dict[str, Any]:
    """The `quantization_config` of weights that only qdsl reads.

    layers: format, storage and every parameter of each packed layer, by name.  plain: modules that are not packed.
    transforms: of the inputs and outputs of layers, by name.
    """
    first, own = next(iter(layers.values())), {OWN_TRANSFORMS: {**transforms}} if transforms else {}
    if any(layer != first for layer in layers.values()):
        return {"quant_method": OWN, "quantized_layers": {name: dict(layer) for name, layer in layers.items()}, **own}
    return {"quant_method": OWN, **first, **({producers().of(OWN).skip_list: list(plain)} if plain else {}), **own}


def _rules(folder: Folder, plan: Plan, method: str) -> list[dict[str, Any]]:
    """The rules for the storage that match the first layer's parameters; none if there are several formats or storages."""
    if len({*plan.storages}) > 1:
        return []
    format, params = description_of(plan.format), plan.params[0]
    rules: list[dict[str, Any]] = format.detect.get("config", [])
    only = len(format.storages) == 1                             # then no rule has to name it
    fit = [rule for rule in rules if rule.get("storage", plan.aim.storage if only else "") == plan.aim.storage
           and rule.get("where", {}).items() <= params.items()
           and is_same(plan.aim.producer or rule["quant_method"], rule["quant_method"])
           and (_is_own(rule, method, plan) or not _is_only_read(rule))]
    return [full for rule in sorted(fit, key=lambda rule: not _says_blocks(rule, format.sizes, params))
            if (full := _completed_rule(rule, format, folder, plan, _is_own(rule, method, plan))) is not None]


def _is_only_read(rule: Mapping[str, Any]) -> bool:
    """Whether settings are nested, or a producer says all of each layer apart."""
    layers = producers().keys(rule["quant_method"]).layers.values()
    says_nothing = "with" not in rule and not rule.keys() - {*ABOUT_RULE, "quant_method"}
    return any("." in key for key in rule) or (says_nothing and any(settings.complete for settings in layers))


def check_settings(aim: Conversion) -> None:
    """Raises RewriteError for a producer whose settings never describe the target, whatever the layers are."""
    formats = [own for own in descriptions() if aim.format in ("", own.name) and aim.storage in own.storages]
    rules = [rule for own in formats for rule in own.detect.get("config", [])
             if rule.get("storage", aim.storage if len(own.storages) == 1 else "") == aim.storage]
    if aim.producer and formats and not any(is_same(aim.producer, rule["quant_method"]) for rule in rules):
        others = dict.fromkeys(rule["quant_method"] for rule in rules if not _is_only_read(rule))
        raise RewriteError(f"no settings of {shown(aim.producer)} describe layers in {aim.label}; those of "
                           f"{', '.join(others) or 'qdsl'} do")


def check_producer(folder: Folder, plan: Plan) -> None:
    """Raises RewriteError if no settings of the chosen producer describe all converted layers."""
    producer, wanted = plan.aim.producer, plan.aim.label
    is_one_kind = all(params == plan.params[0] for params in plan.params)
    if not producer or not plan.changed or (is_one_kind and _rules(folder, plan, "")):
        return
    any_producer = replace(plan, aim=replace(plan.aim, producer=""))
    others = dict.fromkeys(rule["quant_method"] for rule in _rules(folder, any_producer, ""))
    partly = f", some of which have {INPUT_SCALE} and some not" if len(_stored(plan, INPUT_SCALE)) > 1 else ""
    raise RewriteError(f"{folder.path}: no settings of {shown(producer)} describe its layers in {wanted}{partly}; "
                       f"those of {', '.join(others) or 'qdsl'} do")


def _says_blocks(rule: Mapping[str, Any], sizes: Iterable[str], params: Mapping[str, int | str]) -> bool:
    """Whether a rule states the extents of blocks, and none of them is a whole axis."""
    named = [word for key, wanted in rule.items() if key not in (*ABOUT_RULE, *WORDS)
             for word in (wanted if isinstance(wanted, list) else [wanted])]
    return all((params[size] == -1) != (size in named) for size in sizes)


def _is_own(rule: Mapping[str, Any], method: str, plan: Plan) -> bool:
    """Whether a rule is of the checkpoint's own producer, so that other settings of it stay."""
    return is_same(method, rule["quant_method"]) and not plan.aim.requantize


def _completed_rule(rule: Mapping[str, Any], format: Description, folder: Folder, plan: Plan, own: bool) -> dict[str, Any] | None:
    """A rule completed with the settings that follow from tensors and fields; None if layers differ in a tensor.

    own: such settings stay unchanged.  But readers of some producers require exactly the tensors that settings mention: a setting
    that is wrong for all layers is corrected.
    """
    full = dict(rule)
    follows = producers().of(rule["quant_method"]).follows_tensors
    for key, wanted in rule.items():
        if isinstance(wanted, dict) and key not in ABOUT_RULE:
            [(name, words)] = wanted.items()
            if own and not follows:
                del full[key]
                continue
            stored = {_is_stored(folder, plan, format, name)} if name in format.spared else _stored(plan, name)
            if len(stored) > 1 and not own:
                return None
            right, wrong = words if True in stored else words[::-1]
            full[key] = right if not own else {wrong: right} if len(stored) == 1 else {}
    return full


def _stored(plan: Plan, tensor: str) -> set[bool]:
    """Whether layers have a tensor: one of their storage, or the scale of x, which is copied; both if they differ."""
    if tensor == INPUT_SCALE:
        return {tensor in layer.others for layer in (*plan.changed, *plan.kept)}
    return {tensor in names for names in plan.tensors}


def _is_stored(folder: Folder, plan: Plan, format: Description, field: str) -> bool:
    """Whether some layer has, or may have, values of a field that differ from its default."""
    from qdsl.checkpoint.detect.layer_weights import unread
    from qdsl.runtime.weight.convert import default_fields

    if plan.aim.requantize:                                      # quantizers leave columns in order
        return field not in format.indices and str(plan.aim.options.get("symmetric")) != "True"
    return any(not default_fields(weight.format.checked(weight), [field])
               for layer in (*plan.changed, *plan.kept) for weight in unread(folder, layer))


def _rule_settings(rule: Mapping[str, Any], params: Mapping[str, int | str]) -> Iterator[tuple[str, Any]]:
    """Settings that make a rule match: its words (the first alternative), values of parameters, and those that are added."""
    instead = _added_settings(rule)
    for key, wanted in rule.items():
        words = wanted if isinstance(wanted, list) else [wanted]
        if key in ABOUT_RULE or key in instead or words == ["null"]:
            continue
        if all(word in params for word in words) and key not in WORDS:
            yield key, [params[word] for word in words] if isinstance(wanted, list) else params[wanted]
        else:
            yield key, words[0]
    yield from ((key, word) for key, word in instead.items() if word != "null")


def _added_settings(rule: Mapping[str, Any]) -> dict[str, Any]:
    """What is written besides a rule's words, or in their place: the first alternative of what is fixed, and `with`."""
    fixed = {key: word[0] if isinstance(word, list) else word for key, word in rule.get("fixed", {}).items()}
    return {**fixed, **rule.get("with", {})}


def _adapted_settings(old: Mapping[str, Any], rule: Mapping[str, Any], params: Mapping[str, int | str]) -> dict[str, Any]:
    """A producer's settings adapted to another of its rules; parameters have the same values in every storage."""
    own = producers().of(rule["quant_method"])
    new = copy.deepcopy({**old} if own.groups is None else own.groups.expand_presets(old))
    if own.shorter is not None:                                  # new words have 32 bits
        new.pop(own.shorter.setting, None)
    names = {name: own.settings.get(name, name) for name in new}
    groups = [] if own.groups is None else \
        [group for group in _mappings(new.get(own.groups.key)) if isinstance(group.get("weights"), dict)]
    for key, wanted in rule.items():
        words = wanted if isinstance(wanted, list) else [*wanted.values()] if isinstance(wanted, dict) else [wanted]
        if key in (*ABOUT_RULE, *WORDS, *_added_settings(rule)) or all(word in params for word in words):
            continue
        if own.groups is not None and key in own.groups.weights:
            places = [(group["weights"], [key]) for group in groups]
        else:
            if not any(is_same(new.get(key), word) for word in words):
                for group in groups:                             # readers guess for a group without the setting
                    group |= {key: new.get(key)} if group.get(key) is None else {}
            places = [(group, [key]) for group in groups if key in group]
            places += [(new, [name for name in names if names[name] == key] or [key])]
        for place, called in places:
            if not isinstance(wanted, dict) or any(is_same(place.get(name), wrong) for name in called for wrong in wanted):
                _set_words(place, called, words)
    return new


def _mappings(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value.values() if isinstance(entry, dict)] if isinstance(value, dict) else []


def _set_words(settings: dict[str, Any], names: Iterable[str], words: list[Any]) -> None:
    """Set these names to one of a rule's alternatives, the first if none is set yet."""
    for name in names:
        if any(is_same(settings.get(name), word) for word in words):
            continue
        if words[0] == "null":
            del settings[name]
        else:
            settings[name] = words[0]


def _new_settings(flat: dict[str, Any], own: Producer, plain: list[str]) -> dict[str, Any]:
    """New settings of a producer that the checkpoint did not have.  plain: the unquantized modules."""
    if own.skipped_patterns:
        inside = [name for name in plain if not name.endswith(own.plain_by_default)] if own.plain_by_default else plain
        patterns: dict[str, Any] = {f"{LEFT_ALONE}^{re.escape(name)}$": {} for name in inside}
        return {**flat, **own.written, **({own.skipped_patterns: patterns} if inside else {})}
    skipped = dict.fromkeys((own.skip_list, *own.copied_skips), plain) if own.skip_list and (plain or own.groups) else {}
    if own.groups is None:
        return {**flat, **own.written, **skipped}
    weights = {key: flat.pop(key) for key in own.groups.weights if key in flat}
    group = {"targets": [own.groups.every], "weights": weights,
             **{key: flat.pop(key, default) for key, default in own.groups.defaults.items()},
             **{key: flat[key] for key in own.groups.repeated if key in flat}}
    return {**flat, **own.written, own.groups.key: {own.groups.name: group}, **skipped}


def unquantized_modules(folder: Folder, layers: Layers, method: str) -> tuple[list[str], list[str]]:
    """The producer's list of modules with a plain matrix, and the modules that it cannot name for all readers."""
    plain = [name.removesuffix(SUFFIX) if len(folder.entry(name).shape) == 2 else name.rpartition(".")[0]
             for name in layers.plain if is_matrix(name, folder.entry(name))]
    if any(name.endswith(EMBEDDING) for name in plain) and not any(name.endswith(HEAD) for name in plain):
        plain.append(HEAD)                                       # a head that shares the embedding's weight
    plain = list(dict.fromkeys(plain))
    own = _written_as(folder, method)
    if not own.skip_list:
        return plain, []
    read = own.skipped[own.skip_list]
    others = [layer.name for layer in layers.layers]
    text = "\n".join(others)
    words = {name: _naming(name, read, others if _may_name(name, text) else []) for name in plain}
    return [word for word, _ in words.values() if word], [name for name, (_, every) in words.items() if not every]


def _may_name(module: str, text: str) -> bool:
    """Whether a text may contain a module's name, plain or as a regular expression; rarely true for thousands of names."""
    is_plain = re.fullmatch(r"[\w.-]+", module) is not None      # other names may be slow expressions
    return not is_plain or re.search(module, text) is not None


def _naming(module: str, read: Sequence[str], others: Sequence[str]) -> tuple[str, bool]:
    """A list entry that names a module to some reader and no other module to any, or ''; and whether it does so for all readers.

    transformers matches endings: 'head' also names 'lm_head', but 'head$' does not; for other readers 'head$' is not a name.
    """
    for word in (module, f"{re.escape(module)}$"):
        readings = [rules(dialect, word) for dialect in read]
        named = [rule.first(module) is not None for rule in readings]
        if any(named) and not any(rule.first(other) for rule in readings for other in others):
            return word, all(named)
    return "", False
