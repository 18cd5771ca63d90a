"""Which type each tensor of a language model gets, as llama-quantize has it.

tests/data/mixes.json holds what llama.cpp's own code answers for the models of tests/support/models.py: types by the roles
and layers of tensors, and the bytes of all. An answer that an importance matrix changes stands beside it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.jobs.gguf import QuantizeError, plan_file
from qdsl.jobs.gguf.mixes import (
    MIXES,
    Model,
    Options,
    Tensor,
    choose,
    fitting,
    is_kept,
    mix_of,
    override_of,
    requires_imatrix,
    type_named,
)
from qdsl.jobs.gguf.plan_file import Step
from tests.support import llama_mixes
from tests.support.covering import quarter_of
from tests.support.models import MODELS, ToyModel
from tests.support.paths import ROOT

EXPECTED: dict[str, dict[str, dict[str, Any]]] = json.loads((ROOT / "tests/data/mixes.json").read_text())
ARCHITECTURES: dict[str, Any] = json.loads(llama_mixes.RECORD.read_text())
NAMED = [name for name, mix in MIXES.items() if mix.default]


def expected(case: ToyModel, answer: dict[str, Any]) -> dict[str, str]:
    """An answer's type for every tensor that is not kept.  A role stands for all layers, or those after its colon."""
    types: dict[tuple[str, int | None], str] = {}
    for type, roles in answer.items():
        for entry in roles.split() if type != "bytes" else ():
            role, _, layers = entry.partition(":")
            for part in layers.split(",") if layers else ():
                first, _, last = part.partition("-")
                types |= {(role, layer): type for layer in range(int(first), int(last or first) + 1)}
            types |= {} if layers else {(role, None): type}
    wanted = {}
    for tensor in case.tensors():
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+?)(\.\d+)?\.weight", tensor.name)
        assert parts
        layer, role = int(parts[1]) if parts[1] else None, parts[2]
        places = [(key, at) for key in (f"{role}{parts[3] or ''}", role) for at in (layer, None)]
        wanted |= {tensor.name: next(types[place] for place in places if place in types)} if tensor.type != "F32" else {}
    return wanted


@pytest.mark.parametrize("title", MODELS)
@pytest.mark.parametrize("imatrix", [False, True], ids=["plain", "imatrix"])
def test_mixes_are_those_of_llama_quantize(title: str, imatrix: bool) -> None:
    case, answers = MODELS[title], EXPECTED[title]
    tensors = case.tensors()
    for mix in NAMED:
        answer = answers.get(f"{mix} with an imatrix" if imatrix else mix, answers[mix])
        choices = choose(case.model, reversed(tensors), Options(MIXES[mix], imatrix=imatrix))
        wanted = expected(case, answer)
        assert {name: choice.type for name, choice in choices.items() if name in wanted} == wanted, mix
        assert all(choices[tensor.name].type == "F32" for tensor in tensors if tensor.name not in wanted)
        sizes = [math.prod(tensor.shape[:-1]) * BY_NAME[choices[tensor.name].type].row_bytes(tensor.columns)
                 for tensor in tensors]
        assert sum(sizes) == answer["bytes"], mix


def test_every_model_and_mix_has_an_answer() -> None:
    assert list(EXPECTED) == list(MODELS)
    for answers in EXPECTED.values():
        assert {name.removesuffix(" with an imatrix") for name in answers} == set(NAMED)
    assert any("with an imatrix" in name for name in EXPECTED["llama, 8 experts"])


def test_the_best_known_mix() -> None:
    """Q4_K_M of a model of 32 layers: half of the values and of the way down in 6 bits, and the output."""
    case = MODELS["llama, 32 layers, as many values as heads"]
    choices = choose(case.model, case.tensors(), Options(mix_of("q4_k_m")))
    six = [name for name, choice in choices.items() if choice.type == "Q6_K"]
    assert len([name for name in six if "attn_v" in name]) == len([name for name in six if "ffn_down" in name]) == 16
    assert len(six) == 33 and "output.weight" in six
    assert {choice.type for choice in choices.values()} == {"Q4_K", "Q6_K", "F32"}


def test_tensors_are_in_the_order_of_layers() -> None:
    names = ["blk.10.ffn_up.weight", "output.weight", "blk.2.ffn_up.weight", "blk.2.attn_v.weight", "a.weight"]
    choices = choose(Model("llama", 12, 4, 4), [Tensor(name, (8, 256), "F16") for name in names], Options(MIXES["Q4_K_S"]))
    assert list(choices) == ["a.weight", "output.weight", "blk.2.attn_v.weight", "blk.2.ffn_up.weight", "blk.10.ffn_up.weight"]


def test_what_a_user_says_comes_first() -> None:
    case = MODELS["llama, 32 layers, as many values as heads"]
    overrides = (override_of("ATTN_V=q8_0"), override_of(r"blk\.(0|1)\.=f16"), override_of("attn_v=q5_k"))
    options = Options(MIXES["Q4_K_M"], output="Q5_0", embedding="F16", overrides=overrides)
    types = {name: choice.type for name, choice in choose(case.model, case.tensors(), options).items()}
    assert types["output.weight"] == "Q5_0" and types["token_embd.weight"] == "F16"
    assert {types[f"blk.{layer}.attn_v.weight"] for layer in range(32)} == {"Q8_0"}
    assert types["blk.0.ffn_up.weight"] == types["blk.1.attn_q.weight"] == "F16" and types["blk.10.ffn_up.weight"] == "Q4_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    kept = choose(case.model, case.tensors(), Options(MIXES["Q4_K_M"], leave_output=True))
    assert kept["output.weight"].type == "F16"


def test_one_type_for_all_matrices() -> None:
    """With --pure, and of types that are no mixes."""
    tensors = [Tensor("token_embd.weight", (64, 256), "F32"), Tensor("blk.0.attn_v.weight", (64, 256), "F32"),
               Tensor("blk.0.attn_norm.weight", (256,), "F32"), Tensor("blk.0.attn_v.bias", (64,), "F32")]
    for mix, options in (("Q4_K_M", {"pure": True}), ("BF16", {})):
        types = choose(Model("gemma3", 1, 4, 1), tensors, Options(MIXES[mix], **options))
        assert [types[t.name].type for t in tensors] == [MIXES[mix].default] * 2 + ["F32"] * 2


@pytest.mark.parametrize("architecture", quarter_of(list(ARCHITECTURES["architectures"])))
def test_mixes_of_every_architecture(architecture: str) -> None:
    """Of two models of each architecture that gguf-py names, all types are those of llama-quantize's dry run."""
    row = ARCHITECTURES["architectures"][architecture]
    for size, numbers in enumerate(row["answers"]):
        model, tensors = llama_mixes.case(architecture, row["tensors"].split(), size)
        for question, number in zip(ARCHITECTURES["questions"], numbers, strict=True):
            mix, _, imatrix = question.partition("+")
            if (answer := ARCHITECTURES["texts"][number]) != llama_mixes.ABORTS:
                chosen = choose(model, tensors, Options(MIXES[mix], imatrix=bool(imatrix)))
                types = {name: choice.type for name, choice in chosen.items()}
                assert llama_mixes.sheet(types, str(MIXES[mix].default)) == answer, question


@pytest.mark.skipif(llama_mixes.program() is None, reason="needs llama-quantize: make live builds it; or set QDSL_LLAMA_CPP")
def test_the_record_is_what_llama_quantize_says(tmp_path: Path) -> None:
    """One mix of each architecture, another of the next."""
    importance = llama_mixes.imatrix(tmp_path / "imatrix.gguf")
    for place, (architecture, row) in enumerate(ARCHITECTURES["architectures"].items()):
        number = place % len(llama_mixes.QUESTIONS)
        mix, imatrix = llama_mixes.QUESTIONS[number]
        path = llama_mixes.prepared(tmp_path, architecture, row["tensors"].split(), 0)
        answer = llama_mixes.answer(path, mix, importance if imatrix else None)
        assert answer == ARCHITECTURES["texts"][row["answers"][0][number]], (architecture, mix)
        path.unlink()


def test_copy_changes_nothing() -> None:
    tensors = [Tensor("output.weight", (4, 100), "BF16"), Tensor("blk.0.attn_v.weight", (4, 256), "Q4_K")]
    choices = choose(Model("anything", 1, 1, 1), tensors, Options(MIXES["COPY"]))
    assert {name: choice.type for name, choice in choices.items()} == {t.name: t.type for t in tensors}


@pytest.mark.parametrize(("wanted", "columns", "type"), [
    ("Q4_K", 256, "Q4_K"), ("Q4_K", 896, "Q5_0"), ("Q5_K", 96, "Q5_1"), ("Q6_K", 2880, "Q8_0"), ("Q2_K", 32, "Q4_0"),
    ("Q3_K", 32, "Q4_0"), ("TQ1_0", 32, "Q4_0"), ("Q2_0", 32, "Q4_0"), ("IQ2_XXS", 32, "IQ4_NL"), ("IQ4_XS", 64, "IQ4_NL"),
    ("Q4_K", 100, "F16"), ("Q8_0", 100, "F16"), ("MXFP4", 1, "F16"), ("BF16", 7, "BF16"),
])
def test_rows_that_a_type_cannot_hold(wanted: str, columns: int, type: str) -> None:
    choice = fitting(Tensor("w.weight", (8, columns), "F32"), wanted)
    assert (choice.type, choice.wanted) == (type, wanted)


def test_what_needs_an_importance_matrix() -> None:
    up = "blk.0.ffn_up.weight"
    assert requires_imatrix(up, "IQ2_XS", "IQ2_S") and requires_imatrix(up, "Q2_K", "Q2_K_S")
    assert not requires_imatrix(up, "Q2_K", "Q2_K") and not requires_imatrix(up, "IQ3_S", "IQ3_M")
    assert not requires_imatrix("token_embd.weight", "IQ2_XS", "IQ2_XS")


@pytest.mark.parametrize("name", ["blk.3.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q.bias",
                                  "position_embd.weight", "blk.0.ssm_conv1d.weight", "rope_freqs"])
def test_what_stays(name: str) -> None:
    assert is_kept(Tensor(name, (64, 256), "F32"))
    assert is_kept(Tensor("blk.0.attn_q.weight", (1, 256), "F32")) and not is_kept(Tensor("blk.0.attn_q.weight", (2, 256), "F32"))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: mix_of("Q4_K_N"), "no mix 'Q4_K_N'; did you mean Q4_K_"),
    (lambda: type_named("q4_9"), "no type 'q4_9'"),
    (lambda: type_named("i32"), "no type 'i32' to store weights in"),
    (lambda: type_named("q8_1"), "no type 'q8_1' to store weights in; did you mean Q"),
    (lambda: override_of("attn_v"), "PATTERN=TYPE"),
    (lambda: override_of("=q4_k"), "PATTERN=TYPE"),
    (lambda: override_of("attn_(=q4_k"), "no regular expression"),
    (lambda: fitting(Tensor("w.weight", (1, 64), "F32"), "Q1_0"), "'w.weight': rows of 64 are no multiple of 128, the block"),
    (lambda: choose(Model("llama", 1, 1, 1), [Tensor("output.weight", (2, 100), "F16")], Options(MIXES["Q4_0"], output="Q6_K")),
     "tensor 'output.weight': rows of 100 are no multiple of 256, the block of Q6_K"),
    (lambda: choose(Model("llama", 1, 1, 1, 8), [Tensor("a.ffn_up.weight", (2, 256), "F16")], Options(MIXES["Q4_K_M"])),
     "tensor 'a.ffn_up.weight': its name says no layer from 0 to 0"),
])
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        call()


def test_tensors_with_one_problem_share_a_note() -> None:
    """A model of odd columns has it in every layer."""
    odd = [Step(Tensor(f"blk.{layer}.ffn_up.weight", (8, 96), "F16"), "Q5_0", "Q4_K") for layer in range(3)]
    other = Step(Tensor("output.weight", (8, 100), "F16"), "F16", "Q6_K")
    assert plan_file.notes((*odd, other), Options(mix_of("q4_k_m")), None) == [
        "3 tensors, the first 'blk.0.ffn_up.weight': rows of 96 are no multiple of 256, the block of Q4_K; they get Q5_0",
        "tensor 'output.weight': rows of 100 are no multiple of 256, the block of Q6_K; it gets F16"]
