"""The bodies of requests: which fields exist and of which type.

Ranges of values are checked where they are defined, in ``config.SamplingParams``. Nothing is silently ignored: an unknown
field is an error, and so is one that OpenAI has and this server does not; fields that cannot change an answer are listed.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from specdec.serve.errors import ApiError

NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "allowed_token_ids": ((None,), "give logit_bias, or bad_words"),
    "audio": ((None,), "this server writes text only"),
    "best_of": ((None, 1), "ask for n answers and choose among them"),
    "chat_template": ((None,), "the model's own is used"),
    "continue_final_message": ((None, False), "only the chat template begins an answer"),
    "documents": ((None, []), "give what the model's chat template knows in chat_template_kwargs"),
    "function_call": ((None, "none"), "tools are not there yet"),
    "functions": ((None, []), "tools are not there yet"),
    "guided_choice": ((None,), "constrained output is not there yet"),
    "guided_grammar": ((None,), "constrained output is not there yet"),
    "guided_json": ((None,), "constrained output is not there yet"),
    "guided_regex": ((None,), "constrained output is not there yet"),
    "include_stop_str_in_output": ((None, False), "the text ends before a stop string"),
    "length_penalty": ((None, 1), "there is no beam search"),
    "modalities": ((None, ["text"]), "this server writes text only"),
    "parallel_tool_calls": ((None, True, False), "tools are not there yet"),
    "priority": ((None, 0), "requests run in the order in which they arrive"),
    "reasoning_effort": ((None, "none"), "give what the model's chat template knows in chat_template_kwargs"),
    "response_format": ((None, {"type": "text"}), "constrained output is not there yet"),
    "return_tokens_as_token_ids": ((None, False), "return_token_ids gives them"),
    "skip_special_tokens": ((None, True), "special tokens have no text; return_token_ids gives them"),
    "spaces_between_special_tokens": ((None, True), "special tokens have no text"),
    "structured_outputs": ((None,), "constrained output is not there yet"),
    "suffix": ((None, ""), "text cannot be inserted before a suffix"),
    "tool_choice": ((None, "none", "auto"), "tools are not there yet"),
    "tools": ((None, []), "tools are not there yet"),
    "truncate_prompt_tokens": ((None,), "no prompt is cut short: /tokenize tells how long it is"),
    "use_beam_search": ((None, False), "ask for n answers and choose among them"),
    "verbosity": ((None,), "give what the model's chat template knows in chat_template_kwargs"),
    "web_search_options": ((None,), "this server searches nothing"),
}
"""Fields of other servers: the values that ask for nothing, which are accepted, and why others are refused."""

_Body = TypeVar("_Body", bound="Strict")


class Strict(BaseModel):
    """A part of a body: no unknown fields, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Not served: usage comes once, at the end.")
    include_obfuscation: bool | None = Field(None, description="Has no effect: chunks are not padded.")

    @field_validator("continuous_usage_stats")
    @classmethod
    def _at_the_end(cls, asked: bool | None) -> bool | None:
        if asked:
            raise PydanticCustomError("not_served", "continuous_usage_stats is not supported: usage comes once, at the end")
        return asked


class SpeculationChoice(Strict):
    drafter: str | list[str] | None = Field(None, description="One of the server's drafters, or several; absent: all of them.")
    max_tokens: int | None = Field(None, description="Most tokens drafted per pass.")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    type: Literal["content"] = "content"
    content: str | list[TextPart]


class Body(Strict):
    """What completions and chats have in common."""

    model: str | None = Field(None, description="The served model; may be left out.")
    max_tokens: int | None = Field(None, description="Most tokens of the answer. Absent: until the context is full.")
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids (as strings) to numbers in [-100, 100].")
    bad_words: list[str] | None = Field(None, description="Text that must not come out.")
    stop: str | list[str] | None = Field(None, description="The text ends before the first of these.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = Field(None, description="Log-probabilities of the prompt's tokens, with this many others.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Literal["off", "auto"] | SpeculationChoice | None = Field(
        None, description="How this request is drafted for. It changes the speed and no token."
    )
    prediction: Prediction | None = Field(None, description="Text that the answer may resemble; drafts are taken from it.")
    cache_salt: str | None = Field(None, description="Only requests of the same salt (and key) share cached prefixes.")
    return_token_ids: bool | None = Field(None, description="Give the ids of prompt and answer.")
    stats: bool | None = Field(None, description="Give counters of each choice, and the drafter and the text of each token.")
    user: str | None = Field(None, description="Has no effect.")
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    store: bool | None = Field(None, description="Has no effect: nothing is stored.")
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: equal prefixes are found without it.")

    tokens_field: ClassVar[str] = "max_tokens"

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in sorted(NOT_SERVED.keys() & values.keys()):
            neutral, reason = NOT_SERVED[name]
            if values[name] not in neutral:
                raise PydanticCustomError("not_served", "{name} is not supported: {reason}", {"name": name, "reason": reason})
        return {name: value for name, value in values.items() if name not in NOT_SERVED}

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: str | Annotated[list[int], Field(min_length=1)] | Annotated[list[str | list[int]], Field(min_length=1)]
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(None, description="Log-probabilities of the tokens, with this many of the likeliest.")


class Message(BaseModel):
    """One message. Further fields go to the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: str
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise PydanticCustomError(
                    "part", "a part of type {kind}: this server reads text only", {"kind": repr(part["type"])}
                )
        return content


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="How many of the likeliest tokens to give beside each; needs logprobs.")
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with the beginning of an answer; true if absent."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the model's chat template.")

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            told = "max_tokens and {name} differ: give one of them"
            raise PydanticCustomError("limits", told, {"name": "max_completion_tokens"})
        return self


class TokenizeBody(Strict):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Begin as the model's prompts begin; true if absent. For a prompt."
    )
    add_generation_prompt: bool | None = Field(None, description="True if absent. For messages.")
    continue_final_message: Literal[False] | None = Field(None, description="Only the chat template begins an answer.")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("what", "give either prompt or messages")
        of_chats = self.add_generation_prompt is not None or self.chat_template_kwargs is not None
        if (self.prompt is not None and of_chats) or (self.messages is not None and self.add_special_tokens):
            raise PydanticCustomError(
                "which", "add_special_tokens is for a prompt, add_generation_prompt and chat_template_kwargs are for messages"
            )
        return self


class DetokenizeBody(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse(body: type[_Body], data: bytes | str) -> _Body:
    """A body from its bytes.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        raise _told(body, error.errors(include_url=False)) from error


def _told(body: type[Strict], errors: list[ErrorDetails]) -> ApiError:
    """The first field at fault, with all that is wrong with it."""
    where = errors[0]["loc"]
    field = str(where[0]) if where else None
    same = [error for error in errors if error["loc"][:1] == where[:1]]
    if errors[0]["type"] == "extra_forbidden" and len(where) == 1:
        close = difflib.get_close_matches(str(field), body.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return ApiError(400, f"unknown field {field!r}{hint}", param=field, code="unknown_field")
    said = list(dict.fromkeys(_one(error) for error in same))
    told = " or ".join(said[:4]) if len(said) > 1 else said[0]
    if not where:
        field = errors[0].get("ctx", {}).get("name")
    return ApiError(400, told if not where else f"{field}: {told}", param=field)


def _one(error: ErrorDetails) -> str:
    inner = ".".join(str(part) for part in error["loc"][1:] if isinstance(part, int) or str(part).isidentifier())
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{message} (at {inner})" if inner and isinstance(error["loc"][1], int) else message
