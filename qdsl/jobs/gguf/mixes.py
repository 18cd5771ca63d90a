"""Chooses the types that llama-quantize gives the tensors of a language model, from metadata, names and shapes alone.

The rules and their order are those of llama.cpp's src/llama-quant.cpp (MIT), at ggml-org/llama.cpp@0c1e57098; its tables are in
mixes.toml.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.core.places import table_of
from qdsl.jobs.gguf import QuantizeError


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of types: its number in general.file_type, and the type of most tensors; COPY has neither."""

    name: str
    file_type: int | None
    default: str | None


_TABLE = table_of(__file__)
_NAMES: Mapping[str, list[str]] = _TABLE
_TYPES: Mapping[str, Mapping[str, str]] = _TABLE
MIXES = {**{name: Mix(name, *row) for name, row in _TABLE["mixes"].items()}, "COPY": Mix("COPY", None, None)}
ALIASES = _TYPES["aliases"]
IMATRIX_POWERS: Mapping[str, float] = _TABLE["imatrix_powers"]
OUTPUT = "output.weight"
UNKNOWN = "Q8_0"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class Model:
    """The metadata that the rules use.  heads and heads_kv are those of the first layer."""

    architecture: str
    layers: int
    heads: int
    heads_kv: int
    experts: int = 0

    @property
    def heads_per_kv(self) -> int:
        """Query heads per key and value head; 0 without heads."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp gives the narrow value projections of this size more bits."""
        wide = self.heads == self.heads_kv or self.experts == 8
        is_other = self.architecture.startswith("llama") and wide
        return bool(_TABLE["layers_of_70b"].get(self.architecture) == self.layers) and not is_other


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its name, its shape in torch's order (columns last), and the name of its type."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Number of rows, of all experts."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its type."""
        return self.rows * BY_NAME[self.type].row_bytes(self.columns)

    @property
    def experts(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def rank(self) -> int:
        """Number of dimensions without leading ones."""
        return len(self.shape) - next((i for i, length in enumerate(self.shape) if length != 1), len(self.shape))


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options.  output, embedding: types of output.weight and of the token embedding.  overrides: patterns for
    re.search, and types; the first match counts.  imatrix: whether there is an importance matrix.
    """

    mix: Mix
    imatrix: bool = False
    pure: bool = False
    leave_output: bool = False
    output: str | None = None
    embedding: str | None = None
    overrides: tuple[tuple[re.Pattern[str], str], ...] = ()

    def override(self, name: str) -> str | None:
        """The type of the first pattern that matches a tensor's name; None without one."""
        return next((type for pattern, type in self.overrides if pattern.search(name)), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor's type, and the type of its mix, which differs where rows are not a multiple of its blocks."""

    type: str
    wanted: str


def mix_of(name: str) -> Mix:
    """The mix of a name (any case), or of a number in general.file_type.  Raises QuantizeError."""
    upper = next((mix.name for mix in MIXES.values() if name == str(mix.file_type)), name.upper())
    if (named := MIXES.get(ALIASES.get(upper, upper))) is None:
        near = get_close_matches(upper, [*MIXES, *ALIASES])
        raise QuantizeError(f"no mix '{name}'" + (f"; did you mean {', '.join(near)}?" if near else
                                                     f": expected one of {', '.join(MIXES)}"))
    return named


def mix_for(bits: float) -> Mix:
    """The mix of tensors whose types are chosen for a number of bits: those of which nothing is known get UNKNOWN."""
    return Mix(f"{bits:g} bits", None, UNKNOWN)


def types() -> list[str]:
    """The ggml names of the types that store weights."""
    return [type for type in BY_NAME if type not in _NAMES["no_weights"]]


def type_named(name: str) -> str:
    """The ggml name of a type, in capitals.  Raises QuantizeError for a type that cannot store weights."""
    upper, weights = name.upper(), types()
    if upper not in weights:
        near = get_close_matches(upper, weights, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(weights)}"
        raise QuantizeError(f"no type '{name}' to store weights in; {hint}")
    return upper


def override_of(text: str) -> tuple[re.Pattern[str], str]:
    """Parses PATTERN=TYPE: a regular expression that is searched in names, and a type.  Raises QuantizeError."""
    pattern, equals, type = text.partition("=")
    if not (pattern and equals and type):
        raise QuantizeError(f"a type of tensors is given as PATTERN=TYPE, such as attn_v=q6_k, not '{text}'")
    try:
        return re.compile(pattern, re.IGNORECASE), type_named(type)
    except re.error as error:
        raise QuantizeError(f"'{pattern}' is no regular expression: {error}") from None


def choose(model: Model, tensors: Iterable[Tensor], options: Options) -> dict[str, Choice]:
    """The type of every tensor, in the order in which llama-quantize writes them: by layer, then by name.

    An architecture that the rules do not name gets the common ones.  Raises QuantizeError for rows that no type can hold.
    """
    ordered = sorted(tensors, key=place_of)
    rules = _Rules(model, options, ordered)
    return {tensor.name: rules.choice(tensor) for tensor in ordered}


def requires_imatrix(name: str, type: str, mix: str) -> bool:
    """Whether a tensor would be garbage in a type without an importance matrix."""
    return name != OUTPUT and name not in EMBEDDINGS and (type in _NAMES["imatrix_only"] or (type == "Q2_K" and mix == "Q2_K_S"))


def is_kept(tensor: Tensor, leave_output: bool = False, architecture: str = "") -> bool:
    """Whether a tensor of a language model keeps its type: vectors, norms, routers and other small ones."""
    name = tensor.name
    return tensor.rank < 2 or not name.endswith("weight") or name in _NAMES["kept_names"] or (leave_output and name == OUTPUT) \
        or any(part in name for part in (*_NAMES["kept"], *_TABLE["kept_of"].get(architecture, ())))


def fitting(tensor: Tensor, wanted: str) -> Choice:
    """The wanted type, or one of smaller blocks where rows are not a multiple of its blocks.  Raises QuantizeError."""
    type = wanted
    if tensor.columns % BY_NAME[wanted].elements:
        if wanted not in _TYPES["fallback"] and BY_NAME[wanted].elements > 32:
            raise QuantizeError(f"{_indivisible(tensor, wanted)}, for which there is no type to fall back on")
        type = _TYPES["fallback"].get(wanted, wanted)
        if tensor.columns % BY_NAME[type].elements:
            type = "F16"
    return Choice(type, wanted)


def place_of(tensor: Tensor) -> tuple[int, bytes]:
    """The sort key of a tensor in a file: its block's number, -1 without one, and its name."""
    block = re.match(r"blk\.(\d+)", tensor.name)
    return (int(block[1]) if block else -1, tensor.name.encode())


def _role(name: str) -> str:
    if name == OUTPUT:
        return "output"
    return "embedding" if name in EMBEDDINGS else next((role for part, role in _TYPES["roles"].items() if part in name), "other")


class _Rules:
    """Chooses types; some depend on how many tensors of a role came before."""

    def __init__(self, model: Model, options: Options, tensors: Sequence[Tensor]) -> None:
        self.model, self.options, self.mix = model, options, options.mix.name
        self.is_falcon = model.architecture == "falcon"
        roles = [_role(tensor.name) for tensor in tensors]
        self.values = roles.count("value")
        self.tied = "output" not in roles                        # the embedding is then the output's matrix too
        self.seen: Counter[str] = Counter()

    def choice(self, tensor: Tensor) -> Choice:
        options, default = self.options, self.options.mix.default
        role = _role(tensor.name)
        if default is None or is_kept(tensor, options.leave_output, self.model.architecture):
            return Choice(tensor.type, tensor.type)
        named = options.override(tensor.name)
        if role == "embedding" and options.embedding and not (named and tensor.name == EMBEDDINGS[1]):
            return _exactly(tensor, options.embedding)
        if role == "output" and options.output:
            return _exactly(tensor, options.output)
        if default in TORCH:
            return Choice(default, default)
        return fitting(tensor, named or (default if options.pure else self._mixed(tensor, role, default)))

    def _mixed(self, tensor: Tensor, role: str, default: str) -> str:
        architecture = self.model.architecture
        if any(part in tensor.name for part in _TABLE["at_least_q8"].get(architecture, ())):
            return "Q8_0"
        if role == "output" or (self.tied and role == "embedding"):
            return self.options.output or self._output(tensor, default)
        if self.mix == "MXFP4_MOE":                              # latent attention has stacked matrices that are no experts
            stacked = tensor.experts > 1 and (architecture != "bailingmoe3" or role in ("up", "gate", "down"))
            return "MXFP4" if stacked else "Q8_0"
        if role == "embedding":
            return _TYPES["embedding"].get(self.mix, default)
        counted = self.seen[role]
        type = self._lowest(role, counted) if self.mix in _NAMES["lowest"] else self._usual(tensor.name, role, counted, default)
        self.seen[role] += 1
        return type or default

    def _output(self, tensor: Tensor, default: str) -> str:
        if self.mix == "MXFP4_MOE" or default == "Q8_0" or self.is_falcon or tensor.columns % BY_NAME[default].elements:
            return "Q8_0"
        return "Q5_K" if self.mix in (*_NAMES["lowest"], "IQ3_XXS") else "Q6_K"

    def _lowest(self, role: str, counted: int) -> str | None:
        more = "IQ3_S" if self.mix in _NAMES["two_bits"] else "Q2_K"
        if role == "value":
            return "Q4_K" if self.model.heads_per_kv >= 4 or self.model.experts >= 4 else more
        if role == "key":
            return "Q4_K" if self.model.experts == 8 else None
        if role == "down":
            return more if counted < self.model.layers // 8 else None
        return self._attention_output() if role == "attention output" else None

    def _usual(self, name: str, role: str, counted: int, default: str) -> str | None:
        match role:
            case "value":
                return self._value(counted, default)
            case "key" if self.model.experts == 8:
                return "Q8_0"
            case "key" | "query":
                return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(self.mix)
            case "attention output":
                return self._attention_output()
            case "down" if self.is_falcon:
                return self._falcon_down(self._layer(name, counted)) or self._down(self._layer(name, counted))
            case "down":
                return self._down(self._layer(name, counted))
            case "gate" | "up":
                middle = self.model.layers // 8 <= self._layer(name, counted) < 7 * self.model.layers // 8
                return "IQ3_XXS" if middle and self.mix == "IQ3_XS" else None
        return None

    def _attention_output(self) -> str | None:
        if self.is_falcon and self.mix not in _NAMES["lowest"]:
            return "Q4_K" if self.mix == "Q3_K_L" else None
        if self.model.experts == 8:
            return "Q5_K" if self.mix in _NAMES["attention_output_of_8"] else None
        return _TYPES["attention_output"].get(self.mix)

    def _value(self, place: int, default: str) -> str:
        type = "Q8_0" if self.model.experts == 8 else self._dense_value(place) or default
        return "Q5_K" if self.model.is_70b and type in ("Q3_K", "Q4_K") else type

    def _dense_value(self, place: int) -> str | None:
        narrow = self.model.heads_per_kv >= 4                    # few values for many heads: their bits cost little
        match self.mix:
            case "Q2_K":
                return "Q4_K" if narrow else "Q3_K"
            case "IQ3_XXS":
                return "Q4_K" if narrow else None if self.options.imatrix else "IQ3_S"
            case "Q2_K_S" | "IQ3_XS" | "IQ3_S" if narrow:
                return "Q4_K"
            case "IQ3_M":
                return "Q4_K"
            case "Q3_K_M":
                return "Q5_K" if place < 2 else "Q4_K"
            case "Q3_K_L":
                return "Q5_K"
            case "IQ4_NL" | "IQ4_XS" if narrow:
                return "Q5_K"
            case "Q4_K_M" | "Q5_K_M" if _wants_more(place, self.values):
                return "Q6_K"
            case "Q4_K_S" if place < 4:
                return "Q5_K"
        return None

    def _down(self, layer: int) -> str | None:
        layers, imatrix = self.model.layers, self.options.imatrix
        first, more = layer < layers // 8, _wants_more(layer, layers)
        match self.mix:
            case "Q2_K_S" | "Q4_K_S" if first:
                return "Q4_K" if self.mix == "Q2_K_S" else "Q5_K"
            case "IQ3_XXS" if not imatrix:
                return "Q4_K" if first else "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if layer < layers // 16 else "Q4_K"
            case "IQ3_M" if first or (more and self.model.experts == 8):
                return "Q4_K"
            case "Q4_K_M" | "Q5_K_M" if more:
                return "Q6_K"
            case "IQ4_NL" | "IQ4_XS" if first and not imatrix:
                return "Q5_K"
            case "Q4_0" | "Q5_0" if first and imatrix:           # these go wrong there with an importance matrix
                return "Q4_1" if self.mix == "Q4_0" else "Q5_1"
        return {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K"}.get(self.mix)

    def _falcon_down(self, layer: int) -> str | None:
        """The type of a down projection where falcon differs; None for that of `_down`."""
        first, more = layer < self.model.layers // 16, _wants_more(layer, self.model.layers)
        match self.mix:
            case "Q3_K_M":
                return "Q5_K" if first else "Q4_K" if more else "Q3_K"
            case "Q3_K_L" | "Q4_K_S":
                return "Q4_K"
            case "Q4_K_M":
                return "Q6_K" if first else "Q5_K" if more else "Q4_K"
        return None

    def _layer(self, name: str, counted: int) -> int:
        """The layer of a tensor: with experts from its name, else from how many came before."""
        if self.model.experts <= 1:
            return counted
        block = re.match(r"blk\.(\d+)", name)
        if not block or int(block[1]) >= self.model.layers:
            raise QuantizeError(f"tensor '{name}': its name says no layer from 0 to {self.model.layers - 1}")
        return int(block[1])


def _wants_more(place: int, count: int) -> bool:
    """Whether a place is in the first or last eighth, or every third between them."""
    return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2


def _exactly(tensor: Tensor, type: str) -> Choice:
    if tensor.columns % BY_NAME[type].elements:
        raise QuantizeError(_indivisible(tensor, type))
    return Choice(type, type)


def _indivisible(tensor: Tensor, type: str) -> str:
    return f"tensor '{tensor.name}': rows of {tensor.columns} are no multiple of {BY_NAME[type].elements}, the block of {type}"
