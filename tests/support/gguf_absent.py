"""Tiny GGUF language models without one of their keys or tensors.

tests/data/gguf_keys/absent.json has what llama.cpp does then; tests/record_gguf_absent.py records it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cache

from qdsl.models.gguf_maps import pattern_of
from tests.support import gguf_cases

VOCABULARY = "vocab_size"                                        # which files with tokens do not need


def absences(own: gguf_cases.Tiny) -> list[str]:
    """What is left out: a key; a tensor of the last layer; a tensor of all layers, with {block} for their numbers."""
    start = f"{own.recorded.architecture}."
    keys = [key for key in own.settings if key.startswith(start) and key != start + VOCABULARY]
    last = {pattern_of(name)[0]: name for name in own.tensors}
    return [*keys, *dict.fromkeys(name for pair in last.items() for name in reversed(pair))]


def without(own: gguf_cases.Tiny, name: str) -> gguf_cases.Tiny:
    """A model without a key or tensors."""
    tensors = {key: tensor for key, tensor in own.tensors.items() if name not in (key, pattern_of(key)[0])}
    return dataclasses.replace(own, tensors=tensors, settings={key: value for key, value in own.settings.items() if key != name})


@cache
def answers() -> Mapping[str, Mapping[str, Sequence[float] | None]]:
    """llama.cpp's logits by model type and absence: [] where they do not change, None where it refuses the file."""
    recorded: dict[str, dict[str, list[float] | None]] = json.loads((gguf_cases.FOLDER / "absent.json").read_text())
    return recorded


def refused(model_type: str) -> set[str]:
    """Keys without their architecture, and tensors with {block}, without which llama.cpp refuses the tiny file."""
    own = answers()[model_type]
    keys = {name.partition(".")[2] for name, answer in own.items() if answer is None}
    return keys | {pattern_of(name)[0] for name, answer in own.items() if answer is None}
