"""Finds the plain matrices of a folder that are weights of Linear layers, by names, shapes and the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.ignored import SKIPPED, is_skipped
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry

SUFFIX = ".weight"
EXPERTS = "experts"                                              # the module whose parameters are of all experts
# Embeddings that their names alone tell from Linear layers.
EMBEDDINGS = ("shared", ".*emb", ".*embd", ".*embeddings?_table", "relative_attention_bias")
BY_NAME = (*EMBEDDINGS, "embed.*", ".*embed(ding|dings|_tokens)?", "wte")


def plain_layers(folder: Folder, ignore: Sequence[str] = ()) -> tuple[list[Layer], dict[str, str]]:
    """The plain weights of Linear layers, as layers of plain formats, and why other matrices stay plain, by module name.

    A matrix is a tensor [N, K] called '*.weight', or [E, N, K] in a module 'experts'.  ignore: patterns of modules, as
    `is_skipped` reads them.
    """
    formats = {format.detect["safetensors"]: format for format in descriptions() if "safetensors" in format.detect}
    entries = {name: folder.entry(name) for name in folder.names()}
    matrices = {name: entry for name, entry in entries.items() if entry.dtype in formats and is_matrix(name, entry)}
    stacks = _orientations({name: entry.shape for name, entry in matrices.items() if len(entry.shape) == 3})
    transposed = _transposed(folder, matrices)
    vocabularies = {*_vocabularies(folder.config)}
    embeddings = set() if folder.config else {*_embeddings(matrices)}
    layers: list[Layer] = []
    left: dict[str, str] = {}
    for name, entry in matrices.items():
        module = name.removesuffix(SUFFIX)
        is_stack = len(entry.shape) == 3
        if is_skipped(module, ignore):
            left[module] = "a pattern names it"
        elif is_skipped(module, (*SKIPPED, *EMBEDDINGS)) or (
                (entry.shape[0] in vocabularies or tuple(entry.shape) in embeddings) and not _is_in_block(module)):
            left[module] = "heads, embeddings, norms and routers stay plain"
        elif not entry.nbytes:
            left[module] = "it has no numbers"
        elif is_stack and name not in stacks:
            left[module] = "nothing tells whether its experts are [E, N, K] or [E, K, N]"
        elif module.rpartition(".")[2] in transposed:
            left[module] = "its bias has K numbers: it is no Linear layer, or is [K, N]"
        else:
            is_transposed = stacks.get(name, False)
            n, k = entry.shape[:0:-1] if is_transposed else entry.shape[-2:]
            [(storage, [tensor])] = formats[entry.dtype].variants[()].items()
            layers.append(Layer(module, formats[entry.dtype].name, storage, {}, (n, k), entry.shape[0] if is_stack else None,
                                {tensor: name}, transposed=is_transposed))
    return layers, left


def _embeddings(matrices: Mapping[str, Entry]) -> Iterator[Sequence[int]]:
    """The shapes of embeddings, by their names, where no config states the vocabulary: heads have the same."""
    for name, entry in matrices.items():
        module = name.removesuffix(SUFFIX)
        if len(entry.shape) == 2 and is_skipped(module, BY_NAME) and not _is_in_block(module) and entry.shape[0] > entry.shape[1]:
            yield tuple(entry.shape)


def _is_in_block(module: str) -> bool:
    """Whether a module is in a numbered block, where there are no embeddings and heads."""
    return any(part.isdecimal() for part in module.split("."))


def is_matrix(name: str, entry: Entry) -> bool:
    """Whether a tensor may be the weight of a Linear layer, or of all experts of a module."""
    return name.split(".")[-2:-1] == [EXPERTS] if len(entry.shape) == 3 else len(entry.shape) == 2 and name.endswith(SUFFIX)


def _orientations(stacks: Mapping[str, Sequence[int]]) -> dict[str, bool]:
    """Whether stacked experts' weights are [E, K, N], by name, where shapes tell.

    Of the two weights of a module, the outputs of one (gate and up) are twice the inputs of the other (down), whose outputs are
    the inputs of the first.
    """
    transposed: dict[str, bool] = {}
    for one, (_, a, b) in stacks.items():
        for other, (_, c, d) in stacks.items():
            if one != other and one.rpartition(".")[0] == other.rpartition(".")[0]:
                if a == 2 * d and b == c:
                    transposed |= {one: False, other: False}
                elif a == d and b == 2 * c:
                    transposed |= {one: True, other: True}
    return transposed


def _transposed(folder: Folder, matrices: Mapping[str, Entry]) -> set[str]:
    """The last names of modules whose weights are [K, N], such as GPT-2's Conv1D: their biases have K elements."""
    names = set()
    for name, entry in matrices.items():
        bias = name.removesuffix(SUFFIX) + ".bias"
        if len(entry.shape) == 2 and bias in folder and folder.entry(bias).shape == entry.shape[1:] != entry.shape[:1]:
            names.add(name.removesuffix(SUFFIX).rpartition(".")[2])
    return names


def _vocabularies(config: Mapping[str, Any]) -> Iterator[int]:
    """The vocabulary sizes in a config and in its nested configs."""
    for key, value in config.items():
        if key == "vocab_size" and type(value) is int:
            yield value
        elif isinstance(value, Mapping):
            yield from _vocabularies(value)
