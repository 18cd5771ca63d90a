"""Tiny models of diffusers, their inputs, and their tensors under the names of the models' authors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.checkpoint.files.gguf_write import write as write_gguf
from qdsl.checkpoint.files.safetensors import bytes_of
from qdsl.jobs.gguf.author_names import author_parts
from tests.support import converter_names as names
from tests.support import language_models


@dataclass(frozen=True)
class Tiny:
    """A class of diffusers with a config of few numbers.

    original: its table in converter_names.  inputs: shapes of tensors that `forward` takes.
    """

    config: Mapping[str, Any]
    original: Sequence[tuple[str, str]] = ()
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def tiny(original: Sequence[tuple[str, str]], inputs: Mapping[str, tuple[int, ...]] | None = None, **config: Any) -> Tiny:
    return Tiny(config, original, inputs or {})


TEXT = {"encoder_hidden_states": (1, 4, 256), "timestep": (1,)}
TINY: dict[str, Tiny] = {
    "ZImageTransformer2DModel": tiny(
        names.Z_IMAGE,
        dim=256, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=64, axes_lens=[64, 32, 32]),
    "Flux2Transformer2DModel": tiny(
        names.FLUX2, {"hidden_states": (1, 6, 32), **TEXT, "img_ids": (1, 6, 4), "txt_ids": (1, 4, 4)}, num_layers=2,
        num_single_layers=1, num_attention_heads=2, joint_attention_dim=256, in_channels=32, guidance_embeds=False),
    "QwenImageTransformer2DModel": tiny(
        (), {"hidden_states": (1, 6, 64), **TEXT, "encoder_hidden_states_mask": (1, 4)}, num_layers=1, num_attention_heads=2,
        joint_attention_dim=256),
    "SD3Transformer2DModel": tiny(
        names.SD3, {"hidden_states": (1, 16, 8, 8), **TEXT, "pooled_projections": (1, 256)}, sample_size=8, num_layers=2,
        num_attention_heads=4, joint_attention_dim=256, caption_projection_dim=256, pooled_projection_dim=256,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm"),
    "WanTransformer3DModel": tiny(
        names.WAN, {"hidden_states": (1, 16, 1, 8, 8), **TEXT}, num_attention_heads=2, ffn_dim=512, text_dim=256, num_layers=1),
    "LTXVideoTransformer3DModel": tiny(
        names.LTX, {"hidden_states": (1, 4, 32), **TEXT, "encoder_attention_mask": (1, 4)}, in_channels=32, out_channels=32,
        num_attention_heads=4, cross_attention_dim=256, num_layers=1, caption_channels=256),
    # of these, weights alone
    "AuraFlowTransformer2DModel": tiny(
        names.AURA_FLOW, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, caption_projection_dim=64, pos_embed_max_size=16),
    "ChronoEditTransformer3DModel": tiny(
        names.WAN, num_attention_heads=2, attention_head_dim=32, ffn_dim=64, text_dim=64, num_layers=1),
    "CosmosTransformer3DModel": tiny(
        names.COSMOS, num_attention_heads=2, attention_head_dim=32, num_layers=1, text_embed_dim=64, adaln_lora_dim=32,
        extra_pos_embed_type=None),
    "ErnieImageTransformer2DModel": tiny(
        (), hidden_size=64, num_attention_heads=2, num_layers=1, ffn_hidden_size=128, text_in_dim=64, rope_axes_dim=(8, 12, 12)),
    "Flux3Transformer2DModel": tiny(
        names.FLUX3, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, axes_dims_rope=(8, 8, 8, 8)),
    "HiDreamImageTransformer2DModel": tiny(
        (), patch_size=2, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        caption_channels=[64, 64], text_emb_dim=64, axes_dims_rope=(16, 16), max_resolution=(8, 8), llama_layers=[0, 1]),
    "MiniMaxH3Transformer3DModel": tiny(
        names.MINIMAX, num_attention_heads=2, attention_head_dim=32, hidden_size=64, num_layers=1, num_refiner_layers=1,
        ffn_dim=128, text_dim=64, time_embed_hidden_dim=64, time_embed_dim=32),
    "MotifVideoTransformer3DModel": tiny(
        (), num_attention_heads=2, attention_head_dim=32, num_layers=1, num_single_layers=1, text_embed_dim=64,
        rope_axes_dim=(8, 12, 12)),
    "QwenImage21Transformer2DModel": tiny(
        names.QWEN21, num_layers=1, attention_head_dim=32, num_attention_heads=2, context_in_dim=64,
        axes_dims_rope=(8, 12, 12)),
    "SanaTransformer2DModel": tiny(
        names.SANA, num_attention_heads=2, num_layers=1, num_cross_attention_heads=2, cross_attention_head_dim=32,
        cross_attention_dim=64, caption_channels=64),
    "SkyReelsV2Transformer3DModel": tiny(
        names.WAN, num_attention_heads=2, attention_head_dim=32, ffn_dim=64, text_dim=64, num_layers=1),
    "WanAnimate2Transformer3DModel": tiny(
        names.WAN_ANIMATE2, dim=64, ffn_dim=128, text_dim=64, num_heads=2, num_layers=1, use_img_emb=False),
    "WanVACETransformer3DModel": tiny(
        names.WAN, num_attention_heads=2, attention_head_dim=32, ffn_dim=64, text_dim=64, num_layers=2, vace_layers=[0]),
}
# Classes whose converters have the width or the depth of the published model, or whose names are too long for GGUF files.
WIDE: dict[str, Tiny] = {
    "ChromaTransformer2DModel": tiny(names.CHROMA, num_layers=1, num_single_layers=1),
    "FluxTransformer2DModel": tiny(names.FLUX1, num_layers=1, num_single_layers=1, guidance_embeds=True),
    "HunyuanVideoTransformer3DModel": tiny(names.HUNYUAN, num_layers=1, num_single_layers=1, num_refiner_layers=1),
    "LTX2VideoTransformer3DModel": tiny(
        names.LTX2, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, audio_num_attention_heads=2,
        audio_attention_head_dim=32, audio_cross_attention_dim=64, num_layers=1, caption_channels=64),
    "Lumina2Transformer2DModel": tiny(names.LUMINA2, num_layers=1),
    "MochiTransformer3DModel": tiny(names.MOCHI),
}
UNUSED = {"SanaTransformer2DModel": {"pos_embed": (1, 4, 64), "y_embedder.y_embedding": (4, 64)}}      # by their converters
OTHERS: dict[str, dict[str, Any]] = {                            # of inputs that are no random tensors
    "QwenImageTransformer2DModel": {"img_shapes": [[(1, 2, 3)]]},
    "LTXVideoTransformer3DModel": {"num_frames": 1, "height": 2, "width": 2},
}


def runs(name: str) -> bool:
    """Whether `output` runs a class."""
    return bool(TINY[name].inputs) or name.startswith("ZImage")


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with random numbers in all parameters, those of norms around 1."""
    model = getattr(diffusers, name)(**TINY[name].config)
    generator = torch.Generator().manual_seed(0)
    for own, parameter in model.named_parameters():
        center = 1.0 if "norm" in own and parameter.dim() == 1 and own.endswith("weight") else 0.0
        parameter.data = center + torch.randn(parameter.shape, generator=generator) * 0.05
    return (model if dtype == torch.float32 else model.to(dtype)).eval()


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
    parts = author_parts((TINY | WIDE)[name].original, {own: tuple(tensor.shape) for own, tensor in tensors.items()})
    return {own: torch.cat([tensors[part.name][part.start:part.stop] for part in rows]) if len(rows) > 1
            else tensors[rows[0].name] for own, rows in parts.items()}


def flux1_shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes of FLUX.1-dev's file, as its authors publish it."""
    d = 3072
    sizes: dict[str, tuple[int, ...]] = {
        "img_in": (d, 64), "txt_in": (d, 4096), "final_layer.linear": (64, d), "final_layer.adaLN_modulation.1": (2 * d, d),
        **{f"{name}_in.in_layer": (d, k) for name, k in (("time", 256), ("guidance", 256), ("vector", 768))},
        **{f"{name}_in.out_layer": (d, d) for name in ("time", "guidance", "vector")}}
    norms: list[str] = []
    for block in range(19):
        for stream in ("img", "txt"):
            parts = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.0": (4 * d, d), "mlp.2": (d, 4 * d), "mod.lin": (6 * d, d)}
            sizes |= {f"double_blocks.{block}.{stream}_{part}": shape for part, shape in parts.items()}
            norms += [f"double_blocks.{block}.{stream}_attn.norm.{part}_norm.scale" for part in ("query", "key")]
    for block in range(38):
        parts = {"linear1": (7 * d, d), "linear2": (d, 5 * d), "modulation.lin": (3 * d, d)}
        sizes |= {f"single_blocks.{block}.{part}": shape for part, shape in parts.items()}
        norms += [f"single_blocks.{block}.norm.{part}_norm.scale" for part in ("query", "key")]
    shapes = {f"{name}.weight": shape for name, shape in sizes.items()}
    return shapes | {f"{name}.bias": shape[:1] for name, shape in sizes.items()} | dict.fromkeys(norms, (128,))


def converted(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the library's converter makes of the tensors of a file."""
    result: dict[str, Tensor] = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"](
        checkpoint=dict(tensors), config=dict(config))
    return result


def packs(name: str, tensor: Tensor, type: str) -> bool:
    """Whether a file of this type has a tensor in blocks."""
    return tensor.dim() == 2 and tensor.shape[1] % BY_NAME[type].elements == 0 and "norm" not in name


def write_file(path: Path, tensors: Mapping[str, Tensor], blocks: Mapping[str, tuple[str, bytes]]) -> Path:
    """Write a GGUF file; blocks: type and bytes of the tensors that are not F32."""
    new = []
    for name, tensor in tensors.items():
        type, data = blocks.get(name, ("F32", b""))
        shape = tuple(tensor.shape)
        new.append(NewTensor(name, BY_NAME[type], shape, [data or bytes_of(tensor.float().contiguous())]))
    write_gguf(path, {"general.architecture": Value.of("string", "diffusion")}, new)
    return path


def write_gguf_model(path: Path, model: Any, types: str = "Q8_0") -> dict[str, Tensor]:
    """Write a model's GGUF file with the authors' names, by the package gguf; the numbers that it decodes.

    types: of matrices, which have them in turn.
    """
    blocks, numbers = {}, original(type(model).__name__, model.float().state_dict())
    shapes, turns = dict(numbers), cycle(types.split())
    for name, tensor in numbers.items():
        if packs(name, tensor, "Q8_0"):
            kind = GGMLQuantizationType[next(turns)]
            codes = quants.quantize(tensor.numpy(), kind)
            blocks[name] = (kind.name, codes.tobytes())
            numbers[name] = torch.from_numpy(quants.dequantize(codes, kind).copy())
    write_file(path, shapes, blocks)
    return numbers


def write_config(folder: Path, name: str) -> Path:
    """A folder with the config of a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": name, **TINY[name].config}))
    return folder


def tokenizer(folder: Path) -> Any:
    """A tokenizer that has a token for each printable character, and a template of chats that is the messages alone."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    path = language_models.add_tokenizer(folder, chat_template=template, pad_token=" ")
    return transformers.PreTrainedTokenizerFast.from_pretrained(path)


def klein_pipeline(folder: Path) -> Any:
    """A tiny Flux2KleinPipeline, whose features of text come from two layers.  folder: for its tokenizer."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=64,
                                      num_attention_heads=2, num_key_value_heads=1, text_encoder_out_layers=(1, 2))
    encoder, transformer = transformers.Qwen3ForCausalLM(config).eval(), random_model("Flux2Transformer2DModel")
    vae = diffusers.AutoencoderKLFlux2(block_out_channels=(16,) * 4, layers_per_block=1, norm_num_groups=4, latent_channels=8,
                                       down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)
    return diffusers.Flux2KleinPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae.eval(), encoder, tokenizer(folder),
                                        transformer, is_distilled=True)


def write_pipeline(folder: Path) -> Path:
    """A whole tiny ZImagePipeline in bfloat16, whose tokenizer has a token for each printable character."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
                                      num_attention_heads=2, num_key_value_heads=1)
    vae = diffusers.AutoencoderKL(block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=16,
                                  down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                                  scaling_factor=0.36, shift_factor=0.11)
    pipeline = diffusers.ZImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, transformers.Qwen3Model(config).eval(), tokenizer(folder / "tokenizer"),
        random_model("ZImageTransformer2DModel"))
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    return folder


def image(pipeline: Any, **options: Any) -> Tensor:
    """The picture of a prompt in two steps, as numbers."""
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a fox", height=32, width=32, num_inference_steps=2, guidance_scale=0.0, output_type="pt",
                       generator=torch.Generator().manual_seed(0), **options).images
    return torch.as_tensor(picture).float()


def coverage() -> str:
    """The table of classes for which the library has a converter, as docs/diffusers.md has it."""
    lines = ["| class | converter of diffusers | tested with packed files |", "| --- | --- | --- |"]
    for name, entry in sorted(SINGLE_FILE_LOADABLE_CLASSES.items()):
        function = entry["checkpoint_mapping_fn"].__name__
        tested = "names and rows" if name in WIDE else "" if name not in TINY else "decoded weights"
        tested += " and outputs" if name in TINY and runs(name) else ""
        lines.append(f"| {name} | {'names are the same' if function == '<lambda>' else f'`{function}`'} | {tested} |")
    return "\n".join(lines) + "\n"
