"""Folders in another storage: the same numbers, the same bytes however the work is cut, and no part taken for the whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.generated import int8_channel, int_group
from qdsl.host.files import OutputError
from qdsl.jobs.convert import plan_conversion, run, target
from qdsl.jobs.convert.run import merge
from qdsl.jobs.engine import RewriteError, stage, work
from qdsl.jobs.engine.shards import balanced_part
from qdsl.runtime import PackedWeight
from tests.support import folders
from tests.support.converted_folders import TWO, convert, refused, two_files, two_layers, weight
from tests.support.jobs import command

weights = pytest.fixture(two_layers)
sharded = pytest.fixture(two_files)


# What is written


def test_layers_change_and_all_else_stays(sharded: Path, weights: dict[str, PackedWeight], tmp_path: Path) -> None:
    report = convert(sharded, tmp_path / "out")
    awq = folders.named({name: int_group.convert(packed, "awq") for name, packed in weights.items()})
    with Folder(tmp_path / "out") as folder, Folder(sharded) as old:
        assert set(folder.names()) == {*awq, "model.norm", "head"}
        for name, tensor in awq.items():
            assert folder.tensor(name).equal(tensor) and folder.tensor(name).dtype == tensor.dtype
            assert folder.file(name).path.name == TWO[0]         # where the largest of the layer's tensors was
        for name in ("model.norm", "head"):
            assert folder.tensor(name).equal(old.tensor(name))
            assert folder.file(name).path.name == old.file(name).path.name
        assert folder.file("head").header.metadata == {"format": "pt"}
        assert folder.index["metadata"] == {"total_parameters": 7,
                                            "total_size": sum(folder.entry(name).nbytes for name in folder.names())}
    with safe_open(tmp_path / "out" / TWO[0], "pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in awq.items())
    assert (tmp_path / "out" / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", *TWO, INDEX, checksums.FILE, "tokenizer", "tokenizer.json"]
    assert report["notes"] == ["pytorch_model.bin holds other weights, and was not copied"]
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "int_group.awq", "count": 2}]
    assert report["shards"] == list(TWO)


def test_private_files_are_not_copied(sharded: Path, tmp_path: Path) -> None:
    """A link out of the folder or a hidden file may be a key; blobs of the hub and links inside of the folder are copied."""
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("cached")
    (tmp_path / "id_rsa").write_text("key")
    (sharded / ".env").write_text("token")
    for name, place in {"notes.txt": tmp_path / "id_rsa", "readme.md": blobs / "0123",
                         "words.txt": sharded / "tokenizer" / "vocab.txt"}.items():
        (sharded / name).symlink_to(place)
    report = convert(sharded, tmp_path / "out")
    written = folders.files(tmp_path / "out")
    assert (written["readme.md"], written["words.txt"]) == (b"cached", b"a\nb\n")
    assert report["notes"] == ["pytorch_model.bin holds other weights, and was not copied",
                               ".env is hidden or a link out of the folder, and was not copied",
                               "notes.txt is hidden or a link out of the folder, and was not copied"]
    assert not written.keys() & {".env", "notes.txt"}


def experts(count: int = 3) -> dict[str, torch.Tensor]:
    """Tensors of GPTQ layers one after the other."""
    packed_experts = [weight(seed=seed) for seed in range(count)]
    return {f"w.{name}": torch.stack([packed.tensors[name] for packed in packed_experts]) for name in packed_experts[0].tensors}


def test_experts_one_after_the_other(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", {**experts(), "w.bias": torch.ones(3, 16)})
    convert(path, tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        for expert in range(3):
            for name, tensor in int_group.convert(weight(seed=expert), "awq").tensors.items():
                assert folder.tensor(f"w.{name}")[expert].equal(tensor)
        assert folder.tensor("w.bias").equal(torch.ones(3, 16))
        assert layers(folder).layers[0].experts == 3


def test_there_and_back_again(sharded: Path, tmp_path: Path) -> None:
    """Every tensor as it was, the index of columns too, which AWQ does not store."""
    convert(sharded, tmp_path / "awq")
    convert(tmp_path / "awq", tmp_path / "back", "gptq_v2")
    with Folder(sharded) as old, Folder(tmp_path / "back") as new:
        assert sorted(old.names()) == sorted(new.names())
        assert all(new.tensor(name).equal(old.tensor(name)) for name in new.names())


def test_a_file_without_an_index(tmp_path: Path, weights: dict[str, PackedWeight]) -> None:
    path = folders.folder(tmp_path / "in", folders.named(weights), index=False)
    convert(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", checksums.FILE, "tokenizer",
                                                    "tokenizer.json"]
    convert(path / "model.safetensors", tmp_path / "alone")
    assert sorted(os.listdir(tmp_path / "alone")) == ["config.json", "model.safetensors", checksums.FILE]
    assert (tmp_path / "alone" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_an_index_keeps_its_name(tmp_path: Path, weights: dict[str, PackedWeight]) -> None:
    """Models of diffusers have another."""
    name = "diffusion_pytorch_model.safetensors.index.json"
    path = folders.folder(tmp_path / "in", *[folders.named({key: packed}) for key, packed in weights.items()])
    (path / INDEX).rename(path / name)
    assert convert(path, tmp_path / "out")["notes"] == ["pytorch_model.bin holds other weights, and was not copied"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", name, *TWO, checksums.FILE, "tokenizer", "tokenizer.json"]


def test_a_file_that_is_left_without_tensors_is_not_written(tmp_path: Path) -> None:
    weights = {"w": weight()}
    every = folders.named(weights)
    path = folders.folder(tmp_path / "in", {"w.scales": every.pop("w.scales")}, every)
    convert(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", TWO[1], INDEX, checksums.FILE, "tokenizer", "tokenizer.json"]
    assert set(Folder(tmp_path / "out").names()) == {"w.qweight", "w.qzeros", "w.scales"}


def test_layers_of_one_format_alone(tmp_path: Path) -> None:
    other = int8_channel.quantize(torch.randn(8, 64))
    weights = {"up": weight(), "down": weight(storage="awq"), "other": other}
    path = folders.folder(tmp_path / "in", folders.named(weights))
    assert "layer 'other': int8_channel.safetensors cannot be awq: int8_channel has no" in refused(path, "awq")
    report = convert(path, tmp_path / "out", "int_group.awq")
    assert report["layers"] == [{"from": "int_group.gptq_v2", "to": "int_group.awq", "count": 1}]
    assert report["layers_kept"] == 2
    with Folder(tmp_path / "out") as folder:
        assert folder.tensor("other.weight").equal(other.tensors["weight"])
        assert "no layer of format q4_0" in refused(path, "q4_0.gguf")


# What is refused


def test_what_would_change_numbers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """All that is wrong at once: an order of columns that AWQ cannot say, rows that its words cannot hold, another width."""
    fields = int_group.unpack(weight())
    order = int_group.pack({**fields, "g": torch.arange(64, dtype=torch.int32) % 2}, "gptq_v2", bits=4, group=32)
    weights = {"order": order, "wide": int_group.quantize(torch.randn(8, 64), "gptq_v2", bits=8, group=32), "fine": weight()}
    config = {"quantization_config": {**folders.GPTQ, "dynamic": {"wide": {"bits": 8}}}}
    path = folders.folder(tmp_path / "in", folders.named(weights), config=config)
    message = refused(path, "awq")
    assert "layer 'order': int_group.gptq_v2 cannot be awq: int_group.awq cannot hold 'g'" in message
    assert "layer 'wide': int_group.gptq_v2 cannot be awq: int_group has no storage 'awq' for bits=8" in message
    assert "fine" not in message


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = folders.named({"v": weight(), "w": weight()})
    path = folders.folder(tmp_path / "in", {**every, "norm": torch.ones(1)})
    monkeypatch.setattr(plan_conversion, "full_name", lambda *_: "norm")
    assert "layer 'v': there is a tensor 'norm' already" in refused(path, "awq")


def test_what_no_file_can_hold_is_refused_once(tmp_path: Path) -> None:
    """A storage that is made when a checkpoint is loaded, and none at all: layers that are alike are one line."""
    path = folders.folder(tmp_path / "in", folders.named({f"w{i}": weight() for i in range(9)}))
    loaded, advice = refused(path, "planar").splitlines()
    assert loaded.endswith("layer 'w0' and 8 more: int_group.gptq_v2 cannot be planar: it is made when a checkpoint is loaded")
    assert "--requantize FORMAT" in advice
    assert "no storage 'marlin2'; did you mean marlin? `qdsl list` prints all" in refused(path, "marlin2")
    assert "cannot be nunchaku: int_group has no storage 'nunchaku'; it has gptq_v2, gptq_v1, awq," in refused(path, "nunchaku")


def test_of_many_problems_some_are_told(tmp_path: Path) -> None:
    """Last groups that are short, which AWQ has none of, of another number of columns in each layer."""
    path = folders.folder(tmp_path / "in", folders.named({f"w{i}": weight(k=32 * i + 40) for i in range(10)}))
    message = refused(path, "awq").splitlines()
    assert len(message) == 10 and message[-2] == "... and 2 layers more" and "--requantize FORMAT" in message[-1]


def test_what_is_not_recognised_is_refused(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "in", folders.named({"w": weight()}), config={})
    assert "layer 'w': the tensors fit int_group.gptq_v2 and int_group.gptq_v1, and nothing says which" in refused(path, "awq")
    other = folders.folder(tmp_path / "other", {"w.weight": torch.ones(3, 4)}, config={})
    assert "no quantized layer" in refused(other, "awq")


def test_places_that_cannot_be_written(sharded: Path, tmp_path: Path) -> None:
    assert "the output is the input" in refused_at(sharded, sharded)
    assert "is an input" in refused_at(sharded, sharded / "tokenizer" / "out")
    convert(sharded, tmp_path / "out")
    before = folders.files(tmp_path / "out")
    assert "exists already" in refused_at(sharded, tmp_path / "out")
    assert folders.files(tmp_path / "out") == before
    with pytest.raises(RewriteError, match="no work was begun here, or it is complete"):
        merge(tmp_path / "out")


def refused_at(path: Path, out: Path) -> str:
    with pytest.raises((RewriteError, OutputError)) as error:
        convert(path, out)
    return str(error.value)


def test_a_full_disk_is_said_before_the_work(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was reserved is given back."""
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / 'out'}/"):
        convert(sharded, tmp_path / "out")
    assert not [name for name in folders.files(tmp_path / "out") if "part" in name or "safetensors" in name]
    monkeypatch.undo()
    convert(sharded, tmp_path / "out")
    assert len(Folder(tmp_path / "out").names()) == 8


# However it is cut


def test_bytes_do_not_depend_on_processes_or_parts(sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "one")
    convert(sharded, tmp_path / "jobs", jobs=2)
    layers = []
    for part in ((2, 3), (1, 3)):
        assert not (tmp_path / "parts" / INDEX).exists()
        layers += convert(sharded, tmp_path / "parts", part=part)["layers"]
        if part == (2, 3):
            with pytest.raises(RewriteError, match=f"1 of 2 shards are not there, .*: {TWO[0]}"):
                merge(tmp_path / "parts")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        Folder(tmp_path / "parts")
    assert [layer["count"] for layer in merge(tmp_path / "parts")["layers"]] == [2] == [sum(layer["count"] for layer in layers)]
    assert folders.files(tmp_path / "one") == folders.files(tmp_path / "jobs") == folders.files(tmp_path / "parts")


def test_parts_are_of_about_the_same_size() -> None:
    shards = [type("S", (), {"name": str(size), "size": size})() for size in (3, 9, 4, 2, 8)]
    parts = [[shard.size for shard in balanced_part(shards, place, 2)] for place in (1, 2)]
    assert parts == [[3, 9, 2], [4, 8]]
    assert [balanced_part(shards[:1], place, 2) for place in (1, 2)] == [shards[:1], []]


def test_two_processes_do_not_write_one_shard(sharded: Path, tmp_path: Path) -> None:
    """Nor does one complete what another still writes; parts are written side by side, and what was begun is taken up."""
    convert(sharded, tmp_path / "one")
    out = tmp_path / "out"
    convert(sharded, out, part=(1, 2))
    with Folder(sharded) as folder:
        planned = plan_conversion.plan(folder, layers(folder), target.Conversion("", "awq"))
    room = next(stage.shard_folder(out / stage.STAGE, shard) for shard in planned.shards if not stage.is_staged(shard, out))
    room.mkdir()
    with stage.lock_folder(room), pytest.raises(RewriteError, match=rf"{room}: another process is writing here"):
        convert(sharded, out)
    with stage.lock_folder(out / stage.STAGE, shared=True):
        convert(sharded, out, part=(2, 2))
        with pytest.raises(RewriteError, match=rf"{out / stage.STAGE}: another process is writing here"):
            merge(out)
    assert not (out / INDEX).exists()
    before = [stage.shard_path(shard, out).stat() for shard in planned.shards]
    work.write(planned.shards, out / stage.STAGE, 1, lambda done, name: None)                # planned before the other was done
    assert [stage.shard_path(shard, out).stat() for shard in planned.shards] == before
    assert merge(out)["shards_written"] == 0
    gone = "does not exist any more; another process may have completed the work"
    with pytest.raises(RewriteError, match=gone), stage.lock_folder(out / stage.STAGE):
        pass
    assert folders.files(out) == folders.files(tmp_path / "one")


def test_only_what_is_missing_or_old_is_done_again(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert(sharded, out, part=(1, 1))["shards_written"] == 2
    assert convert(sharded, out, part=(1, 1))["shards_written"] == 0
    with pytest.raises(RewriteError, match="a conversion to awq was begun here"):
        convert(sharded, out, "gptq_v1")
    with Folder(sharded) as folder:
        head = folder.tensor("head").clone()
        scales = {name: folder.tensor(name).clone() for name in ("model.up.scales", "model.down.scales")}
    write(sharded / TWO[1], {"head": head + 1, **scales}, {"format": "pt"})
    with pytest.raises(RewriteError, match="2 of 2 shards are not there"):        # the first has the second's scales
        merge(out)
    assert convert(sharded, out)["shards_written"] == 2
    assert Folder(out).tensor("head").equal(head + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("index", [True, False])
def test_killed_at_any_moment(tmp_path: Path, index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader takes what is left for a checkpoint, and the next process makes the same bytes of it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    weights = {"w": weight()}
    every = folders.named(weights)
    parts = [every, {"norm": torch.ones(3)}] if index else [every]
    path = folders.folder(tmp_path / "in", *parts, index=index)
    assert len(list(folders.killed_everywhere(lambda out: convert(path, out), tmp_path))) > 20 // folders.KILLED


def test_what_processes_left_is_removed(sharded: Path, tmp_path: Path) -> None:
    place = tmp_path / "out" / stage.STAGE / stage.SHARDS / TWO[0]
    place.mkdir(parents=True)
    (place / ".qdsl-0123.part").write_bytes(b"half")
    convert(sharded, tmp_path / "out")
    assert [name for name in folders.files(tmp_path / "out") if "qdsl" in name] == [checksums.FILE]


def test_a_note_of_a_stranger_is_refused(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / stage.STAGE).mkdir(parents=True)
    (tmp_path / "out" / stage.STAGE / stage.REQUEST).write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        convert(sharded, tmp_path / "out")
    asked = {"command": "convert", "work": "a conversion to awq", "format": "", "storage": "awq", "requantize": False,
             "params": {}}
    (tmp_path / "out" / stage.STAGE / stage.REQUEST).write_text(json.dumps(asked))
    convert(sharded, tmp_path / "out")


# The command


def test_readers_of_gptq_without_symmetry(sharded: Path, tmp_path: Path) -> None:
    """gptqmodel 7.7 raises ValueError for checkpoint_format gptq; its layers, which transformers loads, take the tensors."""
    lines = command("convert", sharded, "--to", "gptq_v1", "-o", tmp_path / "v1").stdout.splitlines()
    assert "read by: qdsl alone" in lines and "not read by transformers: it asks gptqmodel to, where that is installed" in lines
    assert any(line.startswith("not read by gptqmodel: its own loader takes sym = false as gptq_v2 alone") for line in lines)


def test_the_command_says_what_became_of_layers(sharded: Path, tmp_path: Path) -> None:
    result = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out", "--jobs", "1")
    size = sum((tmp_path / "out" / name).stat().st_size for name in TWO)
    assert (result.exit_code, result.stdout.splitlines()) == (0, [
        "note: pytorch_model.bin holds other weights, and was not copied", "2 layers from int_group.gptq_v2 to int_group.awq",
        "read by: qdsl, gptqmodel, vLLM", "not read by transformers: it asks gptqmodel to, where that is installed",
        f"written  {tmp_path / 'out'}: 2 files of tensors, {size} bytes"])
    again = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out")
    assert again.exit_code == 2 and "exists already, and no interrupted run left it; --force replaces" in again.stderr
    asked = ("--requantize", "fp8_block", "--param", "bn=32", "-o", tmp_path / "fp8", "-j", "1")
    result = command("convert", sharded, *asked, "--json")
    data = json.loads(result.stdout)
    assert data["schema"] == 1 and set(data["requantized"]) == {"model.up", "model.down"} and 20 < data["snr_db"] < 50
    worst = min(data["requantized"], key=lambda name: data["requantized"][name]["snr_db"])
    shutil.rmtree(tmp_path / "fp8")
    result = command("convert", sharded, *asked)
    assert f"signal to noise {data['snr_db']:.2f} dB, the least of '{worst}'" in result.stdout


@pytest.mark.parametrize(("to", "option", "expected"), [
    ("int_group", "symmetric=true", {"symmetric": True}), ("int_group", "symmetric=False", {"symmetric": False}),
    ("int_group", "span=FULL", "error: int_group: span is one of "),
    ("int_group", "symmetric=yes", "error: int_group: symmetric is one of True, False, not yes"),
    ("int_group", "bits=\u00b2", "error: int_group: bits is one of "), ("fp8_channel", "least=1e-3", {"least": 0.001}),
    ("fp8_channel", "least=nan", "error: fp8_channel: least is a positive number, not nan"),
    ("fp8_channel", "scale_type=f32", {"scale_type": "f32"}),
])
def test_parameters_are_numbers_words_and_truths(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str,
                                                 option: str, expected: dict[str, object] | str) -> None:
    aims: list[target.Conversion] = []
    monkeypatch.setattr(run, "convert", lambda source, detected, aim, out, **options: aims.append(aim) or {})
    monkeypatch.setattr("qdsl.cli.convert.print_converted", lambda *_: None)
    result = command("convert", sharded, "--requantize", to, "--param", option, "-o", tmp_path / "out")
    if isinstance(expected, str):
        assert result.exit_code == 2 and result.stderr.startswith(expected) and not aims
    else:
        assert result.exit_code == 0
        assert all(aims[0].params[key] == value and type(aims[0].params[key]) is type(value) for key, value in expected.items())


def test_parts_and_their_index_as_commands(sharded: Path, tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        result = command("convert", sharded, "--to", "awq", "-o", tmp_path / "out", "--shard", part, "-j", "1")
        assert result.exit_code == 0 and f"written  part {part} of {tmp_path / 'out'}: 1 file of tensors" in result.stdout
    assert command("merge-index", tmp_path / "out").exit_code == 0
    assert len(Folder(tmp_path / "out").names()) == 8
    again = command("merge-index", tmp_path / "out")
    assert again.exit_code == 1 and "no work was begun here, or it is complete" in again.stderr


@pytest.mark.parametrize("arguments", [[], ["--to", "awq", "--requantize", "fp8_block"], ["--to", "awq", "--param", "bits=4"],
                                       *(["--to", "awq", "--shard", part] for part in ("0/2", "3/2", "1", "a/b", "1/-2", ""))])
def test_options_that_make_no_sense(sharded: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = command("convert", sharded, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and not (tmp_path / "out").exists()
