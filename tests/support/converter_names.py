"""Original tensor names of more diffusion models, by their names in diffusers, in the form of qdsl.jobs.gguf.author_names.

A table lists regular expressions of diffusers' names and their replacements, applied in order.  '#0', '#1', ... are parts of one
tensor; '#swap' exchanges its halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdsl.jobs.gguf.author_names import BLOCK, CLASSES, SINGLE, names_of

ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
SWAPPED = names_of(["ends"])
FLUX1, FLUX2, SD3, Z_IMAGE = (CLASSES[f"{name}Transformer2DModel"][1] for name in ("Flux", "Flux2", "SD3", "ZImage"))


def qkv(pattern: str, replacement: str, names: Sequence[str] = ("to_q", "to_k", "to_v")) -> list[tuple[str, str]]:
    """Rules for projections that are stored in one tensor.  pattern, replacement: what precedes their names."""
    return [(pattern + name, f"{replacement}#{part}") for part, name in enumerate(names)]


CHROMA = [
    (r"^distilled_guidance_layer\.layers\.(\d+)\.linear_1", r"distilled_guidance_layer.layers.\1.in_layer"),
    (r"^distilled_guidance_layer\.layers\.(\d+)\.linear_2", r"distilled_guidance_layer.layers.\1.out_layer"),
    (r"^distilled_guidance_layer\.norms\.(\d+)\.weight", r"distilled_guidance_layer.norms.\1.scale"), *FLUX1]
FLUX3 = [
    (r"attn\.to_([qkv])\.", r"\1_proj."), (r"attn\.to_out\.0", "attn_out"), (r"attn\.norm_q\.weight", "norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "norm.key_norm.scale"), (r"ff\.linear_in", "mlp_in"), (r"ff\.linear_out", "mlp_out"),
    (r"^x_embedders\.", "emb_in."), ("^context_embedder", "txt_in"), ("^mode_blocks", "content_mode_blocks"),
    ("^single_transformer_blocks", "single_blocks"), (r"^(\w+_stream_modulations\.\w+)\.linear", r"\1.lin"),
    (r"^timestep_embedder\.linear_1", "time_in.in_layer"), (r"^timestep_embedder\.linear_2", "time_in.out_layer"),
    ("^proj_out", "final_layer.image.linear"), (r"^norm_out\.linear", "final_layer.image.adaLN_modulation.1#swap")]
WAN = [
    (r"^(vace_blocks\.\d+)\.proj_in", r"\1.before_proj"), (r"^(vace_blocks\.\d+)\.proj_out", r"\1.after_proj"),
    (r"attn1\.", "self_attn."), (r"attn2\.", "cross_attn."), (r"\.to_out\.0\.", ".o."), (r"\.to_([qkv])\.", r".\1."),
    (r"^scale_shift_table", "head.modulation"), (r"scale_shift_table", "modulation"), ("^proj_out", "head.head"),
    (r"ffn\.net\.0\.proj", "ffn.0"), (r"ffn\.net\.2", "ffn.2"), (r"\.norm2\.", ".norm3."),
    (r"^condition_embedder\.(time|text)_embedder\.linear_1", r"\1_embedding.0"),
    (r"^condition_embedder\.(time|text)_embedder\.linear_2", r"\1_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1")]
WAN_ANIMATE2 = [(r"^blocks\.(\d+)\.", r"blocks.\1.block."), (r"\.to_out\.0\.", ".o."), (r"\.to_([qkv])\.", r".\1.")]
LTX = [("^proj_in", "patchify_proj"), ("^time_embed", "adaln_single"), (r"\.norm_([qk])\.", r".\1_norm.")]
LTX2 = [
    ("^audio_proj_in", "audio_patchify_proj"), ("^audio_time_embed", "audio_adaln_single"),
    (r"^av_cross_attn_(video|audio)_scale_shift", r"av_ca_\1_scale_shift_adaln_single"),
    (r"^av_cross_attn_\w+_(a2v|v2a)_gate", r"av_ca_\1_gate_adaln_single"),
    (r"(video|audio)_a2v_cross_attn_scale_shift_table", r"scale_shift_table_a2v_ca_\1"), *LTX]
AURA_FLOW = [
    (r"^joint_transformer_blocks\.(\d+)\.ff\.", r"double_layers.\1.mlpX."),
    (r"^joint_transformer_blocks\.(\d+)\.ff_context\.", r"double_layers.\1.mlpC."), (SINGLE + r"ff\.", r"single_layers.\1.mlp."),
    (r"(mlp[XC]?)\.linear_([12])", r"\1.c_fc\2"), (r"(mlp[XC]?)\.out_projection", r"\1.c_proj"),
    (r"^joint_transformer_blocks\.(\d+)\.norm1\.linear", r"double_layers.\1.modX.1"),
    (r"^joint_transformer_blocks\.(\d+)\.norm1_context\.linear", r"double_layers.\1.modC.1"),
    (SINGLE + r"norm1\.linear", r"single_layers.\1.modCX.1"),
    (r"^joint_transformer_blocks\.(\d+)\.attn\.to_([qkv])", r"double_layers.\1.attn.w2\2"),
    (r"^joint_transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_layers.\1.attn.w2o"),
    (r"^joint_transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj", r"double_layers.\1.attn.w1\2"),
    (r"^joint_transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_layers.\1.attn.w1o"),
    (SINGLE + r"attn\.to_([qkv])", r"single_layers.\1.attn.w1\2"), (SINGLE + r"attn\.to_out\.0", r"single_layers.\1.attn.w1o"),
    (r"^time_step_proj\.linear_1", "t_embedder.mlp.0"), (r"^time_step_proj\.linear_2", "t_embedder.mlp.2"),
    ("^context_embedder", "cond_seq_linear"), ("^proj_out", "final_linear"), (r"^norm_out\.linear", "modF.1#swap"),
    (r"^pos_embed\.pos_embed", "positional_encoding"), (r"^pos_embed\.proj", "init_x_linear")]
COSMOS = [
    (r"^patch_embed\.proj", "x_embedder.proj.1"), (r"norm1\.linear_", "adaln_modulation_self_attn."),
    (r"norm2\.linear_", "adaln_modulation_cross_attn."), (r"norm3\.linear_", "adaln_modulation_mlp."),
    (r"attn1\.", "self_attn."), (r"attn2\.", "cross_attn."), (r"\.to_([qkv])\.", r".\1_proj."), (r"\.to_out\.0", ".output_proj"),
    (r"\.norm_([qk])\.", r".\1_norm."), (r"ff\.net\.0\.proj", "mlp.layer1"), (r"ff\.net\.2", "mlp.layer2"),
    (r"^time_embed\.t_embedder", "t_embedder.1"), (r"^time_embed\.norm", "t_embedding_norm"),
    (r"^norm_out\.linear_", "final_layer.adaln_modulation."), ("^proj_out", "final_layer.linear"),
    ("^transformer_blocks", "blocks"), ("^", "net.")]
LUMINA2 = [
    (r"^time_caption_embed\.caption_embedder", "cap_embedder"),
    (r"^time_caption_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_caption_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"), *qkv(r"attn\.", "attention.qkv"),
    (r"attn\.to_out\.0", "attention.out"), (r"attn\.norm_([qk])", r"attention.\1_norm"),
    (r"feed_forward\.linear_", "feed_forward.w"), (r"norm1\.linear", "adaLN_modulation.1"),
    (r"(?<!ffn_)norm1\.norm", "attention_norm1"),
    (r"(context_refiner\.\d+)\.norm([12])", r"\1.attention_norm\2"), (r"(?<=\.)norm2", "attention_norm2"),
    (r"^norm_out\.linear_1", "final_layer.adaLN_modulation.1"), (r"^norm_out\.linear_2", "final_layer.linear")]
HUNYUAN = [
    (r"^x_embedder", "img_in"), (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
    (r"^context_embedder\.token_refiner\.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
    *qkv(r"^(txt_in\S*?\.)attn\.", r"\1self_attn_qkv"), (r"^(txt_in\S*?\.)attn\.to_out\.0", r"\1self_attn_proj"),
    (r"^(txt_in\S*?\.)norm_out\.linear", r"\1adaLN_modulation.1"), (r"^(txt_in\S*?\.)ff\.net\.0\.proj", r"\1mlp.fc1"),
    (r"^(txt_in\S*?\.)ff\.net\.2", r"\1mlp.fc2"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    *qkv(BLOCK + r"attn\.", r"double_blocks.\1.img_attn_qkv"), *qkv(BLOCK + r"attn\.", r"double_blocks.\1.txt_attn_qkv", ADDED),
    (BLOCK + r"attn\.norm_([qk])", r"double_blocks.\1.img_attn_\2_norm"),
    (BLOCK + r"attn\.to_out\.0", r"double_blocks.\1.img_attn_proj"),
    (BLOCK + r"attn\.norm_added_([qk])", r"double_blocks.\1.txt_attn_\2_norm"),
    (BLOCK + r"attn\.to_add_out", r"double_blocks.\1.txt_attn_proj"),
    (BLOCK + r"norm1\.linear", r"double_blocks.\1.img_mod.linear"),
    (BLOCK + r"norm1_context\.linear", r"double_blocks.\1.txt_mod.linear"),
    (BLOCK + r"ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.fc1"), (BLOCK + r"ff\.net\.2", r"double_blocks.\1.img_mlp.fc2"),
    (BLOCK + r"ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.fc1"),
    (BLOCK + r"ff_context\.net\.2", r"double_blocks.\1.txt_mlp.fc2"),
    *qkv(SINGLE, r"single_blocks.\1.linear1", (r"attn\.to_q", r"attn\.to_k", r"attn\.to_v", "proj_mlp")),
    (SINGLE + "proj_out", r"single_blocks.\1.linear2"), (SINGLE + r"norm\.linear", r"single_blocks.\1.modulation.linear"),
    (SINGLE + r"attn\.norm_([qk])", r"single_blocks.\1.\2_norm"), *SWAPPED]
MOCHI = [
    *qkv(BLOCK + r"attn1\.", r"blocks.\1.attn.qkv_x"), *qkv(BLOCK + r"attn1\.", r"blocks.\1.attn.qkv_y", ADDED),
    (BLOCK + r"attn1\.norm_([qk])", r"blocks.\1.attn.\2_norm_x"),
    (BLOCK + r"attn1\.norm_added_([qk])", r"blocks.\1.attn.\2_norm_y"),
    (BLOCK + r"attn1\.to_out\.0", r"blocks.\1.attn.proj_x"), (BLOCK + r"attn1\.to_add_out", r"blocks.\1.attn.proj_y"),
    (BLOCK + r"norm1\.linear", r"blocks.\1.mod_x"), (BLOCK + r"norm1_context\.linear(_1)?", r"blocks.\1.mod_y"),
    (BLOCK + r"ff\.net\.0\.proj", r"blocks.\1.mlp_x.w1#swap"), (BLOCK + r"ff\.net\.2", r"blocks.\1.mlp_x.w2"),
    (BLOCK + r"ff_context\.net\.0\.proj", r"blocks.\1.mlp_y.w1#swap"), (BLOCK + r"ff_context\.net\.2", r"blocks.\1.mlp_y.w2"),
    (r"^patch_embed\.proj", "x_embedder.proj"), (r"^time_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"), (r"^time_embed\.pooler", "t5_y_embedder"),
    (r"^time_embed\.caption_proj", "t5_yproj"), ("^proj_out", "final_layer.linear"),
    (r"^norm_out\.linear", "final_layer.mod#swap")]
SANA = [
    *qkv(BLOCK + r"attn1\.", r"blocks.\1.attn.qkv"),
    *qkv(BLOCK + r"attn2\.", r"blocks.\1.cross_attn.kv_linear", ("to_k", "to_v")),
    (BLOCK + r"attn1\.to_out\.0", r"blocks.\1.attn.proj"), (BLOCK + r"attn2\.to_q", r"blocks.\1.cross_attn.q_linear"),
    (BLOCK + r"attn2\.to_out\.0", r"blocks.\1.cross_attn.proj"), (BLOCK + r"ff\.conv_(\w+)", r"blocks.\1.mlp.\2_conv.conv"),
    (BLOCK + "scale_shift_table", r"blocks.\1.scale_shift_table"), ("^scale_shift_table", "final_layer.scale_shift_table"),
    (r"^patch_embed\.proj", "x_embedder.proj"), (r"^time_embed\.emb\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_embed\.emb\.timestep_embedder\.linear_2", "t_embedder.mlp.2"), (r"^time_embed\.linear", "t_block.1"),
    (r"^caption_projection\.linear_", "y_embedder.y_proj.fc"), ("^caption_norm", "attention_y_norm"),
    ("^proj_out", "final_layer.linear")]
QWEN21 = [(r"img_mlp\.gate_layer", "img_mlp.gate_up#0"), (r"img_mlp\.proj", "img_mlp.gate_up#1")]
MINIMAX = [
    *qkv(r"\.attn\.", ".attn.qkv_proj"), (r"\.attn\.norm_([qk])", r".attn.\1_norm"), (r"\.attn\.to_out\.0", ".attn.out_proj"),
    (r"\.ff\.net\.0\.proj", ".mlp.fc1#swap"), (r"\.ff\.net\.2", ".mlp.fc2"),
    (r"token_refiner\.refiner_blocks", "token_refiner.blocks"),
    ("^transformer_blocks", "blocks"), (r"^time_embedder\.linear_1", "time_embedder.proj_in"),
    (r"^time_embedder\.linear_2", "time_embedder.proj_out"), ("^proj_in", "video_patch_proj"),
    ("^audio_proj_in", "audio_patch_proj"),
    ("^context_embedder", "condition_proj"), (r"^norm_out\.norm", "final_layer.norm"),
    (r"^norm_out\.linear", "final_layer.adaln_proj.linear"), ("^proj_out", "final_layer.video_out"),
    ("^audio_proj_out", "final_layer.audio_out")]
