"""The documents: their tables are what the code says, their examples run, their links lead somewhere.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `pytest tests/unit/test_docs.py --bless` writes it anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import qdsl
from bench import plots
from qdsl.cli import app
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import parse
from tests.support import compiling, example
from tests.support.pages import file_of, run_page, without_numbers
from tests.support.paths import ROOT
from tests.support.tables import TABLES

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "specs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_what_the_code_says(path: Path, bless: bool) -> None:
    text = path.read_text()
    wanted = TABLE.sub(lambda match: f"{match[1]}" + "\n".join(TABLES[match[2]]()) + f"\n{match[3]}", text)
    if bless:
        path.write_text(wanted)
        text = wanted
    assert text == wanted, "run `pytest tests/unit/test_docs.py --bless`"


def test_every_table_is_shown() -> None:
    shown = [match[1] for path in DOCUMENTS for match in TABLE.findall(path.read_text())]
    assert sorted(shown) == sorted(TABLES)


@pytest.mark.parametrize("name", plots.FIGURES)
def test_figures_are_those_of_the_results(name: str, bless: bool) -> None:
    path, drawn = plots.OUT / f"{name}.svg", plots.FIGURES[name]()
    if bless:
        path.write_text(drawn)
    assert path.read_text() == drawn, "run `python -m bench.plots`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_whole_models_are_a_few_lines() -> None:
    """What users of other projects had to write in 21 to 40 lines is 6 lines at most."""
    text = (ROOT / "docs" / "models.md").read_text()
    skeletons = re.findall(r"<!-- skeletons -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(skeletons) > 3 and all(block.count("\n") <= 6 for block in skeletons)


def test_the_page_on_diffusers_lists_all_converters(bless: bool) -> None:
    pytest.importorskip("diffusers")
    from tests.support import diffusion_models

    page = ROOT / "docs" / "diffusers.md"
    before, after = re.split(r"(?<=<!-- coverage -->\n)(?:\|.*\n)*", page.read_text())
    if bless:
        page.write_text(before + diffusion_models.coverage() + after)
    assert page.read_text() == before + diffusion_models.coverage() + after


@pytest.mark.filterwarnings("default")
def test_pages_import_public_modules_alone() -> None:
    """`qdsl`, a format, a part of `qdsl.models`, `qdsl.analyze` and `qdsl.kv_cache`: all else may move."""
    public = re.compile(r"qdsl(\.generated(\.\w+)?|\.models(\.\w+)?|\.analyze|\.kv_cache)?")
    lines = [line for path in DOCUMENTS for block in blocks(path, "python") for line in block.splitlines()]
    modules = [match[1] for line in lines if (match := re.match(r"\s*(?:from|import) (qdsl[\w.]*)", line))]
    assert len(modules) > 20 and [name for name in modules if not public.fullmatch(name)] == []


def test_python_of_the_page_on_predictions_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = blocks(ROOT / "docs" / "predictions.md", "python")
    exec(compile(example, "predictions.md", "exec"), {})  # noqa: S102
    times = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert times.keys() == {"gemv", "decode"} and 0 < float(times["gemv"]) < float(times["decode"]) < 1e-4


def test_install_lines_work_from_a_checkout() -> None:
    """The distribution is on no package index, where `qdsl` is another project: nothing may tell to install either."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [ROOT / name for name in tracked if name.endswith((".md", ".py", ".toml", ".yaml", "Makefile"))]
    texts = [path.read_text() for path in paths if path != Path(__file__)]
    commands = [command for text in texts for command in re.findall(r"pip install ([^`\n]*)", text)]
    assert len(commands) > 20 and [command for command in commands if "qdsl" in command] == []
    extras = {name for command in commands for names in re.findall(r"\.\[([\w,]+)\]", command) for name in names.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(extras) > 4 and extras <= project["optional-dependencies"].keys()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that `qdsl example` takes in place of SmolLM2's."""
    return example.tiny_model(tmp_path_factory.mktemp("tiny"))


# A page whose commands compile kernels: test_kernels_of_the_page_are_analyzed and tests/kernels/test_execute_guards.py run them.
OWN = {"docs/execute.md"}
PAGES = [name for path in DOCUMENTS if (name := path.relative_to(ROOT).as_posix()) not in OWN
         if blocks(path, "python") or blocks(path, "sh")]
# What folders hold the bytes of, for those that a page calls the same again; of SmolLM2 by default.
AGAIN = {"SmolLM2-again": "SmolLM2-int4", "Mlp-again": "Mlp-FP8"}


def check_adapters(names: dict[str, Any]) -> None:
    """All layers of the merged model are packed as before, and two of each block were merged."""
    assert str(names["report"]).startswith("4 packed layers merged into layers of the same format, and 0 dense layers")
    with qdsl.open("SmolLM2-FP8") as before, qdsl.open("SmolLM2-tuned") as after:
        assert before.layers.keys() == after.layers.keys() and len(names["ignored"]) == 2 * len(after.layers)


# What must hold of the Python of a page when it has run.
CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {"docs/peft.md": check_adapters}


# Answers lines of a command's words with its exit code and output.
ANSWERS = """
import json, sys
from tests.unit.test_docs import invoked
for line in sys.stdin:
    print(json.dumps(invoked(json.loads(line))), flush=True)
"""


def invoked(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command in this process."""
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    return result.exit_code, result.output


class Beginnings:
    """Runs commands, once those that many pages begin with: the example, and what is made of SmolLM2 alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.answers = folder, dict[str, tuple[int, str]]()

    def __call__(self, words: list[str]) -> tuple[int, str]:
        if words[0] != "example" and not (words[0] in ("quantize", "compress") and words[1] == "SmolLM2"):
            return invoked(words)
        name = re.sub(r"\W", "_", shlex.join(words))
        if name not in self.answers:
            before = {*Path().iterdir()}
            self.answers[name] = invoked(words)
            (self.folder / name).mkdir()
            for path in {*Path().iterdir()} - before:
                (shutil.copytree if path.is_dir() else shutil.copy)(path, self.folder / name / path.name)
        else:
            shutil.copytree(self.folder / name, Path(), dirs_exist_ok=True)
        return self.answers[name]


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> Beginnings:
    return Beginnings(tmp_path_factory.mktemp("beginnings"))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_a_walk_from_an_empty_folder(name: str, tiny_llama: Path, beginnings: Beginnings, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in place of SmolLM2; tests/walk.py does the same with the model itself."""
    pytest.importorskip("diffusers")

    def run(words: list[str]) -> str:
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("="))
        if words[0] in ("export", "pip"):                        # the environment of the tests has what pages install
            return ""
        assert words[0] == "qdsl", words
        if words[1] == "analyze":                                # compiles: test_kernels_of_the_page_are_analyzed
            return ""
        code, output = answered(words[1:]) if "QDSL_SPECS" in os.environ else beginnings(words[1:])
        assert code == 0, (words, output)
        return output

    def answered(words: list[str]) -> tuple[int, str]:
        """By a process that was started after the page set a variable which qdsl reads once."""
        if not processes:
            processes.append(stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", ANSWERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)})))
        print(json.dumps(words), file=processes[0].stdin, flush=True)
        assert processes[0].stdout is not None
        return tuple(json.loads(processes[0].stdout.readline()))

    processes: list[subprocess.Popen[str]] = []
    example.use(tiny_llama, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qdsl.models.gguf_vocabulary.pre_tokenizer", lambda tokenizer, folder: "tiny")
    with ExitStack() as stack:
        names = run_page(ROOT / name, tmp_path, run)
    CHECKS.get(name, lambda names: None)(names)
    for again in tmp_path.glob("*-again"):                       # what a page says is byte for byte what it was made of
        original = tmp_path / AGAIN.get(again.name, "SmolLM2") / "model.safetensors"
        original = original if original.exists() else tmp_path / "SmolLM2" / "model.safetensors"
        assert (again / "model.safetensors").read_bytes() == original.read_bytes()


def test_the_readme_is_short_and_explains_its_terms() -> None:
    """At most 150 lines; words of this project stand in it only where they are explained, or in a command and its output."""
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    prose = " ".join(sentences(text))
    assert re.findall(r"hlane|fix4|matvec|storages?\b", prose) == []
    assert prose.count("planar") == 1 and "`planar`, a second layout of the same bits" in prose


def test_every_format_has_a_family() -> None:
    """The table of families has every format once."""
    text = (ROOT / "docs" / "formats.md").read_text()
    families = re.findall(r"`(\w+)`", text[text.index("## Families"):text.index("## All")])
    assert sorted(families) == sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_number_of_formats(page: str) -> None:
    counts = re.findall(r"(\d+) formats\b", (ROOT / page).read_text())
    assert counts[:1] == [str(len(list((ROOT / "specs").glob("*.yaml"))))]


def test_every_page_with_python_runs() -> None:
    """A page runs in the test above, or in one of its own that reads it by its name."""
    tests = Path(__file__).read_text()
    pages = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS if blocks(path, "python")]
    others = [page for page in pages if page not in PAGES and page != "docs/execute.md"]
    assert [page for page in others if f'"{Path(page).name}"' not in tests] == []


def test_kernels_of_the_page_are_analyzed() -> None:
    """In processes that compile kernels.  They print what the pages show, to the digit, but for sectors: where the
    machine's tensors lie changes these.
    """
    lines = [line.split("#")[0] for page in ("kernels.md", "execute.md") for block in blocks(ROOT / "docs" / page, "sh")
             for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("qdsl analyze ")]
    done = [compiling.run(*shlex.split(command)) for command in commands]
    assert done and not [process.stderr for process in done if process.returncode or process.stderr]
    printed = {line for process in done for line in process.stdout.splitlines()}
    shown = [line for page in ("kernels.md", "execute.md") for block in blocks(ROOT / "docs" / page, "text")
             for line in block.splitlines()]
    printed |= {without_numbers(line) for line in printed if "sectors" in line}
    assert len(shown) > 18 and [line for line in shown if not printed & {line, without_numbers(line)}] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_specs_in_documents_compile(path: Path) -> None:
    for number, text in enumerate(blocks(path, "yaml")):
        if file_of("yaml", text) and "format:" in text.split():
            compile_spec(parse(text, f"{path.name}, example {number + 1}"))


SENTENCE, WORD = re.compile(r"(?<=[.!?])\s+"), re.compile(r"`[^`]*`|[\w'./-]*\w[\w'./-]*")
MOST_WORDS = 25


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables, headings and the addresses of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(    |\||#).*$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", re.sub(r"\]\([^)]*\)", "]", text))
    return [sentence for part in parts for sentence in SENTENCE.split(" ".join(part.split())) if WORD.search(sentence)]


def test_sentences_are_short() -> None:
    """Those of every page have at most 25 words, but for lists of names."""
    every = [(path.name, sentence) for path in DOCUMENTS for sentence in sentences(path.read_text())]
    assert len(every) > 700
    assert [(name, sentence) for name, sentence in every if len(WORD.findall(sentence)) > MOST_WORDS
            and WORD.search(re.sub("`[^`]*`", "", sentence))] == []
