"""Digits of the column in decode, and powers of two of integers: reference and kernels against numpy's arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.derive_planar import why_no_planar
from qdsl.compiler.spec.schema import load
from qdsl.compiler.spec.source import SpecError
from tests.kernels.test_kernels import DEVICE, dequantized
from tests.support.formats import same_bits

HEAD = "format: {name}\nweight: [N, K]\n"
CODES = """\
storage:
  plain:
    codes: {{tensor: "u8[n<N, j<K/2]", record: "q[n, 2*j] q[n, 2*j + 1]"}}
    scales: {{tensor: "f16[n<N, g<{groups}]", record: "s[n, g]"}}
"""
# Codes of single weights; digits of several steps, beside blocks that they divide and ahead of them.
PLAIN = HEAD + 'fields: {{q: "u4[n, k]", s: "f16[n, k // {size}]"}}\ndecode: {decode}\n' + CODES
# A word for every second column of eight, whose windows of bits overlap: as a trellis reads them.
WINDOWS = HEAD + """\
tables:
  level: [-7, -4, -2, -1, 1, 2, 4, 7]
fields: {{words: "u9[n, k // 16, 4]", s: "f16[n, k // 16]"}}
decode: s * level[words[n, k // 16, k % 2 + 2 * (k // 8 % 2)] // 2**(2 * (k // 2 % 4)) % 8]
storage:
  plain:
    stored: {{tensor: "u8[n<N, g<K/16, word]", record: "i<4: words[n, g, i] pad:7"}}
    scales: {{tensor: "f16[n<N, g<K/16]", record: "s[n, g]"}}
"""
LEVELS = np.array([-7, -4, -2, -1, 1, 2, 4, 7], np.float32)
N, K = 5, 192
k = np.arange(K)


def built(folder: Path, text: str, name: str) -> object:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return qdsl.load(path)


@pytest.mark.parametrize(("size", "decode", "of"), [
    (32, "(q + 2**(k % 4)) * s", lambda q: q + 2 ** (k % 4)),
    (32, "(q // 2**(k % 2) % 4 - k // 2 % 3) * s", lambda q: q // 2 ** (k % 2) % 4 - k // 2 % 3),
    (64, "(q * 2**(k // 16 % 2) - 8) * s * (1 + k % 2)", lambda q: q * 2 ** (k // 16 % 2) - 8),
])
def test_codes_of_single_weights(tmp_path: Path, size: int, decode: str, of: object) -> None:
    if "% 3" in decode:                                          # a run of six columns is no part of a block of 32
        with pytest.raises(SpecError, match="digits of columns that begin again every 6"):
            built(tmp_path, PLAIN.format(name="digits", decode=decode, size=size, groups=f"K/{size}"), "digits")
        size = 48
    module = built(tmp_path, PLAIN.format(name="digits", decode=decode, size=size, groups=f"K/{size}"), "digits")
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    s = torch.randn(N, K // size, generator=generator).half()
    packed = module.pack({"q": q, "s": s})                       # type: ignore[attr-defined]
    codes, scales = of(q.numpy().astype(np.int64)).astype(np.float32), s.float().repeat_interleave(size, 1).numpy()  # type: ignore
    wanted = torch.from_numpy(codes * scales * ((1 + k % 2).astype(np.float32) if "(1 + k % 2)" in decode else np.float32(1)))
    assert same_bits(module.dequantize(packed, torch.float32), wanted)       # type: ignore[attr-defined]
    assert same_bits(dequantized(packed.to(DEVICE)).cpu(), wanted)


def test_windows_of_bits_that_overlap(tmp_path: Path) -> None:
    module = built(tmp_path, WINDOWS.format(name="windows"), "windows")
    generator = torch.Generator().manual_seed(2)
    w = torch.randint(0, 512, (N, K // 16, 4), generator=generator, dtype=torch.int32)
    s = torch.randn(N, K // 16, generator=generator).half()
    packed = module.pack({"words": w, "s": s})                       # type: ignore[attr-defined]
    words = w.numpy()[:, k // 16, k % 2 + 2 * (k // 8 % 2)]
    wanted = torch.from_numpy(s.float().numpy()[:, k // 16] * LEVELS[words // 2 ** (2 * (k // 2 % 4)) % 8])
    assert same_bits(module.dequantize(packed, torch.float32), wanted)       # type: ignore[attr-defined]
    assert same_bits(dequantized(packed.to(DEVICE)).cpu(), wanted)
    assert same_bits(module.unpack(packed)["words"], w)              # type: ignore[attr-defined]
    cut = packed.cut("K", 64, 128)
    assert same_bits(cut.format.dequantize(cut, torch.float32), wanted[:, 64:128])


def test_columns_that_are_no_whole_runs_are_refused(tmp_path: Path) -> None:
    text = PLAIN.format(name="digits", decode="(q + k % 4) * s", size=32, groups="ceil(K/32)")
    with pytest.raises(SpecError, match="digits of columns that begin again every 4, where rows are no whole runs of them"):
        built(tmp_path, text, "digits")


def test_why_there_is_no_planar_storage(tmp_path: Path) -> None:
    """A code for every weight would be a part of the field, and not find it again."""
    text = (HEAD + 'fields: {{q: "u4[n, k // 4]", s: "f16[n, k // 32]"}}\ndecode: (q // 2**(k % 4) % 2) * s\n'
            'storage:\n  plain:\n    codes: {{tensor: "u8[n<N, j<K/8]", record: "q[n, 2*j] q[n, 2*j + 1]"}}\n'
            '    scales: {{tensor: "f16[n<N, g<K/32]", record: "s[n, g]"}}\n').format(name="digits")
    (tmp_path / "digits.yaml").write_text(text)
    programs = compile_spec(load(tmp_path / "digits.yaml"))
    assert why_no_planar(programs) == "decode reads digits of the column, which a code per weight does not know"
