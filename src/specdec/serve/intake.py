"""From a request's body to what the engine needs: token ids, parameters, and who may share its cached prefixes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from specdec.config import ConfigError, SamplingParams
from specdec.encoding import NOT_FOR_TEMPLATES
from specdec.llm import LLM, ChatTemplateError, RequestError, TemplateVariableError
from specdec.serve.errors import ApiError
from specdec.serve.schema import Body, ChatBody, CompletionBody, Message, Prediction, SpeculationChoice, TextPart, TokenizeBody
from specdec.types import Speculation

_T = TypeVar("_T")

_NAMES = frozenset(field.name for field in fields(SamplingParams))
_OF_ROUTES = frozenset({"logprobs", "logit_bias"})
"""Parameters whose fields have another shape in bodies."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in the engine's terms."""

    prompts: list[list[int]]
    text_field: str
    """The field of the body that they come from."""
    params: SamplingParams
    salt: str
    speculation: Speculation


class Intake:
    """Checks bodies and encodes them; slow for long prompts, so it is to run beside the event loop.

    Args:
        llm: the model; only its tokenizer, its sizes and its defaults are used.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def completion(self, body: CompletionBody, tenant: str | None) -> Asked:
        """Raises ApiError."""
        with_logprobs = body.logprobs is not None
        more = {"logprobs": body.logprobs}
        if body.echo and with_logprobs:
            more["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
        params = self._params(body, more)
        single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = [body.prompt] if single else body.prompt
        return self._asked(body, tenant, params, lambda: [self._llm.encode(one) for one in prompts])

    def chat(self, body: ChatBody, tenant: str | None) -> Asked:
        """Raises ApiError."""
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        written = {"logprobs": "top_logprobs"}
        if body.max_tokens is None:
            written["max_tokens"] = "max_completion_tokens"
        more = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None, "max_tokens": limit}
        params = self._params(body, more, written)
        return self._asked(body, tenant, params, lambda: [self._lay_out(body)])

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """The ids of a prompt or of messages. Raises ApiError."""
        text, special = body.prompt, body.add_special_tokens is not False
        if text is not None:
            return _spoken(lambda: self._llm.tokenizer.encode(text, add_special=special), "prompt")
        return _spoken(lambda: self._lay_out(body), "messages")

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, special ones included. Raises ApiError."""
        size = self._llm.engine.model.shape.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise ApiError(400, f"token {token} is outside the vocabulary of {size} tokens", param="tokens")
        return self._llm.tokenizer.decode(ids, skip_special=False)

    def _params(self, body: Body, more: Mapping[str, Any], written: Mapping[str, str] | None = None) -> SamplingParams:
        """Sampling parameters; what a body leaves out is as the model's generation_config.json has it, or else as the library
        has it. ``written``: what some are called in the body."""
        values = {name: getattr(body, name) for name in _NAMES - _OF_ROUTES if hasattr(body, name)}
        values["logit_bias"] = body.logit_bias and {_token(key): bias for key, bias in body.logit_bias.items()}
        values |= more
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams(**{**self._llm.generation_defaults, **given})
        except ConfigError as error:
            name, _, rest = str(error).partition(" ")
            name = (written or {}).get(name, name)
            raise ApiError(400, f"{name} {rest}", param=name.partition("[")[0]) from error

    def _asked(self, body: Body, tenant: str | None, params: SamplingParams, encode: Callable[[], list[list[int]]]) -> Asked:
        text_field = "messages" if isinstance(body, ChatBody) else "prompt"
        prompts = _spoken(encode, text_field)
        for ids in prompts:
            if len(ids) >= self._llm.engine.max_len:
                limit = self._llm.engine.max_len
                raise ApiError(
                    400,
                    f"the prompt has {len(ids)} tokens, but the context holds {limit}, prompt and answer together; "
                    f"at most {limit - 1} leave room for an answer",
                    param=text_field,
                    code="context_length_exceeded",
                )
        params = _spoken(lambda: self._llm.spelled_out(params), "bad_words")
        return Asked(prompts, text_field, params, _salt(tenant, body.cache_salt), self._speculation(body))

    def _lay_out(self, body: ChatBody | TokenizeBody) -> list[int]:
        variables = dict(body.chat_template_kwargs or {})
        if mistaken := sorted(NOT_FOR_TEMPLATES & variables.keys()):
            message = f"{', '.join(mistaken)} is no variable of a chat template, but a matter of its own"
            raise ApiError(400, message, param="chat_template_kwargs")
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        messages = [_said(message) for message in body.messages or ()]
        return self._llm.lay_out(messages, variables)

    def _speculation(self, body: Body) -> Speculation:
        wanted, known = body.speculation, [drafter.name for drafter in self._llm.engine.drafters]
        if wanted == "off":
            if body.prediction is not None:
                raise ApiError(400, "a prediction is of no use with speculation off", param="prediction")
            return Speculation(drafters=())
        drafters, most = None, None
        if isinstance(wanted, SpeculationChoice):
            most = wanted.max_tokens
            if wanted.drafter is not None:
                drafters = (wanted.drafter,) if isinstance(wanted.drafter, str) else tuple(wanted.drafter)
                for name in drafters:
                    if name not in known:
                        have = ", ".join(known) or "none"
                        raise ApiError(400, f"there is no drafter {name!r} here; there are: {have}", param="speculation")
        return Speculation(drafters=drafters, max_tokens=most, prediction=self._prediction(body.prediction))

    def _prediction(self, prediction: Prediction | None) -> tuple[int, ...]:
        if prediction is None:
            return ()
        text = prediction.content if isinstance(prediction.content, str) else _joined(prediction.content)
        return tuple(_spoken(lambda: self._llm.tokenizer.encode(text, add_special=False), "prediction"))


def _said(message: Message) -> dict[str, Any]:
    """What a message says, for the chat template; a field that is null says nothing, as one that is left out."""
    given = message.model_dump(exclude_unset=True)
    return {name: value for name, value in given.items() if value is not None or name == "content"}


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(400, f"logit_bias has token ids as its keys, got {key!r}", param="logit_bias")
    return int(key)


def _spoken(call: Callable[[], _T], param: str) -> _T:
    """What the façade refuses is the request's fault."""
    try:
        return call()
    except TemplateVariableError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from error
    except (RequestError, ChatTemplateError) as error:
        raise ApiError(400, str(error), param=param) from error


def _salt(tenant: str | None, given: str | None) -> str:
    """One string for both identities, which no others spell: they stand in it as JSON, each in its own place."""
    if tenant is None and given is None:
        return ""
    return json.dumps([tenant and hashlib.sha256(tenant.encode()).hexdigest(), given])
