"""Arguments that do not fit are errors of ours, with the remedy, not tracebacks of what lies below."""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.cli import app
from qdsl.core import places
from qdsl.generated import df11, hlane, q4_0
from qdsl.runtime import FormatError
from tests.support.ggufs import framed, info
from tests.support.paths import ROOT

FORMATS = {path.stem: importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT for path in places.shipped()}
LENGTHS = {name: sizes for name, form in FORMATS.items() if any(variant.encode for variant in form.variants.values())
           and (sizes := [param for param, values in form.params.items() if set(map(type, values)) == {int} and param != "bits"])}
WEIGHT = q4_0.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("shape", [(-32, 64), (-32, -64), (1 << 40, 1 << 40), (1 << 62, 64), (3, 3, 64), (2.5, 64), "ab", (32,)])
def test_shapes_that_no_weight_has(shape: Any) -> None:
    for format in (q4_0, df11, hlane):
        with pytest.raises(FormatError, match=r"shape is \(N, K\)"):
            format.FORMAT.empty(shape)
    with pytest.raises(FormatError, match=r"shape is \(N, K\)"):
        q4_0.wrap(dict(WEIGHT.tensors), shape=shape)


def test_the_product_of_two_negative_lengths_is_no_shape() -> None:
    packed = df11.quantize(torch.ones(64, 256, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match=r"not \(-64, -256\)"):
        df11.wrap(dict(packed.tensors), shape=(-64, -256))


@pytest.mark.parametrize("length", [(1 << 31) - 1, 1 << 31, (1 << 40) + 128, 1 << 62])
@pytest.mark.parametrize("name", LENGTHS)
def test_blocks_that_are_far_longer_than_the_weight(name: str, length: int) -> None:
    """Every parameter that is a length, in every format: a sentence, or a weight that is read back."""
    form = FORMATS[name]
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    first = next(key for key, variant in form.variants.items() if variant.encode)
    for param in LENGTHS[name]:
        try:
            packed = form.quantize(weight, **{**dict(zip(form.by, first, strict=True)), param: length})
        except FormatError:
            continue
        assert (form.dequantize(packed, torch.float32) - weight).abs().max() < 1


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_x_is_refused(layout: torch.layout) -> None:
    with pytest.raises(FormatError, match=r"expected a dense tensor: x\.to_dense\(\)"):
        q4_0.linear(torch.eye(4, 64).to_sparse(layout=layout), WEIGHT)


def test_an_out_without_memory_of_its_own_is_refused() -> None:
    blocks = WEIGHT.tensors["blocks"]
    whole = torch.zeros(64 * 64, dtype=torch.uint8)
    aliased = q4_0.wrap({"blocks": whole[:blocks.numel()].view(blocks.shape).copy_(blocks)})
    for packed, out in ((WEIGHT, torch.empty(1, 64).expand(32, 64)), (aliased, whole.view(torch.float16).view(32, 64))):
        with pytest.raises(FormatError, match="give it memory of its own"):
            q4_0.dequantize(packed, out=out)
    out = torch.empty(32, 128)[:, ::2]
    assert q4_0.dequantize(WEIGHT, out=out).equal(q4_0.dequantize(WEIGHT, torch.float32))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_as_a_table_of_a_spec_is_refused(tmp_path: Path) -> None:
    """Reading it would never end."""
    (tmp_path / "s.yaml").write_text((ROOT / "specs" / "iq2_xxs.yaml").read_text())
    (tmp_path / "tables").mkdir()
    os.mkfifo(tmp_path / "tables" / "iq2_xxs.txt")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "s.yaml")])
    assert result.exit_code == 1 and "'tables/iq2_xxs.txt' is no regular file" in result.stderr


def test_messages_hold_no_control_characters(tmp_path: Path) -> None:
    """Nor what turns the direction of a line."""
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a\u202eb\u200b\x1b[2J.gguf")])
    assert result.exit_code == 1 and r"a\u202eb\u200b\x1b[2J.gguf" in result.stderr
    assert all(line.isprintable() for line in result.stderr.split("\n"))


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_truncated_gguf_file_ends_with_1(options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(framed([info()], [], bytes(100)))
    assert CliRunner().invoke(app, ["inspect", str(path), *options]).exit_code == 1


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_loading_a_spec_runs_its_text_and_no_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode of another text, which claims to be of this one, lies next to it."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    spec = tmp_path / "mine.yaml"
    spec.write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("q4_0", "mine"))
    module = qdsl.load(spec)
    path = Path(str(module.__file__))
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "evil.py").write_text("HIJACKED = True\n")
    cached = Path(importlib.util.cache_from_source(str(path)))
    py_compile.compile(str(tmp_path / "evil.py"), str(cached))
    status, code = path.stat(), cached.read_bytes()
    claim = int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    cached.write_bytes(code[:8] + claim + code[16:])
    for name in [name for name in sys.modules if name.split(".")[0] == module.__name__]:
        monkeypatch.delitem(sys.modules, name)
    again = qdsl.load(spec)
    assert again is not module and not hasattr(again, "HIJACKED") and hasattr(again, "FORMAT")


@pytest.mark.parametrize("call", [
    lambda format, packed: format.linear(torch.ones(1, 64), packed),
    lambda format, packed: format.grouped_linear(torch.ones(1, 64), packed, [0, 1]),
    lambda format, packed: format.dequantize_rows(packed, torch.tensor([0])),
    lambda format, packed: format.planar(packed),
    lambda format, packed: format.dequantize(packed),
], ids=["linear", "grouped_linear", "dequantize_rows", "planar", "dequantize"])
def test_a_weight_of_another_format(call: Any) -> None:
    with pytest.raises(FormatError, match="this is a weight of q4_0, not of df11"):
        call(df11.FORMAT, WEIGHT)
