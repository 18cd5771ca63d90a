"""llama.cpp's library by its C interface: tokens of a file, the tokens at which generation ends, and logits.

Where the library lies: see bench/llama_library.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.llama_library import folder, library

__all__ = ["LlamaVocabulary", "folder", "logits"]


def _library() -> tuple[Any, Any]:
    """cffi's interface and the functions, with a backend that rounds the same on every processor of the tests."""
    loaded = library("haswell")
    return loaded.ffi, loaded.functions


class LlamaVocabulary:
    """The vocabulary of a GGUF file in llama.cpp.  Raises ValueError for one that it refuses."""

    def __init__(self, path: Path) -> None:
        self._ffi, self._library = _library()
        settings = self._library.llama_model_default_params()
        settings.vocab_only = True
        self._model = self._library.llama_model_load_from_file(str(path).encode(), settings)
        if self._model == self._ffi.NULL:
            raise ValueError(f"{path}: refused by llama.cpp")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with special tokens before, after and in it."""
        encoded = text.encode()
        room = len(encoded) + 16
        buffer = self._ffi.new("llama_token[]", room)
        count = self._library.llama_tokenize(self._vocabulary, encoded, len(encoded), buffer, room, True, True)
        return [int(buffer[place]) for place in range(count)]

    def ends(self) -> list[int]:
        """The tokens at which generation ends."""
        count = self._library.llama_vocab_n_tokens(self._vocabulary)
        return [token for token in range(count) if self._library.llama_vocab_is_eog(self._vocabulary, token)]


def logits(path: Path, tokens: list[int]) -> Any:
    """The logits float32 [tokens, vocabulary] of a file's model, with keys and values in float32 and plain attention.

    Raises ValueError for a file that llama.cpp refuses.  Some mistakes end the process.
    """
    import numpy as np

    ffi, functions = _library()
    settings = functions.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = functions.llama_model_load_from_file(str(path).encode(), settings)
    if model == ffi.NULL:
        raise ValueError(f"{path}: refused by llama.cpp")
    options = functions.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0
    options.flash_attn_type = 0
    context = functions.llama_init_from_model(model, options)
    if context == ffi.NULL:
        raise ValueError(f"{path}: refused by llama.cpp")
    batch = functions.llama_batch_init(len(tokens), 0, 1)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
        batch.seq_id[place][0] = 0
    batch.n_tokens = len(tokens)
    if functions.llama_decode(context, batch) != 0:
        raise ValueError(f"{path}: llama.cpp does not run it")
    count = functions.llama_vocab_n_tokens(functions.llama_model_get_vocab(model))
    rows = [np.frombuffer(ffi.buffer(functions.llama_get_logits_ith(context, place), 4 * count), np.float32).copy()
            for place in range(len(tokens))]
    functions.llama_free(context)
    functions.llama_model_free(model)
    return np.stack(rows)
