"""Which storage loaders put weights in, for a GPU that is not there and on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import qdsl
from qdsl.generated import fp8_block, fp8_channel, int8_channel, int_group, q4_0, q8_0
from qdsl.models.load import use_planar
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, placement, plan, product
from qdsl.runtime.gpu.devices import ARCHS, GPUS
from qdsl.runtime.torch import model
from tests.support.small_models import Mlp, files, folder, mlp, mlp_tensors, weight

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}}


@pytest.fixture
def gpu() -> Iterator[None]:
    """Tensors on the CPU are placed as on an A100, and multiplied by the CPU."""
    with patch.object(placement, "runs_kernels", lambda device: True), configure.assumed(8, 108):
        yield


def gptq(n: int, k: int, is_permuted: bool = False) -> PackedWeight:
    packed = int_group.quantize(weight(n, k), "gptq_v2", bits=4, group=32)
    if is_permuted:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(0))
        packed = int_group.wrap({**packed.tensors, "g_idx": packed.tensors["g_idx"][order]}, (n, k), "gptq_v2", bits=4, group=32)
    return packed


def checkpoint(path: Path, is_permuted: bool = False) -> Path:
    packed = [gptq(*shape, is_permuted) for shape in ((256, 128), (128, 256))]
    return folder(path, mlp_tensors(*(weight.tensors for weight in packed)), GPTQ)


def storages(loaded: Mlp) -> set[str]:
    return {layer.packed.storage for layer in (loaded.up, loaded.down)}


def test_a_loader_stores_weights_planar_on_a_gpu(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, x = checkpoint(tmp_path / "in"), torch.randn(3, 128)
    faster, stored = mlp(), mlp()
    report = qdsl.load_weights_(faster, source)
    assert storages(faster) == {"planar"} and set(report.packed.values()) == {"int_group.planar"}
    assert report.bytes_after == sum(tensor.nbytes for tensor in faster.state_dict().values())
    assert {name.rpartition(".")[2] for name in faster.up.state_dict()} == {*faster.up.packed.tensors, "bias"}
    assert qdsl.save_model(faster, tmp_path / "out").exact and files(tmp_path / "out") == files(source)
    monkeypatch.setenv(placement.PLANAR.variable, "never")
    assert set(qdsl.load_weights_(stored, source).packed.values()) == {"int_group.gptq_v2"} and storages(stored) == {"gptq_v2"}
    torch.testing.assert_close(faster.up(x), stored.up(x))
    monkeypatch.setenv(placement.PLANAR.variable, "always")
    with pytest.raises(FormatError, match="QDSL_PLANAR is auto, larger or never, not 'always'"):
        qdsl.load_weights_(mlp(), source)


def test_on_a_cpu_weights_in_act_order_are_put_in_order(tmp_path: Path) -> None:
    plain, permuted = mlp(), mlp()
    qdsl.load_weights_(plain, checkpoint(tmp_path / "plain"))
    assert storages(plain) == {"gptq_v2"}                        # which stay mapped from their files
    source = checkpoint(tmp_path / "in", is_permuted=True)
    qdsl.load_weights_(permuted, source)
    assert storages(permuted) == {"planar"} and permuted.up.packed.order is not None
    dense = int_group.dequantize(gptq(256, 128, is_permuted=True), torch.float32)
    assert torch.equal(permuted.up.dequantize(torch.float32), dense)
    assert qdsl.save_model(permuted, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_layers_that_others_rely_on_stay(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that accelerate offloads, that FSDP shards, that share tensors, that are asked for 8 bits, and another's."""
    def layers() -> nn.ModuleDict:
        return nn.ModuleDict({name: int_group.Linear(gptq(256, 128)) for name in ("one", "two")})

    def changed(modules: nn.ModuleDict) -> list[str]:
        return [*model.use_fastest_storages(modules, "two").quantized]

    assert changed(layers()) == ["one"]
    offloaded, shared = layers(), layers()
    offloaded["one"]._hf_hook = SimpleNamespace()
    shared["two"]._parameters.update(shared["one"]._parameters)
    assert not changed(offloaded) and not changed(shared)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not changed(layers())
    monkeypatch.delenv("ACCELERATE_USE_FSDP")


@pytest.mark.parametrize("module", [fp8_block, fp8_channel, int8_channel])
def test_rows_of_bytes_serve_quantized_x(module: ModuleType) -> None:
    """A loader stores them planar for x as it is, and as they are for x in 8 bits; a layer that is asked for 8 bits converts."""
    packed, x = module.quantize(weight(256, 128)), torch.randn(3, 128)
    with patch.object(placement, "runs_kernels", lambda device: True), configure.assumed(9, 132, GPUS["h200"]):
        large = module.FORMAT.empty((4096, 4096), None, "cpu")
        assert placement.fastest_storage(large).storage == "planar"
        assert placement.fastest_storage(large, quantizes_x=True) is large
    plain, layer = module.Linear(packed), module.Linear(module.planar(packed))
    torch.testing.assert_close(layer(x), plain(x))
    plain.quantize_x = layer.quantize_x = True
    assert layer.packed.storage == packed.storage and layer.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in layer.state_dict().items())
    assert torch.equal(layer(x), plain(x)) and layer.quantize_x


def test_a_gain_counts_each_number_of_rows_alike() -> None:
    """FP8 blocks gain most on Hopper."""
    packed = fp8_block.FORMAT.empty((8192, 8192), None, "meta")
    gains = {}
    for name in ("a100", "h200"):
        with patch.object(placement, "runs_kernels", lambda device: True), configure.assumed(
                ARCHS[GPUS[name].arch].capability // 10, GPUS[name].multiprocessors, GPUS[name]):
            gains[name] = placement.planar_gain(packed, packed.device)
            planar = placement.planar_template(packed)
            seconds = [[plan.choice(one, m, torch.bfloat16, packed.device).options[0].seconds for m in placement.ROWS]
                       for one in (packed, planar)]
            assert gains[name] == pytest.approx(geometric_mean(seconds[0]) / geometric_mean(seconds[1]))
    assert placement.GAIN < gains["a100"] < 1.5 < gains["h200"]


def test_a_map_of_devices_leaves_the_cpu_alone(tmp_path: Path) -> None:
    loaded = mlp()
    with patch.object(model, "fastest_storage", lambda packed, quantizes_x: packed):
        report = qdsl.load_weights_(loaded, checkpoint(tmp_path / "in", is_permuted=True))
    assert not use_planar(loaded, report, ("cuda", "xpu")) and storages(loaded) == {"gptq_v2"}
    assert len(use_planar(loaded, report)) == 2 and storages(loaded) == {"planar"}


def test_quantize_chooses_a_storage_unless_told(gpu: None) -> None:
    for options, storage in (({}, "planar"), ({"storage": "gguf"}, "gguf")):
        dense = nn.Sequential(nn.Linear(4096, 1024))
        qdsl.quantize_(dense, "q4_0", **options)
        assert dense[0].packed.storage == storage


def test_a_callers_weight_stays_with_a_note(gpu: None) -> None:
    """What runs is what the caller made; the plan says what would be faster."""
    packed = q4_0.quantize(weight(1024, 4096))
    planar = q4_0.planar(packed)
    with patch.object(product, "product_by"):                    # what is multiplied is of no interest
        for stored in (packed, planar):
            product.product(torch.zeros(1, 4096, dtype=torch.bfloat16), stored, None, "", False)
    assert packed.plan is not None and packed.storage == "gguf"
    assert packed.plan.note is not None and packed.plan.note.endswith("times as fast: qdsl.planar_")
    assert planar.plan is not None and planar.plan.note == ""


def test_a_weight_without_a_planar_form_has_no_gain(gpu: None) -> None:
    packed = q8_0.FORMAT.empty((256, 96), None, "meta")          # columns are no multiple of 128
    assert placement.planar_gain(packed, packed.device) == 0.0
    assert placement.planar_gain(q8_0.FORMAT.empty((4096, 4096), None, "meta"), packed.device) > 1
