"""Adapters of peft over packed weights: trained, saved, refused with a sentence, merged, in several processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, MontecloraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import qdsl
from qdsl.compress.run import compress
from qdsl.compress.units import Aim
from qdsl.generated import fp8_block, int_group
from qdsl.models.lora import PackedDoraLinear, PackedLoraEmbedding, PackedLoraLinear
from qdsl.models.peft import AdapterError, merge
from qdsl.runtime import PackedWeight
from tests.support.covering import ALL
from tests.support.formats import ROOT, SHIPPED, same_bits
from tests.support.packed_layers import is_unchanged, layer_of, module_of, quantized, sample, stored_bits
from tests.support.small_models import folder

pytestmark = pytest.mark.filterwarnings("ignore")                # of peft, which warns of what is on purpose here

FAMILIES = ["q4_0", "fp8_block", "int8_channel", "nf4", "int_group", "hlane", "aqlm_2x8"]
NAMES = [path.stem for path in SHIPPED] if ALL else FAMILIES
IDS = torch.tensor([[1, 63, 7], [0, 5, 200]])
TARGETS = ["words", "first"]


def packed_weight(name: str) -> PackedWeight:
    """A weight [256, 256] with memory of its own; of random codes where the format has no quantizer."""
    format = module_of(name).FORMAT
    if format.variant(format.complete({})).encode is not None:
        return quantized(name, 256, 256).apply(torch.clone)
    empty, draw = format.empty((256, 256), device="cpu"), torch.Generator().manual_seed(0)
    return empty.apply(lambda tensor: torch.randn(tensor.shape, generator=draw).to(tensor.dtype) if tensor.is_floating_point()
                       else torch.randint(0, 100, tensor.shape, generator=draw).to(tensor.dtype))


class Model(nn.Module):
    """Two packed layers and a dense one."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        module = module_of(name)
        self.words = module.Embedding(packed_weight(name), dtype=dtype)
        self.first = module.Linear(packed_weight(name), sample(256).to(dtype))
        self.last = nn.Linear(256, 256, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.words(ids)).tanh())


def dense(model: Any) -> Any:
    """The same model with decoded weights."""
    other = copy.deepcopy(model)
    other.words, other.first = other.words.dense(), other.first.dense()
    return other


def adapted(model: nn.Module, seed: int = 1, **options: Any) -> Any:
    """The model with adapters that change its results."""
    torch.manual_seed(seed)
    options = {"target_modules": [*TARGETS, "last"], "r": 4, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options))


def train(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    losses = []
    for _ in range(steps):
        loss = model(IDS).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_trains_as_over_the_dense_model(name: str, dora: bool) -> None:
    """With the same results and gradients; the packed weights stay as they are."""
    model = Model(name)
    before = stored_bits(model)
    both = [adapted(each, use_dora=dora, target_modules=TARGETS) for each in (model, dense(model))]
    results = [each(IDS) for each in both]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for result in results:
        result.square().mean().backward()
    trained = {key for key, p in both[0].named_parameters() if p.requires_grad}
    assert trained == {key for key, p in both[1].named_parameters() if p.requires_grad} and len(trained) == 4 + 2 * dora
    for key in trained:
        gradients = [each.get_parameter(key).grad for each in both]
        assert gradients[0].abs().sum() > 0
        torch.testing.assert_close(*gradients, rtol=2e-3, atol=1e-4)
    losses = train(both[0])
    assert losses[-1] < losses[0]
    assert is_unchanged(both[0].unload(), before)


def test_a_new_dora_changes_nothing() -> None:
    """Also under dropout, where it multiplies by the decoded weight, and with adapters in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Model("fp8_block", dtype)
        plain = model(IDS).detach()
        config = LoraConfig(target_modules=TARGETS, r=4, use_dora=True, lora_dropout=0.5)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
        torch.testing.assert_close(model.eval()(IDS), plain)
        torch.testing.assert_close(model.train()(IDS), plain, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_options_that_read_the_weight_work() -> None:
    """MiCA takes singular vectors of the decoded weight; rank-stabilized scaling and biases of adapters are peft's."""
    model = Model("q4_0")
    plain = model(IDS).detach()
    mica = adapted(model, init_lora_weights="mica", target_modules=TARGETS)
    torch.testing.assert_close(mica(IDS), plain)
    last = torch.linalg.svd(model.first.base_layer.dequantize(torch.float32))[0][:, -4:]
    torch.testing.assert_close(mica.base_model.model.first.lora_B["default"].weight.detach(), last)
    for options in ({"use_rslora": True}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"},
                    {"bias": "lora_only"}, {"lora_bias": True, "init_lora_weights": True, "target_modules": ["first"]},
                    {"monteclora_config": MontecloraConfig(), "init_lora_weights": True, "target_modules": ["first"]}):
        losses = train(adapted(Model("q4_0"), **options))
        assert losses[-1] < losses[0], options
    activated = adapted(Model("q4_0"), alora_invocation_tokens=[1], target_modules=["first"])
    result = activated(IDS, alora_offsets=[1, 2])
    assert ((result - plain).abs().amax(-1) > 1e-4).tolist() == [[False, False, True], [False, True, True]]


def test_eva_reads_inputs_alone() -> None:
    model = adapted(Model("q4_0"), init_lora_weights="eva", target_modules=["first"])
    peft.initialize_lora_eva_weights(model, [{"ids": torch.randint(0, 256, (4, 8))} for _ in range(4)],
                                     forward_fn=lambda model, inputs: model(**inputs), prepare_model_inputs_fn=None,
                                     prepare_layer_inputs_fn=None, show_progress_bar=False)
    losses = train(model)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "kasa"])
def test_options_that_change_the_weight_are_refused(init: str) -> None:
    config = LoraConfig(target_modules=["first"], r=4)
    if init == "kasa":
        config.kasa_config = peft.tuners.lora.config.KasaConfig()
    else:
        config.init_lora_weights = init
    with pytest.raises(AdapterError, match=r"changes the base weight, and weights of q4_0 stay .* quantize its base afterwards"):
        get_peft_model(Model("q4_0"), config)


@pytest.mark.parametrize("options", [{"modules_to_save": ["first"]}, {"trainable_token_indices": {"words": [1]}}], ids=str)
def test_packed_weights_themselves_are_not_trained(options: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match=r"weights of fp8_block are not trained: put `layer.dense\(\)` in the place"):
        adapted(Model("fp8_block"), target_modules=["last"], **options)
    model = dense(Model("fp8_block"))
    assert train(adapted(model, target_modules=["last"], **options))[-1] > 0


def test_parameters_of_packed_layers_and_stacked_experts_are_no_targets() -> None:
    with pytest.raises(AdapterError, match=r"target_parameters adds to 'weight', which is packed: name the layer in target_mod"):
        adapted(Model("fp8_block"), target_modules=["last"], target_parameters=["first.weight"])

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.router = qdsl.Experts(quantized("q4_0", 128, 64), 2), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x.expand(2, -1, -1), self.experts.transpose(1, 2)).sum(-1).t() * self.router(x)

    everything = r".*(router|parts\.\d+)"
    with pytest.raises(AdapterError, match=r"experts: experts of a stack .* exclude_modules=r'\.\*\\\.parts\\\.\\d\+'"):
        adapted(Moe(), target_modules=everything)
    assert adapted(Moe(), target_modules=everything, exclude_modules=r".*\.parts\.\d+")(sample(3, 64)).shape == (3, 2)


def test_results_may_be_changed_in_place() -> None:
    """As adapters for mixed batches do, with gradients or without."""
    for shape in ((2, 128), (1, 3, 128)):
        for is_watched in (False, True):
            x, y = sample(*shape).requires_grad_(is_watched), sample(*shape[:-1], 64).requires_grad_()
            layer = layer_of("q4_0").requires_grad_(False)
            result = layer(x)
            wanted = result.detach() + y
            result += y
            assert same_bits(result.detach(), wanted.detach())
            result.sum().backward()
            assert y.grad.eq(1).all() and (x.grad is not None) == is_watched


def test_several_adapters() -> None:
    """Another one is added, chosen, mixed in a batch, switched off and deleted; DoRA next to LoRA."""
    model = Model("hlane")
    plain = model(IDS).detach()
    one = adapted(model).eval()
    first = one(IDS).detach()
    one.add_adapter("other", LoraConfig(target_modules=TARGETS, r=8, init_lora_weights=False, use_dora=True))
    torch.testing.assert_close(one(IDS), first)
    one.set_adapter("other")
    other = one(IDS).detach()
    assert (other - first).abs().max() > 0.01 and isinstance(model.first.lora_magnitude_vector["other"], PackedDoraLinear)
    one.set_adapter("default")
    with one.disable_adapter():
        torch.testing.assert_close(one(IDS), plain)
    torch.testing.assert_close(one(IDS, adapter_names=["default", "__base__"]), torch.stack([first[0], plain[1]]))
    one.delete_adapter("other")
    torch.testing.assert_close(one(IDS), first)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_are_saved_and_loaded(tmp_path: Path, dora: bool) -> None:
    model = adapted(Model("fp8_block"), use_dora=dora)
    wanted = model(IDS)
    model.save_pretrained(tmp_path)
    assert not any("base_layer" in key for key in peft.get_peft_model_state_dict(model))
    for is_lazy in (False, True):
        loaded = PeftModel.from_pretrained(Model("fp8_block"), tmp_path, low_cpu_mem_usage=is_lazy)
        assert same_bits(loaded(IDS), wanted.detach())
    other = adapted(Model("fp8_block"), seed=2, use_dora=dora)
    peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(model))
    assert same_bits(other(IDS).detach(), wanted.detach())


def test_preparing_a_model_for_training_keeps_packed_tensors() -> None:
    """peft casts all 16-bit parameters to float32, scales among them: they come back when they are used."""
    model = Model("int_group")
    before = stored_bits(model.first)
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.first._parameters["scales"].dtype == torch.float32
    losses = train(adapted(model))
    assert losses[-1] < losses[0]
    own = {key.removeprefix("base_layer."): tensor for key, tensor in model.first.state_dict().items() if "base_layer" in key}
    assert all(same_bits(own[key].to(before[key].dtype), tensor) for key, tensor in before.items())


def test_an_adapted_model_compiles() -> None:
    """In one graph.  A DoRA has a break in it, which a dense model has, too."""
    torch.compiler.reset()
    model = adapted(Model("q4_0"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS), model(IDS))


# -- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", NAMES)
def test_merging_into_dense_layers(name: str, dora: bool) -> None:
    model = adapted(Model(name), use_dora=dora)
    wanted = model(IDS)
    report = merge(model)
    merged: Any = report.model
    assert (type(merged.words), type(merged.first), type(merged.last)) == (nn.Embedding, nn.Linear, nn.Linear)
    torch.testing.assert_close(merged(IDS), wanted, rtol=1e-4, atol=1e-4)
    assert report.errors.keys() == set(TARGETS) and report.dense == ["last"] and all(e.exact for e in report.errors.values())
    assert not any(isinstance(module, BaseTunerLayer) for module in merged.modules()) and not hasattr(merged, "peft_config")
    assert not any(p.requires_grad for p in merged.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("aqlm")])
def test_merging_into_the_same_format(name: str) -> None:
    """The report's error is that of the stored weight against the base weight plus the adapter."""
    torch.manual_seed(0)
    model = Model(name)
    base, before = model.first.dequantize(torch.float32), model.first.packed
    model = adapted(model)
    layer = model.base_model.model.first
    wanted = base + layer.get_delta_weight("default").detach()
    report = merge(model, "same")
    merged: Any = report.model
    after = merged.first.packed
    assert (after.format, after.storage, after.params) == (before.format, before.storage, before.params)
    assert after.tensors.keys() == before.tensors.keys() and merged.first.bias is layer.get_base_layer().bias
    error = merged.first.dequantize(torch.float32) - wanted
    assert report.errors["first"].relative == pytest.approx(float(error.norm() / wanted.norm()), rel=1e-3, abs=1e-7)
    rounding = module_of(name).quantize(wanted, before.storage, **before.params)
    cost = (module_of(name).dequantize(rounding, torch.float32) - wanted).norm() / wanted.norm()
    assert report.errors["first"].relative <= 1.3 * float(cost) + 1e-6
    assert "first: relative error" in str(report)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("storage", ["gptq_v2", "gptq_v1", "awq", "pack_quantized", "planar"])
def test_zero_points_stay_what_they_were(storage: str, symmetric: bool) -> None:
    """A symmetric weight stays symmetric, in each storage, also one with columns out of order."""
    weight = sample(256, 256)
    packed = int_group.quantize(weight, storage, group=64, symmetric=symmetric)
    model = nn.Sequential(int_group.Linear(packed))
    merged: Any = merge(adapted(model, target_modules=["0"]), "same").model
    fields = int_group.unpack(merged[0].packed)
    assert ("z" not in fields or fields["z"].unique().numel() == 1) == symmetric
    assert merged[0].packed.storage == storage and merged[0].packed.tensors.keys() == packed.tensors.keys()


def test_dense_weights_have_the_dtype_that_is_asked_for() -> None:
    """Each layer's own by default, and the report states what rounding to it costs."""
    model = adapted(Model("q4_0", torch.bfloat16), use_dora=True)
    report = merge(copy.deepcopy(model))
    assert report.model.first.weight.dtype == torch.bfloat16 and 1e-4 < report.errors["first"].relative < 4e-3
    report = merge(model, dtype=torch.float32)
    assert report.model.first.weight.dtype == torch.float32 and report.errors["first"].exact


def test_several_adapters_and_biases_are_merged() -> None:
    model = adapted(Model("fp8_block"), target_modules=["first"], lora_bias=True)
    model.add_adapter("dora", LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False, use_dora=True))
    model.add_adapter("more", LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    model.add_adapter("unused", LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    model.base_model.set_adapter(["default", "dora", "more"])
    nn.init.normal_(model.base_model.model.first.lora_B["default"].bias)
    for into in ("dense", "same"):
        other = copy.deepcopy(model)
        wanted = other(IDS)
        report = merge(other, into)
        assert all(error.relative < 0.03 for error in report.errors.values())
        if into == "dense":
            torch.testing.assert_close(report.model(IDS), wanted, rtol=1e-4, atol=1e-4)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = adapted(Model("aqlm_2x8"))
    wanted = model(IDS).detach()
    with pytest.raises(AdapterError, match=r"words: aqlm_2x8 has no quantizer yet.*into='dense'\) works for every format"):
        merge(model, "same")
    with torch.no_grad():
        model.base_model.model.last.lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(AdapterError, match=r"last: NaNs detected"):
        merge(model)
    with torch.no_grad():
        model.base_model.model.last.lora_A["default"].weight.data[0, 0] = 0
        model.base_model.model.first.lora_A["default"].weight.data[0, 0] = torch.inf
    with pytest.raises(AdapterError, match=r"first: an adapter holds numbers that are not finite"):
        merge(model)
    assert isinstance(model.base_model.model.words, PackedLoraEmbedding)
    assert isinstance(model.base_model.model.first, PackedLoraLinear) and torch.isfinite(wanted).all()
    with pytest.raises(AdapterError, match="into is 'dense' or 'same', not 'bf16'"):
        merge(model, "bf16")
    with pytest.raises(AdapterError, match="no adapters to merge"):
        merge(nn.Sequential(nn.Linear(2, 2)))


def test_adapters_that_no_weight_can_hold_are_refused() -> None:
    model = adapted(Model("q4_0"), target_modules=["first"], alora_invocation_tokens=[1])
    with pytest.raises(AdapterError, match=r"first: adapter 'default' is a ALoraLinearVariant, .* depends on x"):
        merge(model)
    scaled = get_peft_model(Model("q4_0"), peft.IA3Config(target_modules=["first"], feedforward_modules=[]))
    assert scaled(IDS).shape == (2, 3, 256)
    with pytest.raises(AdapterError, match=r"first: merge\(\) takes LoRA and DoRA, not Linear over a packed weight"):
        merge(scaled)


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter", "fuse"])
def test_merging_in_place_names_the_call_that_works(how: str) -> None:
    """fuse: as `fuse_lora` of diffusers calls each layer."""
    model = adapted(Model("int8_channel"), target_modules=TARGETS)
    wanted = model(IDS).detach()
    with pytest.raises(AdapterError, match=r"layers of int8_channel do not .*: qdsl\.models\.peft\.merge\(model\) puts dense"):
        if how == "fuse":
            for module in model.modules():
                if isinstance(module, BaseTunerLayer):
                    module.merge(safe_merge=False, adapter_names=["default"])
        else:
            getattr(model, how)()
    torch.testing.assert_close(merge(model).model(IDS), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["q4_0", "fp8_block"])
@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter", "pissa", "olora"])
def test_without_the_import(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain LoRA trains, and what does not work says which import and call there are."""
    monkeypatch.setattr(LoraModel, "_create_new_module", staticmethod(LoraModel._create_new_module.__wrapped__))
    model = Model(name)
    advice = (r"To merge adapters, call qdsl\.models\.peft\.merge\(model\)\. For DoRA, import qdsl\.models\.peft .* "
              r"PiSSA, OLoRA and CorDA change the weight: use them on the dense model")
    with pytest.raises((AttributeError, TypeError), match=advice):
        adapter = adapted(model, target_modules=TARGETS, init_lora_weights=call if call in ("pissa", "olora") else True)
        assert type(adapter.base_model.model.first) is peft.tuners.lora.Linear
        assert train(adapter)[0] > train(adapter)[-1]
        getattr(adapter, call)()


# -- models ------------------------------------------------------------------------------------------------------------


def qwen(tied: bool = False) -> Qwen3Config:
    return Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=32, vocab_size=256, tie_word_embeddings=tied)


def filled(config: Qwen3Config, path: Path) -> Any:
    with init_empty_weights():
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    qdsl.load_weights_(model, path)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "Qwen3-FP8"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen()).bfloat16()
    qdsl.quantize_(model, "fp8_block", filter=lambda module, name: name != "lm_head")
    qdsl.save_model(model, path)
    return path


def test_a_model_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """Trained with gradient checkpointing, saved, merged, and saved as a checkpoint that loads again."""
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = get_peft_model(filled(qwen(), checkpoint), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    wanted = model.eval()(ids).logits.detach().float()
    model.save_pretrained(tmp_path / "adapter")
    for into in ("same", "dense"):
        loaded = PeftModel.from_pretrained(filled(qwen(), checkpoint), tmp_path / "adapter")
        assert same_bits(loaded(ids).logits.detach().float(), wanted)
        report = merge(loaded, into)
        merged = report.model(ids).logits.detach()
        assert (merged.float() - wanted).norm() / wanted.norm() < (0.06 if into == "same" else 0.02)
        qdsl.save_model(report.model, tmp_path / into)
        assert ("quantization_config" in json.loads((tmp_path / into / "config.json").read_text())) == (into == "same")
        again = filled(qwen(), tmp_path / into)
        assert isinstance(again.model.layers[0].mlp.up_proj, nn.Linear) and same_bits(again(ids).logits.detach(), merged)


def test_adapters_that_transformers_injects(checkpoint: Path) -> None:
    model, ids = filled(qwen(), checkpoint), torch.arange(16)[None]
    model.add_adapter(LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=True))
    wanted = model(ids).logits.detach().float()
    report = merge(model, "dense", torch.bfloat16)
    assert report.model is model and report.dense == ["lm_head"] and len(report.errors) == 2
    assert not model._hf_peft_config_loaded
    assert (model(ids).logits.float() - wanted).norm() / wanted.norm() < 0.02
    model.add_adapter(LoraConfig(target_modules=["k_proj"]))


def test_a_tied_head_that_is_merged_is_no_longer_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = Qwen3ForCausalLM(qwen(tied=True)).bfloat16()
    tensors = {name: p.detach() for name, p in source.named_parameters() if name != "model.embed_tokens.weight"}
    packed = fp8_block.quantize(source.model.embed_tokens.weight.detach())
    tensors |= {f"model.embed_tokens.{name}": tensor for name, tensor in packed.tensors.items()}
    path = folder(tmp_path / "in", tensors, {**qwen(tied=True).to_dict(), "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}})
    model, ids = filled(qwen(tied=True), path), torch.arange(16)[None]
    assert model.lm_head.packed.tensors["weight"].data_ptr() == model.model.embed_tokens.packed.tensors["weight"].data_ptr()
    adapter = get_peft_model(model, LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False))
    wanted = adapter(ids).logits.detach().float()
    report = merge(adapter)
    assert (report.model(ids).logits.float() - wanted).norm() / wanted.norm() < 0.02
    assert report.model.config.tie_word_embeddings is False and "no longer tied" in report.notes[0]


def test_adapters_over_a_group_of_coded_weights(tmp_path: Path) -> None:
    """DF11 codes weights of a block together: DoRA reads them decoded, and merging names the command that comes first."""
    names = {f"layers.{i}.{name}.weight": sample(128, 128, seed=i).bfloat16() for i in range(2) for name in ("up", "down")}
    source = folder(tmp_path / "plain" / "transformer", names, {"model_type": "toy"})
    compress(source.parent, Aim("df11"), tmp_path / "df11")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu())

    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.Sequential(Block(), Block())}).bfloat16()
    qdsl.load_weights_(model, tmp_path / "df11" / "transformer")
    dense = nn.ModuleDict({"layers": nn.Sequential(Block(), Block())}).bfloat16()
    dense.load_state_dict(names)
    x, results = sample(4, 128).bfloat16(), []
    for each in (dense, model):
        adapter = adapted(each, target_modules=["up", "down"], use_dora=True)
        results.append(adapter.base_model.model["layers"](x))
        results[-1].float().square().mean().backward()
        assert all(p.grad is not None for p in adapter.parameters() if p.requires_grad)
    assert same_bits(results[0].detach(), results[1].detach())
    with pytest.raises(AdapterError, match=r"layers\.0\.up: .* coded together .* `qdsl decompress`"):
        merge(adapter)
    with pytest.raises(AdapterError, match=r"layers of df11 do not take in an adapter in place"):
        adapter.merge_and_unload()


# -- several processes -------------------------------------------------------------------------------------------------

RANK = """
import importlib, os, sys, warnings
warnings.filterwarnings("ignore")
import torch, qdsl, qdsl.models.peft
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def ddp(model):
    qdsl.ignore_packed_(model)
    return DistributedDataParallel(model)

def fsdp(model):
    ignored = qdsl.ignore_packed_(model)
    for layer in model.base_model.model:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)

for wrapped in (ddp, fsdp):
    for name, dora in (("fp8_block", False), ("hlane", True), ("q4_0", True), ("int8_channel", False)):
        module = importlib.import_module(f"qdsl.generated.{name}")
        torch.manual_seed(0)
        model = nn.Sequential(*[module.Linear(module.quantize(torch.randn(64, 64) / 8)) for _ in range(2)])
        before = {key: p.detach().clone() for key, p in qdsl.packed_parameters(model).items()}
        torch.manual_seed(rank if wrapped is ddp else 0)         # DDP gives all ranks the adapters of the first
        model = get_peft_model(model, LoraConfig(target_modules=["0", "1"], r=4, use_dora=dora))
        run = wrapped(model)
        optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], 0.1)
        x, losses = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)), []
        for _ in range(4):
            loss = run(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (name, losses)
        for key, mine in get_peft_model_state_dict(model).items():
            mine = (mine.full_tensor() if hasattr(mine, "full_tensor") else mine).detach()
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine)
            assert both[0].equal(both[1]) and mine.abs().sum() > 0, (name, key)
        for key, p in qdsl.packed_parameters(model).items():
            old = before[key.removeprefix("base_model.model.").replace("base_layer.", "")]
            assert p.dtype == old.dtype and p.view(torch.uint8).equal(old.view(torch.uint8)), (name, key)
dist.barrier()
dist.destroy_process_group()
os._exit(0)                                                      # threads of gloo may abort a process that ends by itself
"""


def test_adapters_train_in_two_processes(tmp_path: Path) -> None:
    """By DDP and FSDP2, over packed tensors that neither could broadcast or shard."""
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], text=True,
                              stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) for rank in range(2)]
    try:
        errors = [process.communicate(timeout=100)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
