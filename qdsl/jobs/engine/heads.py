"""States in a config whether the head of a language model shares the embedding's weight, by what the files hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

TIED, TEXT = "tie_word_embeddings", "text_config"
HEADS, EMBEDDINGS = ("lm_head", "embed_out"), ("embed_tokens", "wte", "embed_in", "word_embeddings")


def config_with_ties(config: Mapping[str, Any], modules: Collection[str], is_same: Callable[[str, str], bool]) -> dict[str, Any]:
    """A config that says that the head is not tied where the new folder has another weight for it than the embedding's.

    A config that says nothing leaves it to the model's class, which may tie them.
    modules: those with a weight.  is_same: whether the weights of two are stored as one and the same.
    """
    text = config.get(TEXT)
    places = [config, *([text] if isinstance(text, Mapping) else [])]
    heads, embeddings = ([name for name in modules if name.rpartition(".")[2] in ends] for ends in (HEADS, EMBEDDINGS))
    if all(place.get(TIED) is False for place in places) or len(heads) != 1 or len(embeddings) != 1 or is_same(
            heads[0], embeddings[0]):
        return dict(config)
    return {**config, TIED: False, **({TEXT: {**text, TIED: False}} if isinstance(text, Mapping) else {})}
