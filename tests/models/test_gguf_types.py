"""Types of metadata: those that llama.cpp reads, as its loader has them; a file with others is refused with key and type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdsl.checkpoint.detect.gguf_keys import is_read, table
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.models.gguf_keys import wrong_types
from qdsl.models.gguf_maps import FOLDER, GgufMap, model_types
from qdsl.models.plan import LoadError
from tests.support import gguf_cases
from tests.support.vocabularies import bpe

plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")

OTHERS = {"u32": ("i32", "u64", "u8"), "f32": ("f64", "u32"), "bool": ("u8", "u32"), "string": ("u32",),
          "i32[]": ("i64[]", "f32[]"), "bool[]": ("u8[]", "f32[]")}


def settings(model_type: str) -> dict[str, Value]:
    """The converter's metadata of a tiny model."""
    return {key: Value.of(type, value) for key, (type, value) in gguf_cases.metadata()[model_type].items()}


def retyped(value: Value, type: str) -> Value:
    """A value in another type: a small one, as it is not read."""
    return Value.of(type, [1] * value.count if type.endswith("[]") else 1)


def changes(own: dict[str, Value], architecture: str) -> Iterator[tuple[str, Value]]:
    """Keys with a value of another type, of those that llama.cpp reads."""
    has_experts = bool(own.get(f"{architecture}.expert_count", Value.of("u32", 0)).decoded())
    for key, value in own.items():
        name = key.removeprefix(f"{architecture}.")
        if not is_read(name, architecture) or name in table()["types"]["untyped"] or (
                name.startswith("expert_") and not has_experts):
            continue
        yield from ((key, retyped(value, type)) for type in OTHERS[value.type])


@pytest.mark.parametrize("model_type", model_types())
def test_types_of_the_converter_are_read_and_others_are_not(model_type: str) -> None:
    architecture, own = GgufMap.read(FOLDER / f"{model_type}.json").architecture, settings(model_type)
    assert wrong_types(own, architecture) == []
    for key, value in changes(own, architecture):
        sentence, *_ = wrong_types({**own, key: value}, architecture)    # of another count of layers arrays are wrong, too
        assert sentence.startswith(f"{key} is of type {value.type}, and llama.cpp reads ")


def test_arrays_have_a_number_for_each_layer() -> None:
    own = {"llama.block_count": Value.of("u32", 4)}
    for count, sentences in ((4, []), (5, ["llama.attention.head_count has 5 numbers, and llama.cpp reads 4"])):
        assert wrong_types({**own, "llama.attention.head_count": Value.of("u32[]", [8] * count)}, "llama") == sentences
    assert wrong_types({**own, "llama.attention.sliding_window_pattern": Value.of("bool[]", [True] * 6)}, "llama") == []
    assert wrong_types({**own, "llama.of_next_year": Value.of("f64", 2.0)}, "llama") == []


def test_types_of_a_vocabulary() -> None:
    """They are read where there are tokens."""
    key = "tokenizer.ggml.eot_token_id"
    vocabulary = {**bpe("gpt-2"), key: Value.of("i32", 1)}
    assert wrong_types(bpe("gpt-2"), "llama") == []
    assert wrong_types(vocabulary, "llama") == [f"{key} is of type i32, and llama.cpp reads u32"]
    assert wrong_types({**vocabulary, "tokenizer.ggml.model": Value.of("string", "none")}, "llama") == []


def test_files_with_other_types_are_refused(tmp_path: Path) -> None:
    own = gguf_cases.tiny("llama")
    key = "llama.attention.layer_norm_rms_epsilon"
    changed = dataclasses.replace(own, settings={**own.settings, key: Value.of("f64", 1e-5)})
    path = gguf_cases.write_case(tmp_path / "model.gguf", changed, gguf_cases.Case())
    with pytest.raises(LoadError, match=f"{key} is of type f64, and llama.cpp reads f32"):
        plugin.from_pretrained(path)
