"""What a folder's files say of its quantization, in another storage: by the rules that the format's page lists under `detect`.

Where no page says how, the settings name the format and the storage as qdsl does, which no other loader takes for its own; the
config is then guarded, so that loaders without qdsl refuse it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.detect.guard import guarded, has_own_settings, unguarded
from qdsl.checkpoint.detect.ignored import rules
from qdsl.checkpoint.detect.layers import Layers
from qdsl.checkpoint.detect.quantization import MLX, NAMES, PLACES, dialects, in_headers, quantization
from qdsl.checkpoint.detect.rules import OWN, SPOKEN, same
from qdsl.checkpoint.files.folder import Folder
from qdsl.core.stored import OF_X, Description
from qdsl.jobs.convert.aim import PACKED, description
from qdsl.jobs.convert.plain import SUFFIX, is_matrix
from qdsl.jobs.convert.plan import Plan

CONFIG = "config.json"
NESTED = "compressed-tensors"                                    # whose settings of weights lie in groups
# What compressed-tensors says of weights, and not of the whole.
OF_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder", "dynamic",
              "scale_dtype")
NOT_OF_WEIGHTS = ("kv_cache_scheme", "kv_cache_quant_algo", "input_activations", "output_activations", "sparsity_config")
INPUTS = "input_"                                                # how scales of activations begin, beside weights
MISTRAL = "params.json"                                          # the config of files that Mistral's own programs read
GPTQ = "gptq"                                                    # which names layers that are left in a map of patterns
OF_INPUTS = "input_activations"
WORDS = ("strategy",)                                            # never a parameter's value, though one is called 'group'
IGNORED = {"awq": "modules_to_not_convert", "fp8": "modules_to_not_convert", NESTED: "ignore", "modelopt": "exclude_modules",
           "bitsandbytes": "llm_int8_skip_modules", "torchao": "modules_to_not_convert", "mxfp4": "modules_to_not_convert",
           "bitnet": "modules_to_not_convert", "hqq": "skip_modules", "blockwise_int8": "ignored_layers",
           "eetq": "modules_to_not_convert",
           OWN: "modules_to_not_convert"}

# Which packages load a producer's settings; those of models with diffusers' own key know fewer.
READERS = {"fp8": "transformers, vLLM", NESTED: "compressed-tensors, transformers with it, vLLM", "gptq": "gptqmodel, vLLM",
           "awq": "gptqmodel, vLLM", "modelopt": "vLLM, TensorRT-LLM", "bitsandbytes": "transformers with bitsandbytes",
           "torchao": "transformers with torchao, vLLM", "mxfp4": "transformers, vLLM", "bitnet": "transformers",
           MLX: "mlx-lm", "eetq": "transformers with EETQ's kernels"}
OF_DIFFUSERS = {"bitsandbytes": "diffusers with bitsandbytes", "torchao": "diffusers with torchao"}
PROGRAMS, PROGRAMS_OF_DIFFUSERS = ("transformers", "vLLM"), ("diffusers",)        # of which it is said that they do not read it
# Settings of producers whose other settings vLLM 0.32 loads; tests/data/compatibility.yaml has its errors.
NOT_OF_VLLM: dict[str, tuple[object, ...]] = {"bits": (2, 3, 5, 6, 7), "quant_algo": ("MXFP4",), "version": ("gemv", "gemv_fast"),
                                              "format": ("mxfp6-pack-quantized",)}
DIFFUSERS = "_class_name"
HEAD, EMBEDDING = "lm_head", "embed_tokens"


def readers(folder: Folder, plan: Plan, layers: Layers) -> tuple[str, dict[str, str]]:
    """The packages that read a folder in the new storage, qdsl first; and those that do not, with the reason."""
    of_diffusers = DIFFUSERS in folder.config
    programs = PROGRAMS_OF_DIFFUSERS if of_diffusers else PROGRAMS
    if "safetensors" in description(plan.format).detect and not plan.kept:
        return ", ".join(["qdsl", *programs]), {}
    settings = _settings(folder, {}, "", plan, layers)[0]
    method = settings.get("quant_method", OWN)
    others = (OF_DIFFUSERS if of_diffusers else READERS).get(method, "")
    why = dict.fromkeys(programs, "its own loaders know no settings of qdsl" if method == OWN else
                        f"its loaders know no quant_method {method}")
    groups = settings.get("config_groups", {}).values()
    if settings.get("sym") is False:
        others = others.removesuffix(", vLLM")
        why["vLLM"] = "it takes GPTQ's symmetric codes alone; --param symmetric=true writes those"
    wrong = [f"{name} {settings[name]}" for name, values in NOT_OF_VLLM.items() if settings.get(name) in values]
    if wrong and "vLLM" in others:
        others = others.replace(", vLLM", "").removeprefix("vLLM, ")
        why["vLLM"] = f"its loaders know no {method} with {wrong[0]}"
    if settings.get("format") == PACKED and any(group["weights"].get("symmetric") is False for group in groups):
        others = "vLLM"
        why["transformers"] = "compressed-tensors 0.20 expects unpacked zero points; --param symmetric=true writes none"
    if "gptqmodel" in others:
        why["transformers"] = "it asks gptqmodel to, where that is installed"
    reads = ", ".join(["qdsl", *([others] if others else [])]) if others else "qdsl alone"
    return reads, {program: reason for program, reason in why.items() if program not in others}


def rewritten(folder: Folder, plan: Plan, layers: Layers) -> tuple[dict[str, str | None], list[str]]:
    """The files that say something else in the new storage, None for one that has nothing to say any more; and notes."""
    if not plan.changed:
        return {}, []
    wholes: dict[str, dict[str, Any]] = {}
    touched: list[str] = []
    notes: list[str] = []
    for file, keys, producer in PLACES:
        whole = wholes.setdefault(file, copy.deepcopy(folder.json(file)))
        place, settings = _at(whole, keys)
        if place is None:
            continue
        touched.append(file)
        new, more = _settings(folder, settings, quantization(settings, file, producer).method, plan, layers)
        notes += more
        stays = bool(new) and (not producer or same(quantization(settings, file, producer).method, new["quant_method"]))
        if not keys:
            wholes[file] = new if stays else {}
        elif stays:
            place[keys[-1]] = new
        else:                                                    # a place of a producer that has nothing to say any more
            del place[keys[-1]]
            wholes[file] = whole if file == CONFIG else {}
    headers = [settings for _, settings in in_headers(folder)]
    there = touched or headers or plan.aim.is_from_plain or (folder.root / CONFIG).exists()
    if there and all(_at(wholes[CONFIG], keys)[0] is None for file, keys, _ in PLACES if file == CONFIG):
        old = headers[0] if headers else {}
        new, more = _settings(folder, old, quantization(old, CONFIG, "").method, plan, layers)
        notes += more
        wholes[CONFIG] |= {"quantization_config": new} if new else {}
        touched += [CONFIG] if new else []
    if wholes[CONFIG]:
        settings = wholes[CONFIG].get("quantization_config", {})
        if settings.get("quant_method") == MLX:                  # it reads them under another key, and transformers refuse these
            wholes[CONFIG]["quantization"] = {key: value for key, value in settings.items() if key != "quant_method"}
        is_ours = has_own_settings(wholes[CONFIG]) or bool(layers.groups)
        config = (guarded if is_ours else unguarded)(wholes[CONFIG])
        touched += [CONFIG] if config != wholes[CONFIG] else []
        wholes[CONFIG] = config
    return {file: _text(wholes[file]) if wholes[file] else None for file in touched}, list(dict.fromkeys(notes))


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _at(whole: dict[str, Any], keys: tuple[str, ...]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The mapping that holds settings, and they; None where there are none."""
    place: Any = whole
    for key in keys[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    settings = place.get(keys[-1]) if keys and isinstance(place, dict) else place
    return (place, settings) if isinstance(place, dict) and isinstance(settings, dict) and settings else (None, {})


def _settings(folder: Folder, old: Mapping[str, Any], method: str, plan: Plan, layers: Layers,
              ) -> tuple[dict[str, Any], list[str]]:
    """The settings of the new storage, none for plain floats, and what to note of them."""
    if "safetensors" in description(plan.format).detect:
        return {}, []
    new, note = _renewed(folder, old, method, plan, layers)
    lost = [name for name in _not_of_weights(old) if name not in _not_of_weights(new)]
    lost += ["version"] if method == NESTED and old.get("version") and not new.get("version") else []
    return new, [*([note] if note else []), *(f"the settings do not say {name} any more" for name in lost)]


def _not_of_weights(settings: Mapping[str, Any]) -> list[str]:
    """What settings say of others than weights."""
    every = [settings, *_mappings(settings.get("config_groups"))]
    return [name for name in NOT_OF_WEIGHTS if any(each.get(name) for each in every)]


def stale(folder: Folder, plan: Plan) -> list[str]:
    """Notes of what was copied and speaks of the weights as they were."""
    scales = [full for layer in plan.changed for leaf, full in layer.others.items() if leaf.startswith(INPUTS)]
    said = folder.json(MISTRAL).get("quantization") if plan.changed else None
    return [*([f"{len(scales)} tensors such as {scales[0]} scale inputs of the old weights, and were copied"]
              if scales else []),
            *([f"{MISTRAL} says quantization of the old weights, and was copied"] if said else [])]


def _renewed(folder: Folder, old: Mapping[str, Any], method: str, plan: Plan, layers: Layers) -> tuple[dict[str, Any], str]:
    """The settings of the new storage, and a note, or ''."""
    rules = _rules(folder, plan, method)
    own = [rule for rule in rules if _is_own(rule, method, plan)]
    first, *others = plan.params
    rule = next(iter(own or (rules if all(params == first for params in others) else [])), None)
    if rule is None:
        alike = len({*plan.storages}) == 1
        why = f"layers differ in {'parameters' if alike else 'format'}" if rules or not alike else \
            f"no page says how other loaders call {plan.format}.{plan.aim.storage}"
        return _ours(folder, plan, layers), f"{why}: the config says qdsl"
    scaled = [f"{layer.name}.{name}" for layer in plan.changed for name in OF_X if name in layer.others]
    if scaled and not same(method, rule["quant_method"]):        # a loader that does not know it would leave it out
        return _ours(folder, plan, layers), (
            f"x is to be multiplied by {scaled[0]}, and so of {len(scaled)} layers, which loaders of {rule['quant_method']} "
            "do not: the config says qdsl")
    if _is_own(rule, method, plan):
        return _changed(old, rule, first), ""
    plain, wrong = ignored(folder, layers, rule["quant_method"])
    note = f"{IGNORED[rule['quant_method']]} of the config cannot name {', '.join(wrong)} to all readers" if wrong else ""
    return _made(dict(_given(rule, first)), plain), note


def _ours(folder: Folder, plan: Plan, layers: Layers) -> dict[str, Any]:
    """The settings as we call them: of the whole, and what is not quantized, or where layers differ of each."""
    names = [layer.name for layer in (*plan.changed, *plan.kept)]
    settings = {name: {"format": format, "storage": storage, **params}
                for name, (format, storage), params in zip(names, plan.storages, plan.params, strict=True)}
    return own_settings(settings, ignored(folder, layers, OWN)[0])


def own_settings(layers: Mapping[str, Mapping[str, Any]], plain: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of weights that only qdsl reads.

    layers: format, storage and every parameter of each packed layer, by name.  plain: modules that are not packed.
    """
    first = next(iter(layers.values()))
    if any(layer != first for layer in layers.values()):
        return {"quant_method": OWN, "quantized_layers": {name: dict(layer) for name, layer in layers.items()}}
    return {"quant_method": OWN, **first, **({IGNORED[OWN]: list(plain)} if plain else {})}


def _rules(folder: Folder, plan: Plan, method: str) -> list[dict[str, Any]]:
    """The rules for the storage that say the parameters of the first layer; none where formats or storages are several."""
    if len({*plan.storages}) > 1:
        return []
    format, params = description(plan.format), plan.params[0]
    rules: Any = format.detect.get("config", [])
    only = len({name for storages in format.variants.values() for name in storages}) == 1    # then no rule has to name it
    fit = [rule for rule in (rules if isinstance(rules, list) else [rules])
           if rule.get("storage", plan.aim.storage if only else "") == plan.aim.storage and "quant_method" in rule
           and rule.get("where", {}).items() <= params.items()
           and (_is_own(rule, method, plan) or not any("." in key for key in rule))]     # settings in settings are read alone
    return [found for rule in sorted(fit, key=lambda rule: not _says_blocks(rule, format.sizes, params))
            if (found := _followed(rule, format, folder, plan, _is_own(rule, method, plan))) is not None]


def _says_blocks(rule: Mapping[str, Any], sizes: Iterable[str], params: Mapping[str, int | str]) -> bool:
    """Whether it gives the extents of blocks, and none of those that are whole axes."""
    named = [word for key, wanted in rule.items() if key not in (*SPOKEN, *WORDS)
             for word in (wanted if isinstance(wanted, list) else [wanted])]
    return all((params[size] == -1) != (size in named) for size in sizes)


def _is_own(rule: Mapping[str, Any], method: str, plan: Plan) -> bool:
    """Whether it is of the producer whose settings the checkpoint has, which stay but for the words of the storage."""
    return same(method, rule["quant_method"]) and not plan.aim.requantize


def _followed(rule: Mapping[str, Any], format: Description, folder: Folder, plan: Plan, own: bool) -> dict[str, Any] | None:
    """A rule with the words that follow from tensors and fields; None where layers differ in a tensor.

    own: those stay what the settings say; but readers of compressed-tensors want just the tensors that its settings speak of, and
    a word that is wrong of all layers has the right one beside it.
    """
    found = dict(rule)
    for key, wanted in rule.items():
        if isinstance(wanted, dict) and key not in SPOKEN:
            [(name, words)] = wanted.items()
            if own and rule["quant_method"] != NESTED:
                del found[key]
                continue
            there = {_is_told(folder, plan, format, name)} if name in format.spared else {name in names for names in plan.tensors}
            if len(there) > 1 and not own:
                return None
            right, wrong = words if True in there else words[::-1]
            found[key] = right if not own else {wrong: right} if len(there) == 1 else {}
    return found


def _is_told(folder: Folder, plan: Plan, format: Description, field: str) -> bool:
    """Whether some layer has other values of a field than a missing tensor means, or may have them."""
    from qdsl.checkpoint.detect.layer_weights import unread
    from qdsl.runtime.weight.convert import usual

    if plan.aim.requantize:                                      # quantizers leave columns in order
        return field not in format.indices and str(plan.aim.options.get("symmetric")) != "True"
    return any(not usual(weight.format.checked(weight), [field])
               for layer in (*plan.changed, *plan.kept) for weight in unread(folder, layer))


def _given(rule: Mapping[str, Any], params: Mapping[str, int | str]) -> Iterator[tuple[str, Any]]:
    """Settings that make a rule hold: its words, the first of several, and values of parameters; and what `with` says instead."""
    instead = rule.get("with", {})
    for key, wanted in rule.items():
        words = wanted if isinstance(wanted, list) else [wanted]
        if key in SPOKEN or key in instead or words == ["null"]:
            continue
        if all(word in params for word in words) and key not in WORDS:
            yield key, [params[word] for word in words] if isinstance(wanted, list) else params[wanted]
        else:
            yield key, words[0]
    yield from ((key, word) for key, word in instead.items() if word != "null")


def _changed(old: Mapping[str, Any], rule: Mapping[str, Any], params: Mapping[str, int | str]) -> dict[str, Any]:
    """A producer's settings with the words of another rule of its own; parameters are in every storage what they were."""
    new = copy.deepcopy(dict(old))
    method = rule["quant_method"]
    names = {name: NAMES.get(method, {}).get(name, name) for name in new}
    nested = method == NESTED
    groups = [each for each in _mappings(new.get("config_groups")) if isinstance(each.get("weights"), dict)] if nested else []
    for key, wanted in rule.items():
        words = wanted if isinstance(wanted, list) else [*wanted.values()] if isinstance(wanted, dict) else [wanted]
        if key in (*SPOKEN, *WORDS, *rule.get("with", {})) or all(word in params for word in words):
            continue
        if nested and key in OF_WEIGHTS:
            places = [(group["weights"], [key]) for group in groups]
        else:
            if not any(same(new.get(key), word) for word in words):
                for group in groups:                             # of one that says nothing readers guess
                    group |= {key: new.get(key)} if group.get(key) is None else {}
            places = [(group, [key]) for group in groups if key in group]
            places += [(new, [name for name in names if names[name] == key] or [key])]
        for place, called in places:
            if not isinstance(wanted, dict) or any(same(place.get(name), wrong) for name in called for wrong in wanted):
                _say(place, called, words)
    return new


def _mappings(value: object) -> list[dict[str, Any]]:
    """Those in a mapping; none where it is none."""
    return [each for each in value.values() if isinstance(each, dict)] if isinstance(value, dict) else []


def _say(settings: dict[str, Any], names: Iterable[str], words: list[Any]) -> None:
    """Have settings say one of a rule's words under these names, if need be the first."""
    for name in names:
        if any(same(settings.get(name), word) for word in words):
            continue
        if words[0] == "null":
            del settings[name]
        else:
            settings[name] = words[0]


def _made(flat: dict[str, Any], plain: list[str]) -> dict[str, Any]:
    """Settings of a producer that the checkpoint had not.  plain: the modules that are not quantized."""
    method = flat["quant_method"]
    if method == NESTED:
        weights = {key: flat.pop(key) for key in OF_WEIGHTS if key in flat}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": flat.pop(OF_INPUTS, None),
                 "output_activations": None,
                 **({"format": flat["format"]} if "format" in flat else {})}
        return {**flat, "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": plain}
    if method == GPTQ:                                           # which quantizes no head and no embedding by default
        inside = [name for name in plain if not name.endswith((HEAD, EMBEDDING))]
        return {**flat, **({"dynamic": {f"-:^{re.escape(name)}$": {} for name in inside}} if inside else {})}
    return {**flat, **({IGNORED[method]: plain} if method in IGNORED and plain else {})}


def ignored(folder: Folder, layers: Layers, method: str) -> tuple[list[str], list[str]]:
    """What the producer's list says of modules with a plain matrix, and those of them that it cannot name to all readers."""
    plain = [name.removesuffix(SUFFIX) if len(folder.entry(name).shape) == 2 else name.rpartition(".")[0]
             for name in layers.plain if is_matrix(name, folder.entry(name))]
    if any(name.endswith(EMBEDDING) for name in plain) and not any(name.endswith(HEAD) for name in plain):
        plain.append(HEAD)                                       # a head that has the weight of the embedding
    plain = list(dict.fromkeys(plain))
    if method not in IGNORED:
        return plain, []
    read = dialects(IGNORED[method], method)
    others = [layer.name for layer in layers.layers]
    text = "\n".join(others)
    found = {name: _naming(name, read, others if _may_name(name, text) else []) for name in plain}
    return [word for word, _ in found.values() if word], [name for name, (_, every) in found.items() if not every]


def _may_name(module: str, text: str) -> bool:
    """Whether a module's name, as it is or as a regular expression, is anywhere in a text: few are in thousands of names."""
    is_plain = re.fullmatch(r"[\w.-]+", module) is not None      # other names may be expressions that take long
    return not is_plain or re.search(module, text) is not None


def _naming(module: str, read: Sequence[str], others: Sequence[str]) -> tuple[str, bool]:
    """What names a module to some reader of a list, and none of the others to any; '' where nothing does.  And whether to all.

    To transformers a name may be the end of another: 'head' is 'lm_head' too, where 'head$' is not; to others that is no name.
    """
    for word in (module, f"{re.escape(module)}$"):
        each = [rules(dialect, word) for dialect in read]
        named = [rule.first(module) is not None for rule in each]
        if any(named) and not any(rule.first(other) for rule in each for other in others):
            return word, all(named)
    return "", False
