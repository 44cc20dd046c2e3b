"""The synthetic language: documents with exact probabilities, its vocabulary and tokenizer.

The grammar (`dblast.reproduction.language.grammar`) makes each text determine the choices that made it, hence
`Document.log_probability` is the exact log-probability of the text given its kind, and its mean is
the language's entropy: the floor of any model's loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dblast.reproduction.language.grammar import GRAMMAR, PROMPT_STEPS, Writer

KINDS = ("story", "maths", "code", "chat")
PAD, BOS, EOS, MASK = SPECIALS = ("<pad>", "<bos>", "<eos>", "<mask>")
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID, MASK_TOKEN_ID = range(4)
LONGEST_PROMPT = 16
TAGS = {kind: f"<{kind}>" for kind in KINDS}

_WORDS = """
# ( ) * + += , - . / 0 1 10 11 12 13 14 15 16 2 3 4 5 6 7 8 9 : ; = > ? [ ] a add afraid after
again all and anna answer apples are at back bad bag baker basket behind ben berries best big
boat books bot bought box bread build but called can castle cheese coin coins cold cook count
cried crown day def do does dog eggs end farmer fell find finds fire first fish for forest found
friend friends from gate gave get gets give gives go good grow had happy harbour has have he
hello help her him home horse how hunter i if in inside is it item items kind king knife left
limit list long looked loses lost mad many market me mia more my n near net new next night none
not now number numbers of on once one out over please print put ran result return rope sad
sailor school sea set share she shouted small so start storm take thank that the them then there
they times to tom too took total tower tree under user walked was water way we went were what
who with without wolf word words you young
"""
# Token `VOCABULARY[i]` has id i. The order is part of every trained model: append, never reorder.
VOCABULARY = (*SPECIALS, *TAGS.values(), *_WORDS.split())
_IDS = {word: index for index, word in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class Document:
    """One text of the language.

    Attributes:
        kind: one of `KINDS`.
        tokens: the words, from `<bos>` and the kind's tag to `<eos>`.
        log_probability: log-probability of the text given its kind, in nats.
        prompt_length: number of leading tokens that serve as a prompt (at most `LONGEST_PROMPT`).
    """

    kind: str
    tokens: tuple[str, ...]
    log_probability: float
    prompt_length: int


def sample_document(kind: str, generator: random.Random) -> Document:
    """Draw one document of a kind from the grammar.

    Raises:
        ValueError: if `kind` is not one of `KINDS`.
    """
    _check_kind(kind)
    writer = Writer(generator)
    prompt_words = 0
    for number, step in enumerate(GRAMMAR[kind], start=1):
        step(writer)
        if number == PROMPT_STEPS[kind]:
            prompt_words = len(writer.words)
    tokens = (BOS, TAGS[kind], *writer.words, EOS)
    return Document(kind, tokens, writer.log_probability, min(prompt_words + 2, LONGEST_PROMPT))


def documents(n: int, seed: int | str, kinds: Sequence[str] = KINDS) -> list[Document]:
    """Draw `n` documents, kinds taking turns; the same arguments give the same documents.

    Args:
        n: how many, at least 0.
        seed: seeds a generator of its own; no global state is read or changed.
        kinds: the kinds that take turns, at least one.

    Raises:
        ValueError: if `n` is negative, or `kinds` is empty or holds an unknown kind.
    """
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    if not kinds:
        raise ValueError("kinds must name at least one kind")
    for kind in kinds:
        _check_kind(kind)
    generator = random.Random(seed)
    return [sample_document(kinds[i % len(kinds)], generator) for i in range(n)]


def entropy_per_token(n: int = 2000, seed: int = 0, kinds: Sequence[str] = KINDS) -> tuple[float, float]:
    """Entropy of the language per predicted token, estimated from `n` documents.

    Predicted tokens are those after the tag, `<eos>` included; kinds weigh the same.

    Returns:
        The ratio of mean surprise to mean length, in nats per token, and its standard error
        (delta method for a ratio of means).

    Raises:
        ValueError: if `n` is below 2.
    """
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}")
    drawn = documents(n, seed, kinds)
    surprises = [-document.log_probability for document in drawn]
    lengths = [len(document.tokens) - 2 for document in drawn]
    ratio = sum(surprises) / sum(lengths)
    residuals = (s - ratio * length for s, length in zip(surprises, lengths))
    variance = sum(r * r for r in residuals) / (n - 1)
    return ratio, math.sqrt(variance / n) / (sum(lengths) / n)


def encode(tokens: Sequence[str]) -> list[int]:
    """Ids of the tokens.

    Raises:
        ValueError: if a token is not in `VOCABULARY`, or `tokens` is one string, not a sequence.
    """
    if isinstance(tokens, str):
        raise ValueError("encode takes a sequence of tokens; split the text first")
    unknown = [token for token in tokens if token not in _IDS]
    if unknown:
        raise ValueError(f"not in the vocabulary: {', '.join(map(repr, unknown[:5]))}")
    return [_IDS[token] for token in tokens]


def decode(ids: Sequence[int]) -> list[str]:
    """Tokens of the ids; the inverse of `encode`.

    Raises:
        ValueError: if an id is outside the vocabulary.
    """
    for index in ids:
        if not 0 <= index < len(VOCABULARY):
            raise ValueError(f"token id {index} is outside 0..{len(VOCABULARY) - 1}")
    return [VOCABULARY[index] for index in ids]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level Hugging Face tokenizer: splits at whitespace, decodes with single spaces.

    It adds no special tokens by itself, and has no unknown token: a word outside the vocabulary is
    an error (an `Exception` of `tokenizers`; `encode` raises a clearer ValueError).
    """
    core = Tokenizer(models.WordLevel(vocab=dict(_IDS)))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, mask_token=MASK,
        additional_special_tokens=list(TAGS.values()), clean_up_tokenization_spaces=False)


def _check_kind(kind: str) -> None:
    if kind not in TAGS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
