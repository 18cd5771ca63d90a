"""Tiny models of diffusers, their inputs, and their tensors under the names of the models' authors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor

from qdsl.checkpoint.ggml_types import BY_NAME
from qdsl.checkpoint.gguf_metadata import Value
from qdsl.checkpoint.gguf_write import NewTensor
from qdsl.checkpoint.gguf_write import write as write_gguf
from qdsl.checkpoint.safetensors import bytes_of
from tests.support import language_models

QKV = (("to_q", "qkv#0"), ("to_k", "qkv#1"), ("to_v", "qkv#2"))


@dataclass(frozen=True)
class Tiny:
    """A class of diffusers with a config of few numbers.

    original: regular expressions of its names and what the authors' files have in their place, applied in order.  '#0', '#1', ...
    are parts of one tensor, '#swap' has its halves the other way round.  inputs: shapes of tensors that `forward` takes.
    """

    config: Mapping[str, Any]
    original: Sequence[tuple[str, str]] = ()
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _qkv(pattern: str, replacement: str, names: Sequence[str] = ("to_q", "to_k", "to_v")) -> list[tuple[str, str]]:
    return [(pattern + name, f"{replacement}#{part}") for part, name in enumerate(names)]


ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
Z_IMAGE = [*_qkv(r"attention\.", "attention.qkv"), (r"attention\.to_out\.0", "attention.out"), (r"attention\.norm_([qk])", r"attention.\1_norm"),
           ("all_final_layer.2-1", "final_layer"), ("all_x_embedder.2-1", "x_embedder")]
FLUX2 = [
    *_qkv(r"^transformer_blocks\.(\d+)\.attn\.", r"double_blocks.\1.img_attn.qkv"),
    *_qkv(r"^transformer_blocks\.(\d+)\.attn\.", r"double_blocks.\1.txt_attn.qkv", ADDED),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_q.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_k.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_added_q.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_added_k.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
    (r"^transformer_blocks\.(\d+)\.ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
    (r"^transformer_blocks\.(\d+)\.ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
    (r"^transformer_blocks\.(\d+)\.ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
    (r"^transformer_blocks\.(\d+)\.ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k.weight", r"single_blocks.\1.norm.key_norm.scale"),
    ("^x_embedder", "img_in"), ("^context_embedder", "txt_in"), (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"), (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"),
    ("^proj_out", "final_layer.linear"), (r"^norm_out\.linear", "final_layer.adaLN_modulation.1#swap")]
SD3 = [
    *_qkv(r"^transformer_blocks\.(\d+)\.attn\.", r"joint_blocks.\1.x_block.attn.qkv"),
    *_qkv(r"^transformer_blocks\.(\d+)\.attn\.", r"joint_blocks.\1.context_block.attn.qkv", ADDED),
    *_qkv(r"^transformer_blocks\.(\d+)\.attn2\.", r"joint_blocks.\1.x_block.attn2.qkv"),
    (r"^transformer_blocks\.(\d+)\.(attn2?)\.to_out\.0", r"joint_blocks.\1.x_block.\2.proj"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
    (r"^transformer_blocks\.(\d+)\.(attn2?)\.norm_([qk])", r"joint_blocks.\1.x_block.\2.ln_\3"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_added_([qk])", r"joint_blocks.\1.context_block.attn.ln_\2"),
    (r"^transformer_blocks\.(\d+)\.norm1\.linear", r"joint_blocks.\1.x_block.adaLN_modulation.1"),
    (r"^transformer_blocks\.1\.norm1_context\.linear", "joint_blocks.1.context_block.adaLN_modulation.1#swap"),      # the last block
    (r"^transformer_blocks\.(\d+)\.norm1_context\.linear", r"joint_blocks.\1.context_block.adaLN_modulation.1"),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.0\.proj", r"joint_blocks.\1.x_block.mlp.fc1"),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.2", r"joint_blocks.\1.x_block.mlp.fc2"),
    (r"^transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj", r"joint_blocks.\1.context_block.mlp.fc1"),
    (r"^transformer_blocks\.(\d+)\.ff_context\.net\.2", r"joint_blocks.\1.context_block.mlp.fc2"),
    (r"^pos_embed\.proj", "x_embedder.proj"), (r"^pos_embed\.pos_embed", "pos_embed"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"), (r"^time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"), (r"^time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
    ("^proj_out", "final_layer.linear"), (r"^norm_out\.linear", "final_layer.adaLN_modulation.1#swap")]
WAN = [
    (r"attn1\.", "self_attn."), (r"attn2\.", "cross_attn."), (r"\.to_out\.0\.", ".o."), (r"\.to_([qkv])\.", r".\1."),
    (r"^scale_shift_table", "head.modulation"), (r"scale_shift_table", "modulation"), ("^proj_out", "head.head"),
    (r"ffn\.net\.0\.proj", "ffn.0"), (r"ffn\.net\.2", "ffn.2"), (r"\.norm2\.", ".norm3."),
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"), (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"), (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1")]
LTX = [("^proj_in", "patchify_proj"), ("^time_embed", "adaln_single"), (r"\.norm_([qk])\.", r".\1_norm.")]

TINY: dict[str, Tiny] = {
    "ZImageTransformer2DModel": Tiny(
        dict(dim=256, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=64, axes_lens=[64, 32, 32]), Z_IMAGE),
    "Flux2Transformer2DModel": Tiny(
        dict(num_layers=2, num_single_layers=1, num_attention_heads=2, joint_attention_dim=256, in_channels=32, guidance_embeds=False),
        FLUX2, {"hidden_states": (1, 6, 32), "encoder_hidden_states": (1, 4, 256), "timestep": (1,), "img_ids": (1, 6, 4),
                "txt_ids": (1, 4, 4)}),
    "QwenImageTransformer2DModel": Tiny(
        dict(num_layers=1, num_attention_heads=2, joint_attention_dim=256),
        (), {"hidden_states": (1, 6, 64), "encoder_hidden_states": (1, 4, 256), "encoder_hidden_states_mask": (1, 4), "timestep": (1,)}),
    "SD3Transformer2DModel": Tiny(
        dict(sample_size=8, num_layers=2, num_attention_heads=4, joint_attention_dim=256, caption_projection_dim=256,
             pooled_projection_dim=256, pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm"),
        SD3, {"hidden_states": (1, 16, 8, 8), "encoder_hidden_states": (1, 4, 256), "pooled_projections": (1, 256), "timestep": (1,)}),
    "WanTransformer3DModel": Tiny(
        dict(num_attention_heads=2, ffn_dim=512, text_dim=256, num_layers=1),
        WAN, {"hidden_states": (1, 16, 1, 8, 8), "timestep": (1,), "encoder_hidden_states": (1, 4, 256)}),
    "LTXVideoTransformer3DModel": Tiny(
        dict(in_channels=32, out_channels=32, num_attention_heads=4, cross_attention_dim=256, num_layers=1, caption_channels=256),
        LTX, {"hidden_states": (1, 4, 32), "encoder_hidden_states": (1, 4, 256), "encoder_attention_mask": (1, 4), "timestep": (1,)}),
}
OTHERS: dict[str, dict[str, Any]] = {                            # of inputs that are no random tensors
    "QwenImageTransformer2DModel": {"img_shapes": [[(1, 2, 3)]]},
    "LTXVideoTransformer3DModel": {"num_frames": 1, "height": 2, "width": 2},
}


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with random numbers in all parameters, those of norms around 1."""
    model = getattr(diffusers, name)(**TINY[name].config)
    generator = torch.Generator().manual_seed(0)
    for own, parameter in model.named_parameters():
        center = 1.0 if "norm" in own and parameter.dim() == 1 and own.endswith("weight") else 0.0
        parameter.data = center + torch.randn(parameter.shape, generator=generator) * 0.05
    return model.to(dtype).eval()


def output(model: Any) -> Tensor:
    """What a tiny model computes of random inputs in float32."""
    name, generator = type(model).__name__, torch.Generator().manual_seed(1)
    with torch.no_grad():
        if name.startswith("ZImage"):
            x, features = torch.randn(16, 1, 8, 8, generator=generator), torch.randn(4, 64, generator=generator)
            dtype = model.dtype
            return model([x.to(dtype)], torch.tensor([0.5]).to(dtype), [features.to(dtype)], return_dict=False)[0][0].float()
        inputs = {own: torch.rand(shape, generator=generator).to(model.dtype) for own, shape in TINY[name].inputs.items()}
        inputs |= {own: torch.ones_like(inputs[own]) for own in inputs if own.endswith("_mask")}
        return model(**inputs, **OTHERS.get(name, {}), return_dict=False)[0].float()


def original(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors as the files of its authors have them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for own, tensor in tensors.items():
        for pattern, replacement in TINY[name].original:
            own = re.sub(pattern, replacement, own)
        marks = re.findall(r"#(\w+)", own)
        parts.setdefault(re.sub(r"#\w+", "", own), {})[marks[0] if marks else "0"] = tensor
    return {own: torch.cat(tensor["swap"].chunk(2)[::-1]) if "swap" in tensor else torch.cat([tensor[key] for key in sorted(tensor)])
            if len(tensor) > 1 else tensor["0"] for own, tensor in parts.items()}


def converted(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the library's converter makes of the tensors of a file."""
    result: dict[str, Tensor] = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"](
        checkpoint=dict(tensors), config=dict(config))
    return result


@cache
def _columns(type: str) -> int:
    return BY_NAME[type].elements


def packs(name: str, tensor: Tensor, type: str) -> bool:
    """Whether a file of this type has a tensor in blocks."""
    return tensor.dim() == 2 and tensor.shape[1] % _columns(type) == 0 and "norm" not in name


def write_file(path: Path, tensors: Mapping[str, Tensor], blocks: Mapping[str, tuple[str, bytes]]) -> Path:
    """Write a GGUF file; blocks: type and bytes of the tensors that are not F32."""
    new = []
    for name, tensor in tensors.items():
        type, data = blocks.get(name, ("F32", b""))
        shape = tuple(tensor.shape)
        new.append(NewTensor(name, BY_NAME[type], shape, [data or bytes_of(tensor.float().contiguous())]))
    write_gguf(path, {"general.architecture": Value.of("string", "diffusion")}, new)
    return path


def write_config(folder: Path, name: str) -> Path:
    """A folder with the config of a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": name, **TINY[name].config}))
    return folder


def write_pipeline(folder: Path) -> Path:
    """A whole tiny ZImagePipeline in bfloat16, whose tokenizer has a token for each printable character."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
                                      num_attention_heads=2, num_key_value_heads=1)
    vae = diffusers.AutoencoderKL(block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=16,
                                  down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                                  scaling_factor=0.36, shift_factor=0.11)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = language_models.add_tokenizer(folder / "tokenizer", chat_template=template, pad_token=" ")
    pipeline = diffusers.ZImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, transformers.Qwen3Model(config).eval(),
        transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer), random_model("ZImageTransformer2DModel"))
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    return folder


def image(pipeline: Any, **options: Any) -> Tensor:
    """The picture of a prompt in two steps, as numbers."""
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a fox", height=32, width=32, num_inference_steps=2, guidance_scale=0.0, output_type="pt",
                       generator=torch.Generator().manual_seed(0), **options).images
    return torch.as_tensor(picture).float()


def count(shape: Sequence[int]) -> int:
    return math.prod(shape)
