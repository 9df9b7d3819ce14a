"""Chat templates: Jinja in a sandbox, and the question which control tokens of a rendered chat the template itself wrote.

A message may hold text that spells a control token, such as an end-of-turn marker. If that text became the token, whoever
wrote the message could forge a turn. So the rendering is done twice or thrice with the two sides told apart, and the
encoder sees the template's own control tokens under names that no message can spell.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_T = TypeVar("_T")

_SPECIAL: Final = {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}
"""Variables that a template has of the model, whether or not this one has such a token."""


class ChatTemplateError(ValueError):
    """Messages that the model's chat template refuses, or a model without one; the message is the template's own."""


class TemplateVariableError(ChatTemplateError):
    """A variable that the chat template never looks at."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; when rendering, its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template or templates.

    Args:
        sources: Jinja source by name; ``default`` is used, or ``tool_use`` where the request brings tools.
        special_tokens: ``bos_token``, ``eos_token`` and the like, which templates refer to by name.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        # No message can contain these, since nobody can guess them. Digits survive a template's upper() or trim.
        nonce = secrets.token_hex(8).translate(str.maketrans("abcdef", "012345"))
        self._open, self._close = f"\ue000{nonce}\ue001", f"\ue000{nonce}\ue002"

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def text(self) -> str:
        """All sources together, for finding out which tokens they mention."""
        return "\n".join(self.sources.values())

    def render(self, variables: Mapping[str, Any]) -> str:
        """The chat as text.

        Raises:
            ChatTemplateError: no template, a fault in it, or its own refusal.
        """
        name = self._name(variables)
        return self._run(lambda: self._template(name).render({**self.special_tokens, **variables}))

    def check(self, variables: Mapping[str, Any]) -> None:
        """Raise TemplateVariableError where a variable beside the messages would have no effect, since nothing in the template
        names it: a model that is told of no tools would answer as if there were none."""
        if not variables:
            return
        name = self._name(variables)
        known = self._run(lambda: jinja2.meta.find_undeclared_variables(self._environment.parse(self.sources[name])))
        if unknown := sorted(variables.keys() - known - ({"tools"} if name == "tool_use" else set())):
            others = sorted(known - {"messages", "add_generation_prompt"} - self._environment.globals.keys() - _SPECIAL)
            raise TemplateVariableError(
                f"the model's chat template has no use for {', '.join(unknown)}; "
                f"{'beside the messages it knows ' + ', '.join(others) if others else 'it knows nothing but the messages'}"
            )

    def separate(self, variables: Mapping[str, Any], control: re.Pattern[str], alias: Callable[[str], str]) -> str:
        """The chat as text in which the control tokens that the template wrote have other names.

        Args:
            variables: what ``render`` takes.
            control: matches the text of a control token.
            alias: the name to give to a control token of the template; text of messages stays as it is.

        Raises:
            ChatTemplateError: as ``render``; or the template takes messages apart in a way that hides whose a token is.
        """
        plain = self.render(variables)
        marked = self.render(_map_strings(variables, lambda s: control.sub(lambda m: self._open + m[0] + self._close, s)))
        if self._unmarked(marked) == plain:
            return self._alias_unmarked(marked, control, alias)
        # The template looks for a control token inside messages (as for reasoning in earlier answers) and was misled by the
        # marks. So the template is marked instead: the tokens in its literals that it prints, not those it searches for.
        renamed = self._render_aliased(variables, control, alias)
        theirs = {match for string in strings(variables) for match in control.findall(string)}
        own = {alias(token): token for token in _literal_tokens(self.text, self.special_tokens, control)}
        if _replace(renamed, own) == plain:
            return control.sub(lambda m: m[0] if m[0] in theirs else alias(m[0]), renamed)
        raise ChatTemplateError(
            f"a message contains the control token {sorted(theirs)[0]!r} where the chat template does not let it be told "
            "from the template's own; remove it from the message"
        )

    def _name(self, variables: Mapping[str, Any]) -> str:
        if not self.sources:
            raise ChatTemplateError("this model has no chat template: give a plain prompt instead of messages")
        return "tool_use" if variables.get("tools") and "tool_use" in self.sources else "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self.sources[name])
        return self._compiled[name]

    def _run(self, use: Callable[[], _T]) -> _T:
        """Use a template; what goes wrong with it is told in its own words."""
        try:
            return use()
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template has a syntax error in line {error.lineno}: {error}") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        except Exception as error:  # a template is a program that came with the model: it may fail in any way
            raise ChatTemplateError(f"the model's chat template failed on these messages: {error}") from error

    def _unmarked(self, text: str) -> str:
        return text.replace(self._open, "").replace(self._close, "")

    def _alias_unmarked(self, marked: str, control: re.Pattern[str], alias: Callable[[str], str]) -> str:
        """Drop the marks; rename the control tokens outside them."""
        opened, closed = re.escape(self._open), re.escape(self._close)
        parts = re.split(f"{opened}({control.pattern}){closed}", marked)
        for i in range(0, len(parts), 2):  # odd parts are what messages spelled
            parts[i] = control.sub(lambda m: alias(m[0]), parts[i])
        return "".join(parts)

    def _render_aliased(self, variables: Mapping[str, Any], control: re.Pattern[str], alias: Callable[[str], str]) -> str:
        def rename(text: str) -> str:
            return control.sub(lambda m: alias(m[0]), text)

        tree = self._environment.parse(self.sources[self._name(variables)])
        _rename_printed(tree, rename)
        template = jinja2.Template.from_code(self._environment, self._environment.compile(tree), self._environment.globals)
        special = {name: rename(token) for name, token in self.special_tokens.items()}
        return self._run(lambda: template.render({**special, **variables}))


def has_control(variables: Mapping[str, Any], control: re.Pattern[str]) -> bool:
    """Does any text among these variables spell a control token?"""
    return any(control.search(string) for string in strings(variables))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: that of Hugging Face."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes < and > for HTML, which a model was not trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _rename_printed(node: jinja2.nodes.Node, rename: Callable[[str], str]) -> None:
    """Rename control tokens in the literals of a parsed template, except where it compares, searches or looks up."""
    if isinstance(node, jinja2.nodes.TemplateData):
        node.data = rename(node.data)
    elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
        node.value = rename(node.value)
    if isinstance(node, jinja2.nodes.Compare | jinja2.nodes.Test):
        return
    skipped: set[str] = set()
    if isinstance(node, jinja2.nodes.If | jinja2.nodes.CondExpr):
        skipped = {"test"}
    elif isinstance(node, jinja2.nodes.Getitem):
        skipped = {"arg"}
    elif isinstance(node, jinja2.nodes.Filter) or (
        isinstance(node, jinja2.nodes.Call) and isinstance(node.node, jinja2.nodes.Getattr)
    ):
        skipped = {"args", "kwargs"}
    for child in node.iter_child_nodes(exclude=skipped):
        _rename_printed(child, rename)


def _literal_tokens(text: str, special_tokens: Mapping[str, str], control: re.Pattern[str]) -> set[str]:
    return {token for part in (text, *special_tokens.values()) for token in control.findall(part)}


def _replace(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def strings(value: Any) -> Iterator[str]:
    """Every string in a nest of dicts and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a nest of dicts and lists with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
