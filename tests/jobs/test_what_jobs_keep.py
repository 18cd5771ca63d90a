"""Jobs that rewrite folders keep what is not theirs, name what they drop, and refuse what changes the model or is missing.

Over every key of config.json, side files of all kinds, and every parameter of a small model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from tests.support import language_models, producer_folders

pytest.importorskip("transformers")
# Keys that transformers, other programs or people add to a config.json; of every kind of JSON.
KEYS: dict[str, Any] = {
    "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "custom": {"a": [1, 2.5, None, {"b": True}]}, "absent": None,
    "empty": {}, "words": "ü\u2028", "small": 1e-06, "large": 12345678901234567890, "transformers_version": "4.1.0",
    "torch_dtype": "bfloat16", "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "_name_or_path": "/x",
    "task_specific_params": {"x": 1}, "compression_config": None, "quantization": None, "sliding_window": 7,
    "attn_implementation": "eager"}
KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "tokenizer.model", "merges.txt", "README.md", "LICENSE", "modeling_x.py", "deep/er/file.txt",
        "preprocessor_config.json", "recipe.yaml", "imatrix.dat", "params.json")
DROPPED = ("adapter_config.json", "adapter/adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "x.gguf",
           "onnx/model.onnx", ".env")
OURS = {"quantization_config", "transformers_weights"}
PACKED = ("fp8 block", "compressed-tensors int8", "modelopt fp8", "awq", "bitsandbytes nf4", "hqq")
JOBS = {"convert": ["convert", "--requantize", "q8_0"], "dequantize": ["dequantize", "--dtype", "bf16"],
        "quantize": ["quantize", "--format", "fp8_channel"], "compress": ["compress", "--format", "hlane"]}
# What the settings of some producers say of x, which the new weights do not.
ABOUT_X = {"fp8 block": "activation_scheme", "compressed-tensors int8": "input_activations",
        "bitsandbytes nf4": "llm_int8_threshold", "modelopt fp8": "scale inputs of the old weights"}


def run(job: str, path: Path, out: Path, *more: str) -> Result:
    name, *options = JOBS[job]
    return CliRunner().invoke(app, [name, str(path), *options, "--out", str(out), "--jobs", "1", *more])


def folder(path: Path, kind: str, job: str) -> Path:
    """A packed folder for jobs on packed ones; for the others a plain one."""
    if job in ("convert", "dequantize"):
        producer_folders.write_folder(path, kind, "qwen3")
    else:
        language_models.write_plain(path, "qwen3")
    return path


@pytest.mark.parametrize(("kind", "job"), [*((kind, job) for kind in PACKED for job in ("convert", "dequantize")),
                                           ("", "quantize"), ("", "compress")])
def test_keys_and_files_that_are_not_the_jobs_own(kind: str, job: str, tmp_path: Path) -> None:
    path, out = folder(tmp_path / "in", kind, job), tmp_path / "out"
    config = json.loads((path / "config.json").read_text()) | KEYS
    (path / "config.json").write_text(json.dumps(config))
    for name in (*KEPT, *DROPPED):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"of": name}))
    write(path / "adapter_model.safetensors", {"base_model.model.up.lora_A.weight": torch.zeros(2, 2, dtype=torch.float32)})
    done = run(job, path, out)
    assert done.exit_code == 0, done.output
    new = json.loads((out / "config.json").read_text())
    assert {key: new.get(key, "lost") for key in config.keys() - OURS} == {key: config[key] for key in config.keys() - OURS}
    assert new.keys() - config.keys() <= OURS
    assert all((out / name).read_bytes() == (path / name).read_bytes() for name in KEPT)
    assert not any((out / name).exists() for name in DROPPED) and all(f"{name} " in done.output for name in DROPPED)
    assert ABOUT_X.get(kind, "") in done.output and done.output.count("adapter_model.safetensors holds") == 1
    assert job != "dequantize" or "and were copied" not in done.output


def without(source: Path, path: Path, names: Collection[str]) -> Path:
    """A copy of a folder whose file lacks these tensors."""
    shutil.copytree(source, path)
    with Folder(source) as read:
        kept = {name: read.tensor(name) for name in read.names() if name not in names}
        write(path / "model.safetensors", kept, {"format": "pt"})
    return path


def parameters() -> list[str]:
    """One parameter of each kind: the last block's, and those outside of blocks."""
    return [name for name in language_models.weights("qwen3") if ".layers.0." not in name]


@pytest.mark.parametrize("job", JOBS)
def test_a_parameter_that_the_folder_lacks(job: str, tmp_path: Path) -> None:
    """Is refused by its name, or stated where the job restores its input later; nobody can load such a folder."""
    source = folder(tmp_path / "in", "gptq v1", job)
    with Folder(source) as read:
        layers = {layer.name: [*layer.tensors.values(), *layer.settings, *layer.others.values()]
                  for layer in detected_layers(read).layers}
    names = parameters() if job == "convert" else ["model.norm.weight", "lm_head.weight"]
    for number, name in enumerate(names):
        path, out = tmp_path / str(number), tmp_path / f"out {number}"
        without(source, path, layers.get(name.removesuffix(".weight"), [name]))
        done = run(job, path, out)
        sentence = f"tensor {name} is absent, and Qwen3ForCausalLM has it: loading the folder is refused"
        assert sentence in done.output, done.output
        assert done.exit_code == (0 if job == "compress" else 1) and out.exists() == (job == "compress")
        if number == 0 and job != "compress":
            allowed = run(job, path, out, "--allow-unknown")
            assert allowed.exit_code == 0 and sentence in allowed.output


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", ["base_model.model.model.layers.0.up.lora_{}.weight", "unet.up.lora.{}.weight",
                                  "lora_unet_up.lora_{}.weight"])
def test_an_adapter_alone_is_no_model(job: str, name: str, tmp_path: Path) -> None:
    """As PEFT, diffusers and Kohya name its tensors."""
    path = tmp_path / "in"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    write(path / "adapter_model.safetensors", {name.format(end): torch.ones(32, 32, dtype=torch.bfloat16) for end in ("A", "B")})
    done = run(job, path, tmp_path / "out")
    assert done.exit_code == 1 and not (tmp_path / "out").exists()
    assert job not in ("quantize", "compress") or "a LoRA adapter and no model" in done.output


@pytest.mark.parametrize("model", ["tied", "moe", "gpt_oss"])
def test_no_parameter_is_missing_that_another_holds(model: str, tmp_path: Path) -> None:
    """A head that is its embedding, and experts in one parameter, stored one by one or stacked."""
    from qdsl.models.shapes import class_findings

    producer_folders.write_folder(tmp_path / "in", "mxfp4" if model == "gpt_oss" else "fp8 block", model)
    with Folder(tmp_path / "in") as read:
        assert class_findings(read, detected_layers(read))[0] == []


@pytest.mark.parametrize(("kind", "job"), [(kind, ("convert", "dequantize")[place % 2]) for place, kind in enumerate(PACKED)])
def test_settings_that_act_are_refused_by_each_job(kind: str, job: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", kind, job)
    file = path / ("hf_quant_config.json" if (path / "hf_quant_config.json").exists() else "config.json")
    whole = json.loads(file.read_text())
    whole["quantization" if file.name != "config.json" else "quantization_config"]["mystery_rotation"] = {"size": 32}
    file.write_text(json.dumps(whole))
    done = run(job, path, tmp_path / "out")
    assert done.exit_code == 1 and "mystery_rotation" in done.output and not (tmp_path / "out").exists()
    assert run(job, path, tmp_path / "out", "--allow-unknown").exit_code == 0
