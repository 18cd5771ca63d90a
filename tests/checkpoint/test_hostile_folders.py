"""Folders with up to 2 MB of JSON, chosen to take long: inspected or refused in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdsl.checkpoint.detect.ignored import COST, expression
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.files.safetensors import CheckpointError
from tests.support import hostile_folders
from tests.support.paths import ROOT

TIMES, MEMORY = 30, 200 << 10                                    # CPU time of `qdsl --version`, about 0.13 s; KB
CHOSEN = hostile_folders.CONFIGS if os.environ.get("QDSL_TEST_ALL") else ("polynomial", "groups for all", "many expressions")
# A process of little memory counts that of another, which begins as a copy of it.
MEASURE = """import json, resource, subprocess, sys
times = [0.0]
for words in (["--version"], sys.argv[1:]):
    run = subprocess.run([sys.executable, "-m", "qdsl", *words], capture_output=True, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    times.append(used.ru_utime + used.ru_stime - times[-1])
report = json.loads(run.stdout)
print(json.dumps([run.returncode, report.get("error", ""), run.stderr, times[2] / times[1], used.ru_maxrss]))"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process, as Linux counts it")
@pytest.mark.parametrize("attack", CHOSEN)
def test_a_hostile_folder_takes_little(attack: str, tmp_path: Path) -> None:
    path = hostile_folders.folder(tmp_path / "in", attack)
    run = subprocess.run([sys.executable, "-c", MEASURE, "inspect", str(path), "--json"], capture_output=True, check=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    code, message, errors, times, memory = json.loads(run.stdout)
    assert times < TIMES and memory < MEMORY
    assert not errors and ((code == 0 and not message) or (code == 1 and message and "\n" not in message))


def test_an_expression_costs_more_on_longer_names() -> None:
    """It is used on names that are as long as real ones, and refused on those that make it slow."""
    slow = expression("[^x]*[^x]*[^x]*[^x]*b")
    assert not slow.match("a" * 40) and slow.cost(40) < COST < slow.cost(1024)
    with pytest.raises(CheckpointError, match="may take too long"):
        slow.match("a" * 1024)
    assert expression(r".*\.layers\.\d+\..*\.(gate|up)_proj.*").match("model.layers.3.mlp.experts.107.gate_proj")
    assert expression("a+b").match("aab", whole=True) and not expression("a+b").match("aabb", whole=True)


def test_real_configs_stay_within_their_time() -> None:
    """A mixture of experts of 46,000 layers, and rules such as those of real checkpoints."""
    ignore = ["lm_head", "re:.*self_attn.*", r"re:.*\.shared\.(gate|up|gate_up|down)_proj.*", "re:.*norm.*", "re:visual.*"]
    parsed = quantization({"quant_method": "compressed-tensors", "config_groups": {"w": {"weights": {"num_bits": 4}}},
                           "ignore": ignore}, "config.json", "")
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{leaf}" for layer in range(60) for expert in range(256)
             for leaf in ("up_proj", "gate_proj", "down_proj")]
    assert all(parsed.scheme(name).settings is not None for name in names)
    assert parsed.scheme("model.layers.3.self_attn.q_proj").settings is None
