"""Chat templates: checked when the model loads, rendered within bounds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jinja2
from jinja2.exceptions import TemplateSyntaxError

from tlserve.errors import TlserveError
from tlserve.text.meter import Meter, refuse_beyond
from tlserve.text.sandbox import METER, ChatEnvironment
from tlserve.text.template_tree import Metering, check_tree

# For a model that brings no template.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# The longest in use have some 30,000 characters and 5,000 tokens; compiling takes up to 50 microseconds a token.
MAX_SOURCE_SIZE = 128 << 10
MAX_SOURCE_TOKENS = 16 << 10
_MAX_MESSAGE_SIZE = 500  # of an error: a template can raise any text


class TemplateError(TlserveError):
    """A template that cannot be used: its syntax, a name it uses, or what it reaches for."""


class TemplateRenderError(TlserveError):
    """A template that failed, refused its messages, or took too much, on one render."""


class Template:
    """A compiled chat template. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str, compiled: jinja2.Template) -> None:
        self.source = source
        self._compiled = compiled

    @classmethod
    def parse(cls, source: str) -> Template:
        """Compile and check `source`, branches that may never run included.

        Raises TemplateError with the line and the reason.
        """
        environment = ChatEnvironment()
        try:
            _check_size(environment, source)
            tree = environment.parse(source)
            check_tree(tree, environment)
            Metering().visit(tree)
            tree.set_environment(environment)
            code = environment.compile(tree)
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            # From Python's compiler: statements nested too deeply, or numbers that are none.
            raise TemplateError(f"it cannot be compiled: {error}") from None
        return cls(source, jinja2.Template.from_code(environment, code, environment.globals))

    def render(self, variables: Mapping[str, object]) -> str:
        """Render with these variables, which stay as they are. Blocks for up to about a second.

        Raises TemplateRenderError.
        """
        context = self._compiled.new_context({**variables, METER: Meter()})
        pieces, size = [], 0
        try:
            for piece in self._compiled.root_render_func(context):
                size += len(piece)
                refuse_beyond(size)
                pieces.append(piece)
        except Exception as error:  # whatever it is, the template raised it
            raise TemplateRenderError(_reason(error)) from error
        return "".join(pieces)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        bos: str = "",
        eos: str = "",
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Render a conversation, by default with the opening of the assistant's turn."""
        return self.render(
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos,
                "eos_token": eos,
            }
        )


def _reason(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if len(reason) > _MAX_MESSAGE_SIZE:
        reason = reason[:_MAX_MESSAGE_SIZE] + "…"
    return f"the chat template failed: {reason}"


def _check_size(environment: ChatEnvironment, source: str) -> None:
    if len(source) > MAX_SOURCE_SIZE:
        raise TemplateError(f"a template may have {MAX_SOURCE_SIZE} characters, got {len(source)}")
    tokens = (kind for _, kind, _ in environment.lex(source) if kind != "whitespace")
    if next(itertools.islice(tokens, MAX_SOURCE_TOKENS, None), None) is not None:
        raise TemplateError(f"a template may have {MAX_SOURCE_TOKENS} tokens, this one has more")
