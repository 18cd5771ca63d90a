"""Models quantized by what their layers get as inputs: moments, blocks in order, resuming, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import qdsl
from qdsl.encode.calibrated.store import Moments, save
from qdsl.models.calibrate import calibrate
from qdsl.models.plan import LoadError

OPTIONS = {"bits": 3, "group": 64}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         vocab_size=100)
    return LlamaForCausalLM(config).eval()


def samples(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 100, (1, 48), generator=generator) for _ in range(count)]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return torch.cat([model(sample).logits for sample in samples(4)])


def test_moments_are_those_of_the_inputs() -> None:
    """Of each layer apart, in one run of the whole model; layers with one input share their moments."""
    own = model()
    inputs: dict[str, list[Tensor]] = {}
    handles = [layer.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0].detach()))
               for name, layer in own.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    logits(own)
    for handle in handles:
        handle.remove()
    moments = calibrate(own, samples(4))
    assert moments.keys() == inputs.keys()
    for name, tensors in inputs.items():
        rows = torch.cat([x.flatten(0, 1) for x in tensors])
        torch.testing.assert_close(moments[name].matrix, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    layer = "model.layers.0.self_attn"
    assert moments[f"{layer}.q_proj"] is moments[f"{layer}.v_proj"] is not moments[f"{layer}.o_proj"]


def test_a_calibrated_model_is_nearer_to_the_plain_one() -> None:
    expected, errors = logits(model()), {}
    for how in ("rounded", "at once", "in order"):
        quantized = model()
        before = {name: value.clone() for name, value in quantized.state_dict().items()}
        target = None if how != "in order" else lambda name: (qdsl.load("int_group").FORMAT, OPTIONS)
        moments = {} if how == "rounded" else calibrate(quantized, samples(), target)
        assert all(torch.equal(before[name], value) for name, value in quantized.state_dict().items())
        report = qdsl.quantize_(quantized, "int_group", "lm_head", hessians=moments, **OPTIONS)
        assert len(report.quantized) == 14
        errors[how] = float((logits(quantized) - expected).square().mean())
    assert errors["at once"] < 0.75 * errors["rounded"] and errors["in order"] < 0.75 * errors["rounded"]


def test_known_moments_are_not_measured_again(tmp_path: Path) -> None:
    def target(name: str) -> object:
        return qdsl.load("int_group").FORMAT, OPTIONS

    whole = calibrate(model(), samples(), target)                # type: ignore[arg-type]
    first = {name: moments for name, moments in whole.items() if ".0." in name}
    save(tmp_path, "model.layers.0", first)
    written: list[str] = []
    resumed = calibrate(model(), samples(), target, lambda block, moments: written.append(block) or save(  # type: ignore
        tmp_path, block, moments), Moments(tmp_path))
    stored = Moments(tmp_path)
    assert resumed == {} and written == ["model.layers.1"] and stored.keys() == whole.keys()
    assert all(torch.equal(stored[name].matrix, whole[name].matrix) and stored[name].rows == whole[name].rows for name in whole)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(LoadError, match="Sequential has no list of blocks with linear layers"):
        calibrate(nn.Sequential(nn.Linear(4, 4)), samples())


EXPERTS = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
           "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}


def model_of_experts(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **EXPERTS)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.2)                      # some classes leave experts unset
    return built


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_count_their_own_tokens(model_type: str) -> None:
    own = model_of_experts(model_type)
    implementation = own.config._experts_implementation
    routed: list[tuple[Tensor, ...]] = []
    module = own.model.layers[1].mlp.experts
    handle = module.register_forward_pre_hook(lambda _, args: routed.append(args))
    logits(own)
    handle.remove()
    moments = calibrate(own, samples(4))
    assert own.config._experts_implementation == implementation
    x, experts = torch.cat([args[0].flatten(0, -2) for args in routed]), torch.cat([args[1] for args in routed])
    for expert in range(4):
        rows = x[(experts == expert).any(-1)]
        up, down = (moments[f"model.layers.1.mlp.experts.{name}.{expert}"] for name in ("gate_up_proj", "down_proj"))
        torch.testing.assert_close(up.matrix, rows.T @ rows / len(rows), rtol=1e-5, atol=1e-5)
        assert up.rows == down.rows == len(rows) > 0 and len(down.matrix) == 32


def test_experts_that_multiply_all_tokens_are_measured() -> None:
    own = model_of_experts("llama4_text")
    names = {name for name in calibrate(own, samples(4)) if ".experts." in name}
    assert len(names) == 2 * 2 * 4


def test_layers_that_the_text_misleads_are_rounded() -> None:
    """Held out samples have inputs that the others lack: by those, errors of these cost nothing."""
    own = model()
    with torch.no_grad():
        own.model.embed_tokens.weight.zero_()
        own.model.embed_tokens.weight[:50, :8] = torch.randn(50, 8)
        own.model.embed_tokens.weight[50:, 8:] = torch.randn(50, 56)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(50 * (number % 16 == 8), 50 + 50 * (number % 16 == 8), (1, 48), generator=generator)
              for number in range(32)]
    plain = {name: value.clone() for name, value in own.state_dict().items()}
    form = qdsl.load("int_group").FORMAT
    moments = calibrate(own, tokens, lambda name: (form, {"bits": 2, "group": 64}))
    assert all(torch.equal(plain[name], value) for name, value in own.state_dict().items())
    rounded = {name for name, moment in moments.items() if torch.equal(moment.matrix, torch.eye(len(moment.matrix)))}
    assert rounded and all(name.startswith("model.layers.0.") for name in rounded)
    misled = calibrate(own, tokens, lambda name: None)           # the same, but for the check
    errors = {}
    for how, some in {"checked": moments, "misled": misled}.items():
        quantized = LlamaForCausalLM(own.config).eval()
        quantized.load_state_dict(plain)
        first = {name: moment for name, moment in some.items() if ".layers.0." in name}
        qdsl.quantize_(quantized.model.layers[0], "int_group", bits=2, group=64,
                       hessians={name.removeprefix("model.layers.0."): moment for name, moment in first.items()})
        with torch.no_grad():
            errors[how] = sum(float((quantized.model(one).last_hidden_state - own.model(one).last_hidden_state).square().sum())
                              for one in tokens[8::16])
    assert errors["checked"] < errors["misled"]
