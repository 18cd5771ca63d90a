"""`qdsl test`: what it derives from a spec passes, and a planted mistake is reported where it is."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.analyze.check import check_kernels
from qdsl.analyze.check.cases import StorageCase, storage_cases
from qdsl.analyze.check.formats import Check, GoldenError, check_format, check_golden
from qdsl.checkpoint.files import safetensors
from qdsl.cli import app
from qdsl.compiler.emit.module.build import files_of
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.schema import load
from qdsl.runtime import Format
from tests.support.interpreter import INTERPRETED, _byte_perm

SPEC = """\
format: mine4
weight: [N, K]
fields:
  q: u4[n, k]
  s: f16[n, k // 32]
decode: (q - 8) * s
encode: absmax(code=q, scale=s, divisor=7)
storage:
  plain:
    codes:
      tensor: u8[n<N, j<K/2]
      record: q[n, 2*j] q[n, 2*j + 1]
    scales:
      tensor: f16[n<N, g<K/32]
      record: s[n, g]
  tiles:
    codes:
      tensor: u8[a<ceil(N/16), b<ceil(K/16), i<16, j<8]
      record: q[16*a + i, 16*b + 2*j] q[16*a + i, 16*b + 2*j + 1]
    scales:
      tensor: f16[n<N, g<K/32]
      record: s[n, g]
"""
CODED = """\
format: coded8
weight: [N, K]
fields:
  v: bf16[n, k]
decode: v
encode: nearest(code=v)
storage:
  coded:
    exponents:
      tensor: u8[n<N, k<K]
      record: v[n, k].at(7):8
      stream: window
    sign_mantissa:
      tensor: u8[n<N, k<K]
      record: v[n, k].lo:7 v[n, k].hi:1
    weight_shape:
      tensor: i64[word]
      record: N K
"""


def written(folder: Path, *edits: tuple[str, str]) -> tuple[Spec, Format]:
    """The spec above, and its generated module with texts replaced."""
    path = folder / "mine4.yaml"
    path.write_text(SPEC)
    text = files_of(path)["mine4.py"]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine4.py").write_text(text)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)    # of a text of the same size, written within the same second
    located = importlib.util.spec_from_file_location(f"edited_{abs(hash(text))}", folder / "mine4.py")
    assert located is not None and located.loader is not None
    module = importlib.util.module_from_spec(located)
    located.loader.exec_module(module)
    return load(path, "mine4.yaml"), module.FORMAT


def failures(checks: Iterable[Check]) -> dict[str, str]:
    """The texts of the checks that failed, by STORAGE NAME."""
    return {f"{check.storage} {check.name}": check.text for check in checks if check.status == "FAILED"}


def case_of(folder: Path, storage: str, *edits: tuple[str, str]) -> StorageCase:
    return next(case for case in storage_cases(*written(folder, *edits)) if case.storage == storage)


def write_golden(path: Path, format: Format, storage: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A golden file of random weights [16, 64]; its tensors and expected values."""
    packed = format.quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), storage=storage)
    tensors = {name: tensor.numpy() for name, tensor in packed.tensors.items()}
    expected = format.dequantize(packed, torch.float32).numpy()
    np.savez(path, expected=expected, storage=storage, **tensors)  # type: ignore[arg-type]
    return tensors, expected


def test_a_right_spec_passes(tmp_path: Path) -> None:
    checks = list(check_format(*written(tmp_path)))
    assert {check.status for check in checks} == {"ok"}
    assert {(check.storage, check.name) for check in checks} == {
        (storage, name) for storage in ("plain", "tiles", "planar") for name in ("bits", "round trip", "convert", "quantize")}


def test_blocks_that_lie_elsewhere(tmp_path: Path) -> None:
    """Tiles in another order, in unpack and in pack: they agree with each other, and only the bits say that both are wrong."""
    spec, format = written(tmp_path, ("    r = codes.permute(", "    r = codes.flip(1).permute("),
                           ('"codes": r.permute(0, 2, 1, 3)', '"codes": r.permute(0, 2, 1, 3).flip(1)'))
    problems = failures(check_format(spec, format))
    assert list(problems) == ["tiles bits"]
    assert problems["tiles bits"].startswith("unpack reads 4352 of 4896 field bits wrongly; ")
    assert problems["tiles bits"].endswith("first: bit 0 of q[0, 0], stored in bit 0 of codes[0, 0, 0, 0]; "
                                           "mine4.yaml:19: record: q[16*a + i, 16*b + 2*j] q[16*a + i, 16*b + 2*j + 1]")


def test_pack_that_writes_elsewhere(tmp_path: Path) -> None:
    problems = failures(check_format(*written(tmp_path, ("    q_split = q.unflatten(-1, (-1, 2))",
                                                         "    q_split = q.unflatten(-1, (-1, 2)).flip(-1)"))))
    assert problems["plain bits"].startswith("pack writes 512 of 576 field bits wrongly; ")
    assert problems["plain bits"].endswith("first: bit 0 of q[0, 0], stored in bit 0 of codes[0, 0]; "
                                           "mine4.yaml:12: record: q[n, 2*j] q[n, 2*j + 1]")
    assert re.fullmatch(r"\[1, 32\]: \d+ of 32 of 'q' differ; first q\[0, \d+\]: \d+ instead of \d+; mine4.yaml:12: .*",
                        problems["plain round trip"])


def test_padding_that_is_not_zero(tmp_path: Path) -> None:
    padding = "(torch.arange(16 * r.shape[0]) >= N).byte().view(-1, 16, 1, 1)"
    problems = failures(check_format(*written(tmp_path, ('"codes": r.permute(', f'"codes": (r | {padding}).permute('))))
    assert list(problems) == ["tiles bits"]
    assert problems["tiles bits"] == "pack sets 480 of the bits that are padding; first: bit 0 of codes[1, 0, 1, 0]"


def test_quantization_that_loses_all(tmp_path: Path) -> None:
    problems = failures(check_format(*written(tmp_path, ('{"divisor": 7, **options}', '{"divisor": 0.01, **options}'))))
    assert set(problems) == {"plain quantize", "tiles quantize", "planar quantize"}
    assert all(re.search(r"loses \d+% of its norm", text) for text in problems.values())


def test_a_quantizer_that_refuses_ordinary_weights(tmp_path: Path) -> None:
    """It fails and is not skipped; so does one that loses a sign."""
    for operation, message in ((" * 1e30", "the quantizer refuses a random weight of "),
                               (".clamp(min=0)", "all negative weights of a random weight of ")):
        checks = list(check_format(*written(tmp_path, ("absmax(weight,", f"absmax(weight{operation},"))))
        assert {check.status for check in checks if check.name == "quantize"} == {"FAILED"}
        assert all(check.text.startswith(message) for check in checks if check.name == "quantize")


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
def test_a_wrong_kernel(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    right, wrong = case_of(tmp_path, "tiles"), case_of(tmp_path / "wrong", "tiles", ("k // 2 % 8", "k // 2 % 4"))
    for check in (check_kernels.check_dequantize, check_kernels.check_linear):
        assert check(right)[0] == ""
        assert re.search(r"\d+ of \d+ weights differ; first \[0, \d+\]: \S+ instead of \S+; q\[0, \d+\] = \d+, s\[0, 0\] = \S+; "
                         r"mine4.yaml:6: decode: \(q - 8\) \* s$", check(wrong)[0])


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
def test_a_wrong_kernel_for_matrix_units(tmp_path: Path) -> None:
    problem, _ = check_kernels.check_linear(case_of(tmp_path, "planar", ("sum += (-8.0 - BASE)", "sum += (-7.0 - BASE)")))
    assert re.match(r"\[16, 512\], skinny of x float16 \[1, 512\]: \d+ of 16 sums are wrong; first \[0, 0\]: ", problem)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_golden_values(tmp_path: Path, suffix: str) -> None:
    spec, format = written(tmp_path)
    path = tmp_path / "golden.npz"
    tensors, expected = write_golden(path, format, "tiles")
    assert check_golden(spec, format, path).text == "1024 weights are those of golden.npz"
    expected[3, 40] += 0.5
    if suffix == ".npz":
        np.savez(path, expected=expected, **tensors)  # type: ignore[arg-type]
    else:
        path = tmp_path / "golden.safetensors"
        safetensors.write(path, {name: torch.from_numpy(array) for name, array in {"expected": expected, **tensors}.items()},
                          {"storage": "tiles"})
    outcome = check_golden(spec, format, path)
    assert outcome.status == "FAILED" and outcome.storage == "tiles"
    assert re.fullmatch(r"1 of 1024 weights differ; first \[3, 40\]: \S+ instead of \S+; q\[3, 40\] = \d+, s\[3, 1\] = \S+; "
                        r"mine4.yaml:6: decode: \(q - 8\) \* s", outcome.text)


def test_golden_of_a_wrong_formula(tmp_path: Path) -> None:
    write_golden(tmp_path / "golden.npz", written(tmp_path)[1], "plain")
    spec, format = written(tmp_path, ("as_float(q - 8, out)", "as_float(q - 7, out)"))
    assert check_golden(spec, format, tmp_path / "golden.npz").text.startswith("1024 of 1024 weights differ; first [0, 0]: ")


def test_golden_files_that_are_none(tmp_path: Path) -> None:
    spec, format = written(tmp_path)
    path = tmp_path / "golden.npz"
    np.savez(path, codes=np.zeros((1, 16), np.uint8))
    with pytest.raises(GoldenError, match="no array 'expected'"):
        check_golden(spec, format, path)
    np.savez(path, codes=np.zeros((1, 15), np.uint8), scales=np.zeros((1, 1), np.float16), expected=np.zeros((1, 32), np.float32))
    assert check_golden(spec, format, path).status == "FAILED"
    path.write_bytes(b"no zip")
    with pytest.raises(GoldenError):
        check_golden(spec, format, path)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an entropy code: kernels run in a process of their own, and a wrong value gives exit code 1."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("coded8.yaml").write_text(CODED)
    format = qdsl.load("coded8.yaml").FORMAT
    tensors, expected = write_golden(Path("golden.npz"), format, "coded")
    shown = CliRunner().invoke(app, ["test", "coded8.yaml", "--golden", "golden.npz", "--json"], catch_exceptions=False)
    report = json.loads(shown.stdout)
    assert shown.exit_code == 0 and report["ok"]
    assert [check["name"] for check in report["checks"]] == ["golden", "bits", "round trip", "quantize", "dequantize kernel",
                                                             "linear kernel"]
    expected[0, 0] = 9
    np.savez("golden.npz", expected=expected, **tensors)  # type: ignore[arg-type]
    monkeypatch.setattr(check_kernels, "check_kernels", lambda spec: ())
    shown = CliRunner().invoke(app, ["test", "coded8.yaml", "--golden", "golden.npz"], catch_exceptions=False)
    assert shown.exit_code == 1
    assert shown.stdout.startswith("FAILED   coded8.coded  golden: 1 of 1024 weights differ; first [0, 0]: ")
    assert shown.stdout.endswith("4 checks: 1 failed, 0 skipped\n")
    assert CliRunner().invoke(app, ["test", "coded8.yaml", "--golden", "coded8.yaml"]).exit_code == 2


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_kernels, "is_installed", False)
    assert [check.text for check in check_kernels.check_kernels("any")] == ["Triton is not installed, so no kernel was run"]


def test_byte_permutations() -> None:
    """Against the numpy version of tests/support/interpreter.py, on torch tensors."""
    generator = torch.Generator().manual_seed(0)
    first, second, selectors = torch.randint(-1 << 31, 1 << 31, (3, 64), generator=generator).int()
    monkey = SimpleNamespace(where=torch.where, tensor=torch.Tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_kernels, "tl", monkey)
        got = check_kernels.byte_perm(first, second, selectors)
    assert np.array_equal(got.numpy(), _byte_perm(first.numpy(), second.numpy(), selectors.numpy()))
