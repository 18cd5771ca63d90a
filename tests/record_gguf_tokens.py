"""Records llama.cpp's tokens of small vocabularies: `python -m tests.record_gguf_tokens`, see tests/support/llama_library.py.

tests/data/gguf_tokens has strings.json, written by hand; merges.json, of which vocabularies are made; and answers.json.  Merges
are trained on the strings without a pre-tokenizer, so that they pass the borders of words.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdsl.models.llama_vocabulary import tables
from tests.support.llama_library import LlamaVocabulary, folder
from tests.support.vocabularies import FOLDER, Settings, bpe, cases, data, write_vocabulary

MERGES = 900


def merges() -> dict[str, list[str]]:
    """Merges of bytes and of characters, and the words and ends of words of the strings."""
    import tokenizers

    texts = data("strings")
    result = {}
    for kind in ("bytes", "characters"):
        core = tokenizers.Tokenizer(tokenizers.models.BPE())
        core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        if kind == "bytes":
            core.normalizer = None
            core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=MERGES, show_progress=False, min_frequency=2)
        core.train_from_iterator(texts * 2, trainer)
        result[kind] = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    words = sorted({word.lower() for text in texts for word in text.replace("\0", " ").split()})
    starts = {"\u2581" + word[:size] for word in words for size in (1, 2, 3)}
    ends = {word[start:] for word in words for start in (1, 2, 3, 5) if word[start:]}
    return {**result, "words": sorted(starts | ends)[::2]}


def answers(vocabulary: Settings, texts: Sequence[str], folder: Path) -> tuple[list[list[int]], list[int]] | None:
    """The tokens of each text, and the tokens that end generation; None where llama.cpp refuses the vocabulary."""
    try:
        own = LlamaVocabulary(write_vocabulary(folder / "model.gguf", vocabulary))
    except ValueError:
        return None
    return [own.tokens(text) for text in texts], own.ends()


def recorded() -> dict[str, Any]:
    """What tests/data/gguf_tokens/answers.json holds: tokens that vocabularies share are stored once."""
    names = [name for name, own in tables()["names"].items() if not own.get("plain_spaces")]     # spaces end the process there
    texts, kinds = data("strings"), {**{f"pre {name}": bpe(name) for name in names}, **cases()}
    unique: list[list[list[int]]] = [[] for _ in texts]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, vocabulary in kinds.items():
            own = answers(vocabulary, texts, Path(place))
            if own is None:
                continue
            for lists, tokens in zip(unique, own[0], strict=True):
                if tokens not in lists:
                    lists.append(tokens)
            places = [lists.index(tokens) for lists, tokens in zip(unique, own[0], strict=True)]
            result[name] = {"tokens": places, "ends": own[1]}
    groups = list(dict.fromkeys(tuple(own["tokens"]) for own in result.values()))
    for own in result.values():
        own["tokens"] = groups.index(tuple(own["tokens"]))
    return {"cases": result, "groups": [list(group) for group in groups], "tokens": unique}


def write(name: str, content: Any) -> None:
    """Write a file of the folder, an entry a line."""
    entries = [f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in content.items()]
    (FOLDER / f"{name}.json").write_text("{" + ",\n".join(entries) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    assert folder() is not None, "llama.cpp's library is not there: see tests/support/llama_library.py"
    write("merges", merges())
    data.cache_clear()
    write("answers", recorded())
