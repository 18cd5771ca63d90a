"""The command line as its users meet it: what it prints, how it ends, and that no mistake shows a traceback.

Most commands run in this process; what only a process of its own shows runs in one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import qdsl
from qdsl.cli import app
from qdsl.runtime.gpu import costs
from qdsl.runtime.gpu.devices import GPUS
from tests.support.covering import quarter_of
from tests.support.formats import ROOT, SHIPPED

NAMES = [path.stem for path in SHIPPED]
INT_GROUP = ["gptq_v2", "gptq_v1", "gptq_p", "awq", "awq_contiguous", "awq_gemv", "pack_quantized", "pack_quantized_0_8",
             "pack_quantized_0_17", "int_quantized", "marlin", "modelopt", "xpu_int4pack", "torchao_plain_int32", "torchao_int8",
             "onnx_matmul_nbits", "openvino_u4", "openvino_i4", "trt_llm", "planar"]
SPEC = ROOT / "specs" / "q4_0.yaml"
Q4_0 = "q4_0: ok, gguf, q4_0_r8, q4_0_4_4, q4_0_4_8, q4_0_8_8, planar\n"
HEAVY = ("torch", "numpy", "triton", "gguf", "safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str | Path) -> Result:
    """A command in this process, printing as to a terminal; an exception that it does not handle fails the test."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False, color=True)


def process(*arguments: str, cwd: Path, python: tuple[str, ...] = ("-m", "qdsl")) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *python, *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"})


def wrong_spec(folder: Path, name: str = "wrong.yaml") -> Path:
    """A spec with two mistakes, in lines 7 and 8."""
    path = folder / name
    path.write_text(SPEC.read_text().replace("d: f16[", "d: f17[").replace("q: u4[n, k]", "q: u4[n, j]"))
    return path


# -- in a process of its own -------------------------------------------------------------------------------------------


LIGHT = f"""
import sys
from qdsl.cli import app
for arguments in (["--help"], ["--version"], ["check", *sys.argv[1:]], ["show", sys.argv[1]], ["list"]):
    try:
        app(arguments)
    except SystemExit as end:
        assert end.code == 0, arguments
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (arguments, heavy)
"""


def test_check_and_help_import_nothing_heavy(folder: Path) -> None:
    """`qdsl check` has answered before torch would be imported; so have --help, --version, show and list."""
    done = process(*NAMES, cwd=folder, python=("-c", LIGHT))
    assert done.returncode == 0, done.stderr
    assert "int_group: ok, gptq_v2, gptq_v1, gptq_p, awq" in done.stdout


def test_python_m_qdsl_is_the_command(folder: Path) -> None:
    """Its exit code reaches the shell, messages go to stderr, and results to stdout."""
    wrong = wrong_spec(folder)
    done = process("check", "q4_0", wrong.name, cwd=folder)
    assert done.returncode == 1
    assert done.stdout == Q4_0
    assert done.stderr.startswith("wrong.yaml:7:6: error: ") and done.stderr.rstrip().endswith("2 problems")
    assert "Traceback" not in done.stderr


# -- what every command does -------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    shown = run("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"qdsl {qdsl.__version__}\n")
    for command in ((), ("check",), ("build",), ("list",), ("show",), ("analyze",), ("explain",), ("inspect",), ("dequantize",),
                    ("quantize",)):
        for option in ("--help", "-h"):
            result = run(*command, option)
            assert result.exit_code == 0 and "Usage:" in result.stdout and not result.stderr
    top = run("--help").stdout
    commands = ("check", "build", "list", "show", "analyze", "explain", "inspect", "dequantize", "quantize")
    assert all(re.search(rf"\b{command}\b", top) for command in commands)


@pytest.mark.parametrize("arguments", [
    (), ("frobnicate",), ("check",), ("show",), ("show", "q4_0", "q8_0"), ("check", "--frobnicate", "q4_0"), ("build",),
    ("build", "--all", "q4_0"), ("show", "q4_0", "--svg"), ("inspect",),
    ("dequantize", "model.gguf"), ("quantize", "model.gguf"), ("quantize", "model.gguf", "--type", "q8_0"),
], ids=" ".join)
def test_a_wrong_call_ends_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output or result.stderr.startswith("error: ") or "requires an argument" in result.stderr


COMMANDS = [("check",), ("show",), ("build", "--out", "built")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(("name", "close"), [("q40", "q4_0"), ("int_groups", "int_group"), ("q4", "q4_0, q4_1, q4_k, "),
                                             ("q8_0.yaml", "q8_0")])
def test_a_name_that_is_nearly_right_is_guessed(folder: Path, command: tuple[str, ...], name: str, close: str) -> None:
    result = run(*command, name)
    assert result.exit_code == 2 and not result.stdout
    assert f"'{name}'" in result.stderr and f"did you mean {close}" in result.stderr


@pytest.mark.parametrize("command", [("check",), ("show",), ("build", "--check"), ("explain", "--gpu", "h100")],
                         ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["Q6_K", "q6-k"])
def test_names_are_read_in_any_letters(command: tuple[str, ...], name: str) -> None:
    result, expected = run(*command, name), run(*command, "q6_k")
    assert result.exit_code == expected.exit_code == 0 and result.stdout.replace(f"{name}:", "q6_k:") == expected.stdout
    assert qdsl.load(name) is qdsl.generated.q6_k


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["no/such/file.yaml", ".", "specs", ""], ids=repr)
def test_what_is_no_file_is_named(folder: Path, command: tuple[str, ...], name: str) -> None:
    """A missing file, a folder, no name at all: a wrong call, and nothing is written."""
    (folder / "specs").mkdir()
    result = run(*command, name)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("error: ") and f"'{name}'" in result.stderr and "expected a file" in result.stderr
    assert not (folder / "built").exists()


CONTENTS = {
    "empty": (b"", "1:1: error: the file is empty"),
    "blank": (b"\n\n# nothing\n", "1:1: error: "),
    "binary": (bytes(range(256)), "2:118: error: the file is not UTF-8 text"),
    "elf": (b"\x7fELF\x02\x01\x01" + bytes(64), "1:1: error: "),
    "terminal": (b"format: a\x1b[2J\x1b]0;b\x07\n", "1:10: error: "),
    "latin": (b"format: q\ntitle: na\xefve\n", "2:10: error: the file is not UTF-8 text"),
    "utf16": ("format: q\n".encode("utf-16"), "1:1: error: the file is not UTF-8 text"),
    "list": (b"- format\n- weight\n", "1:1: error: "),
    "word": (b"q4_0\n", "1:1: error: "),
    "tag": (b"format: !!python/object/apply:os.system [ls]\n", "1:9: error: "),
    "unclosed": (b"format: {a: [\n", "error: "),
    "deep": (b"a: " + b"[" * 5000, "error: "),
    "huge": (b"#" * (1 << 20), "1:1: error: the file is larger than 256 KiB"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_spec_is_a_message_with_a_place(folder: Path, command: tuple[str, ...], content: str) -> None:
    text, message = CONTENTS[content]
    (folder / "odd.yaml").write_bytes(text)
    result = run(*command, "odd.yaml")
    assert result.exit_code == 1 and not result.stdout
    assert re.match(r"odd\.yaml:\d+:\d+: error: ", result.stderr) and message in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr) < 2000
    assert not re.search(r"[^\n -~]", result.stderr), "what a file holds must not reach the terminal as it is"
    assert not (folder / "built").exists()


def test_a_file_that_cannot_be_read_is_a_message(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")                              # never opened: reading it would wait for ever
    for command in COMMANDS:
        result = run(*command, "pipe.yaml")
        assert result.exit_code == 2 and "pipe.yaml" in result.stderr


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("inspect", "none.gguf"), 1, "No such file"), (("inspect", "a.gguf"), 1, "a.gguf: "), (("show", "q40"), 2, "did you mean"),
    (("show", "w4.yaml"), 2, "no file 'w4.yaml': expected"), (("show", "xyz"), 2, "a name that `qdsl list` prints"),
    (("inspect", "--frobnicate"), 2, "No such option"), (("frobnicate",), 2, "No such command"),
    (("quantize", "a.gguf", "--type", "q9", "-o", "b"), 2, "no mix 'q9'"),
    (("dequantize", "a.gguf", "-o", "a.gguf"), 2, "the input"),
    (("convert", "folder", "--requantize", "q9", "-o", "b"), 2, "no format 'q9'"),
    (("verify", "folder"), 1, "no .safetensors file"),
    (("plan", "folder", "--vram", "20"), 2, "without a unit"), (("serve-check", "folder"), 1, "no .safetensors file"),
    (("generate", "none", "x", "--steps", "3"), 2, "--steps is for"),
    (("generate", "none", "x", "--format", "q40"), 2, "did you mean q4_0"),
    (("analyze", "q4_0", "--storage", "gguff"), 2, "no storage 'gguff'"),
    (("explain", "q4_0", "--storage", "gguff"), 2, "no storage 'gguff'"),
    (("explain", "q4_0", "--gpu", "voodoo2"), 2, "no GPU 'voodoo2'"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else None)
def test_failures_have_one_form(folder: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    """With --json one object on standard output, and nothing else; without, a message on standard error."""
    (folder / "a.gguf").write_bytes(b"GGUF\3\0\0\0")
    (folder / "folder").mkdir()
    result = run(*arguments, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (code, "") and message in report.pop("error")
    assert report == {"schema": 1, "exit_code": code}
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "") and message.split()[0] in result.stderr


SLOW = """
import hashlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)            # as in the foreground of a shell
import qdsl.cli
def wait():
    print("begun", flush=True)
    {wait}
qdsl.cli.main = wait
from qdsl.__main__ import main
main()
"""
WAITS = {"python": "time.sleep(60)", "a call of C": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", "an import": """
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise ImportError('interrupted') from None"""}


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends_with_130_and_one_line(folder: Path, wait: str) -> None:
    """Within a second, whatever is under way."""
    process = subprocess.Popen([sys.executable, "-c", SLOW.format(wait=WAITS[wait])], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\ninterrupted\n") and time.monotonic() - start < 2


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_says_what_is_right_and_what_is_wrong(folder: Path) -> None:
    everything = run("check", *NAMES)
    assert everything.exit_code == 0 and not everything.stderr
    lines = everything.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == NAMES
    without = {line.split(":")[0] for line, after in pairwise([*lines, ""]) if after.startswith("  no planar storage: ")}
    assert without == {line.split(":")[0] for line in lines if not line.startswith(" ") and not line.endswith(", planar")}
    assert "  no planar storage: field 's' is stored, and decode does not read it" in lines    # q8_1
    result = run("check", "q8_0", wrong_spec(folder).name, "q4_0")
    assert (result.exit_code, result.stdout) == (1, f"q8_0: ok, gguf, planar\n{Q4_0}")
    assert re.findall(r"^wrong\.yaml:(\d+:\d+): error: ", result.stderr, re.MULTILINE) == ["7:6", "8:12"]
    assert result.stderr.endswith("\n2 problems\n")


def test_check_goes_on_after_a_spec_that_is_not_there(folder: Path) -> None:
    """All that was asked is answered: a wrong spec is not hidden by a missing one before it."""
    result = run("check", "no/such/file.yaml", wrong_spec(folder).name, "q4_0")
    assert result.exit_code != 0
    assert "no/such/file.yaml" in result.stderr and "wrong.yaml:7:6: error: " in result.stderr
    assert result.stdout == Q4_0


def test_the_json_of_check_holds_what_the_text_holds(folder: Path) -> None:
    wrong = wrong_spec(folder).name
    text = run("check", "int_group", wrong)
    result = run("check", "int_group", wrong, "--json")
    right, bad = json.loads(result.stdout)["specs"]
    assert (result.exit_code, result.stderr.strip()) == (1, "")
    assert right == {"spec": "int_group", "ok": True, "format": "int_group", "storages": INT_GROUP}
    assert bad["spec"] == wrong and bad["ok"] is False
    shown = [f"{wrong}:{p['line']}:{p['column']}: error: {p['message']}" for p in bad["problems"]]
    assert shown == [line for line in text.stderr.splitlines() if ": error: " in line]
    notes = [note for problem in bad["problems"] for note in problem["notes"]]
    assert notes == [line.removeprefix("  note: ") for line in text.stderr.splitlines() if line.startswith("  note: ")]


# -- build -------------------------------------------------------------------------------------------------------------


def built(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_build_says_what_it_wrote_and_then_that_it_is_the_same(folder: Path) -> None:
    first = run("build", "q4_0", "int_group", "-o", "out")
    files = ["out/q4_0.py", "out/int_group/__init__.py",
             *(f"out/int_group/bits_{bits}.py" for bits in range(2, 9))]
    assert first.exit_code == 0 and not first.stderr
    assert sorted(first.stdout.splitlines()) == sorted(f"written  {name}" for name in files)
    assert sorted(built(folder)) == sorted(files)
    before = {name: (folder / name).stat().st_mtime_ns for name in files}
    second = run("build", "q4_0", "int_group", "--out", "out", "--json")
    rows = json.loads(second.stdout)["files"]
    assert second.exit_code == 0
    assert sorted((row["path"], row["change"]) for row in rows) == sorted((name, "same") for name in files)
    assert {Path(row["spec"]).stem for row in rows} == {"q4_0", "int_group"}
    assert {name: (folder / name).stat().st_mtime_ns for name in files} == before


def test_a_spec_of_ones_own_is_built_beside_the_reader(folder: Path) -> None:
    """Without --out into generated/ of the folder one is in, never into the package."""
    shutil.copy(SPEC, folder / "mine.yaml")
    (folder / "mine.yaml").write_text(SPEC.read_text().replace("format: q4_0", "format: mine"))
    result = run("build", "mine.yaml")
    assert (result.exit_code, result.stdout) == (0, "written  generated/mine.py\n")
    assert sorted(built(folder)) == ["generated/mine.py", "mine.yaml"]


def test_build_check_finds_what_is_stale_and_says_the_command_that_mends_it(folder: Path) -> None:
    run("build", "q4_0", "q8_0", "-o", "out")
    assert run("build", "q4_0", "q8_0", "-o", "out", "--check").exit_code == 0
    (folder / "out" / "q4_0.py").write_text("changed = 1\n")
    (folder / "out" / "q8_0.py").unlink()
    before = built(folder)
    result = run("build", "q4_0", "q8_0", "-o", "out", "--check")
    assert (result.exit_code, result.stdout) == (1, "stale    out/q4_0.py\nstale    out/q8_0.py\n")
    assert built(folder) == before
    match = re.search(r"run `qdsl (build [^`]+)`", result.stderr)
    assert match and " out" in match[1], result.stderr                  # another command would write somewhere else
    assert run(*shlex.split(match[1])).exit_code == 0
    assert run("build", "q4_0", "q8_0", "-o", "out", "--check").exit_code == 0


def test_build_check_of_what_ships_mends_with_build_all() -> None:
    result = run("build", "--all", "--check")
    assert result.exit_code == 0 or "run `qdsl build --all`" in result.stderr


def test_what_cannot_be_written_is_a_message(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "link").mkdir()
    (folder / "link" / "int_group").symlink_to(folder / "elsewhere")
    for out, named in (("file", "file"), ("link", "int_group is a link")):
        result = run("build", "int_group", "-o", out)
        assert result.exit_code == 1 and result.stderr.startswith("error: ") and named in result.stderr
    result = run("show", "q4_0", "--svg", "file/picture.svg")
    assert result.exit_code == 2 and result.stderr == f"error: file/picture.svg cannot be written: {folder}/file is no folder\n"
    assert run("show", "q4_0", "--svg", "new/folder/picture.svg").exit_code == 0


# -- list and show -----------------------------------------------------------------------------------------------------


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+", text))


def test_list_names_every_format() -> None:
    rows = json.loads(run("list", "--json").stdout)["formats"]
    assert [row["name"] for row in rows] == NAMES
    shown = run("list").stdout
    for row in rows:
        parts = [row["name"], row["bits"], *row["storages"], row["title"]]
        assert words(" ".join(parts)) <= words(shown), row["name"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["q4_0"]["bits"] == "4.5" and sorted(by_name["int_group"]["storages"]) == sorted(INT_GROUP)


def layouts(page: dict[str, Any]) -> list[str]:
    """What the text must hold of each layout."""
    return [part for layout in page["layouts"] for name, tensor in layout["tensors"].items()
            for part in (f"{name} {tensor['type']} [{', '.join(tensor['axes'])}]",
                         *(f": {piece['layout']}, " for pieces in tensor["fields"].values() for piece in pieces))]


@pytest.mark.parametrize("name", quarter_of(NAMES))
def test_the_json_of_show_holds_what_the_text_holds(name: str) -> None:
    text, page = run("show", name).stdout, json.loads(run("show", name, "--json").stdout)
    assert page["name"] == name and text.startswith(f"{name}: {page['title']}\n")
    assert f"  w = {page['formula']}\n" in text
    for field, about in page["fields"].items():
        axes = re.escape(", ".join(about["axes"]))
        assert re.search(rf"^  {field} +{about['type']} +\[{axes}\]$", text, re.MULTILINE)
    for param, values in page["params"].items():
        assert f"{param}: one of {', '.join(map(str, values))}" in text
    assert [part for part in layouts(page) if part not in text] == []
    assert {layout["storage"] for layout in page["layouts"]} == set(page["storages"])


DRAWN = {"svg", "g", "rect", "text", "title", "desc", "path", "line", "style"}


def test_show_draws_where_every_bit_lies(folder: Path) -> None:
    """A well-formed picture with the fields' names, that runs no script and loads nothing."""
    for name in quarter_of(NAMES):
        result = run("show", name, "--svg", f"{name}.svg")
        assert (result.exit_code, result.stdout) == (0, f"written  {name}.svg\n")
        picture = ElementTree.parse(folder / f"{name}.svg").getroot()
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        shown = words(" ".join(picture.itertext()))
        page = json.loads(run("show", name, "--json").stdout)
        tensors = [tensor for layout in page["layouts"] for tensor in layout["tensors"].values()]
        assert {field for tensor in tensors for field in tensor["fields"]} <= shown, name
        assert {element.tag.split("}")[1] for element in picture.iter()} <= DRAWN


def test_a_title_is_text_in_a_picture(folder: Path) -> None:
    """Characters that mean something in XML stay characters."""
    title = "a </text><script>b</script> & c]]>"
    (folder / "odd.yaml").write_text(re.sub("title: .*", f"title: {title}", SPEC.read_text()).replace("q4_0", "odd"))
    assert run("show", "odd.yaml", "--svg", "odd.svg").exit_code == 0
    picture = ElementTree.parse(folder / "odd.svg").getroot()
    assert f"odd: {title}" in picture.itertext()


def test_show_prints_the_program() -> None:
    from qdsl.compiler.ir.text import text
    from qdsl.compiler.passes import compile_spec
    from qdsl.compiler.spec.schema import load

    result = run("show", "q6_k", "--program")
    assert result.exit_code == 0
    programs = compile_spec(load(ROOT / "specs" / "q6_k.yaml"))
    assert result.stdout == "\n".join(map(text, programs)) + "\n"


def test_a_row_of_the_picture_holds_neighbours() -> None:
    """Q4_K's codes: 32 low nibbles and 32 high ones share 32 bytes, four times over."""
    shown = run("show", "q4_k").stdout.split("planar")[0].splitlines()
    lines = [line for line in shown if line.strip().startswith("byte ") and "q[" in line]
    rows = [line.split("|")[1:3] for line in lines]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [f"q[{64 * c + 32}]..q[{64 * c + 63}] (4 bits)", f"q[{64 * c}]..q[{64 * c + 31}] (4 bits)"] for c in range(4)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("arguments", [("list",), ("show", "q4_0"), ("--help",)], ids=str)
def test_standard_output_that_cannot_be_written(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Full: exit code 1 and a sentence.  Closed by the reader: exit code 1.  Closed from the start: nobody reads."""
    command = shlex.join([sys.executable, "-m", "qdsl", *arguments])
    for redirection, code, message in ((">/dev/full", 1, "No space left on device"), ("| true", 0, ""), (">&-", 0, "")):
        run = subprocess.run(f"{command} {redirection}", shell=True, cwd=tmp_path, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert run.returncode == code and "Traceback" not in run.stderr
        assert (run.stderr.startswith("error: ") and message in run.stderr) if message else run.stderr == ""


def test_explain() -> None:
    """The cheapest first, the reason with what else there is, and what does not serve and why."""
    result = run("explain", "int_group", "--param", "bits=4", "--storage", "awq", "--gpu", "h200", "--json")
    [product] = json.loads(result.stdout)["products"]
    times = [candidate["us"] for candidate in product["candidates"]]
    assert product["chosen"] == product["candidates"][0] and times == sorted(times) and times[0] > 0
    assert {candidate["kernel"] for candidate in product["candidates"]} == {"decode", "matvec"}
    assert "4 programs for 132 SMs" in product["reason"] and "planar" in product["refused"]["gemv, skinny, tile_gemm"]
    shown = run("explain", "q8_0", "--storage", "planar", "--rows", "9", "--shape", "512", "4096", "--gpu", "a100").stdout
    assert "q8_0.planar [512, 4096], 9 rows of x in bf16, A100 80 GB SXM: skinny" in shown
    assert "not gemv: serves one row of x" in shown and "not matvec:" in shown
    assert "counts of skinny, tile_gemm, dequantize: kernels compiled for sm_80\n" in shown
    assert "which stand in for gfx950" in run("explain", "q4_0", "--storage", "planar", "--gpu", "mi355x").stdout


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "nf4", "fp8_block", "hlane", "iq2_xxs", "bf16"])
def test_explain_compares_with_the_dense_matmul(name: str) -> None:
    """Its first line ends with the share of the vendor's dense time, and each candidate says what becomes of weights."""
    options = ("--rows", "64", "--shape", "8192", "2048", "--gpu", "a100", "--gpu", "b200", "--gpu", "mi300x")
    products = json.loads(run("explain", name, *options, "--json").stdout)["products"]
    lines = [line for line in run("explain", name, *options).stdout.splitlines() if "rows of x in bf16" in line]
    for product, line, gpu in zip(products, lines, ("a100", "b200", "mi300x"), strict=True):
        dense = costs.matmul_seconds(64, 8192, 2048, 2, GPUS[gpu]) * 1e6
        assert product["dense_us"] == pytest.approx(dense, rel=1e-3)
        assert product["of_dense"] == pytest.approx(product["chosen"]["us"] / dense, rel=0.01)
        assert line.endswith(f"(modelled), {product['of_dense']:.2f} of dense")
        weights = {candidate["kernel"]: candidate["weights"] for candidate in product["candidates"]}
        assert weights["decode"] == ("exact" if name in ("bf16", "hlane") else "rounded to bf16")
        assert weights.get("skinny", "exact") == ("rounded to bf16" if name == "nf4" and "skinny" in weights else "exact")
    measured = run("explain", "q4_0", "--shape", "64", "256", "--gpu", "cpu", "--x", "f32", "--json")
    product, = json.loads(measured.stdout)["products"]
    assert product["times"] == "measured" and product["chosen"] == product["candidates"][0]
    assert {"tiles"} <= {way["kernel"] for way in product["candidates"]} and all(way["us"] > 0 for way in product["candidates"])
