"""What may be given as a prompt or a conversation, in whatever it comes, and how anything else is told."""

from __future__ import annotations

import re
import reprlib

import pytest
from checkpoints import tiny

from specdec import LLM, RequestError, Result, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny(tmp_path_factory.mktemp("tiny")), precision="fp32", self_test=False)


def told(result: Result) -> tuple:
    return result.text, result.tokens, result.finish_reason, result.usage


@pytest.mark.parametrize(
    "prompts",
    [None, 5, {"prompt": "a"}, {"prompt_token_ids": [1]}, b"ab", [b"ab"], [{"role": "user", "content": "a"}], [True], [[1.0]]],
    ids=repr,
)
def test_what_is_no_prompt_is_shown_as_it_was_given(llm: LLM, prompts: object) -> None:
    """The keys of a dict, or the bytes of a text, are no prompts; a conversation belongs to chat."""
    shown = reprlib.repr(prompts[0] if isinstance(prompts, list) else prompts)
    with pytest.raises(RequestError, match=f"a prompt must be text or a list of token ids, got {re.escape(shown)}"):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "a"}, b"a", 5, ["a"]], ids=repr)
def test_what_is_no_conversation_is_shown_as_it_was_given(llm: LLM, messages: object) -> None:
    """Not its letters or keys."""
    shown = reprlib.repr(messages[0] if isinstance(messages, list) else messages)
    with pytest.raises(RequestError, match=f"must be a list of mappings with role and content, got {re.escape(shown)}"):
        llm.chat(messages, GREEDY)
    assert not llm.engine.has_work


def test_an_answer_s_tokens_can_be_a_prompt(llm: LLM) -> None:
    """Tuples of ids are ids; several prompts, and their parameters, may come from anything that can be gone through."""
    seeded = GREEDY.replace(seed=1)
    (first,) = llm.generate("tick tock", seeded)
    (expected,) = llm.generate(list(first.tokens), seeded)
    assert told(llm.generate(first.tokens, seeded)[0]) == told(expected)
    assert told(llm.generate([first.tokens], sampling_params=(seeded for _ in range(1)))[0]) == told(expected)
    both = llm.generate(iter(["tick tock", first.tokens]), seeded)
    assert [told(result) for result in both] == [told(first), told(expected)]
    with llm.stream(first.tokens, seeded) as stream:
        assert "".join(chunk.text for chunk in stream) == expected.text
