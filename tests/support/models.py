"""Tensor lists of language models as they stand in files, made up from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qdsl.quantize.mixes import Model, Tensor


@dataclass(frozen=True)
class Made:
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
        found = [("token_embd", (vocabulary, width)), ("output_norm", (width,))]
        found += [] if self.tied else [("output", (vocabulary, width))]
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
            found += [(f"blk.{layer}.{name}", shape) for name, shape in block]
        made = [Tensor(f"{name}.weight", shape, type) for name, shape in found]
        return [replace(each, type="F32") if len(each.shape) == 1 or "inp" in each.name else each for each in made]


MODELS = {
    "llama, 32 layers, as many values as heads": Made(Model("llama", 32, 32, 32), 4096, 11008),
    "llama, 32 layers, 4 heads to a value, tied": Made(Model("llama", 32, 32, 8), 4096, 14336, tied=True),
    "llama, 80 layers, 8 heads to a value": Made(Model("llama", 80, 64, 8), 8192, 28672),
    "llama, 8 experts": Made(Model("llama", 32, 32, 8, 8), 4096, 14336),
    "llama, 8 experts apart": Made(Model("llama", 12, 32, 8, 8), 4096, 14336, apart=True),
    "llama, 4 experts": Made(Model("llama", 17, 16, 8, 4), 1024, 2816, tied=True),
    "qwen2, rows of 896 and 4864, tied": Made(Model("qwen2", 24, 14, 2), 896, 4864, tied=True),
    "qwen2, 80 layers": Made(Model("qwen2", 80, 64, 8), 8192, 29568),
    "qwen3, 28 layers, 2 heads to a value": Made(Model("qwen3", 28, 16, 8), 1024, 3072),
    "qwen3moe, 128 experts": Made(Model("qwen3moe", 48, 32, 4, 128), 2048, 768),
}
