"""The vocabulary of a GGUF file as llama.cpp reads it: tokens, their types, special tokens, and which tokens end a text.

llama_vocabularies.toml has llama.cpp's tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files.safetensors import shown
from qdsl.models.plan import LoadError

TABLES = Path(__file__).parent / "llama_vocabularies.toml"
PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template."
BASE = "pass base=, a folder with the model's tokenizer"
# Roles of special tokens, and the keys of their numbers; the keys that end the table are deprecated and win.
ROLE_KEYS = (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom"), ("unk", "unknown"), ("sep", "seperator"),
             ("pad", "padding"), ("mask", "mask"), ("fim_pre", "fim_pre"), ("fim_suf", "fim_suf"), ("fim_mid", "fim_mid"),
             ("fim_pad", "fim_pad"), ("fim_rep", "fim_rep"), ("fim_sep", "fim_sep"), ("fim_pre", "prefix"), ("fim_suf", "suffix"),
             ("fim_mid", "middle"))
FLAGS = ("add_bos", "add_eos", "add_sep", "add_space_prefix", "remove_extra_whitespaces", "lowercase", "strip_accents")
# Types of tokens as bits, in the order of their numbers in files: llama.cpp adds `CONTROL` to the type that a file states.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = KINDS = tuple(1 << type for type in range(7))
SPECIAL = CONTROL | USER_DEFINED | UNKNOWN                       # are found in a text before all others
KIND_NAMES = {"normal": NORMAL, "user_defined": USER_DEFINED}    # as the tables have them


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary.

    model: an entry of `models` of the tables.  pre: the entry of `names`.  patterns: that divide a text, one after another.
    kinds: of each token.  special: numbers by role.  flags: of FLAGS.  ends: the tokens that end generation.
    suppressed: tokens that are never generated.
    """

    path: Path
    model: Mapping[str, Any]
    pre: Mapping[str, Any]
    patterns: tuple[str, ...]
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str] | None
    charsmap: bytes
    special: Mapping[str, int]
    flags: Mapping[str, bool]
    ends: list[int]
    suppressed: list[int]
    left: frozenset[int]                                         # tokens that take spaces to their left with them
    right: frozenset[int]
    templates: Mapping[str, str]                                 # of chats, by name


@cache
def tables() -> Mapping[str, Any]:
    """llama.cpp's tables."""
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


def read_vocabulary(metadata: Mapping[str, Any], path: Path) -> Vocabulary:
    """The vocabulary of a file's metadata.  Raises LoadError for one that llama.cpp refuses, or that cannot be expressed."""
    model = _model(metadata, path)
    name = model.get("split", metadata.get(PREFIX + "pre") or "default")
    pre = tables()["names"].get(name) if model["kind"] == "bpe" else {}
    if pre is None:
        raise LoadError(f"{path}: {PREFIX}pre is {shown(name)}, and llama.cpp has no pre-tokenizer of this name: {BASE}")
    tokens, kinds = _tokens(metadata, path)
    numbers = {token: number for number, token in enumerate(tokens)}
    if len(numbers) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if numbers[token] != number)
        raise LoadError(f"{path}: {PREFIX}tokens has {shown(twice)} twice")
    special = _special_tokens(metadata, model, pre, len(tokens))
    _add_roles(special, numbers, kinds)
    ends = _ends(special, numbers, kinds)
    left, right = _space_taking_tokens(metadata, name, numbers, kinds)
    suppressed = [number for number in metadata.get(PREFIX + "suppress_tokens", ()) if 0 <= number < len(tokens)]
    return Vocabulary(path, model, pre, _patterns(pre.get("split", name)) if model["kind"] == "bpe" else (), tokens, kinds,
                      _scores(metadata, len(tokens), path), metadata.get(PREFIX + "merges"),
                      bytes(number & 255 for number in metadata.get(PREFIX + "precompiled_charsmap", ())), special,
                      _flags(metadata, model, pre), ends, suppressed, left, right, _templates(metadata))


def _model(metadata: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    name = metadata.get(PREFIX + "model")
    if name is None:
        raise LoadError(f"{path}: has no {PREFIX}model, so it has no vocabulary: {BASE}")
    if name not in tables()["models"]:
        reason = tables()["refused"].get(name, "llama.cpp knows no vocabulary of this name")
        raise LoadError(f"{path}: {PREFIX}model is {shown(name)}: {reason}; {BASE}")
    model: Mapping[str, Any] = tables()["models"][name]
    return model


def _tokens(metadata: Mapping[str, Any], path: Path) -> tuple[list[str], list[int]]:
    tokens = metadata.get(PREFIX + "tokens")
    types = metadata.get(PREFIX + "token_type")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise LoadError(f"{path}: {PREFIX}tokens is not a list of strings")
    if types is not None and len(types) < len(tokens):
        raise LoadError(f"{path}: {PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    tokens = [token.partition("\0")[0] or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]       # strings of C
    if types is None:
        return tokens, [NORMAL] * len(tokens)
    return tokens, [KINDS[type] if 0 <= type < len(KINDS) else UNDEFINED for type in types[:len(tokens)]]


def _scores(metadata: Mapping[str, Any], count: int, path: Path) -> list[float]:
    scores = metadata.get(PREFIX + "scores")
    if scores is not None and len(scores) < count:
        raise LoadError(f"{path}: {PREFIX}scores has {len(scores)} entries for {count} tokens")
    return [0.0] * count if scores is None else [float(score) for score in scores[:count]]


def _special_tokens(metadata: Mapping[str, Any], model: Mapping[str, Any], pre: Mapping[str, Any], count: int) -> dict[str, int]:
    """Numbers of special tokens by role: of the file, else those of the model's kind; out of range they are left out."""
    special = {role: number for role, number in model.items() if role in dict(ROLE_KEYS) and number < count}
    if pre.get("no_bos"):
        special.pop("bos", None)
    for role, key in ROLE_KEYS:
        number = metadata.get(f"{PREFIX}{key}_token_id")
        if number is not None and 0 <= number < count:
            special[role] = number
    return special


def _flags(metadata: Mapping[str, Any], model: Mapping[str, Any], pre: Mapping[str, Any]) -> dict[str, bool]:
    flags = {flag: bool(pre.get(flag, model.get(flag, False))) for flag in FLAGS}
    for flag in ("add_bos", "add_eos", "add_sep"):
        flags[flag] = bool(metadata.get(f"{PREFIX}{flag}_token", flags[flag]))
    for flag in ("add_space_prefix", "remove_extra_whitespaces"):
        flags[flag] = bool(metadata.get(PREFIX + flag, flags[flag]))
    flags["add_bos"] |= bool(pre.get("add_bos_always"))
    flags["lowercase"] = bool(metadata.get(PREFIX + "normalizer.lowercase", not pre.get("keeps_capitals")))
    flags["strip_accents"] = bool(metadata.get(PREFIX + "normalizer.strip_accents", flags["lowercase"]))
    return flags


def _add_roles(special: dict[str, int], numbers: Mapping[str, int], kinds: list[int]) -> None:
    """Find tokens of missing roles by their texts, and mark them as control tokens."""
    for role, texts in tables()["roles"].items():
        if role not in special and (own := sorted(numbers[text] for text in texts if text in numbers)):
            special[role] = own[0]
            kinds[own[0]] |= CONTROL


def _ends(special: Mapping[str, int], numbers: Mapping[str, int], kinds: list[int]) -> list[int]:
    """The tokens that end generation; those known by their texts are marked as control tokens.  Others are shown."""
    table = tables()["ends"]
    by_text = {numbers[text] for text in table["texts"] if text in numbers}
    for number in by_text:
        kinds[number] |= CONTROL
    for number in [numbers[text] for text in tables()["shown"]["texts"] if text in numbers]:
        kinds[number] = USER_DEFINED
    ends = by_text | {special[role] for role in table["roles"] if role in special}
    for rule in table["except"]:
        texts = [rule["text"], *rule["beside"]]
        if all(numbers.get(text) in ends for text in texts):
            ends.discard(numbers[rule["text"]])
            kinds[numbers[rule["text"]]] = KIND_NAMES[rule["type"]]
    return sorted(ends)


def _space_taking_tokens(metadata: Mapping[str, Any], pre: str, numbers: Mapping[str, int],
            kinds: list[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The tokens that take spaces to their left, and to their right, with them."""
    for rule in tables()["strips"]:
        value = str(metadata.get(rule["key"], "")) if rule["key"] != PREFIX + "pre" else pre
        if any(text in (value.lower() if rule["key"] == "general.name" else value) for text in rule["texts"]):
            right = {numbers[text] for text in rule.get("right", ()) if text in numbers}
            if "right_all_but" in rule:
                right |= {number for number, kind in enumerate(kinds) if kind & SPECIAL}
                right -= {numbers[text] for text in rule["right_all_but"] if text in numbers}
            return frozenset(numbers[text] for text in rule.get("left", ()) if text in numbers), frozenset(right)
    return frozenset(), frozenset()


def _patterns(split: str) -> tuple[str, ...]:
    """The patterns of a split, with those that they name, and classes without the characters that llama.cpp does not know."""
    patterns: list[str] = []
    for pattern in tables()["splits"][split]:
        patterns += _patterns(pattern[1:]) if pattern.startswith("@") else [known_classes(pattern)]
    return tuple(patterns)


def known_classes(pattern: str) -> str:
    r"""A pattern whose classes \p{...} are without the characters that llama.cpp's tables do not have."""
    for name in ("C", "L", "M", "N", "P", "S"):
        pattern = pattern.replace(rf"\p{{{name}}}", rf"[\p{{{name}}}&&[^{tables()['unassigned']}]]")
    return pattern


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates of chats by name."""
    own = {"default": metadata.get("tokenizer.chat_template")}
    own |= {key.removeprefix(TEMPLATE): metadata.get(key) for key in metadata if key.startswith(TEMPLATE)}
    return {name: text for name, text in own.items() if isinstance(text, str)}
