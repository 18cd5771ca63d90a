"""Every format in every place of a model: loaded, run, and saved as the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.jobs.convert.plan_conversion import full_name
from qdsl.runtime import PackedWeight
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear
from tests.support import formats
from tests.support.covering import ALL
from tests.support.small_models import files, folder, own_config

E = 2                                                            # experts

class Stack(nn.Module):
    """Experts in one parameter, as a model's forward uses them: one by one, and all in a product."""

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, n, k))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [nn.functional.linear(x, self.up[0]), *torch.einsum("bsk,enk->ebsn", x, self.up)]


class Net(nn.Module):
    """An embedding, a head that shares its weight, a layer with a bias, experts as modules and in a stack, norm and buffer."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n, k)
        self.norm = nn.LayerNorm(k)
        self.up = nn.Linear(k, n)
        self.experts = nn.ModuleList([nn.Linear(k, n, bias=False) for _ in range(E)])
        self.stack = Stack(E, n, k)
        self.head = nn.Linear(k, n, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("angles", torch.arange(k).float().cpu(), persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.norm(self.embed(ids)) + self.angles
        return [self.up(x), *(expert(x) for expert in self.experts), *self.stack(x), self.head(x)]


def net(n: int, k: int, dtype: torch.dtype = torch.float32) -> Net:
    """A model on meta but for what its modules compute."""
    model = Net(n, k).to(dtype)
    angles = model.angles
    model = model.to("meta")
    model.head.weight = model.embed.weight
    model.angles = angles
    return model


def names_in_files(layer: str, packed: PackedWeight) -> dict[str, str]:
    """What a checkpoint calls the tensors of a layer."""
    return {name: full_name(Layer(layer), name, packed.layout.tensors[name].aliases) for name in packed.tensors}


def stacked(weights: list[PackedWeight], name: str) -> Tensor:
    """A tensor of all experts: run together where rows of one follow those of the other in it, else with an axis in front."""
    tensors = [weight.tensors[name] for weight in weights]
    is_flat = any(axis.dim == "N*K" for axis in weights[0].layout.tensors[name].axes)
    return torch.cat(tensors) if is_flat else torch.stack(tensors)


def plain_tensors(n: int, k: int) -> dict[str, Tensor]:
    return {"norm.weight": torch.linspace(0.5, 2, k), "norm.bias": torch.linspace(-1, 1, k), "up.bias": torch.linspace(-2, 2, n),
            "steps": torch.tensor([3, 1, 2])}



IN_FILES = {(format.name, storage) for format in descriptions() for storages in format.variants.values() for storage in storages
            if not {"safetensors", "parts", "bias"} & format.detect.keys()}      # the model's layers have biases by rows
IN_FILES -= {("fp6_llm", "fp6_llm")}                              # experts in one tensor would all lie in each of its regions
ALL_CASES = [case for case in formats.cases() if (case.path.stem, case.storage) in IN_FILES]
CASES = ALL_CASES if ALL else list({(case.path.stem, case.storage): case for case in ALL_CASES}.values())   # one of all widths


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_place_of_a_model_holds_every_storage(case: formats.Case, tmp_path: Path) -> None:
    """Linear, Embedding, tied head, experts as modules and stacked: loaded, run, saved as the same bytes."""
    n, k = next(shape for shape in formats.shapes(case, (64, 128, 80), (256, 512, 64, 1024))
                if case.storage != "hqq_3bit" or shape[0] % 5 == 0)         # experts that begin inside a block are none
    names = ("embed", "up", "experts.0", "experts.1")
    weights = {name: formats.random_packed(case, (n, k), seed) for seed, name in enumerate(names)}
    stack = [formats.random_packed(case, (n, k), 10 + expert) for expert in range(E)]
    tensors = plain_tensors(n, k)
    for name, packed in weights.items():
        tensors |= {full: packed.tensors[own] for own, full in names_in_files(name, packed).items()}
    if stack[0].layout.streams:                                  # its files have a matrix of all experts' rows
        fields = [case.module.unpack(weight) for weight in stack]
        joined = {own: torch.cat([part[own] for part in fields]) for own in fields[0]}
        whole = case.module.pack(joined, case.storage, **case.choice)
        tensors |= {full: whole.tensors[own] for own, full in names_in_files("stack.up", whole).items()}
    else:
        tensors |= {full: stacked(stack, own) for own, full in names_in_files("stack.up", stack[0]).items()}
    source = folder(tmp_path / "in", tensors, own_config(stack[0]))
    decoded = {name: packed.format.dequantize(packed, torch.float32) for name, packed in weights.items()}
    decoded_stack = torch.stack([packed.format.dequantize(packed, torch.float32) for packed in stack])

    model = net(n, k)
    report = qdsl.load_weights_(model, source)
    assert report.packed.keys() == {*weights, "head", "stack.up"} and report.unused == [] and report.dense == {}
    assert isinstance(model.up, QuantizedLinear) and isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.stack.up, qdsl.Experts) and model.stack.up.shape == (E, n, k)
    for name, weight in decoded.items():
        assert formats.same_bits(model.get_submodule(name).dequantize(torch.float32), weight)
    assert formats.same_bits(model.stack.up.dequantize(), decoded_stack)

    dense = Net(n, k)
    dense.load_state_dict({**plain_tensors(n, k), **{f"{name}.weight": weight for name, weight in decoded.items()},
                           "stack.up": decoded_stack, "head.weight": decoded["embed"]})
    ids = torch.tensor([[1, n - 1, 0]])
    with torch.no_grad():
        for ours, theirs in zip(model(ids), dense(ids), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), equal_nan=True)

    saved = qdsl.save_model(model, tmp_path / "out")
    again = files(tmp_path / "out")
    if saved.exact:
        assert again == files(source)
    else:                                                        # a producer's small tensors were missing
        kept = tensors.keys() - qdsl.open(tmp_path / "out").layer("up").others.keys()
        reloaded = net(n, k)
        qdsl.load_weights_(reloaded, tmp_path / "out")
        assert kept and formats.same_bits(reloaded.stack.up.dequantize(), decoded_stack)
        assert qdsl.save_model(reloaded, tmp_path / "twice").exact
