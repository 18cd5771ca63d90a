"""Tokenizers of GGUF files, made of the package tokenizers, whose tokens are those of llama.cpp.

The package does what llama.cpp does in another order, so each step says which of llama.cpp's it stands for.  Vocabularies that it
cannot express, as those whose special tokens overlap, are divided in Python: see qdsl.models.transformers.gguf_divide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import shown
from qdsl.models import llama_vocabulary as kinds
from qdsl.models.llama_vocabulary import BASE, SPECIAL, Vocabulary, known_classes, read_vocabulary
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf_divide import (
    DIVIDERS,
    MARK,
    Partition,
    byte_alphabet,
    byte_names,
    lowercase,
    numbers_of,
    word_normalizer,
    word_steps,
)
from qdsl.models.transformers.gguf_text import BackwardSearch, Charsmap

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]               # tokens of single bytes
MARKS = ("\ufdd0", "\ufdd1")                                    # no characters: the place of a special token stands between them
PIECE = "\ufdd2"                                                # begins a token that Python found
STABLE = 16                                                      # so many tokens C++ sorts without moving equal ones
ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")              # that transformers has, too
# Chinese characters, which are words by themselves (llama.cpp's is_chinese_char).
CHINESE = (r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B81F}\x{2B920}-\x{2CEAF}"
           r"\x{2F800}-\x{2FA1F}")
HANGUL, HANGUL_LEAD, SYLLABLES = 0xAC00, 0x1100, 588             # syllables of each of 19 leading consonants


class Inexpressible(LoadError):
    """A vocabulary that the package tokenizers cannot express; the message says why."""


def gguf_tokenizer(path: Path, **options: Any) -> Any:
    """The tokenizer of a GGUF file for transformers.  options: of PreTrainedTokenizerFast.

    Raises LoadError for a vocabulary that llama.cpp does not take.
    """
    with GgufFile(path) as file:
        vocabulary = read_vocabulary(file.metadata, path)
    core, in_python = _core(vocabulary)
    special = {f"{role}_token": vocabulary.tokens[number] for role in ROLES
               if (number := vocabulary.special.get(role)) is not None and vocabulary.kinds[number] & SPECIAL}
    templates = vocabulary.templates
    if templates:
        options.setdefault("chat_template", templates["default"] if list(templates) == ["default"] else dict(templates))
    result = PreTrainedTokenizerFast(**{"tokenizer_object": _Uncopied(core), "model_input_names": ["input_ids", "attention_mask"],
                                        "clean_up_tokenization_spaces": False, **special, **options})
    if in_python or vocabulary.charsmap or vocabulary.model["kind"] == "backward":
        result.save_pretrained = partial(_refuse_save, path)
    return result


def _refuse_save(path: Path, *args: Any, **kwargs: Any) -> None:
    raise LoadError(f"{path}: its tokenizer has parts in Python, which a tokenizer.json does not hold: save that of the original "
                    "model, or load this file again")


class _Uncopied:
    """Stands for a tokenizer of which transformers makes a deep copy: a second one takes 33 MB and 0.1 s for 49,000 tokens."""

    def __init__(self, core: Tokenizer) -> None:
        self._core = core

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._core


def core_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The package's tokenizer of a vocabulary."""
    return _core(vocabulary)[0]


def _core(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """The package's tokenizer, and whether texts are divided in Python."""
    try:
        core, in_python = BUILDERS[vocabulary.model["kind"]](vocabulary), False
        _add_special_tokens(core, vocabulary)
    except Inexpressible:
        core, in_python = divided_in_python(vocabulary), True
    _add_ends(core, vocabulary)
    return core, in_python


def divided_in_python(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer that finds special tokens in Python, and divides texts in Python, too, where the package cannot.

    A text is replaced by its tokens, each behind a mark, or their numbers between marks for special ones.
    """
    kind = vocabulary.model["kind"]
    try:
        bare: Tokenizer = BUILDERS[kind](vocabulary)
        partition = Partition(vocabulary, lambda text: bare.encode(text, add_special_tokens=False).ids)
        decoder, names = bare.decoder, {number: name for name, number in bare.get_vocab().items()}
    except Inexpressible:
        partition, decoder = Partition(vocabulary, DIVIDERS[kind](vocabulary)), DECODERS[kind](vocabulary)
        names = dict(enumerate(byte_names(vocabulary) if kind == "trie" else vocabulary.tokens))
    special = {number for number, own in enumerate(vocabulary.kinds) if own & SPECIAL}
    texts = [f"{MARKS[0]}{number}{MARKS[1]}" if number in special else PIECE + names[number] for number in range(len(names))]
    entries = {vocabulary.tokens[number] if number in special else text: number for number, text in enumerate(texts)}
    core = Tokenizer(models.WordLevel(entries, unk_token=next(iter(entries))))
    core.normalizer = normalizers.Normalizer.custom(_Marked(partition, texts))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{PIECE}[^{PIECE}]*"), "isolated")
    marks = [PIECE, *([MARK] if kind == "trie" or vocabulary.model.get("dna") else [])]
    core.decoder = decoders.Sequence([*(decoders.Replace(mark, "") for mark in marks), decoder])
    core.add_tokens([_added(vocabulary, number, normalized=True) for number in sorted(special)])
    return core


class _Marked:
    """A normalizer of the package: writes the tokens of a text.  texts: how each token is written."""

    def __init__(self, partition: Partition, texts: Sequence[str]) -> None:
        self._partition, self._texts = partition, texts

    def normalize(self, text: Any) -> None:
        """Replace a text of the package."""
        if own := text.normalized:
            text.replace(own, "".join(self._texts[number] for number in self._partition.tokens(own)))


def _added(vocabulary: Vocabulary, number: int, **options: bool) -> AddedToken:
    """A special token of the package."""
    is_hidden = bool(vocabulary.kinds[number] & (kinds.CONTROL | kinds.UNKNOWN))
    return AddedToken(vocabulary.tokens[number], special=is_hidden, **options)


# -- merges of pairs -------------------------------------------------------------------------------------------------------


def _bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Pairs are merged by rank, inside of words, which are of bytes or, for some vocabularies, of characters."""
    pre, numbers, steps = vocabulary.pre, numbers_of(vocabulary), word_steps(vocabulary)
    merges = _merges(vocabulary, numbers)
    if vocabulary.model.get("dna"):
        raise Inexpressible("it divides text between tags into runs of six letters")
    if pre.get("characters"):
        has_bytes = _has_bytes(vocabulary, numbers)
        core = Tokenizer(models.BPE(numbers, merges, byte_fallback=has_bytes))
        characters = "".join(token for token in numbers if len(token) == 1)
        dropped = "" if has_bytes else f"[^{re.escape(characters)}]"
    else:
        core = Tokenizer(models.BPE(numbers, merges, ignore_merges=bool(pre.get("whole_words"))))
        missing = "".join(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - numbers.keys()))
        dropped = f"[{re.escape(missing)}]" if missing else ""
    if dropped:                                                  # what has no token is left out, and nothing is merged across it
        steps.append(pre_tokenizers.Split(Regex(dropped), "removed"))
    core.normalizer, core.pre_tokenizer = word_normalizer(vocabulary), pre_tokenizers.Sequence(steps)
    core.decoder = _bpe_decoder(vocabulary)
    if pre.get("whole_newlines"):
        _check_newlines(core, vocabulary, numbers)
    return core


def _bpe_decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    spaces = [] if vocabulary.pre.get("plain_spaces") else [decoders.Replace(SPACE, " ")]
    return decoders.Sequence([*spaces, decoders.ByteFallback(), decoders.Fuse()]) if vocabulary.pre.get("characters") \
        else decoders.ByteLevel()


def _has_bytes(vocabulary: Vocabulary, numbers: Mapping[str, int]) -> bool:
    """Whether there are tokens of single bytes.  Raises Inexpressible where there are some of them only."""
    count = sum(token in numbers for token in BYTES)
    if count not in (0, len(BYTES)):
        raise Inexpressible(f"it has {count} of the tokens <0x00> to <0xFF>")
    return count > 0


def _merges(vocabulary: Vocabulary, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs to merge; a pair that occurs twice has its first rank.

    Raises LoadError where there are none, Inexpressible for one that is not made of tokens.
    """
    if vocabulary.merges is None:
        if vocabulary.pre.get("needs_no_merges"):
            return []
        raise LoadError(f"{vocabulary.path}: has no tokenizer.ggml.merges, by which tokens are made: {BASE}")
    pairs: dict[tuple[str, str], None] = {}
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)
        left, right = pair = (merge[:cut], merge[cut + 1:]) if cut > 0 else ("", "")
        if left not in numbers or right not in numbers or left + right not in numbers:
            raise Inexpressible(f"tokenizer.ggml.merges has {shown(merge)}, which does not merge two tokens into a third")
        pairs[pair] = None
    return list(pairs)


def _check_newlines(core: Tokenizer, vocabulary: Vocabulary, numbers: Mapping[str, int]) -> None:
    """llama.cpp does not merge newlines that are a token.  Raises Inexpressible where the merges give another result."""
    for token, number in numbers.items():
        if not token.strip("\n") and not vocabulary.kinds[number] & SPECIAL and core.encode(token).ids != [number]:
            raise Inexpressible(f"{len(token)} newlines are a token that the merges do not make")


# -- merges by scores ------------------------------------------------------------------------------------------------------


def _spm(vocabulary: Vocabulary) -> Tokenizer:
    """Neighbours that are a token together are merged, those of the best score first; other characters become bytes."""
    numbers = numbers_of(vocabulary)
    unknown = vocabulary.special.get("unk")
    core = Tokenizer(models.BPE(numbers, _merges_by_score(vocabulary, numbers), byte_fallback=True,
                                unk_token=None if unknown is None else vocabulary.tokens[unknown]))
    has_prefix = vocabulary.flags["add_space_prefix"]            # before each text between special tokens
    first = [normalizers.Prepend(SPACE)] if has_prefix else []
    core.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    core.decoder = _spm_decoder(vocabulary)
    return core


def _spm_decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                              *([decoders.Strip(" ", 1, 0)] if vocabulary.flags["add_space_prefix"] else [])])


def _merges_by_score(vocabulary: Vocabulary, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, the best score first.

    Raises Inexpressible for what ranks of pairs cannot express.
    """
    pairs: list[tuple[int, str, str]] = []
    for token, number in numbers.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                pairs.append((number, left, right))
            elif (left in numbers or cut == 1) and (right in numbers or len(right) == 1) and (
                    SPACE in token or not vocabulary.kinds[number] & SPECIAL):       # which are found before
                raise Inexpressible(f"token {shown(token)} has a character that is no token")
    order = _order_of_ties(pairs, vocabulary)
    pairs.sort(key=lambda pair: (-vocabulary.scores[pair[0]], order.get(pair[0], -1)))
    return [(left, right) for _, left, right in pairs]


def _order_of_ties(pairs: Sequence[tuple[int, str, str]], vocabulary: Vocabulary) -> dict[int, int]:
    """The order of tokens of equal scores that a text may have over each other: llama.cpp merges the first in the text.

    Runs of one character grow from the left, the longest first.  Raises Inexpressible where there is no such order.
    """
    counts = Counter(vocabulary.scores[number] for number in {number for number, _, _ in pairs})
    tied = [pair for pair in pairs if counts[vocabulary.scores[pair[0]]] > 1]
    by_left: dict[tuple[float, str], set[int]] = {}
    for number, left, _ in tied:
        by_left.setdefault((vocabulary.scores[number], left), set()).add(number)
    graph: TopologicalSorter[int] = TopologicalSorter()
    for number, left, right in tied:
        for other in by_left.get((vocabulary.scores[number], right), set()) - {number}:
            text = vocabulary.tokens[other]
            is_longer = len(set(left + text)) == 1 and len(text) > len(left + right)
            graph.add(*((number, other) if is_longer else (other, number)))
    try:
        return {number: place for place, number in enumerate(graph.static_order())}
    except CycleError as error:
        texts = [shown(vocabulary.tokens[number]) for number in error.args[1][:2]]
        raise Inexpressible(f"tokens {' and '.join(texts)} have equal scores") from None


# -- longest matches -------------------------------------------------------------------------------------------------------


def _wordpiece(vocabulary: Vocabulary) -> Tokenizer:
    """Words are divided into their longest tokens from the left; tokens that begin a word begin with a space here."""
    unknown = vocabulary.special.get("unk")
    if unknown is None:
        raise LoadError(f"{vocabulary.path}: has no tokenizer.ggml.unknown_token_id, which stands for unknown words")
    numbers = {" " + token[1:] if token.startswith(SPACE) else token: number for number, token in enumerate(vocabulary.tokens)}
    if len(numbers) < len(vocabulary.tokens):
        raise LoadError(f"{vocabulary.path}: two of tokenizer.ggml.tokens differ only in a space for {SPACE} at the start")
    core = Tokenizer(models.WordPiece(numbers, unk_token=vocabulary.tokens[unknown], max_input_chars_per_word=1 << 30,
                                      continuing_subword_prefix=""))
    core.normalizer = normalizers.Sequence(list(_word_normalizers(vocabulary.flags)))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s+"), "removed"),
        pre_tokenizers.Split(Regex(known_classes(rf"[\p{{P}}$+<=>^`|~{CHINESE}]")), "isolated"),
        pre_tokenizers.Metaspace(" ", "always", split=False)])
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return core


def _word_normalizers(flags: Mapping[str, bool]) -> Iterator[Any]:
    """Drop what is no text, and accents and capitals if so wanted."""
    if flags["strip_accents"]:
        # llama.cpp keeps the first character of a decomposition: of a Korean syllable its leading consonant
        for lead in range(19):
            first = HANGUL + SYLLABLES * lead
            yield normalizers.Replace(Regex(rf"[\x{{{first:X}}}-\x{{{first + SYLLABLES - 1:X}}}]"), chr(HANGUL_LEAD + lead))
        yield normalizers.NFD()
    yield normalizers.Replace(Regex(known_classes(r"[\x{FFFD}[\p{C}&&[\S]&&[\P{Cn}]]]")), "")
    if flags["strip_accents"]:
        yield normalizers.Replace(Regex(known_classes(r"\p{M}")), "")
    if flags["lowercase"]:
        yield from lowercase()


# -- the best sum of scores ------------------------------------------------------------------------------------------------


def _unigram(vocabulary: Vocabulary) -> Tokenizer:
    """The tokens with the best sum of scores."""
    unknown = vocabulary.special.get("unk")
    if unknown is None:
        raise LoadError(f"{vocabulary.path}: has no tokenizer.ggml.unknown_token_id, which stands for unknown characters")
    if wrong := next((token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if (
            kind & kinds.CONTROL and SPACE in token) or (kind & kinds.USER_DEFINED and not token.isascii())), ""):
        raise Inexpressible(f"{shown(wrong)} is a control token with a mark of spaces, or a user's beyond ASCII")
    scores = _unigram_scores(vocabulary)
    matched = kinds.NORMAL | kinds.UNUSED | SPECIAL              # in a text; others, as those of bytes, are marked not to be
    texts = [token if kind & matched else MARKS[0] + token
             for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)]
    core = Tokenizer(models.Unigram(list(zip(texts, scores, strict=True)), unknown, byte_fallback=False))
    core.normalizer = normalizers.Sequence(list(_space_normalizers(vocabulary)))
    core.decoder = _unigram_decoder(vocabulary)
    return core


def _unigram_decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(MARKS[0], ""), decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                              decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def _unigram_scores(vocabulary: Vocabulary) -> list[float]:
    """Scores of tokens: those of users count 0; special ones the least, as they are found before."""
    entries = list(zip(vocabulary.scores, vocabulary.kinds, strict=True))
    least = min((score for score, kind in entries if kind & kinds.NORMAL), default=0.0)
    taken = kinds.NORMAL | kinds.UNUSED
    return [0.0 if kind & kinds.USER_DEFINED else score if kind & taken else least for score, kind in entries]


def _space_normalizers(vocabulary: Vocabulary) -> Iterator[Any]:
    """What SentencePiece's map replaces; spaces at the start, between words and at the end."""
    if vocabulary.charsmap:                                      # normalizers.Precompiled drops combining characters
        try:
            fixed, special = ([token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind & own]
                              for own in (kinds.USER_DEFINED, SPECIAL))
            yield normalizers.Normalizer.custom(Charsmap(vocabulary.charsmap, fixed, special))
        except ValueError as error:
            raise LoadError(f"{vocabulary.path}: tokenizer.ggml.precompiled_charsmap {error}") from error
    if vocabulary.flags["remove_extra_whitespaces"]:
        yield normalizers.Replace(Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Prepend(" ")
    elif vocabulary.flags["add_space_prefix"]:
        yield normalizers.Replace(Regex(r"\A(?= *[^ ])"), " ")
    yield normalizers.Replace(" ", SPACE)


def _backward_search(vocabulary: Vocabulary) -> Tokenizer:
    """The tokens with the best sum of rounded scores, searched from the end of a text."""
    numbers = numbers_of(vocabulary)
    if not _has_bytes(vocabulary, numbers):
        raise LoadError(f"{vocabulary.path}: has no tokens <0x00> to <0xFF>, which stand for unknown characters")
    search = BackwardSearch({token: vocabulary.scores[number] for token, number in numbers.items()
                             if not vocabulary.kinds[number] & kinds.BYTE})
    texts = {token if token in search.scores or vocabulary.kinds[number] & (kinds.BYTE | SPECIAL) else MARKS[0] + token: number
             for token, number in numbers.items()}               # others are marked not to be found
    core = Tokenizer(models.BPE(texts, [], byte_fallback=True, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(search)
    core.decoder = decoders.Sequence([decoders.Replace(MARKS[0], ""), decoders.ByteFallback(), decoders.Fuse()])
    return core


# -- the longest bytes -----------------------------------------------------------------------------------------------------

Trie = dict[str, "Trie"]


def _trie(vocabulary: Vocabulary) -> Tokenizer:
    """At each place the longest token is taken: one pattern of all tokens divides the bytes of a text."""
    texts = [text.rstrip(MARK) for text in byte_names(vocabulary)]
    special = [token for token, text, kind in zip(vocabulary.tokens, texts, vocabulary.kinds, strict=True)
               if kind & SPECIAL and token != text]
    if len({*texts}) < len(texts) or special or not {*byte_alphabet()} <= {*texts} or "" in texts:
        raise Inexpressible("tokens of bytes have to differ, be all single bytes and more, and special ones without escapes")
    core = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token=texts[0]))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                                                  pre_tokenizers.Split(Regex(_longest(texts)), "isolated")])
    core.decoder = decoders.ByteLevel()
    return core


def _longest(texts: Sequence[str]) -> str:
    """A pattern that matches the longest of some texts."""
    root: Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: Trie) -> str:
        ends = [re.escape(own) for own, child in node.items() if own and [*child] == [""]]
        longer = [re.escape(own) + pattern(child) for own, child in node.items() if own and [*child] != [""]]
        options = "|".join([*longer, *([f"[{''.join(ends)}]"] if ends else [])])
        return f"(?:{options})" + ("?" if "" in node else "")
    return pattern(root)


BUILDERS: Mapping[str, Callable[[Vocabulary], Tokenizer]] = {
    "bpe": _bpe, "spm": _spm, "wordpiece": _wordpiece, "unigram": _unigram, "backward": _backward_search,
    "trie": _trie}
DECODERS: Mapping[str, Callable[[Vocabulary], Any]] = {
    "bpe": _bpe_decoder, "spm": _spm_decoder, "unigram": _unigram_decoder, "trie": lambda vocabulary: decoders.ByteLevel()}


# -- special tokens --------------------------------------------------------------------------------------------------------


def _add_special_tokens(core: Tokenizer, vocabulary: Vocabulary) -> None:
    """Special tokens are found before all others."""
    special = {number: token for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
               if kind & SPECIAL}
    is_marked = _mark_special_tokens(core, vocabulary, special)
    core.add_tokens([_added(vocabulary, number, lstrip=number in vocabulary.left and not is_marked,
                            rstrip=number in vocabulary.right and not is_marked, normalized=is_marked) for number in special])


def _mark_special_tokens(core: Tokenizer, vocabulary: Vocabulary, special: Mapping[int, str]) -> bool:
    """Whether special tokens are found in normalized text, in which marks stand for them, those of the longest set first.

    llama.cpp looks for the longest in the whole text first, and the package for the first in the text.  The two differ where a
    token may overlap a longer one behind it.  They also differ in the spaces that a token takes with it: those of ASCII, or all.
    Raises Inexpressible where llama.cpp's order cannot be expressed, LoadError where no two of its builds need to agree.
    """
    sizes = {token: len(token.encode()) for token in special.values()}
    overlaps, kind = list(_overlaps(sizes)), vocabulary.model["kind"]
    is_markable = kind in ("bpe", "spm") and not any(sizes[first] == sizes[second] for first, second in overlaps)
    if len(special) > STABLE and (equal := next(((a, b) for a, b in overlaps if sizes[a] == sizes[b]), None)):
        raise LoadError(f"{vocabulary.path}: special tokens {' and '.join(map(shown, equal))} may overlap and are of one size: "
                        f"which of them llama.cpp finds depends on how it was built: {BASE}")
    if (overlaps and not is_markable) or (vocabulary.left | vocabulary.right and kind not in ("bpe", "spm")):
        raise Inexpressible("special tokens overlap, or take spaces of ASCII with them")
    if not overlaps and not vocabulary.left | vocabulary.right:
        return False
    steps: list[normalizers.Normalizer] = []
    for number, token in sorted(special.items(), key=lambda entry: -sizes[entry[1]]):
        before, after = (r"[\t-\r ]*" if number in own else "" for own in (vocabulary.left, vocabulary.right))
        steps.append(normalizers.Replace(Regex(before + re.escape(token) + after), f"{MARKS[0]}{number}{MARKS[1]}"))
    if kind == "spm" and vocabulary.flags["add_space_prefix"]:
        starts = Regex(rf"\A(?=[^{MARKS[0]}])|(?<={MARKS[1]})(?=[^{MARKS[0]}])")         # of the texts between special tokens
        core.normalizer = normalizers.Sequence([normalizers.Replace(starts, SPACE), normalizers.Replace(" ", SPACE)])
    core.normalizer = normalizers.Sequence([*steps, *([core.normalizer] if core.normalizer else [])])
    return True


def _overlaps(sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of a token and one of the same size or more, of which a text may have the second behind the start of the first."""
    starts: dict[str, list[str]] = {}                            # the tokens that begin with a text
    for token in sizes:
        for cut in range(1, len(token)):
            starts.setdefault(token[:cut], []).append(token)
    for token, size in sizes.items():
        for cut in range(1, len(token)):
            for other in starts.get(token[cut:], ()):
                text = token[:cut] + other
                is_first = not any(text[:stop] in sizes for stop in range(len(token) + 1, len(text) + 1))
                if other != token and sizes[other] >= size and is_first:
                    yield token, other


def _add_ends(core: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens before and after a text.  Raises LoadError for one that the file does not name."""
    flags, is_wordpiece = vocabulary.flags, vocabulary.model["kind"] == "wordpiece"
    if vocabulary.model["kind"] in ("trie", "backward"):         # llama.cpp adds none, whatever the file says
        return
    first = "bos" if flags["add_bos"] or is_wordpiece else None
    last = "sep" if is_wordpiece else "eos" if flags["add_eos"] else None
    roles = [role for role in (first, last) if role]
    if missing := [role for role in roles if role not in vocabulary.special]:
        raise LoadError(f"{vocabulary.path}: tokenizer.ggml.add_{missing[0]}_token is set, but the file does not name the token")
    if roles:
        single = [*([first] if first else []), "$A", *([last] if last else [])]
        pair = [*single, "$B:1", *([last] if last else [])]
        entries = [{"id": role, "ids": [number], "tokens": [vocabulary.tokens[number]]} for role in roles
                   if (number := vocabulary.special[role]) is not None]
        core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=entries)
