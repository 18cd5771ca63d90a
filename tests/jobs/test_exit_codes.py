"""Exit codes of every command are those of the table in docs/checkpoints.md: usage 2, a wrong input 1, findings 3.

Commands and options are those of the app: a new one is walked over without a line here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from qdsl.checkpoint.files import references
from qdsl.cli import app
from tests.support import folders
from tests.support.converted_folders import two_files, two_layers
from tests.support.paths import ROOT

GROUP: Any = typer.main.get_command(app)
COMMANDS: list[str] = list(GROUP.commands)
TABLE = re.findall(r"^\| (\d+) \| .+ \|$", (ROOT / "docs" / "checkpoints.md").read_text(), re.M)
# A value for each word that is right, and one that no command takes.
RIGHT = {"MODEL": "model", "SPEC": "q4_0", "FOLDER": "out", "FILE|FOLDER": "out", "FILE": "out.file", "TEXT": "text.txt",
         "SIZE": "20GB", "hlane|fix4|fix3|df11": "hlane"}
WRONG = {"KEY=VALUE": "key", "PATTERN": "[", "I/N": "3/2", "N": "x", "SIZE": "20", "FORMAT": "no_such", "STORAGE": "no_such",
         "FORMAT[.STORAGE]": "no_such", "DTYPE": "f99", "MIX": "Q9", "PATTERN=TYPE": "attn", "WxH": "7", "PRODUCER": "no_such",
         "linear|dequantize": "other", "bf16|f16": "f99", "hlane|fix4|fix3|df11": "other", "N K": "x"}
WITH = {"--programs": ["--execute"], "--storage": []}            # what an option needs
TARGETS = {"convert": ["--to", "awq"], "quantize": ["--format", "q4_0", "--out", "out"], "build": ["q4_0"], "infer": [
    "text.txt"], "evaluate": [], "generate": ["prompt"], "new": ["mine"]}
GGUF = ("--tensor-type",)                                        # options of `quantize --type`


def parameters(command: str) -> list[Any]:
    with GROUP.commands[command].make_context(command, [], resilient_parsing=True) as context:
        return list(GROUP.commands[command].get_params(context))


def call(command: str, without: str = "", **values: str) -> list[str]:
    """A command with all that it needs.  without: an option that is given apart.  values: of words, in place of RIGHT."""
    line = [command]
    for parameter in parameters(command):
        if parameter.required and parameter.opts[0] != without:
            line += [*([parameter.opts[0]] if parameter.param_type_name == "option" else []),
                     {**RIGHT, **values}[parameter.metavar]]
    target = TARGETS.get(command, [])
    return [*line, *([] if without in target[:1] else target)]


def wrong_options() -> Iterator[list[str]]:
    for command in COMMANDS:
        for parameter in parameters(command):
            if parameter.param_type_name == "option" and parameter.metavar in WRONG:
                option = parameter.opts[0]
                line = call(command, option)
                if option in GGUF or parameter.metavar == "MIX":
                    line = ["quantize", "model", "--out", "out.gguf", *(["--type", "Q4_K_M"] if option in GGUF else [])]
                if option == "--format" and command == "quantize":
                    line = ["quantize", "model", "--out", "out"]
                if option == "--format" and command == "evaluate":
                    line += ["--against", "model"]
                if option == "--size":
                    line = ["generate", "pipeline", "prompt", "--out", "out.png"]
                yield [*line, *WITH.get(option, []), option, WRONG[parameter.metavar], *(["y"] if parameter.nargs == 2 else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("codes")
    two_files(path, two_layers()).rename(path / "model")
    folders.folder(path / "plain", {"up.weight": torch.ones(128, 128, dtype=torch.bfloat16)}, config={"model_type": "llama"})
    (path / "text.txt").write_text("words")
    (path / "pipeline").mkdir()
    (path / "pipeline" / "model_index.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(references, "getproxies", dict)
    monkeypatch.setattr(references, "_endpoint", lambda: "http://127.0.0.1:9")


def code_of(line: list[str]) -> tuple[int, str]:
    """The exit code and the output, of a command that writes nothing."""
    before = sorted(Path().rglob("*"))
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert sorted(Path().rglob("*")) == before
    return result.exit_code, result.output


def test_the_table_has_all_codes() -> None:
    assert TABLE == ["0", "1", "2", "3", "130"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_ends_with_2(command: str) -> None:
    code, output = code_of([*call(command), "--frobnicate"])
    assert code == 2 and "No such option" in output


@pytest.mark.parametrize("command", [command for command in COMMANDS if any(one.required for one in parameters(command))])
def test_what_is_needed_and_not_given_ends_with_2(command: str) -> None:
    code, output = code_of([command])
    assert code == 2 and "Missing " in output


@pytest.mark.parametrize("line", list(wrong_options()), ids=" ".join)
def test_a_wrong_value_ends_with_2(line: list[str]) -> None:
    code, output = code_of(line)
    assert code == 2, output


@pytest.mark.parametrize(("word", "code"), [("MODEL", 1), ("SPEC", 2)])
def test_what_is_not_there(word: str, code: int) -> None:
    """A model that is not there is a wrong input; a format that is not there is a wrong command."""
    commands = [command for command in COMMANDS if command != "serve" and any(     # it needs further packages
        one.required and one.metavar == word and one.param_type_name == "argument" for one in parameters(command))]
    answers = {command: code_of(call(command, **{word: "no_such"})) for command in commands}
    assert len(answers) > 4 and {command: text for command, (own, text) in answers.items() if own != code} == {}


LACKING = """
import sys
for name in ("transformers", "diffusers", "fastapi"):
    sys.modules[name] = None
from typer.testing import CliRunner
from qdsl.cli import app
for line in sys.argv[1:]:
    result = CliRunner().invoke(app, line.split())
    print(result.exit_code, "torch" in sys.modules, " ".join(result.output.split()))
"""
RUNNING = ("generate plain prompt", "generate pipeline prompt --out out.png", "evaluate plain --text text.txt", "serve plain",
           "imatrix plain text.txt --out out.gguf", "quantize plain --format q4_0 --out out --calibrate text.txt")


def test_packages_that_are_not_installed_end_with_2_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", LACKING, *RUNNING], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for line, answer in zip(RUNNING, done.stdout.splitlines(), strict=True):
        assert re.match(r"2 False error: .* (is|are) not installed: `pip install '\.\[\w", answer), f"{line}: {answer}"
