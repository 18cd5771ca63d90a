"""Every command of the command line, walked over: its words, its help in 80 columns, its completions, and how it fails.

A new command or option is tested without a line here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from qdsl.cli import app
from qdsl.cli.words import COMMANDS as HEADINGS
from qdsl.cli.words import VALUES, completions

GROUP = typer.main.get_command(app)
COMMANDS: list[str] = list(GROUP.commands)                       # type: ignore[attr-defined]
TYPES = re.compile(r"<\w+>|\b(?:Path|list\[|str|bool|int range|Optional|INTEGER|BOOLEAN)\b")
MODELS = ("model", "models", "file", "folder", "a", "b", "like", "base")


def parameters() -> Iterator[tuple[str, Any]]:
    """All parameters of all commands, with the word that help shows."""
    for name in COMMANDS:
        command = GROUP.commands[name]                           # type: ignore[attr-defined]
        with command.make_context(name, [], resilient_parsing=True) as context:
            for parameter in command.get_params(context):
                yield name, parameter


EVERY = list(parameters())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_words_and_no_types_in_80_columns(command: str) -> None:
    result = CliRunner().invoke(app, [*([command] if command else []), "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert not TYPES.findall(result.stdout)
    assert "REF" not in result.stdout


def test_every_command_has_a_heading() -> None:
    assert sorted(COMMANDS) == sorted(name for names in HEADINGS.values() for name in names)
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert re.findall(r"╭─ (\w+) ─", result.stdout) == ["Options", "Models", "Checkpoints", "Formats"]


def test_a_model_has_one_word() -> None:
    words = {(command, parameter.name): parameter.metavar for command, parameter in EVERY if parameter.name in MODELS}
    assert {*words.values()} == {"MODEL", "OTHER", "FILE"}
    assert {place for place, word in words.items() if word != "MODEL"} == {("verify", "b"), ("infer", "file"), ("new", "file")}


def test_what_is_left_out_is_skipped() -> None:
    options = {option for _, parameter in EVERY for option in parameter.opts}
    assert "--skip" in options
    assert not {option for option in options if re.search("ignore|exclude|filter|omit", option)}


def test_an_option_has_one_word_in_all_commands() -> None:
    """But --out, which writes what its command does, and --format, --dtype and --shape, of which commands take other values."""
    words: dict[str, set[str]] = {}
    for _, parameter in EVERY:
        if parameter.param_type_name == "option":
            words.setdefault(parameter.opts[0], set()).add(parameter.metavar)
    assert {option for option, kinds in words.items() if len(kinds) > 1} <= {"--out", "--format", "--dtype", "--shape"}


@pytest.mark.parametrize("word", [*VALUES, "PATTERN=TYPE"])
def test_every_word_of_values_is_used_and_completes(word: str) -> None:
    assert any(parameter.metavar == word for _, parameter in EVERY)
    head = "attn=" if "=" in word else ""
    values = [completion.value for completion in completions(word, head)]
    assert len(values) > 3 and all(value.startswith(head) for value in values)
    first = values[0]
    assert first in [completion.value for completion in completions(word, first[:len(head) + 1].upper() if not head else first)]


WORDS = [
    ("convert in --to gptq", {"gptq_v1", "gptq_v2", "gptq_p"}), ("quantize in --type q4_k_", {"Q4_K_S", "Q4_K_M"}),
    ("quantize in --format int_group.awq_g", {"int_group.awq_gemv"}), ("show q4_", {"q4_0", "q4_1", "q4_k"}),
    ("quantize in --tensor-type attn_v=q6", {"attn_v=Q6_K"}), ("compress in --format d", {"df11"}),
    ("dequantize in --dtype b", {"bf16"}), ("quantize in --producer aw", {"awq"}), ("check no/such/", set()),
    ("inspect mod", set()), ("quantize in --imatrix im", set())]


@pytest.mark.parametrize(("arguments", "expected"), WORDS)
def test_a_shell_completes_values(arguments: str, expected: set[str]) -> None:
    """Of files there is nothing to say: the shell completes them where a command does not."""
    env = {"_QDSL_COMPLETE": "complete_bash", "COMP_WORDS": f"qdsl {arguments}",
           "COMP_CWORD": str(len(arguments.split()))}
    result = CliRunner().invoke(app, [], env=env, prog_name="qdsl")
    assert result.exit_code == 0 and set(result.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish", "powershell"])
@pytest.mark.parametrize(("arguments", "expected"), [*WORDS, ("quantize in --ty", {"--type", "--types"})])
def test_other_shells_complete_the_same(shell: str, arguments: str, expected: set[str]) -> None:
    """A line for each value, with its help in it."""
    env = {"_QDSL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": f"qdsl {arguments}", "COLUMNS": "80",
           "_TYPER_COMPLETE_WORD_TO_COMPLETE": arguments.split()[-1], "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(app, [], env=env, prog_name="qdsl")
    value = r'"(.*?)"(?::"[^\n]*")?(?=\n|\)\))' if shell == "zsh" else r"^([^\t\n]+?)(?::::.*|\t.*)?$"
    assert result.exit_code == 0 and {*re.findall(value, result.stdout, re.MULTILINE)} == expected
    assert shell != "zsh" or expected or result.stdout == "_files\n"
