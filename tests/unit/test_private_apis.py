"""What qdsl relies on of torch, Triton and Python beyond documented interfaces, one test each: a new release fails here first."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from qdsl.runtime.libraries import private_apis as private


def test_fake_tensors_are_known_outside_of_their_mode() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert isinstance(fake, private.FakeTensor) and not isinstance(torch.ones(2), private.FakeTensor)


def test_dispatch_modes_are_seen() -> None:
    seen = []
    make_fx(lambda x: (seen.append(private.is_in_torch_dispatch_mode()), x + 1)[1])(torch.ones(2))
    assert seen == [True] and not private.is_in_torch_dispatch_mode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_tracing_is_seen() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(private.is_jit_traced())
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen == [True] and not private.is_jit_traced()


def test_transforms_and_forward_mode_are_seen() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(private.is_transformed())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    assert seen == [True, True] and not private.is_transformed()


def test_gradients_in_a_batch_are_seen() -> None:
    seen: list[tuple[type, bool]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append((type(gradient), private.is_batched(gradient)))
            return gradient

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Watched.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert seen == [(Tensor, True)] and not private.is_batched(torch.ones(2))


@pytest.mark.parametrize("is_inferring", [False, True])
def test_memory_is_allocated_past_the_dispatcher(is_inferring: bool) -> None:
    allocate = private.allocator("cpu")
    assert allocate is not None and private.allocator("cuda") is not None and private.allocator("nowhere") is None
    with torch.inference_mode(is_inferring):
        tensor = allocate((2, 3), (3, 1), torch.bfloat16)
        plain = torch.ones(1).new_empty((2, 3), dtype=torch.bfloat16)
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(tensor, name) == getattr(plain, name)
    assert type(tensor) is Tensor and tensor.is_contiguous() and tensor.is_inference() == is_inferring


def test_views_share_a_storage() -> None:
    whole = torch.ones(4)
    assert private.storage_key(whole) == private.storage_key(whole[2:]) != private.storage_key(whole.clone())


def test_buffers_that_are_not_saved() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert private.non_persistent_buffers(module) == {"made"} and module.state_dict().keys() == {"kept"}


def test_dtensors_hold_a_local_tensor() -> None:
    from torch.distributed.tensor import DTensor

    assert "_local_tensor" in DTensor.__slots__ and not private.is_fsdp_shard(nn.Parameter(torch.ones(1)))


def test_ddp_is_told_what_to_ignore() -> None:
    model = nn.Linear(2, 2)
    assert private.ddp_ignored(model) == set()
    private.ignore_in_ddp_(model, ["weight"])
    assert private.ddp_ignored(model) == {"weight"}
    assert "_ddp_params_and_buffers_to_ignore" in nn.parallel.DistributedDataParallel.__init__.__code__.co_consts


def test_triton_names_its_tools() -> None:
    pytest.importorskip("triton")
    assert all(os.access(private.tool_path(tool), os.X_OK) for tool in ("ptxas", "nvdisasm", "cuobjdump"))


def test_patterns_are_parsed_to_pairs_of_operation_and_arguments() -> None:
    """checkpoint/detect/ignored.py counts the ways in which a pattern can match."""
    parser = importlib.import_module("re._parser")
    (repeat, (low, high, inner)), (branch, (_, ways)) = parser.parse("a*(?:bc|d)")
    assert (str(repeat), low, high, str(inner[0][0])) == ("MAX_REPEAT", 0, parser.MAXREPEAT, "LITERAL")
    assert str(branch) == "BRANCH" and [len(way) for way in ways] == [2, 1]


def test_autocast_is_left_for_a_call() -> None:
    multiply = private.without_autocast(torch.matmul)
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
        assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
