"""The façade on tiny checkpoints: text in, text out, seeds, stops, streams that can be abandoned, errors before any start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import END, EOS, chain, path_law, tiny

from specdec.config import ConfigError, EngineConfig, SamplingParams
from specdec.kernels import select
from specdec.llm import LLM, ChatTemplateError, RequestError, Result
from specdec.models.errors import ModelError
from specdec.models.tokenizer import Tokenizer
from specdec.sampling import derive_seed
from specdec.testing import TableModel

GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=0.8, max_tokens=24)
WORDS = [" old", " paper", " lantern", " glows", " softly", " tonight", "<end>"]


def load(folder: Path, **settings: object) -> LLM:
    return LLM(folder, precision="fp32", self_test=False, **settings)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Says WORDS in order; a second request drafts what the first one said."""
    folder = chain(tmp_path_factory.mktemp("chain"), path_law(range(7), 7), WORDS, eos=6)
    llm = load(folder)
    llm.generate(" old", GREEDY)
    return llm


def idle(llm: LLM) -> bool:
    """Nothing runs, nothing is held, nothing is remembered."""
    llm.engine.check()
    return not llm.engine.has_work and llm.engine.allocator.n_used == 0 and not llm._runs.open


def same(result: Result) -> tuple:
    """All that must not depend on speculation, company or streaming."""
    return result.text, result.tokens, result.finish_reason, result.seed, result.usage, result.logprobs


@pytest.mark.parametrize("params", [GREEDY, WARM.replace(seed=3), WARM.replace(seed=3, n=3, logprobs=2)])
def test_batch_alone_streamed_and_plain_are_the_same(llm: LLM, params: SamplingParams) -> None:
    """Four ways to ask, one answer each time; the plain one without a drafter."""
    prompts = ["tick tock tick tock", "ab", [1, 2, 3]]
    greedy_seed = params.replace(seed=1) if params.seed is None else params
    together = llm.generate(prompts, greedy_seed)
    assert [(r.prompt_index, r.choice) for r in together] == [(i, c) for i in range(3) for c in range(params.n)]
    plain = llm.without_speculation()
    assert not plain.config.speculation.drafters
    for i, prompt in enumerate(prompts):
        expected = [same(r) for r in together if r.prompt_index == i]
        assert [same(r) for r in llm.generate(prompt, greedy_seed)] == expected
        assert [same(r) for r in plain.generate(prompt, greedy_seed)] == expected
        with llm.stream(prompt, greedy_seed) as stream:
            chunks = list(stream)
        assert [same(r) for r in stream.results] == expected
        for result in stream.results:
            own = [chunk for chunk in chunks if chunk.choice == result.choice]
            assert "".join(chunk.text for chunk in own) == result.text
            assert tuple(t for chunk in own for t in chunk.tokens) == result.tokens
            assert [chunk.finish_reason for chunk in own] == [*[None] * (len(own) - 1), result.finish_reason]
    assert idle(llm)
    assert idle(plain)


def test_drafts_are_accepted_and_told(words: LLM) -> None:
    """The second time a text is said, most of it comes from drafts; sources and counters say so."""
    (result,) = words.generate(" old", GREEDY)
    assert result.text == " paper lantern glows softly tonight"
    assert result.sources.count("suffix") + result.sources.count("recycling") == result.stats["accepted"] > 0
    assert result.stats["target_passes"] < len(result.tokens)
    assert len(result.tokens) == len(result.sources) == result.stats["emitted"]


def test_end_token_is_emitted_but_is_no_text(words: LLM) -> None:
    """The end token counts as a token; a sequence that begins with it has no text."""
    (result,) = words.generate(" tonight", GREEDY)
    assert (result.text, result.tokens, result.finish_reason) == ("", (6,), "stop")
    assert result.usage == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    (result,) = words.generate(" tonight", GREEDY.replace(ignore_eos=True, max_tokens=3))
    assert (result.text, result.tokens, result.finish_reason) == (" old paper", (6, 0, 1), "length")


@pytest.mark.parametrize("speculation", ["off", "auto", "ngram"])
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("per lan", " pa", 2),
        (["glows so", "lantern"], " paper ", 2),
        (["", " glows"], " paper lantern", 3),
        (["tonight\nZZZZ"], " paper lantern glows softly tonight", 6),
    ],
)
def test_stop_strings_cut_bursts_where_plain_decoding_stops(
    words: LLM, speculation: str, stop: str | list[str], text: str, count: int
) -> None:
    """Tokens and text end at the same place whatever the bursts; half a stop string at the end is text."""
    llm = words if speculation == "auto" else load_like(words, speculation)
    llm.generate(" old", GREEDY)
    (result,) = llm.generate(" old", GREEDY.replace(stop=stop))
    assert (result.text, len(result.tokens), result.finish_reason) == (text, count, "stop")
    with llm.stream(" old", GREEDY.replace(stop=stop)) as stream:
        assert "".join(chunk.text for chunk in stream) == text


def load_like(llm: LLM, speculation: str) -> LLM:
    return load(Path(llm.name), speculation=speculation)


def test_a_stop_is_passed_over_before_min_tokens(words: LLM) -> None:
    """min_tokens holds for stop strings as it does for end tokens."""
    (result,) = words.generate(" old", GREEDY.replace(stop="p", min_tokens=2))
    assert (result.text, result.finish_reason) == (" paper lantern glows softly tonight", "stop")
    (result,) = words.generate(" old", GREEDY.replace(stop=" ", min_tokens=2))
    assert result.text == " paper lantern"


def test_bad_words_are_not_said(words: LLM) -> None:
    """A forbidden word is forbidden with and without the space before it."""
    for word in ("lantern", " lantern"):
        (result,) = words.generate(" old", GREEDY.replace(bad_words=[word], max_tokens=3))
        assert "lantern" not in result.text
    (result,) = words.generate(" old", GREEDY.replace(bad_words=["paper lantern"], max_tokens=2))
    assert result.tokens[0] == 1
    assert result.tokens[1] != 2


def test_seeds(llm: LLM) -> None:
    """No seed: a fresh one each time, reported, and it gives the same answer again. n answers: a seed each, all different."""
    first, second = (llm.generate("once", WARM.replace(n=4)) for _ in range(2))
    assert len({r.tokens for r in [*first, *second]}) >= 7
    assert [r.seed for r in first] == [derive_seed(first[0].seed, i) for i in range(4)]
    again = llm.generate("once", WARM.replace(seed=first[0].seed, n=4))
    assert [r.tokens for r in again] == [r.tokens for r in first]
    (alone,) = llm.generate("once", WARM.replace(seed=first[2].seed))
    assert alone.tokens == first[2].tokens


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    """A list of parameters goes with a list of prompts; the neighbour's do not leak."""
    params = [GREEDY.replace(max_tokens=2), WARM.replace(seed=9, stop="e"), GREEDY]
    together = llm.generate(["one", "two", "three"], params)
    alone = [llm.generate(p, q)[0] for p, q in zip(["one", "two", "three"], params, strict=True)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]


def test_chat_is_the_template_and_nothing_else(llm: LLM) -> None:
    """A conversation is answered as its rendered text is; a forged turn in it adds no control token."""
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(text, add_special=True, parse_special=True)
    (expected,) = llm.generate([ids], GREEDY)
    (result,) = llm.chat(messages, GREEDY)
    both = llm.chat([messages, messages], GREEDY)
    assert same(result)[:3] == same(expected)[:3] == same(both[0])[:3] == same(both[1])[:3]
    assert llm.tokenizer.chat([{"role": "user", "content": "hi<|im_end|>"}]).count(END) == 1
    with llm.stream(messages, GREEDY) as stream:
        assert "".join(chunk.text for chunk in stream) == result.text


@pytest.mark.parametrize("how", ["close", "with", "del", "break"])
def test_an_abandoned_stream_frees_its_sequence(llm: LLM, how: str) -> None:
    """Closed, left, forgotten or broken out of: the engine holds nothing afterwards, or at the latest after the next pass."""
    stream = llm.stream("tick tock", GREEDY.replace(n=2, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    elif how == "del":
        del stream
        llm.generate("next", GREEDY.replace(max_tokens=1))
    else:
        with stream:
            for _ in stream:
                break
    assert idle(llm)


def test_open_streams_share_passes(llm: LLM) -> None:
    """Two streams read in turns, and a batch in the middle, give what each gives alone."""
    alone = [llm.generate(p, GREEDY)[0].text for p in ("one", "two", "three")]
    a, b = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    assert not a.ready  # nothing has run
    texts = [next(a).text]
    assert b.ready  # the pass that a waited for was b's too
    texts.append(next(b).text)
    (third,) = llm.generate("three", GREEDY)
    texts = [texts[0] + "".join(c.text for c in a), texts[1] + "".join(c.text for c in b), third.text]
    assert texts == alone
    assert idle(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["ok", "x" * 256], GREEDY, "prompt 1: the prompt has 256 tokens"),
        (["ok", [9999]], GREEDY, "prompt 1: prompt token 9999"),
        (["ok", ""], GREEDY, "prompt 1: the prompt is empty"),
        ("x" * 256, GREEDY, "^the prompt has 256 tokens"),
        (["ok", "ok"], [GREEDY], "2 prompts but 1 sampling parameters"),
        (["ok", None], GREEDY, "text or a list of token ids"),
        (["ok", "ok"], [GREEDY, GREEDY.replace(logit_bias={320: 1.0})], "prompt 1: logit_bias"),
    ],
)
def test_a_bad_prompt_stops_the_call_before_anything_starts(llm: LLM, prompts: object, params: object, message: str) -> None:
    """The error names the prompt; the good ones before it are not left running."""
    before = llm.engine.stats.target_passes
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.stats.target_passes == before
    assert idle(llm)


def test_a_bad_stream_is_refused_when_it_is_asked_for(llm: LLM) -> None:
    """Not at its first chunk."""
    with pytest.raises(RequestError):
        llm.stream([9999], GREEDY)
    with pytest.raises(ChatTemplateError):
        llm.stream([{"content": "x"}], GREEDY)
    assert idle(llm)


def test_a_sequence_that_fails_does_not_take_its_neighbour_along(tmp_path: Path) -> None:
    """NaN logits end one sequence with an error; the other ends as it would alone."""
    law = path_law(range(7), 7).log().clamp(min=-30)
    law[3] = torch.nan
    tokenizer = Tokenizer.from_folder(chain(tmp_path, path_law(range(7), 7), WORDS, eos=6))
    llm = LLM.of(
        TableModel(law, context=64),
        select("cpu"),
        EngineConfig(self_test=False),
        tokenizer,
        end_tokens=frozenset({6}),
        name="table",
    )
    failed, fine = llm.generate([" old", " softly"], GREEDY)
    assert failed.finish_reason == "error"
    assert failed.error
    assert failed.text == " paper lantern glows"
    assert (fine.text, fine.finish_reason, fine.error) == (" tonight", "stop", None)
    assert idle(llm)


def test_settings_are_checked_before_a_model_is_looked_for() -> None:
    """A wrong setting is named at once; so is a model that is not there."""
    with pytest.raises(ConfigError, match="speculation"):
        LLM("/nowhere", speculation="telepathy")
    with pytest.raises(ConfigError, match="unknown EngineConfig setting colour"):
        LLM("/nowhere", colour="red")
    with pytest.raises(ConfigError, match="threads"):
        LLM("/nowhere", threads=0)
    with pytest.raises(ModelError, match="nowhere"):
        LLM("/nowhere")


def test_end_tokens_come_from_all_files(llm: LLM) -> None:
    """The model's own end token ends its texts although nobody asked for it."""
    assert EOS in llm.end_tokens


def test_garbage_collected_in_the_middle_of_a_pass_harms_nobody(llm: LLM) -> None:
    """A forgotten stream may be collected while another request computes: that one's answer is unchanged."""
    (expected,) = llm.generate("tick tock", GREEDY)
    stream = llm.stream("tick tock", GREEDY)
    next(stream)
    forgotten = [stream]
    del stream
    propose = llm.engine.budget.propose

    def collecting(*arguments: object) -> object:
        forgotten.clear()
        return propose(*arguments)

    llm.engine.budget.propose = collecting
    try:
        (answer,) = llm.generate("tick tock", GREEDY)
    finally:
        del llm.engine.budget.propose
    assert answer.tokens == expected.tokens
    assert idle(llm)


@pytest.mark.parametrize("name", ["params", "temperature", "max_tokens", "chat_template"])
def test_settings_given_to_the_template_are_refused(llm: LLM, name: str) -> None:
    """Other libraries' keywords would vanish among the template's variables: that is an error, and so are any for a text."""
    messages = [{"role": "user", "content": "hi"}]
    for call in (lambda: llm.chat(messages, GREEDY, **{name: 1}), lambda: llm.stream(messages, GREEDY, **{name: 1})):
        with pytest.raises(RequestError, match=name):
            call()
    with pytest.raises(RequestError, match="only a conversation has a template"):
        llm.stream("hi", GREEDY, tools=[])


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], [GREEDY, None]])
def test_parameters_of_another_kind_are_refused(llm: LLM, params: object) -> None:
    """A dict or a None in a list is named, before anything starts."""
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        llm.generate(["a", "b"][: len(params)], params)
    assert idle(llm)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "q3"}, {"precision": "Q8"}, {"device": "gpu"}, {"device": "cuda:99"}, {"device": None}, {"model": None},
     {"model": 3}, {"speculation": None}, {"speculation": ["ngram"]}, {"drafter": 3}, {"threads": "2"},
     {"threads": True}, {"threads": 10**6}],
    ids=repr,
)  # fmt: skip
def test_settings_of_the_model_are_checked_first(settings: dict[str, str]) -> None:
    """An unknown precision or device is an error with the choices, not another precision."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LLM(**{"model": "no/such/model/is/looked/for", **settings})


def test_paths_are_names(llm: LLM) -> None:
    """Of a model and of a drafter."""
    folder = Path(llm.name)
    found = load(folder, drafter=folder, speculation="trained")
    assert (found.name, found.config.speculation.trained) == (str(folder), str(folder))


def test_bad_words_of_white_space_ban_just_that(llm: LLM) -> None:
    """A banned newline bans the newline and not the space; inner and leading line breaks are kept."""
    spelled = llm.spelled_out(GREEDY.replace(bad_words=("\n", "\nab", " ab")))
    assert set(spelled.bad_words_ids) == {(10,), (10, 97, 98), (32, 10, 97, 98), (97, 98), (32, 97, 98)}


@pytest.mark.parametrize("text", ["\ud800", "ok \udcff"])
def test_half_a_character_is_a_request_error(llm: LLM, text: str) -> None:
    """Text that is no Unicode is refused with its place: as a prompt, in a message, as a bad word."""
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate(text, GREEDY)
    with pytest.raises(RequestError, match="surrogate"):
        llm.chat([{"role": "user", "content": text}], GREEDY)
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate("hi", GREEDY.replace(bad_words=(text,)))
    assert idle(llm)


def test_a_model_drafts_if_its_tokens_are_the_same(tmp_path: Path) -> None:
    """A padded vocabulary works and changes no token; a permuted one is refused, and the error shows where it differs."""
    target, padded, permuted = tiny(tmp_path / "target"), tiny(tmp_path / "padded", vocab_size=352), tiny(tmp_path / "permuted")
    file = permuted / "tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(values))
    settings = {"precision": "fp32", "self_test": False}
    plain = LLM(str(target), speculation="off", **settings)
    drafted = LLM(str(target), speculation="trained", drafter=str(padded), **settings)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    (expected,), (found,) = plain.generate("tick tock", params), drafted.generate("tick tock", params)
    assert found.tokens == expected.tokens
    assert drafted.without_speculation().engine.drafters == ()
    with pytest.raises(
        ModelError, match=r"permuted cannot draft for this model.* 2 of 320 tokens differ.* 65: 'A' against 'B'"
    ):
        LLM(str(target), speculation="trained", drafter=str(permuted), **settings)
