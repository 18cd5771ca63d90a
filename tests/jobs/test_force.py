"""What `--force` may replace: the files of a checkpoint, known by their contents; and inputs, which no command changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.files.folder import INDEX
from qdsl.checkpoint.files.safetensors import write
from qdsl.jobs.engine import stage
from tests.support.jobs import JOBS, command, files, job_inputs, succeed

FOLDER_JOBS = ("convert", "compress", "decompress", "quantize folder")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_inputs(tmp_path_factory.mktemp("inputs"))


def asked(job: str, inputs: Path, out: Path) -> tuple[str | Path, ...]:
    return (*JOBS[job][0].format(inputs).split(), "-o", out, "--force")


def weights(path: Path) -> None:
    write(path, {"model.layers.0.up.weight": torch.ones(4, 4)})


def project(out: Path) -> None:
    """Folders with no checkpoint, though names look like one's."""
    for name, text in {"tsconfig.json": "{}", "config.json": '{"port": 80}', "thesis.txt": "y", "src/main.ts": "x",
                       "src/model.safetensors.index.json": "{}"}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)


def named_like_weights(out: Path) -> None:
    project(out)
    (out / "model.safetensors").write_bytes(b"no header")


def index_of_nothing(out: Path) -> None:
    project(out)
    (out / INDEX).write_text("[]")


def a_folder_of_models(out: Path) -> None:
    """Files and folders of other models, none of which is the folder's own."""
    (out / "other").mkdir(parents=True)
    weights(out / "lora_a.safetensors")
    weights(out / "other" / "model.safetensors")


@pytest.mark.parametrize("fill", [project, named_like_weights, index_of_nothing, a_folder_of_models])
def test_a_folder_without_a_checkpoint_is_refused(fill: Callable[[Path], None], inputs: Path, tmp_path: Path) -> None:
    fill(tmp_path / "out")
    before = files(tmp_path)
    result = command(*asked("quantize folder", inputs, tmp_path / "out"))
    assert result.exit_code == 2 and ("this folder holds none" in result.stderr or "nothing says that" in result.stderr)
    assert files(tmp_path) == before


@pytest.mark.parametrize("job", FOLDER_JOBS)
def test_what_is_not_of_the_checkpoint_stays(job: str, inputs: Path, tmp_path: Path) -> None:
    """Over a checkpoint of another program, and again over qdsl's own."""
    out = tmp_path / "out"
    shutil.copytree(inputs / "plain", out)
    weights(out / "model-00009-of-00009.safetensors")
    mine = {"thesis.txt": "y", "src/main.ts": "x", "runs/a/model.safetensors": "z", "tokenizer/notes.md": "n", "x.gguf": "g"}
    for name, text in mine.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    succeed(*asked(job, inputs, tmp_path / "fresh"))
    for _ in range(2):
        result = command(*asked(job, inputs, out))
        assert result.exit_code == 0, result.output
        notes = [f"note: {name} is no file of a checkpoint, and stays" for name in ("runs", "src", "thesis.txt", "x.gguf")]
        assert [line for line in result.output.splitlines() if line.endswith("and stays")] == notes
        kept = {"src": b"", "runs": b"", "runs/a": b""} | {name: text.encode() for name, text in mine.items()}
        assert files(out) == files(tmp_path / "fresh") | kept


def test_a_file_that_would_be_lost_is_named(inputs: Path, tmp_path: Path) -> None:
    """Nothing is written for hours before that is said; a changed file that qdsl wrote is the user's."""
    source = tmp_path / "in"
    shutil.copytree(inputs / "plain", source)
    (source / "README.md").write_text("the model's")
    out = tmp_path / "out"
    succeed(*asked("quantize folder", inputs, out))
    (out / "README.md").write_text("mine")
    again = ("quantize", source, "-f", "fp8_block", "-o", out, "-j", "1", "--force")
    before = files(tmp_path)
    result = command(*again)
    assert result.exit_code == 2 and "nothing says that 'README.md' belong" in result.stderr and files(tmp_path) == before
    (out / "README.md").unlink()
    succeed(*again)
    (source / "README.md").write_text("a newer one")
    (out / "README.md").write_text("changed")
    result = command(*again)
    assert result.exit_code == 2 and "'README.md'" in result.stderr and (out / "README.md").read_text() == "changed"
    (out / "README.md").write_text("the model's")                # as qdsl wrote it
    succeed(*again)
    assert (out / "README.md").read_text() == "a newer one"
    (source / "README.md").unlink()
    succeed(*again)
    assert not (out / "README.md").exists()


@pytest.mark.parametrize("names", [["../letter"], ["{}/letter"], ["link/letter"], ["link"], [".ssh"]])
def test_a_forged_list_removes_nothing(names: list[str], inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeed(*asked("quantize folder", inputs, out))
    (tmp_path / "letter").write_bytes(b"")
    (out / ".ssh").write_bytes(b"")
    (out / "link").symlink_to(tmp_path if names == ["link/letter"] else tmp_path / "letter")
    sums = json.loads((out / "qdsl-checksums.json").read_text())
    sums["others"] |= {name.format(tmp_path): 0 for name in names}
    (out / "qdsl-checksums.json").write_text(json.dumps(sums))
    succeed(*asked("quantize folder", inputs, out))
    assert (tmp_path / "letter").exists() and (out / ".ssh").exists() and (out / "link").is_symlink()


def test_files_that_come_meanwhile_are_not_replaced(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = ("quantize", inputs / "plain", "-f", "fp8_block", "-o", out, "-j", "1")
    succeed(*job, "--shard", "1/1")
    (out / "config.json").write_text("mine")
    result = command("merge-index", out)
    assert result.exit_code == 2 and "'config.json'" in result.stderr and (out / "config.json").read_text() == "mine"
    (out / "config.json").unlink()
    succeed("merge-index", out)


def test_components_of_a_pipeline_are_replaced_and_other_folders_stay(inputs: Path, tmp_path: Path) -> None:
    for name in ("transformer", "text_encoder"):
        shutil.copytree(inputs / "plain", tmp_path / "in" / name)
    (tmp_path / "in" / "model_index.json").write_text('{"_class_name": "P", "transformer": ["a", "b"], "text_encoder": []}')
    job = ("quantize", tmp_path / "in", "-f", "fp8_block", "-j", "1")
    succeed(*job, "-o", tmp_path / "fresh")
    shutil.copytree(tmp_path / "in", tmp_path / "out")
    shutil.copytree(inputs / "fp8", tmp_path / "out" / "experiment")
    weights(tmp_path / "out" / "transformer" / "model-00009-of-00009.safetensors")
    for _ in range(2):
        succeed(*job, "-o", tmp_path / "out", "--force")
        written = files(tmp_path / "out")
        assert {name for name in written if not name.startswith("experiment")} == files(tmp_path / "fresh").keys()
        assert files(tmp_path / "out" / "experiment") == files(inputs / "fp8")


# Inputs


def soft(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("link", [soft, lambda path, target: os.link(target, path)], ids=["soft", "hard"])
@pytest.mark.parametrize("job", FOLDER_JOBS)
def test_an_input_of_links_into_the_output_is_refused(job: str, link: Callable[[Path, Path], None], inputs: Path,
                                                      tmp_path: Path) -> None:
    """As in the caches of the hub, whose snapshots are links to other folders."""
    store, snapshot = tmp_path / "store", tmp_path / "snapshot"
    arguments = JOBS[job][0].format(inputs).split()
    shutil.copytree(arguments[1], store)
    snapshot.mkdir()
    for path in store.iterdir():
        if path.is_file():
            link(snapshot / path.name, path)
    before = files(store)
    arguments[1] = str(snapshot)
    result = command(*arguments, "-o", store, "--force")
    assert result.exit_code == 2 and "holds the input" in result.stderr and files(store) == before


def subfolder(tmp_path: Path, inputs: Path) -> tuple[list[str | Path], Path]:
    """A pipeline whose model is a link to a folder in the output."""
    shutil.copytree(inputs / "plain", tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "transformer").symlink_to(tmp_path / "out")
    return ["quantize", tmp_path / "in", "-f", "fp8_block"], tmp_path / "out"


def config_of_a_file(tmp_path: Path, inputs: Path) -> tuple[list[str | Path], Path]:
    """A file, whose config next to it is a link into the output."""
    shutil.copytree(inputs / "plain", tmp_path / "out")
    (tmp_path / "in").mkdir()
    shutil.copy(inputs / "plain" / "model-00001-of-00002.safetensors", tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").symlink_to(tmp_path / "out" / "config.json")
    return ["quantize", tmp_path / "in" / "model.safetensors", "-f", "fp8_block"], tmp_path / "out"


def like(tmp_path: Path, inputs: Path) -> tuple[list[str | Path], Path]:
    shutil.copytree(inputs / "plain", tmp_path / "out")
    return ["decompress", inputs / "hlane", "--like", tmp_path / "out"], tmp_path / "out"


def patterns(tmp_path: Path, inputs: Path) -> tuple[list[str | Path], Path]:
    shutil.copytree(inputs / "plain", tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"dfloat11_config": {"pattern_dict": {"model.layers.0": ["up"]}}}')
    return ["compress", inputs / "plain", "-f", "df11", "--patterns", tmp_path / "out" / "config.json"], tmp_path / "out"


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("case", [subfolder, config_of_a_file, like, patterns])
def test_every_file_that_is_read_is_compared(case: Callable[[Path, Path], tuple[list[str | Path], Path]], inputs: Path,
                                             tmp_path: Path) -> None:
    arguments, out = case(tmp_path, inputs)
    before = files(tmp_path) | files(inputs)
    result = command(*arguments, "-o", out, "-j", "1", "--force")
    assert result.exit_code == 2 and "the output is" in result.stderr, result.output
    assert files(tmp_path) | files(inputs) == before


def test_a_part_of_a_forced_output_is_no_reason_to_check_again(inputs: Path, tmp_path: Path) -> None:
    """Parts that run at the same time each say --force."""
    out = tmp_path / "out"
    succeed(*asked("quantize folder", inputs, out))
    whole = files(out)
    for part in ("1/2", "2/2"):
        succeed(*asked("quantize folder", inputs, out), "--shard", part)
    assert (out / stage.STAGE / stage.FORCE).exists()
    succeed("merge-index", out)
    assert files(out) == whole


def test_checksums_are_not_written_through_a_link(inputs: Path, tmp_path: Path) -> None:
    shutil.copy(inputs / "in.gguf", tmp_path / "in.gguf")
    before = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "out.gguf.qdsl-checksums.json").symlink_to(tmp_path / "in.gguf")
    succeed("quantize", tmp_path / "in.gguf", "-t", "q8_0", "-o", tmp_path / "out.gguf", "-j", "1")
    assert (tmp_path / "in.gguf").read_bytes() == before
    assert command("verify", tmp_path / "out.gguf").exit_code == 0
