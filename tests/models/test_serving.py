"""`qdsl serve-check`: which layers of a checkpoint can be divided among ranks, from headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.report.serving import Row, check_layers
from qdsl.checkpoint.report.shards import packed_layers, plain_layers
from qdsl.cli import app
from qdsl.generated import fp8_channel, hlane, int_group, nf4_nested, q4_k, q8_0
from qdsl.runtime import PackedWeight
from tests.support import checkpoints
from tests.support.paths import ROOT
from tests.support.producer_folders import write_own

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2}
DF11 = ROOT / "tests" / "data" / "df11" / "compress_model_dir"
BLOCK = "model.layers.0."


def random(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)).bfloat16()


def act_order(n: int, k: int) -> PackedWeight:
    packed = int_group.quantize(random(n, k), "gptq_v2", group=128)
    index = (torch.arange(k) // 128).to(torch.int32)[torch.randperm(k, generator=torch.Generator().manual_seed(0))]
    return int_group.pack({**int_group.unpack(packed), "g": index}, "gptq_v2", **packed.params)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of every kind, with columns in act-order and a layer of blocks that 8 ranks cannot divide."""
    return write_own(tmp_path_factory.mktemp("models") / "model", {
        f"{BLOCK}self_attn.q_proj": fp8_channel.quantize(random(512, 512)),
        f"{BLOCK}self_attn.k_proj": q8_0.quantize(random(128, 512)),
        f"{BLOCK}self_attn.o_proj": act_order(512, 1024),
        f"{BLOCK}mlp.down_proj": q4_k.quantize(random(64, 1536)),
        f"{BLOCK}mlp.up_proj": hlane.quantize(random(64, 512)),
        f"{BLOCK}attn.qkv_proj": q8_0.quantize(random(768, 512)),
        f"{BLOCK}mlp.gate_up_proj": q8_0.quantize(random(128, 512)),
        f"{BLOCK}mlp.experts.0.down_proj": q4_k.quantize(random(64, 256)),
        f"{BLOCK}mlp.gate": q8_0.quantize(random(8, 512)),
        "lm_head": q8_0.quantize(random(100, 512)),
    }, {f"{BLOCK}mlp.other.weight": random(3, 5), "norm.weight": torch.ones(4)}, CONFIG)


def check(path: Path, ranks: int, whole_experts: bool = False) -> dict[str, Row]:
    with Folder(path) as folder:
        return {row.layer.removeprefix(BLOCK): row for row in check_layers(folder, ranks, whole_experts)}


def test_kinds_and_ways(model: Path) -> None:
    rows = check(model, 2)
    assert {name: (row.kind, row.packed, row.how, row.problem) for name, row in rows.items()} == {
        "self_attn.q_proj": ("q", "fp8_channel.safetensors", "cut", ""),
        "self_attn.k_proj": ("kv", "q8_0.gguf", "cut", ""),
        "self_attn.o_proj": ("row", "int_group.gptq_v2", "packed again, with all groups", ""),
        "mlp.down_proj": ("row", "q4_k.gguf", "cut", ""),
        "mlp.up_proj": ("column", "hlane.hlane", "cut", ""),
        "attn.qkv_proj": ("qkv", "q8_0.gguf", "cut", ""),
        "mlp.gate_up_proj": ("merged", "q8_0.gguf", "cut", ""),
        "mlp.experts.0.down_proj": ("row", "q4_k.gguf", "cut; 128 columns more than its own", ""),
        "mlp.gate": ("replicated", "q8_0.gguf", "whole", ""),
        "lm_head": ("vocabulary", "q8_0.gguf", "cut", ""),
    }
    assert set(check(model, 1)) == set(rows) and all(row.how in ("whole", "cut") for row in check(model, 1).values())


def test_what_8_ranks_cannot_have(model: Path) -> None:
    rows, whole_experts = check(model, 8), check(model, 8, whole_experts=True)
    assert [name for name, row in rows.items() if row.problem] == ["mlp.experts.0.down_proj"]
    assert rows["mlp.experts.0.down_proj"].problem == (
        f"'{BLOCK}mlp.experts.0.down_proj': '{BLOCK}mlp.experts.0.down_proj', q4_k.gguf [64, 256], cannot be divided among 8 "
        "ranks along K: columns 0 to 32 lie in blocks of 256; it can be divided among 4; or quantize the layer in smaller blocks")
    assert rows["mlp.up_proj"].how == "decoded and encoded again"    # 8 rows of a code whose groups have 32
    assert rows["mlp.down_proj"].how == "cut; 64 columns more than its own; cut; 320 columns more than its own"
    assert whole_experts["mlp.experts.0.down_proj"] == Row(f"{BLOCK}mlp.experts.0.down_proj", "expert", "q4_k.gguf", (64, 256),
                                                           "whole")


def test_command(model: Path, tmp_path: Path) -> None:
    """A table or JSON; exit code 1 where a layer cannot be divided, and for a folder without packed layers."""
    result = CliRunner().invoke(app, ["serve-check", str(model), "--tp", "2"])
    assert result.exit_code == 0 and "cut; 128 columns more" in result.output
    result = CliRunner().invoke(app, ["serve-check", str(model), "--tp", "8"])
    assert result.exit_code == 1 and "1 of 10 layers cannot be served on 8 ranks" in result.output
    assert CliRunner().invoke(app, ["serve-check", str(model), "--tp", "8", "--ep"]).exit_code == 0
    result = CliRunner().invoke(app, ["serve-check", str(model), "--tp", "8", "--json"])
    content: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 1 and (content["schema"], content["ranks"], len(content["layers"])) == (1, 8, 10)
    by_name = {layer["layer"]: layer for layer in content["layers"]}
    assert by_name[f"{BLOCK}self_attn.q_proj"] == {
        "layer": f"{BLOCK}self_attn.q_proj", "kind": "q", "packed": "fp8_channel.safetensors", "shape": [512, 512], "how": "cut",
        "problem": ""}
    plain = checkpoints.folder(tmp_path, {"up": {"weight": torch.ones(2, 2)}}, {})
    result = CliRunner().invoke(app, ["serve-check", str(plain), "--tp", "2"])
    assert result.exit_code == 1 and "has no packed layers" in result.output


def test_without_torch(model: Path) -> None:
    code = ("import sys; sys.modules['torch'] = sys.modules['numpy'] = None; sys.argv[:1] = ['', 'serve-check', '--tp', '2']; "
            "from qdsl.cli import main; main()")
    result = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_layers_that_no_engine_serves(tmp_path: Path) -> None:
    """Groups of weights, a nested scale of more columns than a row has, and what is not recognised."""
    with Folder(DF11) as folder:
        assert packed_layers(folder) == {}
    rows = check(DF11, 8)
    assert {(row.kind, row.packed, row.how, row.problem) for row in rows.values()} == {
        ("group", "df11", "decoded and encoded again", "")}
    nested = nf4_nested.quantize(random(512, 128))
    path = write_own(tmp_path / "others", {"a.o_proj": nested, "a.up_proj": nested}, {}, CONFIG)
    assert {row.layer: row.how for row in check(path, 4).values()} == {"a.o_proj": "cut; 96 columns more than its own",
                                                                       "a.up_proj": "cut"}
    assert "columns 0 to 16 lie in blocks of 128" in check(path, 8)["a.o_proj"].problem
    broken = checkpoints.folder(tmp_path, {"up": {"weight_packed": torch.zeros(3, 3, dtype=torch.uint8)}}, CONFIG)
    assert "'up' is not recognised: " in check(broken, 1)["up"].problem


def test_plain_matrices_are_layers_too(model: Path) -> None:
    with Folder(model) as folder:
        layer, = plain_layers(folder).values()
    assert (layer.name, layer.format, layer.shape, dict(layer.tensors)) == (
        f"{BLOCK}mlp.other", "bf16", (3, 5), {"weight": f"{BLOCK}mlp.other.weight"})
