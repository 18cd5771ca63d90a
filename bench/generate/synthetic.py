"""Writes a GGUF file of a Llama with 1.17 billion random weights in Q4_0: too large for the caches of most processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write

LAYERS, HIDDEN, INNER, HEADS, GROUPS, VOCABULARY = 16, 2048, 8832, 32, 8, 32000
BLOCK, BLOCK_BYTES = 32, 18                                      # of Q4_0: a scale in float16, then codes
KV = HIDDEN // HEADS * GROUPS
# [N, K] of the matrices of a layer
MATRICES = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KV, HIDDEN), "attn_v": (KV, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
DEVIATION = 21.25 ** 0.5                                         # of codes that are equally probable, -8 to 7
ROWS = 512                                                       # made at a time


def write_llama(path: Path) -> None:
    """Write the file, of 0.66 GB.  Products of its weights keep the magnitude of x, as those of a trained model do."""
    metadata = {
        "general.architecture": Value.of("string", "llama"), "general.type": Value.of("string", "model"),
        "llama.block_count": Value.of("u32", LAYERS), "llama.context_length": Value.of("u32", 4096),
        "llama.embedding_length": Value.of("u32", HIDDEN), "llama.feed_forward_length": Value.of("u32", INNER),
        "llama.attention.head_count": Value.of("u32", HEADS), "llama.attention.head_count_kv": Value.of("u32", GROUPS),
        "llama.rope.dimension_count": Value.of("u32", HIDDEN // HEADS),
        "llama.attention.layer_norm_rms_epsilon": Value.of("f32", 1e-5), "llama.vocab_size": Value.of("u32", VOCABULARY),
        "tokenizer.ggml.model": Value.of("string", "none")}
    tensors = [_matrix("token_embd", VOCABULARY, HIDDEN), _norm("output_norm"), _matrix("output", VOCABULARY, HIDDEN)]
    for layer in range(LAYERS):
        tensors += [_matrix(f"blk.{layer}.{name}", *shape) for name, shape in MATRICES.items()]
        tensors += [_norm(f"blk.{layer}.{name}") for name in ("attn_norm", "ffn_norm")]
    write(path, metadata, tensors)


def _norm(name: str) -> NewTensor:
    return NewTensor(f"{name}.weight", BY_NAME["F32"], (HIDDEN,), [np.ones(HIDDEN, np.float32).tobytes()])


def _matrix(name: str, n: int, k: int) -> NewTensor:
    return NewTensor(f"{name}.weight", BY_NAME["Q4_0"], (n, k), _blocks(sum(name.encode()), n, k))


def _blocks(seed: int, n: int, k: int) -> Iterator[bytes]:
    """Blocks of random codes with one scale."""
    random = np.random.default_rng(seed)
    for start in range(0, n, ROWS):
        blocks = random.integers(0, 256, (min(ROWS, n - start) * k // BLOCK, BLOCK_BYTES), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(k ** -0.5 / DEVIATION).tobytes(), np.uint8)
        yield blocks.tobytes()
