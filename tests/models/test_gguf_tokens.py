"""Tokenizers of GGUF files against recorded tokens of llama.cpp (tests/record_gguf_tokens.py), and what is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.files.gguf_metadata import Metadata, Value
from qdsl.models.llama_vocabulary import Vocabulary, known_classes, read_vocabulary, tables
from qdsl.models.plan import LoadError
from tests.support import vocabularies
from tests.support.covering import ALL
from tests.support.vocabularies import (
    CONTROL,
    FALSE,
    GGML,
    TRUE,
    Settings,
    added,
    bpe,
    characters,
    data,
    settings,
    write_vocabulary,
)

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
gguf_tokenizer = pytest.importorskip("qdsl.models.transformers.gguf_tokenizer")
gguf_divide = pytest.importorskip("qdsl.models.transformers.gguf_divide")
pytestmark = pytest.mark.filterwarnings("default")

PATH = Path("model.gguf")
# Names that the recorded release of llama.cpp does not have.
NEWER = {name for name in tables()["names"] if f"pre {name}" not in data("answers")["cases"]}


def read(settings: Settings) -> Vocabulary:
    return read_vocabulary(Metadata(settings), PATH)


def scored(tokens: dict[str, float]) -> Settings:
    """A vocabulary of tokens that are merged by scores, after `<s>`."""
    return settings("llama", ["<s>", *tokens], [CONTROL, *[1] * len(tokens)], scores=("f32[]", [0.0, *tokens.values()]),
                    bos_token_id=("u32", 0), add_space_prefix=FALSE)


def first_name(name: str) -> str:
    """The first name of a pre-tokenizer that does the same."""
    entries = {other: {"split": other, **entry} for other, entry in tables()["names"].items()}
    return next(other for other, entry in entries.items() if entry == entries[name])


@cache
def pre_tokens(name: str) -> list[list[int]]:
    """Our tokens with a pre-tokenizer."""
    core = gguf_tokenizer.core_tokenizer(read(bpe(name)))
    return [core.encode(text).ids for text in data("strings")]


def recorded_tokens(case: str) -> list[list[int]]:
    answers = data("answers")
    places = answers["groups"][answers["cases"][case]["tokens"]]
    return [lists[place] for lists, place in zip(answers["tokens"], places, strict=True)]


def check_same(tokens: list[list[int]], case: str) -> None:
    texts, expected = data("strings"), recorded_tokens(case)
    different = [(text, own, theirs) for text, own, theirs in zip(texts, tokens, expected, strict=True) if own != theirs]
    assert not different, f"{len(different)} of {len(texts)}, the first: {different[0]}"


@pytest.mark.parametrize("name", [name for name in tables()["names"] if name not in NEWER])
def test_pre_tokenizers(name: str) -> None:
    """Every name of tokenizer.ggml.pre gives the tokens that llama.cpp gives."""
    check_same(pre_tokens(first_name(name)), f"pre {name}")
    assert read(bpe(name)).ends == data("answers")["cases"][f"pre {name}"]["ends"]


def test_names_that_were_not_recorded_are_few() -> None:
    """They have recorded patterns, but for one of a later release, and one of words that may have no spaces."""
    splits = {own.get("split", name) for name, own in tables()["names"].items() if name not in NEWER}
    assert {tables()["names"][name].get("split", name) for name in NEWER} - splits <= {"spark2_5", "words"}


@pytest.mark.parametrize("case", vocabularies.cases())
def test_vocabularies(case: str) -> None:
    """Tokens of all kinds of vocabularies, and the tokens that end generation, are llama.cpp's."""
    vocabulary = read(vocabularies.cases()[case])
    core = gguf_tokenizer.core_tokenizer(vocabulary)
    check_same([core.encode(text).ids for text in data("strings")], case)
    assert vocabulary.ends == data("answers")["cases"][case]["ends"]


@pytest.mark.parametrize("case", [*vocabularies.cases()][::1 if ALL else 4])
def test_vocabularies_in_python(case: str) -> None:
    """What stands for the package where it cannot express a vocabulary gives the same tokens for all others, too."""
    vocabulary = read(vocabularies.cases()[case])
    core = gguf_tokenizer.divided_in_python(vocabulary)
    gguf_tokenizer._add_ends(core, vocabulary)
    check_same([core.encode(text).ids for text in data("strings")], case)
    if divider := gguf_divide.DIVIDERS.get(vocabulary.model["kind"]):
        partition = gguf_divide.Partition(vocabulary, divider(vocabulary))
        ends = core.num_special_tokens_to_add(False)
        first = core.encode("").ids[:1] if vocabulary.flags["add_bos"] and ends else []
        check_same([[*first, *partition.tokens(text), *core.encode("").ids[len(first):]] for text in data("strings")], case)


# Characters below 0x34000 of the classes in llama.cpp's tables, counted in its unicode-data.cpp.
CLASSES, CHARACTERS = r"[\p{L}\p{M}\p{N}\p{P}\p{S}]+", 149384


def test_classes_of_characters() -> None:
    """Later releases of the package tokenizers may know characters of a later Unicode: those belong into `unassigned`."""
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x34000)]))
    others = gguf_tokenizer.pre_tokenizers.Split(gguf_tokenizer.Regex(known_classes(CLASSES)), "removed")
    count = sum(stop - start for _, (start, stop) in others.pre_tokenize_str(everything))
    assert len(everything) - count == CHARACTERS


@pytest.mark.parametrize(("vocabulary", "sentence"), [
    (bpe("gpt-5"), "tokenizer.ggml.pre is 'gpt-5', and llama.cpp has no pre-tokenizer of this name: pass base="),
    ({}, "has no tokenizer.ggml.model, so it has no vocabulary"),
    (added(settings("rwkv", ["a"], [1]), ("bc", 1)), "a token of bytes begins with one that is no token"),
    (bpe("gpt-2") | {GGML + "model": Value.of("string", "plamo2")}, "has no tokens <0x00> to <0xFF>"),
    (bpe("gpt-2") | {GGML + "model": Value.of("string", "x")}, "is 'x': llama.cpp knows no vocabulary of this name"),
    (bpe("gpt-2") | {GGML + "tokens": Value.of("string[]", ["a", "b", "a"])}, "tokenizer.ggml.tokens has 'a' twice"),
    (bpe("gpt-2") | {GGML + "tokens": Value.of("i32[]", [1])}, "tokenizer.ggml.tokens is not a list of strings"),
    (bpe("gpt-2") | {GGML + "token_type": Value.of("i32[]", [1])}, "tokenizer.ggml.token_type has 1 entries for"),
    (characters("llama") | {GGML + "scores": Value.of("f32[]", [1.0])}, "tokenizer.ggml.scores has 1 entries for"),
    ({key: value for key, value in bpe("gpt-2").items() if key != GGML + "merges"}, "has no tokenizer.ggml.merges"),
    (bpe("gpt-2", (("<a", CONTROL), ("a<", CONTROL), *((f"<{place}>", CONTROL) for place in range(16)))),
     "special tokens '<a' and 'a<' may overlap and are of one size: which of them llama.cpp finds depends on how it was built"),
    ({key: value for key, value in bpe("glm4", add_bos_token=TRUE).items() if key != GGML + "bos_token_id"},
     "tokenizer.ggml.add_bos_token is set, but the file does not name the token"),
    (characters("t5", precompiled_charsmap=("u8[]", [1, 2, 3])), "precompiled_charsmap has 3 bytes, and its trie 3"),
])
def test_vocabularies_that_are_refused(vocabulary: Settings, sentence: str) -> None:
    with pytest.raises(LoadError, match=re.escape(sentence)):
        gguf_tokenizer.core_tokenizer(read(vocabulary))


def test_tokens_of_equal_scores_are_merged_from_the_left() -> None:
    """As llama.cpp does, whatever their numbers: its queue takes the first in a text."""
    core = gguf_tokenizer.core_tokenizer(read(scored({"a": -9, "b": -9, "c": -9, "bc": -1, "ab": -1, "aa": -2, "aaa": -2})))
    assert core.encode("abc").tokens == ["<s>", "ab", "c"]
    assert core.encode("aaaaa").tokens == ["<s>", "aaa", "aa"]


def test_special_tokens_do_not_come_of_a_map() -> None:
    """llama.cpp does not take those that come of a text in other characters; the package would."""
    data = bytes(vocabularies.mapped()[GGML + "precompiled_charsmap"].decoded())
    for special, text in (("fi", "a ﬁ"), ("12", "１２３")):
        normalizer = gguf_tokenizer.normalizers.Normalizer.custom(gguf_tokenizer.Charsmap(data, [], [special]))
        with pytest.raises(Exception, match=f"a text becomes the special token '{special}'"):
            normalizer.normalize_str(text)
        assert normalizer.normalize_str("f\u00a0i") == "f i"


def test_named_templates() -> None:
    named = {"tokenizer.chat_template": Value.of("string", "a"), "tokenizer.chat_template.tools": Value.of("string", "b")}
    assert read(bpe("gpt-2") | named).templates == {"default": "a", "tools": "b"}


def test_tokenizers_of_files(tmp_path: Path) -> None:
    """Special tokens and templates of a file are those of transformers' tokenizer, which decodes what it encodes."""
    template = "{{ bos_token }}{% for message in messages %}<{{ message.content }}>{% endfor %}"
    vocabulary = bpe("llama-bpe", padding_token_id=("u32", 2)) | {"tokenizer.chat_template": Value.of("string", template)}
    tokenizer = plugin.tokenizer(write_vocabulary(tmp_path / "model.gguf", vocabulary))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 2, None)
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s><a>"
    for text in data("strings"):
        if " <|" not in text:
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("a<|im_end|>b")["input_ids"], skip_special_tokens=True) == "ab"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [again(text)["input_ids"] for text in data("strings")] == [tokenizer(text)["input_ids"] for text in data("strings")]


@pytest.mark.parametrize("case", ["sums, a map", "backwards", "overlapping, of one size", "scores, ties", "bytes, twice", "dna"])
def test_tokenizers_with_parts_in_python(case: str, tmp_path: Path) -> None:
    """They decode what they encode, and are not saved."""
    tokenizer = plugin.tokenizer(write_vocabulary(tmp_path / "model.gguf", vocabularies.cases()[case]))
    assert tokenizer.decode(tokenizer("the 3 a", add_special_tokens=False)["input_ids"]) == "the 3 a"
    with pytest.raises(LoadError, match=r"parts in Python, which a tokenizer\.json does not hold"):
        tokenizer.save_pretrained(tmp_path)


def test_generation_ends_where_llama_cpp_ends(tmp_path: Path) -> None:
    """At the token of tokenizer.ggml.eot_token_id, too, and at those of a base's settings."""
    from tests.support import gguf_models

    options: dict[str, Any] = {"has_settings": True, "has_vocabulary": True, "vocab_size": 288}
    prompt = torch.tensor([[5, 6, 7]])
    model = plugin.from_pretrained(gguf_models.written(tmp_path, "llama", **options)[0])
    assert model.generation_config.eos_token_id == [2]
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()[3:]
    assert len(tokens) == 8
    end = {"tokenizer.ggml.eot_token_id": Value.of("u32", tokens[2]), "tokenizer.ggml.suppress_tokens": Value.of("i32[]", [9])}
    path, _ = gguf_models.written(tmp_path, "llama", more=end, **options)
    model = plugin.from_pretrained(path)
    assert model.generation_config.eos_token_id == sorted({2, tokens[2]}) and model.generation_config.suppress_tokens == [9]
    stop = tokens.index(tokens[2]) + 1
    assert model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()[3:] == tokens[:stop]
    transformers.GenerationConfig(eos_token_id=[4]).save_pretrained(tmp_path)
    assert plugin.from_pretrained(path, base=tmp_path).generation_config.eos_token_id == sorted({2, 4, tokens[2]})
