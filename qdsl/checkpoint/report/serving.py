"""Checks from headers whether an engine can divide a checkpoint's layers among ranks of tensor parallelism.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qdsl.checkpoint.detect.groups import groups
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.report.shards import RankPiece, ShardError, merged_pieces, packed_layers, piece, row_piece, vocabulary_rows

# How engines divide linear layers, by the last parts of their names; layers of other names are divided by rows.
BY_COLUMNS = {"o_proj", "out_proj", "down_proj", "dense_4h_to_h", "c_proj", "fc2", "wo", "w2", "attention.dense", "to_out.0",
              "shared_expert.down_proj"}
REPLICATED = {"gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "score", "classifier"}
VOCABULARY = {"embed_tokens", "lm_head", "wte", "word_embeddings", "output_projection", "embed_out"}
HEADS = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "qkv_proj": "qkv", "query_key_value": "qkv", "Wqkv": "qkv"}
MERGED = {"gate_up_proj": 2}                                     # parts of equal size, one below the other


@dataclass(frozen=True, slots=True)
class Row:
    """A layer of a checkpoint, how it is divided, and what one rank stores.

    kind: 'row', 'column', 'q', 'kv', 'qkv', 'merged', 'vocabulary', 'replicated', 'expert', or 'group'.  packed:
    'format.storage'.  how: how a rank's weight is computed from the files.  problem: why it cannot be; '' where it can.
    """

    layer: str
    kind: str
    packed: str
    shape: tuple[int, int]
    how: str = ""
    problem: str = ""


def check_layers(folder: Folder, ranks: int, whole_experts: bool = False) -> list[Row]:
    """Every packed layer of a checkpoint, divided among `ranks` ranks.  whole_experts: expert parallelism, single experts are
    not divided.

    Headers do not state the shapes of weights that are coded as a group: these rows have shape (1, N * K).
    """
    rows = [Row(name.removesuffix(".weight"), "group", group.format, (1, count), "decoded and encoded again",
                " ".join(group.errors))
            for group in groups(folder) for name, count in group.parts.items()]
    for name, layer in packed_layers(folder).items():
        kind, pieces = _division(name, layer, folder.config, whole_experts)
        label = f"{layer.format}.{layer.storage}" if layer.format else "?"
        try:
            ways = dict.fromkeys(piece.how for rank in range(ranks) for piece in pieces(ranks, rank))
            rows.append(Row(name, kind, label, layer.shape, "; ".join(ways)))
        except ShardError as error:
            rows.append(Row(name, kind, label, layer.shape, problem=str(error)))
    return rows


def _division(name: str, layer: Layer, config: Mapping[str, Any], whole_experts: bool) -> tuple[
        str, Callable[[int, int], list[RankPiece]]]:
    """The kind of a layer, and a function that returns the pieces of one rank."""
    n, parts = layer.shape[0], name.split(".")
    last = {".".join(parts[-count:]) for count in (1, 2)}
    if whole_experts and "experts" in parts:
        return "expert", lambda ranks, rank: [piece(name, layer, "N", 0, n)]
    if last & VOCABULARY:
        return "vocabulary", lambda ranks, rank: [piece(name, layer, "N", *vocabulary_rows(n, ranks, rank), ranks)]
    if last & REPLICATED:
        return "replicated", lambda ranks, rank: [piece(name, layer, "N", 0, n)]
    if last & BY_COLUMNS:
        return "row", lambda ranks, rank: [row_piece(name, layer, ranks, rank)]
    if parts[-1] in HEADS:
        return HEADS[parts[-1]], lambda ranks, rank: merged_pieces(
            name, [layer], [_heads(whole, heads, ranks) for whole, heads in _head_rows(parts[-1], n, config)], ranks, rank)
    count = MERGED.get(parts[-1], 1)
    return "merged" if count > 1 else "column", lambda ranks, rank: merged_pieces(
        name, [layer], [(n // count // ranks, n // count)] * count, ranks, rank)


def _heads(rows: int, heads: int, ranks: int) -> tuple[int, int]:
    """The rows of one rank and of the whole layer; with fewer heads than ranks, several ranks share a head."""
    return (rows // ranks if heads % ranks == 0 else rows // heads if ranks % heads == 0 else 0), rows


def _head_rows(name: str, rows: int, config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Rows and heads of each part of a layer of q, k and v."""
    text = config.get("text_config", config)                     # where a model of text is one of several
    heads = int(text.get("num_attention_heads") or 1)
    kv = int(text.get("num_key_value_heads") or heads)
    if HEADS[name] != "qkv":
        return [(rows, heads if HEADS[name] == "q" else kv)]
    width = rows // (heads + 2 * kv)
    return [(heads * width, heads), (kv * width, kv), (kv * width, kv)]
