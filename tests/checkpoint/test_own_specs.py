"""Formats of a folder of specs that QDSL_SPECS names: commands know them in checkpoints, and wrong folders are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.compiler.spec.source import SpecError
from qdsl.core import places
from tests.support.paths import ROOT

# In one process, as imports take longer than all commands: the lines of the guide, then a layer by Python.
RUN = """
import shlex, sys
from pathlib import Path
from typer.testing import CliRunner
from qdsl.cli import app
for line in sys.argv[1].splitlines():
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    print(result.output)
    assert result.exit_code == 0, (line, result.output)
assert "plain4  " in CliRunner().invoke(app, ["list"]).output
import qdsl, torch
with qdsl.open("SmolLM2-plain4") as checkpoint, qdsl.open("SmolLM2-GPTQ") as other:
    weight, same = checkpoint.weight("model.down"), other.weight("model.down")
    assert weight.format is qdsl.generated.plain4.FORMAT and other.layer("model.down").format == "int_group"
    x = torch.randn(3, 64)
    assert torch.equal(weight.format.linear(x, weight), weight.format.linear(x, qdsl.generated.plain4.wrap(weight.tensors)))
"""


def spec(page: str = "tutorial.md", name: str = "plain4") -> str:
    """A spec of a page."""
    [text] = [block for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
              if block.startswith(f"format: {name}\n")]
    return text


def specs(path: Path, text: str, name: str = "plain4") -> Path:
    path.mkdir()
    (path / f"{name}.yaml").write_text(text)
    return path


def test_commands_of_the_guide(tmp_path: Path) -> None:
    """A plain folder is quantized, read, compared and requantized; without the variable the format is missing."""
    specs(tmp_path / "my_specs", spec())
    draw = torch.Generator().manual_seed(0)
    (tmp_path / "SmolLM2").mkdir()
    write(tmp_path / "SmolLM2" / "model.safetensors", {f"{name}.weight": torch.randn(32, 64, generator=draw).bfloat16()
                                                        for name in ("model.down", "lm_head")})
    (tmp_path / "SmolLM2" / "config.json").write_text("{}")
    guide = (ROOT / "docs" / "language" / "detection.md").read_text()
    [block] = [block for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) if "QDSL_SPECS" in block]
    variables = dict(re.findall(r"^export (\w+)=(\S*)", block, re.MULTILINE))
    lines = [line for line in block.splitlines() if not line.startswith("export ")]
    environment = {**os.environ, **variables, "QDSL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", RUN, "\n".join(lines)], cwd=tmp_path, env=environment, capture_output=True,
                            text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "plain4.plain" in result.stdout and "contradictions" not in result.stdout and "not known" not in result.stdout
    settings = json.loads((tmp_path / "SmolLM2-plain4" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["format"], settings["storage"]) == ("qdsl", "plain4", "plain")
    with qdsl.open(tmp_path / "SmolLM2-plain4") as checkpoint:
        problem = checkpoint.report().problems[-1]
        assert "qdsl has no format 'plain4': set QDSL_SPECS to the folder of its spec" in problem
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "SmolLM2-plain4")])
    assert inspected.exit_code == 1 and inspected.stderr.endswith("set QDSL_SPECS to the folder of its spec\n")


def test_a_command_ends_with_the_problems_of_a_spec(tmp_path: Path) -> None:
    folder = specs(tmp_path / "my_specs", spec().replace("(q - 8)", "(p - 8)"))
    environment = {**os.environ, "QDSL_SPECS": str(folder), "QDSL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-m", "qdsl", "inspect", str(tmp_path)], env=environment, capture_output=True,
                            text=True, check=False)
    assert result.returncode == 1 and "plain4.yaml:6:" in result.stderr and "'p' is unknown in decode" in result.stderr
    assert "Traceback" not in result.stderr


def test_folders_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without specs, the name of a format that ships, a file that is not called as its format, and a wrong spec."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    wrong = {"is no folder with .yaml files": tmp_path / "nothing",
             "has the name of a format that ships with qdsl": specs(tmp_path / "shipped", spec(), "q4_0"),
             "must have the name of its format; rename it to plain4.yaml": specs(tmp_path / "renamed", spec(), "other4")}
    for message, folder in wrong.items():
        monkeypatch.setenv("QDSL_SPECS", str(folder))
        with pytest.raises(places.UnknownSpec, match=message):
            qdsl._further_modules()
    monkeypatch.setenv("QDSL_SPECS", str(specs(tmp_path / "wrong", spec().replace("(q - 8)", "(p - 8)"))))
    with pytest.raises(SpecError, match="'p' is unknown in decode"):
        qdsl._further_modules()


def test_names_of_the_folder_are_names_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_SPECS", str(specs(tmp_path / "my_specs", spec())))
    assert places.find_spec("plain4") == tmp_path / "my_specs" / "plain4.yaml"
    with pytest.raises(places.UnknownSpec, match="did you mean plain4\\?"):
        places.find_spec("plain44")
