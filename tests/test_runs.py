"""Requests that share an engine: from several threads, and past Ctrl-C at any moment, each has the answer of its solo run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny

from specdec import LLM, SamplingParams
from specdec.interrupts import Interrupts

PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
PROMPTS = [f"tick tock {i} tick" for i in range(6)]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C as at a terminal: shells have it ignored by what they start in the background, which may be these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    """Few places and a small pool, so that sequences wait and are preempted."""
    return LLM(str(tiny(tmp_path)), precision="fp32", self_test=False, max_sequences=3, max_len=160, kv_tokens=192)


def at_rest(llm: LLM) -> bool:
    llm.engine.check()
    return not llm.engine.has_work and llm.engine.allocator.n_used == 0 and not llm._runs.open


def test_several_threads_may_use_one_llm(llm: LLM) -> None:
    """Whole answers, streams and one that is given up, at once: the tokens of each alone."""
    expected = {prompt: llm.generate(prompt, PARAMS)[0].tokens for prompt in PROMPTS}

    def whole(prompt: str) -> tuple[int, ...]:
        return llm.generate(prompt, PARAMS)[0].tokens

    def streamed(prompt: str) -> tuple[int, ...]:
        with llm.stream(prompt, PARAMS) as stream:
            return tuple(token for chunk in stream for token in chunk.tokens)

    def given_up(prompt: str) -> tuple[int, ...]:
        with llm.stream(prompt, PARAMS) as stream:
            begun = next(stream).tokens
        return (*begun, *expected[prompt][len(begun) :])

    ways: list[Callable[[str], tuple[int, ...]]] = [whole, streamed, given_up]
    jobs = [(ways[i % 3], prompt) for i in range(3) for prompt in PROMPTS for _ in range(2)]
    with ThreadPoolExecutor(6) as pool:
        for (_, prompt), tokens in zip(jobs, pool.map(lambda job: job[0](job[1]), jobs), strict=True):
            assert tokens == expected[prompt]
    assert at_rest(llm)


PLACES = {
    "schedule": lambda llm: (llm.engine.scheduler, "_admit"),
    "reserve": lambda llm: (llm.engine.scheduler, "_reserve"),
    "draft": lambda llm: (llm.engine.budget, "propose"),
    "forward": lambda llm: (llm.engine._runner, "forward"),
    "judge": lambda llm: (llm.engine.acceptance, "judge"),
    "commit": lambda llm: (llm.engine._committer, "commit"),
    "cache": lambda llm: (llm.engine.cache, "enter"),
    "observe": lambda llm: (llm.engine.budget, "observe"),
    "release": lambda llm: (llm.engine, "_release"),
    "add": lambda llm: (llm.engine, "add"),
}  # fmt: skip
"""Where a call, and a pass, have done some of what they do."""


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_never_breaks_off_a_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The call ends; an open stream, and later calls, are as if it had never been made."""
    expected = [result.tokens for result in llm.generate(PROMPTS, PARAMS)]
    for press_at in (1, 2, 5):
        stream = llm.stream(PROMPTS[0], PARAMS)
        begun = next(stream).tokens
        owner, name = PLACES[place](llm)
        inner, calls = getattr(owner, name), []

        def pressed(*given: Any, inner: Any = inner, calls: list[int] = calls, at: int = press_at, **named: Any) -> Any:
            done = inner(*given, **named)
            calls.append(1)
            if len(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, PARAMS)
        assert (*begun, *(token for chunk in stream for token in chunk.tokens)) == expected[0]
        assert at_rest(llm)
        assert [result.tokens for result in llm.generate(PROMPTS, PARAMS)] == expected


def test_a_handler_of_ones_own_is_called_and_the_answer_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that only takes notice of the signal gets its answer in full."""
    (expected,) = llm.generate(PROMPTS[0], PARAMS)
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        forward = llm.engine._runner.forward

        def pressing(step: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return forward(step)

        monkeypatch.setattr(llm.engine._runner, "forward", pressing)
        (found,) = llm.generate(PROMPTS[0], PARAMS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.tokens == expected.tokens
    assert len(seen) == found.stats["target_passes"]


def test_interrupts_are_put_back_as_they_were() -> None:
    """Whatever happens inside, blocks within blocks, on other threads, and where nobody handles the signal."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupts(), Interrupts():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before
    reached = []

    def within() -> None:
        with Interrupts() as outer:
            with Interrupts():
                signal.raise_signal(signal.SIGINT)
            reached.append("the end of the inner block")
            outer.deliver()
            reached.append("too far")

    with pytest.raises(KeyboardInterrupt):
        within()
    assert reached == ["the end of the inner block"]
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere() -> None:
        with Interrupts() as interrupts:
            interrupts.deliver()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
