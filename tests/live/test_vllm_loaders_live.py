"""vLLM's own loaders, without the plug-in, over folders that `qdsl quantize` writes: `make live-vllm-all`.

tests/data/compatibility.yaml lists the formats, and what vLLM says of those for which its build for CPUs has no kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.cli.options import read_param
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from tests.support import language_models
from tests.support.compatibility import pairs
from tests.support.paths import ROOT
from tests.support.producer_folders import write_files
from tests.support.vllm_engine import MARK

pytestmark = pytest.mark.filterwarnings("default")
CASES = {pair.case: pair for pair in pairs() if pair.test.endswith("::test_own_loaders")}
# What its error matches, by the reason of a refusal.
ERRORS = {"no kernel for CPUs": "Failed to find a kernel|MarlinNvFp4LinearKernel is not supported|Marlin does not support",
          "knows no such quant_method": "Unknown quantization method", "needs torchao": "install torchao",
          "knows no such quant_algo": "ModelOpt currently only supports", "knows no such num_bits": "Only num_bits in",
          "knows no such bits": "Unsupported quantization config", "knows no such version": "exceeds dimension size",
          "knows no such zero points": "Unsupported quantization config"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the engine answers for the folder of each case, and for its decoded weights."""
    root = tmp_path_factory.mktemp("own")
    plain = language_models.write_plain(root / "plain", "qwen3")
    jobs = []
    for number, (case, pair) in enumerate(CASES.items()):
        to, *params = case.split()
        folder, decoded = root / str(number), {name: tensor.float() for name, tensor in language_models.weights("qwen3").items()}
        report = run.quantize(plain, parse_conversion(to, True, dict(map(read_param, params)), ()), folder)
        assert ("vLLM" in report["readers"][""]) == ("knows no such" not in pair.result), case
        jobs.append({"model": str(folder), "dtype": "bfloat16"})
        if pair.kind == "tolerance":
            with Folder(folder) as file:
                for layer in layers(file).layers:
                    [weight] = weights(file, layer)
                    decoded[f"{layer.name}.weight"] = weight.format.dequantize(weight, torch.float32)
            write_files(root / f"{number} decoded", decoded, {"config.json": language_models.config_json("qwen3")}, "qwen3")
            jobs.append({"model": str(root / f"{number} decoded"), "dtype": "bfloat16"})
    result = subprocess.run([sys.executable, "-m", "tests.support.vllm_engine"], cwd=ROOT, text=True, capture_output=True,
                            input="\n".join(map(json.dumps, jobs)), check=False, env={**os.environ, "VLLM_PLUGINS": ""})
    lines = iter([json.loads(line.partition(MARK)[2]) for line in result.stdout.splitlines() if MARK in line])
    return {case: [next(lines) for _ in range(1 + (pair.kind == "tolerance"))] for case, pair in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_own_loaders(case: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    """Log probabilities are as near those of the decoded weights as the pair says, or the error is the one that it says."""
    answer, *reference = answers[case]
    head, _, reason = CASES[case].result.partition(": ")
    if CASES[case].kind == "refused":
        assert re.search(ERRORS[reason], answer["error"])
    else:
        [decoded] = reference
        assert "error" not in answer, answer
        difference = max(abs(a - b) for a, b in zip(answer["logprobs"], decoded["logprobs"], strict=True))
        assert difference < float(head.removeprefix("tolerance ")), case
        assert answer["tokens"] == decoded["tokens"]
