"""Files quantized as a whole: what is written, what it says it cost, and that nothing half-done is left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.detect.gguf_weights import module_of, packed_weight
from qdsl.checkpoint.files.crc import FILE
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.cli import app
from qdsl.generated import fp8_block, q4_0, q8_0
from qdsl.host.files import journal_of
from qdsl.jobs.gguf import quality, run
from qdsl.jobs.gguf.mixes import MIXES, Model, Options, mix_of
from qdsl.jobs.gguf.plan_file import plan
from qdsl.jobs.gguf.source import open_source
from tests.support.models import ToyModel, weights, written
from tests.support.paths import ROOT
from tests.support.quantize_command import drawn, quantize, refused, report

DENSE = ToyModel(Model("llama", 2, 4, 2), 256, 512)
EXPERTS = ToyModel(Model("llama", 1, 4, 4, 3), 64, 96, tied=True)
PLAIN = ("--type", "q4_0", "--output-tensor-type", "q8_0")        # types that need no search


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What is written


def test_gguf_py_reads_what_is_written(folder: Path) -> None:
    """Types, metadata and bytes: those of gguf-py's own quantizers where it has them."""
    source = weights(DENSE)
    summary = report(written(folder / "in.gguf", DENSE), *PLAIN, "--tensor-type", r"blk\.1\.attn_q=bf16", "--out", "out.gguf")
    reader = gguf.GGUFReader(folder / "out.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == [row["name"] for row in summary["tensors"]] and tensors.keys() == source.keys()
    assert [tensors[name].tensor_type.name for name in ("output.weight", "blk.1.attn_q.weight", "blk.0.ffn_norm.weight")] \
        == ["Q8_0", "BF16", "F32"]
    for row in summary["tensors"]:
        tensor, original = tensors[row["name"]], source[row["name"]]
        assert tensor.tensor_type.name == row["type"] and tensor.n_bytes == row["nbytes"]
        wanted = gguf.quants.quantize(original.astype(np.float32), tensor.tensor_type)
        assert np.array_equal(tensor.data.view(np.uint8), wanted.view(np.uint8)), row["name"]
    fields = reader.fields
    for key in ("general.file_type", "general.quantization_version", "llama.block_count"):
        assert fields[key].contents() == 2
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "ü"]
    assert list(fields)[-2:] == ["general.quantization_version", "general.file_type"]


def test_tensors_are_what_their_formats_make_of_them(folder: Path) -> None:
    """Row by row, also of several experts, and whatever the chunks."""
    source = weights(EXPERTS)
    summary = report(written(folder / "in.gguf", EXPERTS), "--type", "q8_0", "-o", "out.gguf")
    with GgufFile("out.gguf") as file:
        for row in summary["tensors"]:
            original = torch.from_numpy(source[row["name"]]).float().view(-1, row["shape"][-1])
            if row["type"] == "Q8_0":
                assert file.rows(row["name"]).equal(q8_0.quantize(original).tensors["blocks"])
                stored = q8_0.dequantize(packed_weight(file, row["name"]), torch.float32)
                noise = (stored - original).double().square().sum() / original.double().square().sum()
                assert row["snr_db"] == pytest.approx(-10 * math.log10(float(noise)), abs=1e-5)
            else:
                assert "snr_db" not in row and file.tensor(row["name"]).flatten().equal(original.flatten())


def test_bytes_do_not_depend_on_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(folder / "in.gguf", EXPERTS)
    whole = report(path, "-t", "q8_0", "-o", "one.gguf", "--jobs", "1")
    monkeypatch.setattr(run, "CHUNK", 64 * 20)
    parts = report(path, "-t", "q8_0", "-o", "two.gguf", "--jobs", "2")
    one = report(path, "-t", "q8_0", "-o", "three.gguf", "--jobs", "1")
    assert Path("one.gguf").read_bytes() == Path("two.gguf").read_bytes() == Path("three.gguf").read_bytes()
    assert parts["tensors"] == one["tensors"]
    assert [row["type"] for row in parts["tensors"]] == [row["type"] for row in whole["tensors"]]


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(folder: Path) -> None:
    path = written(folder / "in.gguf", DENSE)
    before = sorted(os.listdir())
    dry = report(path, *PLAIN, "--dry-run")
    assert sorted(os.listdir()) == before and dry["out"] is None
    real = report(path, *PLAIN, "--out", "out.gguf")
    bare = [{key: value for key, value in row.items() if "snr" not in key} for row in real["tensors"]]
    assert bare == dry["tensors"] and real["nbytes"] == dry["nbytes"]
    assert dry["nbytes"] <= os.path.getsize("out.gguf") <= dry["nbytes"] + 32 * (len(bare) + 1) + 4096
    with GgufFile("out.gguf") as file:
        assert {name: entry.nbytes for name, entry in file.tensors.items()} == {row["name"]: row["nbytes"] for row in bare}


def test_a_dry_run_imports_nothing_heavy(folder: Path) -> None:
    """Of all mixes, those that have no quantizer and those that need an importance matrix among them."""
    written(folder / "in.gguf", DENSE)
    (folder / "i.dat").write_bytes(b"\1\0\0\0\1\0\0\0a\1\0\0\0\1\0\0\0\0\0\0\0")
    code = f"""
import sys
from qdsl.cli import app
for mix in {list(MIXES)}:
    try:
        app(["quantize", "in.gguf", "--type", mix, "--dry-run", "--imatrix", "i.dat"])
    except SystemExit as end:
        assert end.code == 0, mix
assert not {{"torch", "numpy", "triton"}} & sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "tensors need an importance matrix, the first 'blk.0." in done.stdout


def test_the_table_and_the_picture(folder: Path) -> None:
    path = written(folder / "in.gguf", DENSE)
    result = quantize(path, *PLAIN, "-o", "out.gguf", "--svg", "out.svg")
    lines = result.stdout.splitlines()
    assert result.stderr == "" and lines[0].split() == ["tensor", "shape", "from", "to", "MiB", "SNR", "dB"]
    [row] = [line.split() for line in lines if line.startswith("blk.1.ffn_down.weight")]
    assert row[1:7] == ["256", "x", "512", "F16", "Q4_0", "0.07"] and 15 < float(row[7]) < 25
    assert any(line.split()[:2] == ["Q8_0", "1"] for line in lines) and lines[-1].startswith("written  out.gguf  ")
    text = (folder / "out.svg").read_text()
    drawn = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert "in.gguf as Q4_0: signal to noise" in drawn and "blk.1.ffn_down.weight" in drawn and f"{row[7]} dB" in drawn
    assert not any("norm" in str(text) for text in drawn)
    quantize(path, *PLAIN, "-o", "out.gguf", "--svg", "again.svg", "--force")
    assert (folder / "again.svg").read_text() == text


def test_a_split_model_becomes_one_file(folder: Path) -> None:
    tensors = weights(DENSE)
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    for number, half in enumerate(halves):
        writer = gguf.GGUFWriter(folder / f"m-0000{number + 1}-of-00002.gguf", "llama")
        for key, value in (("llama.block_count", 2), ("llama.attention.head_count", 4)) if number == 0 else ():
            writer.add_uint32(key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(tensors))
        for key, tensor in half.items():
            writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    summary = report("m-00001-of-00002.gguf", "--type", "copy", "--out", "whole.gguf")
    with GgufFile("whole.gguf") as file:
        assert not any(key.startswith("split.") for key in file.metadata)
        for row in summary["tensors"]:
            assert row["from"] == row["type"]
            assert np.array_equal(file.tensor(row["name"]).numpy(), tensors[row["name"]])


# An importance matrix


def test_each_expert_has_its_own_importance(folder: Path) -> None:
    path = written(folder / "in.gguf", EXPERTS)
    name = "blk.0.ffn_up_exps.weight"
    writer = gguf.GGUFWriter("i.gguf", "")
    writer.add_array("imatrix.datasets", ["wiki"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_tensor(f"{name}.in_sum2", np.arange(3 * 64, dtype=np.float32).reshape(3, 64))
    writer.add_tensor(f"{name}.counts", np.array([[1], [2], [4]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    summary = report(path, "-t", "q4_0", "--tensor-type", "token_embd=q8_0", "-o", "out.gguf", "--imatrix", "i.gguf")
    importance = torch.arange(3 * 64.0).view(3, 64) / torch.tensor([[1.0], [2], [4]])
    original = torch.from_numpy(weights(EXPERTS)[name]).float()
    parts = [q4_0.quantize(original[expert], importance=importance[expert]).tensors["blocks"] for expert in range(3)]
    assert not parts[1].equal(q4_0.quantize(original[1]).tensors["blocks"])
    weighted = {row["name"] for row in summary["tensors"] if "weighted_snr_db" in row}
    assert weighted == {name}
    assert summary["notes"] == ["i.gguf has nothing of 6 tensors, the first 'blk.0.attn_k.weight'"]
    message = "importance of 'blk.0.ffn_up_exps.weight': 192 values, the tensor needs 256"
    assert message in refused(written(folder / "other.gguf", DENSE, {name: np.ones((8, 256), np.float16)}), "-t", "q4_0",
                              "--imatrix", "i.gguf", "--dry-run")
    with GgufFile("out.gguf") as file:
        assert file.rows(name).equal(torch.cat(parts))
        assert [file.metadata[f"quantize.imatrix.{key}"] for key in ("file", "dataset", "entries_count", "chunks_count")] \
            == ["i.gguf", "wiki", 1, 3]


def importance_file(path: str, name: str, values: np.ndarray) -> None:
    """An importance matrix of one tensor."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_tensor(f"{name}.in_sum2", values.reshape(1, -1))
    writer.add_tensor(f"{name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("type", "usual"), [("iq3_s", 0.5), ("q4_k", 1.0)])
def test_importances_count_to_a_power(folder: Path, type: str, usual: float) -> None:
    """By default to that of the type; the quality of what is stored is measured by the importances themselves."""
    name = "blk.0.attn_k.weight"
    path = written(folder / "in.gguf", DENSE)
    original = torch.from_numpy(weights(DENSE)[name]).float()[:16]
    values = np.exp(np.random.default_rng(0).normal(size=original.shape[1])).astype(np.float32)
    importance_file("i.gguf", name, values)
    errors = {}
    for power in (None, 0.5, 1.0):
        options = [] if power is None else ["--imatrix-power", str(power)]
        summary = report(path, "-t", "q8_0", "--tensor-type", f"{name}={type}", "-o", f"{power}.gguf", "--imatrix", "i.gguf",
                         *options)
        [errors[power]] = [row["weighted_error"] for row in summary["tensors"] if "weighted_error" in row]
        with GgufFile(f"{power}.gguf") as file:
            counted = torch.from_numpy(values).double() ** (usual if power is None else power)
            module = module_of(type.upper())
            assert module is not None
            wanted = module.quantize(original, importance=counted.float()).tensors["blocks"]
            assert file.rows(name)[:16].equal(wanted)
    assert errors[None] == errors[usual] and errors[1.0] < errors[0.5]


def test_what_needs_an_importance_matrix_is_not_made_without(folder: Path) -> None:
    path = written(folder / "in.gguf", DENSE)
    message = "tensor 'blk.0.attn_k.weight' would be garbage as IQ2_XS without an importance matrix: give one with --imatrix"
    assert message in refused(path, "--type", "iq2_xs")


# What is refused


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_named(folder: Path, value: float) -> None:
    tensors = weights(EXPERTS)
    tensors["blk.0.ffn_down_exps.weight"][1, 5, 7] = value
    message = refused(written(folder / "in.gguf", EXPERTS, tensors), "-t", "q8_0")
    assert f"tensor 'blk.0.ffn_down_exps.weight': the weight at expert 1, row 5, column 7 is {value}" in message


def test_copied_tensors_are_looked_at_too(folder: Path) -> None:
    tensors = weights(DENSE)
    tensors["blk.1.ffn_norm.weight"][3] = math.nan
    message = refused(written(folder / "in.gguf", DENSE, tensors), "-t", "q8_0")
    assert "tensor 'blk.1.ffn_norm.weight': the weight at row 0, column 3 is nan" in message


def test_a_weight_that_a_type_cannot_hold(folder: Path) -> None:
    tensors = {name: tensor.astype(np.float32) for name, tensor in weights(DENSE).items()}
    tensors["blk.1.ffn_up.weight"][2, 9] = 7e4
    path = written(folder / "in.gguf", DENSE, tensors)
    assert "tensor 'blk.1.ffn_up.weight': the weight at row 2, column 9 is inf in F16" in refused(path, "-t", "f16")
    tensors["blk.1.ffn_up.weight"][2, 9] = 1e9
    message = refused(written(folder / "in.gguf", DENSE, tensors), "-t", "q8_0")
    assert "tensor 'blk.1.ffn_up.weight', rows 0 to 512: the scale" in message


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("-t", "q4_k_n"), 2, "no mix 'q4_k_n'"),
    (("-t", "4"), 2, "no mix '4'"),
    (("-t", "q8_0", "--tensor-type", "a=b"), 2, "no type 'b'"),
    (("-t", "q8_0", "--arch", "flux"), 1, "says its architecture itself"),
    (("-t", "q8_0", "--imatrix", "in.gguf"), 1, "this is no importance matrix"),
    (("-t", "q8_0", "--imatrix", "none.dat"), 1, "none.dat"),
    (("-t", "q8_0", "--imatrix-power", "0.5"), 2, "give them with --imatrix"),
])
def test_wrong_arguments(folder: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in refused(written(folder / "in.gguf", DENSE), *arguments, code=code)


def test_mixes_have_numbers() -> None:
    assert [mix_of(number).name for number in ("0", "2", "15", "38")] == ["F32", "Q4_0", "Q4_K_M", "MXFP4_MOE"]


@pytest.mark.parametrize(("module", "message"), [
    (None, "there is no quantizer for Q8_0 yet"), (fp8_block, "Q8_0 needs another tensor for each weight, weight_scale_inv"),
], ids=["none", "fp8_block"])
def test_types_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, message: str) -> None:
    monkeypatch.setattr(run, "module_of", lambda type: module)
    assert message in refused(written(folder / "in.gguf", DENSE), "-t", "q8_0")


def test_without_anything_to_write(folder: Path) -> None:
    result = quantize(written(folder / "in.gguf", DENSE), "-t", "q8_0")
    assert result.exit_code == 2 and "--out" in result.stderr
    result = quantize("in.gguf", "-t", "q8_0", "--dry-run", "--svg", "out.svg")
    assert result.exit_code == 2 and "--svg" in result.stderr
    result = quantize("in.gguf", "-t", "q8_0", "-o", "in.gguf")
    assert result.exit_code == 2 and "in.gguf: the output is the input" in result.stderr
    before = (folder / "in.gguf").read_bytes()
    for out in ("in.gguf", "out.gguf"):
        result = quantize("in.gguf", "-t", "q8_0", "-o", "out.gguf", "--svg", out)
        assert result.exit_code == 2 and f"{out}: the output is the input" in result.stderr
    result = CliRunner().invoke(app, ["dequantize", "in.gguf", "-o", "in.gguf"])
    assert result.exit_code == 2 and "in.gguf: the output is the input" in result.stderr
    assert (folder / "in.gguf").read_bytes() == before and not (folder / "out.gguf").exists()


def test_other_architectures_have_one_type(folder: Path) -> None:
    path = written(folder / "in.gguf", DENSE, architecture="gemma3")
    summary = report(path, "-t", "q8_0", "--pure", "-o", "out.gguf")
    assert {row["type"] for row in summary["tensors"]} == {"Q8_0", "F32"}


def test_quantized_weights_are_not_quantized_again(folder: Path) -> None:
    path = written(folder / "in.gguf", DENSE)
    report(path, "-t", "q8_0", "-o", "q8.gguf")
    message = refused("q8.gguf", *PLAIN)
    assert "tensor 'token_embd.weight' is quantized already, as Q8_0" in message
    summary = report("q8.gguf", *PLAIN, "--allow-requantize", "-o", "q4.gguf")
    with GgufFile("q4.gguf") as after, GgufFile("q8.gguf") as before:
        again = q4_0.quantize(q8_0.dequantize(packed_weight(before, "blk.0.ffn_up.weight"), torch.float32))
        assert after.rows("blk.0.ffn_up.weight").equal(again.tensors["blocks"])
        assert after.data("output.weight") == before.data("output.weight")
    assert all("snr_db" not in row for row in summary["tensors"] if row["name"] == "output.weight")


# Interrupted


def test_an_interrupted_run_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are whole are not quantized again, and what the report says of them is the same."""
    path = written(folder / "in.gguf", DENSE)
    (folder / "out.gguf").write_bytes(b"before")
    source = open_source(path)
    options = Options(MIXES["Q8_0"])
    planned = plan(source, options)
    whole = run.quantize_file(source, planned, options, Path("whole.gguf"))
    names: list[str] = []

    def tell(done: int, name: str) -> None:
        names.append(name)
        if name.startswith("blk.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.quantize_file(source, planned, options, Path("out.gguf"), tell=tell)
    assert Path("out.gguf").read_bytes() == b"before" and len(os.listdir()) == 6
    before, names = names[:-1], []
    assert run.quantize_file(source, planned, options, Path("out.gguf"), tell=lambda done, name: names.append(name)) == whole
    assert before + names == [step.tensor.name for step in planned.steps] and len(before) > 2 < len(names)
    assert sorted(os.listdir()) == ["in.gguf", *(name + end for name in ("out.gguf", "whole.gguf") for end in ("", f".{FILE}"))]
    assert Path("out.gguf").read_bytes() == Path("whole.gguf").read_bytes()


@pytest.mark.parametrize("defect", ["other input", "other type", "data", "journal", "forged", "none"])
def test_an_unfinished_file_is_believed_where_it_is_whole(folder: Path, defect: str) -> None:
    """The bytes are those of a whole run, whatever lies there; what is of no use is removed."""
    path = written(folder / "in.gguf", DENSE)
    type = "Q8_0"

    def quantized(out: str, tell: Callable[[int, str], None] = lambda done, name: None) -> None:
        source, options = open_source(path), Options(MIXES[type])
        run.quantize_file(source, plan(source, options), options, Path(out), tell=tell)

    def tell(done: int, name: str) -> None:
        if name.startswith("blk.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized("out.gguf", tell)
    [part] = folder.glob(".qdsl-*.part")
    journal = journal_of(part)
    if defect == "other input":
        os.utime(path, ns=(1, 1))
    elif defect == "other type":
        type = "Q5_0"
    elif defect == "data":
        part.write_bytes(part.read_bytes()[:3000] + b"damaged" + part.read_bytes()[3007:])
    elif defect == "journal":
        journal.write_bytes(journal.read_bytes()[:-20])
    elif defect == "forged":
        journal.write_text('{"name": []}\n[]\n')
    quantized("whole.gguf")
    quantized("out.gguf")
    assert sorted(os.listdir()) == ["in.gguf", *(name + end for name in ("out.gguf", "whole.gguf") for end in ("", f".{FILE}"))]
    assert Path("out.gguf").read_bytes() == Path("whole.gguf").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_run_that_is_told_to_end_leaves_no_output(folder: Path) -> None:
    """While it writes a large file, of zeros that take no place on disk; what it leaves is for the next run."""
    path = written(folder / "in.gguf", DENSE, {"token_embd.weight": np.zeros((16, 256), np.float16)})
    with GgufFile(path) as file:
        place = file.entry("token_embd.weight").start
        head = bytearray(path.read_bytes()[:place])
    rows = (1 << 22).to_bytes(8, "little")
    at = head.rindex(b"token_embd.weight") + len("token_embd.weight") + 4 + 8
    head[at:at + 8] = rows
    path.write_bytes(head)
    os.truncate(path, place + (1 << 22) * 512)
    run = subprocess.Popen([sys.executable, "-m", "qdsl", "quantize", "in.gguf", "-t", "q8_0", "-o", "out.gguf", "-j", "1"],
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not any(name.endswith(".part") for name in os.listdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    assert "out.gguf" not in os.listdir() and all(name.startswith((".qdsl-", "in.gguf")) for name in os.listdir())


# The report


def test_errors_are_weighted_as_ggml_weights_them() -> None:
    weight, stored, importance = drawn(3, 512, dtype=torch.float32), drawn(3, 512).float(), drawn(512).float().abs()
    measured = quality.quantization_error(weight, stored, importance)
    by_hand = 0.0
    for row, near in zip(weight.double().tolist(), stored.double().tolist(), strict=True):
        for k, (x, y) in enumerate(zip(row, near, strict=True)):
            group = row[k // 256 * 256:k // 256 * 256 + 256]
            by_hand += float(importance[k]) * math.sqrt(sum(w * w for w in group) / 256 + x * x) * (x - y) ** 2
    assert measured.weighted_noise == pytest.approx(by_hand, rel=1e-6)
    assert measured.data()["weighted_error"] == measured.weighted_noise
    assert quality.quantization_error(weight, weight).data() == {"snr_db": None}
    twice = measured + measured
    assert twice.data()["snr_db"] == measured.data()["snr_db"] and twice.noise == 2 * measured.noise


def test_names_cannot_break_the_picture() -> None:
    row: Callable[[str], dict[str, Any]] = lambda name: {"name": name, "type": "Q8_0", "snr_db": 30.0}
    drawn = ElementTree.fromstring(quality.svg("<a>", [row("\"</text><script>&\x1b\0"), row("b")]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "\"</text><script>&??" in texts and "<a>" in texts
