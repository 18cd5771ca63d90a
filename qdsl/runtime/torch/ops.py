"""Custom operations for torch.compile, torch.export and similar tools: opaque, with shapes and gradients.

    qdsl::linear       x [..., K], bias [N]    ->  [..., N], by a mode of linear.py
    qdsl::transposed   gradient [..., N]       ->  [..., K], the gradient with respect to x
    qdsl::dequantize                           ->  [N, K]

An operation takes a packed weight as its stored tensors and a text, its WeightKey: format, storage, parameters, shape and the
names of the tensors.  It is one text because torch takes 3 us to pass the parts one by one.  The key names the format and its
spec's digest, so that a saved program finds the same format in another process, and no other format of that name.

torch does not support two things for custom operations, and raises errors: transforms of torch.func inside torch.compile (outside
they work, by _Matmul below), and torch's older vmap, that of is_grads_batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qdsl.runtime.cpu import dense
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.libraries.private_apis import (
    PLAIN,
    gradient_kernel,
    is_autocast_enabled,
    is_batched,
    is_direct,
    is_in_torch_dispatch_mode,
    is_jit_traced,
    is_transformed,
    without_autocast,
)
from qdsl.runtime.libraries.triton import on_device
from qdsl.runtime.torch.branch_products import add_branches
from qdsl.runtime.torch.decode import decode_into
from qdsl.runtime.torch.linear import MATCH_DENSE, as_stored, check_x, gradient_mode, is_quantized, packed_linear, packed_matmul
from qdsl.runtime.weight import eight, order
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat
from qdsl.runtime.weight.products import ProductPlan, run_prepared


class WeightKey(NamedTuple):
    """Description of a packed weight without its tensors.

    names: of the tensors.  finite: whether no code is NaN or infinite.  shape: 'NxK'.
    """

    format: str
    storage: str
    params: str
    names: str
    finite: bool
    stream_info: str
    shape: str

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return int(self.shape.partition("x")[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return int(self.shape.partition("x")[2])

    @property
    def text(self) -> str:
        """The text that operations take; `read_key` is the inverse."""
        return f"{self.format}|{self.storage}|{self.params}|{self.names}|{self.finite}|{self.stream_info}|{self.shape}"


@lru_cache(maxsize=4096)
def read_key(text: str) -> WeightKey:
    """The key of a weight from its text."""
    format, storage, params, names, finite, stream_info, shape = text.split("|")
    return WeightKey(format, storage, params, names, finite == "True", stream_info, shape)


_formats: dict[str, WeightFormat] = {}
_unnamed = count(1)


def register_format(format: WeightFormat, digest: str) -> str:
    """The format's name in operations; without a digest a name that is unique in this process."""
    key = f"{format.name}@{digest or f'unnamed-{next(_unnamed)}'}"
    _formats[key] = format                                       # a second module of the same spec may replace the first
    return key


def weight_key(packed: PackedWeight) -> tuple[list[Tensor], WeightKey]:
    """The tensors and the key of a packed weight, without an index of columns in order and without the shape tensor."""
    spare = {*packed.in_order, packed.layout.shape}
    stored = {name: tensor for name, tensor in packed.tensors.items() if name not in spare}
    tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in stored.values()]
    return tensors, WeightKey(packed.format.key, packed.storage, packed.params_text, " ".join(stored), _is_finite(packed),
                              packed.stream_info, packed.shape_text)


def operation_arguments(packed: PackedWeight) -> tuple[list[Tensor], str]:
    """A packed weight as arguments of operations: its tensors, and the text of its key."""
    tensors, key = weight_key(packed)
    return tensors, key.text


def _is_finite(packed: PackedWeight) -> bool:
    """Whether codes are known to be finite.  Traced tensors cannot be read, so only earlier knowledge counts for them.

    False is always safe: it selects kernels that keep NaN.
    """
    if packed.known_finite is not None or packed.layout.special is None:
        return packed.known_finite is not False
    return is_plain(*packed.tensors.values()) and packed.device.type != "cpu" and packed.finite


@lru_cache(maxsize=1024)
def _format_of(key: str, params: str) -> tuple[WeightFormat, dict[str, int | str]]:
    """A format by its key, and its parameters from their text.  Raises FormatError."""
    if key not in _formats:
        name, _, digest = key.partition("@")
        raise FormatError(f"no format {name} with the spec {digest} is here: import its module, such as qdsl.generated.{name}, "
                          "or load its spec with qdsl.load, before a program that uses it runs")
    format = _formats[key]
    texts = dict(word.split("=") for word in params.split())
    return format, {name: int(text) if isinstance(format.params[name][0], int) else text for name, text in texts.items()}


def packed_weight(tensors: Sequence[Tensor], weight: str) -> PackedWeight:
    """The packed weight from an operation's arguments: its tensors, and the text of its key."""
    key = read_key(weight)
    format, params = _format_of(key.format, key.params)
    return PackedWeight(format, key.storage, dict(zip(key.names.split(), tensors, strict=True)), (key.n, key.k), params,
                        known_finite=key.finite, stream_info=key.stream_info)


# -- calls -------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, mode: str = "") -> Tensor:
    """x [..., K] times the weight's transpose, plus bias [N]: [..., N] in x's dtype, or under autocast in autocast's.

    Differentiable in x and bias, to any order; the weight is not trained.  Sums are float32, or float64 on a CPU for float64 x.
    On a GPU a fused kernel multiplies exact weights.  If runtime/gpu/plan.py chooses to decode or to scale them, and on a CPU,
    weights are first rounded to x's dtype.  mode: of linear.py, see Format.linear; 8-bit x has the gradients of unquantized x.
    Raises FormatError if x does not fit, or if quantize_x needs 8-bit codes.
    """
    if is_direct(x, bias) and (plan := packed.plan) is not None and not packed.has_branch:
        if is_autocast_enabled():
            x = autocast(x)
        out = run_prepared(x, plan, plan.tensors_of(packed.tensors), bias, mode)
        if out is not None:
            return out
    check_x(x, bias, packed.shape, packed.device)
    if is_quantized(mode):
        eight.check_quantize_x(packed)
    x = autocast(x)
    if is_recorded():
        return _operation(x, packed, bias, False, mode)
    if is_differentiated(x, bias):
        result: Tensor = _Matmul.apply(x, bias, packed, False, mode)  # type: ignore[no-untyped-call]
        return result
    return _matmul(x, packed, bias, False, mode)


def dequantize(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] by the operation."""
    result: Tensor = _dequantize(*operation_arguments(packed), dtype)
    return result


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that a dense layer would cast it to; autocast does not change float64."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors have numbers, and no tracing, transform or dispatch mode needs to see the operation.

    Then it is computed without a dispatch, which costs about 10 us, and 40 with gradients.  False for torch.compile, torch.export
    and torch.jit.trace; make_fx, FakeTensorMode and other dispatch modes; tensor subclasses, such as FakeTensor outside its mode;
    and meta tensors.  False is always safe, because the operation computes the same.  (Transforms of torch.func end in plain
    tensors: see _Matmul.)
    """
    if is_recorded() or is_in_torch_dispatch_mode():
        return False
    return all(tensor is None or (type(tensor) in PLAIN and not tensor.is_meta and not is_batched(tensor)) for tensor in tensors)


def is_recorded() -> bool:
    """Whether this call becomes part of a recorded program, with the gradients of the operation."""
    return torch.compiler.is_compiling() or is_jit_traced()


def is_differentiated(x: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd, forward mode or a transform of torch.func must record the product."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return True
    return is_transformed()


def _matmul(x: Tensor, packed: PackedWeight, bias: Tensor | None, transposed: bool, mode: str) -> Tensor:
    """x [..., K] @ w.T + bias, or x [..., N] @ w if transposed; without gradients."""
    if not transposed and (plan := packed.plan) is not None and not packed.has_branch and is_direct(x, bias):
        # Inside a product with gradients.
        out = run_prepared(x, plan, plan.tensors_of(packed.tensors), bias, mode)
        if out is not None:
            return out
    return (compute_product if is_plain(x, bias) else _operation)(x, packed, bias, transposed, mode)


@without_autocast
def compute_product(x: Tensor, packed: PackedWeight, bias: Tensor | None, transposed: bool, mode: str = "") -> Tensor:
    """x [..., K] @ w.T + bias, or x [..., N] @ w if transposed; computed at once, without gradients."""
    is_lossless = packed.layout.streams and packed.device.type == "cpu" and not (transposed or mode)
    if mode == MATCH_DENSE or (is_lossless and not x.is_contiguous()):       # the bits of torch's sums depend on strides
        return _dense_product(x, packed, bias, transposed)
    if packed.has_branch:
        return _product_with_branches(x, packed, bias, transposed, mode)
    with torch.no_grad(), on_device(x.device):                   # stored tensors may require gradients
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()    # works for K = 0
        if not transposed:
            out = packed_linear(*as_stored(rows, packed), bias, mode)
        elif packed.order is None:
            out = packed_matmul(rows, packed)
        else:
            out = packed_matmul(rows, packed.as_stored()).index_select(1, order.inverse_order(packed.order))
        # Autograd refuses in-place changes of a view that was made without gradients, as in `layer(x).add_(y)`.
        return out if x.dim() == 2 else torch.ops.aten._unsafe_view(out, (*x.shape[:-1], packed.shape[transposed]))


def _dense_product(x: Tensor, packed: PackedWeight, bias: Tensor | None, transposed: bool) -> Tensor:
    """The product by torch with the whole decoded weight, in x's dtype: the order of sums depends on the number of rows."""
    with torch.no_grad(), on_device(x.device):
        kept = dense.kept_decoded(packed) if packed.order is None and cpu.has_decoded_copy(x, packed) else None
        weight = decode_into(packed, empty(packed.shape, x.dtype, packed.device)) if kept is None else kept
        if transposed:                                           # as autograd multiplies gradients
            out = x.reshape(-1, packed.shape[0]) @ weight
        else:
            out = functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
        result: Tensor = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], packed.shape[transposed]))     # see `compute_product`
        return result


def _product_with_branches(x: Tensor, packed: PackedWeight, bias: Tensor | None, transposed: bool, mode: str) -> Tensor:
    """The product with a weight that has branches: the product with its base plus those with the branches."""
    base = packed.base
    out = compute_product(x, base, bias, transposed, mode)
    packed.plan, packed.dense = base.plan, base.dense
    with torch.no_grad(), on_device(x.device):
        return add_branches(out, x, packed, transposed, mode)


def _operation(x: Tensor, packed: PackedWeight, bias: Tensor | None, transposed: bool, mode: str) -> Tensor:
    tensors, weight = operation_arguments(packed)
    result: Tensor = _transposed_linear(x, tensors, weight, mode) if transposed else _linear(x, tensors, bias, weight, mode)
    return result


class _Matmul(torch.autograd.Function):
    """The product as an autograd function; it is linear in x, so its gradient is the transposed product and vice versa.

    Gradients ignore the rounding of quantize_x.
    """

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, packed: PackedWeight, transposed: bool, mode: str) -> Tensor:
        return _matmul(x, packed, bias, transposed, mode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bias, ctx.packed, ctx.transposed, mode = inputs
        ctx.mode = gradient_mode(mode)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = _Matmul.apply(gradients[0], None, ctx.packed, not ctx.transposed, ctx.mode)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            to_bias = _bias_gradient(gradients[0], ctx.bias)
        return to_x, to_bias, None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, bias: Tensor | None, *_: None) -> Tensor:
        out: Tensor = _Matmul.apply(x, None, ctx.packed, ctx.transposed, ctx.mode)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, bias: Tensor | None, packed: PackedWeight, transposed: bool,
             mode: str) -> tuple[Tensor, int]:
        """A batch of x is one more axis of x; a batch of biases is added afterwards, in the product's dtype."""
        of_x, of_bias, *_ = in_dims
        x = x.unsqueeze(0) if of_x is None else x.movedim(of_x, 0)
        if bias is None or of_bias is None:
            return _Matmul.apply(x, bias, packed, transposed, mode), 0  # type: ignore[no-untyped-call]
        out: Tensor = _Matmul.apply(x, None, packed, transposed, mode)  # type: ignore[no-untyped-call]
        biases = bias.movedim(of_bias, 0).to(out.dtype)
        return out + biases.view(len(biases), *[1] * (out.dim() - 2), -1), 0


def _bias_gradient(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide.sum(tuple(range(gradient.dim() - 1))).to(dtype) if gradient.dim() > 1 else wide.to(dtype)


# -- operations --------------------------------------------------------------------------------------------------------


# Plans of weights that operations are called with, by the text of the key and the index of the GPU, -1 for a CPU.
_plans: dict[tuple[str, int], ProductPlan] = {}
MOST = 4096                                                      # the most plans to keep


def _computed_linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, weight: str, mode: str = "") -> Tensor:
    described = weight, x.get_device()
    plan = _plans.get(described)
    if plan is not None and len(plan.names) == len(tensors):     # without branches
        out = run_prepared(x, plan, tensors, bias, mode)
        if out is not None:
            return out
    packed = packed_weight(tensors, weight)
    packed.plan = plan if packed.has_branch else None            # the plan belongs to the base
    out = compute_product(x, packed, bias, False, mode)
    if packed.plan is not None and (packed.has_branch or " ".join(packed.plan.names) == read_key(weight).names):
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[described] = packed.plan
    return out


def _computed_transposed(x: Tensor, tensors: Sequence[Tensor], weight: str, mode: str) -> Tensor:
    return compute_product(x, packed_weight(tensors, weight), None, True, mode)


def _computed_dequantize(tensors: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    packed = packed_weight(tensors, weight)
    return decode_into(packed, empty(packed.shape, dtype, packed.device))



def _empty_dequantize(tensors: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    key = read_key(weight)
    return tensors[0].new_empty(key.n, key.k, dtype=dtype)


# -- gradients of the operations in compiled programs ---------------------------------------------------------------------


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the packed tensors and their key for gradients, never the dense weight."""
    _, tensors, bias, ctx.weight, mode = inputs
    ctx.others = 1 + bool(mode)                                  # torch does not count arguments with default values
    ctx.mode = gradient_mode(mode)
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(*tensors)


def _keep_transposed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, ctx.weight, ctx.mode = inputs
    ctx.save_for_backward(*tensors)


def _linear_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    to_x = _transposed_linear(gradient, tensors, ctx.weight, ctx.mode) if ctx.needs_input_grad[0] else None
    to_bias = _bias_gradient(gradient, ctx.bias) if ctx.needs_input_grad[2] else None
    return to_x, [None] * len(tensors), to_bias, *[None] * ctx.others


def _of_transposed(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    return _linear(gradient, tensors, None, ctx.weight, ctx.mode), [None] * len(tensors), None, None


# -- registration by torch.library.Library: its calls cost half of a custom_op's ------------------------------------------


def define_operation(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor],
                     gradients: Callable[..., Any] | None = None, keep: Callable[..., None] | None = None,
                     bias: int | None = None) -> Any:
    """Define an operation of torch.ops.qdsl with a fake function, and with gradients if given; bias: index of that argument.

    If nothing needs gradients or watches the call, it computes at once, without a second dispatch.
    """
    schema = name + torch.library.infer_schema(function, mutates_args=())
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qdsl::{name}", fake, lib=_library)
    operation = getattr(torch.ops.qdsl, name).default
    if gradients is None or keep is None:
        return operation
    watched = gradient_kernel(operation, gradients, keep)

    def differentiated(keys: Any, x: Tensor, *others: Any) -> Tensor:
        if not x.is_meta and is_direct(x, None if bias is None else others[bias - 1]) and not is_autocast_enabled():
            return function(x, *others)
        result: Tensor = watched(keys, x, *others)
        return result

    _library.impl(name, differentiated, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    return operation


_library = torch.library.Library("qdsl", "FRAGMENT")             # type: ignore[no-untyped-call]
_linear = define_operation("linear", _computed_linear,
                 lambda x, tensors, bias, weight, mode="": x.new_empty(*x.shape[:-1], read_key(weight).n),
                 _linear_gradients, _keep_linear, bias=2)
_transposed_linear = define_operation("transposed", _computed_transposed,
                            lambda x, tensors, weight, mode: x.new_empty(*x.shape[:-1], read_key(weight).k),
                            _of_transposed, _keep_transposed)
_dequantize = define_operation("dequantize", _computed_dequantize, _empty_dequantize)
