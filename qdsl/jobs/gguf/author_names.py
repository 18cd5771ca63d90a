"""Translates names and rows of diffusers' tensors into those of the files that authors of diffusion models publish.

A table lists regular expressions of diffusers' names and what replaces them, applied in order.  '#0', '#1', ... are parts of
one tensor; '#swap' has its halves in the other order.  LAST stands for the number of the last block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Names = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of a tensor of diffusers."""

    name: str
    start: int
    stop: int


def qkv(pattern: str, replacement: str, names: Sequence[str] = ("to_q", "to_k", "to_v")) -> list[tuple[str, str]]:
    """Rules for projections that are stored in one tensor.  pattern, replacement: what precedes their names."""
    return [(pattern + name, f"{replacement}#{part}") for part, name in enumerate(names)]


ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
BLOCK, SINGLE = r"^transformer_blocks\.(\d+)\.", r"^single_transformer_blocks\.(\d+)\."
SWAPPED = [("^proj_out", "final_layer.linear"), (r"^norm_out\.linear", "final_layer.adaLN_modulation.1#swap")]
DOUBLE = [                                                       # of all models with the blocks of FLUX
    *qkv(BLOCK + r"attn\.", r"double_blocks.\1.img_attn.qkv"), *qkv(BLOCK + r"attn\.", r"double_blocks.\1.txt_attn.qkv", ADDED),
    (BLOCK + r"attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
    (BLOCK + r"attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
    (BLOCK + r"attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
    (BLOCK + r"attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
    (BLOCK + r"attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
    (BLOCK + r"attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
    (SINGLE + r"attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (SINGLE + r"attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    ("^x_embedder", "img_in"), ("^context_embedder", "txt_in"), *SWAPPED]
FLUX1 = [
    (BLOCK + r"norm1\.linear", r"double_blocks.\1.img_mod.lin"),
    (BLOCK + r"norm1_context\.linear", r"double_blocks.\1.txt_mod.lin"),
    (BLOCK + r"ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.0"), (BLOCK + r"ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
    (BLOCK + r"ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.0"),
    (BLOCK + r"ff_context\.net\.2", r"double_blocks.\1.txt_mlp.2"),
    *qkv(SINGLE, r"single_blocks.\1.linear1", (r"attn\.to_q", r"attn\.to_k", r"attn\.to_v", "proj_mlp")),
    (SINGLE + "proj_out", r"single_blocks.\1.linear2"), (SINGLE + r"norm\.linear", r"single_blocks.\1.modulation.lin"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"), *DOUBLE]
FLUX2 = [
    (BLOCK + r"ff\.linear_in", r"double_blocks.\1.img_mlp.0"), (BLOCK + r"ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
    (BLOCK + r"ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
    (BLOCK + r"ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
    (SINGLE + r"attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"), (SINGLE + r"attn\.to_out", r"single_blocks.\1.linear2"),
    (r"^time_guidance_embed\.(timestep|guidance)_embedder\.linear_1", r"\1_in.in_layer"),
    (r"^time_guidance_embed\.(timestep|guidance)_embedder\.linear_2", r"\1_in.out_layer"), ("^timestep_in", "time_in"),
    (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"), *DOUBLE]
Z_IMAGE = [
    *qkv(r"attention\.", "attention.qkv"), (r"attention\.to_out\.0", "attention.out"),
    (r"attention\.norm_([qk])", r"attention.\1_norm"),
    ("all_final_layer.2-1", "final_layer"), ("all_x_embedder.2-1", "x_embedder")]
SD3 = [
    *qkv(BLOCK + r"attn\.", r"joint_blocks.\1.x_block.attn.qkv"),
    *qkv(BLOCK + r"attn\.", r"joint_blocks.\1.context_block.attn.qkv", ADDED),
    *qkv(BLOCK + r"attn2\.", r"joint_blocks.\1.x_block.attn2.qkv"),
    (BLOCK + r"(attn2?)\.to_out\.0", r"joint_blocks.\1.x_block.\2.proj"),
    (BLOCK + r"attn\.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
    (BLOCK + r"(attn2?)\.norm_([qk])", r"joint_blocks.\1.x_block.\2.ln_\3"),
    (BLOCK + r"attn\.norm_added_([qk])", r"joint_blocks.\1.context_block.attn.ln_\2"),
    (BLOCK + r"norm1\.linear", r"joint_blocks.\1.x_block.adaLN_modulation.1"),
    (r"^transformer_blocks\.LAST\.norm1_context\.linear", "joint_blocks.LAST.context_block.adaLN_modulation.1#swap"),
    (BLOCK + r"norm1_context\.linear", r"joint_blocks.\1.context_block.adaLN_modulation.1"),
    (BLOCK + r"ff\.net\.0\.proj", r"joint_blocks.\1.x_block.mlp.fc1"),
    (BLOCK + r"ff\.net\.2", r"joint_blocks.\1.x_block.mlp.fc2"),
    (BLOCK + r"ff_context\.net\.0\.proj", r"joint_blocks.\1.context_block.mlp.fc1"),
    (BLOCK + r"ff_context\.net\.2", r"joint_blocks.\1.context_block.mlp.fc2"),
    (r"^pos_embed\.proj", "x_embedder.proj"), (r"^pos_embed\.pos_embed", "pos_embed"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
    (r"^time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"), *SWAPPED]

# By class of diffusers: the architecture that GGUF files of the model state, and the table of its names.
CLASSES: dict[str, tuple[str, Names]] = {
    "FluxTransformer2DModel": ("flux", FLUX1), "Flux2Transformer2DModel": ("flux", FLUX2),
    "QwenImageTransformer2DModel": ("qwen_image", ()), "SD3Transformer2DModel": ("sd3", SD3),
    "ZImageTransformer2DModel": ("lumina2", Z_IMAGE)}


def author_parts(names: Names, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]]:
    """The tensors of the authors' file by name, each as a sequence of rows of tensors of diffusers.

    names: the table of the class.  shapes: of diffusers' tensors, by name.
    """
    blocks = [int(match[1]) for name in shapes if (match := re.match(BLOCK, name))]
    last = str(max(blocks, default=0))
    parts: dict[str, dict[str, tuple[Part, ...]]] = {}
    for own, shape in shapes.items():
        name, rows = own, shape[0] if shape else 1
        for pattern, replacement in names:
            name = re.sub(pattern.replace("LAST", last), replacement.replace("LAST", last), name)
        mark = next(iter(re.findall(r"#(\w+)", name)), "0")
        half = rows // 2
        order = ((half, rows), (0, half)) if mark == "swap" else ((0, rows),)
        parts.setdefault(re.sub(r"#\w+", "", name), {})[mark] = tuple(Part(own, *span) for span in order)
    return {name: tuple(part for mark in sorted(marked) for part in marked[mark]) for name, marked in parts.items()}
