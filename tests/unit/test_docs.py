"""The documents: their tables are what the code says, their examples run, their links lead somewhere.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `pytest tests/unit/test_docs.py --bless` writes it anew.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qdsl
from bench import plots
from qdsl.checkpoint.files import gguf_write, safetensors
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.cli import app
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import parse
from qdsl.generated import fp8_block, fp8_channel, int_group, q4_0
from qdsl.jobs import demo
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Aim
from qdsl.jobs.gguf.mixes import Model
from tests.support import compiling, example, folders, gguf_models, language_models, producer_folders
from tests.support.ggufs import framed, info
from tests.support.models import ToyModel, written
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


def write_language_models(folder: Path) -> None:
    """The GGUF files and the text of the first commands."""
    for type in ("Q4_1", "Q8_0"):
        path, _ = gguf_models.written(folder, "llama", type=type, has_settings=True, has_vocabulary=True, vocab_size=288)
        path.rename(folder / f"SmolLM2-{type}.gguf")
    (folder / "alice.txt").write_bytes((ROOT / "tests" / "data" / "text" / "alice.txt").read_bytes()[:1200])


def write_diffusion_models() -> None:
    """The pipeline and the GGUF file of the commands, tiny ones."""
    from tests.support import diffusion_models

    diffusion_models.write_pipeline(Path("Z-Image-Turbo"))
    model = diffusion_models.random_model("ZImageTransformer2DModel")
    diffusion_models.write_gguf_model(Path("z_image_turbo-Q8_0.gguf"), model)


def run_commands(text: str) -> list[str]:
    """Run the lines of a block that call qdsl, with images of few pixels; what each printed."""
    lines = [line.split("#")[0] for line in text.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("qdsl ")]
    commands = [command for command in commands if command[0] not in ("demo", "analyze")]
    printed = []
    for command in commands:
        result = CliRunner().invoke(app, [word.replace("1024x1024", "32x32") for word in command], catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)
        printed.append(result.output)
    return printed


def run_page(path: Path, names: dict[str, Any] | None = None) -> None:
    """Run the blocks of a page in order: specs become files, Python shares one namespace, and commands print what stands below.

    Numbers that a command prints may differ from the page's: there they are those of larger models.
    """
    names, printed = names or {}, ""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
        if language == "yaml" and block.startswith("format:"):
            Path(f"{block.split()[1]}.yaml").write_text(block)
        elif language == "python":
            exec(compile(block, path.name, "exec"), names)  # noqa: S102
        elif language == "sh":
            printed = "\n".join(run_commands(block))
        elif language == "text" and "qdsl analyze" not in path.read_text():
            words = {"...", *map(_words, printed.splitlines())}
            assert [line for line in block.splitlines() if _words(line) not in words] == [], printed


def _words(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "0", line)).strip()


class Mlp(nn.Module):
    """The layers of the page on models."""

    def __init__(self, hidden: int = 256, inner: int = 512) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class RunningMlp(Mlp):
    """The same, which runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def checkpoint(path: Path, format: Any, config: dict[str, object], prefix: str = "", **options: Any) -> Path:
    """A folder of an Mlp, plain where there is no format."""
    path.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in Mlp().named_parameters():
        module = prefix + name.removesuffix(".weight")
        packed = {} if format is None else format.quantize(parameter.detach(), **options).tensors
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in packed.items()}
        tensors |= {} if packed else {f"{module}.weight": parameter.detach().bfloat16()}
    safetensors.write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_python_of_the_page_on_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What users of other projects had to write in 21 to 40 lines is 6 lines at most."""
    monkeypatch.chdir(tmp_path)
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}}
    checkpoint(Path("Mlp-FP8"), fp8_block, fp8)
    checkpoint(Path("Mlp-bf16"), None, {})
    checkpoint(Path("FLUX.2-klein/transformer"), None, {})
    checkpoint(Path("Qwen3-8B-FP8"), fp8_block, fp8, "model.")
    checkpoint(Path("Qwen3-8B-GPTQ"), int_group, gptq, "model.", bits=4, group=128, symmetric=True, storage="gptq_v2")
    checkpoint(Path("plain/transformer"), None, {}, "layers.0.")
    compress(Path("plain"), Aim("df11"), Path("Z-Image-Turbo-DF11"))
    tensors = {f"model.diffusion_model.{name}": q4_0.quantize(parameter.detach()).tensors["blocks"].view(len(parameter), -1)
               for name, parameter in Mlp().named_parameters()}
    new = [NewTensor(name, BY_NAME["Q4_0"], (len(blocks), blocks.shape[1] // 18 * 32), [safetensors.bytes_of(blocks)])
           for name, blocks in tensors.items()]
    gguf_write.write("flux2-klein-Q4_K_M.gguf", {"general.architecture": Value.of("string", "flux")}, new)
    text = (ROOT / "docs" / "models.md").read_text()
    assert all(block.count("\n") <= 6 for block in re.findall(r"<!-- skeletons -->\n```python\n(.*?)```", text, re.DOTALL))
    names: dict[str, object] = {"device": "cpu", "Qwen3": Mlp, "Flux2": Mlp,
                                "ZImage": lambda: nn.ModuleDict({"layers": nn.ModuleList([Mlp()])}).bfloat16()}
    for block in blocks(ROOT / "docs" / "models.md", "python"):
        exec(compile(block, "models.md", "exec"), names)  # noqa: S102
    assert Path("Mlp-again/model.safetensors").read_bytes() == Path("Mlp-FP8/model.safetensors").read_bytes()


@pytest.mark.filterwarnings("default")
def test_python_of_the_page_on_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    producer_folders.write_folder(tmp_path / "Qwen3-GPTQ", "gptq v2", "qwen3")
    language_models.write_plain(tmp_path / "Qwen3", "qwen3")
    gguf_models.written(tmp_path, "qwen3", has_settings=True, has_vocabulary=True, vocab_size=288)[0].rename("Qwen3-Q8_0.gguf")
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "transformers.md", "python"):
        exec(compile(block, "transformers.md", "exec"), names)  # noqa: S102
    assert (tmp_path / "Qwen3-again/model.safetensors").read_bytes() == (tmp_path / "Qwen3-int4/model.safetensors").read_bytes()
    for name in ("Qwen3", "Qwen3-GPTQ", "Qwen3-int4"):
        language_models.add_tokenizer(tmp_path / name)
    (tmp_path / "wiki.test.raw").write_text("A text of more than one chunk of tokens. " * 20)
    [commands] = blocks(ROOT / "docs" / "transformers.md", "sh")
    assert run_commands(commands) and (tmp_path / "kl.svg").is_file()


@pytest.mark.filterwarnings("default")
def test_python_of_the_page_on_diffusers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    write_diffusion_models()
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "diffusers.md", "python"):
        exec(compile(block, "diffusers.md", "exec"), names)  # noqa: S102
    assert (tmp_path / "transformer-packed/diffusion_pytorch_model.safetensors").is_file()
    commands = "".join(blocks(ROOT / "docs" / "diffusers.md", "sh"))
    assert len(run_commands(commands)) == 2 and (tmp_path / "fox.png").is_file()
    assert (tmp_path / "z_image_turbo-Q4_K_M.gguf").is_file()


def test_the_page_on_diffusers_lists_all_converters(bless: bool) -> None:
    pytest.importorskip("diffusers")
    from tests.support import diffusion_models

    page = ROOT / "docs" / "diffusers.md"
    before, after = re.split(r"(?<=<!-- coverage -->\n)(?:\|.*\n)*", page.read_text())
    if bless:
        page.write_text(before + diffusion_models.coverage() + after)
    assert page.read_text() == before + diffusion_models.coverage() + after


@pytest.mark.filterwarnings("default")
def test_python_of_the_page_on_gguf_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gguf_models.written(tmp_path, "qwen3", has_settings=True)[0].rename("Qwen3-Q8_0.gguf")
    (tmp_path / "Olmo").mkdir()
    gguf_models.written(tmp_path / "Olmo", "olmo")[0].rename("olmo-Q8_0.gguf")
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "gguf_models.md", "python"):
        exec(compile(block, "gguf_models.md", "exec"), names)  # noqa: S102
    assert (tmp_path / "Olmo-packed/model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore")                            # of peft
def test_python_of_the_page_on_adapters_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("Mlp-FP8"), fp8_block, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    names: dict[str, Any] = {"batches": [(torch.randn(4, 256), torch.randn(4, 256)) for _ in range(2)]}
    for block in blocks(ROOT / "docs" / "peft.md", "python"):
        with torch.device("meta"):
            names["model"] = RunningMlp()
        qdsl.load_weights_(names["model"], "Mlp-FP8")
        exec(compile(block, "peft.md", "exec"), names)  # noqa: S102
    assert Path("adapter/adapter_model.safetensors").is_file()
    again = RunningMlp()
    assert qdsl.load_weights_(again, "Mlp-tuned").packed.keys() == {"gate_proj", "up_proj", "down_proj"}
    assert str(names["report"]).startswith("2 packed layers merged into layers of the same format, and 0 dense layers")
    assert len(names["ignored"]) == 6


@pytest.mark.filterwarnings("default")
def test_pages_import_public_modules_alone() -> None:
    """`qdsl`, a format, a part of `qdsl.models`, `qdsl.analyze` and `qdsl.kv_cache`: all else may move."""
    public = re.compile(r"qdsl(\.generated(\.\w+)?|\.models(\.\w+)?|\.analyze|\.kv_cache)?")
    lines = [line for path in DOCUMENTS for block in blocks(path, "python") for line in block.splitlines()]
    modules = [match[1] for line in lines if (match := re.match(r"\s*(?:from|import) (qdsl[\w.]*)", line))]
    assert len(modules) > 20 and [name for name in modules if not public.fullmatch(name)] == []


def test_page_on_serving_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from qdsl.models.transformers import from_pretrained

    file, _ = gguf_models.written(tmp_path, "llama", type="Q8_0", has_settings=True)
    from_pretrained(file).save_pretrained("Qwen3-8B-hlane")
    page = ROOT / "docs" / "serving.md"
    names: dict[str, Any] = {"folder": "Qwen3-8B-hlane", "x": torch.randn(3, 112)}
    for block in blocks(page, "python"):
        exec(compile(block, "serving.md", "exec"), names)  # noqa: S102
    with qdsl.open("Qwen3-8B-hlane") as checkpoint:
        weight = checkpoint.weight("model.layers.0.mlp.down_proj", dtype=torch.float32)
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(names["y"], names["x"] @ weight[:, :112].T)
    commands = [shlex.split(line)[1:] for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("qdsl ")]
    [result] = [CliRunner().invoke(app, command) for command in commands]
    assert result.exit_code == 1 and "8 of 30 layers cannot be served on 2 ranks" in result.output


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


def write_demo(folder: Path) -> None:
    matrices, others = demo.read(None, say=lambda line: None)
    demo.write_checkpoint(fp8_block, matrices, others, folder / "build" / "demo", say=lambda line: None)


def write_folders(folder: Path) -> None:
    """Folders of one layer that are quantized, a plain one, and a pipeline."""
    layer = int_group.quantize(torch.ones(16, 64), "gptq_v2", bits=4, group=32)
    folders.folder(folder / "Qwen3-8B-GPTQ", folders.named({"up": layer}))
    scaled = fp8_channel.quantize(torch.ones(16, 64), "safetensors")
    folders.folder(folder / "Qwen3-8B-FP8-dynamic", folders.named({"up": scaled}), config={})
    folders.folder(folder / "Qwen3-8B", {"up.weight": torch.randn(128, 128).bfloat16()}, config={}, index=False)
    matrices = {f"transformer_blocks.{block}.ff.weight": torch.randn(64, 128).bfloat16() for block in range(2)}
    folders.folder(folder / "FLUX.1-dev" / "transformer", matrices, config={}, index=False)
    (folder / "FLUX.1-dev" / "transformer" / "pytorch_model.bin").unlink()


def write_gguf_files(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(framed([info(dims=[32], type=2)], data=bytes(32)))
    written(folder / "model-bf16.gguf", ToyModel(Model("llama", 1, 1, 1), 256, 256))
    ones = {"in_sum2": np.ones((1, 256), np.float32), "counts": np.ones((1, 1), np.float32)}
    importance = {f"blk.0.attn_v.weight.{name}": values for name, values in ones.items()}
    written(folder / "imatrix.gguf", ToyModel(Model("imatrix", 0, 0, 0), 0, 0), importance)
    safetensors.write(folder / "flux1-dev.safetensors", {"double_blocks.0.img_attn.proj.weight": torch.ones(8, 256)})


def write_qwen3(folder: Path) -> None:
    language_models.write_plain(folder / "Qwen3-8B", "qwen3")
    producer_folders.write_folder(folder / "Qwen3-8B-GPTQ", "gptq v2", "qwen3")


def write_pipeline(folder: Path) -> None:
    pytest.importorskip("diffusers")
    write_diffusion_models()


def write_packing(folder: Path) -> None:
    """The module that the page shows."""
    [module] = [block for block in blocks(ROOT / "docs" / "infer.md", "python") if block.startswith("def pack")]
    (folder / "packing.py").write_text(module)


PAGES: dict[str, Callable[[Path], None]] = {
    "README.md": lambda folder: None, "docs/python.md": write_demo, "docs/checkpoints.md": write_folders,
    "docs/lossless.md": write_folders, "docs/gguf.md": write_gguf_files,
    "docs/which_format.md": lambda folder: None,
    "docs/kernels.md": lambda folder: None, "docs/tutorial.md": lambda folder: None, "docs/infer.md": write_packing,
    "docs/kv_cache.md": lambda folder: None,
    "docs/tasks/qwen3-fp8-int8.md": write_qwen3, "docs/tasks/gptq-to-int4pack.md": write_qwen3,
    "docs/tasks/gguf-for-diffusion.md": write_pipeline, "docs/tasks/df11-z-image.md": write_pipeline,
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that `qdsl example` takes in place of SmolLM2's."""
    return example.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PAGES)
def test_blocks_of_a_page_run(name: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example.use(tiny_llama, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qdsl.models.gguf_vocabulary.pre_tokenizer", lambda tokenizer, folder: "tiny")
    PAGES[name](tmp_path)
    run_page(ROOT / name)


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
    """In processes that compile kernels; what the page shows of the first is laid out as that prints it."""
    lines = [line.split("#")[0] for block in blocks(ROOT / "docs" / "kernels.md", "sh") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("qdsl analyze ")]
    done = [compiling.run(*shlex.split(command)) for command in commands]
    assert done and not [process.stderr for process in done if process.returncode or process.stderr]
    [shown] = blocks(ROOT / "docs" / "kernels.md", "text")
    labels = [line[:14].rstrip() for line in shown.splitlines()]
    assert len(labels) > 8 and set(labels) <= {line[:14].rstrip() for line in done[0].stdout.splitlines()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_specs_in_documents_compile(path: Path) -> None:
    for number, text in enumerate(blocks(path, "yaml")):
        if text.startswith("format:"):
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
    """Nine sentences of ten on every page have at most 25 words."""
    counts = {path.name: sorted(len(WORD.findall(sentence)) for sentence in sentences(path.read_text())) for path in DOCUMENTS}
    assert sum(map(len, counts.values())) > 700
    assert {name: page[len(page) * 9 // 10] for name, page in counts.items()
            if len(page) >= 10 and page[len(page) * 9 // 10] > MOST_WORDS} == {}
