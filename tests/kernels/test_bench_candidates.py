"""What `python -m bench.gpu --only candidates` times and says, without a GPU."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import candidates
from bench.gpu.device import DeviceInfo, launches_for
from qdsl.runtime.gpu import plan

H100 = DeviceInfo("NVIDIA H100 80GB HBM3", 90, 132, 50 << 20)


def test_what_a_plan_chooses_is_timed() -> None:
    """First, of every storage and number of rows; ways that are modelled far slower are not, but for decoding."""
    meta = torch.device("meta")
    with launches_for(H100):
        for timed in candidates.products():
            packed = timed.weight.meta()
            options = candidates.candidates(packed, timed.rows, meta)
            assert options[0].candidate == plan.best(packed, timed.rows, candidates.X, meta)
            assert [option.candidate.kind for option in options].count("decode") == 1
            assert len(options) <= candidates.MOST + 1
        assert {product.weight.shape for product in candidates.products()} == set(candidates.SHAPES)
        calls = list(candidates.products()[0].calls())
        assert [call.family for call in calls].count("dequantize") == 1          # the last one: the weight is decoded whole
        assert calls[0].family == "gemv"


def test_a_chosen_kernel_that_does_not_run_is_named_so() -> None:
    fast = {"kind": "gemv", "us": 1.0, "modelled": 2.0, "chosen": True}
    slow = {"kind": "decode", "us": 9.0, "modelled": 8.0, "chosen": False}
    assert candidates._summary([slow, fast]) == "chosen gemv 1.0 us, 2.0 modelled; best gemv 1.0 us, 2.0 modelled"
    assert candidates._summary([slow]) == "the chosen kernel did not run; best decode 9.0 us, 8.0 modelled"
    assert candidates._summary([]).startswith("the chosen kernel did not run")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "one/3", "2"])
def test_a_share_that_is_none(text: str) -> None:
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        command._share(text)
    assert command._share("3/3") == (3, 3)
