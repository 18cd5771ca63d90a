"""Attention of vllm-omni for CPUs, which its own classes have for GPUs alone.  `omni_cpu` is imported before these can be."""

from __future__ import annotations

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class Attention(SDPAImpl):
    """Attention by torch, on any platform."""

    forward = SDPAImpl.forward_cuda


class Backend(SDPABackend):
    """The backend of `Attention`."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return Attention
