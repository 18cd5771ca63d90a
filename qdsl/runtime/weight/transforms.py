"""Matrices of transforms, and weights that contain them.

A rotation multiplies blocks of x by a matrix R [size, size].  Long Hadamard matrices are Kronecker products, R = S (A x H), with
signs S, and are applied as two small products: x viewed as [a, b] becomes A^T x H.

    R of 8192 columns: 8192 products per element whole, 64 + 128 as factors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qdsl.core.transforms import INPUT, OUTPUT, Transform, base_matrices
from qdsl.runtime.weight.packed import FormatError

WHOLE = 256                                                      # columns of a matrix that is multiplied whole
LEAST = 4                                                        # columns of a right factor that is worth two products
Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]       # whole, signs, left, right


def sylvester_hadamard(size: int) -> Tensor:
    """The Hadamard matrix of Sylvester, of ones and minus ones.  size: a power of two."""
    matrix = torch.ones((1, 1), dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard_matrix(transform: Transform) -> Tensor:
    """The Hadamard matrix of a rotation without a tensor, of ones and minus ones."""
    size, base = transform.size, transform.base
    if base == 1:
        return sylvester_hadamard(size)
    return torch.kron(_base_hadamard(transform), sylvester_hadamard(size // base))


def _base_hadamard(transform: Transform) -> Tensor:
    size = transform.base
    digits = base_matrices()[size]
    bits = torch.tensor([int(bit) for bit in f"{int(digits, 16):0{size * size}b}"], dtype=torch.float32, device="cpu")
    matrix = (2 * bits - 1).view(size, size)
    return matrix.t().contiguous() if transform.transposed else matrix


def stored_rotation(transform: Transform, tensor: Tensor, perm: Tensor | None) -> Tensor:
    """The stored matrix of a rotation in float32, permuted and transposed, without its scale."""
    matrix = tensor.float()
    matrix = matrix if perm is None else matrix[perm][:, perm]
    return matrix.t() if transform.transposed else matrix


def scale_of(transform: Transform) -> float:
    """The scale of a rotation's matrix."""
    return 1 / math.sqrt(transform.size) if transform.normalized or not transform.tensor else 1.0


def factors_of(transform: Transform, tensor: Tensor | None, perm: Tensor | None) -> Factors:
    """The matrix of a rotation as it is multiplied, without its scale: whole, or signs of rows, and two Kronecker factors."""
    if tensor is not None:
        return kronecker_factors(stored_rotation(transform, tensor, perm))
    if transform.size <= WHOLE:
        return hadamard_matrix(transform), None, None, None
    power = transform.size // transform.base
    columns = min(power, 1 << (transform.size.bit_length() - 1) // 2)             # of the right factor: about the square root
    left = sylvester_hadamard(power // columns)
    return None, None, left if transform.base == 1 else torch.kron(_base_hadamard(transform), left), sylvester_hadamard(columns)


def kronecker_factors(matrix: Tensor) -> Factors:
    """A matrix as it is multiplied: signs of rows and two Kronecker factors where it is large and has them, else whole.

    Hadamard matrices whose size is no power of two are products of a small one and Sylvester's, those that are drawn at random
    have signs of rows as well.
    """
    size = matrix.shape[0]
    columns = min(size & -size, 1 << (size.bit_length() - 1) // 2)                # of the right factor: about the square root
    is_large = size > WHOLE and not matrix.is_meta
    while is_large and columns >= LEAST:
        right = sylvester_hadamard(columns).to(matrix.device)
        for signs in (None, matrix[:, 0].sign()):
            plain = matrix if signs is None else matrix * signs.unsqueeze(1)
            left = plain[::columns, ::columns].contiguous()
            if torch.equal(plain[:columns], torch.kron(left[:1], right)) and torch.equal(plain, torch.kron(left, right)):
                return None, signs, left, right
        columns //= 2
    return matrix, None, None, None


def rotation(transform: Transform, tensor: Tensor | None, perm: Tensor | None) -> Tensor:
    """The matrix R [size, size] of a rotation in float64, with its scale."""
    matrix = hadamard_matrix(transform) if tensor is None else stored_rotation(transform, tensor, perm)
    return matrix.double() * scale_of(transform)


def fold_transforms(weight: Tensor, transforms: Sequence[Transform], tensors: Callable[[str], Tensor]) -> Tensor:
    """The weight [N, K] of a layer without transforms that computes what one with them computes, in float64.

    tensors: those of the checkpoint, by name.  Raises FormatError for a norm, whose factor depends on x.
    """
    dense = weight.double()
    for own in reversed([own for own in transforms if own.side == INPUT]):
        dense = _fold_input_transform(dense, own, tensors)
    return _fold_output_transforms(dense, transforms, tensors)


def folded_bias(bias: Tensor, transforms: Sequence[Transform], tensors: Callable[[str], Tensor]) -> Tensor:
    """The bias [N] of that layer, in the dtype of `bias`: transforms of the output apply to it."""
    return _fold_output_transforms(bias.double().unsqueeze(1), transforms, tensors).squeeze(1).to(bias.dtype)


def _fold_input_transform(weight: Tensor, own: Transform, tensors: Callable[[str], Tensor]) -> Tensor:
    """The weight with a transform of its input: W diag(s), or W R^T."""
    _check_linear(own)
    if own.kind == "rotate":
        blocks = weight.reshape(weight.shape[0], -1, own.size)
        return (blocks @ _matrix(own, tensors).to(weight.device).t()).reshape(weight.shape)
    factor = tensors(own.tensor).to(weight.device).double().flatten()
    return weight / factor if own.kind == "divide" else weight * factor


def _fold_output_transforms(weight: Tensor, transforms: Sequence[Transform], tensors: Callable[[str], Tensor]) -> Tensor:
    """The weight with the transforms of its output: diag(s) W, or R^T W."""
    for own in [own for own in transforms if own.side == OUTPUT]:
        if own.kind == "rotate":
            blocks = weight.reshape(-1, own.size, weight.shape[1])
            weight = (_matrix(own, tensors).to(weight.device).t() @ blocks).reshape(weight.shape)
            continue
        _check_linear(own)
        factor = tensors(own.tensor).to(weight.device).double().flatten().unsqueeze(1)
        weight = weight / factor if own.kind == "divide" else weight * factor
    return weight


def _check_linear(own: Transform) -> None:
    if own.kind == "rms_norm":
        raise FormatError(f"no dense weight contains a transform of its {own.side} ({own.label}) by a factor that depends on it")


def _matrix(own: Transform, tensors: Callable[[str], Tensor]) -> Tensor:
    return rotation(own, tensors(own.tensor) if own.tensor else None, tensors(own.perm) if own.perm else None)
