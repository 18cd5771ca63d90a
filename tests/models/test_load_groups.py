"""Weights that lie together: stacks of experts in one tensor, and DF11's groups, decoded for each block."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qdsl
from qdsl.generated import fp8_tensor, int_group, ocp_mxfp4, q8_0
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models.plan import LoadError
from tests.support.small_models import Mlp, files, folder, weight

E = 2                                                            # experts


# -- experts -----------------------------------------------------------------------------------------------------------


class Moe(nn.Module):
    def __init__(self, n: int, k: int, transposed: bool) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (2 * n, k), "down_proj": (k, n)}
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(E, *((columns, rows) if transposed else (rows, columns)))))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * n))


@pytest.mark.parametrize("n", [64, 128])
def test_transposed_experts_are_told_by_their_module(tmp_path: Path, n: int) -> None:
    """gpt-oss has [E, K, N]; where N = K nothing but the other weight of the module tells."""
    weights = {name: torch.randn(E, *shape) for name, shape in (("gate_up_proj", (2 * n, 128)), ("down_proj", (128, n)))}
    tensors = {"gate_up_proj_bias": torch.randn(E, 2 * n)}
    for name, dense in weights.items():
        packed = ocp_mxfp4.quantize(dense.flatten(0, 1), "gpt_oss")
        for leaf, tensor in packed.tensors.items():
            tensors[f"{name}_{leaf.removeprefix('weight_')}"] = tensor.view(E, -1, *tensor.shape[1:])
        weights[name] = ocp_mxfp4.dequantize(packed, torch.float32).view(E, *dense.shape[1:])
    source = folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    with torch.device("meta"):
        model = Moe(n, 128, transposed=True)
    qdsl.load_weights_(model, source)
    assert torch.equal(model.gate_up_proj_bias, tensors["gate_up_proj_bias"])
    x = torch.randn(E, 3, 128)
    assert torch.equal(model.down_proj[1], weights["down_proj"][1].t())
    assert torch.equal(torch.bmm(x, model.gate_up_proj), torch.bmm(x, weights["gate_up_proj"].transpose(1, 2)))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_plain_experts_one_by_one_do_not_fill_a_stack(tmp_path: Path) -> None:
    """Packed ones do (test_load_stacks.py); plain ones have to be stacked first."""
    tensors = {f"experts.{expert}.up.weight": weight(64, 128, expert) for expert in range(E)}
    model = nn.ModuleDict({"experts": nn.ParameterDict({"up": torch.zeros(E, 64, 128)})})
    with pytest.raises(LoadError, match=r"experts in one parameter, and the checkpoint one by one, as 'experts.0.up.weight'"):
        qdsl.load_weights_(model, folder(tmp_path / "in", tensors))


@pytest.mark.parametrize("shape", [(E,), ()], ids=["for each", "for all"])
def test_experts_with_a_scale_for_each(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """fp8_tensor has one scale for a weight: experts that differ in it are weights of their own."""
    packed = [fp8_tensor.quantize(weight(64, 128, expert)) for expert in range(E)]
    scales = torch.stack([expert.tensors["weight_scale"].reshape(()) for expert in packed]) if shape else torch.tensor(0.01)
    tensors = {"up": torch.stack([expert.tensors["weight"] for expert in packed]), "up_scale": scales}
    source = folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "fp8"}})
    model = nn.Module()
    model.up = nn.Parameter(torch.empty(E, 64, 128, device="meta"))
    qdsl.load_weights_(model, source)
    dense = tensors["up"].float() * (scales.view(-1, 1, 1) if shape else scales)
    assert torch.equal(model.up.dequantize(), dense)
    x = torch.randn(5, 128)
    torch.testing.assert_close(model.up(x, [0, 2, 5]), torch.cat([x[:2] @ dense[0].t(), x[2:] @ dense[1].t()]))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_a_planar_stack_is_saved_as_it_came(tmp_path: Path) -> None:
    """With an index for each expert, which planar weights in order do not have."""
    packed = [int_group.quantize(weight(64, 128, expert), "gptq_v2", bits=4, group=32) for expert in range(E)]
    tensors = {f"up.{name}": torch.stack([weight.tensors[name] for weight in packed]) for name in packed[0].tensors}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}}
    source = folder(tmp_path / "in", tensors, config)
    model = nn.ParameterDict({"up": torch.zeros(E, 64, 128)})
    qdsl.load_weights_(model, source)
    assert qdsl.planar_(model).quantized
    qdsl.save_model(model, tmp_path / "out")
    assert "up.g_idx" in tensors and files(tmp_path / "out") == files(source)


def test_a_stack_that_is_left_out_becomes_dense(tmp_path: Path) -> None:
    packed = [fp8_tensor.quantize(weight(64, 128, expert)) for expert in range(E)]
    tensors = {"up": torch.stack([expert.tensors["weight"] for expert in packed]),
               "up_scale": torch.stack([expert.tensors["weight_scale"].reshape(()) for expert in packed])}
    model = nn.ParameterDict({"up": torch.zeros(E, 64, 128)})
    source = folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "fp8"}})
    assert qdsl.load_weights_(model, source, skip=["up"]).dense == {"up": "left out by a pattern"}
    assert torch.equal(model["up"], torch.stack([fp8_tensor.dequantize(expert, torch.float32) for expert in packed]))


def test_experts_stand_for_the_dense_tensor() -> None:
    packed = q8_0.quantize(weight(3 * 32, 64))
    dense = q8_0.dequantize(packed, torch.float32).view(3, 32, 64)
    experts = qdsl.Experts(packed, 3, dtype=torch.float32)
    assert (experts.shape, experts.size(1), experts.dim(), len(experts), experts.dtype) == ((3, 32, 64), 32, 3, 3, torch.float32)
    chosen = torch.tensor([2, 0, 2]), torch.tensor(1), torch.tensor([[0, 1], [2, 2]])
    for index in (0, -1, slice(1, None), ..., (1, slice(0, 4)), *chosen):
        assert torch.equal(experts[index], dense[index])
    assert experts[torch.tensor([], dtype=torch.int64)].shape == (0, 32, 64)
    with pytest.raises(IndexError):
        experts.weight(3)
    x, offsets = torch.randn(6, 64), torch.tensor([0, 1, 1, 6])
    torch.testing.assert_close(experts(x, offsets), torch.cat([x[:1] @ dense[0].t(), x[1:] @ dense[2].t()]))
    copied = copy.deepcopy(experts)
    assert torch.equal(copied.dequantize(), dense) and torch.equal(torch.einsum("eij,j->ei", experts, x[0]), dense @ x[0])
    assert torch.equal(experts.transpose(1, 2), dense.transpose(1, 2)) and torch.equal(experts.mT, dense.mT)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = experts.nothing


# -- DF11 groups -------------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Blocks of which DF11 holds all weights together, and a head that shares the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = nn.ModuleList([Mlp() for _ in range(2)])
        self.lm_head = nn.Linear(128, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.lm_head(x)
        return result


def df11_folder(path: Path, model: nn.Module) -> Path:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    folder(path / "plain", tensors, {"model_type": "toy"})
    patterns = {r"layers\.\d+": ["up", "down"], "embed": []}
    compress(path / "plain", Compression("df11", patterns=patterns), path / "df11")
    return path / "df11"


def layered() -> Layered:
    with torch.device("meta"):
        return Layered().bfloat16()


def test_groups_are_decoded_for_each_block(tmp_path: Path) -> None:
    dense = Layered().bfloat16()
    source = df11_folder(tmp_path, dense)
    model = layered()
    report = qdsl.load_weights_(model, source)
    names = [*(f"layers.{number}.{name}" for number in range(2) for name in ("up", "down")), "embed"]
    assert report.packed == dict.fromkeys(names, "df11.df11")
    ids = torch.tensor([[1, 5, 63]])
    with torch.no_grad():
        assert torch.equal(model(ids), dense(ids))
    hidden = model.layers[0].up.weight                           # between calls nothing is decoded
    assert (hidden.shape, hidden.dtype, hidden.device.type) == ((256, 128), torch.bfloat16, "cpu")
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(model.layers[0].up(x), dense.layers[0].up(x)) and torch.equal(hidden[3], dense.layers[0].up.weight[3])
    for change in (lambda: hidden.data.add_(1), lambda: hidden.data.__iadd__(1), lambda: torch.add(x, 1, out=hidden)):
        with pytest.raises((TypeError, AttributeError)):
            change()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        with torch.no_grad():
            assert torch.equal(copied(ids), dense(ids))
    qdsl.save_model(model, tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


def test_gradients_flow_through_groups(tmp_path: Path) -> None:
    """Autograd keeps the weights of each block: the next one is decoded into other memory."""
    dense = Layered().bfloat16()
    model = layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    for module in (model, dense):
        module.requires_grad_(False)
        module.layers[0].norm.weight.requires_grad_()
        module(torch.tensor([1, 2])).float().square().sum().backward()
    assert torch.equal(model.layers[0].norm.weight.grad, dense.layers[0].norm.weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_groups_are_decoded_again_for_checkpointed_gradients(tmp_path: Path, reentrant: bool) -> None:
    dense, model = Layered().bfloat16(), layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    gradients = []
    for module in (model, dense):
        x = torch.linspace(-1, 1, 256).view(2, 128).bfloat16().requires_grad_()
        y = x
        for layer in module.layers:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.float().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_forward_that_is_run_again_for_gradients_decodes_for_itself(tmp_path: Path) -> None:
    """transformers checkpoints the class's forward, without the module's own."""
    dense, model = Layered().bfloat16(), layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    gradients = []
    for module in (model, dense):
        x = torch.linspace(-1, 1, 256).view(2, 128).bfloat16().requires_grad_()
        checkpoint(partial(Mlp.forward, module.layers[1]), x, use_reentrant=False).float().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_casts_of_a_model_cast_decoded_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    dense, model = Layered().bfloat16(), layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    ids = torch.tensor([[1, 5, 63]])
    with torch.no_grad():
        assert torch.equal(model.to(dtype)(ids), dense.to(dtype)(ids))
    assert model.layers[0].up.weight.dtype == dtype and model.layers[0].luts.dtype == torch.uint8


def test_groups_can_be_offloaded(tmp_path: Path) -> None:
    dense, model = Layered().bfloat16(), layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, dense))
    assert {name.rpartition(".")[2] for name in qdsl.packed_parameters(model)} >= {"luts", "encoded_exponent", "split_positions"}
    cpu_offload(model, torch.device("cpu"))
    ids = torch.tensor([[1, 5, 63]])
    with torch.no_grad():
        assert model.layers[0].luts.is_meta and torch.equal(model(ids), dense(ids))


def test_a_lora_trains_on_groups(tmp_path: Path) -> None:
    model = layered()
    qdsl.load_weights_(model, df11_folder(tmp_path, Layered().bfloat16()))
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules=["up", "down"], r=4))
    ids, losses = torch.arange(8), []
    optimizer = torch.optim.Adam([parameter for parameter in adapted.parameters() if parameter.requires_grad], 0.01)
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(adapted(ids).float() / 100, ids.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_projections_that_torch_multiplies_itself_are_dense(tmp_path: Path) -> None:
    """MultiheadAttention takes the weight of its output projection, whose forward never runs."""
    dense = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2)}).bfloat16()
    tensors = {name: parameter.detach() for name, parameter in dense.named_parameters()}
    packed = {f"attention.out_proj.{name}": tensor for name, tensor in
              q8_0.quantize(tensors.pop("attention.out_proj.weight")).tensors.items()}
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2, device="meta")}).bfloat16()
    report = qdsl.load_weights_(model, folder(tmp_path / "in", tensors | packed))
    assert report.dense.keys() == {"attention.out_proj.weight"}
    model["attention"](*torch.randn(3, 5, 2, 64).bfloat16())
    compress(folder(tmp_path / "plain", {name: parameter.detach() for name, parameter in dense.named_parameters()}, {}),
             Compression("df11", patterns={r"attention\.out_proj": []}), tmp_path / "df11")
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2, device="meta")}).bfloat16()
    assert qdsl.load_weights_(model, tmp_path / "df11").dense.keys() == {"attention.out_proj.weight"}
    x = torch.randn(3, 5, 2, 64).bfloat16()
    assert torch.equal(model["attention"](*x)[0], dense["attention"](*x)[0])


def test_weights_of_any_module_inside_of_a_block_are_decoded(tmp_path: Path) -> None:
    """Such as those of a router, which is no nn.Linear."""
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    dense, model = Layered().bfloat16(), layered()
    for module in (dense, model):
        old = module.layers[1].up
        module.layers[1].up = Doubled(128, 256, device=old.weight.device, dtype=torch.bfloat16)
    assert qdsl.load_weights_(model, df11_folder(tmp_path, dense)).dense == {}
    ids = torch.tensor([[1, 5, 63]])
    with torch.no_grad():
        assert torch.equal(model(ids), dense(ids))


def test_a_group_with_a_weight_outside_of_its_block_is_decoded_for_good(tmp_path: Path) -> None:
    """And saved as plain numbers, next to the groups that stay."""
    dense = Layered().bfloat16()
    source = df11_folder(tmp_path, dense)
    model = layered()
    model.far = nn.Linear(128, 256, bias=False, device="meta", dtype=torch.bfloat16)

    def rename(name: str) -> str:
        return "far.weight" if name == "layers.1.up.weight" else name

    del model.layers[1].up._parameters["weight"]
    report = qdsl.load_weights_(model, source, rename)
    assert report.dense["far.weight"] == "'far.weight' is not decoded when the module 'layers.1' runs"
    assert torch.equal(model.far.weight, dense.layers[1].up.weight)
    qdsl.save_model(model, tmp_path / "out")
    with qdsl.open(tmp_path / "out") as saved:
        assert list(saved.groups) == ["embed", "layers.0"] and saved.report().problems == []
        assert torch.equal(saved.weight("far.weight"), dense.layers[1].up.weight)


def test_blocks_with_groups_inside_of_blocks(tmp_path: Path) -> None:
    """As of experts: the block around them goes on with its own weights."""
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
            self.experts = nn.ModuleList([Mlp(64) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.experts[0](x) + self.experts[1](x)
            return self.down(self.up(x))                         # with weights that were decoded first

    dense = nn.ModuleDict({"layers": nn.Sequential(Outer(), Outer())}).bfloat16()
    tensors = {name: parameter.detach() for name, parameter in dense.named_parameters()}
    inner = {r"layers\.\d+\.experts\.\d+": ["up", "down"]}
    patterns = {r"layers\.\d+": ["up", "down"], **inner}
    compress(folder(tmp_path / "plain", tensors, {}), Compression("df11", patterns=patterns), tmp_path / "df11")
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.Sequential(Outer(), Outer())}).bfloat16()
    qdsl.load_weights_(model, tmp_path / "df11")
    x = torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        assert torch.equal(model["layers"](x), dense["layers"](x))
