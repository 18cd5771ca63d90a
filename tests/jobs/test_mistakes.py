"""Mistakes of the command line, and answers that say what to type instead: a code, the right word, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.files import references
from qdsl.cli import app, serve
from tests.support import folders
from tests.support.converted_folders import two_files, two_layers
from tests.support.paths import ROOT

MISTAKES = {
    "a command with another spelling": ("quantise model", 2, "Did you mean 'quantize'"),
    "an option with a typing error": ("convert model --to awq --jbos 2 --out x", 2, "--jobs"),
    "values without their options": ("quantize plain q4_0 x", 2, "write the option in front of each, as --format or --out"),
    "no target": ("quantize model --out x", 2, "--type Q4_K_M, or another mix, writes a GGUF file; --format fp8_block"),
    "no target of a conversion": ("convert model --out x", 2, "--to awq, or another storage of the layers' format, keeps all"),
    "no output": ("convert model --to awq", 2, "Missing option '--out' / '-o'"),
    "a storage that is nearly a name": ("convert model --to gptqq --out x", 2, "did you mean gptq, "),
    "a format where a storage is wanted": ("convert model --to nf4 --out x", 2, "`--requantize nf4`"),
    "a family of formats": ("quantize plain --format fp8 --out x", 2, "did you mean fp8_block, fp8_channel"),
    "a mix with a typing error": ("quantize plain --type Q4_K_N --out x.gguf", 2, "did you mean Q4_K_"),
    "a mix as a format, for a folder": ("quantize plain --format Q4_K_M --out x", 2, "Q4_K_M is a name of --type, which"),
    "a parameter that is none": ("quantize plain --format int_group --param bit=4 --out x", 2, "it has bits, group"),
    "a parameter as an option": ("quantize plain --format int_group --bits 4 --out x", 2, "as --param bits=4"),
    "the same of another program": ("quantize plain --format int_group --group-size 64 --out x", 2, "as --param group=64"),
    "a parameter of an exact conversion": ("convert model --to awq --param bits=8 --out x", 2, "--param is for --requantize"),
    "a value that is none": ("quantize plain --format int_group --param bits=11 --out x", 2, "bits is one of 4, 2, 3"),
    "a path with a typing error": ("convert modle --to awq --out x", 1, "did you mean model or models?"),
    "a repository that is a path": ("inspect models/qwenn", 1, "did you mean models/qwen?"),
    "a layer with a typing error": ("convert model --to awq --skip donw --out x", 0, "did you mean 'down'?"),
    "a quantized model, quantized again": ("quantize model --format fp8_block --out x", 1, "`qdsl convert --requantize`"),
    "a plain model, converted": ("convert plain --to awq --out x", 1, "`qdsl quantize FOLDER --format FORMAT` quantizes"),
    "a plain model, dequantized": ("dequantize plain --out x", 1, "no quantized layer: its weights are plain floats already"),
    "an output that is the input": ("convert model --to awq --out model", 2, "the output is the input"),
    "an output that is there": ("convert model --to awq --out plain", 2, "--force replaces"),
    "a size without a unit": ("plan plain --vram 20", 2, "write 20GB or 20GiB"),
    "a file as a model": ("inspect text.txt", 1, "is not how a GGUF file begins: a model is a folder, or a file .safetensors or"),
    "a file as a folder to write": ("quantize plain --format q4_0 --out text.txt", 2, "is a file: the output is a folder"),
    "a text as tensors": ("infer text.txt", 1, "neither a .safetensors nor a .npz file"),
    "a text that is none": ("imatrix plain latin.txt --out i.gguf", 1, "latin.txt: not UTF-8 text: unexpected end"),
    "a mix, to another kind of file": ("quantize plain --type Q4_0 --out x.safetensors", 2, "let its name end in .gguf"),
    "a type that is none": ("quantize plain --type Q4_0 --tensor-type a=q9 --out x.gguf", 2, "expected one of F32, F16, Q4_0"),
    "a parameter without its equals sign": ("quantize plain --format nf4 --param block 64 --out x", 2, "as --param KEY=VALUE"),
    "a lossless format as a storage": ("convert model --to fix4 --out x", 2, "`qdsl compress --format fix4`"),
    "a text as a language model": ("generate text.txt hello", 1, "text.txt: a language model is a GGUF file, or a folder of all"),
    "a prompt before the model": ("generate hello plain", 2, "the model comes before the prompt: `qdsl generate plain"),
    "a file of a folder": ("generate plain/model-00001-of-00001.safetensors hello", 1, "a folder of all its files, as plain"),
    "weights without a config": ("generate bare hello", 1, "bare: no config.json beside the weights"),
    "a file that is cut off": ("generate cut hello", 1, "bytes are missing"),
    "far too many threads": ("generate plain hello --threads 1000000", 2, "less than or equal to"),
    "a folder as a text": ("imatrix plain models --out i.gguf", 1, "models: not a regular file, but a folder"),
    "a format's name in capitals": ("new W4", 2, "'W4' is no name of a format: expected small letters"),
    "a file as a folder for an example": ("example text.txt", 2, "text.txt is a file: the output is a folder"),
    "a word for a command without any": ("list x", 2, "Got unexpected extra argument(s) (x) "),
    "a GGUF file of a quantized folder": ("convert model --to gguf --out x", 1, "of which `qdsl quantize --type` makes GGUF"),
    "plain numbers of a quantized folder": ("convert model --to BF16 --out x", 2, "`qdsl dequantize --dtype bf16` writes"),
    "a spec's file as a format": ("quantize plain --format specs/w5.yaml --out x", 2, "QDSL_SPECS=specs in front of the command"),
    "a folder of files without endings": ("inspect blobs", 1, "it has GGUF files, of which one is to be named: sha256-0"),
    "a folder in a home": ("inspect ~/nothing", 1, "/nothing: No such file or directory"),
    "a producer without settings for a storage": ("quantize plain --format q4_0 --producer gptq --out x", 2, "those of qdsl do"),
    "the same of a conversion": ("convert model --to awq --producer hqq --out x", 2, "those of awq, auto-round do"),
    "a component of one model": ("quantize plain --format q4_0 --component vae --out x", 1, "one model, and no pipeline"),
    "a storage of another format": ("convert model --to bitsandbytes --out x", 1, "int_group has no storage 'bitsandbytes'"),
    "a storage as a parameter": ("quantize plain --format q4_0 --storage awq --out x", 2, "no storage 'awq': it has gguf"),
    "a folder as a GGUF file": ("quantize plain --type Q4_0 --out models", 2, "models is a folder: let its name end in .gguf"),
    "a text as an importance matrix": ("quantize plain --type Q4_0 --imatrix text.txt --out x.gguf", 1, "importance matrix is"),
    "a device that is none": ("generate plain hello --device gpu", 2, "expected cpu, cuda, mps, xpu, or one of several as"),
    "a format of a quantized model": ("generate model hello --format q4_0", 1, "its layers, which are int_group: leave it out"),
    "a format of a GGUF file": ("generate a.gguf hello --format q4_0", 1, "a GGUF file keeps its formats: leave out --format"),
    "a parameter of no format": ("generate plain hello --format q4_0 --param bits=3", 1, "q4_0 has no parameter 'bits'"),
    "a text of too few tokens": ("evaluate plain --text text.txt", 1, "has 11 bytes, and a chunk takes 512 tokens"),
    "the same of a calibration": ("quantize plain --format q4_0 --calibrate text.txt --out x", 1, "or a smaller --length"),
    "a method that is none": ("quantize plain --format q4_0 --calibrate text.txt --method awq --out x", 2, "gptq or importance"),
    "a type among others that is none": ("quantize plain --target-bits 4 --types Q4_K,Q9_K --calibrate long.txt --out x.gguf", 2,
                                         "no type 'Q9_K'"),
    "a format with a typing error": ("explain q4_9", 2, "did you mean q4_k, q4_1 or q4_0?"),
    "a spec that is not there": ("test nope.yaml", 2, "no file 'nope.yaml'"),
    "a GGUF file, converted": ("convert a.gguf --to awq --out x", 1, "`qdsl dequantize` makes one of a GGUF file"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantized folder, a plain one, a folder of models, and a file that is no GGUF file; no network."""
    monkeypatch.chdir(tmp_path)
    two_files(tmp_path, two_layers()).rename("model")
    folders.folder(Path("plain"), {"up.weight": torch.ones(128, 128, dtype=torch.bfloat16)}, config={"model_type": "llama"})
    shutil.copytree("plain", "bare")
    Path("bare/config.json").unlink()
    shutil.copytree("plain", "cut")
    os.truncate("cut/model-00001-of-00001.safetensors", 20000)
    Path("models/qwen").mkdir(parents=True)
    Path("a.gguf").write_bytes(b"GGUF")
    Path("blobs").mkdir()
    for name in ("sha256-0", "sha256-1"):
        shutil.copy("a.gguf", Path("blobs") / name)
    Path("text.txt").write_text("Some words.")
    Path("long.txt").write_text("Some words." * 200)
    Path("latin.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr(references, "getproxies", dict)
    monkeypatch.setattr(references, "_endpoint", lambda: "http://127.0.0.1:9")
    return tmp_path


def test_a_port_in_use_is_named_before_the_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "needs", lambda *_: None)
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "no_such", "--port", str(port)])
    assert result.exit_code == 2 and f"--port {port}: Address already in use: give another" in result.output


@pytest.mark.parametrize(("line", "code", "answer"), [
    ("verify plain wider", 1, "differences: 1; --decoded compares the weights that layers stand for"),
    ("check model", 2, "'model' is no spec: `qdsl.open` and `qdsl inspect` read checkpoints"),
    ("show a.gguf", 2, "'a.gguf' is no spec: ")])
def test_answers_that_are_no_objects_of_json(folder: Path, line: str, code: int, answer: str) -> None:
    folders.folder(Path("wider"), {"up.weight": torch.ones(128, 256, dtype=torch.bfloat16)})
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == code and answer in result.output, result.output


@pytest.mark.parametrize(("line", "code", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_what_to_type(folder: Path, line: str, code: int, answer: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == code and answer in " ".join(result.output.split()), result.output
    if code:
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


WITHOUT_TORCH = """
import json
import sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from qdsl.checkpoint.files import references
from qdsl.cli import app
references.getproxies, references._endpoint = dict, lambda: "http://127.0.0.1:9"
for line in sys.argv[1:]:
    words = line.split()
    result = CliRunner().invoke(app, [*words, *(["--json"] if words[0] != "imatrix" else [])])   # which has no report
    print(result.stdout.strip() or json.dumps({"error": result.stderr, "exit_code": result.exit_code}))
"""


def test_mistakes_are_answered_before_torch_is_imported_and_as_json(folder: Path) -> None:
    """Importing torch takes seconds.  With --json a failure is one object with its code, which is the process's."""
    wrong = [(line, code) for line, code, _ in MISTAKES.values() if code]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *(line for line, _ in wrong)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    answers = dict(zip(wrong, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {line: answer for (line, code), answer in answers.items() if answer["exit_code"] != code or not answer["error"]} == {}
