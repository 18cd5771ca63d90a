"""Writes the vocabulary of a folder's tokenizer into the metadata of a GGUF file, by the rules of llama.cpp's converter.

gguf_tokenizers.json has the converter's table: how llama.cpp splits text, by the SHA-256 of the numbers of a text's tokens.
The package gguf has older rules of special tokens than the converter, so they stand here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, LlamaHfVocab, TokenType

from qdsl.host.files import read_text
from qdsl.jobs.gguf import QuantizeError

TABLE = Path(__file__).parent / "gguf_tokenizers.json"
SPACE = "\u2581"                                                 # in tokens of SentencePiece
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")     # kinds of special tokens
CONTROL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")              # tokens that some models forget to mark as special
BRACKETS = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
CODE_LLAMA, GRANITE = 32016, 49152                               # sizes of vocabularies by which the converter knows models
PAD_SCORE, ADDED_SCORE = -10000.0, -1000.0

Vocabulary = tuple[list[str], list[float] | None, list[int]]     # tokens, their scores, and their types


def add_vocabulary(writer: GGUFWriter, folder: Path, kinds: Sequence[str], config: Mapping[str, Any]) -> None:
    """Add the tokenizer of a folder to a writer's metadata.

    kinds: of the model type, in the order in which the converter tries them: sentencepiece, llama and gpt2.
    Raises QuantizeError for a tokenizer that cannot be written as the converter would.
    """
    settings = json_of(folder / "tokenizer_config.json")
    is_llama = "llama" in kinds
    if is_llama and settings.get("add_prefix_space") is not None:
        writer.add_add_space_prefix(settings["add_prefix_space"])
    kind = _kind(folder, kinds)
    if kind == "gpt2":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(tokenizer, folder))
        tokens, scores, types = _bpe(tokenizer, folder, config)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        is_model = kind == "sentencepiece"
        tokens, scores, types = _sentencepiece(folder, settings, config) if is_model else _sentencepiece_of_json(folder)
    writer.add_token_list(tokens)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges(_merges(json_of(folder / "tokenizer.json")["model"]["merges"]))
    _add_special(writer, folder, settings, None if kind == "gpt2" else len(tokens))
    if is_llama and config.get("vocab_size") == CODE_LLAMA:
        raise QuantizeError(f"{folder}: a vocabulary of Code Llama, whose tokens for infilling are not written yet")
    if is_llama and config.get("vocab_size") == GRANITE:
        writer.add_add_bos_token(False)


def _kind(folder: Path, kinds: Sequence[str]) -> str:
    """The kind of tokenizer that a folder has.  Raises QuantizeError for an unsupported one."""
    if "sentencepiece" in kinds and (folder / "tokenizer.model").is_file():
        return "sentencepiece"
    if not (folder / "tokenizer.json").is_file():
        files = "tokenizer.json or tokenizer.model" if "sentencepiece" in kinds else "tokenizer.json"
        raise QuantizeError(f"{folder}: no {files}, of which the file's vocabulary is made")
    model = json_of(folder / "tokenizer.json").get("model", {})
    if model.get("type") != "BPE":
        raise QuantizeError(f"{folder / 'tokenizer.json'}: a tokenizer of type {model.get('type')!r}; BPE is written")
    return "llama" if "llama" in kinds and model.get("byte_fallback") else "gpt2"


def pre_tokenizer(tokenizer: Any, folder: Path) -> str:
    """llama.cpp's name for how a tokenizer splits text, by its tokens of a test text.  Raises QuantizeError for an unknown one.
    """
    table = json_of(TABLE)
    key = hashlib.sha256(str(tokenizer.encode(table["text"])).encode()).hexdigest()
    if key not in table["hashes"]:
        raise QuantizeError(f"{folder}: llama.cpp's converter ({table['recorded']}) does not know how this tokenizer splits "
                            f"text: its table has no hash {key[:16]}")
    return str(table["hashes"][key])


def _bpe(tokenizer: Any, folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a byte-level BPE tokenizer."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    size = int(config.get("vocab_size", len(vocabulary)))
    if max(vocabulary.values()) >= size:
        raise QuantizeError(f"{folder}: the tokenizer has token {max(vocabulary.values())}, and the model {size} tokens")
    by_number = {number: token for token, number in vocabulary.items()}
    added, details = tokenizer.get_added_vocab(), tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(size):
        token, type = by_number.get(number, f"[PAD{number}]"), TokenType.NORMAL
        if number not in by_number:
            type = TokenType.UNUSED
        elif token in added:
            if not details[number].normalized:                   # llama.cpp takes added tokens as normalized
                token = tokenizer.decode(tokenizer.encode(token, add_special_tokens=False))
            token, type = _added(token, details[number].special)
        tokens.append(token)
        types.append(int(type))
    return tokens, None, types


def _added(token: str, special: bool) -> tuple[str, TokenType]:
    """The text and type of an added token."""
    looks_special = token in CONTROL or any(token.startswith(start) and token.endswith(end) for start, end in BRACKETS)
    return (token, TokenType.CONTROL) if special or looks_special else (token.replace(SPACE, " "), TokenType.USER_DEFINED)


def _sentencepiece_of_json(folder: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json that was converted from a SentencePiece model."""
    try:
        entries = list(LlamaHfVocab(folder).all_tokens())
    except (FileNotFoundError, TypeError) as error:
        raise QuantizeError(f"{folder / 'tokenizer.json'}: {error}") from error
    texts = [text.decode() if isinstance(text, bytes) else text for text, _, _ in entries]
    return texts, [score for _, score, _ in entries], [int(type) for _, _, type in entries]


def _sentencepiece(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of tokenizer.model, with added tokens."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise QuantizeError(f"{folder / 'tokenizer.model'}: reading it needs the package sentencepiece") from None
    model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    size = int(config.get("vocab_size") or model.vocab_size())
    entries = [(f"[PAD{number}]", PAD_SCORE, TokenType.UNUSED) for number in range(size)]
    for number in range(min(size, model.vocab_size())):
        type = TokenType.UNKNOWN if model.IsUnknown(number) else TokenType.CONTROL if model.IsControl(number) \
            else TokenType.UNUSED if model.IsUnused(number) else TokenType.BYTE if model.IsByte(number) else TokenType.NORMAL
        entries[number] = model.IdToPiece(number), model.GetScore(number), type
    for token, number in json_of(folder / "added_tokens.json").items():
        if number < size:
            entries[number] = token, ADDED_SCORE, TokenType.USER_DEFINED
    for key, entry in settings.get("added_tokens_decoder", {}).items():
        if int(key) < size:
            text, type = _added(entry["content"], bool(entry.get("special")))
            entries[int(key)] = text, ADDED_SCORE, type
    return [text for text, _, _ in entries], [score for _, score, _ in entries], [int(type) for _, _, type in entries]


# -- special tokens --------------------------------------------------------------------------------------------------------


def _merges(merges: Sequence[str | Sequence[str]]) -> list[str]:
    """The merges of byte-level BPE as pairs of tokens with a space between them."""
    return [pair if isinstance(pair, str) else " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in pair)
            for pair in merges]


def _add_special(writer: GGUFWriter, folder: Path, settings: Mapping[str, Any], limit: int | None) -> None:
    """Add the numbers of special tokens, which of them begin and end a text, and the chat template.

    settings: tokenizer_config.json.  limit: numbers from here on are left out.
    """
    tokenizer, entries = json_of(folder / "tokenizer.json"), dict(settings)
    if wrong := _normalizers(tokenizer.get("normalizer") or {}) & {"Lowercase", "StripAccents", "BertNormalizer"}:
        raise QuantizeError(f"{folder / 'tokenizer.json'}: normalizer {wrong.pop()} is not written to a GGUF file")
    if tokenizer and not settings:
        raise QuantizeError(f"{folder}: no tokenizer_config.json, which names the special tokens")
    kinds, flags = list(SPECIAL), _special_token_flags(tokenizer, entries, folder)
    kinds += ["eot"] if entries.get("eot_token") is not settings.get("eot_token") else []
    flags |= {kind: flag for kind in kinds if isinstance(flag := entries.get(f"add_{kind}_token"), bool) and kind not in flags}
    numbers = _special_numbers(kinds, tokenizer, entries, json_of(folder / "config.json"), limit)
    for name, values in (("add_{}_token_id", numbers), ("add_add_{}_token", flags)):
        for kind, value in values.items():
            if (add := getattr(writer, name.format(kind), None)) is not None:
                add(value)
    if (template := entries.get("chat_template", _chat_template(folder))) is not None and settings:
        writer.add_chat_template(template)


def _special_numbers(kinds: Sequence[str], tokenizer: Mapping[str, Any], entries: Mapping[str, Any], config: Mapping[str, Any],
                     limit: int | None) -> dict[str, int]:
    """The token numbers of kinds of special tokens, from tokenizer.json, else from config.json."""
    numbers: dict[str, int] = {}
    for kind in kinds:
        for number in (_added_id(tokenizer, entries.get(f"{kind}_token")), config.get(f"{kind}_token_id")):
            if isinstance(number, int) and kind not in numbers and (limit is None or number < limit):
                numbers[kind] = number
    return numbers


def _added_id(tokenizer: Mapping[str, Any], token: Any) -> Any:
    """The number of a special token among the added tokens of tokenizer.json; None without one."""
    text = token.get("content") if isinstance(token, Mapping) else token
    ids = (own.get("id") for own in tokenizer.get("added_tokens", ()) if own.get("content") == text)
    return None if text is None else next(ids, None)


def _normalizers(normalizer: Mapping[str, Any]) -> set[str]:
    return {str(normalizer.get("type"))}.union(*map(_normalizers, normalizer.get("normalizers", ())))


def _chat_template(folder: Path) -> Any:
    """The chat template of a separate file, or several by name; None without one."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return json_of(folder / "chat_template.json").get("chat_template")
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    templates = [{"name": own.stem, "template": read_text(own)} for own in others]
    text = read_text(path)
    return [{"name": "default", "template": text}, *templates] if templates else text


def _special_token_flags(tokenizer: Mapping[str, Any], entries: dict[str, Any], folder: Path) -> dict[str, bool]:
    """Which special tokens are added to a text, by the post-processor of tokenizer.json.  Fills in missing entries."""
    if not tokenizer:
        return {}
    for kind, other in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if not entries.get(kind) and entries.get(other):
            entries[kind] = entries[other]
    flags: dict[str, bool] = {}
    processor = tokenizer.get("post_processor") or {}
    for own in processor.get("processors", [processor] if processor else []):
        if own.get("type") == "ByteLevel":
            flags.setdefault("bos", False)
            flags.setdefault("eos", False)
        elif own.get("type") == "TemplateProcessing":
            _template_flags(own, entries, flags)
        elif own.get("type") == "RobertaProcessing":
            raise QuantizeError(f"{folder / 'tokenizer.json'}: RobertaProcessing is not written to a GGUF file")
    return flags


def _template_flags(template: Mapping[str, Any], entries: dict[str, Any], flags: dict[str, bool]) -> None:
    """Sets the flags from the templates of one text and of two, as the converter reads them."""
    single, pair = template.get("single", []), template.get("pair", [])
    first, last = (_special_of(single[place]) if len(single) > 1 else None for place in (0, -1))
    if first:
        if first not in (entries.get("bos_token"), entries.get("cls_token")):
            entries.update({kind: first for kind in ("bos_token", "cls_token") if not entries.get(kind)})
        flags["bos"] = first in (entries.get("bos_token"), entries.get("cls_token"))
    if last:
        if last != entries.get("eos_token"):
            entries |= {"eot_token": entries.get("eos_token"), "eos_token": last}
        flags["eos"] = True
    middle = pair[1 if pair and first and _special_of(pair[0]) == first else 0:]
    middle = middle[:-1] if middle and last and _special_of(middle[-1]) == last else middle
    if len(middle) > 2 and [own.get("Sequence", {}).get("id") for own in (middle[0], middle[-1])] == ["A", "B"]:
        ends = (entries.get("sep_token"), entries.get("eos_token"))
        between = [_special_of(own) for own in middle[1:-1]]
        flags["sep"] = bool((between[0] and between[0] in ends and not last)
                            or (len(between) == 2 and between[1] and between[1] in ends))
        if flags["sep"] and not entries.get("sep_token"):
            entries["sep_token"] = entries.get("eos_token")


def _special_of(entry: Mapping[str, Any]) -> str | None:
    """The special token of a template's entry; None for another entry."""
    token: str | None = entry.get("SpecialToken", {}).get("id")
    return token


def json_of(path: Path) -> dict[str, Any]:
    """The object of a JSON file; {} where the file does not exist.  Raises QuantizeError for invalid JSON."""
    try:
        loaded = json.loads(read_text(path)) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise QuantizeError(f"{path}: {error}") from None
    if not isinstance(loaded, dict):
        raise QuantizeError(f"{path}: a JSON object is expected, not {type(loaded).__name__}")
    return loaded
