"""What `qdsl inspect` lists and `qdsl dequantize` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.checkpoint.files.safetensors import write as write_safetensors
from qdsl.checkpoint.report.contents import contents, escaped, lines
from qdsl.cli import app
from qdsl.jobs.gguf import dequantize
from qdsl.jobs.gguf.dequantize import dequantize_file
from tests.support.formats import ROOT, same_bits
from tests.support.ggufs import framed, info, pair

TYPE = gguf.GGMLQuantizationType


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def quantized(shape: tuple[int, ...], type: str, seed: int = 0) -> tuple[NewTensor, torch.Tensor]:
    """A tensor of random weights, and what they are in gguf-py's float32."""
    weight = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    raw = gguf.quantize(weight, TYPE[type])
    exact = torch.from_numpy(gguf.dequantize(raw, TYPE[type]).copy())
    return NewTensor(f"{type.lower()}.weight", BY_NAME[type], shape, [raw.tobytes()]), exact


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.gguf"
    norm = NewTensor("norm.weight", BY_NAME["F32"], (64,), [np.ones(64, np.float32).tobytes()])
    tensors = [quantized((4, 64), "Q8_0")[0], quantized((2, 3, 64), "Q4_0")[0], norm]
    write(path, {"general.architecture": Value.of("string", "llama"), "rope.scale": Value.of("f32", float("nan")),
                 "tokenizer.ggml.tokens": Value.of("string[]", [f"token {i}" for i in range(30)]),
                 "tokenizer.chat_template": Value.of("string", "{{ raise_exception('run') }}\n" * 50),
                 "comfy.gguf.orig_shape.q8_0.weight": Value.of("i32[]", [16, 4, 2, 2])}, tensors)
    return path


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_the_list_of_a_gguf_file(mixed: Path) -> None:
    result = run("inspect", mixed)
    assert result.exit_code == 0
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        f"{mixed}: GGUF 3, 3 tensors, 704 weights, 744 B, 8.455 bits per weight", "",
        "metadata type value", "general.architecture string llama", "rope.scale f32 nan",
        "tokenizer.ggml.tokens string[] 30: 'token 0', 'token 1', 'token 2', 'token 3', 'token 4', 'token 5', 'token 6', "
        "'token 7', ...",
        "tokenizer.chat_template string " + ("{{ raise_exception('run') }}\n" * 4)[:97].replace("\n", "\\n") + "...",
        "comfy.gguf.orig_shape.q8_0.weight i32[] 4: 16, 4, 2, 2", "",
        "tensor type shape bits size",
        "q8_0.weight Q8_0 16 x 4 x 2 x 2 (reshaped) 8.5 272 B",
        "q4_0.weight Q4_0 2 x 3 x 64 4.5 216 B",
        "norm.weight F32 64 32 256 B", "",
        "type tensors weights bits size", "Q8_0 1 256 8.5 272 B", "F32 1 64 32 256 B", "Q4_0 1 384 4.5 216 B"]


def test_the_list_as_json(mixed: Path) -> None:
    report = json.loads(run("inspect", mixed, "--json").stdout, parse_constant=pytest.fail)
    assert {key: report[key] for key in ("schema", "format", "version", "files", "problems", "notes")} == {
        "schema": 1, "format": "gguf", "version": 3, "files": 1, "problems": 0, "notes": []}
    assert report["total"] == {"tensors": 3, "weights": 704, "nbytes": 744, "bits_per_weight": 8 * 744 / 704}
    assert report["types"][0] == {"type": "Q8_0", "tensors": 1, "weights": 256, "nbytes": 272, "bits_per_weight": 8.5}
    assert report["tensors"][0] == {"name": "q8_0.weight", "type": "Q8_0", "shape": [16, 4, 2, 2], "stored_shape": [4, 64],
                                    "nbytes": 272, "bits_per_weight": 8.5, "start": report["tensors"][0]["start"], "shard": 0}
    tokens = [f"token {i}" for i in range(8)]
    assert report["metadata"]["tokenizer.ggml.tokens"] == {"type": "string[]", "count": 30, "first": tokens}
    assert report["metadata"]["rope.scale"] == {"type": "f32", "value": "nan"}
    assert report["metadata"]["tokenizer.chat_template"]["value"].count("raise_exception") == 50


def test_what_is_wrong_with_a_tensor_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(framed([info(b"good"), info(b"odd", type=77), info(b"late", offset=128)], data=bytes(130)))
    result = run("inspect", path)
    assert result.exit_code == 1
    assert "1 tensor, 32 weights, 128 B" in result.stdout and "2 tensors cannot be read" in result.stdout
    assert "unknown 77 is no type that can be read" in result.stdout and "its bytes end at 416, the file at 290" in result.stdout
    data = json.loads(run("inspect", path, "--json").stdout)
    assert data["problems"] == 2 and ["problem" in row for row in data["tensors"]] == [False, True, True]


def test_names_and_values_give_a_terminal_no_orders(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    bad = "\x1b[2J\x1b]0;title\x07\u202e\x9b1m\r\n"
    path.write_bytes(framed([info(bad.encode()), info(f"{bad}2".encode(), offset=512)],
                            [pair(b"key " + bad.encode(), "string", bad.encode() + b"\xff"),
                             pair(b"list", "string[]", [bad.encode()]),
                             pair(b"comfy.gguf.orig_shape." + bad.encode(), "string", b"\x1b"),
                             pair(b"comfy.gguf.orig_shape.x" + bad.encode(), "string", b"\x1b")], bytes(256)))
    for shown in (run("inspect", path), run("inspect", path, "--json")):
        assert shown.exit_code == 1
        assert all(line.isprintable() for line in shown.stdout.split("\n"))
    assert escaped(bad) == r"\x1b[2J\x1b]0;title\x07\u202e\x9b1m\r\n" and escaped("[bold]ü") == "[bold]ü"


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--json"), ("dequantize", "-o", "out.safetensors")])
def test_a_refused_file_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.gguf").write_bytes(framed(version=3 << 24))
    result = run(*command, "x.gguf")
    message = "x.gguf: byte 4: a big-endian file; only little-endian ones are read"
    assert result.exit_code == 1
    if "--json" in command:
        assert json.loads(result.stdout) == {"schema": 1, "error": message, "exit_code": 1} and result.stderr == ""
    else:
        assert (result.stdout, result.stderr) == ("", f"error: {message}\n")
    assert run(*command, "absent.gguf").exit_code == 1 and os.listdir() == ["x.gguf"]


def test_safetensors_are_listed_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.float8_e4m3fn), "c": torch.zeros(0)}
    write_safetensors(path, tensors, {"k": "v"})
    for source in (path, tmp_path):
        report = contents(source)
        assert report["total"] == {"tensors": 3, "weights": 11, "nbytes": 29, "bits_per_weight": 8 * 29 / 11}
        assert [(row["name"], row["type"], row["shape"]) for row in report["tensors"]] == [
            ("a", "F32", [2, 3]), ("c", "F32", [0]), ("b", "F8_E4M3", [5])]
        assert report["metadata"] == {"k": {"type": "string", "value": "v"}}
        assert lines(report)[0].endswith("safetensors, 3 tensors, 11 weights, 29 B, 21.09 bits per weight")


def test_an_empty_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(framed())
    assert run("inspect", tmp_path / "x.gguf").stdout.endswith("x.gguf: GGUF 3, 0 tensors, 0 weights, 0 B, - bits per weight\n")


def test_inspect_imports_nothing_heavy(mixed: Path) -> None:
    program = ("import sys\n"
               "from qdsl.cli import app\n"
               "for arguments in (['inspect', sys.argv[1]], ['inspect', '--json', sys.argv[1]]):\n"
               "    try:\n"
               "        app(arguments)\n"
               "    except SystemExit as end:\n"
               "        assert end.code == 0\n"
               "assert not {'torch', 'numpy', 'triton', 'gguf', 'safetensors', 'jinja2', 'yaml'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", program, str(mixed)], env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- dequantize --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_floats_are_those_of_gguf_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece: int) -> None:
    """Rounded once, in the model's shape, whatever the pieces are; numbers that are no weights stay as they are."""
    monkeypatch.setattr(dequantize, "WEIGHTS", piece)
    drawn = [quantized((7, 64), "Q8_0"), quantized((2, 3, 64), "Q4_1"), quantized((5, 6), "BF16"), quantized((8,), "F16"),
             (NewTensor("empty", BY_NAME["Q5_0"], (0, 32), []), torch.empty(0, 32)), quantized((3, 5, 2, 4), "F32")]
    kept = {"F64": torch.tensor([1e300, 2.0], dtype=torch.float64), "I32": torch.tensor([[1 << 30, -3]], dtype=torch.int32)}
    tensors = [tensor for tensor, _ in drawn] + [NewTensor(type, BY_NAME[type], tuple(tensor.shape), [tensor.numpy().tobytes()])
                                                 for type, tensor in kept.items()]
    write(tmp_path / "x.gguf", {"comfy.gguf.orig_shape.q8_0.weight": Value.of("i32[]", [64, 7, 1])}, tensors)
    result = run("dequantize", tmp_path / "x.gguf", "-o", tmp_path / "x.safetensors", "--dtype", dtype)
    size = (tmp_path / "x.safetensors").stat().st_size
    assert (result.exit_code, result.stdout) == (0, f"written  {tmp_path}/x.safetensors: 8 tensors, {size} bytes\n")
    floats = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    wanted = {tensor.name: exact.view(tensor.shape).to(floats) for tensor, exact in drawn} | kept
    wanted["q8_0.weight"] = wanted["q8_0.weight"].view(64, 7, 1)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == wanted.keys() and all(same_bits(loaded[name], wanted[name]) for name in wanted)


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    numbers = {"a": np.float32([1, 65519, np.inf, np.nan]), "b": np.float32([1, 65520])}
    f32 = BY_NAME["F32"]
    write(tmp_path / "x.gguf", {}, [NewTensor(name, f32, array.shape, [array.tobytes()]) for name, array in numbers.items()])
    with pytest.raises(CheckpointError, match=r"x\.gguf: tensor 'b': a number of 65520\.0 does not fit f16"):
        dequantize_file(tmp_path / "x.gguf", tmp_path / "out.safetensors", "f16")
    assert os.listdir(tmp_path) == ["x.gguf"]
    assert dequantize_file(tmp_path / "x.gguf", tmp_path / "out.safetensors", "bf16")["tensors"] == 2


def test_scales_beside_weights_are_in_their_numbers(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 120, (6, BY_NAME["NVFP4"].row_bytes(64)), dtype=np.uint8)
    exact = torch.from_numpy(gguf.dequantize(raw, TYPE.NVFP4))
    scales = np.float32([0.5, 3])
    nvfp4, f32 = BY_NAME["NVFP4"], BY_NAME["F32"]
    write(tmp_path / "x.gguf", {}, [
        NewTensor("one.weight", nvfp4, (6, 64), [raw.tobytes()]), NewTensor("one.scale", f32, (), [scales[:1].tobytes()]),
        NewTensor("two.weight", nvfp4, (2, 3, 64), [raw.tobytes()]), NewTensor("two.scale", f32, (2,), [scales.tobytes()]),
        NewTensor("no.weight", f32, (2,), [scales.tobytes()]), NewTensor("no.scale", f32, (2,), [scales.tobytes()])])
    dequantize_file(tmp_path / "x.gguf", tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors.keys() == {"one.weight", "two.weight", "no.weight", "no.scale"}
    assert same_bits(tensors["one.weight"], exact / 2)
    assert same_bits(tensors["two.weight"], exact.view(2, 3, 64) * torch.tensor(scales).view(2, 1, 1))


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("--dtype", "f64"), 2, "error: no 'f64': expected one of f32, bf16, f16\n"),
    ((), 1, "error: x.gguf: tensor 'a': unknown 77 is no type that can be read\n"),
])
def test_what_cannot_be_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int,
                                    message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.gguf").write_bytes(framed([info(type=77)], data=bytes(128)))
    result = run("dequantize", "x.gguf", "-o", "out.safetensors", *arguments)
    assert (result.exit_code, result.stderr) == (code, message) and os.listdir() == ["x.gguf"]
