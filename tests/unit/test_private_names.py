"""What qdsl.models relies on of other libraries beyond documented interfaces, one test each: a new release fails here first."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import ModelMixin, UNet2DConditionModel, ZImageTransformer2DModel, hooks
from diffusers.configuration_utils import ConfigMixin, register_to_config
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from qdsl.models import private_apis as private


class Small(ModelMixin, ConfigMixin):
    """A model of diffusers."""

    @register_to_config
    def __init__(self, size: int = 2, other: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                        num_key_value_heads=1, vocab_size=8, tie_word_embeddings=True))


def test_hooks_of_accelerate_and_diffusers() -> None:
    module, hook = nn.Linear(2, 2), ModelHook()
    assert private.hook_of(module) is None
    add_hook_to_module(module, hook)
    assert private.hook_of(module) is hook
    hooks.HookRegistry.check_if_exists_or_initialize(module)
    assert all(hasattr(module, name) for name in private.HOOKS)


def test_adapters(llama: LlamaForCausalLM) -> None:
    assert not private.has_adapters(llama)
    llama.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert private.has_adapters(llama)
    private.forget_adapters(llama)
    assert not private.has_adapters(llama)


def test_modules_in_float32() -> None:
    """Both libraries have the attribute, None by default; transformers a second, for all types of parameters."""
    assert private.float32_modules(Small) == () == private.float32_modules(PreTrainedModel)
    classes = {cls: type("Kept", (cls,), {"_keep_in_fp32_modules": ["a"]}) for cls in (ModelMixin, PreTrainedModel)}
    assert [private.float32_modules(cls) for cls in classes.values()] == [("a",), ("a",)]
    assert hasattr(PreTrainedModel, "_keep_in_fp32_modules_strict") and hasattr(ModelMixin, "_keep_in_fp32_modules")


def test_initialized_parameters_are_left_as_they_are(llama: LlamaForCausalLM) -> None:
    weight = llama.model.norm.weight
    weight.data.fill_(7)
    private.mark_initialized(weight)
    llama.initialize_weights()
    assert bool((weight == 7).all())


def test_what_a_checkpoint_need_not_have() -> None:
    assert private.may_be_missing(PreTrainedModel) == () and "_keys_to_ignore_on_load_missing" in vars(PreTrainedModel)


def test_what_a_model_leaves_out() -> None:
    assert private.may_be_unexpected(PreTrainedModel) == () == private.may_be_unexpected(UNet2DConditionModel)
    assert "_keys_to_ignore_on_load_unexpected" in vars(PreTrainedModel)
    assert "_keys_to_ignore_on_load_unexpected" in vars(ModelMixin)


def test_ties(llama: LlamaForCausalLM) -> None:
    assert all("lm_head.weight" in getattr(llama, name) for name in private.TIES)


def test_patterns_that_are_not_cast() -> None:
    assert "norm" in private.uncast_patterns(UNet2DConditionModel) and private.uncast_patterns(nn.Linear(1, 1)) == ()


def test_gates_of_experts() -> None:
    """models/transformers/moe.py multiplies with packed experts, and leaves what follows the first product to the class."""
    experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    gate, up = torch.ones(1, 8), torch.full((1, 8), 3.0)
    assert torch.equal(experts._apply_gate(torch.cat([gate, up], 1)), experts.act_fn(gate) * up)


def test_experts_run_one_by_one() -> None:
    """Only so each expert's rows are one product with its weight; models that transformers loads take another way by default."""
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    config._experts_implementation = "grouped_mm"
    experts = MixtralExperts(config)
    with private.experts_one_by_one([experts, nn.Linear(2, 2)]):
        assert config._experts_implementation == "eager"
    assert config._experts_implementation == "grouped_mm"


def test_a_config_is_replaced() -> None:
    model = Small(2, 5)
    private.set_config(model, {"size": 2})
    assert dict(model.config) == {"size": 2} and isinstance(model.config, dict)


def test_converters_of_single_files() -> None:
    assert private.single_file_class(ZImageTransformer2DModel) == "ZImageTransformer2DModel"
    assert private.single_file_class(type("Own", (ZImageTransformer2DModel,), {})) == "ZImageTransformer2DModel"
    assert private.single_file_class(nn.Linear) is None


def test_every_name_has_a_test() -> None:
    names = [name for name, own in vars(private).items() if inspect.isfunction(own)]
    text = Path(__file__).read_text()
    assert names and [name for name in names if f"private.{name}(" not in text] == []
