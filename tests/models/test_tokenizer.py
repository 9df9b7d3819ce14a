"""Tokenizers from folders and from GGUF metadata: exact splitting, plain control text, one beginning-of-text token."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specdec.models.errors import ModelError, TextError
from specdec.models.pieces import PieceRules
from specdec.models.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = "<|bos|>", "<|eos|>"


def gguf_metadata(pre: str, merges: list[str], /, **values: object) -> dict[str, object]:
    """A byte-level vocabulary, the merges' results, then two control tokens and a user-defined one."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in merges), BOS, EOS, "<tool>"]
    n = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (n - 3), 3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n - 3,
        "tokenizer.ggml.eos_token_id": n - 2,
        **{f"tokenizer.ggml.{name}": value for name, value in values.items()},
    }


def byte_level_folder(folder: Path, config: dict[str, object], backend_change=lambda backend: None) -> Path:
    """A Hugging Face folder with a byte-level tokenizer, BOS and EOS."""
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    backend_change(backend)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS, **config}))
    return folder


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.piece(i).decode() for i in tokenizer.encode(text, add_special=False)]


DIGITS = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ a", "' S", "S a"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("default", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "  a", [" ", " a"]),
        ("smollm", "  1", ["  ", "1"]),
        ("gpt-2", "  1", [" ", " ", "1"]),
        ("llama-bpe", "'Sa", ["'S", "a"]),
        ("gpt-2", "'Sa", ["'", "Sa"]),
    ],
)
def test_gguf_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, pieces: list[str]) -> None:
    """Merges that would join across a cut show where each family cuts: digits, spaces before them, capital contractions."""
    assert pieces_of(Tokenizer.from_gguf(gguf_metadata(pre, DIGITS)), text) == pieces


def test_whole_words_of_the_vocabulary_need_no_merges() -> None:
    """Llama 3 takes a word that is in its vocabulary whole, even where no merge leads to it; GPT-2 does not."""
    for pre, count in (("llama-bpe", 1), ("gpt-2", 3)):
        metadata = gguf_metadata(pre, [])
        metadata["tokenizer.ggml.tokens"].insert(256, "xyz")
        metadata["tokenizer.ggml.token_type"].insert(256, 1)
        assert len(Tokenizer.from_gguf(metadata).encode("xyz", add_special=False)) == count


def test_qwen_text_is_composed_first() -> None:
    """Qwen's tokenizer reads an e and a combining accent as one letter; others keep what they get."""
    for pre, text in (("qwen2", "\u00e9"), ("gpt-2", "e\u0301")):
        tokenizer = Tokenizer.from_gguf(gguf_metadata(pre, []))
        assert tokenizer.decode(tokenizer.encode("e\u0301", add_special=False)) == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "viking"}, ["'viking'", "smollm", "llama-bpe", "Hugging Face folder"]),
        ({"pre": None}, ["None", "gpt-2"]),
        ({"model": "llama"}, ["'llama'", "Hugging Face folder"]),
        ({"merges": None}, ["tokenizer.ggml.merges"]),
        ({"merges": ["ab"]}, ["'ab'"]),
        ({"token_type": [1]}, ["1 token types"]),
        ({"token_type": ["x"]}, ["tokenizer.ggml.token_type must be a list of int"]),
        ({"tokens": [1, 2]}, ["tokenizer.ggml.tokens must be a list of str"]),
        ({"merges": [3]}, ["tokenizer.ggml.merges must be a list of str"]),
        ({"merges": ["nowhere b"]}, ["do not belong together", "nowhere"]),
        ({"bos_token_id": "1"}, ["tokenizer.ggml.bos_token_id must be of type int", "'1'"]),
        ({"eos_token_id": [1]}, ["tokenizer.ggml.eos_token_id must be of type int"]),
        ({"padding_token_id": True}, ["tokenizer.ggml.padding_token_id must be of type int"]),
        ({"add_bos_token": "no"}, ["tokenizer.ggml.add_bos_token must be of type bool"]),
    ],
)
def test_gguf_tokenizers_that_cannot_be_exact_are_refused(change: dict[str, object], words: list[str]) -> None:
    """No guess at an unknown kind or a damaged list: the error names it and what would work."""
    with pytest.raises(ModelError) as error:
        Tokenizer.from_gguf(gguf_metadata("gpt-2", ["a b"], **change))
    assert all(word in str(error.value) for word in words)


def test_gguf_template_must_be_text() -> None:
    """A list where the template should be is damage, not a model without a template."""
    with pytest.raises(ModelError, match=r"tokenizer.chat_template must be of type str"):
        Tokenizer.from_gguf({**gguf_metadata("gpt-2", []), "tokenizer.chat_template": ["x"]})


def test_gguf_tokens_that_the_file_does_not_have() -> None:
    """-1, or an id past the vocabulary, stands for no token; prompts then begin with nothing."""
    for absent in (-1, 2**32 - 1):
        tokenizer = Tokenizer.from_gguf(gguf_metadata("llama-bpe", [], bos_token_id=absent, padding_token_id=absent))
        assert set(tokenizer.special_tokens) == {"eos_token"}
        assert len(tokenizer.encode("a", add_special=True)) == 1


def test_lone_surrogates_are_no_text(tmp_path: Path) -> None:
    """Python strings can hold them, as from file names that are no UTF-8: named with their place, wherever they stand."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, {"chat_template": TEMPLATES[False]}))
    for text, at in (("\ud800", 0), ("abc\udcff", 3), ("😀\udfff" + BOS, 1)):
        with pytest.raises(TextError, match=f"lone surrogate at character {at}, which is no Unicode"):
            tokenizer.encode(text, add_special=False)
        for message in ({"content": text}, {"content": [{"type": "text", "text": text}]}, {"content": "a", "name": text}):
            with pytest.raises(TextError, match=f"lone surrogate at character {at}"):
                tokenizer.chat([{"role": "user", **message}])
        with pytest.raises(TextError, match=f"lone surrogate at character {at}"):
            tokenizer.chat([{"role": "user", "content": "a"}], tools=[{text: 1}])
    assert tokenizer.decode(tokenizer.encode("😀\ufffd\ue000", add_special=False)) == "😀\ufffd\ue000"


@pytest.mark.parametrize(
    ("pre", "flag", "begins"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_gguf_says_whether_prompts_begin_with_bos_or_the_family_does(pre: str, flag: bool | None, begins: bool) -> None:
    """add_bos_token decides where it is written; where it is not, what the family does."""
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = Tokenizer.from_gguf(gguf_metadata(pre, [], **more))
    ids = tokenizer.encode("a", add_special=True)
    assert (ids[0] == tokenizer.bos_id) == begins
    assert len(ids) == 1 + begins


def test_typed_control_text_stays_plain_unless_asked_for() -> None:
    """A user who types an end marker gets its characters, not the token, and the text comes back as it was."""
    tokenizer = Tokenizer.from_gguf(gguf_metadata("gpt-2", ["< |", "| >"], add_bos_token=True))
    text = f"x{EOS}y{BOS}<tool>"
    ids = tokenizer.encode(text, add_special=True)
    assert [i for i in ids if i in tokenizer.special_ids] == [tokenizer.bos_id]
    assert tokenizer.decode(ids) == text
    assert pieces_of(tokenizer, EOS) == ["<|", "e", "o", "s", "|>"]
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert [i for i in parsed if i in tokenizer.special_ids] == [tokenizer.eos_id, tokenizer.bos_id]
    assert tokenizer.decode(parsed) == "xy<tool>"
    assert tokenizer.decode(parsed, skip_special=False) == text
    # A user-defined token that no chat template mentions is ordinary vocabulary.
    assert len(tokenizer.encode("<tool>", add_special=False)) == 1


def test_typed_bos_does_not_replace_the_real_one() -> None:
    """A prompt that begins with the text of BOS still gets the token before it; one that is parsed does not get two."""
    tokenizer = Tokenizer.from_gguf(gguf_metadata("gpt-2", [], add_bos_token=True))
    typed = tokenizer.encode(f"{BOS}a", add_special=True)
    assert typed.count(tokenizer.bos_id) == 1
    assert len(typed) == 1 + len(BOS) + 1
    parsed = tokenizer.encode(f"{BOS}a", add_special=True, parse_special=True)
    assert parsed == [tokenizer.bos_id, *tokenizer.encode("a", add_special=False)]


@given(st.lists(st.integers(0, 258), max_size=30), st.booleans())
@settings(max_examples=150)
def test_decoding_by_bytes_is_the_library_s_own_decoding(ids: list[int], skip: bool) -> None:
    """Random bytes, mostly no UTF-8: U+FFFD in the same number and places as tokenizers gives."""
    assert BYTE_LEVEL.decode(ids, skip_special=skip) == BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)


def sentence_pieces(decoder: object) -> Backend:
    """Words with a mark for the space before them, single bytes for all else."""
    words = ["\u2581the", "\u2581cat", "\u2581", "the", "cat", "s"]
    vocab = [
        ("<unk>", 0.0),
        *((f"<0x{b:02X}>", -20.0) for b in range(256)),
        *((word, -float(i)) for i, word in enumerate(words)),
    ]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.decoder = decoder
    return backend


STRIPPING = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("text", ["the cat", "cats", " the  cat", "caté€", "the\ncat😀 s"])
def test_sentence_pieces_decode_as_the_library_decodes_them(text: str) -> None:
    """A mark is a space, <0x0A> is a byte, and the space that was put before the text is taken away again."""
    backend = sentence_pieces(STRIPPING)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = Tokenizer(backend, special_tokens={}, prefix=(), templates={})
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text == backend.decode(ids)
    assert b"".join(tokenizer.pieces[i] for i in ids) == b" " + text.encode()


def test_a_decoder_that_looks_at_several_tokens_is_refused() -> None:
    """Streaming must give the final text; a decoder for which that cannot be promised is an error, not an approximation."""
    with pytest.raises(ModelError, match="WordPiece"):
        PieceRules.of(sentence_pieces(decoders.WordPiece()))


def test_metaspace_decoder() -> None:
    """The newer way to write the same rules."""
    for scheme, drops in (("always", True), ("first", True), ("never", False)):
        rules = PieceRules.of(sentence_pieces(decoders.Metaspace(prepend_scheme=scheme)))
        assert rules.drops_first_space == drops
        assert rules.to_bytes("\u2581a\u2581") == b" a "


def test_ids_of_a_padded_vocabulary_have_no_text(tmp_path: Path) -> None:
    """A model may have more rows than its tokenizer has tokens; such an id decodes to nothing instead of raising."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, {}))
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode([*tokenizer.encode("a", add_special=False), 300]) == "a"


def test_folder_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    """A tokenizer.json saved with truncation must not shorten prompts without a word."""

    def shorten(backend: Backend) -> None:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)

    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, {}, shorten))
    assert tokenizer.encode("abcdefghijk", add_special=False) == [ALPHABET.index(c) for c in "abcdefghijk"]
    assert len(tokenizer.encode("ab", add_special=False)) == 2


def _adds_bos(backend: Backend) -> None:
    bos, eos = backend.token_to_id(BOS), backend.token_to_id(EOS)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=[(BOS, bos), (EOS, eos)])


TEMPLATES = {True: "{{ bos_token }}{{ messages[0].content }}", False: "{{ messages[0].content }}"}


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
@pytest.mark.parametrize("typed", [True, False])
def test_exactly_one_bos(tmp_path: Path, writes: bool, processor: bool, setting: bool | None, typed: bool) -> None:
    """Whoever adds it, template, post-processor or setting: one in a chat, one in a prompt, and none if nobody does."""
    config = {"chat_template": TEMPLATES[writes], **({} if setting is None else {"add_bos_token": setting})}
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, config, _adds_bos if processor else lambda backend: None))
    adds = processor if setting is None else setting
    content = f"{BOS}x" if typed else "x"
    chat = tokenizer.chat([{"role": "user", "content": content}])
    prompt = tokenizer.encode(content, add_special=True)
    assert chat.count(tokenizer.bos_id) == (writes or adds)
    assert prompt.count(tokenizer.bos_id) == adds
    assert EOS not in tokenizer.decode(prompt, skip_special=False)
    assert tokenizer.decode(chat) == tokenizer.decode(prompt) == content


def test_special_tokens_that_only_the_settings_name(tmp_path: Path) -> None:
    """Objects around texts, tokens listed with their flags, and special_tokens_map.json as the last resort."""

    def more(backend: Backend) -> None:
        backend.add_tokens(["<x>", "<y>"])

    folder = byte_level_folder(
        tmp_path,
        {"eos_token": {"content": "<x>"}, "added_tokens_decoder": {"259": {"content": "<y>", "special": True}}},
        more,
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<y>", "eos_token": EOS}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": "<x>", "pad_token": "<y>"}
    assert {258, 259} <= tokenizer.special_ids
    assert tokenizer.eos_id == 258


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}', "none called default"),
        ("tokenizer_config.json", '{"added_tokens_decoder": null}', "tokenizer_config.json: added_tokens_decoder must be"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"special": true}}}', "added_tokens_decoder must be"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": {"default": "x"}}', "chat_template must be"),
        ("tokenizer_config.json", '{"eos_token": ["a"]}', "eos_token must be"),
        ("tokenizer_config.json", '{"bos_token": {"special": true}}', "bos_token must be"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "add_bos_token must be true or false"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
        ("special_tokens_map.json", '{"eos_token": ["a"]}', "special_tokens_map.json: eos_token must be"),
        ("chat_template.json", '{"chat_template": [3]}', "chat_template.json: chat_template must be"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("additional_chat_templates/rag.jinja", b"\xff", "rag.jinja is not UTF-8"),
    ],
)
def test_damaged_folders_are_told_apart(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    """A missing or damaged file is named in the error, and so is what is wrong in it."""
    folder = byte_level_folder(tmp_path, {})
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if text is not None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(folder)


BYTE_LEVEL = Tokenizer.from_gguf(gguf_metadata("gpt-2", []))


@pytest.mark.model
@pytest.mark.slow
def test_default_model_splits_digits_and_agrees_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model's GGUF vocabulary against an independent conversion of the same file.

    That conversion leaves out the model's own rule that digits are cut off first, so texts where it matters (spaces before a
    digit) are checked against known ids instead.
    """
    from transformers import AutoTokenizer

    from specdec.models.gguf import read
    from specdec.models.source import resolve

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = resolve("smollm2-135m-instruct", revision=None, progress=False).path
    tokenizer = Tokenizer.from_gguf(read(path).metadata)
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in (
        "Hello world",
        "It's naïve — 東京 😀",
        "def f(x):\n\treturn x  # 1",
        "In 1234, we",
        "a\n\n\nb   c",
        "'LL I'll",
    ):
        assert tokenizer.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": "Hi 12"}]
    assert tokenizer.chat(messages) == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode("In 1234", add_special=False) == [788, 216, 33, 34, 35, 36]
    assert tokenizer.encode("  1", add_special=False) == [256, 33]
    assert tokenizer.encode("<|im_end|>", add_special=False, parse_special=True) == [2] == [tokenizer.eos_id]


def test_encoding_lets_other_threads_run() -> None:
    """A server encodes long prompts beside its engine's thread: they must not stop it."""
    tokenizer = Tokenizer.from_gguf(gguf_metadata("gpt-2", ["a b", "c d"]))
    encoder = threading.Thread(target=tokenizer.encode, args=("abcd " * 200_000,), kwargs={"add_special": False})
    ticks = 0
    encoder.start()
    while encoder.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 5
