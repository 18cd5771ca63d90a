"""Commands that write checkpoints, and small inputs for them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from typer.testing import CliRunner, Result

from qdsl.cli import app
from qdsl.jobs.gguf.mixes import Model
from tests.support import folders
from tests.support.models import ToyModel, written

DENSE = ToyModel(Model("llama", 2, 4, 2), 256, 512)
SEED = int(os.environ.get("QDSL_TEST_SEED", "0"))                # of what tests draw: another one tries other places
CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def succeed(*arguments: str | Path) -> None:
    result = command(*arguments)
    assert result.exit_code == 0, result.output


def checkpoint(path: Path) -> Path:
    """A folder of two files with bfloat16 matrices, and a tokenizer."""
    def drawn(seed: int) -> torch.Tensor:
        return (torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) / 50).to(torch.bfloat16)

    folders.folder(path, {"model.layers.0.up.weight": drawn(0), "model.layers.0.down.weight": drawn(1)},
                   {"model.layers.0.out.weight": drawn(2), "norm.weight": torch.ones(3)}, config=CONFIG)
    (path / "pytorch_model.bin").unlink()
    return path


def job_inputs(path: Path) -> Path:
    """A folder with what the jobs read: 'plain', and 'fp8' and 'hlane' made of it, and 'in.gguf'."""
    checkpoint(path / "plain")
    succeed("quantize", path / "plain", "-f", "fp8_block", "-o", path / "fp8", "-j", "1")
    succeed("compress", path / "plain", "-f", "hlane", "-o", path / "hlane", "-j", "1")
    written(path / "in.gguf", DENSE)
    return path


# Arguments of each job; {} is the folder of inputs.  merge-index follows a part that was written before.
JOBS = {
    "convert": ("convert {}/fp8 --requantize q8_0 -j 1", "out"),
    "requantize": ("convert {}/fp8 --requantize nf4 -j 1", "out"),
    "compress": ("compress {}/plain -f hlane -j 1", "out"),
    "decompress": ("decompress {}/hlane -j 1", "out"),
    "quantize": ("quantize {}/in.gguf -t q8_0 -j 1", "out.gguf"),
    "quantize folder": ("quantize {}/plain -f fp8_block -j 1", "out"),
    "dequantize": ("dequantize {}/in.gguf", "out.safetensors"),
    "merge-index": ("quantize {}/plain -f fp8_block -j 1 --shard 1/1", "out"),
}


# Arguments of commands that only read.
CHECKS = {
    "inspect": ("inspect {}/fp8 --check", ""),
    "inspect gguf": ("inspect {}/in.gguf --check", ""),
    "verify": ("verify {}/plain {}/plain -j 1", ""),
    "verify decoded": ("verify {}/fp8 {}/fp8 --decoded -j 1", ""),
}


def drawn(test: str) -> random.Random:
    """Random choices of a test, by its name and $QDSL_TEST_SEED."""
    return random.Random(f"{test} {SEED}")


def files(path: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones and names of empty folders among them."""
    return {str(file.relative_to(path)): file.read_bytes() if file.is_file() else b"" for file in sorted(path.rglob("*"))}
