"""`round` in decode: weights that MLX and optimum-quanto compute in float16 and bfloat16, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from qdsl.compiler.load import load
from qdsl.runtime.weight.arrays import rounded
from tests.formats.test_goldens import check, disk, read
from tests.support.formats import ROOT

FILES = sorted((ROOT / "tests" / "data" / "rounding").glob("*.npz"))
DECODE = {"mlx": ("q * s + b", "round(round(q * s, scale_type) + b, scale_type)"),
          "quanto": ("q * s - z", "round(round(q * s, scale_type) - z, scale_type)")}


@pytest.fixture(scope="module", params=sorted(DECODE))
def rounding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModuleType]:
    """A shipped format with the decode of its package: each step in the type of the scales."""
    old, new = DECODE[request.param]
    text = (ROOT / "specs" / f"{request.param}.yaml").read_text().replace(f"decode: {old}", f"decode: {new}")
    assert new in text
    path: Path = tmp_path_factory.mktemp("specs") / f"{request.param}_rounded.yaml"
    path.write_text(text.replace(f"format: {request.param}", f"format: {request.param}_rounded"))
    return request.param, load(path)


def test_packages_weights(rounding: tuple[str, ModuleType]) -> None:
    name, module = rounding
    paths = [path for path in FILES if path.name.startswith(name)]
    assert len(paths) == 2
    for path in paths:
        tensors = read(path)
        with np.load(path) as file:
            params = json.loads(str(file["meta"]))["params"]
        weight = tensors["dequant"]
        packed = module.wrap(disk(tensors), shape=tuple(weight.shape), **params)
        check(module, packed, weight.float())
        assert torch.equal(module.dequantize(packed, weight.dtype), weight)
        assert module.FORMAT.variant(packed.params).storages.keys() == {name}      # no planar storage: it does not round


def test_ties_and_the_ends_of_types() -> None:
    values = torch.tensor([1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, -1 - 2.0 ** -11, 65519.9, 65520.0, 2.0 ** -25, 1e-45, -0.0])
    assert rounded(values, torch.bfloat16).tolist() == [1, 1 + 2.0 ** -6, -1, 65536, 65536, 2.0 ** -25, 0, 0]
    assert rounded(values, torch.float16).tolist() == [1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, -1, 65504, float("inf"), 0, 0, 0]
