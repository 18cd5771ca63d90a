"""GGUF language models compute what llama.cpp does, whatever their metadata says, or are refused.

A case is a key with another value, or optional tensors added, with llama.cpp's recorded logits: see tests/support/gguf_cases.py.
"""

from __future__ import annotations

import copy
import dataclasses
import filecmp
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.detect.gguf_keys import is_ignored, is_usual, known_keys, metadata_findings, table
from qdsl.checkpoint.detect.ledger import Kind
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.cli import app
from qdsl.models.gguf_keys import contradictions, unknown_keys
from qdsl.models.gguf_maps import FOLDER, GgufMap, model_types
from qdsl.models.plan import LoadError
from tests.support import gguf_cases
from tests.support.covering import ALL
from tests.support.gguf_absent import answers as absences
from tests.support.gguf_absent import without
from tests.support.gguf_models import write_file

plugin = pytest.importorskip("qdsl.models.transformers")
transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tests.support.tiny_models")
rope = pytest.importorskip("qdsl.models.transformers.gguf_rope")
gguf_config = pytest.importorskip("qdsl.models.transformers.gguf_config")
gguf_additions = pytest.importorskip("qdsl.models.transformers.gguf_additions")
pytestmark = pytest.mark.filterwarnings("default")

ANSWERS: dict[str, dict[str, list[float] | None]] = json.loads((gguf_cases.FOLDER / "answers.json").read_text())
CLOSE = 1e-3                                                     # relative difference of logits
TABLED = {"falcon": 3e-3, "gemma": 3e-3, "gpt2": 3e-3}           # GELU of llama.cpp is a table of float16, and tanh for erf
# Model types of which `make test` takes some cases, one for each kind of layer; `make test-all` and `make live` take all of all.
SAMPLE = ("deepseek_v3", "falcon", "gemma3_text", "gpt_oss", "granitemoehybrid", "laguna", "lfm2_moe", "mamba", "olmo3",
          "qwen3_next")
STEP = 7                                                         # between the cases that are taken
# Cases that classes cannot compute, or that only some architectures mean something by; all others have to be computed.
REFUSED = {"norms of queries and keys", "a new key", "fewer heads of keys", "normed steps", "parallel"}
# Keys by whose 0 llama.cpp computes no numbers.  Looking ahead, where a class cannot.  Scales of Bamba, which are Granite's.
REFUSED_OF = {*((name, case) for name, keys in table()["undefined"].items() for case, own in gguf_cases.VALUES.items()
                if any(own.get(key) == 0 for key in keys)), *((name, "both ways") for name in table()["causal"]),
              *(("bamba", name) for what in ("logits", "attention", "residuals", "embeddings")
                for name in (f"scaled {what}", f"{what} below 0"))}


def may_be_refused(model_type: str, name: str) -> bool:
    """Whether a file may be refused: never for keys that llama.cpp does not read for its architecture, and knows for others."""
    return name in REFUSED or (model_type, name) in REFUSED_OF


def checked(model_type: str, name: str, folder: Path) -> Any:
    """A case's model, which computes the recorded logits; None for one that may be refused, and is."""
    expected = ANSWERS[model_type][name] or ANSWERS[model_type]["unchanged"]      # what changes no logit
    path = gguf_cases.write_case(folder / "model.gguf", gguf_cases.tiny(model_type), gguf_cases.cases()[name])
    try:
        model = plugin.from_pretrained(path, dtype=torch.float32)
    except LoadError as error:
        assert may_be_refused(model_type, name), f"{model_type}, {name}: {error}"
        return None
    assert ANSWERS[model_type][name] is not None, f"{model_type}, {name}: llama.cpp computes no numbers"
    assert model.config.model_type == model_type or name != "unchanged"
    with torch.no_grad():
        logits = gguf_cases.sample(model(torch.tensor([gguf_cases.TOKENS])).logits[0].float())
    difference = float((logits - torch.tensor(expected)).norm() / torch.tensor(expected).norm())
    close = TABLED.get(model_type, CLOSE)
    assert difference < close, f"{model_type}, {name}: logits differ from llama.cpp's by {difference:.2g}"
    return model


@pytest.mark.parametrize("model_type", ANSWERS if ALL else ("llama", *SAMPLE))
def test_logits_are_those_of_llama_cpp_or_the_file_is_refused(model_type: str, tmp_path: Path) -> None:
    names = list(ANSWERS[model_type])[::STEP if model_type in SAMPLE and not ALL else 1]
    assert {name for name in names if checked(model_type, name, tmp_path) is not None}


def test_a_scale_of_attention_that_a_class_has_no_place_for(tmp_path: Path) -> None:
    """It is refused below 0, too: the class of Bamba has none, and would multiply by its own."""
    assert checked("bamba", "attention below 0", tmp_path) is None


def test_an_epsilon_that_an_architecture_does_not_read(tmp_path: Path) -> None:
    """Nemotron has norms with means, and another epsilon: a wrong one of norms without is no reason to refuse."""
    assert checked("nemotron", "an epsilon below 0", tmp_path) is not None


def test_windows_of_0_that_llama_cpp_does_not_answer(tmp_path: Path) -> None:
    """NaN is recorded for four types, and nothing for two at which it ends; the refusal names the key, and that."""
    key, case = "attention.sliding_window", "no windows"
    refused = {name for name, keys in table()["undefined"].items() if key in keys}
    silent = {name for name, own in ANSWERS.items() if case not in own}
    assert refused == {name for name, own in ANSWERS.items() if own.get(case, []) is None} | silent == {
        "afmoe", "cohere2", "cohere2_moe", "exaone_moe", "gemma2", "llama4_text"} and silent == {"afmoe", "llama4_text"}
    path = gguf_cases.write_case(tmp_path / "model.gguf", gguf_cases.tiny("gemma2"), gguf_cases.cases()[case])
    with pytest.raises(LoadError, match=r"gemma2\.attention\.sliding_window is 0: llama\.cpp computes no numbers by it"):
        plugin.from_pretrained(path)


@pytest.mark.parametrize(("type", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_norms_of_two_bytes(type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As the same numbers in F32.  llama.cpp ends: 'binary_op: unsupported types: dst: f32, src0: f32, src1: f16'."""
    own, logits = gguf_cases.tiny("llama"), []
    rounded = {name: tensor.to(dtype).float() if "_norm.weight" in name else tensor for name, tensor in own.tensors.items()}
    for types in ({"_norm.weight": type}, {}):
        changed = dataclasses.replace(own, tensors=rounded)
        path = gguf_cases.write_case(tmp_path / "model.gguf", changed, gguf_cases.Case(types=types))
        with torch.no_grad():
            logits.append(plugin.from_pretrained(path, dtype=torch.float32)(torch.tensor([gguf_cases.TOKENS])).logits)
    assert torch.equal(*logits)


# What classes have no place for is added to the models, by the key of the config's entry.
ADDITIONS = {"attention.sliding_window": ("lfm2", "a window"), "rope.freq_base_swa": ("gemma2", "another base of windows"),
             "biases": ("mixtral", "biases of attention"), "expert_gating_func": ("cohere2_moe", "scaled experts"),
             "scales": ("llama", "scales of weights"), "attention.causal": ("gemma2", "both ways"),
             "attention.scale": ("granite", "attention below 0"),
             "attention.layer_norm_epsilon": ("olmo", "another epsilon of means"),
             "attention.layer_norm_rms_epsilon": ("minicpm3", "another epsilon"),
             "rope.dimension_count": ("gemma", "a partial width and attention"),
             "rotated_layers": ("afmoe", "every other layer a window"), "rope.dimension_sections": ("glm4", "sections"),
             "expert_scales": ("qwen3_moe", "scales of experts"),
             "attention.head_count": ("granitemoehybrid", "heads of each layer"),
             "attention.head_count_kv": ("lfm2", "heads of keys of each layer")}


@pytest.mark.parametrize("key", gguf_additions.ADD)
def test_what_a_class_lacks_is_computed(key: str, tmp_path: Path) -> None:
    model_type, case = ADDITIONS[key]
    assert key in checked(model_type, case, tmp_path).config.llama_cpp


@pytest.mark.parametrize(("model_type", "case"), [case for key, case in ADDITIONS.items() if key != "rope.dimension_sections"])
def test_what_a_class_lacks_is_kept(model_type: str, case: str, tmp_path: Path) -> None:
    """By caches, by saved folders, and by models in plain numbers, which are not saved without it; other programs refuse it."""
    tokens = torch.tensor([gguf_cases.TOKENS])
    path = gguf_cases.write_case(tmp_path / "model.gguf", gguf_cases.tiny(model_type), gguf_cases.cases()[case], "Q8_0")
    model = plugin.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits
        if case != "both ways":                                  # where tokens see those that come later
            start = model(tokens[:, :-1], use_cache=True)
            last = model(tokens[:, -1:], past_key_values=start.past_key_values).logits
            assert torch.allclose(last, expected[:, -1:], atol=1e-3 * float(expected.abs().max()))
        model.save_pretrained(tmp_path / "saved")
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert torch.equal(saved(tokens).logits, expected)
        model.dequantize()
        assert torch.allclose(model(tokens).logits, expected, atol=1e-3 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="which a plain model of its class has no place for"):
        model.save_pretrained(tmp_path / "plain")
    report = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(tmp_path / "saved")]).output)
    assert [entry["key"].split(".")[0] for entry in report["acts"]] == ["llama_cpp"]
    other = type(model)(saved.config)
    with pytest.raises((CheckpointError, LoadError), match=r"config\.json: |does not fill the model"):
        qdsl.load_weights_(other, tmp_path / "saved")


def test_scales_of_inputs_change_nothing(tmp_path: Path) -> None:
    """Converters write one beside each NVFP4 weight, and llama.cpp rounds inputs otherwise; one without a weight is refused."""
    own, tokens = gguf_cases.tiny("llama"), torch.tensor([gguf_cases.TOKENS])
    logits = []
    for name in ("", "blk.0.attn_q.input_scale", "blk.0.attn_x.input_scale"):
        tensors = {**own.tensors, **({name: torch.tensor([0.01])} if name else {})}
        path = gguf_cases.write_case(tmp_path / "model.gguf", dataclasses.replace(own, tensors=tensors), gguf_cases.Case())
        if "attn_x" in name:
            with pytest.raises(LoadError, match="1 tensor without a place in the recorded map of llama: " + name):
                plugin.from_pretrained(path)
            continue
        model = plugin.from_pretrained(path, dtype=torch.float32)
        assert model.hf_quantizer.report.unused == [name] * bool(name)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def test_one_norm_of_both_parts_of_a_layer(tmp_path: Path) -> None:
    """Of StableLM 2 12B: files lack the other, and both parts have the same input."""
    own = gguf_cases.tiny("stablelm")
    path = gguf_cases.write_case(tmp_path / "model.gguf", without(own, "blk.{block}.ffn_norm.weight"), gguf_cases.Case())
    path = gguf_cases.write_case(path, without(without(own, "blk.{block}.ffn_norm.weight"), "blk.{block}.ffn_norm.bias"),
                                 gguf_cases.Case())
    model = plugin.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = gguf_cases.sample(model(torch.tensor([gguf_cases.TOKENS])).logits[0])
    expected = torch.tensor(absences()["stablelm"]["blk.{block}.ffn_norm.weight"])
    assert model.config.use_parallel_residual and float((logits - expected).norm() / expected.norm()) < CLOSE


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_next", "llama"])
def test_blocks_that_predict_further_tokens(model_type: str, tmp_path: Path) -> None:
    """They are left out, and arrays end before them; llama.cpp refuses those of architectures that it knows none of."""
    own = gguf_cases.tiny(model_type)
    count, start = own.config.num_hidden_layers, f"{own.recorded.architecture}."
    blocks = {name.replace(f"blk.{count - 1}.", f"blk.{count}."): tensor for name, tensor in own.tensors.items()}
    further = {"block_count": Value.of("u32", count + 1), "nextn_predict_layers": Value.of("u32", 1)}
    arrays = {key: Value.of(value.type, [*numbers, numbers[-1]]) for key, value in own.settings.items()
              if isinstance(numbers := value.decoded(), list) and len(numbers) == count}
    changed = dataclasses.replace(own, tensors={**own.tensors, **blocks}, settings={
        **own.settings, **arrays, **{start + key: value for key, value in further.items()}})
    path = gguf_cases.write_case(tmp_path / "model.gguf", changed, gguf_cases.Case())
    if model_type == "llama":
        with pytest.raises(LoadError, match="for which LlamaForCausalLM has no parameter"):
            plugin.from_pretrained(path)
        return
    with torch.no_grad():
        logits = gguf_cases.sample(plugin.from_pretrained(path, dtype=torch.float32)(torch.tensor([gguf_cases.TOKENS])).logits[0])
    expected = torch.tensor(ANSWERS[model_type]["unchanged"])
    assert float((logits - expected).norm() / expected.norm()) < CLOSE


@pytest.mark.parametrize(("layers", "tokens", "gate"), [(47, 154880, None), (48, 154880, None), (46, 154880, 1), (47, 154881, 1)])
def test_gates_of_files_that_state_none(layers: int, tokens: int, gate: int | None) -> None:
    """llama.cpp takes sigmoids for files of GLM 4.7 Flash alone, which early converters wrote without the key."""
    config = SimpleNamespace(num_hidden_layers=layers, vocab_size=tokens, n_group=1, routed_scaling_factor=1.0)
    rule = gguf_config._routing_rule({"expert_weights_norm": True}, GgufMap.read(FOLDER / "glm4_moe_lite.json"), config)
    assert rule.get("gate") == gate


def test_tokens_are_as_many_as_rows(tmp_path: Path) -> None:
    own = gguf_cases.tiny("llama")
    tokens = {"tokenizer.ggml.model": Value.of("string", "gpt2"), "tokenizer.ggml.tokens": Value.of("string[]", ["a", "b", "c"])}
    path = gguf_cases.write_case(tmp_path / "model.gguf", dataclasses.replace(own, settings={**own.settings, **tokens}),
                                 gguf_cases.Case())
    with pytest.raises(LoadError, match=r"has 3 tokens, and token_embd\.weight 128 rows"):
        plugin.from_pretrained(path)


@pytest.mark.parametrize(("model_type", "keys", "transposed", "sentence"), [
    ("llama", {}, "blk.1.attn_k.weight", r"k_proj\.weight' is \[96, 192\] in the model, and the file has .* \[192, 96\]"),
    ("llama", {"rope.freq_base": float("nan")}, "", "the base of rotary embeddings is nan"),
    ("mixtral", {"expert_used_count": 0}, "", "expert_used_count is 0 of 5 experts"),
    ("mixtral", {"expert_used_count": 6}, "", "expert_used_count is 6 of 5 experts")])
def test_files_without_an_answer(model_type: str, keys: dict[str, Any], transposed: str, sentence: str, tmp_path: Path) -> None:
    """A matrix with its axes the other way round has as many numbers; no expert leaves numbers that look right."""
    own = gguf_cases.tiny(model_type)
    tensors = {name: tensor.t().contiguous() if name == transposed else tensor for name, tensor in own.tensors.items()}
    path = gguf_cases.write_case(tmp_path / "model.gguf", dataclasses.replace(own, tensors=tensors), gguf_cases.Case(keys))
    with pytest.raises(LoadError, match=sentence):
        plugin.from_pretrained(path)


def test_sampling_of_a_file(tmp_path: Path) -> None:
    own = gguf_cases.tiny("llama")
    for temperature, samples in ((0.5, True), (0.0, False)):
        settings = {"general.sampling.temp": Value.of("f32", temperature), "general.sampling.top_k": Value.of("i32", 7)}
        path = gguf_cases.write_case(tmp_path / "model.gguf", dataclasses.replace(own, settings={**own.settings, **settings}),
                                     gguf_cases.Case())
        generation = plugin.from_pretrained(path).generation_config
        assert bool(generation.do_sample) == samples
        assert not samples or (generation.temperature, generation.top_k) == (0.5, 7)


# -- configs given beside a file -----------------------------------------------------------------------------------------------


@cache
def config_of(model_type: str) -> Any:
    """The config of a tiny model."""
    return tiny_models.tiny_config(model_type, 1, **tiny_models.unusual(model_type))


def sentences(model_type: str, changes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What contradicts the config of a tiny model, and what is not understood, in the converter's metadata with changes."""
    own = GgufMap.read(FOLDER / f"{model_type}.json")
    config = config_of(model_type)
    settings = {key: value for key, (_, value) in gguf_cases.metadata()[model_type].items()}
    settings |= {f"{own.architecture}.{key}": value for key, value in changes.items()}
    file: Any = SimpleNamespace(metadata=settings, tensors={}, path="model.gguf")
    return ([*contradictions(config, file.metadata, own), *rope.rotary_contradictions(config, file, own.architecture)],
            unknown_keys(config, file.metadata, own))


def other(value: Any) -> Any:
    """Another value than this one."""
    if isinstance(value, list):
        return [other(own) for own in value]
    if isinstance(value, str):
        return "yarn" if value == "none" else "none"
    return not value if isinstance(value, bool) else value * 2 or 7


@pytest.mark.parametrize("model_type", model_types())
def test_a_config_that_says_something_else_is_refused(model_type: str) -> None:
    """Nothing is found in what the converter writes; each key with another value is, unless shapes or nothing depend on it."""
    assert sentences(model_type, {}) == ([], [])
    own = GgufMap.read(FOLDER / f"{model_type}.json")
    models = table()["models"].get(model_type, {})
    for key, (_, value) in gguf_cases.metadata()[model_type].items():
        name = key.removeprefix(f"{own.architecture}.")
        skipped = name in table()["inert"] or (name in models and models[name] is None) or name in (
            "rope.scaling.type", "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier") or (
            name == "rope.freq_base_swa" and table()["window_rope"][own.architecture].get("one_base"))
        assert skipped or any(sentences(model_type, {name: other(value)})), f"{key} {other(value)} instead of {value}"


@pytest.mark.parametrize("model_type", model_types())
def test_keys_that_are_not_understood_are_refused(model_type: str) -> None:
    """Those of which llama.cpp reads none for the architecture are inert; values that change nothing are no matter."""
    architecture = GgufMap.read(FOLDER / f"{model_type}.json").architecture
    for key, value in {"attention.of_next_year": 2.0, "residual_scale": 0.25, "attention.clamp_kqv": 0.5,
                       "attention.causal": False, "rope.dimension_sections": [4, 2, 2, 2]}.items():
        assert any(sentences(model_type, {key: value})) != is_ignored(key, architecture), key
        usual = table()["usual"].get(key, [None])[0]
        assert usual is None or is_usual(key, usual)


def test_keys_that_are_inert_are_those_that_nothing_reads() -> None:
    """Of all that llama.cpp knows, for each architecture with a map: a key is read, inert, or what a converter writes beside."""
    for architecture, read in table()["architectures"].items():
        inert = {*table()["inert"], *table()["unread"].get(architecture, ())}
        ignored = {key for key in known_keys() if is_ignored(key, architecture)}
        assert ignored == known_keys() - {*read, *table()["common"], *inert}
        metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": 7 for key in ignored if "*" not in key}}
        assert metadata_findings("model.gguf", metadata) == [] and len(ignored) > 100


def test_unknown_keys_are_allowed_on_demand(tmp_path: Path) -> None:
    own = gguf_cases.tiny("llama")
    path = gguf_cases.write_case(tmp_path / "model.gguf", own, gguf_cases.cases()["a new key"])
    with pytest.raises(LoadError, match=r"llama\.attention\.of_next_year is '2\.0', which may change attention"):
        plugin.from_pretrained(path)
    assert plugin.from_pretrained(path, allow_unknown=True).config.model_type == "llama"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_the_file_tells_whether_the_head_is_tied(is_tied: bool, has_head: bool, tmp_path: Path) -> None:
    """Whatever the config says that is given beside it."""
    own = gguf_cases.tiny("llama")
    tensors = {name: tensor for name, tensor in own.tensors.items() if has_head or name != "output.weight"}
    path = gguf_cases.write_case(tmp_path / "model.gguf", dataclasses.replace(own, tensors=tensors), gguf_cases.Case())
    base = copy.deepcopy(own.config)
    base.tie_word_embeddings = is_tied
    base.save_pretrained(tmp_path / "base")
    models = [plugin.from_pretrained(path, dtype=torch.float32, base=base) for base in (None, tmp_path / "base")]
    with torch.no_grad():
        logits = [model(torch.tensor([gguf_cases.TOKENS])).logits for model in models]
    assert torch.equal(*logits) and [model.config.tie_word_embeddings for model in models] == [not has_head] * 2


# -- the ledger of a file, without a model ---------------------------------------------------------------------------------------


def recorded(model_type: str) -> dict[str, Any]:
    """The converter's metadata of a tiny model."""
    architecture = GgufMap.read(FOLDER / f"{model_type}.json").architecture
    return {"general.architecture": architecture, **{key: value for key, (_, value) in gguf_cases.metadata()[model_type].items()}}


@pytest.mark.parametrize("model_type", model_types())
def test_nothing_is_found_in_what_the_converter_writes(model_type: str) -> None:
    """A key that nobody knows is found, unless it changes nothing; one that llama.cpp does not read here is not."""
    metadata = recorded(model_type)
    assert metadata_findings("model.gguf", metadata) == []
    architecture = metadata["general.architecture"]
    for key, value in {"attention.of_next_year": 2.0, "residual_scale": 0.25, "classifier.output_labels": ["yes", "no"]}.items():
        reported = metadata_findings("model.gguf", {**metadata, f"{architecture}.{key}": value})
        is_read = key in (*table()["architectures"][architecture], *table()["common"])
        computed = key in table()["settings"] or key in table()["inert"] or is_ignored(key, architecture)
        assert [finding.kind for finding in reported] == ([] if computed else [Kind.ACTS if is_read else Kind.UNKNOWN]), key
        assert all(finding.key == f"{architecture}.{key}" for finding in reported)
    for value in (None, False, ""):
        assert metadata_findings("model.gguf", {**metadata, f"{architecture}.attention.of_next_year": value}) == []


def test_every_architecture_of_the_table_is_recorded() -> None:
    """llama.cpp knows 152; those with a map are read."""
    assert {recorded(model_type)["general.architecture"] for model_type in model_types()} == table()["architectures"].keys()
    assert len({*table()["architectures"], *table()["others"]}) == 152 == len(table()["architectures"]) + len(table()["others"])


@pytest.mark.parametrize("architecture", table()["others"])
def test_files_of_other_architectures_have_no_findings_and_are_no_models(architecture: str, tmp_path: Path) -> None:
    """Every key that llama.cpp reads for it, or its converter writes, is known; running it is refused with the reason."""
    keys = {key.replace("*", "dense_2") for name in ("common", "written") for key in table()[name]}
    keys |= {key.replace("*", "dense_2") for key in table()["others"][architecture]}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": 7 for key in keys}}
    assert metadata_findings("model.gguf", metadata) == []
    unknown_key = {f"{architecture}.of_next_year": 2.0}
    (finding,) = metadata_findings("model.gguf", metadata | unknown_key)
    assert (finding.kind, finding.key) == (Kind.UNKNOWN, f"{architecture}.of_next_year")
    tensors = {"token_embd.weight": torch.ones(4, 32)}
    path = write_file(tmp_path / "model.gguf", architecture, tensors, dict.fromkeys(tensors, "F32"),
                      {key: Value.of("u32", value) for key, value in metadata.items() if value == 7})
    assert not json.loads(CliRunner().invoke(app, ["inspect", "--json", str(path)]).output)["not_understood"]
    with pytest.raises(LoadError, match=f"architecture '{architecture}' has no map, .*llama.cpp knows it"):
        plugin.from_pretrained(path)


def test_architectures_that_llama_cpp_does_not_know() -> None:
    assert metadata_findings("model.gguf", {"general.architecture": "mine", "mine.own": 3}) == []


def test_commands_report_and_refuse_metadata(tmp_path: Path) -> None:
    """`inspect` lists it; `dequantize` writes nothing, unless it is allowed, and then the same numbers."""
    own, run = gguf_cases.tiny("llama"), CliRunner().invoke
    paths = [gguf_cases.write_case(tmp_path / f"{name}.gguf", own, gguf_cases.cases()[case])
             for name, case in (("usual", "unchanged"), ("new", "a new key"))]
    sentence = "new.gguf: llama.attention.of_next_year is 2.0, which may change attention: nothing is known about it"
    assert [run(app, ["inspect", "--strict", str(path)]).exit_code for path in paths] == [0, 3]
    assert sentence in " ".join(run(app, ["inspect", str(paths[1])], env={"COLUMNS": "300"}).output.split())
    report = json.loads(run(app, ["inspect", "--json", str(paths[1])]).output)
    assert [entry["key"] for entry in report["not_understood"]] == ["llama.attention.of_next_year"] and report["acts"] == []
    out = tmp_path / "out.safetensors"
    refused = run(app, ["dequantize", str(paths[1]), "-o", str(out)])
    assert refused.exit_code == 1 and sentence in refused.output and not out.exists()
    allowed = run(app, ["dequantize", str(paths[1]), "-o", str(out), "--allow-unknown"])
    assert allowed.exit_code == 0 and f"note: {sentence}" in allowed.output
    assert run(app, ["dequantize", str(paths[0]), "-o", str(tmp_path / "usual.safetensors")]).exit_code == 0
    assert filecmp.cmp(out, tmp_path / "usual.safetensors", shallow=False)


# -- what a file is -----------------------------------------------------------------------------------------------------------


def test_files_are_known_by_their_first_bytes_and_folders_by_their_only_one(tmp_path: Path) -> None:
    path = gguf_cases.write_case(tmp_path / "model.gguf", gguf_cases.tiny("llama"), gguf_cases.Case())
    (tmp_path / "blobs").mkdir()
    blob = path.rename(tmp_path / "blobs" / "sha256-0")
    assert plugin.from_pretrained(blob).config.model_type == "llama"
    blob.rename(tmp_path / "blobs" / "model.gguf")
    assert plugin.from_pretrained(tmp_path / "blobs").config.model_type == "llama"


def test_folders_are_of_one_model(tmp_path: Path) -> None:
    """Commands take the only GGUF file of a folder, whole or split, and refuse to choose among several."""
    own, folder = gguf_cases.tiny("llama"), tmp_path / "models"
    folder.mkdir()
    path = gguf_cases.write_case(folder / "model-Q4_0.gguf", own, gguf_cases.Case())
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0
    path.rename(folder / "model.Q4_0")                           # of a store of blobs, by its first bytes
    assert plugin.from_pretrained(folder / "model.Q4_0").config.model_type == "llama"
    for name in ("a-00001-of-00002", "a-00002-of-00002", "b-00001-of-00002", "b-00002-of-00002"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "300"})
    assert result.exit_code == 1 and "it has GGUF files, of which one is to be named: a-00001-of-00002.gguf" in result.output


@pytest.mark.parametrize(("kind", "tensors", "sentence"), [
    ("imatrix", {"blk.0.attn_q.weight.in_sum2": torch.ones(1, 4)}, "general.type is 'imatrix'"),
    ("adapter", {"blk.0.attn_q.weight.lora_a": torch.ones(2, 4)}, "general.type is 'adapter', which is no model by itself"),
    ("model", {}, "a vocabulary alone, without weights")])
def test_other_files_are_refused_by_what_they_are(kind: str, tensors: dict[str, torch.Tensor], sentence: str,
                                                       tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf", "llama", tensors, dict.fromkeys(tensors, "F32"),
                      {"general.type": Value.of("string", kind), "tokenizer.ggml.model": Value.of("string", "gpt2")})
    with pytest.raises(LoadError, match=sentence):
        plugin.from_pretrained(path)
    assert sentence in " ".join(CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "300"}).output.split())
    out = tmp_path / "out.gguf"
    refused = CliRunner().invoke(app, ["quantize", str(path), "--type", "Q4_0", "--out", str(out)], env={"COLUMNS": "300"})
    assert refused.exit_code == 1 and "there is nothing to quantize" in refused.output and not out.exists()
