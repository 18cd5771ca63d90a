"""llama.cpp's library by its C interface: tokens of a file, the tokens at which generation ends, and logits.

QDSL_LLAMA_LIBRARY names a folder with libllama, as the npm package @node-llama-cpp/linux-x64 has it in bins/linux-x64, which
`make live` unpacks.  The declarations are those of the package llama-cpp-py-sync.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def folder() -> Path | None:
    """Where the library lies; None where it, or a package to call it, is not there."""
    variable = os.environ.get("QDSL_LLAMA_LIBRARY")
    places = [Path(variable)] if variable else sorted(ROOT.glob(".venv-live/node-llama/package/bins/linux-x64"))
    is_callable = find_spec("cffi") is not None and find_spec("llama_cpp_py_sync") is not None
    return next((place for place in places if is_callable and any(place.glob("libllama.*.so"))), None)


@cache
def _library() -> tuple[Any, Any]:
    import cffi
    from llama_cpp_py_sync import _cffi_bindings

    place = folder()
    assert place is not None
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")              # which takes a minute
    for pattern in ("libggml-base.so", "libggml.*.so"):
        ctypes.CDLL(str(next(place.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    ffi = cffi.FFI()
    ffi.cdef(_cffi_bindings._LLAMA_H_CDEF)
    library = ffi.dlopen(str(next(place.glob("libllama.*.so"))))
    silent = ffi.callback("void(enum ggml_log_level, const char*, void*)", lambda level, text, user: None)
    library.llama_log_set(silent, ffi.NULL)
    backends = ctypes.CDLL(str(next(place.glob("libggml.*.so"))))
    backends.ggml_backend_load.argtypes, backends.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
    backends.ggml_backend_load(str(place / "libggml-cpu-haswell.so").encode())
    library.llama_backend_init()
    return ffi, (library, silent)


class LlamaVocabulary:
    """The vocabulary of a GGUF file in llama.cpp.  Raises ValueError for one that it refuses."""

    def __init__(self, path: Path) -> None:
        self._ffi, (self._library, _) = _library()
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

    ffi, (library, _) = _library()
    settings = library.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(path).encode(), settings)
    if model == ffi.NULL:
        raise ValueError(f"{path}: refused by llama.cpp")
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0
    options.flash_attn_type = 0
    context = library.llama_init_from_model(model, options)
    if context == ffi.NULL:
        raise ValueError(f"{path}: refused by llama.cpp")
    batch = library.llama_batch_init(len(tokens), 0, 1)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
        batch.seq_id[place][0] = 0
    batch.n_tokens = len(tokens)
    if library.llama_decode(context, batch) != 0:
        raise ValueError(f"{path}: llama.cpp does not run it")
    count = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    rows = [np.frombuffer(ffi.buffer(library.llama_get_logits_ith(context, place), 4 * count), np.float32).copy()
            for place in range(len(tokens))]
    library.llama_free(context)
    library.llama_model_free(model)
    return np.stack(rows)
