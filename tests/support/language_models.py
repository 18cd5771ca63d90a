"""Tiny language models of transformers: their weights as checkpoints call them, and models filled with such weights."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.files.folder import Folder

HIDDEN, INNER, VOCABULARY = 256, 512, 192                        # sizes that blocks of all formats divide
PROJECTIONS = re.compile(r"\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.)?(gate|up|down)_proj)\.weight$")
EMBEDDINGS = re.compile(r"^(model\.embed_tokens|lm_head)\.weight$")
IDS = torch.arange(24).view(2, 12) * 7 % VOCABULARY              # two prompts
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "eos_token_id": None}
_EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}


@cache
def config(model: str) -> Any:
    """The config of a tiny model: qwen3, tied (Qwen3 whose head is its embedding), moe (Qwen3-MoE), mixtral or gpt_oss."""
    import transformers

    if model == "moe":                                           # with one dense layer
        config = transformers.Qwen3MoeConfig(**_SMALL, **_EXPERTS, intermediate_size=INNER, moe_intermediate_size=HIDDEN,
                                             num_experts=4, mlp_only_layers=[0], norm_topk_prob=True)
        config.architectures = ["Qwen3MoeForCausalLM"]
    elif model == "mixtral":
        config = transformers.MixtralConfig(**_SMALL, **_EXPERTS, intermediate_size=HIDDEN, num_local_experts=4)
        config.architectures = ["MixtralForCausalLM"]
    elif model == "gpt_oss":
        config = transformers.GptOssConfig(**_SMALL, **_EXPERTS, intermediate_size=HIDDEN, num_local_experts=4, sliding_window=8)
        config.architectures = ["GptOssForCausalLM"]
    else:
        config = transformers.Qwen3Config(**_SMALL, intermediate_size=INNER, tie_word_embeddings=model == "tied")
        config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    return config


def config_json(model: str) -> dict[str, Any]:
    """What the config.json of a tiny model holds."""
    content: dict[str, Any] = json.loads(config(model).to_json_string(use_diff=False))
    return content


@cache
def weights(model: str) -> Mapping[str, Tensor]:
    """The bfloat16 tensors of a tiny model by their names in checkpoints, experts one by one where those have them so.

    Rows differ in size, some columns are large, and norms are not ones: as in models that were trained.
    """
    import transformers

    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config(model), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as path:
        built.save_pretrained(path)
        with Folder(Path(path)) as folder:
            tensors = {name: folder.tensor(name).clone() for name in sorted(folder.names())}
    draw = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            noise = 0.1 * torch.randn(tensor.shape, generator=draw)
            tensors[name] = ((1 if name.endswith("norm.weight") else 0) + noise).bfloat16()
        else:
            rows = (0.4 * torch.randn(*tensor.shape[:-1], 1, generator=draw)).exp()
            columns = torch.where(torch.rand(tensor.shape[-1], generator=draw) < 0.02, 4.0, 1.0)
            tensors[name] = (tensor.float() * rows * columns * 2).bfloat16()
    return tensors


def is_projection(name: str) -> bool:
    """Whether producers quantize the weight of this name: a projection of attention, a feed-forward layer or an expert."""
    return PROJECTIONS.search(name) is not None


def is_embedding(name: str) -> bool:
    """Whether this is the weight of the embedding or the head."""
    return EMBEDDINGS.search(name) is not None


def filled(model: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model of transformers with these plain weights, named as in checkpoints, loaded by transformers alone."""
    import transformers

    kind = getattr(transformers, config(model).architectures[0])
    plain = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    loaded, report = kind.from_pretrained(None, config=config(model), state_dict=plain, dtype=dtype, output_loading_info=True)
    missing = set(report["missing_keys"]) - ({"lm_head.weight"} if model == "tied" else set())
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return loaded.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """A model's logits [2, 12, vocabulary] for two prompts."""
    result: Tensor = model(IDS).logits
    return result


@torch.no_grad()
def greedy(model: Any, count: int = 8) -> Tensor:
    """The `count` tokens [2, count] with which a model goes on with two prompts, the likeliest each time."""
    tokens: Tensor = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=count, min_new_tokens=count,
                                    do_sample=False)
    return tokens[:, IDS.shape[1]:]


def write_plain(folder: Path, model: str) -> Path:
    """Write a bfloat16 checkpoint of a tiny model, and return its folder."""
    from qdsl.checkpoint.files.safetensors import write

    config(model).save_pretrained(folder)
    write(folder / "model.safetensors", dict(weights(model)), {"format": "pt"})
    return folder


def add_tokenizer(folder: Path, **options: Any) -> Path:
    """A tokenizer of printable characters, one token each."""
    import string

    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token=" "))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token=" ", **options).save_pretrained(folder)
    return folder


def add_byte_tokenizer(folder: Path, text: Sequence[str]) -> Path:
    """A small byte-level BPE tokenizer of a text, with a chat template."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel()
    special = ["<pad>", "<|start|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(" word", normalized=False)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>",
                                                pad_token="<pad>", chat_template="{{ messages[0].content }}")
    fast.save_pretrained(folder)
    return folder
