"""The wheel: built from the tracked files, unpacked, and used with nothing of the repository in reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.formats import ROOT, SHIPPED

pytestmark = [pytest.mark.xdist_group("wheel"),
              pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git to say which files are tracked")]

NAMES = [path.stem for path in SHIPPED]
# What only the compiler needs, and the packages that only it needs: without them every generated module still runs.
COMPILER = ("compiler", "specs", "core/layout.py", "cli", "__main__.py")
WITHOUT = "import sys\nsys.modules.update(dict.fromkeys(['yaml', 'jinja2', 'typer', 'rich', 'gguf', 'safetensors']))\n"

# Every module of the package's generated/: quantized where it has a quantizer, else wrapped; decoded; multiplied, some by
# compiled loops, because those of each format have tests of their own.
USE = """
import importlib, os, pkgutil, sys
import torch
import qdsl.generated

names = sorted(module.name for module in pkgutil.iter_modules(qdsl.generated.__path__))
for place, name in enumerate(names):
    os.environ["QDSL_CPU_COMPILE"] = "auto"
    module = importlib.import_module(f"qdsl.generated.{name}")
    assert module.__file__.startswith(sys.argv[1]), module.__file__
    storages = next(iter(module.FORMAT.variants.values())).storages
    columns = next(iter(storages.values())).fixed.get("K", 1024)
    if next(iter(module.SPEC.variants.values())).encode:
        weight = torch.randn(128, columns, generator=torch.Generator().manual_seed(0))
        packed = module.quantize(weight)
        os.environ["QDSL_CPU_COMPILE"] = "never" if place % 16 else "auto"
        error = (module.dequantize(packed, torch.float32) - weight).norm() / weight.norm()
        bits = 8 * packed.nbytes / weight.numel()
        assert error < max(4 * 2 ** -bits, 0.04), (name, error, bits)
    else:
        packed = module.FORMAT.empty((128, columns), next(iter(storages)))
        packed = module.wrap({key: torch.ones_like(tensor, device="cpu") for key, tensor in packed.tensors.items()}, packed.shape)
    dense, x = module.dequantize(packed, torch.float32).double(), torch.ones(2, columns)
    bound = 2 * columns * 2.0 ** -24 * dense.abs().sum(1)        # float32 sums of weights, some times a scale
    for product in (module.linear(x, packed), module.Linear(packed)(x)):
        assert ((product.double() - dense.sum(1)).abs() <= bound).all(), name
print(*names)
"""


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def release(folder: Path) -> Path:
    """A copy of what git tracks; a readme and a license are made up where there are none."""
    for path in tracked():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name in ("README.md", "LICENSE"):
        if not (folder / name).exists():
            (folder / name).write_text("None yet.\n")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = release(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=source,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The wheel's files, as an installer lays them out."""
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(site: Path, *arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A process in an empty folder that has the wheel's files in reach, and what the environment has installed."""
    elsewhere = site.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run([sys.executable, *arguments], cwd=elsewhere, capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(site), "COLUMNS": "200",
                               **({"QDSL_CACHE": str(cache)} if cache else {})})


def test_a_wheel_holds_the_package_its_formats_and_their_specs(wheel: Path) -> None:
    """All of them, byte for byte, with the kernels' templates; and nothing of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    shipped = [path for path in (ROOT / "generated").rglob("*.*") if path.suffix in (".py", ".json")]
    wanted = {f"qdsl/{path.relative_to(ROOT)}": path for path in [*shipped, *(ROOT / "specs").rglob("*.yaml")]}
    assert [name for name, path in wanted.items() if contents.get(name) != path.read_bytes()] == []
    code = [path.relative_to(ROOT).as_posix() for path in tracked() if path.is_relative_to(ROOT / "qdsl")]
    assert "qdsl/compiler/emit/triton/skeletons/decode.py.jinja" in code and sorted(set(code) - contents.keys()) == []
    top = {name.split("/")[0] for name in contents}
    assert len(top) == 2 and "qdsl" in top and all(name == "qdsl" or name.endswith(".dist-info") for name in top)
    assert not [name for name in contents if name.endswith(".pyc") or "__pycache__" in name]
    entry = next(text for name, text in contents.items() if name.endswith("entry_points.txt")).decode()
    assert "qdsl = qdsl.__main__:main" in entry


def test_the_command_of_a_wheel_finds_its_specs(installed: Path) -> None:
    """By name; what it builds of them is what it holds already, and a user's own file is built where the user is."""
    listed = python(installed, "-m", "qdsl", "list", "--json")
    assert listed.returncode == 0 and all(f'"name": "{name}"' in listed.stdout for name in NAMES), listed.stderr
    built = python(installed, "-m", "qdsl", "build", "q4_0", "-o", "out")
    assert built.returncode == 0, built.stderr
    assert built.stdout == f"written  {Path('out', 'q4_0.py')}\n"
    written = installed.parent / "elsewhere" / "out" / "q4_0.py"
    assert written.read_bytes() == (ROOT / "generated" / "q4_0.py").read_bytes()
    checked = python(installed, "-m", "qdsl", "build", "--all", "--check")
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stderr


def test_a_wheel_runs_every_format_with_the_compiler_deleted(installed: Path, tmp_path: Path) -> None:
    """Nothing of what reads, checks and prints specs is needed to use a format."""
    for name in COMPILER:
        path = installed / "qdsl" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    program = WITHOUT + USE + "import qdsl.checkpoint.files.safetensors, qdsl.checkpoint.files.folder"
    done = python(installed, "-c", program, str(installed), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == NAMES
