"""Adapters of peft merged into packed weights: into dense layers, into the same format, or not at all."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import qdsl
from qdsl.generated import fp8_block, int_group
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models.lora import PackedLoraEmbedding, PackedLoraLinear
from qdsl.models.peft import AdapterError, merge
from tests.support.adapters import IDS, NAMES, TARGETS, Model, adapted, train
from tests.support.formats import same_bits
from tests.support.packed_layers import module_of, sample
from tests.support.small_models import folder

# peft warns of what is on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_dense_layers_that_were_trained_come_along() -> None:
    """As copies of peft's own, in place of its wrappers."""
    model = adapted(Model("q4_0"), target_modules=["first"], modules_to_save=["last"])
    train(model)
    wanted = model(IDS)
    report = merge(model)
    assert type(report.model.last) is nn.Linear and (report.dense, [*report.errors]) == (["last"], ["first"])
    torch.testing.assert_close(report.model(IDS), wanted, rtol=1e-4, atol=1e-4)


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
    model = adapted(Model("spqr"))
    wanted = model(IDS).detach()
    with pytest.raises(AdapterError, match=r"words: spqr has no quantizer yet.*into='dense'\) works for every format"):
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
    qdsl.quantize_(model, "fp8_block", skip="lm_head")
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
    compress(source.parent, Compression("df11"), tmp_path / "df11")

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
    for base in (dense, model):
        adapter = adapted(base, target_modules=["up", "down"], use_dora=True)
        results.append(adapter.base_model.model["layers"](x))
        results[-1].float().square().mean().backward()
        assert all(p.grad is not None for p in adapter.parameters() if p.requires_grad)
    assert same_bits(results[0].detach(), results[1].detach())
    with pytest.raises(AdapterError, match=r"layers\.0\.up: .* coded together .* `qdsl decompress`"):
        merge(adapter)
    with pytest.raises(AdapterError, match=r"layers of df11 do not take in an adapter in place: .* `qdsl decompress`"):
        adapter.merge_and_unload()
