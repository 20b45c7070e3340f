"""Texts to ragged token ids: special tokens, pairs, truncation, and tokenizers that lack what others have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gar.config import BackboneConfig
from gar.data.task import Split
from gar.data.tokenize import CHUNK, TokenizedSplit, has_pair_form, longest_first, tokenize_split
from gar.errors import UserError
from gar.model.backbone import load_tokenizer
from support.tiny_backbones import (
    DECODERS,
    ENCODERS,
    KINDS,
    SENTENCES,
    Directories,
    make_model,
    word_tokenizer,
)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


def split_of(texts: list[str], pairs: list[str] | None = None) -> Split:
    return Split(texts, np.zeros(len(texts), np.int64), pairs)


def rows(split: TokenizedSplit) -> list[list[int]]:
    return [split.ids[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_single_texts_equal_the_tokenizer_s_own(directories: Directories, kind: str) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories[kind]))
    texts = [*SENTENCES, " ".join(SENTENCES)]
    found = tokenize_split(tokenizer, split_of(texts), 12)
    own = AutoTokenizer.from_pretrained(directories[kind])(texts, truncation=True, max_length=12)
    assert rows(found) == own["input_ids"]
    assert found.lengths.tolist() == [len(row) for row in own["input_ids"]]
    assert max(found.lengths) == 12


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("length", [8, 11, 12, 40])
def test_encoder_pairs_equal_the_tokenizer_s_own(directories: Directories, kind: str, length: int) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories[kind]))
    assert has_pair_form(tokenizer)
    first = [SENTENCES[4], SENTENCES[3], SENTENCES[0], SENTENCES[4]]
    second = [SENTENCES[3], SENTENCES[4], SENTENCES[2], SENTENCES[4]]
    found = tokenize_split(tokenizer, split_of(first, second), length)
    own = AutoTokenizer.from_pretrained(directories[kind])(
        first, second, truncation="longest_first", max_length=length
    )
    assert rows(found) == own["input_ids"]
    if "token_type_ids" in own:
        assert found.types is not None
        assert found.types.tolist() == [t for row in own["token_type_ids"] for t in row]
    else:
        assert found.types is None
    separator = tokenizer.sep_token_id
    for row in rows(found):  # both segments stay
        inner = row[1:-1]
        cut = inner.index(separator)
        assert cut > 0
        assert inner[-1] != separator
        assert tokenizer.pad_token_id not in row


def test_bert_pairs_have_token_types_that_reach_the_model(directories: Directories) -> None:
    model = make_model(directories["bert"]).eval()
    found = tokenize_split(model.tokenizer, split_of(["the cat"], ["a dog ran"]), 24)
    assert found.types is not None
    assert found.types.tolist() == [0] * 4 + [1] * 4
    ids, mask, types = model.tokens([(found, np.array([0]))])
    assert types is not None
    assert types.tolist() == [[0] * 4 + [1] * 4]
    assert not model.prefix(ids, mask, types).base.allclose(model.prefix(ids, mask).base)


@pytest.mark.parametrize("kind", ["distilbert", "deberta-v2", "roberta", "llama"])
def test_token_types_that_a_backbone_does_not_embed_are_left_out(directories: Directories, kind: str) -> None:
    """Tokenizers name them, the model has one type or none: nothing fails, nothing changes."""
    model = make_model(directories[kind]).eval()
    found = tokenize_split(model.tokenizer, split_of(["the cat"]), 24)
    ids, mask, _ = model.tokens([(found, np.array([0]))])
    assert model.prefix(ids, mask, ids * 0 + 1).base.equal(model.prefix(ids, mask).base)


# --------------------------------------------------------------------------------------------------
# Decoders
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
def test_decoder_pairs_are_joined_by_a_newline(directories: Directories, kind: str) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories[kind]))
    assert not has_pair_form(tokenizer)
    found = tokenize_split(tokenizer, split_of(["the cat", "no"], ["a dog", "yes"]), 24)
    assert rows(found) == tokenizer(["the cat\na dog", "no\nyes"])["input_ids"]
    assert found.types is None


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("length", [8, 9, 14])
def test_decoder_pairs_keep_both_segments(directories: Directories, kind: str, length: int) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories[kind]))
    long, short = " ".join(SENTENCES), "yes" if kind != "qwen3" else "it"

    def bare(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    special = tokenizer("no")["input_ids"][: -len(bare("no"))]
    newline = bare("\n")
    assert special == ([] if kind == "qwen3" else [tokenizer.bos_token_id])
    budget = length - len(special)
    found = tokenize_split(tokenizer, split_of([long, short, long], [short, long, long]), length)
    assert found.lengths.tolist() == [length] * 3
    tail = bare(short)
    longer = bare(long)
    half = budget // 2
    expected = [
        longer[: budget - len(newline + tail)] + newline + tail,
        tail + newline + longer[: budget - len(newline + tail)],
        longer[: budget - half] + newline + longer[: half - 1],
    ]
    assert rows(found) == [special + row for row in expected]


def test_a_newline_that_merges_with_the_first_text_is_not_lost() -> None:
    """Byte-level tokenizers of decoders have tokens such as '.\\n'."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *letters, ".Ċ"])}
    backend = Tokenizer(models.BPE(vocabulary, [(".", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    assert len(tokenizer("a.\nb")["input_ids"]) == 3
    found = tokenize_split(tokenizer, split_of(["abcdefghijkl.", "ab."], ["xy", "uvwxyzuvwxyz"]), 8)
    assert [tokenizer.decode(row) for row in rows(found)] == ["abcde\nxy", "ab.\nuvwx"]


def test_special_tokens_at_both_ends_stay() -> None:
    tokenizer = word_tokenizer(["<s>", "<unk>", "</s>"], "<s>", "</s>", bos_token="<s>", eos_token="</s>")
    tokenizer.pad_token = "</s>"
    found = tokenize_split(tokenizer, split_of(["the cat sat on the mat"], ["no"]), 8)
    tokens = ["<s>", "the", "cat", "sat", "on", "\n", "no", "</s>"]
    assert tokenizer.convert_ids_to_tokens(rows(found)[0]) == tokens


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
def test_longest_first_cuts_the_longer_one_token_at_a_time(a: int, b: int, budget: int) -> None:
    keep_a, keep_b = longest_first(a, b, budget)
    x, y = a, b
    while x + y > budget:
        if x > y:
            x -= 1
        else:
            y -= 1
    assert keep_a + keep_b == x + y
    # Where both were cut, an odd budget's last token may fall to either.
    assert abs(keep_a - x) <= 1
    assert min(keep_a, keep_b) == min(x, y)


# --------------------------------------------------------------------------------------------------
# Layout, padding tokens, empty texts
# --------------------------------------------------------------------------------------------------


def test_ragged_layout(directories: Directories) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories["bert"]))
    labels = np.array([1, 0, 2, 0, 1, 1])
    found = tokenize_split(tokenizer, Split(SENTENCES, labels), 24)
    assert (str(found.ids.dtype), str(found.offsets.dtype)) == ("int32", "int64")
    assert found.types is not None
    assert found.types.dtype == np.int8
    assert len(found) == 6
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.ids) == len(found.types)
    assert found.labels is labels
    assert (found.lengths > 0).all()


def test_chunks_leave_no_seam(directories: Directories) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories["bert"]))
    texts = [SENTENCES[i % 6] for i in range(CHUNK + 3)]
    for pairs in (None, texts[::-1]):
        found = tokenize_split(tokenizer, split_of(texts, pairs), 24)
        assert len(found) == CHUNK + 3
        tail = tokenize_split(tokenizer, split_of(texts[-5:], None if pairs is None else pairs[-5:]), 24)
        assert rows(found)[-5:] == rows(tail)


def test_no_examples(directories: Directories) -> None:
    tokenizer = load_tokenizer(BackboneConfig(name=directories["bert"]))
    found = tokenize_split(tokenizer, split_of([]), 24)
    assert (len(found), len(found.ids)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_on_the_right_whatever_the_tokenizer_prefers(
    directories: Directories, kind: str, tmp_path: Path
) -> None:
    saved = AutoTokenizer.from_pretrained(directories[kind], padding_side="left")
    saved.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "left"
    tokenizer = load_tokenizer(BackboneConfig(name=directories[kind]), str(tmp_path))
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token_id is not None
    if kind in DECODERS:
        assert saved.pad_token is None
        assert tokenizer.pad_token == tokenizer.eos_token
        assert len(tokenizer) == len(saved)  # no new token: the embeddings keep their size
    model = make_model(directories[kind])
    ids, mask, _ = model.tokens(
        [(tokenize_split(model.tokenizer, split_of(["the cat sat", "no"]), 24), np.array([0, 1]))]
    )
    assert mask.sum(1).tolist()[0] == mask.shape[1]
    assert mask[1].tolist() == sorted(mask[1].tolist(), reverse=True)
    assert (ids[1][~mask[1]] == model.tokenizer.pad_token_id).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_has_at_least_one_token(directories: Directories, kind: str) -> None:
    model = make_model(directories[kind]).eval()
    found = tokenize_split(model.tokenizer, split_of(["", "the cat", ""]), 24)
    assert (found.lengths >= 1).all()
    if kind == "qwen3":
        assert rows(found)[0] == [model.tokenizer.pad_token_id]
    (empty, _, again) = model.predict("first", ["", "the cat", ""])
    assert empty.probabilities == pytest.approx(again.probabilities)
    assert all(np.isfinite(list(empty.probabilities.values())))


def test_an_empty_text_keeps_token_types_aligned() -> None:
    tokenizer = word_tokenizer(
        ["<s>", "<unk>", "</s>"],
        None,
        None,
        pad_token="</s>",
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )
    found = tokenize_split(tokenizer, split_of(["", "the cat"]), 24)
    assert found.lengths.tolist() == [1, 2]
    assert found.types is not None
    assert found.types.tolist() == [0, 0, 0]


def test_a_tokenizer_with_nothing_to_pad_with_is_refused(directories: Directories, tmp_path: Path) -> None:
    saved = AutoTokenizer.from_pretrained(directories["qwen3"])
    saved.eos_token = None
    saved.save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="no pad, eos or unk token"):
        load_tokenizer(BackboneConfig(name=directories["qwen3"]), str(tmp_path))


def test_an_unreadable_tokenizer_is_refused(directories: Directories, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(BackboneConfig(name=directories["bert"]), str(tmp_path))


def test_long_pairs_give_no_warning(
    directories: Directories, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Text longer than the tokenizer's own limit is expected: it is cut right afterwards."""
    saved = AutoTokenizer.from_pretrained(directories["llama"])
    saved.model_max_length = 10
    saved.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(BackboneConfig(name=directories["llama"]), str(tmp_path))
    tokenize_split(tokenizer, split_of([" ".join(SENTENCES)], [" ".join(SENTENCES)]), 9)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
