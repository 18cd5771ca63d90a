"""Models of diffusers with packed weights: folders, single files of the authors' names, and what is refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor, nn
from typer.testing import CliRunner

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.sources import GgufSource
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import bytes_of, write
from qdsl.cli import app
from qdsl.generated import fp8_tensor
from qdsl.jobs.compress import run as compression
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.gguf.author_names import CLASSES
from qdsl.models import traced
from qdsl.models.gguf_maps import TensorRule, row_order
from qdsl.models.load import fill_model
from qdsl.models.mapped_source import MappedSource
from qdsl.models.plan import LoadError
from qdsl.models.traced import row_spans, trace
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.module import PackedModule
from tests.support import folders, formats, producer_folders

diffusers = pytest.importorskip("diffusers")
plugin = pytest.importorskip("qdsl.models.diffusers")
models = pytest.importorskip("tests.support.diffusion_models")
pytestmark = pytest.mark.filterwarnings("default")
QdslConfig = plugin.QdslConfig
ZIMAGE, FLUX2 = "ZImageTransformer2DModel", "Flux2Transformer2DModel"
TYPES = {str(form.detect["gguf"]): form.name for form in descriptions() if "gguf" in form.detect}
BLOCKS = sorted(TYPES.keys() - {"F32", "F16", "BF16"})


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty cache of traces."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("QDSL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 folder of a Z-Image transformer."""
    folder = tmp_path_factory.mktemp("plain") / "transformer"
    models.random_model(ZIMAGE, torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with qdsl's own settings, quantized on the way and saved by the library's method."""
    folder = tmp_path_factory.mktemp("own") / "transformer"
    loaded(plain, quantization_config=QdslConfig("q4_0")).save_pretrained(folder)
    return folder


def loaded(folder: Path, name: str = ZIMAGE, **options: Any) -> Any:
    return getattr(diffusers, name).from_pretrained(folder, torch_dtype=torch.bfloat16, **options)


def decoded_copy(model: Any, name: str) -> Any:
    """A plain model with the numbers of one whose weights are packed."""
    packed = next(module for module in model.modules() if isinstance(module, PackedModule))
    result = models.random_model(name, packed.compute_dtype)
    tensors = {own: tensor for own, tensor in model.state_dict().items() if own in result.state_dict()}
    tensors |= {f"{own}.weight": module.dequantize(result.dtype) for own, module in model.named_modules()
                if isinstance(module, PackedModule)}
    result.load_state_dict(tensors, assign=True)             # where they lie decides how products add
    return result


def gguf_bytes(tensor: Tensor, type: str) -> bytes:
    return bytes(quants.quantize(tensor.numpy(), GGMLQuantizationType[type]).tobytes())


def gguf_numbers(data: bytes, shape: torch.Size, type: str) -> Tensor:
    """What the package gguf decodes."""
    kind = GGMLQuantizationType[type]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1).numpy()
    return torch.from_numpy(quants.dequantize(rows, kind).copy()).view(shape)


# -- single files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.TINY)
def test_a_gguf_file_of_the_authors_names(name: str, tmp_path: Path) -> None:
    """Decoded weights are gguf's numbers at the places where the library's converter has them; outputs are those of them."""
    model = models.random_model(name)
    tensors = models.original(name, model.state_dict())
    blocks = {own: ("Q8_0", gguf_bytes(tensor, "Q8_0")) for own, tensor in tensors.items() if models.packs(own, tensor, "Q8_0")}
    tensors |= {own: torch.zeros(shape) for own, shape in models.UNUSED.get(name, {}).items()}
    path = models.write_file(tmp_path / "model.gguf", tensors, blocks)
    packed = plugin.load_single_file(type(model), path, models.write_config(tmp_path / "base", name))
    numbers = {own: gguf_numbers(blocks[own][1], tensor.shape, "Q8_0") if own in blocks else tensor
               for own, tensor in tensors.items()}
    model.load_state_dict(models.converted(name, numbers, model.config))
    report = packed.hf_quantizer.report
    assert len(report.packed) >= len(blocks) - 4 and sorted(report.unused) == sorted(models.UNUSED.get(name, {}))
    for own, module in packed.named_modules():
        if isinstance(module, PackedModule):
            assert module.dequantize(torch.float32).equal(model.get_submodule(own).weight), own
    if not models.runs(name):
        return
    assert models.output(packed).equal(models.output(model))
    packed.save_pretrained(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    again = type(model).from_pretrained(tmp_path / "folder")
    assert again.hf_quantizer.report.packed == report.packed and models.output(again).equal(models.output(model))


@pytest.mark.parametrize("name", [name for name in CLASSES if name in models.TINY])
def test_a_folder_of_diffusers_becomes_a_gguf_file(name: str, tmp_path: Path) -> None:
    """`quantize` writes the authors' names; the file, loaded, has the numbers that the types make of the model's."""
    model = models.random_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "pipeline" / "transformer")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    path = tmp_path / "model.gguf"
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "pipeline"), "-t", "q8_0", "-o", str(path)])
    assert done.exit_code == 0, done.output
    packed = plugin.load_single_file(type(model), path, models.write_config(tmp_path / "base", name))
    layers = {own: module for own, module in packed.named_modules() if isinstance(module, PackedModule)}
    assert layers and all(module.packed.format.name == "q8_0" for module in layers.values())
    for own, tensor in model.state_dict().items():
        module = layers.get(own.removesuffix(".weight"))
        if module is not None and own.endswith(".weight"):
            assert module.dequantize(torch.float32).equal(gguf_numbers(gguf_bytes(tensor.float(), "Q8_0"), tensor.shape, "Q8_0"))
        else:
            rounded = tensor.half() if tensor.dim() == 2 and tensor.shape[1] % 32 else tensor    # rows that no block divides
            assert any(packed.state_dict()[own].equal(stored.float()) for stored in (tensor, rounded)), own


@pytest.mark.parametrize("name", models.WIDE)
def test_names_and_rows_of_the_authors(name: str) -> None:
    """Every tensor of the model has the rows that it has in a file of the authors' names, as the traced converter takes them."""
    cls, config = getattr(diffusers, name), models.WIDE[name].config
    with torch.device("meta"):
        state = cls(**config).state_dict()
    shapes = {own: tuple(tensor.shape) for own, tensor in models.original(name, state).items()}
    rules = trace(lambda rows: models.converted(name, rows, config), shapes)
    assert rules.keys() == state.keys() and {source for rule in rules.values() for source in rule.sources} == shapes.keys()
    ends = torch.tensor([len(tensor) for tensor in state.values()]).cumsum(0).tolist()
    rows = {own: torch.arange(end - len(tensor), end) for (own, tensor), end in zip(state.items(), ends, strict=True)}
    stored = models.original(name, rows)
    for own, rule in rules.items():
        source = torch.cat([stored[part] for part in rule.sources])
        assert (source[row_order(rule.rows, None, len(source))] if rule.rows else source).equal(rows[own]), own


@pytest.mark.parametrize("type", BLOCKS)
def test_every_type_with_halves_swapped_and_projections_cut(type: str, tmp_path: Path) -> None:
    """Bit for bit gguf's numbers, of all types that it decodes; of the others those that qdsl has for the whole tensor."""
    case = next(case for case in formats.cases() if case.path.stem == TYPES[type])
    names = {"qkv.weight": (768, 256), "adaLN.weight": (512, 256), "proj.weight": (256, 256)}
    packed = {own: formats.random_packed(case, shape, seed) for seed, (own, shape) in enumerate(names.items())}
    if any(len(weight.tensors) > 1 for weight in packed.values()):
        pytest.skip("its scales lie in a tensor of their own")
    blocks = {own: (type, bytes(bytes_of(next(iter(weight.tensors.values()))))) for own, weight in packed.items()}
    path = models.write_file(tmp_path / "model.gguf", {own: torch.empty(shape) for own, shape in names.items()}, blocks)
    with torch.device("meta"):
        model = nn.ModuleDict({own: nn.Linear(256, rows, bias=False) for own, rows in (
            ("q", 256), ("k", 256), ("v", 256), ("norm", 512), ("out", 256))})

    def convert(file: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = dict(zip(("q.weight", "k.weight", "v.weight"), file["qkv.weight"].chunk(3), strict=True))
        shift, scale = file["adaLN.weight"].chunk(2)
        return {**parts, "norm.weight": torch.cat([scale, shift]), "out.weight": file["proj.weight"]}

    fill(model, path, trace(convert, names))
    try:
        numbers = {own: gguf_numbers(data, torch.Size(names[own]), type) for own, (_, data) in blocks.items()}
    except (NotImplementedError, KeyError):
        numbers = {own: weight.format.dequantize(weight, torch.float32) for own, weight in packed.items()}
    for own, tensor in convert(numbers).items():
        module = model.get_submodule(own.removesuffix(".weight"))
        assert isinstance(module, QuantizedLinear)
        assert module.dequantize(torch.float32).view(torch.int32).equal(tensor.contiguous().view(torch.int32)), own


def fill(model: nn.Module, path: Path, rules: dict[str, TensorRule]) -> None:
    with Checkpoint(path, {"": MappedSource(GgufSource(path), rules, model, has_experts=False)}) as checkpoint:
        fill_model(model, checkpoint)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_safetensors_file_of_the_authors_names(prefix: str, tmp_path: Path) -> None:
    """FP8 with a scale for each tensor, as ComfyUI has it, and plain numbers that are quantized on the way."""
    model = models.random_model(FLUX2)
    tensors = {prefix + own: tensor for own, tensor in models.original(FLUX2, model.state_dict()).items()}
    weights = {own.removesuffix(".weight"): fp8_tensor.quantize(tensor) for own, tensor in tensors.items()
               if tensor.dim() == 2 and tensor.shape[1] == 256}
    others = {own: tensor for own, tensor in tensors.items() if own.removesuffix(".weight") not in weights}
    named = folders.named(weights)
    if prefix:                                                   # the names and the marker of older files
        named = {own.replace("weight_scale", "scale_weight"): tensor for own, tensor in named.items()}
        others |= {f"{own}.scale_input": torch.ones(1) for own in weights}
        others[f"{prefix}scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    write(tmp_path / "fp8.safetensors", {**named, **others})
    base = models.write_config(tmp_path / "base", FLUX2)
    packed = plugin.load_single_file(type(model), tmp_path / "fp8.safetensors", base, dtype=torch.bfloat16)
    assert packed.dtype == torch.bfloat16 and packed.x_embedder.weight.dtype == torch.bfloat16
    labels = packed.hf_quantizer.report.packed.values()
    assert set(labels) == {"fp8_tensor.safetensors"} and len(labels) > 25 and not packed.hf_quantizer.report.unused
    assert models.output(packed).equal(models.output(decoded_copy(packed, FLUX2)))
    numbers = {own.removeprefix(prefix): fp8_tensor.dequantize(weights[module], torch.float32)
               if (module := own.removesuffix(".weight")) in weights else tensor for own, tensor in tensors.items()}
    model.load_state_dict(models.converted(FLUX2, numbers, model.config))
    assert models.output(packed).equal(models.output(model.to(torch.bfloat16)))
    write(tmp_path / "plain.safetensors", tensors)
    online = plugin.load_single_file(type(model), tmp_path / "plain.safetensors", base, quantization_config=QdslConfig("q8_0"))
    assert isinstance(online.transformer_blocks[0].attn.to_q, QuantizedLinear) and type(online.norm_out.linear) is nn.Linear
    assert models.output(online).equal(models.output(decoded_copy(online, FLUX2)))


def test_a_cast_of_a_whole_model(tmp_path: Path) -> None:
    """All tensors as FP8 E4M3 without scales: matrices stay packed, and norms become plain numbers."""
    model = models.random_model(FLUX2)
    tensors = {own: tensor.to(torch.float8_e4m3fn) for own, tensor in models.original(FLUX2, model.state_dict()).items()}
    write(tmp_path / "cast.safetensors", tensors)
    packed = plugin.load_single_file(type(model), tmp_path / "cast.safetensors", models.write_config(tmp_path / "base", FLUX2))
    model.load_state_dict(models.converted(FLUX2, {own: tensor.float() for own, tensor in tensors.items()}, model.config))
    assert len(packed.hf_quantizer.report.packed) > 30 and models.output(packed).equal(models.output(model))
    packed.save_pretrained(tmp_path / "folder")
    assert models.output(type(model).from_pretrained(tmp_path / "folder")).equal(models.output(model))


def test_a_file_that_does_not_fill_the_model(tmp_path: Path) -> None:
    """Missing tensors, other sizes, and converters that fail or compute are errors; nothing is left random."""
    model = models.random_model(FLUX2)
    tensors = models.original(FLUX2, model.state_dict())
    base = models.write_config(tmp_path / "base", FLUX2)
    partial = {own: tensor for own, tensor in tensors.items() if own != "img_in.weight"}
    path = models.write_file(tmp_path / "model.gguf", partial, {})
    with pytest.raises(LoadError, match=r"not fill Flux2.*by the converter of diffusers.*\n.*in the file: x_embedder\.weight"):
        plugin.load_single_file(type(model), path, base)
    config = {**models.TINY[FLUX2].config, "in_channels": 64}
    path = models.write_file(tmp_path / "whole.gguf", tensors, {})
    with pytest.raises(LoadError, match=r"'x_embedder\.weight' is \[256, 64\] in the model, and the file has 'img_in\.weight'"):
        plugin.load_single_file(type(model), path, config)
    with pytest.raises(LoadError, match="converter fails on the names and shapes"):
        plugin.load_single_file(diffusers.SD3Transformer2DModel, path, models.TINY["SD3Transformer2DModel"].config)


# -- traces ----------------------------------------------------------------------------------------------------------------


def test_rules_are_read_off_a_converter() -> None:
    """Whole tensors, cuts, joins and other orders; what computes is refused."""
    shapes = {"a": (6, 8), "b": (2, 8), "bias": (6,), "conv": (4, 3, 2, 2), "scalar": ()}
    rules = trace(lambda file: {
        "whole": file["a"], "cut": file["a"][2:4], "join": torch.cat([file["a"], file["b"]]), "flip": file["a"].flip(0),
        "pairs": file["bias"].view(3, 2).t().flatten(), "scalar": file["scalar"], "kernels": file["conv"][1:3],
        "matrix": file["conv"].view(4, -1)}, shapes)
    assert rules["whole"] == TensorRule(("a",)) and rules["cut"] == TensorRule(("a",), "2:4")
    assert rules["join"] == TensorRule(("a", "b")) and rules["matrix"] == TensorRule(("conv",))
    assert rules["scalar"] == TensorRule(("scalar",))
    assert row_order(rules["flip"].rows, None, 6).tolist() == [5, 4, 3, 2, 1, 0]
    assert row_order(rules["pairs"].rows, None, 6).tolist() == [0, 2, 4, 1, 3, 5] and rules["kernels"].rows == "6:18"
    order = torch.arange(512).view(256, 2).t().flatten()
    assert row_spans(order) == "0:511:2 1:512:2" and row_order(row_spans(order), None, 512).equal(order)
    for wrong, message in ((lambda file: {"x": file["a"] * 0.5}, "computes 'x'"), (lambda file: {"x": file["c"]}, "fails"),
                           (lambda file: {"x": file["b"].t()}, "changes the columns")):
        with pytest.raises(LoadError, match=message):
            trace(wrong, shapes)


def test_traces_are_kept(cache: Path) -> None:
    """A file of the same names and shapes is not traced again; what cannot be read is."""
    shapes, calls = {"a": (4, 2)}, []

    def convert(file: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return {"b": file["a"][:2]}

    assert traced.kept_trace(convert, shapes, "1") == traced.kept_trace(convert, shapes, "1") == {"b": TensorRule(("a",), "0:2")}
    assert len(calls) == 1
    for path in (cache / "traces").iterdir():
        path.write_text("{")
    assert traced.kept_trace(convert, shapes, "1")["b"].rows == "0:2" and len(calls) == 2
    traced.kept_trace(convert, shapes, "2")
    assert len(calls) == 3


def test_flux_of_real_size_is_traced_in_seconds() -> None:
    """780 tensors of shapes alone become 1160, in less than the 6 s that it may take."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers as convert

    shapes = models.flux1_shapes()
    assert len(shapes) == 780
    start = time.process_time()
    rules = trace(lambda file: convert(checkpoint=file, config={}), shapes)
    assert len(rules) == 1160 and time.process_time() - start < 6
    assert rules["norm_out.linear.weight"].rows == "3072:6144 0:3072"
    assert rules["single_transformer_blocks.37.proj_mlp.weight"] == TensorRule(("single_blocks.37.linear1.weight",), "9216:21504")


# -- folders ---------------------------------------------------------------------------------------------------------------


def test_a_plain_folder_is_quantized_on_the_way(plain: Path, own: Path, tmp_path: Path) -> None:
    """Modules that the class wants precise stay dense; what is saved loads by itself, and is saved as the same files."""
    online = loaded(plain, quantization_config=QdslConfig("q4_0"))
    assert isinstance(online.layers[0].attention.to_q, QuantizedLinear) and type(online.t_embedder.mlp[0]) is nn.Linear
    assert online.dtype == torch.bfloat16 and models.output(online).equal(models.output(decoded_copy(online, ZIMAGE)))
    assert json.loads((own / "config.json").read_text())["quantization_config"]["format"] == "q4_0"
    again = loaded(own)
    assert models.output(again).equal(models.output(online))
    again.save_pretrained(tmp_path)
    assert folders.same_files(own, tmp_path)
    again.dequantize()
    assert models.output(again).equal(models.output(online)) and not hasattr(again, "hf_quantizer")
    assert "quantization_config" not in json.loads(again.to_json_string())


def test_a_map_of_devices_keeps_weights_on_the_cpu(own: Path) -> None:
    model = loaded(own, device_map={"": "cpu"})
    whole = loaded(own)
    apart = loaded(own, device_map={**dict.fromkeys([name for name, _ in whole.named_children()], "cpu"), "layers": "disk",
                                    "x_pad_token": "cpu", "cap_pad_token": "cpu"})
    assert models.output(model).equal(models.output(whole)) and models.output(apart).equal(models.output(whole))


@pytest.mark.parametrize("kind", ["fp8 block", "compressed-tensors int8", "gptq v2", "bitsandbytes int8", "bitsandbytes nf4",
                                  "modelopt nvfp4"])
def test_a_folder_of_another_producer(kind: str, plain: Path, tmp_path: Path) -> None:
    """A plain call loads folders for which the library has no quantizer; a QdslConfig all."""
    producer = producer_folders.KINDS[kind]
    with Folder(plain) as folder:
        tensors = {name: folder.tensor(name).clone() for name in folder.names()}
    weights = [name.removesuffix(".weight") for name in tensors if name.startswith("layers.") and ".attention.to_" in name]
    dense = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    for name in weights:
        tensors |= producer_folders.named(name, producer.stored.pack(tensors.pop(f"{name}.weight")))
        tensors |= {f"{name}.{leaf}": torch.tensor(number) for leaf, number in producer.extra.items()}
    path = tmp_path / "folder"
    path.mkdir()
    write(path / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    assert producer.settings is not None
    left = {producer.ignore: [name for name in dense if name not in weights]} if producer.ignore else {}
    settings = {**producer.settings, **left}
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    is_known = kind.startswith(("bitsandbytes", "modelopt"))
    model = loaded(path, **({"quantization_config": QdslConfig()} if is_known else {}))
    assert model.hf_quantizer.report.packed.keys() == set(weights) and model.dtype == torch.bfloat16
    assert models.output(model).equal(models.output(decoded_copy(model, ZIMAGE)))
    model.save_pretrained(tmp_path / "again")
    assert folders.same_files(path, tmp_path / "again")


@pytest.mark.parametrize("format", ["hlane", "fix4", "df11"])
def test_lossless_folders(format: str, plain: Path, tmp_path: Path) -> None:
    """The numbers of the plain folder, bit for bit; DF11 is decoded block by block."""
    compression.compress(plain, Compression(format), tmp_path / format)
    model = plugin.load_single_file(diffusers.ZImageTransformer2DModel, tmp_path / format, dtype=torch.bfloat16)
    assert len(model.hf_quantizer.report.packed) > 10
    expected = models.output(dense := loaded(plain))
    assert models.output(model).equal(expected) and model.num_parameters() == dense.num_parameters()
    model.save_pretrained(tmp_path / "again")
    assert folders.same_files(tmp_path / format, tmp_path / "again")
    if format != "df11":
        assert models.output(loaded(tmp_path / format)).equal(expected)


@pytest.mark.parametrize(("config", "message"), [
    ({}, "has no packed weights: name a format"), ({"format": "q9"}, "no format 'q9'"),
    ({"format": "q4_0", "bits": 3}, "has no parameter 'bits'")])
def test_a_wrong_config_is_an_error(plain: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(plain, quantization_config=QdslConfig(**config))


def test_what_contradicts_a_folder_is_an_error(own: Path, tmp_path: Path) -> None:
    """Another format, a model of another size, and arguments of saving that have no effect."""
    with pytest.raises(LoadError, match="'q8_0' contradicts the checkpoint"):
        loaded(own, quantization_config=QdslConfig("q8_0"))
    with pytest.raises(LoadError, match="parameters of the model have no weight in the checkpoint"):
        loaded(own, n_layers=3)
    model = loaded(own)
    with pytest.raises(ValueError, match="saved as their files were, without variant"):
        model.save_pretrained(tmp_path, variant="fp16")


@pytest.mark.parametrize("shard", ["10GB", "2MB"])
def test_a_variant_is_saved_without_it(shard: str, plain: Path, tmp_path: Path) -> None:
    """Files quantized on the way, and those of a packed variant, load by themselves once they are saved."""
    loaded(plain).save_pretrained(tmp_path / "plain", variant="fp16", max_shard_size=shard)
    model = loaded(tmp_path / "plain", variant="fp16", quantization_config=QdslConfig("q4_0"))
    model.save_pretrained(tmp_path / "one")
    again = loaded(tmp_path / "one")
    assert models.output(again).equal(models.output(model)) and again.hf_quantizer.report.packed
    packed = tmp_path / "packed"                                 # the same weights, as a variant
    packed.mkdir()
    (packed / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    names = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    variants = {name: re.sub("(?<=pytorch_model)", ".fp16", name) for name in names}
    for name, variant in variants.items():
        (packed / variant).write_bytes((tmp_path / "one" / name).read_bytes())
    if len(names) > 1:
        index = json.loads((tmp_path / "one" / "diffusion_pytorch_model.safetensors.index.json").read_text())
        index["weight_map"] = {tensor: variants[name] for tensor, name in index["weight_map"].items()}
        (packed / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps(index))
    loaded(packed, variant="fp16").save_pretrained(tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").glob("*.safetensors")) == names
    assert models.output(loaded(tmp_path / "two")).equal(models.output(model))


def test_layerwise_casting_is_refused(own: Path) -> None:
    """It would round biases of packed layers to FP8, in place."""
    model = loaded(own)
    before = models.output(model)
    with pytest.raises(ValueError, match="would round biases"):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert models.output(model).equal(before)
    model.dequantize().enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def test_torch_dtype_is_the_dtype_of_a_file(own: Path) -> None:
    """The argument has the name that diffusers' own methods use."""
    assert plugin.load_single_file(diffusers.ZImageTransformer2DModel, own, torch_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_registering_twice_changes_nothing() -> None:
    from qdsl.models.diffusers.register import register

    before = diffusers.ModelMixin.save_pretrained, diffusers.models.modeling_utils.get_parameter_dtype
    register()
    assert (diffusers.ModelMixin.save_pretrained, diffusers.models.modeling_utils.get_parameter_dtype) == before


# -- adapters and offloading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["q4_0", "hlane", "fp8_channel"])
def test_adapters_run_and_are_not_fused_in_place(format: str, plain: Path, tmp_path: Path) -> None:
    """They add to the output as to that of decoded weights; fusing names the remedy, and unfused layers are unchanged."""
    peft = pytest.importorskip("peft")
    model = loaded(plain, quantization_config=QdslConfig(format))
    before, dense = models.output(model), decoded_copy(model, ZIMAGE)
    for base in (model, dense):
        torch.manual_seed(0)
        base.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "w1"], init_lora_weights=False))
    assert models.output(model).equal(models.output(dense)) and not models.output(model).equal(before)
    with pytest.raises(ValueError, match="merge"):
        model.fuse_lora()
    with pytest.raises(ValueError, match="the model has adapters"):
        model.save_pretrained(tmp_path)
    model.disable_adapters()
    assert models.output(model).equal(before)


@pytest.mark.parametrize("format", ["q4_0", "hlane"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(kind: str, format: str, plain: Path) -> None:
    model = loaded(plain, quantization_config=QdslConfig(format))
    before = models.output(model)
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type=kind, **options)
    assert models.output(model).equal(before)


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "ZImageTransformer2DModel"])
def test_a_gguf_file_is_compared_with_a_folder(name: str, tmp_path: Path) -> None:
    """By the folder's names: as it is, compressed without loss, and with one other weight."""
    model = models.random_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    models.write_gguf_model(tmp_path / "model.gguf", model)
    compression.compress(tmp_path / "plain", Compression("fix4"), tmp_path / "fix4")
    for folder in ("plain", "fix4"):
        run = CliRunner().invoke(app, ["verify", str(tmp_path / folder), str(tmp_path / "model.gguf")], catch_exceptions=False)
        assert (run.exit_code, run.stdout) == (0, "equal within the errors of types\n"), run.output
    changed = next(own for own, tensor in model.state_dict().items() if (tensor.dim() == 2 and "qkv" in own) or "to_k" in own)
    with torch.no_grad():
        model.get_parameter(changed)[3].zero_()
    model.save_pretrained(tmp_path / "changed")
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "model.gguf"), str(tmp_path / "changed"), "--json"])
    assert run.exit_code == 1 and [difference["tensor"] for difference in json.loads(run.stdout)["differences"]] == [changed]
    other = models.write_config(tmp_path / "other", "LTXVideoTransformer3DModel")
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "model.gguf"), str(other)])
    assert run.exit_code == 1 and run.stderr.startswith("error: "), run.output
