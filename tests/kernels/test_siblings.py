"""Layers that multiply the same x compute together on a CPU, and every result has the bits of its layer alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.generated import fp8_channel, int_group, q4_0, q4_1, q4_k, q6_k, q8_0
from qdsl.host import library
from qdsl.runtime.cpu import joined, kept, rows
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.torch import model, siblings
from tests.support.cpu_products import sample

K = 256
FORMATS = {"q4_1": (q4_1, {}), "q6_k": (q6_k, {}), "fp8_channel": (fp8_channel, {}),
           "int4": (int_group, {"bits": 4, "group": 64})}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """Products of small weights are compiled, with few optimizations."""
    monkeypatch.setenv("QDSL_CACHE", str(cache_folder))
    monkeypatch.setattr(library, "OPTIONS", (*library.OPTIONS, "-O1"))
    monkeypatch.setattr(rows, "_libraries", {})
    monkeypatch.setattr(kept, "_entries", {})
    cpu.compile_products()
    yield
    cpu.compile_products(False)


class Attention(nn.Module):
    """The layers of an attention and of a gated MLP; sizes differ, as those of grouped queries do."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        for name, n in (("q_proj", 64), ("k_proj", 32), ("v_proj", 24), ("gate_proj", 48), ("up_proj", 48)):
            self.add_module(name, nn.Linear(K, n, bias=bias))

    def forward(self, x: Tensor, y: Tensor | None = None) -> list[Tensor]:
        """The results of all layers; q of x, k and v of y."""
        return [layer(y if y is not None and name in ("k_proj", "v_proj") else x) for name, layer in self.named_children()]


def join_siblings(own: nn.Module, filter: Callable[[str], bool]) -> list[str]:
    """The names of the layers that are joined."""
    names = {id(module): name for name, module in own.named_modules()}
    return [names[id(layer)] for group in siblings.siblings_of(own, filter) if group.place() for layer in group.layers]


def models(format: str = "q4_1", bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Attention, Attention]:
    """A quantized model whose layers compute alone, and a copy whose layers are joined."""
    torch.manual_seed(0)
    alone, (module, options) = Attention(bias).to(dtype), FORMATS[format]
    model.quantize_model(alone, module.FORMAT, **options)
    together = copy.deepcopy(alone)
    assert join_siblings(together, lambda name: True) == list(dict(together.named_children()))
    return alone, together


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of joined products that ran, as the length of a list."""
    calls: list[int] = []
    prepare = joined.JoinedCopies.prepare

    def counted(*arguments: Any) -> Any:
        run = prepare(*arguments)
        return run and (lambda x, biases: calls.append(len(biases)) or run(x, biases))

    monkeypatch.setattr(joined.JoinedCopies, "prepare", counted)
    return calls


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.shape == b.shape and a.stride() == b.stride() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_results_have_the_bits_of_every_layer_alone(format: str, bias: bool, dtype: torch.dtype,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of x and several, on one thread and on more; many rows are multiplied alone."""
    calls, (alone, together) = launches(monkeypatch), models(format, bias, dtype)
    monkeypatch.setattr(rows, "SHARE", 1)
    with torch.no_grad():
        for m in (1, 3, 8, 11):
            for threads in (1, 3):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                for seed in range(3):
                    x = sample(m, K, seed=seed, dtype=dtype).unsqueeze(0)
                    calls.clear()
                    assert same(together(x), alone(x))
            assert calls == ([3, 2] if m <= rows.FEW else [])


def test_rounded_x_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CPU_INT8", "1")
    calls, (alone, together) = launches(monkeypatch), models()
    with torch.no_grad():
        exact = [layer.dequantize(torch.float32) @ sample(1, K)[0] for layer in alone.children()]
        for _ in range(2):
            results = together(sample(1, K))
            assert same(results, alone(sample(1, K)))
    assert calls == [3, 2] and not any(torch.allclose(own[0], other, 1e-5) for own, other in zip(results, exact, strict=True))


def test_every_layer_has_a_result_of_its_own() -> None:
    """Results may be changed in place, and live on."""
    alone, together = models()
    with torch.no_grad():
        x = sample(1, K)
        wanted = alone(x)
        together(x)
        results = together(x)
        storages = {result.untyped_storage().data_ptr() for result in results}
        assert len(storages) == len(results) and all(result.is_contiguous() for result in results)
        results[0].zero_()
        assert same(results[1:], wanted[1:])


# -- callers that do not pass the same x, or change something meanwhile ---------------------------------------------------


def test_cross_attention_gets_the_products_of_its_own_x() -> None:
    """And its layers separate in the end, because results are not taken."""
    alone, together = models()
    with torch.no_grad():
        for step in range(2 * siblings.MOST_MISSES):
            x, y = sample(1, K, seed=step), sample(1, K, seed=100 + step)
            assert same(together(x, y), alone(x, y))
    assert together.q_proj.siblings is None and together.gate_proj.siblings is not None


def change_x(together: Attention, x: Tensor) -> None:
    """In place: the object is the same."""
    x.add_(1)


def change_weight(together: Attention, x: Tensor) -> None:
    together.k_proj.blocks.copy_(q4_1.quantize(sample(32, K, seed=9)).tensors["blocks"])


def replace_weight(together: Attention, x: Tensor) -> None:
    together.k_proj.blocks = nn.Parameter(q4_1.quantize(sample(32, K, seed=9)).tensors["blocks"], requires_grad=False)


def replace_data(together: Attention, x: Tensor) -> None:
    together.k_proj.blocks.data = q4_1.quantize(sample(32, K, seed=9)).tensors["blocks"]


def change_bias(together: Attention, x: Tensor) -> None:
    together.k_proj.bias.add_(1)


def drop_bias(together: Attention, x: Tensor) -> None:
    together.k_proj.bias = None


def match_dense(together: Attention, x: Tensor) -> None:
    together.k_proj.match_dense = True


def use_no_fast_batches(together: Attention, x: Tensor) -> None:
    together.k_proj.batch_invariant = True


CHANGES = [change_x, change_weight, replace_weight, replace_data, change_bias, drop_bias, match_dense, use_no_fast_batches]


@pytest.mark.parametrize("is_late", [False, True], ids=["before the first", "after the first"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_in_the_next_result(change: Callable[[Attention, Tensor], None], is_late: bool) -> None:
    """Of x, of a weight or of a setting, before the first layer has computed for all, or after it."""
    alone, together = models(bias=True)
    with torch.no_grad():
        for m in (alone, together, together):
            m(sample(1, K))
        results = []
        for m in (alone, together):
            x, own = sample(1, K), []
            for number, layer in enumerate(m.children()):
                if number == int(is_late):
                    change(m, x)
                own.append(layer(x))
            results.append(own)
        assert same(*results)
        assert same(together(sample(1, K)), alone(sample(1, K))) and same(together(sample(1, K)), alone(sample(1, K)))


def test_settings_that_are_read_again_hold_for_joined_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = models()
    with torch.no_grad():
        exact = [together(sample(1, K)) for _ in range(2)][-1]
        monkeypatch.setenv("QDSL_CPU_INT8", "1")
        cpu.compile_products()
        for _ in range(2):
            rounded = together(sample(1, K))
            assert same(rounded, alone(sample(1, K))) and not same(rounded, exact)


def test_gradients_hooks_and_observers_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd, autocast, inference mode and checkpoints; forward hooks see every layer's x and result."""
    calls, (alone, together) = launches(monkeypatch), models()
    with torch.no_grad():
        for _ in range(2):
            together(sample(1, K))
    calls.clear()
    gradients = []
    for m in (alone, together):
        x = sample(1, K).requires_grad_()
        torch.utils.checkpoint.checkpoint(lambda x, m=m: torch.cat(m(x), -1).sum(), x, use_reentrant=False).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and not calls
    with torch.inference_mode():
        assert same(together(sample(1, K)), alone(sample(1, K))) and not calls
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert same(together(sample(1, K)), alone(sample(1, K))) and not calls
    seen: list[tuple[str, Tensor, Tensor]] = []
    for name, layer in together.named_children():
        layer.register_forward_hook(lambda layer, x, out, name=name: seen.append((name, x[0], out)))
    together.v_proj.register_forward_pre_hook(lambda layer, x: (x[0] * 2,))
    with torch.no_grad():
        x = sample(1, K)
        results = together(x)
        assert [name for name, _, _ in seen] == list(dict(together.named_children())) and len(calls) == 2
        assert all(result is out for result, (_, _, out) in zip(results, seen, strict=True))
        assert torch.equal(results[2], alone.v_proj(x * 2)) and same(results[:2], alone(x)[:2])


def test_threads_do_not_take_each_others_results() -> None:
    alone, together = models()
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for step in range(200):
                x = sample(1, K, seed=seed * 1000 + step % 5)
                if not same(together(x), alone(x)):
                    wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# -- models around them --------------------------------------------------------------------------------------------------


def test_copies_moves_and_state_dicts_are_those_of_separate_layers() -> None:
    alone, together = models(bias=True)
    with torch.no_grad():
        for _ in range(2):
            together(sample(1, K))
        assert [*together.state_dict()] == [*alone.state_dict()]
        assert all(torch.equal(own, other) for own, other in zip(together.state_dict().values(), alone.state_dict().values(),
                                                                 strict=True))
        for change in (copy.deepcopy, lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float32)):
            other, alone = change(together), change(alone)
            x = sample(1, K, dtype=other.q_proj.compute_dtype)
            wanted = alone(x)
            assert same(other(x), wanted) and same(other(x), wanted)
        layer = copy.deepcopy(together.q_proj)
        assert layer.siblings is None and torch.equal(layer(x), wanted[0])
        together.load_state_dict({name: tensor.flip(0) if name == "q_proj.blocks" else tensor
                                  for name, tensor in alone.state_dict().items()})
        assert not torch.equal(together(x)[0], wanted[0]) and same(together(x)[1:], wanted[1:])


def test_adapters_and_compiled_programs_have_the_results_of_layers_alone() -> None:
    """A LoRA of one layer, whose base layer still computes for all; and a program that torch compiles."""
    peft = pytest.importorskip("peft")
    both, config = models(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0)
    for m in both:
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, m.eval())
    alone, together = both
    with torch.no_grad():
        for step in range(3):
            x = sample(1, K, seed=step)
            assert same(together(x), alone(x)) and not torch.equal(alone(x)[0], alone.q_proj.base_layer(x))
        assert together.k_proj.siblings._misses == 0 and together.k_proj.siblings._products
        gradients = []
        for m in both:
            with torch.enable_grad():
                torch.cat(m(x), -1).sum().backward()
            gradients.append(m.q_proj.lora_B.default.weight.grad)
        assert torch.equal(*gradients)
    alone, together = models()
    with torch.no_grad():
        compiled = torch.compile(together, backend="eager")
        for step in range(3):
            x = sample(1, K, seed=step)
            assert all(torch.allclose(own, other, 1e-4, 1e-5) for own, other in zip(compiled(x), alone(x), strict=True))
            assert same(together(x), alone(x))


def test_layers_that_differ_in_kind_stay_alone() -> None:
    """Formats, columns, rows that are no whole groups, x that is transformed, and layers that are not packed."""
    def joins(k: Any, n: int = 64) -> list[str]:
        own = Attention()
        own.q_proj, own.v_proj = nn.Linear(K, n), nn.Identity()
        own.k_proj = k
        model.quantize_model(own, q4_k.FORMAT)
        return join_siblings(own, lambda name: "gate" not in name)

    other = q6_k.Linear(q6_k.quantize(sample(64, K)))
    other.keeps_copy = True
    small = q4_0.Linear(q4_0.quantize(sample(64, 32)))
    small.keeps_copy = True
    loose = q4_k.Linear(q4_k.quantize(sample(64, K)))
    assert joins(nn.Linear(K, 32)) == ["q_proj", "k_proj"]
    assert joins(nn.Linear(K, 32), n=40) == joins(other) == joins(small) == joins(loose) == joins(nn.Identity()) == []


def test_loaded_models_are_joined_and_copied_before_the_first_product(tmp_path: Path) -> None:
    """And saved as the separate layers that they are."""
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

    quantized = Layers()
    model.quantize_model(quantized, q8_0.FORMAT)
    qdsl.save_model(quantized, tmp_path / "first")
    loaded = Layers()
    qdsl.load_weights_(loaded, tmp_path / "first")
    layers = dict(loaded.self_attn.named_children())
    assert all(layer.siblings is not None for layer in layers.values()) and len(kept._entries) == len(layers)
    with torch.no_grad():
        for _ in range(2):
            assert same(loaded.self_attn(sample(1, K)), quantized.self_attn(sample(1, K)))
    qdsl.save_model(loaded, tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_layers_with_groups_of_other_lengths_stay_alone() -> None:
    """Their loops are the same, and take the length as an argument."""
    for lengths, names in (((64, 64), ["q_proj", "k_proj"]), ((32, 64), [])):
        own = nn.Module()
        for name, group in zip(("q_proj", "k_proj"), lengths, strict=True):
            own.add_module(name, nn.Linear(K, 64))
            model.quantize_model(own, int_group.FORMAT, bits=4, group=group)
        assert join_siblings(own, lambda name: True) == names


def test_copies_whose_groups_differ_in_length_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one number of several, too, for which loops take the length as an argument."""
    monkeypatch.setenv(kept.INTERLEAVE.variable, "always")
    first, second = (rows.interleaved_copy(q4_k.quantize(sample(64, K, seed=seed))) for seed in range(2))
    assert first is not None and second is not None and joined._can_run_together([first, second])
    weight = rows.described_weight(second.codes, second.levels, second.fields, list(second.weight.shift)[:len(second.fields)], 64,
                                   second.columns)
    weight.shift[1] += 1
    assert not joined._can_run_together([first, replace(second, weight=weight)])
