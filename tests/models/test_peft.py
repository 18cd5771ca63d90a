"""Adapters of peft over packed weights: trained, saved, refused with a sentence, in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, MontecloraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import qdsl
from qdsl.models.lora import PackedDoraLinear
from qdsl.models.peft import AdapterError
from tests.support.adapters import IDS, NAMES, TARGETS, Model, adapted, dense, train
from tests.support.formats import ROOT, same_bits
from tests.support.packed_layers import is_unchanged, layer_of, quantized, sample, stored_bits

# peft warns of what is on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_trains_as_over_the_dense_model(name: str, dora: bool) -> None:
    """With the same results and gradients; the packed weights stay as they are."""
    model = Model(name)
    before = stored_bits(model)
    both = [adapted(base, use_dora=dora, target_modules=TARGETS) for base in (model, dense(model))]
    results = [adapter(IDS) for adapter in both]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for result in results:
        result.square().mean().backward()
    trained = {key for key, p in both[0].named_parameters() if p.requires_grad}
    assert trained == {key for key, p in both[1].named_parameters() if p.requires_grad} and len(trained) == 4 + 2 * dora
    for key in trained:
        gradients = [adapter.get_parameter(key).grad for adapter in both]
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


# -- several processes -------------------------------------------------------------------------------------------------

RANK = """
import importlib, os, sys, warnings
warnings.filterwarnings("ignore")
import torch, qdsl, qdsl.models.peft
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
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
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        alone, stored = model(x).detach(), {key: tensor.clone() for key, tensor in model.state_dict().items()}
        torch.manual_seed(rank if wrapped is ddp else 0)         # DDP gives all ranks the adapters of the first
        model = get_peft_model(model, LoraConfig(target_modules=["0", "1"], r=4, use_dora=dora))
        run = wrapped(model)
        assert run(x).equal(alone), name                         # adapters begin with zeros, but DoRA's magnitudes
        full = get_model_state_dict(run, options=StateDictOptions(full_state_dict=True))
        for key, tensor in full.items():
            old = stored.get(key.removeprefix("base_model.model.").replace("base_layer.", ""))
            assert old is None or tensor.view(torch.uint8).equal(old.view(torch.uint8)), (name, key)
        assert len(full) == len(model.state_dict())
        optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], 0.1)
        losses = []
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
