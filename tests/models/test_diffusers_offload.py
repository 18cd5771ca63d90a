"""Packed models of diffusers whose weights are kept elsewhere until a block runs: the same bits, and nothing stays decoded.

There is no GPU here: weights move from a CPU to a CPU, or between memory and files.  What the libraries move is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models.grouped import GroupedBlock, HiddenWeight
from qdsl.runtime.torch.module import PackedModule

accelerate = pytest.importorskip("accelerate")
diffusers = pytest.importorskip("diffusers")
plugin = pytest.importorskip("qdsl.models.diffusers")
models = pytest.importorskip("tests.support.diffusion_models")
group_offloading = pytest.importorskip("diffusers.hooks.group_offloading")
pytestmark = pytest.mark.filterwarnings("default")
CPU = torch.device("cpu")
LOSSLESS = ("hlane", "fix4", "df11")
FORMATS = (*LOSSLESS, "fp8_channel", "q8_0")
NAME = "ZImageTransformer2DModel"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer has four layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.TINY[NAME].config, "n_layers", 4)
        return Path(models.write_pipeline(tmp_path_factory.mktemp("plain") / "Z-Image"))


@pytest.fixture(scope="module")
def pipelines(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pipeline in every lossless format."""
    folders = {format: tmp_path_factory.mktemp(format) / "Z-Image" for format in LOSSLESS}
    for format, folder in folders.items():
        compress(plain, Compression(format), folder)
    return folders


@pytest.fixture(scope="module")
def load(plain: Path, pipelines: dict[str, Path]) -> Callable[[str], Any]:
    """The transformer in a format; '' for the plain one."""
    def loaded(format: str) -> Any:
        online = None if format in ("", *LOSSLESS) else plugin.QdslConfig(format)
        return plugin.load_single_file(getattr(diffusers, NAME), pipelines.get(format, plain) / "transformer",
                                       dtype=torch.bfloat16, quantization_config=online)

    return loaded


@pytest.fixture(scope="module")
def expected(load: Callable[[str], Any]) -> Callable[[str], Tensor]:
    """What the transformer computes without offloading; in lossless formats what the plain one does."""
    return cache(lambda format: models.output(load("" if format in LOSSLESS else format)))


class Device:
    """In place of a GPU's backend and of its streams: counts how often work waits."""

    waits = 0

    def __init__(self, device: Any = None) -> None:
        self.stream = lambda stream: nullcontext()

    def current_stream(self) -> Device:
        return self

    def synchronize(self) -> None:
        Device.waits += 1


def group_offload(model: nn.Module, type: str, **options: Any) -> None:
    """diffusers' group offload; the library's first function refuses streams for a CPU, so this calls its second."""
    config = group_offloading.GroupOffloadingConfig(
        CPU, CPU, group_offloading.GroupOffloadingType(type), non_blocking=False, record_stream=False,
        low_cpu_mem_usage=False, num_blocks_per_group=1, **options)
    group_offloading._apply_group_offloading(model, config)


def packed_parameters(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in qdsl.packed_parameters(model)}


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def plain_weights(model: Any) -> list[str]:
    """Packed layers that hold plain numbers between calls."""
    layers = {name: model.get_submodule(name) for name in model.hf_quantizer.report.packed}
    return [name for name, layer in layers.items()
            if not isinstance(layer, PackedModule) and type(layer.weight) is not HiddenWeight]


@pytest.mark.parametrize(("place", "type", "format"), [
    *(("stream", "block_level", format) for format in FORMATS),
    ("stream", "leaf_level", "df11"), ("stream", "leaf_level", "fix4"), ("memory", "block_level", "df11"),
    ("memory", "leaf_level", "fp8_channel"), ("disk", "block_level", "df11"), ("disk", "leaf_level", "q8_0")])
def test_group_offload(place: str, type: str, format: str, load: Callable[[str], Any], expected: Callable[[str], Tensor],
                       tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packed tensor is moved, with a stream out of pinned memory, and the output stays the same."""
    model = load(format)
    size, packed = nbytes(model), packed_parameters(model)
    moved: set[int] = set()
    pinned: list[Tensor] = []
    transfer = group_offloading.ModuleGroup._transfer_tensor_to_device
    monkeypatch.setattr(group_offloading.ModuleGroup, "_transfer_tensor_to_device", lambda group, tensor, *arguments: (
        moved.add(id(tensor)), transfer(group, tensor, *arguments))[1])
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor.clone())[1])
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Device)
    monkeypatch.setattr(Device, "waits", 0)
    options = {"memory": {}, "stream": {"stream": Device()}, "disk": {"offload_to_disk_path": str(tmp_path)}}
    group_offload(model, type, **options[place])
    for _ in range(2 if place == "stream" else 1):               # the second time in the order of the first
        assert models.output(model).equal(expected(format))
    if place == "disk":
        files = list(tmp_path.glob("*.safetensors"))
        assert sum(file.stat().st_size for file in files) >= sum(tensor.nbytes for tensor in packed.values())
    else:
        assert {name for name, tensor in packed.items() if id(tensor) not in moved} == set()
    if place == "stream":
        assert Device.waits and len(pinned) >= len(packed)
    assert nbytes(model) == size and not plain_weights(model)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_accelerate_loads(format: str, load: Callable[[str], Any], expected: Callable[[str], Tensor]) -> None:
    """As `enable_sequential_cpu_offload` does: between calls every packed tensor is on meta."""
    model = load(format)
    accelerate.cpu_offload(model, CPU)
    for _ in range(2):
        assert all(tensor.is_meta for tensor in packed_parameters(model).values())
        assert models.output(model).equal(expected(format))
    assert not plain_weights(model)


@pytest.mark.parametrize("format", ["df11", "q8_0"])
def test_a_map_of_devices(format: str, load: Callable[[str], Any], expected: Callable[[str], Tensor], tmp_path: Path) -> None:
    """As `device_map="auto"` places what does not fit: blocks in files."""
    model = load(format)
    devices = {name: "disk" if name == "layers" else "cpu" for name in (
        *(name for name, _ in model.named_children()), *(name for name, _ in model.named_parameters(recurse=False)))}
    accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    packed = packed_parameters(model)
    assert packed and all(tensor.is_meta == name.startswith("layers.") for name, tensor in packed.items())
    assert models.output(model).equal(expected(format)) and models.output(model).equal(expected(format))


def test_one_block_is_decoded_at_a_time(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """When a block decodes its weights, those of the last block are gone."""
    model, rows, most = load("df11"), [], []
    decode = GroupedBlock.decode

    def recorded(block: GroupedBlock, out: Tensor | None = None) -> Tensor:
        most.append(sum(own() is not None for own in rows))
        result = decode(block, out)
        rows.append(weakref.ref(result.untyped_storage()))
        return result

    monkeypatch.setattr(GroupedBlock, "decode", recorded)
    models.output(model)
    assert len(most) > 10 and max(most) == 0


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of a block's first and last product, in two of four blocks."""
    path, generator = tmp_path_factory.mktemp("lora") / "lora.safetensors", torch.Generator().manual_seed(0)
    shapes = {"A": (4, 256), "B": (256, 4)}
    write(path, {f"transformer.layers.{layer}.attention.{name}.lora_{part}.weight": torch.randn(shape, generator=generator) * 0.1
                 for layer in (0, 3) for name in ("to_q", "to_out.0") for part, shape in shapes.items()})
    return path


@pytest.fixture(scope="module")
def pictures(plain: Path, adapter: Path) -> tuple[Tensor, Tensor]:
    """What the plain pipeline draws without and with an adapter."""
    pipeline = plugin.from_pretrained(plain, dtype=torch.bfloat16)
    before = models.image(pipeline)
    pipeline.load_lora_weights(str(adapter))
    return before, models.image(pipeline)


@pytest.mark.parametrize("format", ["fix4", "df11"])
def test_adapters_of_a_pipeline_that_is_offloaded(format: str, pipelines: dict[str, Path], adapter: Path,
                                                  pictures: tuple[Tensor, Tensor]) -> None:
    """The pictures of the plain pipeline, bit for bit; fusing is refused with a remedy, and changes nothing."""
    pytest.importorskip("peft")
    pipeline = plugin.from_pretrained(pipelines[format], dtype=torch.bfloat16)
    pipeline.load_lora_weights(str(adapter))
    pipeline.enable_model_cpu_offload(device="cpu")
    remedy = "qdsl decompress" if format == "df11" else r"qdsl\.models\.peft\.merge"
    with pytest.raises(ValueError, match=f"layers of {format} do not take in an adapter in place: .*{remedy}"):
        pipeline.fuse_lora()
    pipeline.unfuse_lora()
    before, adapted = pictures
    assert models.image(pipeline).equal(adapted) and not adapted.equal(before)
    pipeline.unload_lora_weights()
    assert models.image(pipeline).equal(before)


@pytest.mark.parametrize("format", ["hlane", "df11"])
def test_an_adapter_of_blocks_that_are_offloaded(format: str, load: Callable[[str], Any]) -> None:
    """diffusers removes and sets its hooks again around adapters; outputs are those of the plain model."""
    peft = pytest.importorskip("peft")
    outputs = []
    for model in (load(""), load(format)):
        group_offload(model, "block_level")
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "w1"], init_lora_weights=False))
        outputs.append(models.output(model))
    assert torch.equal(*outputs)


def test_a_state_dict_is_complete(load: Callable[[str], Any], expected: Callable[[str], Tensor],
                                  pipelines: dict[str, Path]) -> None:
    """It has the tensors of the files, also between offloaded calls, and another model takes them."""
    model, other = load("df11"), load("df11")
    group_offload(model, "block_level")
    models.output(model)
    state = model.state_dict()
    with Folder(pipelines["df11"] / "transformer") as folder:
        assert set(state) == set(folder.names())
        assert all(tensor.equal(folder.tensor(name)) for name, tensor in state.items())
    for parameter in other.parameters():
        parameter.data = torch.zeros_like(parameter)
    other.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    assert models.output(other).equal(expected("df11"))
