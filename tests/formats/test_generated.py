"""Generated modules are what their specs say, whatever the machine; and they are text that needs no compiler to run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.compiler.emit.module.build import BuildError, build
from qdsl.compiler.emit.triton.matrix_unit import FUNCTIONS, SHARED
from qdsl.compiler.emit.triton.matrix_unit_layout import LOCALS
from qdsl.compiler.spec.schema import RESERVED
from qdsl.compiler.spec.source import SpecError
from tests.support.formats import ROOT, SHIPPED, SPECS, module

GENERATED = sorted((ROOT / "generated").rglob("*.py"))
IMPORTS = {"typing", "torch", "qdsl.encode", "qdsl.runtime", "qdsl.runtime.gpu.kernels", "qdsl.runtime.libraries.triton",
           "qdsl.runtime.weight.numbers"}
SURFACE = ("wrap", "quantize", "dequantize", "pack", "unpack", "convert", "linear", "Linear", "SPEC", "FORMAT")


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*.*")) if path.suffix in (".py", ".json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_checked_in_modules_are_what_the_specs_say(seed: str, tmp_path: Path) -> None:
    """Built anew in another process, folder, locale and with another hash seed, byte for byte."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "TZ": "Asia/Kathmandu"}
    subprocess.run([sys.executable, "-m", "qdsl", "build", "--all", "-o", str(tmp_path)], cwd=tmp_path, env=environment,
                   check=True, capture_output=True)
    built, kept = tree(tmp_path), tree(ROOT / "generated")
    stale = sorted(name for name in built.keys() | kept.keys() if built.get(name) != kept.get(name))
    assert not stale, f"generated/{stale[0]} is not what its spec says: run `qdsl build --all`"


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT / "generated")))
def test_generated_text_imports_the_runtime_alone(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(str(node.module))
    assert imported <= IMPORTS


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT / "generated")))
def test_generated_text_reads_well(path: Path) -> None:
    """A formula and a spec in its first lines, no long lines, no trailing spaces, no names that nothing reads."""
    text = path.read_text()
    head = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^ +w = \S", head, re.MULTILINE) and "Built from the spec " in head and "`qdsl build`" in head
    assert max(map(len, text.split("\n"))) <= 140
    assert not re.search(r"[ \t]$", text, re.MULTILINE)
    linted = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--no-cache", str(path)],
                            capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_module_has_the_whole_surface(path: Path) -> None:
    generated = module(path)
    assert [name for name in SURFACE if not hasattr(generated, name)] == []
    assert generated.SPEC.name == path.stem
    assert generated.SPEC.formula in (generated.__doc__ or "")


def test_a_build_removes_files_of_removed_parameter_values(tmp_path: Path) -> None:
    """Files of an earlier build are removed; files that the compiler did not write are not."""
    spec = tmp_path / "int_group.yaml"
    shutil.copy(ROOT / "specs" / "int_group.yaml", spec)
    out = tmp_path / "out"
    list(build(spec, out))
    (out / "int_group" / "notes.py").write_text("mine = 1\n")
    spec.write_text(spec.read_text().replace("3, 5, ", "3, "))
    changes = {written.path.name: written.change for written in build(spec, out)}
    assert changes["bits_5.py"] == "removed" and "notes.py" not in changes
    assert sorted(path.name for path in (out / "int_group").iterdir()) == [
        "__init__.py", *(f"bits_{bits}.py" for bits in (2, 3, 4, 6, 7, 8)), "notes.py"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "int_group").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="is a link"):
        list(build(ROOT / "specs" / "int_group.yaml", tmp_path / "out"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_names_of_generated_code_are_reserved() -> None:
    """A field called as something that a module imports would hide it."""
    modules = [ast.parse(path.read_text()) for path in GENERATED]
    imported = {alias.asname or alias.name for module in modules for node in ast.walk(module)
                if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0) for alias in node.names}
    assert "Format" in imported and imported <= RESERVED


def test_a_spec_that_is_wrong_writes_nothing(tmp_path: Path) -> None:
    spec = tmp_path / "broken.yaml"
    spec.write_text(SHIPPED[0].read_text().replace("decode: ", "decode: zz * "))
    with pytest.raises(SpecError, match="'zz' is unknown"):
        list(build(spec, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT / "generated")))
def test_no_tensor_is_called_like_a_kernels_own_value(path: Path) -> None:
    """What functions of kernels take, set and call: the compiler renames a spec's own names that are like these."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and re.match(rf"_({'|'.join(FUNCTIONS)})_", function.name):
            unpacked = [node.targets[0] for node in ast.walk(function) if isinstance(node, ast.Assign)]
            specs = {name.id for names in unpacked if isinstance(names, ast.Tuple) for name in names.elts
                     if isinstance(name, ast.Name)}
            specs |= {node.target.id for node in ast.walk(function)
                      if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
            assert specs.isdisjoint(LOCALS), function.name
            own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            own |= {argument.arg for argument in function.args.args}
            called = {node.func.value.id for node in ast.walk(function) if isinstance(node, ast.Call)
                      and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)}
            assert {name for name in (own | called) - specs if not name.endswith("_g")} <= LOCALS, function.name


JOINT = """format: joint
title: rows that a field of their own changes
weight: [N, K]
tables:
  codes: [0, 7, 9, 21, 30, 44, 51, 63]
  grid: "i<8 j<4: codes[i] // 4**(j // 2) % 4 + j"
fields:
  d: f32[n, k // 16]
  s: u2[n, k // 4]
  g: u3[n, k // 4]
decode: {decode}
storage:
  packed:
    blocks:
      run: k
      record: |
        d
        c<4: g[c] s[c] pad:3
"""


@pytest.mark.parametrize(("decode", "joined"), [
    ("d * (grid[g, k % 4] * (1 - 2 * s))", True), ("d * (grid[g, k % 4] / 3 - s)", True),
    ("d * s * (grid[g, k % 4] + s)", False)])
def test_a_row_and_a_field_of_its_own_are_looked_up_together(decode: str, joined: bool, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, floats, and where the field is read elsewhere too."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    spec = tmp_path / "joint.yaml"
    spec.write_text(JOINT.replace("{decode}", decode))
    form = qdsl.load(spec)
    assert hasattr(form, "GRID_S") == joined
    torch.manual_seed(0)
    fields = {"d": torch.randn(3, 2), "s": torch.randint(0, 4, (3, 8), dtype=torch.uint8),
              "g": torch.randint(0, 8, (3, 8), dtype=torch.uint8)}
    codes = torch.tensor([0, 7, 9, 21, 30, 44, 51, 63])[fields["g"].long()]
    grid = torch.stack([codes // 4 ** (j // 2) % 4 + j for j in range(4)], -1).float()
    s, d = fields["s"].float()[..., None], fields["d"].repeat_interleave(4, 1)[..., None]
    wanted = {"(1": d * (grid * (1 - 2 * s)), "/ 3": d * (grid / 3 - s), "d * s": d * s * (grid + s)}
    weight = form.dequantize(form.pack(fields), torch.float32)
    assert torch.equal(weight, next(w for key, w in wanted.items() if key in decode).flatten(1))


def test_functions_that_formats_share_have_the_lines_they_are_chosen_by() -> None:
    functions = [node for node in ast.parse((ROOT / "qdsl/runtime/gpu/kernels/group_sums.py").read_text()).body
                 if isinstance(node, ast.FunctionDef)]
    lines = {}
    for function in functions:
        _, values, *body = function.body                         # behind the docstring
        names = ast.unparse(values).removesuffix(" = fields").strip("()").replace(",", " ").split()
        text = "\n".join(map(ast.unparse, body))
        for place, name in enumerate(names):
            text = re.sub(rf"\b{name}\b", f"${place}", text)
        assert ast.get_docstring(function)
        lines[tuple(text.split("\n"))] = function.name
    assert lines == SHARED
