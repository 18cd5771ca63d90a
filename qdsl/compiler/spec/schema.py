"""Converts strict YAML nodes to a `Spec`: known keys, their contents, and legal names."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from qdsl.compiler.spec import branch_lines, grammar, marked
from qdsl.compiler.spec.detection import check_detection
from qdsl.compiler.spec.keys import DECODE, DETECT_KEYS, KEYS, SECTION_KEYS, TABLE, TENSOR_KEYS
from qdsl.compiler.spec.marked import Mapping, Node, Sequence
from qdsl.compiler.spec.model import Claim, Data, Dim, Field, Param, SectionHolder, Spec, Storage, StoredOperation, Table, Tensor
from qdsl.compiler.spec.reserved import RESERVED
from qdsl.compiler.spec.source import Problem, Problems, Source, Span, SpecError, Text, did_you_mean
from qdsl.compiler.spec.tables import MAX_TABLE, is_number, parse_computed_table, parse_numbers, read_table
from qdsl.compiler.spec.tokens import GrammarError
from qdsl.core.places import check_regular
from qdsl.core.shapes import ANY, is_axis

_T = TypeVar("_T")
_Fixed = tuple[tuple[Text, grammar.Expr], ...]
_Allowed = tuple[tuple[Text, tuple[int | str, ...]], ...]

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,8})\Z")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?\Z")
_LOWER = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_ANY_CASE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\Z")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,127}\Z")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}
_SOFT_KEYWORDS = {"case", "match"}  # the same with every release of Python: 3.12 has 'type', too
_ALIAS = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}\Z")
MAX_FIXED = 1 << 20              # the largest fixed extent of weights
MAX_ENTRIES = 64                # in a mapping or list: far more than any format needs, so that passes stay quick


def load(path: Path | str, name: str | None = None) -> Spec:
    """Read a spec file.  `name` is its name in messages.  Raises SpecError, or OSError if it cannot be read."""
    data = check_regular(Path(path)).read_bytes()
    label = name or str(path)
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = data[:error.start]
        place = Span(Source(label, ""), before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise SpecError([Problem("the file is not UTF-8 text", place)]) from None
    return parse(text, label, Path(path).parent)


def parse(text: str, name: str = "spec.yaml", folder: Path | None = None) -> Spec:
    """Parse a Spec from text; `folder` has its tables' files.  Raises SpecError with all problems of its shape."""
    source = Source(name, text)
    problems = Problems()
    root = marked.read_yaml(source, problems)
    problems.stop()
    if not isinstance(root, Mapping):
        raise SpecError([Problem("a spec is a mapping that begins with 'format: NAME'", Span(source, 1, 1))])
    spec = _Reader(source, problems, folder).spec(root)
    problems.stop()
    assert spec is not None
    return spec


class _Reader:
    def __init__(self, source: Source, problems: Problems, folder: Path | None) -> None:
        self.source = source
        self.folder = folder
        self.problems = problems

    # -- nodes --------------------------------------------------------------------------------------------------------

    def mapping(self, node: Node | None, what: str) -> tuple[tuple[Text, Node], ...]:
        if node is None:
            return ()
        if not isinstance(node, Mapping):
            dashes = ", without dashes in front" if isinstance(node, Sequence) else ""
            self.problems.add(node.span, f"{what} must be a mapping, `key: value`{dashes}")
            return ()
        return self.check_count(node.items, node.span, what)

    def check_count(self, items: tuple[_T, ...], span: Span, what: str, most: int = MAX_ENTRIES) -> tuple[_T, ...]:
        """At most `most` items; adds a problem if there are more."""
        if len(items) > most:
            self.problems.add(span, f"{what} has {len(items)} entries, and at most {most} are allowed")
        return items[:most]

    def items_by_key(self, node: Node, allowed: Iterable[str], what: str) -> dict[str, Node]:
        """A mapping's items by key; adds a problem for each unknown key."""
        nodes: dict[str, Node] = {}
        for key, value in self.mapping(node, what):
            if key.value in allowed:
                nodes[key.value] = value
            else:
                self.problems.add(key.span, f"unknown key '{key.value}' in {what}{did_you_mean(key.value, allowed)}")
        return nodes

    def text(self, node: Node | None, what: str) -> Text | None:
        if node is None or isinstance(node, Text):
            return node
        self.problems.add(node.span, f"{what} is a text")
        return None

    def texts(self, node: Node | None, what: str, most: int = MAX_ENTRIES) -> tuple[Text, ...]:
        """A list of scalars."""
        if node is None:
            return ()
        if not isinstance(node, Sequence):
            self.problems.add(node.span, f"{what} is a list")
            return ()
        items = self.check_count(node.items, node.span, what, most)
        return tuple(text for item in items if (text := self.text(item, what)) is not None)

    def parse_text(self, rule: Callable[[Text], _T], text: Text | None, *notes: str) -> _T | None:
        if text is None:
            return None
        try:
            return rule(text)
        except GrammarError as error:
            self.problems.add(error.problem.span, error.problem.message, *(notes if "expected" in error.problem.message else ()))
            return None

    def is_legal_name(self, text: Text, what: str, form: re.Pattern[str] = _LOWER) -> bool:
        """Whether an author's name may be an identifier of generated code; adds a problem if not."""
        word = text.value
        if not form.match(word):
            rule = "a letter, then letters, digits and '_'" if form is _ANY_CASE else \
                "a small letter, then small letters, digits and '_'"
            near = re.sub(r"\W", "_", word.lower())
            hint = f"; did you mean '{near}'?" if near != word and _LOWER.match(near) else ""
            self.problems.add(text.span, f"{what} name {word!r} is not allowed: {rule}, at most 64{hint}")
        elif keyword.iskeyword(word) or re.fullmatch(r"acc\d+", word) or word in _SOFT_KEYWORDS or word in _DEVICES or \
                (word in RESERVED and what != "format"):
            self.problems.add(text.span, f"{what} name '{word}' is reserved: choose another")
        else:
            return True
        return False

    def values(self, node: Node, what: str) -> tuple[int | str, ...]:
        """Integers and type names of a parameter, from a list or a single scalar."""
        texts = (node,) if isinstance(node, Text) else self.texts(node, what)
        values: list[int | str] = []
        for text in texts:
            if _INTEGER.match(text.value):
                values.append(int(text.value))
            elif _LOWER.match(text.value):
                values.append(text.value)
            else:
                self.problems.add(text.span, f"{what} is an integer or a number type, not '{text.value}'")
                continue
            if values[-1] in values[:-1]:
                self.problems.add(text.span, f"'{text.value}' stands here twice")
        return tuple(values)

    # -- the parts of a spec ------------------------------------------------------------------------------------------

    def spec(self, root: Mapping) -> Spec | None:
        parts = self.items_by_key(root, KEYS, "a spec")
        for key in ("format", "weight", "fields", "decode", "storage"):
            if key not in parts:
                self.problems.add(root.span, f"'{key}' is missing: {KEYS[key]}")
        name = self.text(parts.get("format"), "format")
        if name is not None:
            self.is_legal_name(name, "format")
        decode_text = self.text(parts.get("decode"), "decode")
        decode = self.parse_text(grammar.expression, decode_text, DECODE)
        params = tuple(self.params(parts.get("params")))
        dims = tuple(self.dims(parts.get("dims")))
        tables = tuple(self.tables(parts.get("tables")))
        fields = tuple(self.fields(parts.get("fields")))
        storages = tuple(self.storage(key, node) for key, node in self.named(parts.get("storage"), "storage"))
        if "storage" in parts and not storages:
            self.problems.add(parts["storage"].span, "a format needs at least one storage")
        encode = self.parse_text(grammar.call, self.text(parts.get("encode"), "encode"))
        claims = tuple(self.claims(parts.get("claims")))
        detect = self.rules(self.items_by_key(parts["detect"], DETECT_KEYS, "detect")) if "detect" in parts else {}
        check_detection(self.problems, parts.get("detect"), params, storages)
        tensor = partial(self.tensor, allowed=branch_lines.KEYS)
        plus = branch_lines.read_branches(parts.get("plus"), self.named, tensor, self.problems)
        self.check_unique([*(p.name for p in params), *(d.name for d in dims), *(t.name for t in tables),
                           *(f.name for f in fields)])
        self.check_argument_names(params, tables, storages)
        fixed = self.fixed(parts.get("weight"))
        if name is None or decode is None or decode_text is None:
            return None
        title, origin = (self.text(parts.get(key), key) for key in ("title", "source"))
        return Spec(self.source, name, self.prose_line(title), self.prose_line(origin), params, dims, tables, fields, decode,
                    " ".join(decode_text.value.split()), encode, storages, detect, claims, fixed, plus)

    def fixed(self, node: Node | None) -> dict[str, int]:
        """The extents of the weight that are constants."""
        texts = self.texts(node, "weight")
        words = [text.value for text in texts]
        if node is not None and texts and (len(words) != 2 or not all(
                word == dim or _INTEGER.match(word) for dim, word in zip("NK", words, strict=True))):
            self.problems.add(node.span, "weight is [N, K], the shape of the decoded matrix; packed tensors have theirs under "
                                         "'storage'")
            return {}
        fixed = {dim: int(word) for dim, word in zip("NK", words, strict=False) if word != dim}
        for dim, extent in fixed.items():
            if not 1 <= extent <= MAX_FIXED:
                self.problems.add(texts["NK".index(dim)].span, f"a fixed {dim} is 1 to {MAX_FIXED}, not {extent}")
        return fixed

    def prose_line(self, text: Text | None) -> str:
        """One line of prose for headers; refuses text that could end a docstring or a comment."""
        if text is None:
            return ""
        if len(text.value) > 200 or any(c in text.value for c in "\\\"\n") or not text.value.isprintable():
            self.problems.add(text.span, "one printable line of at most 200 characters, without quotes or backslashes")
        return text.value

    def named(self, node: Node | None, what: str) -> list[tuple[Text, Node]]:
        return [(key, value) for key, value in self.mapping(node, what) if self.is_legal_name(key, what)]

    def check_unique(self, names: Iterable[Text]) -> None:
        seen: dict[str, Span] = {}
        for text in names:
            if text.value in seen:
                self.problems.add(text.span, f"'{text.value}' already names something else", f"at {seen[text.value]}")
            seen.setdefault(text.value, text.span)

    def check_argument_names(self, params: Iterable[Param], tables: Iterable[Table], storages: Iterable[Storage]) -> None:
        """Checks names of parameters and tables: arguments of generated functions and of `encode`, and constants."""
        tensors = {name.value: name.span for storage in storages for tensor in storage.tensors
                   for name in (tensor.name, tensor.stored_name)}
        encode_arguments = ("weight", "importance", "options")
        reserved: list[tuple[Text, str, tuple[str, ...]]] = [(param.name, "parameter", encode_arguments) for param in params]
        reserved += [(table.name, "table", ("format", "spec", "variant")) for table in tables]
        for name, what, words in reserved:
            if name.value in words:
                self.problems.add(name.span, f"{what} name '{name}' is reserved: choose another")
            elif name.value in tensors:
                self.problems.add(name.span, f"'{name}' already names something else", f"at {tensors[name.value]}")

    def params(self, node: Node | None) -> Iterable[Param]:
        for key, value in self.named(node, "parameter"):
            values = self.values(value, "a parameter's value")
            if {*values} - {ANY}:
                yield Param(key, tuple(one for one in values if one != ANY), ANY in values)
            else:
                self.problems.add(key.span, f"parameter '{key}' needs a list of the values it may have")

    def dims(self, node: Node | None) -> Iterable[Dim]:
        for key, value in self.mapping(node, "dims"):
            if self.is_legal_name(key, "dim", _ANY_CASE):
                parsed = self.parse_text(grammar.expression, self.text(value, "a dim"))
                if parsed is not None:
                    yield Dim(key, parsed)

    def tables(self, node: Node | None) -> Iterable[Table]:
        tables: dict[str, Table] = {}
        for key, value in self.named(node, "table"):
            table = self.listed_table(key, value) if isinstance(value, Sequence) else self.table(key, value, tables)
            if table is not None:
                tables[key.value] = table
        return tables.values()

    def table(self, key: Text, value: Node, tables: dict[str, Table]) -> Table | None:
        """A table from a file, or computed from earlier tables."""
        if not isinstance(value, Mapping):
            return self.parse_text(lambda text: parse_computed_table(key, text, tables), self.text(value, "a table"), TABLE)
        node = self.items_by_key(value, ["file"], f"table '{key}'").get("file")
        if node is None:
            self.problems.add(key.span, f"table '{key}' has no file", TABLE)
        return self.parse_text(lambda text: read_table(key, text, self.folder), self.text(node, "file"))

    def listed_table(self, key: Text, value: Node) -> Table | None:
        texts = self.texts(value, f"table '{key}'", MAX_TABLE)
        wrong = next((text for text in texts if not is_number(text.value)), None)
        if wrong is not None:
            self.problems.add(wrong.span, f"a table holds numbers of float32, not '{wrong}'")
        elif not texts:
            self.problems.add(key.span, f"table '{key}' needs a list of numbers")
        else:
            return Table(key, parse_numbers([text.value for text in texts]), (len(texts),))
        return None

    def fields(self, node: Node | None) -> Iterable[Field]:
        for key, value in self.named(node, "field"):
            parsed = self.parse_text(grammar.typed, self.text(value, "a field"))
            if parsed is not None:
                yield Field(key, parsed)

    def claims(self, node: Node | None) -> Iterable[Claim]:
        for key, value in self.mapping(node, "claims"):
            text = self.text(value, "a claim")
            if key.value not in ("bytes", "bits-per-weight"):
                self.problems.add(key.span, f"unknown claim '{key}'{did_you_mean(key.value, ('bytes', 'bits-per-weight'))}")
            elif text is not None and not _NUMBER.match(text.value):
                self.problems.add(text.span, f"a claim is a number, not '{text}'")
            elif text is not None:
                yield Claim(key, float(text.value))

    def storage(self, name: Text, node: Node) -> Storage:
        settings: dict[str, Node] = {}
        tensors: list[Tensor] = []
        shapes: list[Text] = []
        parts = self.mapping(node, f"storage '{name}'")
        if any(key.value in ("tensor", "run") and isinstance(value, Text) for key, value in parts):
            self.problems.add(name.span, f"'{name}' is a tensor where a storage stands: name the storage above its tensors, "
                                         f"`storage: {{plain: {{{name}: ...}}}}`")
            return Storage(name, (), ())
        for key, value in parts:
            if key.value in ("where", "least", "encode") or (key.value in ("transient", "order") and isinstance(value, Text)):
                settings[key.value] = value
            elif self.is_legal_name(key, "tensor", _ANY_CASE):
                read = self.sections_of(key, value)
                read = [self.tensor(key, value)] if read is None else read
                if read and self.holds_shape(read[0]):
                    shapes.append(key)
                else:
                    tensors += read
        if not tensors:
            self.problems.add(name.span, f"storage '{name}' has no tensors")
        for other in shapes[1:]:
            self.problems.add(other.span, f"'{other}' says N and K, as '{shapes[0]}' does")
        where, only = self.where(settings.get("where"))
        order, order_type = self.column_order(settings.get("order"))
        holders = {tensor.inside.name.value: tensor.inside.name for tensor in tensors if tensor.inside is not None}
        self.check_unique([*(tensor.name for tensor in tensors), *holders.values(), *shapes, *([order] if order else [])])
        return Storage(name, where, tuple(tensors), only, shapes[0] if shapes else None,
                       self.encode_options(settings.get("encode")), self.least(settings.get("least")),
                       self.is_transient(settings.get("transient")), order, order_type)

    def where(self, node: Node | None) -> tuple[_Fixed, _Allowed]:
        """The entries of a storage's `where`: expressions of one value, and lists of allowed values of parameters."""
        fixed: list[tuple[Text, grammar.Expr]] = []
        only: list[tuple[Text, tuple[int | str, ...]]] = []
        for name, value in self.mapping(node, "where"):
            if isinstance(value, Sequence):
                only.append((name, self.values(value, "a parameter's value")))
            elif (parsed := self.parse_text(grammar.expression, self.text(value, "a value"))) is not None:
                fixed.append((name, parsed))
        return tuple(fixed), tuple(only)

    def least(self, node: Node | None) -> tuple[tuple[Text, int], ...]:
        """The least extents of dims."""
        numbers = [(dim, self.text(number, "an extent")) for dim, number in self.mapping(node, "least")]
        return tuple((dim, int(text.value)) for dim, text in numbers if text is not None and self.has_digits(text))

    def encode_options(self, node: Node | None) -> tuple[tuple[Text, Text], ...]:
        """Options of the encode scheme that a storage sets."""
        options = [(option, self.text(word, "an option's value")) for option, word in self.mapping(node, "encode")]
        return tuple((option, word) for option, word in options if word is not None)

    def column_order(self, node: Node | None) -> tuple[Text | None, str]:
        """The tensor of an order of columns and its type, i32 unless the spec says `NAME i16`, or `NAME i16 in i32`."""
        order = self.text(node, "order")
        if order is None:
            return None, "i32"
        word, _, kind = order.value.partition(" ")
        if kind not in ("", "i32", "i16", "i16 in i32"):
            self.problems.add(order.span, f"an order of columns is i32, i16 or i16 in i32, not {kind}")
            return None, "i32"
        order = Text(word, order.starts)
        return (order if self.is_legal_name(order, "tensor", _ANY_CASE) else None), kind or "i32"

    def is_transient(self, node: Node | None) -> bool:
        """Whether the storage is never in files."""
        transient = self.text(node, "transient")
        if transient is not None and transient.value != "true":
            self.problems.add(transient.span, "transient is true, for a storage that no file has")
        return transient is not None

    def sections_of(self, name: Text, node: Node) -> list[Tensor] | None:
        keys = {key.value for key, _ in node.items} if isinstance(node, Mapping) else set()
        by_rows = "sections" in keys
        if not by_rows and "regions" not in keys:
            return None
        what = f"tensor '{name}'"
        parts = self.items_by_key(node, ("sections" if by_rows else "regions", "aliases", "seen"), f"{what}, which holds others")
        inside = SectionHolder(name, by_rows, self.aliases(parts.get("aliases")), self.file_extents(parts.get("seen")))
        listed = self.named(parts["sections" if by_rows else "regions"], "tensor")
        if not listed:
            self.problems.add(name.span, f"{what} has no {'sections' if by_rows else 'regions'}")
        return [self.tensor(key, value, inside) for key, value in listed]

    def aliases(self, node: Node | None) -> tuple[Text, ...]:
        """Other names of a tensor."""
        aliases = self.texts(node, "aliases")
        for alias in aliases:
            if not _ALIAS.match(alias.value):
                self.problems.add(alias.span, f"alias {alias.value!r} is not a name of letters, digits, '_' and '.'")
        return aliases

    def file_extents(self, node: Node | None) -> tuple[Text, ...]:
        """The extents of a tensor in files."""
        seen = self.texts(node, "seen")
        for extent in seen:
            if not is_axis(extent.value):
                self.problems.add(extent.span, f"{extent.value!r} is no extent such as 16*ceil(K/128)")
        for extent in [extent for extent in seen if extent.value == "?"][1:]:
            self.problems.add(extent.span, "one extent alone is '?', what the others leave")
        return seen

    def tensor(self, name: Text, node: Node, inside: SectionHolder | None = None, allowed: Iterable[str] = TENSOR_KEYS) -> Tensor:
        what = f"tensor '{name}'"
        parts = self.items_by_key(node, allowed if inside is None else SECTION_KEYS, what)
        if "record" not in parts:
            self.problems.add(name.span, f"{what} has no record: {TENSOR_KEYS['record']}")
        if ("tensor" in parts) == ("run" in parts):
            self.problems.add(name.span, f"{what} needs either 'tensor' or 'run'")
        record_text = self.text(parts.get("record"), "a record") or name
        record = self.parse_text(grammar.parse_record, record_text) if "record" in parts else ()
        omit = self.text(parts.get("omit"), "omit")
        if omit is not None and (omit.value != "true" or "optional" not in parts):
            self.problems.add(omit.span, "omit is true, for an optional tensor")
        ordered = self.text(parts.get("ordered"), "ordered")
        if ordered is not None and ordered.value != (word := "false" if allowed is TENSOR_KEYS else "true"):
            self.problems.add(ordered.span, f"ordered is {word}, for columns " + ("in order" if word == "false" else "by places"))
        stored = parts.get("stored")
        rules = stored.items if isinstance(stored, Sequence) else () if stored is None else (stored,)
        return Tensor(name, self.parse_text(grammar.shape, self.text(parts.get("tensor"), "tensor")),
                      self.text(parts.get("run"), "run"), record or (), record_text,
                      self.parse_text(grammar.expression, self.text(parts.get("optional"), "optional")),
                      self.aliases(parts.get("aliases")),
                      tuple(rule for item in rules if (rule := self.stored_operation(item)) is not None),
                      self.parse_text(grammar.call, self.text(parts.get("stream"), "stream")), omit is not None,
                      self.file_extents(parts.get("seen")), inside, None if ordered is None else ordered.value == "true")

    def has_digits(self, text: Text) -> bool:
        if not _INTEGER.match(text.value) or int(text.value) < 1:
            self.problems.add(text.span, f"the least extent is a positive integer, not '{text}'")
            return False
        return True

    def holds_shape(self, tensor: Tensor) -> bool:
        """Whether a tensor holds N and K themselves: `i64[word]` with the record `N K`."""
        items = [item for line in tensor.record for item in line.items if isinstance(item, grammar.RecordItem)]
        names = [item.field.name for item in items if item.field is not None and not item.index and item.part == "whole"]
        if not {"N", "K"} & set(names):
            return False
        words = tensor.shape is not None and tensor.shape.type.name == "i64" and \
            [axis.digits for axis in tensor.shape.axes] == [(None,)]
        more = (tensor.optional, tensor.aliases, tensor.stored, *(line.loops for line in tensor.record))
        if names != ["N", "K"] or len(items) != 2 or not words or any(more):
            self.problems.add(tensor.record_text.span, "a tensor that says the weight's shape is i64[word], with the record N K")
        return True

    def stored_operation(self, node: Node) -> StoredOperation | None:
        """`{bits: [2, 4], word: word - 5}`: all keys but the last are conditions on parameters."""
        items = self.mapping(node, "a rule of 'stored'")
        if not items:
            return None
        *conditions, (target, node) = items
        value = self.parse_text(grammar.changed, self.text(node, "the stored value"))
        when = tuple((key, self.values(values, "a condition")) for key, values in conditions)
        return None if value is None else StoredOperation(when, target, value)

    def rules(self, items: dict[str, Node]) -> dict[str, Data]:
        return {key: self.plain_data(value) for key, value in items.items()}

    def plain_data(self, node: Node) -> Data:
        """Words, integers, booleans, lists and mappings of them, for detect."""
        if isinstance(node, Sequence):
            return [self.plain_data(item) for item in node.items]
        if isinstance(node, Mapping):
            return self.rules({str(self.plain_data(key)): value for key, value in node.items})
        if _INTEGER.match(node.value):
            return int(node.value)
        if node.value in ("true", "false"):
            return node.value == "true"
        if not _WORD.match(node.value):
            self.problems.add(node.span, f"{node.value!r} is neither an integer nor a word of letters, digits and _ . : / + -")
        return node.value
