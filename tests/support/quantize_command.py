"""`qdsl quantize` in the process of a test: its result, its report, its refusal; and tensors to quantize."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from qdsl.cli import app


def quantize(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)], catch_exceptions=False)


def report(*arguments: str | Path) -> dict[str, Any]:
    result = quantize(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str | Path, code: int = 1) -> str:
    """The message; and nothing is written."""
    before = sorted(os.listdir())
    result = quantize(*arguments, "--out", "refused.gguf")
    assert result.exit_code == code and sorted(os.listdir()) == before
    return result.stderr


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)
