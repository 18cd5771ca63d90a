"""vLLM's engine over packed checkpoints, on a CPU: prompts are as likely as for the decoded model.

`make live-vllm` runs one test of each part, `make live-vllm-all` all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.checkpoint.report.shards import ShardError, plain_layer
from qdsl.runtime import FormatError, PackedWeight
from tests.support import gguf_models, language_models
from tests.support.covering import ALL
from tests.support.paths import ROOT
from tests.support.producer_folders import KINDS, Stored, write_files, write_folder, write_own
from tests.support.vllm_engine import MARK, PROMPT
from tests.support.vllm_server import post, serving

CLOSE = 2e-5                                                     # of log probabilities in float32, whose sums have another order
LAYERS = 8                                                       # of seven projections each, and so of all formats
SOME = ("gptq act-order", "compressed-tensors nvfp4")

ON_RANKS = (Stored("q4_k", "gguf"), Stored("int_group", "awq", {"group": 64}), Stored("hlane", "hlane"),
            Stored("fp8_tensor", "safetensors"), Stored("fp8_block", "safetensors"), Stored("nvfp4_ct", "compressed_tensors"))

Engine = Callable[..., dict[str, Any]]                           # a folder and options of vllm.LLM, to the answer
in_live_vllm_all = pytest.mark.skipif(not ALL, reason="make live-vllm-all")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM's engine, which answers for one model after the other in one process."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [sys.executable, "-m", "tests.support.vllm_engine"]
    with log.open("w") as errors, subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                   stderr=errors) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer(model: Path, may_fail: bool = False, **options: Any) -> dict[str, Any]:
            stdin.write(json.dumps({"model": str(model), **options}) + "\n")
            stdin.flush()
            line = next((line for line in stdout if MARK in line), None)
            assert line is not None, log.read_text()[-3000:]
            result: dict[str, Any] = json.loads(line.partition(MARK)[2])
            assert may_fail or "error" not in result, (result["error"], log.read_text()[-3000:])
            return result

        yield answer


def assert_same(answer: Mapping[str, Any], reference: Mapping[str, Any], what: str = "") -> None:
    difference = max(abs(a - b) for a, b in zip(answer["logprobs"], reference["logprobs"], strict=True))
    print(f"{what}: log probabilities differ by {difference:.1e}")
    assert difference < CLOSE, what
    assert answer["tokens"] == reference["tokens"], what


def write_decoded(path: Path, decoded: Mapping[str, Tensor], config: dict[str, Any]) -> Path:
    """A plain folder of these weights."""
    write_files(path, {name: tensor.float() for name, tensor in decoded.items()}, {"config.json": config}, "qwen3")
    return path


def stored_formats() -> list[Stored]:
    """The first storage of every format that files have layer by layer, and that can hold the model's layers."""
    formats = [format for format in descriptions() if not {"safetensors", "parts"} & format.detect.keys() and
               not format.name.startswith(("aqlm", "bitnet", "quanto"))]
    chosen = [Stored(format.name, next(iter(next(iter(format.variants.values()))))) for format in formats]
    return [stored for stored in chosen if is_possible(stored)]


def is_possible(stored: Stored) -> bool:
    """Whether qdsl quantizes layers of the model's size in this storage, and its tensors alone say N and K."""
    try:
        packed = stored.pack(torch.ones(language_models.HIDDEN, language_models.HIDDEN))
        packed.format.wrap(packed.tensors, storage=packed.storage, **packed.params)
    except FormatError:
        return False
    return True


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose layers have all formats, the embedding and the head too, and the decoded model."""
    path = tmp_path_factory.mktemp("mixed")
    config = {**language_models.config_json("qwen3"), "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS,
              "max_window_layers": LAYERS}
    formats, weights = stored_formats(), dict[str, PackedWeight]()
    plain: dict[str, Tensor] = {}
    for name, tensor in language_models.weights("qwen3").items():
        is_block = name.startswith("model.layers.")
        if is_block and not name.startswith("model.layers.0."):
            continue
        for own in [name.replace(".0.", f".{number}.", 1) for number in range(LAYERS)] if is_block else [name]:
            if tensor.dim() != 2:
                plain[own] = tensor
            else:
                weights[own.removesuffix(".weight")] = formats[len(weights) % len(formats)].pack(tensor)
    assert len(weights) >= len(formats) > 50
    decoded = {f"{name}.weight": packed.format.dequantize(packed, torch.float32) for name, packed in weights.items()}
    return write_own(path / "packed", weights, plain, config), write_decoded(path / "decoded", {**plain, **decoded}, config)


@pytest.fixture(scope="module")
def decoded_answer(engine: Engine, mixed: tuple[Path, Path]) -> dict[str, Any]:
    return engine(mixed[1])


def test_layers_of_all_formats(engine: Engine, mixed: tuple[Path, Path], decoded_answer: dict[str, Any]) -> None:
    assert_same(engine(mixed[0]), decoded_answer, f"{len(stored_formats())} formats")


def test_two_ranks(engine: Engine, mixed: tuple[Path, Path], decoded_answer: dict[str, Any]) -> None:
    assert_same(engine(mixed[0], tensor_parallel_size=2), decoded_answer, "two ranks")


@pytest.mark.parametrize("kind", [kind if kind in SOME else pytest.param(kind, marks=in_live_vllm_all)
                                  for kind in KINDS if kind != "df11"])
def test_checkpoints_of_producers(engine: Engine, kind: str, tmp_path: Path) -> None:
    decoded = write_folder(tmp_path / "packed", kind, "qwen3")
    reference = write_decoded(tmp_path / "decoded", decoded, language_models.config_json("qwen3"))
    assert_same(engine(tmp_path / "packed", quantization="qdsl"), engine(reference), kind)


def test_layers_on_ranks_one_after_the_other(tmp_path: Path) -> None:
    """vLLM's own layers on 1 to 8 ranks: repeated heads, columns inside blocks, a scale for each part, and streams."""
    shapes = {"lm_head": (496, 512), "model.embed_tokens": (496, 512)}
    for name, shape in {"self_attn.q": (1024, 512), "self_attn.k": (256, 512), "self_attn.v": (256, 512),
                        "self_attn.o": (512, 1024), "mlp.gate": (2048, 512), "mlp.up": (2048, 512),
                        "mlp.down": (512, 2048)}.items():
        shapes[f"model.layers.0.{name}_proj"] = shape
    draw = torch.Generator().manual_seed(0)
    folders = [write_own(tmp_path / stored.format, {name: stored.pack(torch.randn(*shape, generator=draw).bfloat16())
                                                    for name, shape in shapes.items()}, {}, {}) for stored in ON_RANKS]
    arguments = [json.dumps(list(map(str, folders))), "[1, 2, 4, 8]"]
    result = subprocess.run([sys.executable, "-m", "tests.support.vllm_ranks", *arguments], cwd=ROOT, capture_output=True,
                            text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for folder, errors in json.loads(result.stdout.partition(MARK)[2]).items():
        print(Path(folder).name, errors)
        assert max(errors.values()) < 2e-6


@pytest.mark.parametrize(("kind", "whole"), [
    ("own q4_0", True), *(pytest.param(*case, marks=in_live_vllm_all) for case in (
        ("own q4_0", False), ("fp8 block", False), ("hlane", True)))])
def test_experts(engine: Engine, kind: str, whole: bool, tmp_path: Path) -> None:
    """On one rank, reloaded after they were lost, and on two ranks that have half of each expert, or half of the experts."""
    decoded = write_folder(tmp_path / "packed", kind, "moe")
    reference = engine(write_decoded(tmp_path / "decoded", decoded, language_models.config_json("moe")))
    assert_same(engine(tmp_path / "packed", quantization="qdsl"), reference, f"{kind}, one rank")
    assert_same(engine(tmp_path / "packed", quantization="qdsl", reload=True), reference, f"{kind}, reloaded")
    two = engine(tmp_path / "packed", quantization="qdsl", tensor_parallel_size=2, enable_expert_parallel=whole)
    assert_same(two, reference, f"{kind}, two ranks, {'half of the experts' if whole else 'half of each expert'}")


@in_live_vllm_all
def test_experts_are_refused_where_rows_must_be_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    from qdsl.models.vllm.config import QdslConfig
    from qdsl.models.vllm.experts import experts_method

    config = QdslConfig({"quant_method": "qdsl"})
    config.layers = {"mlp.experts.0.gate_proj": plain_layer("gate", "BF16", (8, 8))}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ShardError, match=r"mlp\.experts: .* without VLLM_BATCH_INVARIANT"):
        experts_method(config, torch.nn.Module(), "mlp.experts")


def test_tied_head_reload_and_dummy(engine: Engine, tmp_path: Path) -> None:
    """Weights come back after they were lost; without weights all packed ones are zeros."""
    decoded = write_folder(tmp_path / "tied", "own q8_0, embedding too", "tied")
    reference = engine(write_decoded(tmp_path / "decoded", decoded, language_models.config_json("tied")))
    assert_same(engine(tmp_path / "tied"), reference, "tied head")
    assert_same(engine(tmp_path / "tied", reload=True), reference, "reloaded")
    assert len(set(engine(tmp_path / "tied", load_format="dummy")["logprobs"])) == 1


@in_live_vllm_all
def test_torch_compile(engine: Engine, tmp_path: Path) -> None:
    """Of streams, which are decoded as the model runs."""
    decoded = write_folder(tmp_path / "packed", "hlane", "qwen3")
    reference = write_decoded(tmp_path / "decoded", decoded, language_models.config_json("qwen3"))
    assert_same(engine(tmp_path / "packed", enforce_eager=False), engine(reference), "compiled")


@in_live_vllm_all
def test_modules_that_take_plain_numbers_alone(engine: Engine, tmp_path: Path) -> None:
    """vLLM's Llama hands its embedding no quantization: a packed one is decoded while it is loaded."""
    config = {**language_models.config_json("qwen3"), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    tensors = {name: tensor for name, tensor in language_models.weights("qwen3").items() if "q_norm" not in name and
               "k_norm" not in name}
    packed = {name.removesuffix(".weight"): Stored("q8_0", "gguf").pack(tensor) for name, tensor in tensors.items()
              if tensor.dim() == 2}
    plain = {name: tensor for name, tensor in tensors.items() if tensor.dim() != 2}
    decoded = {f"{name}.weight": weight.format.dequantize(weight, torch.float32) for name, weight in packed.items()}
    reference = write_decoded(tmp_path / "decoded", {**plain, **decoded}, config)
    assert_same(engine(write_own(tmp_path / "packed", packed, plain, config)), engine(reference), "Llama")


GGUF_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 192,
              "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=in_live_vllm_all)])
def test_gguf_files(engine: Engine, model_type: str, tmp_path: Path) -> None:
    """A folder with a config and a GGUF file, whose rows of q and k have another order in Llama; and a file elsewhere."""
    reference, file = gguf_folder(engine, model_type, "Q8_0", tmp_path)
    own = {"quantization": "qdsl", "load_format": "qdsl"}
    settings = {"quantization_config": {"quant_method": "qdsl", "gguf_model": str(file)}}
    assert_same(engine(tmp_path / "packed", **own), reference, f"{model_type}, GGUF")
    elsewhere = engine(tmp_path / "decoded", load_format="qdsl", hf_overrides=settings)
    assert_same(elsewhere, reference, f"{model_type}, GGUF elsewhere")
    if ALL:
        assert_same(engine(tmp_path / "packed", **own, tensor_parallel_size=2), reference, f"{model_type}, GGUF, two ranks")


@pytest.mark.parametrize(("model_type", "type"), [
    ("llama", "F16"), ("llama", "Q8_0 BF16 F16 F32"), ("qwen3_moe", "F16"), ("qwen3_moe", "F16 Q8_0 Q4_0 BF16 F32"),
    pytest.param("llama", "BF16", marks=in_live_vllm_all)])
def test_gguf_files_of_plain_weights(engine: Engine, model_type: str, type: str, tmp_path: Path) -> None:
    """All of one type, and beside packed ones: as parts of a layer, as the embedding or the head, and as experts."""
    reference, _ = gguf_folder(engine, model_type, type, tmp_path)
    own = {"quantization": "qdsl", "load_format": "qdsl"}
    assert_same(engine(tmp_path / "packed", **own), reference, f"{model_type}, GGUF of {type}")
    if ALL:
        two = engine(tmp_path / "packed", **own, tensor_parallel_size=2)
        assert_same(two, reference, f"{model_type}, GGUF of {type}, two ranks")


def gguf_folder(engine: Engine, model_type: str, type: str, path: Path) -> tuple[dict[str, Any], Path]:
    """What a model of decoded weights answers, in the folder `decoded`; and its GGUF file, in `packed`."""
    (path / "packed").mkdir()
    file, model = gguf_models.written(path / "packed", model_type, type=type, **GGUF_SIZES)
    model.save_pretrained(path / "decoded")
    model.config.save_pretrained(path / "packed")                # which then names the class
    return engine(path / "decoded"), file


def test_server(engine: Engine, tmp_path: Path) -> None:
    """`vllm serve` over a folder that names qdsl, and one request."""
    decoded = write_folder(tmp_path / "packed", "own mixed", "qwen3")
    reference = engine(write_decoded(tmp_path / "decoded", decoded, language_models.config_json("qwen3")))
    options = ["--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "128"]
    body = {"model": str(tmp_path / "packed"), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "detokenize": False,
            "return_token_ids": True}
    with serving(tmp_path / "packed", options, tmp_path) as address:
        assert post(f"{address}/v1/completions", body)["choices"][0]["token_ids"] == reference["tokens"]


@in_live_vllm_all
def test_plain_folders_are_quantized(engine: Engine, tmp_path: Path) -> None:
    """All Linear layers but those of `skip` and the head."""
    plain = language_models.write_plain(tmp_path / "plain", "qwen3")
    decoded: dict[str, Tensor] = {}
    for name, tensor in language_models.weights("qwen3").items():
        decoded[name] = tensor
        if language_models.is_projection(name) and "down_proj" not in name:
            packed = Stored("fp8_block", "safetensors").pack(tensor.float())
            decoded[name] = packed.format.dequantize(packed, torch.float32)
    reference = write_decoded(tmp_path / "decoded", decoded, language_models.config_json("qwen3"))
    settings = {"quantization_config": {"quant_method": "qdsl", "format": "fp8_block", "skip": ["down_proj"]}}
    assert_same(engine(plain, hf_overrides=settings), engine(reference), "quantized on the way")


@in_live_vllm_all
def test_weights_that_are_coded_together(engine: Engine, tmp_path: Path) -> None:
    """DF11 codes blocks of weights together: each is decoded once, and encoded by itself, on two ranks its part."""
    decoded = write_folder(tmp_path / "df11", "df11", "qwen3")
    reference = engine(write_decoded(tmp_path / "decoded", decoded, language_models.config_json("qwen3")))
    for ranks in (1, 2):
        packed = engine(tmp_path / "df11", quantization="qdsl", tensor_parallel_size=ranks)
        assert_same(packed, reference, f"DF11, {ranks} ranks")


@in_live_vllm_all
def test_experts_in_one_tensor(engine: Engine, tmp_path: Path) -> None:
    """As transformers holds them: experts.gate_up_proj [E, 2N, K] and experts.down_proj."""
    config = language_models.config_json("moe")
    plain, weights = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in language_models.weights("moe").items():
        stem, _, last = name.rpartition(".experts.")
        if not stem:
            plain[name] = tensor
        elif "up_proj" not in last:
            gate = [tensor] if "down_proj" in last else [tensor, language_models.weights("moe")[name.replace("gate", "up")]]
            part = "down_proj" if "down_proj" in last else "gate_up_proj"
            weights.setdefault(f"{stem}.experts.{part}", []).append(torch.cat(gate))
    stored, tensors = Stored("fp8_channel", "safetensors"), dict(plain)
    decoded = {name: tensor.float() for name, tensor in plain.items()}
    for name, experts in weights.items():
        packed = [stored.pack(expert) for expert in experts]
        tensors |= {f"{name}.{own}": torch.stack([weight.tensors[own] for weight in packed]) for own in packed[0].tensors}
        decoded[name] = torch.stack([weight.format.dequantize(weight, torch.float32) for weight in packed])
    write_files(tmp_path / "packed", tensors, {"config.json": config}, "moe")
    reference = engine(write_decoded(tmp_path / "decoded", decoded, config))
    for ranks in (1, 2):
        packed = engine(tmp_path / "packed", quantization="qdsl", tensor_parallel_size=ranks)
        assert_same(packed, reference, f"experts in one tensor, {ranks} ranks")


@in_live_vllm_all
def test_gpt_oss(engine: Engine, tmp_path: Path) -> None:
    """Its experts are in one tensor of MXFP4, rows of gate and up alternate, and they have biases."""
    decoded = write_folder(tmp_path / "packed", "mxfp4", "gpt_oss")
    write_files(tmp_path / "decoded", decoded, {"config.json": language_models.config_json("gpt_oss")}, "gpt_oss")
    reference = engine(tmp_path / "decoded")
    for ranks in (1, 2):
        packed = engine(tmp_path / "packed", quantization="qdsl", tensor_parallel_size=ranks)
        assert_same(packed, reference, f"gpt-oss, {ranks} ranks")


@in_live_vllm_all
def test_inputs_in_8_bits(engine: Engine, tmp_path: Path) -> None:
    """Where the checkpoint states it: vLLM's own INT8 layers compute the same; a static scale is that of the checkpoint."""
    narrow = {"quantization_config": {"quant_method": "qdsl", "quantize_x": "auto"}}
    kinds = ("compressed-tensors int8", "fp8 tensor, static")
    for kind in kinds:
        write_folder(tmp_path / kind, kind, "qwen3")
    integers, static = (tmp_path / kind for kind in kinds)
    exact, wanted = engine(integers, quantization="qdsl"), engine(integers)
    own, fixed = (engine(path, quantization="qdsl", hf_overrides=narrow) for path in (integers, static))
    free = engine(static, quantization="qdsl")
    for what, one, two in (("INT8, vLLM's own", own, wanted), ("INT8, exact x", exact, wanted), ("FP8, exact x", fixed, free)):
        difference = max(abs(a - b) for a, b in zip(one["logprobs"], two["logprobs"], strict=True))
        print(f"{what}: log probabilities differ by {difference:.1e}")
        assert difference < CLOSE if "own" in what else CLOSE < difference < 1, what


def test_entry_point() -> None:
    """Once it is called vLLM has the quantization; the plug-in of transformers, which needs a later release, is not imported."""
    point, = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "qdsl"]
    code = (f"import sys; from {point.module} import {point.attr}; {point.attr}(); "
            "from vllm.model_executor.layers.quantization import get_quantization_config; "
            "assert get_quantization_config('qdsl').__module__ == 'qdsl.models.vllm.config'; "
            "assert not {'qdsl.models.transformers', 'diffusers'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["factors of x", "rotation of x", "bias of a norm"])
def test_what_acts_and_is_not_served_is_refused(tmp_path: Path, engine: Engine, name: str) -> None:
    """Before anything is loaded, with the reason: vLLM itself would answer with other numbers."""
    kind = "compressed-tensors int4" if name == "rotation of x" else "awq"
    write_folder(tmp_path / "in", kind, "qwen3")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    if name == "rotation of x":
        apply = [{"targets": ["re:.*down_proj$"], "location": "input"},
                 {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True}]
        config["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    else:
        more = {"factors of x": ("model.layers.0.mlp.act.scales", language_models.INNER),
                "bias of a norm": ("model.layers.0.input_layernorm.bias", language_models.HIDDEN)}
        full, size = more[name]
        with Folder(tmp_path / "in") as source:
            tensors = {own: source.tensor(own).clone() for own in source.names()}
        write(tmp_path / "in" / "model.safetensors", {**tensors, full: torch.full((size,), 2.0)}, {"format": "pt"})
    reason = "may compute other numbers" if name == "bias of a norm" else "the layer transforms x"
    assert reason in engine(tmp_path / "in", may_fail=True, quantization="qdsl")["error"]
