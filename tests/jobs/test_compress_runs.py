"""Compressing however the work is cut: the same bytes, killed at any moment, done again where old, and damage told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.files.folder import ORIGINAL, Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.checkpoint.report.verify import differences
from qdsl.host import processes, system
from qdsl.host.files import OutputError
from qdsl.jobs.compress import df11, restore, run
from qdsl.jobs.compress.exponent_forms import HLANE
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.engine import RewriteError, intact, stage
from tests.support import folders
from tests.support.bf16_folders import CONFIG, normal, sharded_model, toy_folder, without
from tests.support.jobs import command
from tests.support.paths import ROOT

sharded = pytest.fixture(sharded_model)
toy = pytest.fixture(scope="module")(toy_folder)


@pytest.mark.parametrize("format", ["df11", "hlane"])
def test_bytes_do_not_depend_on_processes_or_parts(format: str, sharded: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.pieces, "WORTH", 1 << 13)            # several pieces
    whole = Compression(format)
    run.compress(sharded, whole, tmp_path / "one")
    run.compress(sharded, whole, tmp_path / "jobs", jobs=2)
    for part in ((2, 3), (1, 3)):
        run.compress(sharded, whole, tmp_path / "parts", part=part)
    with pytest.raises(RewriteError, match=r"\d of \d pieces are not there, or not of"):
        run.merge(tmp_path / "parts")
    result = command("compress", sharded, "-f", format, "-o", tmp_path / "parts", "--shard", "3/3", "-j", 1)
    assert "written  part 3/3 of" in result.stdout
    assert command("merge-index", tmp_path / "parts").exit_code == 0
    assert folders.files(tmp_path / "one") == folders.files(tmp_path / "jobs") == folders.files(tmp_path / "parts")
    restore.decompress(tmp_path / "one", tmp_path / "back", jobs=2)
    for part in ((2, 2), (1, 2)):
        restore.decompress(tmp_path / "one", tmp_path / "halves", part=part)
    assert command("merge-index", tmp_path / "halves").exit_code == 0
    assert folders.files(tmp_path / "back") == folders.files(tmp_path / "halves")


def test_as_many_processes_as_memory_holds(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 times a matrix and 160 MB for each, if nobody says how many; fewer for little work."""
    asked: list[int] = []
    monkeypatch.setattr(system, "free_memory", lambda: 1 << 30)
    monkeypatch.setattr(system, "processors", lambda: 64)
    assert [processes.affordable(size) for size in (0, 1 << 20, 100_000_000, 2 << 30)] == [64, 64, 10, 1]
    assert [processes.affordable(1 << 20, work) for work in (0, 1 << 29, 5 << 29)] == [1, 1, 5]
    monkeypatch.setattr(run, "affordable", lambda nbytes, _: asked.append(nbytes) or 1)
    run.compress(sharded, Compression("hlane"), tmp_path / "out", jobs=None)
    assert asked == [160_000_000 + 5 * 2 * 128 * 64 // 2]


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def killed(work: Any, out: Path, after: int) -> bool:
    """Whether a process was killed, before the operation on the output that comes after so many."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(str(out)):
            count += 1
            if count > after:
                os._exit(9)

    try:
        sys.addaudithook(watch)
        work(out)
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("back", [False, True])
def test_killed_at_any_moment(back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader takes what is left for a checkpoint, and the next process makes the same bytes of it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    monkeypatch.setattr(run.pieces, "WORTH", 1 << 13)
    every = {f"{name}.weight": normal(40, 64) for name in "ab"}
    path = folders.folder(tmp_path / "in", every, {"norm": torch.ones(3)}, config=CONFIG)
    run.compress(path, Compression("hlane"), tmp_path / "whole")
    whole = folders.files(tmp_path / "whole")
    if back:
        whole = without(folders.files(path), "pytorch_model.bin")

    def work(out: Path) -> None:
        if back:
            restore.decompress(tmp_path / "whole", out)
        else:
            run.compress(path, Compression("hlane"), out)

    after = 0
    while killed(work, out := tmp_path / f"out{after}", after):
        left = folders.files(out) if out.exists() else {}
        try:
            Folder(out).close()
        except (ValueError, FileNotFoundError):
            pass
        else:
            assert {name: data for name, data in left.items() if not name.startswith(".qdsl")} == whole
        work(out)
        assert folders.files(out) == whole
        after += 5
    assert folders.files(out) == whole and after > 20


def test_only_what_is_missing_or_old_is_done_again(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run.compress(sharded, Compression("hlane"), out, part=(1, 1))
    [piece] = (out / stage.STAGE / "pieces").iterdir()
    before = piece.stat().st_mtime_ns
    run.compress(sharded, Compression("hlane"), out, part=(1, 1))
    assert piece.stat().st_mtime_ns == before
    with pytest.raises(RewriteError, match="a compression to hlane was begun here"):
        run.compress(sharded, Compression("fix4"), out)
    name = "model-00002-of-00002.safetensors"
    write(sharded / name, {"model.layers.1.mlp.q.weight": normal(48, 64, seed=5), "head.weight": normal(8, 4),
                           "table.weight": torch.ones(70, 64)}, {"format": "pt"})
    with pytest.raises(RewriteError, match="pieces are not there, or not of"):
        run.merge(out)
    run.compress(sharded, Compression("hlane"), out)
    restore.decompress(out, tmp_path / "back")
    assert not differences(sharded, tmp_path / "back")


def test_processes_have_no_torch(sharded: Path, tmp_path: Path) -> None:
    """Nor has the command: it and its processes begin in a tenth of a second."""
    code = ("import sys\nfrom pathlib import Path\nfrom qdsl.jobs.compress import restore, run\n"
            "from qdsl.jobs.compress.units import Compression\n"
            "from qdsl.checkpoint.report.contents import contents, lines\n"
            "for format in ('df11', 'hlane'):\n"
            "    out = Path(sys.argv[2]) / format\n"
            "    run.compress(Path(sys.argv[1]), Compression(format), out, check=True)\n"
            "    restore.decompress(out, Path(sys.argv[2]) / f'{format}_back')\n"
            "    lines(contents(out))\n"
            "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code, str(sharded), str(tmp_path)], cwd=ROOT, check=True)


# Damage


def test_a_config_that_does_not_say_the_weights_of_groups(toy: Path, tmp_path: Path) -> None:
    """inspect says so; what was kept says it too."""
    run.compress(toy, Compression("df11"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for pattern_dict, message in (({r"layers\.\d+": ["q", "ff.0"]}, "dfloat11_config says 2 weights, and there are 3"),
                                  ({"((a*)*)*": ["q"]}, "may take too long"), ({}, "says 0 weights")):
        config["dfloat11_config"]["pattern_dict"] = pattern_dict
        path.write_text(json.dumps(config))
        assert message in command("inspect", tmp_path / "out").stdout
    restore.decompress(tmp_path / "out", tmp_path / "back")
    (tmp_path / "out" / ORIGINAL).unlink()
    with pytest.raises(RewriteError, match=r"group 'layers\.0': dfloat11_config says 0 weights"):
        restore.decompress(tmp_path / "out", tmp_path / "again", like=toy)


def test_damaged_tensors_are_refused_by_their_names(sharded: Path, tmp_path: Path) -> None:
    """Also bits that decode to another matrix: the sums of what was compressed are kept."""
    for format, leaves in (("hlane", HLANE.tensor_names), ("df11", df11.NAMES)):
        run.compress(sharded, Compression(format), tmp_path / format)
        with Folder(tmp_path / format) as folder:
            places = {name: (folder.file(name).path, folder.entry(name)) for name in folder.names()}
        for leaf in leaves:
            unit = "model.layers.0.mlp.up" if format == "hlane" else "model.layers.0"
            path, entry = places[f"{unit}.{leaf}"]
            whole = path.read_bytes()
            bad = bytearray(whole)
            bad[entry.start] ^= 0x41
            path.write_bytes(bad)
            with pytest.raises(RewriteError, match=unit):
                restore.decompress(tmp_path / format, tmp_path / "bad")
            path.write_bytes(whole)
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        restore.decompress(tmp_path / format, tmp_path / f"{format}_back")


def test_what_was_written_is_checked_before_it_takes_its_place(sharded: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    real = intact.write

    def broken(shards: Any, place: Path, *options: Any) -> None:
        real(shards, place, *options)
        path = stage.shard_folder(place, shards[0]) / shards[0].name
        with Folder(path) as folder:
            at = folder.entry("model.layers.1.mlp.down.sign_mantissa").start
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(intact, "write", broken)
    with pytest.raises(RewriteError, match=r"'model\.layers\.1\.mlp\.down\.weight' is another matrix when it is decoded"):
        run.compress(sharded, Compression("fix4"), tmp_path / "out", check=True)
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        Folder(tmp_path / "out")


@pytest.mark.parametrize(("change", "message"), [
    ({"schema": 2}, "not of schema 1"), ({"headers": []}, "headers is not a mapping"), ({"headers": {}}, "headers are of"),
    ({"files": {"../x.json": ""}}, "is not the name of a file"), ({"headers": {"a.safetensors": "{"}}, "header"),
    ({"groups": {"g": [1]}}, "groups are lists of names"), ({"crc": {"w": "x"}}, "crc is not a mapping")])
def test_a_stranger_s_file_of_what_was_kept(change: dict[str, Any], message: str, toy: Path, tmp_path: Path) -> None:
    run.compress(toy, Compression("hlane"), tmp_path / "out")
    kept = tmp_path / "out" / ORIGINAL
    kept.write_text(json.dumps({**json.loads(kept.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        restore.decompress(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_is_not_there_or_not_compressed(sharded: Path, toy: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriteError, match="nothing here is compressed"):
        restore.decompress(sharded, tmp_path / "out")
    write(tmp_path / "f32.safetensors", {"w.weight": torch.ones(4, 4)})
    with pytest.raises(RewriteError, match="no bfloat16 matrix"):
        run.compress(tmp_path / "f32.safetensors", Compression("hlane"), tmp_path / "out")
    with pytest.raises(OutputError, match="the output "):
        run.compress(sharded, Compression("hlane"), sharded / "out")
    write(tmp_path / "taken.safetensors", {"w.weight": normal(64, 64), "w.words": torch.ones(3)})
    with pytest.raises(RewriteError, match=r"two tensors would be called 'w\.words'"):
        run.compress(tmp_path / "taken.safetensors", Compression("hlane"), tmp_path / "out")
