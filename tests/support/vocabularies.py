"""Small vocabularies of GGUF files, made of tests/data/gguf_tokens, and the files that llama.cpp takes them from."""

from __future__ import annotations

import json
from base64 import b85decode
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import write
from tests.support.paths import ROOT

FOLDER = ROOT / "tests/data/gguf_tokens"
GGML = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# What llama.cpp reads before a vocabulary.
HEADER = {"context_length": 256, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "attention.head_count": 4,
          "attention.head_count_kv": 2, "rope.dimension_count": 16}

Settings = dict[str, Value]


@cache
def data(name: str) -> Any:
    """The content of a file of tests/data/gguf_tokens."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def byte_alphabet() -> list[str]:
    """The character of each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def settings(model: str, tokens: list[str], types: list[int], **more: tuple[str, Any]) -> Settings:
    """The metadata of a vocabulary.  more: other keys, with type and value."""
    own = {"model": Value.of("string", model), "tokens": Value.of("string[]", tokens), "token_type": Value.of("i32[]", types)}
    return {GGML + key: value for key, value in (own | {key: Value.of(*pair) for key, pair in more.items()}).items()}


def bpe(pre: str | None, special: tuple[tuple[str, int], ...] = (), without: str = "", **more: tuple[str, Any]) -> Settings:
    """A byte-level vocabulary, whose merges pass the borders of words.

    special: further tokens with their types, before the others.  without: bytes that have no token.
    """
    first = [("<unk>", UNKNOWN), *((text, CONTROL) for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")), *special]
    merges = [merge for merge in data("merges")["bytes"] if not set(without) & set(merge)]
    tokens = list(dict.fromkeys([token for token, _ in first] + [own for own in byte_alphabet() if own not in without]
                                + [merge.replace(" ", "") for merge in merges]))
    types = [type for _, type in first] + [NORMAL] * (len(tokens) - len(first))
    names = {} if pre is None else {"pre": ("string", pre)}
    return settings("gpt2", tokens, types, **names, merges=("string[]", merges), bos_token_id=("u32", 1), eos_token_id=("u32", 2),
                    **more)


def characters(model: str, **more: tuple[str, Any]) -> Settings:
    """A vocabulary of characters: merged by scores for `llama`, of the best sums for `t5` and `plamo2`, by pairs for others."""
    merges = [merge for merge in data("merges")["characters"] if "\0" not in merge]
    alphabet = sorted({character for merge in merges for character in merge.replace(" ", "")})
    first = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|im_end|>", NORMAL), ("<mask>", USER_DEFINED),
             ("\n\n\n", USER_DEFINED)]
    tokens = list(dict.fromkeys([token for token, _ in first] + [f"<0x{byte:02X}>" for byte in range(256)] + alphabet
                                + [merge.replace(" ", "") for merge in merges]))
    types = [type for _, type in first] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 256 - len(first))
    scores = [-5 - number * 7919 % 1000 / 100 if model in ("t5", "plamo2") else -float(number) for number in range(len(tokens))]
    if model not in ("llama", "t5", "plamo2"):
        more["merges"] = ("string[]", merges)
    return settings(model, tokens, types, scores=("f32[]", scores), **{"bos_token_id": ("u32", 1), "eos_token_id": ("u32", 2),
                                                                       "unknown_token_id": ("u32", 0), **more})


def added(own: Settings, *entries: tuple[str, int]) -> Settings:
    """A vocabulary with further tokens of these types, but those that it has."""
    entries = tuple(entry for entry in entries if entry[0] not in own[GGML + "tokens"].decoded())
    more = {"tokens": [text for text, _ in entries], "token_type": [type for _, type in entries],
            "scores": [-3.0 - number for number in range(len(entries))]}
    return {**own, **{GGML + key: Value.of(own[GGML + key].type, [*own[GGML + key].decoded(), *values])
                      for key, values in more.items() if GGML + key in own}}


def lacking(own: Settings, without: Container[str]) -> Settings:
    """A vocabulary without some tokens."""
    kept = [place for place, token in enumerate(own[GGML + "tokens"].decoded()) if token not in without]
    lists = {key: own[key].decoded() for leaf in ("tokens", "token_type", "scores") if (key := GGML + leaf) in own}
    return {**own, **{key: Value.of(own[key].type, [values[place] for place in kept]) for key, values in lists.items()}}


def of_model(model: str, own: Settings) -> Settings:
    """A vocabulary of another model of tokens."""
    return {**own, GGML + "model": Value.of("string", model)}


def tied() -> Settings:
    """A vocabulary whose scores are three numbers."""
    own = characters("llama")
    return {**own, GGML + "scores": Value.of("f32[]", [-float(place % 3) for place in range(own[GGML + "scores"].count)])}


def plamo() -> Settings:
    """A vocabulary with PLaMo's special tokens, and equal and low scores."""
    own = characters("plamo2")
    names = [token.replace("</s>", "<s/>") for token in own[GGML + "tokens"].decoded()]
    tokens = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", *names]
    scores = [0.0] * 3 + [-float(1 + number % 3 + 2000 * (number % 11 == 0)) for number in range(len(tokens) - 3)]
    types = [UNKNOWN, CONTROL, CONTROL, *own[GGML + "token_type"].decoded()]
    return settings("plamo2", tokens, types, scores=("f32[]", scores))


def mapped(**more: tuple[str, Any]) -> Settings:
    """A vocabulary of the best sums, with a map of SentencePiece: those rules of its NFKC that begin like a part of a text."""
    return characters("t5", precompiled_charsmap=("u8[]", list(b85decode((FOLDER / "charsmap.txt").read_text()))), **more)


def words(**more: tuple[str, Any]) -> Settings:
    """A vocabulary of words and of their ends."""
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = first + data("merges")["words"]
    return settings("bert", tokens, [CONTROL] * len(first) + [NORMAL] * (len(tokens) - len(first)), **{
        "unknown_token_id": ("u32", 1), "bos_token_id": ("u32", 2), "seperator_token_id": ("u32", 3),
        "padding_token_id": ("u32", 0), "mask_token_id": ("u32", 4), **more})


def escaped_bytes(**more: tuple[str, Any]) -> Settings:
    """A vocabulary of bytes, which are escaped as in Python, of which the longest are taken."""
    places = {character: byte for byte, character in enumerate(byte_alphabet())}
    own = [bytes(places[character] for character in merge.replace(" ", "")) for merge in data("merges")["bytes"]]
    tokens = list(dict.fromkeys(["<s>", *(repr(text)[2:-1] for text in [*(bytes([byte]) for byte in range(256)), *own])]))
    return settings("rwkv", tokens, [CONTROL] + [NORMAL] * (len(tokens) - 1), **more)


TRUE, FALSE = ("bool", True), ("bool", False)


@cache
def cases() -> dict[str, Settings]:
    """Vocabularies with all kinds of settings, by what is special in them."""
    harmony = (("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL), ("<|channel|>", CONTROL))
    fill = (("<|fim_pad|>", NORMAL), ("<|repo_name|>", NORMAL), ("<|file_sep|>", CONTROL), ("<|fim_prefix|>", NORMAL))
    overlapping = ((">>TITLE<<", USER_DEFINED), (">>INTRODUCTION<<", USER_DEFINED), ("<|endoftext|>", CONTROL))
    spaces = tuple((" " * count, USER_DEFINED) for count in range(2, 9))
    sixes = (f"{letters}\ue000" for letters in ("ACGTAC", "AAAAAA", "CCCCCC", "GATTAC"))
    dna = tuple((text, NORMAL) for text in ("<dna>", "</dna>", "<oov>", *sixes))
    merged = {merge.replace(" ", "") for merge in data("merges")["bytes"][5::7]}
    plain: tuple[str, str] = ("string", "whitespace")
    return {
        "no pre-tokenizer": bpe(None),
        "eot and eom": bpe("qwen2", (("<turn>", CONTROL), ("<call>", CONTROL)), eot_token_id=("u32", 5), eom_token_id=("u32", 6)),
        "bos and eos": bpe("smollm", add_bos_token=TRUE, add_eos_token=TRUE),
        "no bos": bpe("llama-bpe", add_bos_token=FALSE),
        "numbers out of range": bpe("gpt-2", **{"eot_token_id": ("u32", 1 << 20), "padding_token_id": ("u32", 1 << 20)}),
        "known texts": bpe("gpt-2", (("<|eot_id|>", NORMAL), ("<end_of_turn>", USER_DEFINED), ("[EOS]", UNUSED))),
        "harmony": bpe("gpt-4o", harmony), "end alone": bpe("gpt-4o", harmony[2:]), "fill in the middle": bpe("qwen2", fill),
        "end beside tools": bpe("gpt-2", (("<|tool_response>", CONTROL),)),
        "overlapping": bpe("falcon", overlapping), "spaces": bpe("gpt-2", spaces),
        "missing bytes": bpe("smollm", without="ĩ½Ċ"), "missing bytes, whole words": bpe("llama-bpe", without="ĩ½"),
        "a mask that strips": bpe("jina-v2-de", (("<mask>", CONTROL),)),
        "scores": characters("llama"), "scores, no prefix": characters("llama", add_space_prefix=FALSE, add_bos_token=FALSE),
        "scores, eos": characters("llama", add_eos_token=TRUE, eot_token_id=("u32", 3)),
        "scores, spaces": characters("llama", remove_extra_whitespaces=TRUE),
        "scores, a name that strips": characters("llama") | {"general.name": Value.of("string", "My Phi-3")},
        "lines": characters("gemma4", add_bos_token=FALSE),
        "bytes": escaped_bytes(), "bytes, bos": escaped_bytes(bos_token_id=("u32", 0), add_bos_token=TRUE),
        "words": words(), "words, capitals": words(**{"normalizer.lowercase": FALSE}),
        "words, accents": words(**{"normalizer.strip_accents": FALSE}),
        "shown": bpe("gpt-4o", (("<|channel|>", NORMAL), ("<|start|>", UNUSED), ("<|message|>", CONTROL))),
        "backwards": characters("plamo2"), "backwards, bos": characters("plamo2", add_bos_token=TRUE, add_eos_token=TRUE),
        "backwards, plamo": plamo(),
        "sums, a map": mapped(), "sums, a map, prefix": mapped(add_space_prefix=TRUE),
        "sums, a map, spaces": mapped(remove_extra_whitespaces=TRUE),
        "sums": characters("t5"), "sums, prefix": characters("t5", add_space_prefix=TRUE, add_bos_token=TRUE),
        "sums, spaces": characters("t5", remove_extra_whitespaces=TRUE, add_eos_token=FALSE),
        # what the package tokenizers cannot express
        "overlapping, of one size": bpe("gpt-2", (("<a", CONTROL), ("a<", CONTROL), ("is", USER_DEFINED), ("s ", USER_DEFINED))),
        "merges of no tokens": lacking(bpe("gpt-2"), merged),
        "merges of no tokens, whole words": lacking(bpe("llama-bpe"), merged),
        "lines, some bytes": lacking(characters("gemma4"), [f"<0x{byte:02X}>" for byte in range(0, 256, 3)]),
        "lines, whole newlines": {**characters("gemma4"), GGML + "merges": Value.of("string[]", [
            merge for merge in data("merges")["characters"] if not set("\0\n") & set(merge)])},
        "scores, ties": tied(), "scores, no prefix, ties": {**tied(), GGML + "add_space_prefix": Value.of(*FALSE)},
        "scores, lone characters": lacking(characters("llama"), "aeit"),
        "no spaces": characters("whitespace", pre=plain), "no spaces, small letters": characters(
            "whitespace", pre=plain, **{"normalizer.lowercase": TRUE}),
        "no spaces, bytes": of_model("whitespace", bpe("gpt-2")),
        "no spaces, merges of no tokens": of_model("whitespace", lacking(bpe("gpt-2"), merged)),
        "dna": of_model("hybriddna", bpe("gpt-2", dna)), "dna without tags": of_model("hybriddna", bpe("gpt-2", dna[2:])),
        "sums, a control with a space": added(characters("t5"), ("\u2581a", CONTROL), ("\u2581x", CONTROL)),
        "sums, a user's beyond ASCII": added(
            characters("t5"), *((text, USER_DEFINED) for text in ("\u201c", "n\u00e9", "\u4f60\u597d"))),
        "sums, a map, a user's": added(mapped(add_space_prefix=TRUE), ("\u201c", USER_DEFINED), ("\ufb01x", USER_DEFINED)),
        "sums, a name that strips": characters("t5") | {"general.name": Value.of("string", "My Phi-3")},
        "words, overlapping": added(words(), ("K][SEP", CONTROL), ("[MASK][", USER_DEFINED)),
        "bytes, twice": added(escaped_bytes(), ("\\x61", NORMAL), ("\\x74\\x68e", NORMAL)),
        "bytes, special escapes": added(escaped_bytes(), ("\\n\\n", CONTROL), ("<\\t>", USER_DEFINED)),
    }


def write_vocabulary(path: Path, vocabulary: Settings) -> Path:
    """Write a GGUF file of a vocabulary alone."""
    header = {"general.architecture": Value.of("string", "llama"),
              "llama.attention.layer_norm_rms_epsilon": Value.of("f32", 1e-5),
              **{f"llama.{key}": Value.of("u32", number) for key, number in HEADER.items()}}
    write(path, header | vocabulary, [])
    return path
