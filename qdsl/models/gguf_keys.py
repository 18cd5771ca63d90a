"""Compares the metadata of GGUF language models with configs, by the table of qdsl.checkpoint.detect.gguf_keys."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.detect.gguf_keys import LLAMA_CPP, are_close, effect, is_ignored, is_read, is_usual, plain, table
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.text import counted
from qdsl.models.gguf_maps import GgufMap

PREDICTED = "nextn_predict_layers"                               # how many of the blocks predict further tokens
INTEGERS = ("u32[]", "i32[]", "bool[]")                          # types of arrays that llama.cpp reads for numbers of layers
WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
SWA_WIDTHS = ("attention.key_length_swa", "attention.value_length_swa")
GATE = "expert_gating_func"                                      # an addition that has these keys, too
ROUTING = ("expert_weights_norm", "expert_weights_scale", "expert_group_count", "expert_group_used_count")


def contradictions(config: Any, metadata: Mapping[str, Any], own: GgufMap, skip: Container[str] = ()) -> list[str]:
    """Sentences about keys of which the config says something else.  skip: keys that are computed all the same."""
    sentences = []
    for key, value in _settings(config, metadata, own, skip):
        name, expected = _expected(key, config, own)
        if name and not _is_same(value, expected, config, own):
            sentences.append(f"{own.architecture}.{key} is {value}, and {name} of the config is {expected}: it changes "
                             f"{effect(key)}")
    return sentences


def unknown_keys(config: Any, metadata: Mapping[str, Any], own: GgufMap, skip: Container[str] = ()) -> list[str]:
    """Sentences about keys that no rule explains, or for which the config has no place, unless their values change nothing."""
    sentences = []
    for key, value in _settings(config, metadata, own, skip):
        is_computed = _expected(key, config, own)[0] and (
            is_read(key, own.architecture) or key in table()["unread"].get(own.architecture, ()))
        if is_computed or is_usual(key, value):
            continue
        why = f"{own.model_class} has no place for it" if key in table()["settings"] else "nothing is known about this key"
        sentences.append(f"{own.architecture}.{key} is {shown(str(value))}, which may change {effect(key)}: {why}")
    return sentences


def wrong_types(metadata: Mapping[str, Value], architecture: str) -> list[str]:
    """Sentences about keys of which a file has another type, or another number of values, than llama.cpp reads."""
    rows, start, sentences = table()["types"], f"{architecture}.", []
    layers = metadata.get(f"{start}block_count", Value.of("u32", 0)).decoded()
    has_experts = bool(metadata.get(f"{start}expert_count", Value.of("u32", 0)).decoded())
    has_tokens = metadata.get("tokenizer.ggml.model", Value.of("string", "none")).decoded() not in ("none", "no_vocab")
    for key, value in metadata.items() if architecture in table()["architectures"] else ():
        name = key.removeprefix(start) if key.startswith(start) else key if has_tokens and key in rows["vocabulary"] else ""
        is_skipped = name.startswith("expert_") and not has_experts and name != "expert_used_count"
        if is_skipped or name in rows["untyped"] or not (is_read(name, architecture) or name in rows["vocabulary"]):
            continue
        expected = next((type for type in ("f32", "bool", "string", "i32") if name in rows[type]), "u32")
        if name in rows["arrays"] and value.type.endswith("[]"):
            count = {"layers": layers, "any": value.count}.get(str(rows["arrays"][name]), rows["arrays"][name])
            if value.type not in INTEGERS:
                sentences.append(f"{key} is of type {value.type}, and llama.cpp reads {', '.join(INTEGERS)}")
            elif value.count != count:
                sentences.append(f"{key} has {counted(value.count, 'number')}, and llama.cpp reads {count}")
        elif value.type != expected:
            sentences.append(f"{key} is of type {value.type}, and llama.cpp reads {expected}")
    return sentences


def unused_keys(metadata: Mapping[str, Any], own: GgufMap, rotates: bool) -> list[str]:
    """Keys of a file, without its architecture, that mean something elsewhere, and that llama.cpp does not compute here.

    rotates: whether the model has rotary embeddings.
    """
    rows, start = table(), f"{own.architecture}."
    names = [key.removeprefix(start) for key in metadata if key.startswith(start)]
    local = rows["window_rope"].get(own.architecture, {"one_base": True})
    unused = {name for name in names if name.startswith("rope.") and not rotates}
    unused |= {name for name in names if is_ignored(name, own.architecture)}
    if not metadata.get(f"{start}expert_count"):
        unused |= {name for name in names if name.startswith("expert_") and is_read(name, own.architecture)} - {"expert_count"}
    unused |= {*SWA_WIDTHS} if not is_read(WINDOWS[0], own.architecture) else set()
    unused |= {"rope.freq_base_swa"} if local.get("one_base") else set()
    unused |= {*WINDOWS} if own.model_type in rows["windowless"] and metadata.get(f"{start}block_count") != (
        rows["windowless"][own.model_type]) else set()
    unused |= {WINDOWS[1]} if own.architecture not in rows["windowed"] and own.model_type not in rows["sinks"] and (
        not metadata.get(start + WINDOWS[0])) else set()
    sections = metadata.get(f"{start}rope.dimension_sections")   # of positions, of which a text has one
    unused |= {"rope.dimension_sections"} if own.architecture not in rows["sectioned"] and sections is not None and (
        is_read("rope.dimension_sections", own.architecture) and not any(sections[3:])) else set()
    return [name for name in names if name in unused]


def _settings(config: Any, metadata: Mapping[str, Any], own: GgufMap, skip: Container[str]) -> list[tuple[str, Any]]:
    """The keys of an architecture that a config is compared by, without its name, and their values."""
    start = f"{own.architecture}."
    models = table()["models"].get(own.model_type, {})
    skipped = {*table()["inert"], *table()["rope"]} - {*models} | {key for key, entries in models.items() if entries is None}
    added = getattr(config, LLAMA_CPP, None) or {}
    skipped |= added.keys() | ({*ROUTING} if GATE in added else set())
    keys = [key for key in metadata if key.startswith(start) and key.removeprefix(start) not in skipped]
    further = metadata.get(start + PREDICTED, 0)
    names = {key: name for key in keys if (name := key.removeprefix(start)) not in skip
             and not is_ignored(name, own.architecture)}
    return [(name, metadata[key] - further if name == "block_count" else plain(metadata[key])) for key, name in names.items()]


def entries_of(key: str, own: GgufMap) -> Sequence[Any]:
    """The entries of a model type's configs that say the same as a key."""
    models, settings = table()["models"].get(own.model_type, {}), table()["settings"]
    entries: Sequence[Any] = models[key] if key in models else settings.get(key, ())
    return entries


def _expected(key: str, config: Any, own: GgufMap) -> tuple[str, Any]:
    """The first entry that a config has for a key, and its value; ('', None) where it has none."""
    for entry in entries_of(key, own):
        if (value := _entry_value(entry, config)) is not None:
            return str(entry), value
    return "", None


def _entry_value(entry: Any, config: Any) -> Any:
    """The value of an entry; None where the config lacks a part of it."""
    if not isinstance(entry, str):
        return entry
    name, _, kind = entry.partition("=")
    if kind:
        return None if (types := getattr(config, name, None)) is None else [own == kind for own in types]
    names = re.split(r"[*/+]", entry)
    numbers = [_config_entry(config, name) for name in names]
    if len(numbers) == 1 or None in numbers:
        return numbers[0] if len(numbers) == 1 else None
    result = numbers[0]
    for sign, number in zip(re.findall(r"[*/+]", entry), numbers[1:], strict=True):
        result = result * number if sign == "*" else result + number if sign == "+" else result / number
    return result


def _config_entry(config: Any, name: str) -> Any:
    """An entry of a config, or of a mapping in it; None where it is absent.  A number is itself."""
    if name.isdecimal():
        return int(name)
    value = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _is_same(value: Any, expected: Any, config: Any, own: GgufMap) -> bool:
    """Whether a file and a config say the same.  One number is that of all layers; 0 is that of a layer of another kind."""
    if isinstance(expected, list) and expected and isinstance(expected[0], bool):
        pattern = pattern_of_windows(value, config.num_hidden_layers, own.architecture)
        return pattern[:len(expected)] == expected
    values = value if isinstance(value, list) else [value]
    others = expected if isinstance(expected, list) else [expected] * len(values)
    values = values * len(others) if len(values) == 1 else values
    return len(values) == len(others) and all(
        are_close(one, other) or (isinstance(value, list) and one == 0) for one, other in zip(values, others, strict=True))


def pattern_of_windows(value: Any, layers: int, architecture: str) -> list[bool]:
    """Which layers have a sliding window: each as stated, or all but every so many."""
    if isinstance(value, list):
        return [bool(own) for own in value]
    begins_without = bool(table()["window_patterns"].get(architecture, ())[1:])
    whole = 0 if begins_without else value - 1                   # the layer of each period without one
    return [value == 0 or layer % value != whole for layer in range(layers)]


def one_number(value: Any) -> Any:
    """The number that all layers have, or the numbers.  0 is that of a layer of another kind."""
    numbers = {*value} - {0} if isinstance(value, list) else {value}
    return numbers.pop() if len(numbers) == 1 else value
