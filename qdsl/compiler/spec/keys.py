"""The keys of a spec and what each holds, and what its scalars may be, for messages and documentation."""

KEYS = {
    "format": "the format's name; the generated module is called so",
    "title": "one line that says what it is",
    "source": "where the layout is defined",
    "params": "parameters, each with the list of its values, the default first",
    "weight": "[N, K]: n is the output row, k the input column, the axis that a matmul reduces; a number where it is fixed",
    "dims": "derived extents and constants",
    "tables": "numbers that decode looks up: listed, read from a file, or computed from other tables",
    "fields": "stored values: a type, and a subscript that says which weights share one",
    "decode": "the value of weight [n, k], each operation rounded to float32 in the order written",
    "plus": "side branches that are added to the decoded weight: kinds, and their tensors, which every storage has",
    "encode": "the scheme that chooses the fields for given weights",
    "storage": "storages by name: tensors, and where every bit of a field lies in them",
    "detect": "how a checkpoint of this format is recognised",
    "claims": "facts that the compiler checks: bytes of a record, bits-per-weight",
}
DETECT_KEYS = {
    "gguf": "the name of the GGML type",
    "repacked": "GGML types that hold the same weights in another order, and the storage of each",
    "safetensors": "the dtype of a safetensors file",
    "tensors": "small tensors beside a weight that say its parameters and shape",
    "words": "words that tell storages apart which fit alike",
    "spills": "fields that a producer lost, by the words that it wrote then",
    "bias": "how producers store a bias beside the weight, where that is not row by row",
    "claimed": "storages that are recognised where a header or settings name them, since another one has the same shapes",
    "parts": "weights that one code holds together: the tensor that says where they begin, and the keys of their settings",
}
TENSOR_KEYS = {
    "tensor": "type and axes, such as 'i32[t<K/8 word, n<N]'",
    "run": "for tensors of records: a record holds consecutive elements along this axis, and subscripts are local",
    "record": "the items in storage order, low bits first",
    "optional": "the tensor may be missing; the expression is then its field's value",
    "omit": "true: a quantizer leaves the optional tensor out where its field has that value",
    "aliases": "other names that checkpoints use for the tensor",
    "seen": "the shape that files give the tensor, where it is not that of its axes",
    "ordered": "false: columns in order, in a storage whose `order` moves those of others; true, of a side branch: moved, too",
    "stored": "a reversible operation between what the record packs and what the file holds",
    "stream": "the entropy code that holds the tensor's elements, and what its tensors are called",
    "sections": "in place of a record: what every row holds one after the other, each with its own type, axes and record",
    "regions": "the same for what the whole tensor holds one after the other",
}
SECTION_KEYS = ("tensor", "run", "record")
DECODE = "decode has fields, numbers, + - * / // % 2**e, brackets, levels[q] of a table, abs(x), and round(x, bf16)"
TABLE = "a table is a list of numbers, {file: NAME}, or loops and integers, such as 'i<16: i - 8'"
