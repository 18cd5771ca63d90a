"""How much errors of weights change predictions: as measured by making such errors, one layer at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from qdsl.models.calibrate import calibrate, weights_of
from qdsl.models.sensitivity import sensitivities
from tests.models.test_calibrate import model_of_experts, samples


def model(is_tied: bool) -> LlamaForCausalLM:
    """Layers differ in how much they matter."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         vocab_size=100, tie_word_embeddings=is_tied, initializer_range=0.1)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def predictions(model: nn.Module, tokens: list[Tensor]) -> Tensor:
    """Log probabilities of all tokens."""
    return torch.cat([model(sample).logits[0] for sample in tokens]).double().log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "tied", "mixtral"])
def test_costs_are_divergences(name: str) -> None:
    own = model_of_experts(name) if name == "mixtral" else model(name == "tied")
    tokens = samples(24)
    before = predictions(own, tokens)
    terms, moments = sensitivities(own, tokens), calibrate(own, tokens)
    assert all(parameter.requires_grad for parameter in own.parameters())
    weights = {**weights_of(own, ""), "model.embed_tokens": own.model.embed_tokens.weight.data}
    if name == "tied":
        del weights["lm_head"]
    assert terms.keys() == weights.keys()
    generator, ratios = torch.Generator().manual_seed(2), {}
    last = ("model.layers.1.mlp", "lm_head")                     # errors before change who is routed where, with a jump
    for layer, weight in weights.items():
        if name == "mixtral" and not layer.startswith(last):
            continue
        plain = weight.clone()
        error = 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
        weight.add_(error)
        after = predictions(own, tokens)
        weight.copy_(plain)
        predicted = 0.0
        for term in terms[layer]:
            rows = (error.square() @ term.columns if term.columns is not None else
                    ((error @ moments[layer].matrix) * error).sum(1))
            predicted += float((rows * term.rows).sum()) / 2
        ratios[layer] = float((before.exp() * (before - after)).sum(-1).mean()) / predicted
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios
