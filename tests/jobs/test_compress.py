"""Whole checkpoints without loss in fewer bits, and back: the package's files, the same bytes however the work is cut."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.groups import groups
from qdsl.checkpoint.detect.guard import with_guard
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import INDEX, ORIGINAL, Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.checkpoint.report.verify import differences
from qdsl.checkpoint.report.verify_decoded import decoded_differences
from qdsl.generated import bf16, fix3, fix4, hlane
from qdsl.jobs.compress import patterns, restore, run
from qdsl.jobs.compress.tensors import EncodedMatrices
from qdsl.jobs.compress.units import FORMATS, Compression
from qdsl.jobs.engine import RewriteError
from tests.support import folders
from tests.support.bf16_folders import CONFIG, DF11, model, normal, sharded_model, toy_folder, without
from tests.support.jobs import command


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A diffusion pipeline: two models that are compressed, an autoencoder, which is not, and a scheduler."""
    for name, tensors in (("transformer", model()), ("text_encoder", model(1)),
                          ("vae", {"conv.weight": normal(4, 4, 3, 3), "attention.query.weight": normal(64, 64)})):
        (tmp_path / "pipe" / name).mkdir(parents=True)
        parts = [tensors, {"more": torch.ones(3)}] if name == "transformer" else [tensors]
        for number, part in enumerate(parts):
            write(tmp_path / "pipe" / name / f"diffusion-{number}.safetensors", part)
        if len(parts) > 1:
            placed = {key: f"diffusion-{number}.safetensors" for number, part in enumerate(parts) for key in part}
            (tmp_path / "pipe" / name / "diffusion.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        (tmp_path / "pipe" / name / "config.json").write_text(json.dumps({"_class_name": name}))
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    return tmp_path / "pipe"


sharded = pytest.fixture(sharded_model)
toy = pytest.fixture(scope="module")(toy_folder)


def test_the_files_of_the_package(toy: Path, tmp_path: Path) -> None:
    """Its file of tensors and its config, byte for byte; and back to the file that they were made of."""
    result = command("compress", toy, "-f", "df11", "--patterns", DF11 / "config.json", "--plain-config", "-o", tmp_path / "out",
                     "-j", 1, "--check")
    assert result.exit_code == 0 and "8 matrices as 4 of df11: 87040 bytes are 62935, 72.31 %, 11.569 bits" in result.stdout
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (DF11 / name).read_bytes()
    assert command("decompress", tmp_path / "out", "-o", tmp_path / "back", "-j", 1).exit_code == 0
    assert folders.files(tmp_path / "back") == folders.files(toy)


def test_a_folder_of_the_package_with_another_that_says_the_shapes(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(DF11, tmp_path / "in", ignore=shutil.ignore_patterns("*.npz"))
    with pytest.raises(RewriteError, match="no file here says what shapes its matrices have; --like REF can"):
        restore.decompress(tmp_path / "in", tmp_path / "out")
    report = restore.decompress(tmp_path / "in", tmp_path / "out", like=toy)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (toy / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {} and not report["exact"]


def test_groups_are_decoded_weight_by_weight(toy: Path) -> None:
    with Folder(DF11) as folder, Folder(toy) as old:
        for group in groups(folder):
            for name, numbers in layer_weights.decoded(folder, group).items():
                assert numbers.equal(old.tensor(name).flatten())


def test_a_file_for_each_group(toy: Path, tmp_path: Path) -> None:
    """With all that lies in its module, as with save_single_file=False."""
    group_patterns = json.dumps({r"layers\.\d+": ["q", "ff.0", "ff.2"]})
    run.compress(toy, Compression("df11", patterns=patterns.read(group_patterns), by_group=True), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "layers_0.safetensors", "layers_1.safetensors",
                                                    "model.safetensors", checksums.FILE, ORIGINAL]
    with Folder(tmp_path / "out") as folder, Folder(DF11) as single:
        assert folder.file("layers.1.norm.bias").path.name == folder.file("layers.1.luts").path.name == "layers_1.safetensors"
        assert folder.file("emb.weight").path.name == "model.safetensors"
        names = [name for name in single.names() if name.startswith("layers")]
        assert all(folder.tensor(name).equal(single.tensor(name)) for name in names)
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == folders.files(toy)


# There and back


@pytest.mark.parametrize("format", FORMATS)
def test_there_and_back_again(format: str, sharded: Path, tmp_path: Path) -> None:
    """Files cut as they were, but DF11's; what is smaller as it is; and all that there was, back."""
    report = run.compress(sharded, Compression(format), tmp_path / "out", check=True)
    grown = ["head"]                                             # and in no format does it become larger
    assert [row["name"] for row in report["raw"]] == grown and "would take the place of" in report["raw"][0]["why"]
    assert report["matrices"] == 7 and report["bits_per_weight"] < 15 and report["checked"]
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == without(folders.files(sharded), "pytorch_model.bin")
    assert not differences(sharded, tmp_path / "back") and not decoded_differences(sharded, tmp_path / "out")
    files = folders.files(tmp_path / "out")
    assert (INDEX in files) == (format != "df11") and ("model.safetensors" in files) == (format == "df11")
    assert files["tokenizer/vocab.txt"] == b"a\nb\n"


@pytest.mark.parametrize(("format", "module"), [("hlane", hlane), ("fix4", fix4), ("fix3", fix3)])
def test_weights_as_modules_have_them(format: str, module: Any, sharded: Path, tmp_path: Path) -> None:
    """A layer of a file is the format's own weight, found by its tensors, and says what it was."""
    run.compress(sharded, Compression(format), tmp_path / "out")
    settings = {"quant_method": "qdsl", "format": format, "storage": format, "version": 1}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == with_guard({**CONFIG, "quantization_config": settings})
    with Folder(tmp_path / "out") as folder, Folder(sharded) as old:
        detected = layers(folder)
        assert [(layer.format, layer.problems, layer.why) for layer in detected.layers] == [(format, (), "")] * 7
        assert not detected.problems
        for layer in detected.layers:
            packed = module.wrap({leaf: folder.tensor(name) for leaf, name in layer.tensors.items()})
            weight = old.tensor(f"{layer.name}.weight")
            assert packed.shape == tuple(weight.shape) == layer.shape
            assert module.dequantize(packed).view(torch.int16).equal(weight.view(torch.int16))
            again = module.convert(bf16.pack({"v": weight}), format)
            assert all(again.tensors[leaf].equal(folder.tensor(name)) for leaf, name in layer.tensors.items())
    found_text = command("inspect", tmp_path / "out").stdout
    assert "model.layers.{0-1}.mlp.up" in found_text and f"{format}.{format}" in found_text


def test_hlane_without_what_was_kept(sharded: Path, tmp_path: Path) -> None:
    """The tensors say what they are; files are laid out as usual."""
    run.compress(sharded, Compression("hlane"), tmp_path / "out")
    (tmp_path / "out" / ORIGINAL).unlink()
    report = restore.decompress(tmp_path / "out", tmp_path / "back")
    assert not differences(sharded, tmp_path / "back") and not report["exact"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG
    assert without(folders.files(tmp_path / "back"), "config.json", INDEX) == \
        without(folders.files(sharded), "config.json", INDEX, "pytorch_model.bin")


@pytest.mark.parametrize("format", ["df11", "hlane"])
def test_models_of_a_pipeline(format: str, pipeline: Path, tmp_path: Path) -> None:
    report = run.compress(pipeline, Compression(format), tmp_path / "out", check=True)
    assert report["units"] == {"df11": 5, "hlane": 11}[format]
    files = folders.files(tmp_path / "out")
    before = folders.files(pipeline)
    same = ["model_index.json", "vae/config.json", "vae/diffusion-0.safetensors"]
    assert all(files[name] == before[name] for name in same) and f"vae/{ORIGINAL}" not in files
    assert f"transformer/{ORIGINAL}" in files and f"text_encoder/{ORIGINAL}" in files
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == before
    inspected = command("inspect", tmp_path / "out")
    assert inspected.exit_code == 0
    assert all(f"{tmp_path / 'out' / name}: safetensors" in inspected.stdout for name in ("transformer", "text_encoder", "vae"))
    assert command("verify", pipeline, tmp_path / "back").stdout == "equal\n"
    only = run.compress(pipeline, Compression(format, only=("transformer",)), tmp_path / "only")
    assert only["units"] < report["units"]
    run.compress(pipeline, Compression("fix4"), tmp_path / "fix4")
    run.compress(tmp_path / "only", Compression("fix4"), tmp_path / "again", check=True)
    assert folders.files(tmp_path / "again") == folders.files(tmp_path / "fix4")
    remaining = run.compress(tmp_path / "only", Compression(format, only=("text_encoder",)), tmp_path / "rest")
    assert only["units"] + remaining["units"] == report["units"]
    assert folders.files(tmp_path / "rest") == folders.files(tmp_path / "out")
    assert any(note.startswith("vae: stays as it is; `--component vae` compresses it") for note in report["notes"])
    assert run.compress(pipeline, Compression(format, only=("vae",)), tmp_path / "vae")["matrices"] == 1
    with pytest.raises(RewriteError, match="no model 'unet': there are text_encoder, transformer, vae"):
        run.compress(pipeline, Compression(format, only=("unet",)), tmp_path / "none")


@pytest.mark.parametrize(("source", "aim"), [
    ("df11", Compression("hlane")), ("df11", Compression("fix4")), ("df11", Compression("df11", threads=256)),
    ("fix4", Compression("fix3")), ("hlane", Compression("df11")),
    ("fix4", Compression("df11", patterns={r"model\.layers\.\d+": ["mlp.up", "mlp.q"]}))])
def test_a_compressed_folder_in_another_format(source: str, aim: Compression, sharded: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the plain folder would become; groups are decoded once, also where their matrices lie in several files."""
    run.compress(sharded, Compression(source), tmp_path / "source")
    run.compress(sharded, aim, tmp_path / "expected")
    monkeypatch.setattr(run.pieces, "WORTH", 1 << 13)            # several pieces
    decoded: list[str] = []
    original = EncodedMatrices.decoded
    monkeypatch.setattr(EncodedMatrices, "decoded", lambda coded: decoded.append(coded.name) or original(coded))
    run.compress(tmp_path / "source", aim, tmp_path / "out")
    assert len(decoded) == len(set(decoded)) == (3 if source == "df11" else 7)
    expected = without(folders.files(tmp_path / "expected"), "pytorch_model.bin")
    assert folders.files(tmp_path / "out") == expected and not decoded_differences(sharded, tmp_path / "out")
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert not differences(sharded, tmp_path / "back")


def test_a_published_folder_becomes_hlane(toy: Path, tmp_path: Path) -> None:
    """Shapes come from another checkpoint's headers or from a model; parts of the work know them, too."""
    source = shutil.copytree(DF11, tmp_path / "in", ignore=shutil.ignore_patterns("*.npz"))
    with pytest.raises(RewriteError, match="says what shapes its matrices have; --like REF can, a folder or repository with"):
        run.compress(source, Compression("hlane"), tmp_path / "out")
    result = command("compress", source, "-f", "hlane", "-o", tmp_path / "like", "-j", 1, "--like", toy, "--shard", "1/1")
    assert result.exit_code == 0 and command("merge-index", tmp_path / "like").exit_code == 0
    with Folder(toy) as folder:
        shapes = {name: folder.entry(name).shape for name in folder.names()}
    run.compress(source, Compression("hlane"), tmp_path / "out", shapes=lambda folder: shapes, check=True)
    run.compress(toy, Compression("hlane"), tmp_path / "expected")
    same, *others = (without(folders.files(tmp_path / name), "config.json", ORIGINAL, checksums.FILE)
                     for name in ("expected", "like"))
    assert others == [same]
    for out in (tmp_path / "like", tmp_path / "out"):
        assert not decoded_differences(toy, out)
        assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "hlane"
    for wrong, message in (({}, r"nothing says the shape of '.*\.weight'; --like REF can"),
                           (dict.fromkeys(shapes, (1, 1)), r"has \d+ numbers, and not the shape \[1, 1\]")):
        with pytest.raises(RewriteError, match=message):
            run.compress(source, Compression("hlane"), tmp_path / "wrong", shapes=lambda folder, wrong=wrong: wrong)
    write(tmp_path / "less.safetensors", {name: torch.zeros(shape).bfloat16() for name, shape in list(shapes.items())[1:]})
    with pytest.raises(RewriteError, match=r"less\.safetensors has no tensor|nothing says the shape of"):
        run.compress(source, Compression("hlane"), tmp_path / "wrong", like=tmp_path / "less.safetensors")


def test_files_that_libraries_read(tmp_path: Path) -> None:
    """A model of diffusers in a file for each group becomes files with an index, by the library's names."""
    path = folders.folder(tmp_path / "in", model(), config={"_class_name": "Toy"}, index=False)
    run.compress(path, Compression("df11", by_group=True), tmp_path / "df11")
    (tmp_path / "df11" / ORIGINAL).unlink()
    shapes = {name: tuple(tensor.shape) for name, tensor in model().items()}
    run.compress(tmp_path / "df11", Compression("fix4"), tmp_path / "out", shapes=lambda folder: shapes)
    stem = "diffusion_pytorch_model"
    assert sorted(name for name in folders.files(tmp_path / "out") if "safetensors" in name) == [
        *(f"{stem}-0000{number}-of-00004.safetensors" for number in range(1, 5)), f"{stem}.safetensors.index.json"]
    assert not decoded_differences(path, tmp_path / "out")
    report = restore.decompress(tmp_path / "df11", tmp_path / "back", shapes=lambda folder: shapes)
    assert not differences(path, tmp_path / "back") and not report["exact"]


def test_what_lies_beside_a_pipeline_is_none_of_its_models(pipeline: Path, tmp_path: Path) -> None:
    """As FLUX.1-dev has its transformer a second time, for others."""
    write(pipeline / "flux1-dev.safetensors", model(1))
    report = run.compress(pipeline, Compression("fix4", only=("transformer",)), tmp_path / "out")
    assert "flux1-dev.safetensors holds other weights, and was not copied" in report["notes"]
    assert (tmp_path / "out" / "transformer" / ORIGINAL).exists() and not (tmp_path / "out" / "flux1-dev.safetensors").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_experts_and_convolutions(format: str, tmp_path: Path) -> None:
    """Experts in one tensor are a matrix of all their rows in hlane and fix4; what stays as it is is said."""
    every = {"mlp.experts.gate_up_proj": normal(3, 40, 64), "moe.input_linear.weight": normal(2, 32, 96),
             "q.weight": normal(64, 64), "mlp.experts.gate_up_proj_bias": normal(3, 40), "conv.weight": normal(8, 8, 3, 3),
             "half.weight": torch.ones(8, 8).half(), "conv1d.weight": normal(64, 64, 4), "pos_embed": normal(1, 64, 64)}
    path = folders.folder(tmp_path / "in", every, config=CONFIG, index=False)
    result = command("compress", path, "-f", format, "-o", tmp_path / "out", "-j", 1, "--check")
    stacks = {"mlp.experts.gate_up_proj": (120, 64), "moe.input_linear.weight": (64, 96)} if format != "df11" else {}
    whole = {name: tensor for name, tensor in every.items() if name not in (*stacks, "q.weight")}
    for (dtype, axes), count in Counter((str(tensor.dtype), tensor.dim()) for tensor in whole.values()).items():
        kind = {"torch.bfloat16": "BF16", "torch.float16": "F16"}[dtype]
        assert f"note: tensors of {kind} with {axes} axes stay as they are, {count} of " in result.stdout
    assert f"{1 + len(stacks)} matrices as" in result.stdout and ", 1 of 128 bytes: not bfloat16" in result.stdout
    with Folder(tmp_path / "out") as folder:
        assert all(folder.tensor(name).equal(tensor) for name, tensor in whole.items())
        assert {f"{layer.name}.weight": layer.shape for layer in layers(folder).layers} == (
            {} if format == "df11" else {"q.weight": (64, 64)} | {f"{name.removesuffix('.weight')}.weight": shape
                                                                  for name, shape in stacks.items()})
    if stacks:
        assert command("verify", "--decoded", path, tmp_path / "out", "-j", 1).stdout == "equal\n"
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == without(folders.files(path), "pytorch_model.bin")
    if stacks:
        (tmp_path / "out" / ORIGINAL).unlink()
        restore.decompress(tmp_path / "out", tmp_path / "like", like=path)
        assert not differences(path, tmp_path / "like")


def test_layers_that_are_quantized_keep_their_settings(tmp_path: Path) -> None:
    """What is compressed beside them says by itself what it is."""
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64], "modules_to_not_convert": ["head"]}}
    every = {"head.weight": normal(128, 64), "up.weight": normal(64, 64).to(torch.float8_e4m3fn),
             "up.weight_scale_inv": torch.ones(1, 1)}
    path = folders.folder(tmp_path / "in", every, config=settings, index=False)
    run.compress(path, Compression("hlane"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == with_guard(settings)
    with Folder(tmp_path / "out") as folder:
        assert {layer.name: (layer.format, layer.problems) for layer in layers(folder).layers} == {
            "head": ("hlane", ()), "up": ("fp8_block", ())}
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert not differences(path, tmp_path / "back")


def test_a_file_by_itself(toy: Path, tmp_path: Path) -> None:
    run.compress(toy / "model.safetensors", Compression("fix4"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", checksums.FILE, ORIGINAL]
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert folders.files(tmp_path / "back") == folders.files(toy)


# Groups


def test_patterns_of_the_names_that_there_are() -> None:
    names = {f"model.layers.{number}.{leaf}": 9 for number in range(12) for leaf in ("mlp.up", "attn.q")}
    assert patterns.default_patterns({**names, "model.embed": 9, "lm_head": 9}) == {
        r"model\.layers\.\d+": ["attn.q", "mlp.up"], r"model\.embed": [], "lm_head": []}
    mixed = {name: size for name, size in names.items() if name != "model.layers.3.attn.q"}
    assert patterns.default_patterns(mixed) == {r"model\.layers\.(?:0|1|2|4|5|6|7|8|9|10|11)": ["attn.q", "mlp.up"],
                                     r"model\.layers\.(?:3)": ["mlp.up"]}
    t5 = {f"block.{number}.layer.0.{leaf}": 9 for number in range(3) for leaf in "qv"} | {"block.0.layer.0.relative_bias": 9}
    assert patterns.default_patterns(t5) == {r"block\.\d+": ["layer.0.q", "layer.0.v"], r"block\.0\.layer\.0\.relative_bias": []}
    assert patterns.default_patterns(names, [*names, "model.layers.12", "model.layers.0"]) == {
        rf"model\.layers\.(?:{'|'.join(map(str, range(12)))})": ["attn.q", "mlp.up"]}
    assert patterns.default_patterns({"mlp.0": 9, "mlp.2": 9, "0.up": 9}) == {r"mlp\.0": [], r"mlp\.2": [], r"0\.up": []}


def test_blocks_that_are_too_large_for_a_group() -> None:
    """Their experts are groups; what is still too large is for itself; and each weight is in one group."""
    names = {f"layers.{number}.{leaf}": 1 << 29 for number in range(3)
             for leaf in ("q", *(f"experts.{expert}.{way}" for expert in range(4) for way in ("down", "up")))}
    grouped = patterns.default_patterns(names)
    assert grouped == {r"layers\.\d+": ["q"], r"layers\.\d+\.experts\.\d+": ["down", "up"]}
    wide = patterns.default_patterns({f"layers.0.{leaf}": 1 << 30 for leaf in "abc"})
    assert wide == {rf"layers\.0\.{leaf}": [] for leaf in "abc"}
    some = patterns.default_patterns({name: size for name, size in names.items() if name != "layers.1.experts.2.up"})
    assert [name for name in some if "experts" in name][1] == r"layers\.1\.experts\.(?:2)" and len(some) == 3


@pytest.mark.parametrize(("pattern_dict", "message"), [
    ({"model.layers.1": ["mlp.q", "mlp.nope"]}, r"has no 'model.layers.1.mlp.nope.weight'"),
    ({"table": []}, r"'table.weight' is F32 \[70, 64\], and no bfloat16 matrix"),
    ({"model.layers.0.norm": []}, r"'model.layers.0.norm.weight' is BF16 \[64\], and no bfloat16 matrix"),
    ({"model.layers.0": ["mlp.q"], "model.layers.0.mlp.q": []}, r"is in 'model.layers.0' already"),
    ({"model.layers.0": ["mlp.q"], r"model\.layers\.\d": ["mlp.up"]}, "is named twice"),
    ({"model.layers.0": []}, "has no weight, and the pattern lists none"),
    ({"nope": []}, "no pattern names a module"),
])
def test_patterns_that_do_not_fit(pattern_dict: dict[str, list[str]], message: str, sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriteError, match=message):
        run.compress(sharded, Compression("df11", patterns=pattern_dict), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "message"), [
    ('{"a(": []}', "is not a regular expression"), ("{", "not JSON"), ('{"a": "b"}', "lists of names")])
def test_patterns_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RewriteError, match=message):
        patterns.read(text)


def test_what_df11_cannot_hold_stays(tmp_path: Path) -> None:
    """With the reason and the remedy; constants, on which the package fails, it can."""
    every = {"inf.weight": normal(64, 64), "zero.weight": torch.zeros(64, 64).bfloat16(), "w.weight": normal(64, 64)}
    every["inf.weight"][3, 5] = torch.inf
    path = folders.folder(tmp_path / "in", every, config=CONFIG, index=False)
    report = run.compress(path, Compression("df11"), tmp_path / "out", check=True)
    assert [row["name"] for row in report["raw"]] == ["inf"] and report["matrices"] == 2
    assert "exponent 255" in report["raw"][0]["why"] and "hlane or fix4" in report["raw"][0]["why"]
    restore.decompress(tmp_path / "out", tmp_path / "back")
    assert not differences(path, tmp_path / "back")


# What inspect says


def test_shared_memory_of_groups(tmp_path: Path) -> None:
    """A group whose blocks are too full for a GPU, and the threads with which they are not, as another compression shows."""
    every = {"flat.weight": normal(512, 512), "up.weight": normal(256, 512)}
    every["flat.weight"][:200] = 0
    path = folders.folder(tmp_path / "in", every, config=CONFIG, index=False)
    run.compress(path, Compression("df11"), tmp_path / "out")
    [flat, up] = json.loads(command("inspect", "--json", tmp_path / "out").stdout)["groups"]
    assert (flat["shared_memory"], flat["threads_that_fit"], flat["threads_per_block"]) == (67588, 256, 512)
    assert up["shared_memory"] < flat["shared_memory_limit"] == 49152 and up["threads_that_fit"] == 512
    for options, code, fits in (((), 0, False), (("--shared-memory", 49152), 1, False), (("--shared-memory", 67587), 1, False),
                                (("--shared-memory", 67588), 0, True)):
        result = command("inspect", tmp_path / "out", *map(str, options))
        assert result.exit_code == code and ("more than" not in result.stdout) == fits
    assert "more than 49152: 256 threads fit" in command("inspect", tmp_path / "out").stdout
    run.compress(path, Compression("df11", threads=256), tmp_path / "less")
    assert not decoded_differences(tmp_path / "out", tmp_path / "less")
    [flat, _] = json.loads(command("inspect", "--json", tmp_path / "less").stdout)["groups"]
    assert (flat["shared_memory"], flat["threads_per_block"]) == (33796, 256)
    restore.decompress(tmp_path / "less", tmp_path / "back")
    assert not differences(path, tmp_path / "back")


@pytest.mark.parametrize("arguments", [["-f", "zip"], ["-f", "hlane", "--patterns", "{}"], ["-f", "hlane", "--file-per-group"],
                                       ["-f", "df11", "--threads-per-block", "100"], ["-f", "hlane", "--shard", "3/2"],
                                       ["-f", "hlane", "--shard", "1/2", "--check"]])
def test_options_that_make_no_sense(arguments: list[str], sharded: Path, tmp_path: Path) -> None:
    result = command("compress", sharded, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and not (tmp_path / "out").exists()
