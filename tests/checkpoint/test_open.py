"""qdsl.open: every kind of checkpoint behind one interface, from files or from headers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.checkpoint.files.gguf_write import write as write_gguf
from qdsl.checkpoint.files.safetensors import CheckpointError, bytes_of, read_header, write
from qdsl.generated import fp8_block, hlane, hqq, nf4, nvfp4, q4_0, q8_0
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models.load import fill_model
from qdsl.models.plan import LoadError
from qdsl.runtime import PackedWeight
from tests.support.formats import same_bits

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    path.mkdir(parents=True)
    write(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config or {}))
    return path


def fp8_folder(path: Path) -> tuple[Path, PackedWeight]:
    packed = fp8_block.quantize(weight(256, 128))
    tensors = {f"layers.0.up.{name}": tensor for name, tensor in packed.tensors.items()}
    return folder(path, {**tensors, "layers.0.up.bias": torch.ones(256), "norm.weight": torch.ones(128)}, FP8), packed


def gguf(path: Path, tensors: dict[str, tuple[str, Tensor]], keys: dict[str, Value] | None = None) -> Path:
    """A GGUF file of tensors of a type; of blocks [..., bytes] their bytes."""
    new = []
    for name, (kind, tensor) in tensors.items():
        columns, type = tensor.shape[-1], BY_NAME[kind]
        columns = columns // type.nbytes * type.elements if tensor.dtype == torch.uint8 else columns
        new.append(NewTensor(name, type, (*tensor.shape[:-1], columns), [bytes_of(tensor)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, {"general.architecture": Value.of("string", "flux"), **(keys or {})}, new)
    return path


def test_a_folder_of_layers_and_plain_tensors(tmp_path: Path) -> None:
    source, packed = fp8_folder(tmp_path / "in")
    for path in (source, source / "model.safetensors"):
        with qdsl.open(path) as checkpoint:
            layer = checkpoint.layer("layers.0.up")
            assert (list(checkpoint.layers), layer.format, layer.shape) == (["layers.0.up"], "fp8_block", (256, 128))
            assert checkpoint.layer("layers.0.up.weight") == layer and checkpoint.components == []
            read = checkpoint.weight("layers.0.up")
            assert isinstance(read, PackedWeight) and same_bits(read.tensors["weight"], packed.tensors["weight"])
            decoded = checkpoint.weight("layers.0.up.weight", dtype=torch.float32)
            assert torch.equal(decoded, fp8_block.dequantize(packed, torch.float32))
            assert checkpoint.weight("norm.weight", dtype=torch.float64).dtype == torch.float64
            assert checkpoint.weight("layers.0.up", device="meta").device.type == "meta"
            assert [name for name, _ in checkpoint.weights()] == ["layers.0.up", "norm.weight"]
        assert torch.equal(read.tensors["weight"].float(), packed.tensors["weight"].float())    # also when it is closed


def test_unknown_names_are_told_with_their_likes(tmp_path: Path) -> None:
    with qdsl.open(fp8_folder(tmp_path / "in")[0]) as checkpoint:
        with pytest.raises(CheckpointError, match=r"no packed layer 'model.layers.0.up'; did you mean 'layers.0.up'\?"):
            checkpoint.layer("model.layers.0.up")
        with pytest.raises(CheckpointError, match=r"no weight 'nothing'; there are 'layers.0.up', 'norm'$"):
            checkpoint.weight("nothing")
        with pytest.raises(CheckpointError, match=r"no model 'vae'; there are none"):
            checkpoint.component("vae")


def test_a_report_of_what_is_there(tmp_path: Path) -> None:
    source, packed = fp8_folder(tmp_path / "in")
    with qdsl.open(source) as checkpoint:
        report = checkpoint.report()
    label = "fp8_block.safetensors bn=128 bk=128 scale_type=f32"
    assert report.packed == {label: (1, 256 * 128, packed.nbytes)}
    assert report.plain == {"norm.weight": 512} and report.unrecognised == {} and report.problems == []
    assert report.nbytes == packed.nbytes + 512 and label in str(report)


def test_a_pipeline_of_several_models(tmp_path: Path) -> None:
    fp8_folder(tmp_path / "pipe" / "transformer")
    folder(tmp_path / "pipe" / "vae", {"conv.weight": torch.ones(2, 2)})
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    with qdsl.open(tmp_path / "pipe") as checkpoint:
        assert checkpoint.components == ["transformer", "vae"]
        names = [name for name, _ in checkpoint.weights()]
        assert names == ["transformer/layers.0.up", "transformer/norm.weight", "vae/conv.weight"]
        part = checkpoint.component("transformer")
        one, all_ = part.weight("layers.0.up"), checkpoint.weight("transformer/layers.0.up")
        assert list(part.layers) == ["layers.0.up"] and same_bits(one.tensors["weight"], all_.tensors["weight"])
        with pytest.raises(CheckpointError, match=r"a pipeline of transformer, vae; choose one of these folders"):
            fill_model(nn.Linear(1, 1), checkpoint)


def test_groups_of_weights_that_are_coded_together(tmp_path: Path) -> None:
    tensors = {f"layers.0.{name}.weight": weight(64, 128, seed).bfloat16() for seed, name in enumerate(("q", "k"))}
    folder(tmp_path / "plain", tensors)
    compress(tmp_path / "plain", Compression("df11", patterns={r"layers\.\d+": ["q", "k"]}), tmp_path / "df11")
    with qdsl.open(tmp_path / "df11") as checkpoint:
        assert list(checkpoint.groups) == ["layers.0"] and checkpoint.layers == {}
        for name, dense in tensors.items():
            assert torch.equal(checkpoint.weight(name), dense.flatten())
        assert [name for name, _ in checkpoint.weights()] == list(tensors)
        assert "2 weights" in str(checkpoint.report()) and checkpoint.report().problems == []


@pytest.fixture
def experts() -> list[PackedWeight]:
    return [q4_0.quantize(weight(32, 64, seed)) for seed in range(3)]


def test_gguf_files(tmp_path: Path, experts: Sequence[PackedWeight]) -> None:
    single = q8_0.quantize(weight(48, 64))
    path = gguf(tmp_path / "m.gguf", {
        "blk.0.up.weight": ("Q8_0", single.tensors["blocks"].view(48, -1)), "blk.0.norm.weight": ("F32", torch.arange(64.0)),
        "blk.0.exps.weight": ("Q4_0", torch.stack([expert.tensors["blocks"].view(32, -1) for expert in experts]))})
    for source in (path, tmp_path):
        with qdsl.open(source) as checkpoint:
            assert {name: (layer.format, layer.shape, layer.experts) for name, layer in checkpoint.layers.items()} == {
                "blk.0.up": ("q8_0", (48, 64), None), "blk.0.exps": ("q4_0", (32, 64), 3)}
            assert checkpoint.plain == ["blk.0.norm.weight"]
            assert torch.equal(checkpoint.weight("blk.0.up", dtype=torch.float32), q8_0.dequantize(single, torch.float32))
            whole = checkpoint.weight("blk.0.exps")
            assert isinstance(whole, PackedWeight) and whole.shape == (96, 64)
            one = checkpoint.weight("blk.0.exps", dtype=torch.float32, expert=1)
            assert torch.equal(one, q4_0.dequantize(experts[1], torch.float32))


def test_split_gguf_files(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        keys = {"split.no": Value.of("u16", number), "split.count": Value.of("u16", 2), "split.tensors.count": Value.of("i32", 2)}
        blocks = q8_0.quantize(weight(4, 32, number)).tensors["blocks"].view(4, -1)
        gguf(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", {f"{name}.weight": ("Q8_0", blocks)}, keys)
    with qdsl.open(tmp_path) as checkpoint:
        assert list(checkpoint.layers) == ["a", "b"]
        wanted = q8_0.dequantize(q8_0.quantize(weight(4, 32, 1)), torch.float32)
        assert torch.equal(checkpoint.weight("b", dtype=torch.float32), wanted)


def test_a_gguf_file_fills_a_model_and_is_saved(tmp_path: Path, experts: Sequence[PackedWeight]) -> None:
    """Under the names of the file, which diffusion models keep; NVFP4 has a scale next to its blocks."""
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.fp4, self.norm = nn.Linear(64, 48), nn.Linear(64, 32, bias=False), nn.LayerNorm(64, bias=False)
            self.conv = nn.Conv2d(4, 8, 4, bias=False)
            self.exps = nn.ParameterDict({"weight": torch.zeros(3, 32, 64)})

    up, conv = q8_0.quantize(weight(48, 64)), q8_0.quantize(weight(8, 64))
    fp4 = nvfp4.wrap({**nvfp4.quantize(weight(32, 64)).tensors, "scale": torch.tensor([0.5])})
    tensors = {"up.weight": ("Q8_0", up.tensors["blocks"].view(48, -1)), "up.bias": ("F32", torch.arange(48.0)),
               "norm.weight": ("F16", torch.arange(64.0).half()), "fp4.weight": ("NVFP4", fp4.tensors["blocks"].view(32, -1)),
               "fp4.scale": ("F32", fp4.tensors["scale"].view(1)), "conv.weight": ("Q8_0", conv.tensors["blocks"].view(8, -1)),
               "exps.weight": ("Q4_0", torch.stack([expert.tensors["blocks"].view(32, -1) for expert in experts]))}
    path = gguf(tmp_path / "in" / "m.gguf", tensors)
    with torch.device("meta"):
        model = Net()
    report = qdsl.load_weights_(model, path)
    assert report.packed == {"up": "q8_0.gguf", "fp4": "nvfp4.gguf", "exps.weight": "q4_0.gguf"}
    assert report.dense == {"conv.weight": "a Conv2d takes plain numbers"}
    assert torch.equal(model.conv.weight.flatten(1), q8_0.dequantize(conv, torch.float32))
    assert torch.equal(model.exps.weight[2], q4_0.dequantize(experts[2], torch.float32))
    assert torch.equal(model.fp4.dequantize(torch.float32), nvfp4.dequantize(fp4, torch.float32))
    del tensors["conv.weight"], model.conv                       # whose numbers are no blocks any more
    without = gguf(tmp_path / "other" / "m.gguf", tensors)
    with torch.device("meta"):
        again = Net()
    del again.conv
    qdsl.load_weights_(again, without)
    qdsl.planar_(again)
    assert qdsl.save_model(again, tmp_path / "out").exact
    assert (tmp_path / "out" / "m.gguf").read_bytes() == without.read_bytes()


# -- headers alone -----------------------------------------------------------------------------------------------------


def test_headers_tell_layers_with_their_very_shapes(tmp_path: Path) -> None:
    """Streams too: meta weights have the sizes of the real ones."""
    packed = {"up": hlane.quantize(weight(96, 128).bfloat16()), "down": fp8_block.quantize(weight(128, 256))}
    tensors = {f"{layer}.{name}": tensor for layer, weight in packed.items() for name, tensor in weight.tensors.items()}
    write(tmp_path / "m.safetensors", tensors, {"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    entries = header.tensors
    checkpoint = qdsl.open_headers(list(entries), [entry.dtype for entry in entries.values()],
                                   [entry.shape for entry in entries.values()], header.metadata, {}, {"up": (96, 128)})
    for name, real in packed.items():
        meta = checkpoint.weight(name)
        assert isinstance(meta, PackedWeight) and meta.shape == real.shape and meta.device.type == "meta"
        assert {key: (tensor.dtype, tensor.shape) for key, tensor in meta.tensors.items()} == {
            key: (tensor.dtype, tensor.shape) for key, tensor in real.tensors.items()}
    model = nn.ModuleDict({"up": nn.Linear(128, 96, bias=False), "down": nn.Linear(256, 128, bias=False)}).to("meta")
    report = fill_model(model, checkpoint)
    assert report.packed == {"up": "hlane.hlane", "down": "fp8_block.safetensors"}
    assert report.bytes_after == sum(weight.nbytes for weight in packed.values())
    model.load_state_dict(tensors, assign=True)
    assert torch.equal(model["up"].dequantize(), hlane.dequantize(packed["up"]))


def test_dtypes_of_headers_have_several_names() -> None:
    for names in (("BF16", "F32"), ("bfloat16", "float32"), ("torch.bfloat16", "torch.float32")):
        assert qdsl.open_headers(["a", "b"], names, [(2,), ()]).plain == ["a", "b"]
    with pytest.raises(CheckpointError, match="unknown dtype 'int3'"):
        qdsl.open_headers(["a"], ["int3"], [()])
    assert qdsl.open_headers(["a"], [torch.float8_e4m3fn], [(2, 3)]).report().plain == {"a": 6}
    for shape in ((-1, 2), ("x",)):
        with pytest.raises(CheckpointError, match=r"tensor 'a': shape .* is no list of integers"):
            qdsl.open_headers(["a"], ["F32"], [shape])
    with pytest.raises(CheckpointError, match="2 names, 1 dtypes and 1 shapes"):
        qdsl.open_headers(["a", "b"], ["F32"], [()])


@pytest.mark.parametrize("module", [nf4, hqq])
def test_shapes_that_only_the_caller_knows(tmp_path: Path, module: object) -> None:
    """Without the producer's tensor for the shape, flat codes fit many."""
    packed = module.quantize(weight(64, 256))  # type: ignore[attr-defined]
    settings = {"quant_method": "qdsl", "format": packed.format.name, "storage": packed.storage, **packed.params}
    tensors = {f"up.{name}": tensor for name, tensor in packed.tensors.items()}
    source = folder(tmp_path / "in", tensors, {"quantization_config": settings})
    with qdsl.open(source) as checkpoint:
        assert "N and K" in checkpoint.layer("up").why
    with qdsl.open(source, shapes={"up": (64, 256)}) as checkpoint:
        assert same_bits(checkpoint.weight("up", dtype=torch.float32), packed.format.dequantize(packed, torch.float32))
    model = nn.ModuleDict({"up": nn.Linear(256, 64, bias=False)})
    qdsl.load_weights_(model, source)                            # which knows the shape
    assert same_bits(model["up"].dequantize(torch.float32), packed.format.dequantize(packed, torch.float32))
    wrong = nn.ModuleDict({"up": nn.Linear(128, 64, bias=False)})
    with pytest.raises(LoadError, match="'up' is not recognised"):
        qdsl.load_weights_(wrong, source)


def test_groups_of_headers_are_a_problem_that_is_told(tmp_path: Path) -> None:
    folder(tmp_path / "plain", {f"layers.{name}.weight": weight(64, 128).bfloat16() for name in ("q", "k")})
    compress(tmp_path / "plain", Compression("df11", patterns={"layers": ["q", "k"]}), tmp_path / "df11")
    entries = read_header(tmp_path / "df11" / "model.safetensors").tensors
    checkpoint = qdsl.open_headers(list(entries), [entry.dtype for entry in entries.values()],
                                   [entry.shape for entry in entries.values()])
    [group] = checkpoint.groups.values()
    assert group.problems == ("'layers.split_positions' is known by its header alone, and its numbers say where weights begin",)
