"""The library's face: text in, text out.

It brings together what a model needs to answer: its files, an engine, the encoder of requests and the runs that come of
them. Several prompts, several open streams and the calls of several threads share its passes. Ctrl-C ends a call between
two passes; the next call is served as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterable, Mapping
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
from specdec.config.checks import require_integer
from specdec.encoding import Encoder, Message, TextTokenizer, is_conversation, is_ids
from specdec.engine import Engine
from specdec.interrupts import Interrupts
from specdec.kernels.base import Kernels
from specdec.kernels.memory import give_back
from specdec.kv import codec
from specdec.models.base import Model
from specdec.models.generation_config import find as generation_config_of
from specdec.models.load import end_tokens, load_model, load_tokenizer
from specdec.models.source import resolve, resolve_drafter
from specdec.models.tokenizer import ChatTemplateError, TemplateVariableError
from specdec.models.vocabulary import check_vocabulary
from specdec.request import RequestError
from specdec.results import Chunk, Result
from specdec.runs import Run, Runs, Stream

__all__ = ["LLM", "ChatTemplateError", "Chunk", "RequestError", "Result", "Stream", "TemplateVariableError"]

MOST_THREADS = 1024
"""More would be made all the same, until the system has no room for another process."""

Prompt: TypeAlias = str | list[int] | tuple[int, ...]
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
        generation_config: where ``get_default_sampling_params`` come from: ``auto`` for the generation_config.json in the
            model's folder, ``none``, or a folder that holds another one.
        progress: show progress of a download on stderr.
        settings: further settings of ``EngineConfig``.

    Raises:
        ModelError: the model cannot be found, fetched or run.
        ConfigError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        precision: Precision = "auto",
        speculation: str | SpeculationConfig = "auto",
        drafter: str | os.PathLike[str] | None = None,
        acceptance: str | None = None,
        threads: int | None = None,
        max_len: int | None = None,
        kv_format: str = AUTO,
        device: str = "cpu",
        generation_config: str | os.PathLike[str] = AUTO,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        check_precision(precision)  # before anything is fetched
        model = _name("model", model)
        if not isinstance(speculation, SpeculationConfig):
            speculation = SpeculationConfig.parse(speculation)
        if drafter is not None:
            speculation = dataclasses.replace(speculation, trained=_name("drafter", drafter))
        if acceptance is not None:
            speculation = dataclasses.replace(speculation, acceptance=acceptance)
        where = _device(device)
        config = from_dict(EngineConfig, {"speculation": speculation, "max_len": max_len, "kv_format": kv_format, **settings})
        if threads is not None:
            require_integer("threads", threads, 1, MOST_THREADS, f"an integer in [1, {MOST_THREADS}]")
            arithmetic.set_threads(threads)
        named = None if speculation.trained in (None, AUTO) else resolve_drafter(str(speculation.trained), progress=progress)
        found = resolve(model, revision=revision, progress=progress)
        chosen = arithmetic.select(where)
        said = generation_config_of(found, _name("generation_config", generation_config))
        # The tokenizer first: one that cannot be read should not cost the time to read the weights.
        tokenizer = load_tokenizer(found)
        if named is not None:
            check_vocabulary(tokenizer, named)
        ends = end_tokens(found) | said.end_tokens | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set())
        self._join(load_model(found, precision, chosen, where), chosen, config, tokenizer, ends, model, said.defaults)
        give_back()

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
        generation_defaults: Mapping[str, Any] | None = None,
    ) -> LLM:
        """A façade over a model and a tokenizer that exist already."""
        llm = cls.__new__(cls)
        llm._join(model, kernels, config, tokenizer, end_tokens, name, generation_defaults or {})
        return llm

    def _join(
        self,
        model: Model,
        kernels: Kernels,
        config: EngineConfig,
        tokenizer: TextTokenizer,
        end_tokens: frozenset[int],
        name: str,
        generation_defaults: Mapping[str, Any],
    ) -> None:
        self.generation_defaults = generation_defaults
        """Fields of ``SamplingParams`` that the model's generation_config.json sets."""
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
            generation_defaults=self.generation_defaults,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, and the library's own defaults where it says nothing.

        The command line and the server take these for requests that say nothing themselves. Here they have to be given:
        ``llm.generate(prompt, llm.get_default_sampling_params().replace(max_tokens=60))``.
        """
        return SamplingParams(**self.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Iterable[str] | Iterable[list[int]] | Iterable[Prompt],
        sampling_params: Params = None,
    ) -> list[Result]:
        """Continue one prompt or several, all in one batch.

        Args:
            prompts: text, token ids, or a list of those. Text is encoded as it stands, without a chat template.
            sampling_params: for all prompts, or one for each.

        Returns:
            ``n`` results per prompt, in order. A sequence that fails on its way has the finish reason ``error``.

        Raises:
            RequestError: a prompt or its parameters cannot be served, before anything starts; the message says which one.
        """
        return self._answer([self.encode(prompt) for prompt in _each(prompts, single=is_ids(prompts))], sampling_params)

    def chat(
        self,
        messages: Many[Message] | Iterable[Many[Message]],
        sampling_params: Params = None,
        **template: Any,
    ) -> list[Result]:
        """Answer one conversation or several, laid out by the model's chat template.

        Args:
            messages: a conversation (mappings with ``role`` and ``content``), or a list of conversations.
            sampling_params: for all conversations, or one for each.
            template: what else the template knows, such as ``tools``.

        Returns:
            As ``generate``.

        Raises:
            ChatTemplateError: the template refuses the messages, or there is none.
            RequestError: as ``generate``.
        """
        many = _each(messages, single=is_conversation(messages))
        return self._answer([self.lay_out(conversation, template) for conversation in many], sampling_params)

    def stream(self, prompt: Prompt | Many[Message], sampling_params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one prompt or conversation piece by piece; close the stream to abandon it.

        Args:
            prompt: text, token ids, or a conversation, which is laid out by the model's chat template.
            sampling_params: how tokens are chosen; with ``n`` answers, each chunk says which one it belongs to.
            template: what else the template knows.

        Returns:
            An iterator over chunks, each with what one pass added; ``results`` has the answers that have ended.

        Raises:
            RequestError, ChatTemplateError: as ``generate`` and ``chat``, before the stream is returned.
        """
        if is_conversation(prompt):
            ids = self.lay_out(prompt, template)
        elif template:
            raise RequestError(f"{', '.join(template)}: only a conversation has a template to give this to")
        else:
            ids = self.encode(prompt)
        with Interrupts():
            return Stream(self._runs, self._start([ids], sampling_params))

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
        with Interrupts() as interrupts:
            runs = self._start(prompts, params)
            try:
                while any(run.result is None for run in runs):
                    self._runs.step()
                    interrupts.deliver()
            finally:
                self._runs.drop(runs)
        return [run.result for run in runs if run.result]

    def _start(self, prompts: list[list[int]], params: Params) -> list[Run]:
        """Give all sequences to the engine, or none of them."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        given = _each(params, single=False)
        each = [wanted for wanted in given if isinstance(wanted, SamplingParams)]
        if len(each) < len(given):
            raise RequestError(f"sampling_params must be SamplingParams, or a list with one for each prompt, got {params!r}")
        if len(each) != len(prompts):
            raise RequestError(f"there are {len(prompts)} prompts but {len(each)} sampling parameters")
        runs: list[Run] = []
        try:
            for index, (ids, wanted) in enumerate(zip(prompts, each, strict=True)):
                try:
                    seed = secrets.randbelow(2**63) if wanted.seed is None else wanted.seed
                    runs += self._runs.add(index, ids, self.spelled_out(wanted), seed)
                except RequestError as error:
                    told = f"prompt {index}: {error}" if len(prompts) > 1 else str(error)
                    raise RequestError(told, field=error.field) from error
        except BaseException:
            self._runs.drop(runs)
            raise
        return runs

    def spelled_out(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids: the word as it begins a text, and as it follows a space."""
        return self._encoder.spelled_out(params)


def _each(given: object, *, single: bool) -> list[object]:
    """What is asked: one thing, or each of several. What can be neither stays whole, so that its error shows it."""
    if single or isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return [given]
    return list(given)


def _name(what: str, given: object) -> str:
    """The name of a model, or the path of one."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} must be a name or a path, got {given!r}")
    return str(given)


def _device(name: str) -> torch.device:
    """A device that is really there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
