"""Language models made up from a few numbers: their tensor lists, as they stand in files, and small ones as files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from qdsl.jobs.gguf.mixes import Model, Tensor


@dataclass(frozen=True)
class ToyModel:
    """A model: width of its rows, of its feed-forward part and of a head; experts in one tensor each, or apart as once."""

    model: Model
    width: int
    inner: int
    tied: bool = False
    apart: bool = False

    def tensors(self, type: str = "F16", vocabulary: int = 512) -> list[Tensor]:
        """All tensors, vectors in float32."""
        model, width, inner = self.model, self.width, self.inner
        narrow = width // model.heads_per_kv
        named_shapes = [("token_embd", (vocabulary, width)), ("output_norm", (width,))]
        named_shapes += [] if self.tied else [("output", (vocabulary, width))]
        for layer in range(model.layers):
            block = [("attn_norm", (width,)), ("ffn_norm", (width,)), ("attn_q", (width, width)), ("attn_k", (narrow, width)),
                     ("attn_v", (narrow, width)), ("attn_output", (width, width))]
            shapes = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
            if model.experts and self.apart:
                block += [(f"{name}.{expert}", shape) for name, shape in shapes.items() for expert in range(model.experts)]
            elif model.experts:
                block += [(f"{name}_exps", (model.experts, *shape)) for name, shape in shapes.items()]
            else:
                block += list(shapes.items())
            block += [("ffn_gate_inp", (model.experts, width))] if model.experts else []
            named_shapes += [(f"blk.{layer}.{name}", shape) for name, shape in block]
        tensors = [Tensor(f"{name}.weight", shape, type) for name, shape in named_shapes]
        return [replace(tensor, type="F32") if len(tensor.shape) == 1 or "inp" in tensor.name else tensor for tensor in tensors]


MODELS = {
    "llama, 32 layers, as many values as heads": ToyModel(Model("llama", 32, 32, 32), 4096, 11008),
    "llama, 32 layers, 4 heads to a value, tied": ToyModel(Model("llama", 32, 32, 8), 4096, 14336, tied=True),
    "llama, 80 layers, 8 heads to a value": ToyModel(Model("llama", 80, 64, 8), 8192, 28672),
    "llama, 8 experts": ToyModel(Model("llama", 32, 32, 8, 8), 4096, 14336),
    "llama, 8 experts apart": ToyModel(Model("llama", 12, 32, 8, 8), 4096, 14336, apart=True),
    "llama, 4 experts": ToyModel(Model("llama", 17, 16, 8, 4), 1024, 2816, tied=True),
    "qwen2, rows of 896 and 4864, tied": ToyModel(Model("qwen2", 24, 14, 2), 896, 4864, tied=True),
    "qwen2, 80 layers": ToyModel(Model("qwen2", 80, 64, 8), 8192, 29568),
    "qwen3, 28 layers, 2 heads to a value": ToyModel(Model("qwen3", 28, 16, 8), 1024, 3072),
    "qwen3moe, 128 experts": ToyModel(Model("qwen3moe", 48, 32, 4, 128), 2048, 768),
}


def weights(toy: ToyModel) -> dict[str, np.ndarray]:
    """Small weights of a small model: matrices in F16, vectors in F32."""
    draw = np.random.default_rng(0)
    return {tensor.name: (draw.standard_normal(tensor.shape) * 0.02).astype(np.float32 if tensor.type == "F32" else np.float16)
            for tensor in toy.tensors("F16", vocabulary=48)}


def written(path: Path, toy: ToyModel, tensors: Mapping[str, np.ndarray] | None = None, architecture: str | None = None) -> Path:
    """A model in a GGUF file, as other software writes it."""
    name = architecture or toy.model.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(toy.model.layers)
    writer.add_head_count(toy.model.heads)
    writer.add_head_count_kv(toy.model.heads_kv)
    writer.add_expert_count(toy.model.experts)
    writer.add_file_type(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    for key, tensor in (weights(toy) if tensors is None else tensors).items():
        writer.add_tensor(key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
