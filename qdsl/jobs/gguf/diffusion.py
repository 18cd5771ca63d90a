"""Diffusion models in GGUF files: detects their architectures, and chooses a type for each tensor.

Names and rules are those by which ComfyUI-GGUF (city96, Apache-2.0: tools/convert.py, tools/lcpp.patch) makes such files;
those of qwen_image, which it reads and does not make, are ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.checkpoint.files.safetensors import shown
from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.mixes import Choice, Options, Tensor, is_kept, place_of

PREFIX = "model.diffusion_model."                                # of a file that holds other models too
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")     # as GGUF and safetensors call them
SMALL = 1024                                                     # so few elements are not worth a smaller type
RESHAPED = 512                                                   # elements from which rows of 256 are made


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture is detected, and which of its tensors are not quantized.

    keys: sets of names; a checkpoint has all names of one set.  not_with: names that it cannot have.
    kept: parts of names of tensors that are not quantized, whole: whole names.  exact: parts of names that stay in float32.
    reshaped: rows that no block divides are stored as rows of 256.
    """

    keys: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]
    whole: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    reshaped: bool = False


_FLUX = ("txt_in.", "img_in.", "time_in.", "vector_in.", "guidance_in.", "final_layer.")
_UNET = ("class_embedding.", "time_embedding.", "add_embedding.", "time_embed.", "label_emb.", "conv_in.", "conv_out.")
_SDXL_KEYS = ("add_embedding.linear_1.weight", "label_emb.0.0.weight")
_UNET_ENDS = ("input_blocks.0.0.weight", "out.2.weight")

ARCHITECTURES = {
    "flux": Architecture((("double_blocks.0.img_attn.proj.weight",),), _FLUX,
                         not_with=("transformer_blocks.0.attn.norm_added_k.weight",)),
    "sd3": Architecture((("joint_blocks.0.x_block.attn.qkv.weight",),),
                        ("final_layer.", "time_text_embed.", "context_embedder.", "t_embedder.", "y_embedder.", "x_embedder."),
                        whole=("proj_out.weight", "pos_embed"), not_with=("transformer_blocks.0.attn.add_q_proj.weight",)),
    "aura": Architecture((("double_layers.3.modX.1.weight",),), ("t_embedder.", "init_x_linear."),
                         whole=("modF.1.weight", "cond_seq_linear.weight", "final_linear.weight", "positional_encoding",
                                "register_tokens"),
                         not_with=("joint_transformer_blocks.3.ff_context.out_projection.weight",)),
    "hidream": Architecture((("caption_projection.0.linear.weight",
                              "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),),
                            ("p_embedder.", "t_embedder.", "x_embedder.", "final_layer.", "caption_projection."),
                            exact=(".ff_i.gate.weight", "img_emb.emb_pos")),
    "cosmos": Architecture((("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),),
                           ("p_embedder.", "t_embedder.", "t_embedding_norm.", "x_embedder.", "final_layer."),
                           exact=("pos_embedder",)),
    "ltxv": Architecture((("adaln_single.emb.timestep_embedder.linear_2.weight", "transformer_blocks.27.scale_shift_table",
                           "caption_projection.linear_2.weight"),),
                         ("adaln_single.", "caption_projection.", "patchify_proj.", "proj_out."), exact=("scale_shift_table",)),
    "hyvid": Architecture((("double_blocks.0.img_attn_proj.weight",
                            "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"),), _FLUX),
    "wan": Architecture((("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),),
                        ("modulation.", "patch_embedding.", "text_embedding.", "time_projection.", "time_embedding.", "img_emb.",
                         "head."), exact=(".modulation",)),
    "sdxl": Architecture((("down_blocks.0.downsamplers.0.conv.weight", _SDXL_KEYS[0]),
                          ("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "output_blocks.2.2.conv.weight",
                           "output_blocks.5.2.conv.weight"), _SDXL_KEYS[1:]), _UNET, whole=_UNET_ENDS, reshaped=True),
    "sd1": Architecture((("down_blocks.0.downsamplers.0.conv.weight",),
                         ("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "input_blocks.9.0.op.weight",
                          "output_blocks.2.1.conv.weight", "output_blocks.5.2.conv.weight", "output_blocks.8.2.conv.weight")),
                        _UNET, whole=_UNET_ENDS, not_with=_SDXL_KEYS, reshaped=True),
    "lumina2": Architecture((("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),),
                            ("t_embedder.", "x_embedder.", "final_layer.", "cap_embedder.", "context_refiner.",
                             "noise_refiner."), not_with=("context_refiner.0.attention.to_q.weight",)),
    "qwen_image": Architecture((("transformer_blocks.0.img_mod.1.weight", "transformer_blocks.0.txt_mod.1.weight",
                                 "transformer_blocks.0.attn.add_q_proj.weight"),),
                               ("img_in.", "txt_in.", "time_text_embed.", "norm_out."), whole=("proj_out.weight",)),
}

_VALUES = ("attn_v.weight", ".to_v.weight", ".v.weight", ".attn.w1v.weight", ".attn.w2v.weight", "_attn.v_proj.weight")
_FUSED = ("attn_qkv.weight", "attn.qkv.weight", "attention.qkv.weight")
_DOWN = ("ffn_down", ".ffn.2.weight", ".ff.net.2.weight", ".mlp.layer2.weight", ".adaln_modulation_mlp.2.weight",
         ".feed_forward.w2.weight")
_BY_ROLE = {
    "value": {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K"},
    "fused": {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"},
    "down": {"Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "Q4_K_S": "Q5_K", "Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K", "Q4_0": "Q4_1",
             "Q5_0": "Q5_1"},
}
_FIRST_VALUES = {"Q3_K_M": 2, "Q4_K_S": 4}                       # so many of the first values get Q5_K


def detect(names: Collection[str]) -> str | None:
    """The architecture that matches the tensor names (without PREFIX); None where none or more than one matches."""
    plain = {name.removeprefix(PREFIX) for name in names}
    matches = [name for name, rules in ARCHITECTURES.items()
               if any(plain.issuperset(keys) for keys in rules.keys) and plain.isdisjoint(rules.not_with)]
    return matches[0] if len(matches) == 1 else None


def contradiction(chosen: str, detected: str | None, names: Collection[str]) -> str | None:
    """Why a model cannot have the architecture that the user chose; None where it can."""
    rules, plain = ARCHITECTURES[chosen], {name.removeprefix(PREFIX) for name in names}
    if wrong := [name for name in rules.not_with if name in plain]:
        return f"it has a tensor {shown(wrong[0])}, which readable files of {chosen} do not have"
    if detected is not None and detected != chosen:
        return f"its names are those of {detected}, not of {chosen}"
    if plain.isdisjoint(key for keys in rules.keys for key in keys):
        return f"it has no tensor {shown(rules.keys[0][0])}, nor another by which {chosen} is known"
    return None


def stored_shape(architecture: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is stored: its own, or rows of 256."""
    count = math.prod(shape)
    if ARCHITECTURES[architecture].reshaped and len(shape) > 1 and count >= RESHAPED and not count % 256 and shape[-1] % 256:
        return count // 256, 256
    return shape


def choose(architecture: str, tensors: Iterable[Tensor], options: Options, from_gguf: bool) -> dict[str, Choice]:
    """The type of every tensor by name, ordered by name.  tensors: with their stored shapes.

    from_gguf: tensors that are not quantized keep their type; those of a safetensors file become float32, or 16 bits.
    Raises QuantizeError for mixes that these models have none of.
    """
    mix = options.mix
    if mix.default and mix.name.startswith("IQ") and not options.pure:
        raise QuantizeError(f"diffusion models have no mix {mix.name}: with --pure every matrix gets the type {mix.default}")
    values: Counter[str] = Counter()
    rules = ARCHITECTURES[architecture]
    return {tensor.name: _choice(rules, tensor, options, values, from_gguf) for tensor in sorted(tensors, key=place_of)}


def _choice(architecture: Architecture, tensor: Tensor, options: Options, seen: Counter[str], from_gguf: bool) -> Choice:
    default = options.mix.default
    name = tensor.name.removeprefix(PREFIX)
    if default is None:
        return Choice(tensor.type, tensor.type)
    named = None if _is_float32(architecture, name, tensor) else options.override(tensor.name)
    if named is None and _stays(architecture, name, tensor):
        type = tensor.type if from_gguf else _plain(architecture, name, tensor)
        return Choice(type, type)
    wanted = named or default
    if named is None and not options.pure and default not in TORCH:
        role = _role(name)
        wanted = _BY_ROLE.get(role, {}).get(options.mix.name, default)
        if role == "value" and seen[role] < _FIRST_VALUES.get(options.mix.name, 0):
            wanted = "Q5_K"
        seen[role] += 1
    return Choice("F16" if tensor.columns % BY_NAME[wanted].elements else wanted, wanted)


def _role(name: str) -> str:
    if any(part in name for part in _VALUES):
        return "value"
    if any(part in name for part in _FUSED):
        return "fused"
    experts = "experts." in name and ".w2.weight" in name
    return "down" if experts or any(part in name for part in _DOWN) else "other"


def _stays(architecture: Architecture, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is quantized only where the user says so: all but matrices, and the small layers at both ends of a model.
    """
    return _is_float32(architecture, name, tensor) or is_kept(tensor) or tensor.rank != 2 or name in architecture.whole \
        or any(part in name for part in architecture.kept)


def _is_float32(architecture: Architecture, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is stored in float32: vectors, convolutions over video, small tensors, and what readers expect so."""
    return tensor.rank < 2 or len(tensor.shape) > 4 or math.prod(tensor.shape) <= SMALL \
        or any(part in name for part in architecture.exact)


def _plain(architecture: Architecture, name: str, tensor: Tensor) -> str:
    """The type of a tensor that is not quantized."""
    if tensor.type not in FLOATS:
        return tensor.type
    return "F32" if _is_float32(architecture, name, tensor) else "BF16" if tensor.type == "BF16" else "F16"
