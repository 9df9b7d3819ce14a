"""Streamed text: whole characters only, stop strings wherever tokens are cut, and all pieces together are the final text."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.models.tokenizer import Tokenizer as TextTokenizer
from specdec.text import Detokenizer, StopStrings, TextStream

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level(*merges: str) -> TextTokenizer:
    """One token per byte, in order of ALPHABET, and one per merge ("a b"); <|end|> is special."""
    pairs = [tuple(merge.split()) for merge in merges]
    vocab = {piece: i for i, piece in enumerate([*ALPHABET, *map("".join, pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return TextTokenizer(backend, special_tokens={}, prefix=(), templates={})


def _sentence_pieces() -> TextTokenizer:
    """SentencePiece's way: a mark for the space, single bytes where nothing else fits, a leading space that vanishes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "a", "b", "\u2581\u2581", "é"]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[("\u2581", "a"), ("\u2581", "\u2581")]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return TextTokenizer(backend, special_tokens={}, prefix=(), templates={})


BYTES = _byte_level("a b", "b c", "Ã ©", "â Ĥ")
PIECES = _sentence_pieces()


def _joined(pieces: list[tuple[int, str]]) -> str:
    return "".join(text for _, text in pieces)


def _feed(
    tokenizer: TextTokenizer, tokens: list[int], stop: list[str], min_tokens: int = 0, prompt: list[int] | None = None
) -> tuple[TextStream, int, list[str]]:
    """Feed tokens until one stops; the stream, the number of tokens taken, and the text given out after each."""
    stream = TextStream(tokenizer, stop, min_tokens, prompt or [])
    taken = []
    for token in tokens:
        stopped = stream.feed(token)
        taken.append(_joined(stream.take()))
        if stopped:
            break
    return stream, len(taken), [*taken, _joined(stream.finish())]


def _plain(tokenizer: TextTokenizer, tokens: list[int], stop: list[str], min_tokens: int) -> tuple[str, int]:
    """The slow way: after each token look at all the text so far, half characters left out."""
    passed = 0
    for n in range(1, len(tokens) + 1):
        text = _complete(tokenizer, tokens[:n])
        if n <= min_tokens:
            passed = len(text)
            continue
        places = [at for s in stop if s and (at := text.find(s, max(0, passed - len(s) + 1))) >= 0]
        if places:
            return text[: min(places)], n
    return tokenizer.decode(tokens), len(tokens)


def _complete(tokenizer: TextTokenizer, tokens: list[int]) -> str:
    """Their text without the beginning of a character that may yet be completed."""
    data = b"".join(map(tokenizer.text_bytes, tokens))
    text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
    return text.removeprefix(" ") if tokenizer.drops_first_space else text


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(data=st.data())
@settings(max_examples=150)
def test_streamed_text_is_the_final_text_and_stops_as_the_slow_way_does(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """Random tokens (so mostly broken characters), random stops: same text, same number of tokens, nothing given out twice."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    word = st.one_of(st.sampled_from(["a", "b", "ab", "ba", " ", "é", "€", "\n"]), st.text("ab é€", min_size=0, max_size=4))
    stop = data.draw(st.lists(word, max_size=3))
    min_tokens = data.draw(st.integers(0, 4))
    text, n = _plain(tokenizer, tokens, stop, min_tokens)
    stream, fed, taken = _feed(tokenizer, tokens, stop, min_tokens)
    assert (stream.text, fed) == (text, n)
    assert "".join(taken) == text


@given(data=st.data())
@settings(max_examples=100)
def test_a_prompt_and_its_streamed_continuation_are_the_text_of_both(data: st.DataObject) -> None:
    """A space that begins a continuation parts it from the prompt; one that begins the whole text is dropped, as ever."""
    token = st.sampled_from([*PIECES.special_ids, *PIECES.encode("a b\u2581aé", add_special=False)])
    prompt, tokens = data.draw(st.lists(token, max_size=3)), data.draw(st.lists(token, max_size=6))
    stream, _, _ = _feed(PIECES, tokens, [], prompt=prompt)
    assert PIECES.decode(prompt) + stream.text == PIECES.decode(prompt + tokens)


def test_special_tokens_alone_are_no_text_to_continue() -> None:
    """After <s> the text begins: its first space is dropped. After a letter, or a space, it is not."""
    (start,) = PIECES.special_ids
    space_a, a = PIECES._backend.token_to_id("\u2581a"), PIECES._backend.token_to_id("a")
    for prompt, text in (([], "a"), ([start], "a"), ([start, a], " a"), ([space_a], " a")):
        assert _feed(PIECES, [space_a], [], prompt=prompt)[0].text == text


@given(text=st.text("abc é€😀", max_size=40), cut=st.integers(1, 5))
@settings(max_examples=80)
def test_no_half_character_is_ever_given_out(text: str, cut: int) -> None:
    """Text in valid UTF-8 streams without a replacement character, however tokens cut its bytes."""
    tokens = BYTES.encode(text, add_special=False)
    detokenizer = Detokenizer(BYTES, [])
    pieces = [detokenizer.push(token) for token in tokens]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == text


@given(text=st.text("ab", max_size=30), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), data=st.data())
@settings(max_examples=80)
def test_a_stop_is_found_however_the_text_is_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    """What is given out before the stop plus nothing after it; without one, all of it. Nothing held that need not be."""
    stops = StopStrings(stop)
    given_out, at = "", 0
    while at < len(text) and not stops.stopped:
        end = data.draw(st.integers(at + 1, len(text)))
        given_out += stops.push(text[at:end], may_stop=True)
        held = text[len(given_out) : end]
        assert stops.stopped or not held or any(s.startswith(held) for s in stop)
        at = end
    if stops.stopped:
        assert given_out == text[: min(i for s in stop if (i := text[:at].find(s)) >= 0)]
    else:
        assert not any(s in text for s in stop)
        assert given_out + stops.release() == text


def test_stop_that_spans_tokens() -> None:
    """The first half of a stop string is not given out before the second half arrives."""
    tokens = BYTES.encode("old paper lantern", add_special=False)
    stream, n, taken = _feed(BYTES, tokens, ["per lan"])
    assert stream.text == "old pa"
    assert n == len("old paper lan")
    assert "".join(taken[:n]) == "old pa"


def test_partial_stop_is_released_at_the_end() -> None:
    """Text that looked like the beginning of a stop string is part of the answer if the answer ends there."""
    stream, _, taken = _feed(BYTES, BYTES.encode("ein zwei drei", add_special=False), [" drei\nZZZZ"])
    assert taken[-1] == " drei"
    assert stream.text == "ein zwei drei"


def test_earliest_of_several_stops_cuts_when_one_token_completes_them() -> None:
    """The token "abc" holds both stops: the text ends before the one that begins first, whatever their order."""
    tokenizer = _byte_level("a b", "ab c")
    (token,) = tokenizer.encode("abc", add_special=False)
    for stop in (["bc", "ab"], ["ab", "bc"]):
        stream, n, _ = _feed(tokenizer, [*tokenizer.encode("x", add_special=False), token, token], stop)
        assert (stream.text, n) == ("x", 2)


def test_empty_stop_strings_are_ignored() -> None:
    """An empty string occurs in every text; it must not end it."""
    stream, _, _ = _feed(BYTES, BYTES.encode("abc", add_special=False), ["", ""])
    assert stream.text == "abc"


def test_min_tokens_passes_over_a_complete_stop_but_not_one_that_is_completed_later() -> None:
    """A stop within the first min_tokens is ordinary text; one that begins there and ends later counts."""
    tokens = BYTES.encode("x.y.z!", add_special=False)
    stream, n, _ = _feed(BYTES, tokens, ["."], min_tokens=2)
    assert (stream.text, n) == ("x.y", 4)
    stream, n, _ = _feed(BYTES, tokens, [".y"], min_tokens=2)
    assert (stream.text, n) == ("x", 3)
    stream, n, _ = _feed(BYTES, tokens, ["."], min_tokens=4)
    assert (stream.text, n) == ("x.y.z!", 6)


def test_half_a_character_at_the_end_shows_as_one_replacement() -> None:
    """A sequence cut inside a character ends with U+FFFD, as decoding all of it at once does; never before the end."""
    tokens = BYTES.encode("1€", add_special=False)[:-1]
    stream, _, taken = _feed(BYTES, tokens, [])
    assert "".join(taken[:-1]) == "1"
    assert stream.text == BYTES.decode(tokens) == "1\ufffd"


def test_pieces_name_the_token_that_released_them() -> None:
    """Held text goes with the token that showed it to be no stop, so that text can be shown by where tokens came from."""
    stream = TextStream(BYTES, ["bcd"], 0, [])
    for token in BYTES.encode("xbcy€", add_special=False):
        stream.feed(token)
    assert stream.take() == [(0, "x"), (2, "bcy"), (4, "€")]


def test_special_tokens_leave_no_text() -> None:
    """A control token in the middle neither shows nor joins what stands around it into a stop by itself."""
    end = BYTES.encode("<|end|>", add_special=False, parse_special=True)
    assert len(end) == 1
    a, b = BYTES.encode("a", add_special=False), BYTES.encode("c", add_special=False)
    stream, _, _ = _feed(BYTES, [*a, *end, *b], [])
    assert stream.text == "ac"
