"""Blocks that are decoded one ahead: the right weights at every moment, whether the second stream is fast or slow.

There is no GPU here: in place of its stream stands one that works at once, or as late as it may.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.jobs.compress.run import compress
from qdsl.jobs.compress.units import Compression
from qdsl.models import prefetch
from qdsl.models.grouped import GroupedBlock
from tests.support.small_models import Mlp, folder


class Model(nn.Module):
    """Blocks that run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(64, 64 + 32 * (number % 3)) for number in range(5)])

    def forward(self, x: Tensor, order: Iterable[int]) -> Tensor:
        for number in order:
            x = x + self.layers[number](x)
        return x


class Fast:
    """A second stream that works at once."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0

    def run(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        self.count += 1
        work()

    def join(self) -> None:
        """Nothing is left to do."""


class Slow(Fast):
    """A second stream that works when another waits for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queued: list[Callable[[], object]] = []

    def run(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        self.count += 1
        self.queued.append(work)

    def join(self) -> None:
        for work in self.queued:
            work()
        self.queued.clear()


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A plain model, and its DF11 folder."""
    torch.manual_seed(0)
    dense, path = Model().bfloat16(), tmp_path_factory.mktemp("coded")
    source = folder(path / "plain", {name: parameter.detach() for name, parameter in dense.named_parameters()}, {})
    compress(source, Compression("df11", patterns={r"layers\.\d+": ["up", "down"]}), path / "df11")
    return dense, path / "df11"


@pytest.fixture(params=[Fast, Slow])
def ahead(request: Any, coded: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model, prefetch.Prefetch]:
    """The plain model, one that decodes ahead, and what does that."""
    dense, path = coded
    with torch.device("meta"):
        model = Model().bfloat16()
    qdsl.load_weights_(model, path)
    make = prefetch.Prefetch
    monkeypatch.setattr(prefetch, "Prefetch", lambda: make(request.param, "cpu"))
    return dense, model, prefetch.prefetch_(model)


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def queued(decoder: prefetch.Prefetch) -> int:
    [side] = decoder._sides.values()
    return side.count


def check(dense: Model, model: Model, *orders: Iterable[int]) -> None:
    x = X.to(dense.layers[0].up.weight.dtype)
    with torch.no_grad():
        for order in orders:
            assert torch.equal(model(x, order), dense(x, order)), order


def test_every_block_is_decoded_ahead_once_the_order_is_known(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model, decoder = ahead
    check(dense, model, range(5))
    assert queued(decoder) == 0
    decoded: list[GroupedBlock] = []
    decode = GroupedBlock.decode
    monkeypatch.setattr(GroupedBlock, "decode", lambda block, out: decoded.append(block) or decode(block, out))
    check(dense, model, *[range(5)] * 3)
    assert queued(decoder) == 15 and len(decoded) <= 16          # the first of them was not known to follow the last
    assert len({buffer.data_ptr() for buffer in decoder._buffers}) == 2


def test_other_orders(ahead: Any) -> None:
    """What was decoded ahead in vain is not used, nor written into the weights of a block that runs."""
    dense, model, _ = ahead
    check(dense, model, range(5), [0, 2, 4, 1, 3], [2, 2, 0, 2], [0, 1, 0, 1, 3, 0], range(5))


def test_weights_that_change_between_calls(ahead: Any, coded: tuple[Model, Path]) -> None:
    """A block that was decoded ahead is decoded again when its tensors or its dtype have changed."""
    dense, model, _ = ahead
    check(dense, model, range(5), range(5))                      # the first block is decoded for the next call
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swapped = {name.replace("layers.0.", "layers.3."): tensor for name, tensor in state.items() if name.startswith("layers.0.")}
    swapped |= {name.replace("layers.3.", "layers.0."): tensor for name, tensor in state.items() if name.startswith("layers.3.")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in swapped and parameter.shape == swapped[name].shape:
                parameter.copy_(swapped[name])
            elif name in swapped:
                parameter.data = swapped[name]
    other = copy.deepcopy(dense)
    other.layers[0], other.layers[3] = other.layers[3], other.layers[0]
    check(other, model, range(5), range(5))
    check(other.float(), model.float(), range(5), range(5))


def test_gradients_and_libraries_that_load_tensors(ahead: Any) -> None:
    """These forwards decode for themselves."""
    dense, model, decoder = ahead
    check(dense, model, range(5), range(5))
    before = queued(decoder)
    assert torch.equal(model(X, range(5)), dense(X, range(5))) and queued(decoder) == before
    model.layers[2]._diffusers_hook = object()
    check(dense, model, range(5), range(5))
    assert queued(decoder) == before + 2 * 3                     # neither this block nor the next one


def test_copies_and_the_end(ahead: Any) -> None:
    dense, model, decoder = ahead
    check(dense, model, range(5), range(5))
    copied, count = copy.deepcopy(model), queued(decoder)
    check(dense, copied, range(5), range(5))
    decoder.close()
    check(dense, model, range(5))
    assert queued(decoder) == count and decoder._buffers == [None, None]
    with pytest.raises(ValueError, match="no block of these models has weights that are coded together"):
        prefetch.prefetch_(dense)
