"""What is measured: one model, loaded in different ways, each in a process of its own.

Each side reads a prompt and writes an answer, the most probable token each time, whatever the token is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import llama_library

CONTEXT = 1024                                                   # tokens that a side has room for
START = 32                                                       # tokens before an answer


class Side(Protocol):
    """A loaded model.  about: what it is, for the results."""

    about: dict[str, str]

    def set_threads(self, count: int) -> None:
        """Use that many threads from now on."""

    def read(self, tokens: list[int]) -> int:
        """Read a prompt with an empty cache; the next token."""

    def write(self, token: int) -> int:
        """Append a token; the next one."""


class Llama:
    """llama.cpp with its default settings: products with x in 8 bits, and weights that it rearranges at load."""

    def __init__(self, path: Path, cpu: str | None = None) -> None:
        loaded = llama_library.library(cpu)
        self.ffi, self.functions = loaded.ffi, loaded.functions
        settings = self.functions.llama_model_default_params()
        settings.n_gpu_layers = 0
        model = self.functions.llama_model_load_from_file(str(path).encode(), settings)
        options = self.functions.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        self.context = self.functions.llama_init_from_model(model, options) if model != self.ffi.NULL else model
        if self.context == self.ffi.NULL:
            raise ValueError(f"{path}: refused by llama.cpp")
        self.size = self.functions.llama_vocab_n_tokens(self.functions.llama_model_get_vocab(model))
        self.about = {"backend": cpu or llama_library.fastest_cpu()}

    def set_threads(self, count: int) -> None:
        self.functions.llama_set_n_threads(self.context, count, count)

    def read(self, tokens: list[int]) -> int:
        self.functions.llama_memory_clear(self.functions.llama_get_memory(self.context), True)
        return self._next(tokens)

    def write(self, token: int) -> int:
        return self._next([token])

    def _next(self, tokens: list[int]) -> int:
        data = self.ffi.new("llama_token[]", tokens)
        if self.functions.llama_decode(self.context, self.functions.llama_batch_get_one(data, len(tokens))) != 0:
            raise ValueError("llama.cpp failed")
        logits = self.functions.llama_get_logits_ith(self.context, -1)
        return int(np.frombuffer(self.ffi.buffer(logits, 4 * self.size), np.float32).argmax())


class EagerModel:
    """A model of transformers, run in transformers' own eager loop."""

    def __init__(self, model: Any, about: dict[str, str]) -> None:
        import torch
        from transformers import DynamicCache

        self.torch, self.new_cache = torch, DynamicCache
        self.model, self.about = model, about

    def set_threads(self, count: int) -> None:
        self.torch.set_num_threads(count)

    def read(self, tokens: list[int]) -> int:
        self.cache = self.new_cache(config=self.model.config)
        return self._next(tokens)

    def write(self, token: int) -> int:
        return self._next([token])

    def _next(self, tokens: list[int]) -> int:
        with self.torch.no_grad():                               # as transformers' generate
            ids = self.torch.tensor([tokens])
            out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax())


class Transformers(EagerModel):
    """A model of a file with packed weights.

    change: is given the loaded model.
    """

    def __init__(self, path: Path, dtype: str = "auto", change: Callable[[Any], None] | None = None) -> None:
        from qdsl.models.transformers import from_pretrained

        model = from_pretrained(path, dtype=dtype)
        if change is not None:
            change(model)
        super().__init__(model, {"dtype": str(model.dtype).removeprefix("torch.")})


def make_dense(model: Any) -> None:
    """Decode all weights of a model to its dtype."""
    from qdsl.models.dense import make_dense as decode

    decode(model, model.dtype)


def make_hollow(model: Any) -> None:
    """Replace all linear layers with stubs that return zeros: what is left is what transformers and torch take."""
    import torch

    class Stub(torch.nn.Module):
        """Zeros of a linear layer's shape."""

        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(*x.shape[:-1], self.n)

    for name, module in list(model.named_modules()):
        if hasattr(module, "out_features"):
            model.set_submodule(name, Stub(module.out_features))


def _exact(path: Path, dtype: str) -> Side:
    os.environ["QDSL_CPU_INT8"] = "0"
    return Transformers(path, dtype)


def _int8(path: Path, dtype: str) -> Side:
    os.environ["QDSL_CPU_INT8"] = "1"
    return Transformers(path, dtype)


SIDES: Mapping[str, Callable[[Path, str], Side]] = {
    "llama.cpp": lambda path, dtype: Llama(path),
    "llama.cpp haswell": lambda path, dtype: Llama(path, "haswell"),
    "exact": _exact,
    "int8": _int8,
    "dense": lambda path, dtype: Transformers(path, "bfloat16", make_dense),
    "floor": lambda path, dtype: Transformers(path, dtype, make_hollow),
}
