"""Servers that several test modules share. The models are tiny, so that HTTP is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoints import tiny
from serving import Running, serving, words_llm

from specdec.llm import LLM

WORDS = [" one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten", " eleven", " twelve"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder) -> LLM:
    """Real attention, a byte tokenizer, 256 tokens of context; for its weights: a server needs an engine of its own."""
    return LLM(str(tiny_folder), precision="fp32", self_test=False)


@pytest.fixture(scope="session")
def tiny_server(tiny_folder) -> Iterator[Running]:
    with serving(LLM(str(tiny_folder), precision="fp32", self_test=False), model_name="tiny") as running:
        yield running


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """CHAIN that counts in WORDS."""
    return words_llm(tmp_path_factory.mktemp("words"), WORDS)


@pytest.fixture
def still_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, its server answers afterwards, and holds nothing (Q2, Q6)."""
    yield
    for name in ("tiny_server", "small"):
        if name in request.fixturenames:
            server = request.getfixturevalue(name)
            assert server.http.get("/health").status_code == 200
            assert server.ask(prompt="control", max_tokens=3, temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 3
            server.settled()
