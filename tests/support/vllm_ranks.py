"""vLLM's parallel layers on ranks that one process takes in turn: `python -m tests.support.vllm_ranks FOLDERS RANKS`.

FOLDERS and RANKS are JSON lists.  It prints a line of JSON behind RESULT: by folder and number of ranks, the largest error of
all products and rows, relative to the largest of the decoded layer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qdsl
from tests.support.vllm_engine import MARK

HIDDEN, HEADS, KV, WIDTH, INNER, VOCABULARY = 512, 16, 4, 64, 2048, 496
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
FUSED = {"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}, "gate_up_proj": {"gate_proj": 0, "up_proj": 1}}


class Ranks:
    """The ranks that vLLM's modules believe in."""

    def __init__(self) -> None:
        import vllm.model_executor.layers.linear as linear
        import vllm.model_executor.layers.vocab_parallel_embedding as vocabulary
        import vllm.model_executor.parameter as parameter

        self.rank, self.size = 0, 1
        for module in (linear, vocabulary, parameter):
            module.get_tensor_model_parallel_rank = lambda: self.rank
            module.get_tensor_model_parallel_world_size = lambda: self.size
        vocabulary.tensor_model_parallel_all_reduce = lambda x: x


def modules(config: Any) -> dict[str, Any]:
    """The modules of one block, embedding and head of this rank."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    def build(kind: Callable[..., Any], name: str, *sizes: Any, **options: Any) -> Any:
        return kind(*sizes, quant_config=config, params_dtype=torch.float32, prefix=name, **options)

    return {
        f"{ATTENTION}qkv_proj": build(QKVParallelLinear, f"{ATTENTION}qkv_proj", HIDDEN, WIDTH, HEADS, KV, bias=False),
        f"{ATTENTION}o_proj": build(RowParallelLinear, f"{ATTENTION}o_proj", HEADS * WIDTH, HIDDEN, bias=False,
                                   reduce_results=False),
        f"{MLP}gate_up_proj": build(MergedColumnParallelLinear, f"{MLP}gate_up_proj", HIDDEN, [INNER, INNER], bias=False),
        f"{MLP}down_proj": build(RowParallelLinear, f"{MLP}down_proj", INNER, HIDDEN, bias=False, reduce_results=False),
        "model.embed_tokens": build(VocabParallelEmbedding, "model.embed_tokens", VOCABULARY, HIDDEN),
        "lm_head": build(ParallelLMHead, "lm_head", VOCABULARY, HIDDEN),
    }


def loaded(path: str) -> dict[str, Any]:
    """The modules of this rank, filled as vLLM's loader does."""
    from qdsl.models.vllm.config import QdslConfig

    config = QdslConfig({"quant_method": "qdsl"})
    config.packed_modules_mapping = {name: list(parts) for name, parts in FUSED.items()}
    config.maybe_update_config(path)
    own = modules(config)
    places = {part: (name, shard) for name, parts in FUSED.items() for part, shard in parts.items()}
    with qdsl.open(path) as checkpoint:
        for layer in checkpoint.layers.values():
            for full in layer.tensors.values():
                parent, _, last = layer.name.rpartition(".")
                name, shard = places.get(last, (last, None))
                param = own[f"{parent}.{name}".lstrip(".")].get_parameter(full[len(layer.name) + 1:])
                param.weight_loader(param, checkpoint.source.tensor(full), *([] if shard is None else [shard]))
    for module in own.values():
        module.quant_method.process_weights_after_loading(module)
    return own


def errors(path: str, ranks: Ranks, size: int) -> float:
    """The largest relative error of all ranks' products."""
    draw = torch.Generator().manual_seed(0)
    x, heads, inner = (torch.randn(5, width, generator=draw) for width in (HIDDEN, HEADS * WIDTH, INNER))
    with qdsl.open(path) as checkpoint:
        dense = {name: checkpoint.weight(name, dtype=torch.float32) for name in checkpoint.layers}
    pairs: list[tuple[Tensor, Tensor]] = []
    sums = {f"{ATTENTION}o_proj": torch.zeros(5, HIDDEN), f"{MLP}down_proj": torch.zeros(5, HIDDEN)}
    ids, looked_up = torch.arange(VOCABULARY), torch.zeros(VOCABULARY, HIDDEN)
    ranks.size = size
    for ranks.rank in range(size):
        own, copies = loaded(path), max(1, size // KV)
        parts = [(f"{ATTENTION}q_proj", ranks.rank, size), *((f"{ATTENTION}{name}_proj", ranks.rank // copies, size // copies)
                                                             for name in "kv")]
        gate_up = [x @ dense[f"{MLP}{name}_proj"].chunk(size)[ranks.rank].T for name in ("gate", "up")]
        pairs.append((own[f"{MLP}gate_up_proj"](x)[0], torch.cat(gate_up, 1)))
        qkv = [x @ dense[name].chunk(count)[rank].T for name, rank, count in parts]
        pairs.append((own[f"{ATTENTION}qkv_proj"](x)[0], torch.cat(qkv, 1)))
        for name, wide in ((f"{ATTENTION}o_proj", heads), (f"{MLP}down_proj", inner)):
            sums[name] += own[name](wide.chunk(size, 1)[ranks.rank].contiguous())[0]
        looked_up += own["model.embed_tokens"](ids)
        head = own["lm_head"]
        product = head.quant_method.apply(head, x)
        rows = slice(head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index)
        wanted = x @ dense["lm_head"][rows].T
        pairs.append((product, torch.nn.functional.pad(wanted, (0, product.shape[1] - wanted.shape[1]))))
    pairs += [(sums[name], wide @ dense[name].T) for name, wide in ((f"{ATTENTION}o_proj", heads), (f"{MLP}down_proj", inner))]
    pairs.append((looked_up, dense["model.embed_tokens"]))
    return max(float((product - wanted).abs().max() / wanted.abs().max()) for product, wanted in pairs)


def main() -> None:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    torch.set_num_threads(1)
    ranks = Ranks()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        result = {path: {size: errors(path, ranks, size) for size in json.loads(sys.argv[2])} for path in json.loads(sys.argv[1])}
    print(MARK + json.dumps(result))


if __name__ == "__main__":
    main()
