"""Tiny models that dfloat11's own `compress_model` made the folders of tests/data/df11_package of, and its patterns for them.

`python -m tests.support.package_models OUT` makes them again: with dfloat11 0.5.0, and a module `cupy` that has no more than
`RawModule(path=...).get_function(name)`, as the package compiles its kernel when it is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import diffusers
import torch
import transformers

from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "df11_package"
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
FLUX_ATTENTION = [f"attn.{name}" for name in ("to_q", "to_k", "to_v")]
PATTERNS: dict[str, dict[str, list[str]]] = {
    "transformer": {
        r"transformer_blocks\.\d+": [
            "norm1.linear", "norm1_context.linear", *FLUX_ATTENTION, "attn.add_k_proj", "attn.add_v_proj", "attn.add_q_proj",
            "attn.to_out.0", "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"],
        r"single_transformer_blocks\.\d+": ["norm.linear", "proj_mlp", "proj_out", *FLUX_ATTENTION]},
    "text_encoder": {r"encoder\.layers\.\d+": [*ATTENTION[:3], "self_attn.out_proj", "mlp.fc1", "mlp.fc2"]},
    "text_encoder_2": {
        r"encoder\.block\.\d+": [*(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
                                 *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo"))],
        "shared": []},
    "vae": {r"(en|de)coder\.mid_block\.attentions\.\d+": ["to_q", "to_k", "to_v", "to_out.0"]},
    "language_model": {
        r"model\.layers\.\d+": [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], r"model\.embed_tokens": [],
        "lm_head": []},
}
CLIP = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
QWEN = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


def model(name: str) -> Any:
    """A model in bfloat16; its numbers depend on the names of parameters alone."""
    built: Any = {
        "transformer": lambda: diffusers.FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
            pooled_projection_dim=16, in_channels=16, axes_dims_rope=(2, 2, 4), guidance_embeds=True),
        "text_encoder": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**CLIP)),
        "text_encoder_2": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
        "vae": lambda: diffusers.AutoencoderKL(
            block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, latent_channels=4, shift_factor=0.1),
        "language_model": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN)),
    }[name]()
    for own, parameter in built.named_parameters():
        numbers = (torch.arange(parameter.numel()) * 40503 + crc32(own.encode())) % 65521
        shift = float(parameter.dim() == 1 and "norm" in own and own.endswith("weight"))
        parameter.data = ((numbers - 32760) / 32760 * 0.1 + shift).view(parameter.shape)
    return built.bfloat16().eval()


def write_base(folder: Path) -> Path:
    """A pipeline of the models, without tokenizers, and next to it the language model."""
    parts = {name: model(name) for name in PATTERNS if name != "language_model"}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    diffusers.FluxPipeline(scheduler, tokenizer=None, tokenizer_2=None, **parts).save_pretrained(folder / "pipeline")
    model("language_model").save_pretrained(folder / "language_model")
    return folder


def base_of(folder: Path, name: str) -> Path:
    """The plain folder of a model that `write_base` has written."""
    return folder / name if name == "language_model" else folder / "pipeline" / name


def image(pipeline: Any) -> torch.Tensor:
    """A picture of random embeddings of a prompt, as a tensor."""
    generator = torch.Generator().manual_seed(0)
    prompt, pooled = torch.randn(1, 4, 16, generator=generator), torch.randn(1, 16, generator=generator)
    return torch.from_numpy(pipeline(
        prompt_embeds=prompt.bfloat16(), pooled_prompt_embeds=pooled.bfloat16(), num_inference_steps=1, height=16, width=16,
        generator=generator, output_type="np").images)


if __name__ == "__main__":
    from dfloat11 import compress_model

    for kind in ("single_file", "file_per_group"):
        for name, patterns in PATTERNS.items():
            compress_model(model(name), patterns, str(Path(sys.argv[1]) / kind / name), check_correctness=False,
                           save_single_file=kind == "single_file")
