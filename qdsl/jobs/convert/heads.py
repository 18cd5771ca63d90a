"""States in a config whether the head of a language model shares the embedding's weight, by what the files hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.files.folder import Folder

TIED, TEXT = "tie_word_embeddings", "text_config"
HEADS, EMBEDDINGS = ("lm_head", "embed_out"), ("embed_tokens", "wte", "embed_in", "word_embeddings")


def with_ties(config: Mapping[str, Any], folder: Folder, layers: Layers, changed: Collection[str]) -> dict[str, Any]:
    """A config that says that the head is not tied where the new folder has another weight for it than the embedding's.

    A config that says nothing leaves it to the model's class, which may tie them.
    folder, layers: of the input.  changed: names of layers that get another storage.
    """
    text = config.get(TEXT)
    places = [config, *([text] if isinstance(text, Mapping) else [])]
    if all(place.get(TIED) is False for place in places) or not _has_head(folder, layers, changed):
        return dict(config)
    return {**config, TIED: False, **({TEXT: {**text, TIED: False}} if isinstance(text, Mapping) else {})}


def _has_head(folder: Folder, layers: Layers, changed: Collection[str]) -> bool:
    """Whether the new folder has one head, whose stored tensors differ from those of the embedding."""
    weights = _weights(folder, layers)
    heads = [name for name in weights if name.rpartition(".")[2] in HEADS]
    embeddings = [name for name in weights if name.rpartition(".")[2] in EMBEDDINGS]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    (head,), (embedding,) = heads, embeddings
    own, others = weights[head], weights[embedding]
    return (head in changed) != (embedding in changed) or own.keys() != others.keys() or not all(
        _is_same(folder.tensor(own[leaf]), folder.tensor(others[leaf])) for leaf in own)


def _weights(folder: Folder, layers: Layers) -> dict[str, dict[str, str]]:
    """The stored tensors of all weights by module: their names in files by their last parts."""
    packed = {layer.name: {leaf: full for leaf, full in {**layer.others, **layer.tensors}.items() if leaf != "bias"}
              for layer in layers.layers}
    plain = {full.removesuffix(".weight"): {"weight": full} for full in layers.plain
             if full.endswith(".weight") and full in folder}
    return {**plain, **packed}


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
