"""The library's face: text in, text out.

It brings together what a model needs to answer: its files, an engine, the encoder of requests and the runs that come of
them. One ``LLM`` serves one thread at a time; several prompts, and several open streams, share its passes.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, TypeAlias

import torch

from specdec import kernels as arithmetic
from specdec.config import (
    AUTO,
    DEFAULT_MODEL,
    ConfigError,
    EngineConfig,
    Precision,
    SamplingParams,
    SpeculationConfig,
    check_precision,
    from_dict,
)
from specdec.encoding import Encoder, Message, TextTokenizer, is_conversation, is_ids
from specdec.engine import Engine
from specdec.kernels.base import Kernels
from specdec.kv import codec
from specdec.models.base import Model
from specdec.models.load import end_tokens, load_model, load_tokenizer
from specdec.models.source import resolve, resolve_drafter
from specdec.models.tokenizer import ChatTemplateError
from specdec.models.vocabulary import check_vocabulary
from specdec.request import RequestError
from specdec.results import Chunk, Result
from specdec.runs import Run, Runs, Stream

__all__ = ["LLM", "ChatTemplateError", "Chunk", "RequestError", "Result", "Stream"]

Prompt: TypeAlias = str | list[int]
Params: TypeAlias = SamplingParams | Many[SamplingParams] | None
"""For all prompts, or one for each; None takes the defaults."""


class LLM:
    """A model, ready to answer.

    Args:
        model: an alias, a folder in Hugging Face layout, a ``.gguf`` file, or an id on the Hugging Face hub.
        revision: branch, tag or commit of a hub id.
        precision: arithmetic of the products; ``auto`` takes the best that the weights allow.
        speculation: ``off``, ``auto``, drafter names joined by commas, or a config. It changes the speed and nothing else.
        drafter: the trained drafter: folder, hub id or alias of a trained head, or a model to draft with; None leaves it to
            ``speculation``, whose ``auto`` takes the head that ships for the model, if one does.
        acceptance: the rule by which drafted tokens are accepted, one of ``config.ACCEPTANCES``; None leaves it to
            ``speculation``. docs/rules.md says which of them change tokens.
        threads: of the whole process; None leaves the number as it is.
        max_len: longest prompt and output together; None takes the model's context.
        kv_format: what keys and values are held in, one of ``config.KV_FORMATS``; ``auto`` goes by the precision.
        device: where the model runs; the native kernels run on ``cpu``.
        progress: show progress of a download on stderr.
        settings: further settings of ``EngineConfig``.

    Raises:
        ModelError: the model cannot be found, fetched or run.
        ConfigError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        precision: Precision = "auto",
        speculation: str | SpeculationConfig = "auto",
        drafter: str | None = None,
        acceptance: str | None = None,
        threads: int | None = None,
        max_len: int | None = None,
        kv_format: str = AUTO,
        device: str = "cpu",
        progress: bool = True,
        **settings: Any,
    ) -> None:
        check_precision(precision)  # before anything is fetched
        if isinstance(speculation, str):
            speculation = SpeculationConfig.parse(speculation)
        if drafter is not None:
            speculation = dataclasses.replace(speculation, trained=drafter)
        if acceptance is not None:
            speculation = dataclasses.replace(speculation, acceptance=acceptance)
        where = _device(device)
        config = from_dict(EngineConfig, {"speculation": speculation, "max_len": max_len, "kv_format": kv_format, **settings})
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads must be an integer >= 1, got {threads!r}")
            arithmetic.set_threads(threads)
        named = None if speculation.trained in (None, AUTO) else resolve_drafter(str(speculation.trained), progress=progress)
        found = resolve(model, revision=revision, progress=progress)
        chosen = arithmetic.select(where)
        # The tokenizer first: one that cannot be read should not cost the time to read the weights.
        tokenizer = load_tokenizer(found)
        if named is not None:
            check_vocabulary(tokenizer, named)
        ends = end_tokens(found) | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set())
        self._join(load_model(found, precision, chosen, where), chosen, config, tokenizer, ends, model)

    @classmethod
    def of(
        cls,
        model: Model,
        kernels: Kernels,
        config: EngineConfig,
        tokenizer: TextTokenizer,
        *,
        end_tokens: frozenset[int],
        name: str,
    ) -> LLM:
        """A façade over a model and a tokenizer that exist already."""
        llm = cls.__new__(cls)
        llm._join(model, kernels, config, tokenizer, end_tokens, name)
        return llm

    def _join(
        self,
        model: Model,
        kernels: Kernels,
        config: EngineConfig,
        tokenizer: TextTokenizer,
        end_tokens: frozenset[int],
        name: str,
    ) -> None:
        self.kernels = kernels
        self.config = config
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.name = name
        self.precision = model.precision
        self.engine = Engine(model, kernels, config)
        self.kv_format = codec.name_of(self.engine.model.kv_dtype)
        self._encoder = Encoder(tokenizer, model.shape.vocab_size)

    @property
    def engine(self) -> Engine:
        """What runs the model. Another one for the same model may take its place while nothing is under way."""
        return self._runs.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._runs = Runs(engine, self.tokenizer, self.end_tokens)

    def without_speculation(self) -> LLM:
        """The same model and weights in a second engine that decodes plainly; its tokens must be the same."""
        plain = dataclasses.replace(self.config.speculation, drafters=(), trained=AUTO)
        return LLM.of(
            self.engine.model,
            self.kernels,
            dataclasses.replace(self.config, speculation=plain, self_test=False),
            self.tokenizer,
            end_tokens=self.end_tokens,
            name=self.name,
        )

    def generate(self, prompts: Prompt | list[str] | list[list[int]] | list[Prompt], params: Params = None) -> list[Result]:
        """Continue one prompt or several, all in one batch.

        Args:
            prompts: text, token ids, or a list of those. Text is encoded as it stands, without a chat template.
            params: for all prompts, or one for each.

        Returns:
            ``n`` results per prompt, in order. A sequence that fails on its way has the finish reason ``error``.

        Raises:
            RequestError: a prompt or its parameters cannot be served, before anything starts; the message says which one.
        """
        many = [prompts] if isinstance(prompts, str) or is_ids(prompts) else list(prompts)
        return self._answer([self.encode(prompt) for prompt in many], params)

    def chat(
        self,
        messages: Many[Message] | Many[Many[Message]],
        params: Params = None,
        **template: Any,
    ) -> list[Result]:
        """Answer one conversation or several, laid out by the model's chat template.

        Args:
            messages: a conversation (mappings with ``role`` and ``content``), or a list of conversations.
            params: for all conversations, or one for each.
            template: what else the template knows, such as ``tools``.

        Returns:
            As ``generate``.

        Raises:
            ChatTemplateError: the template refuses the messages, or there is none.
            RequestError: as ``generate``.
        """
        many = [messages] if is_conversation(messages) else list(messages)
        return self._answer([self.lay_out(conversation, template) for conversation in many], params)

    def stream(self, prompt: Prompt | Many[Message], params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one prompt or conversation piece by piece; close the stream to abandon it.

        Raises:
            RequestError, ChatTemplateError: as ``generate`` and ``chat``, before the stream is returned.
        """
        if is_conversation(prompt):
            return Stream(self._runs, self._start([self.lay_out(prompt, template)], params))
        if template:
            raise RequestError(f"{', '.join(template)}: only a conversation has a template to give this to")
        return Stream(self._runs, self._start([self.encode(prompt)], params))

    def lay_out(self, conversation: object, template: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation.

        Args:
            conversation: messages, mappings with ``role`` and ``content``.
            template: what else the template knows.

        Raises:
            ChatTemplateError, RequestError: as ``chat``.
        """
        return self._encoder.conversation(conversation, template)

    def encode(self, prompt: object) -> list[int]:
        """The token ids of a prompt, which may be ids already.

        Raises:
            RequestError: it is neither text nor ids, or text that cannot be encoded.
        """
        return self._encoder.prompt(prompt)

    def _answer(self, prompts: list[list[int]], params: Params) -> list[Result]:
        runs = self._start(prompts, params)
        try:
            while any(run.result is None for run in runs):
                self._runs.step()
        finally:
            self._runs.drop(runs)
        return [run.result for run in runs if run.result]

    def _start(self, prompts: list[list[int]], params: Params) -> list[Run]:
        """Give all sequences to the engine, or none of them."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not all(isinstance(wanted, SamplingParams) for wanted in params):
            raise RequestError(f"params must be SamplingParams, or a list with one for each prompt, got {params!r}")
        if len(params) != len(prompts):
            raise RequestError(f"there are {len(prompts)} prompts but {len(params)} sampling parameters")
        runs: list[Run] = []
        try:
            for index, (ids, wanted) in enumerate(zip(prompts, params, strict=True)):
                try:
                    seed = secrets.randbelow(2**63) if wanted.seed is None else wanted.seed
                    runs += self._runs.add(index, ids, self.spelled_out(wanted), seed)
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from error
        except BaseException:
            self._runs.drop(runs)
            raise
        return runs

    def spelled_out(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids: the word as it begins a text, and as it follows a space."""
        return self._encoder.spelled_out(params)


def _device(name: str) -> torch.device:
    """A device that is really there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
