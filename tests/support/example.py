"""What `qdsl example` writes, with a tiny model in place of SmolLM2: what the commands of README and docs work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qdsl.jobs import example
from tests.support import gguf_models

# As in SmolLM2, blocks of 256 divide the rows of some layers alone; groups of any producer divide all, and so do three ranks.
SIZES: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 6,
                         "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 288, "tie_word_embeddings": True}


def tiny_model(folder: Path) -> Path:
    """The GGUF file of a tiny Llama with a vocabulary, in Q4_1 as SmolLM2's."""
    return gguf_models.written(folder, "llama", type="Q4_1", has_settings=True, has_vocabulary=True, **SIZES)[0]


def use(path: Path, patch: pytest.MonkeyPatch) -> None:
    """`qdsl example` takes this file, and asks for no package."""
    patch.setattr(example, "installed", lambda: path)
    patch.setattr(example, "check", lambda path: None)
