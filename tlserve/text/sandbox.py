"""The jinja2 environment of chat templates: the dialect Hugging Face's templates are written in.

jinja2's immutable sandbox keeps a template from Python's internals and from changing what it is given; every filter,
call and operator that makes a value is weighed by the render's Meter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from tlserve.text.meter import (
    LimitError,
    Meter,
    check_format,
    check_join,
    check_power,
    check_printf,
    check_product,
    check_replace,
    check_width,
    refuse_beyond,
)

# The variable that holds a render's Meter, and the filters that only a rewritten tree uses (see template_tree.py).
# No template can spell a name with a space.
METER = "the meter"
STEP, WEIGH, PRINT, CONCAT = "a step", "a value", "a printed value", "a concatenation"

# Slow for what they are, or not the same twice; no chat needs them.
_LEFT_OUT = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
# Filters that run Python for each character or item of their value.
_SLOW = {"batch", "dictsort", "groupby", "list", "max", "min", "slice", "sort", "striptags", "sum", "title"}
_SLOW |= {"unique", "urlencode", "wordcount"}
_SLOWNESS = 8
_WITH_WIDTH = {"batch", "center", "round", "slice"}
_MAX_JSON_INDENT = 16


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment; a render's variables must hold its Meter under METER."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _weighed(name, f) for name, f in self.filters.items() if name not in _LEFT_OUT}
        self.filters |= {STEP: _step, WEIGH: _weigh, PRINT: _print, CONCAT: _concat}
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _make_dict,
            "namespace": ChatNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that jinja2's sandbox would print as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        if operator == "*":
            check_product(meter, left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_printf(meter, left, right)
        return meter.weigh(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.step()
        # str.format comes wrapped by the sandbox.
        method = obj if isinstance(obj, BuiltinMethodType) else getattr(obj, "__wrapped__", None)
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
            _check_str_method(meter, method.__self__, method.__name__, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return result if isinstance(result, Namespace) else meter.weigh(result)


class Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it as an instance's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatNamespace(Namespace):
    """A namespace that takes no name that could pass for a Python internal."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args  # so that namespace(self=1) works
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)


def _check_attribute_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _meter(context: Context) -> Meter:
    meter = context.parent[METER]
    assert isinstance(meter, Meter)
    return meter


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise JinjaError(str(message))


def _strftime_now(form: str) -> str:
    check_width(len(form))
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model is to read it: no HTML escapes, and no \\u escapes unless asked for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_str_method(meter: Meter, text: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    values = [*args, *kwargs.values()]
    if name in ("center", "ljust", "rjust", "zfill"):
        check_width(*values)
    elif name == "expandtabs":
        check_width(*values)
        check_replace(text, "\t", " " * (values[0] if values else 8))
    elif name == "replace" and len(values) >= 2:
        check_replace(text, *values[:2])
    elif name == "join" and values:
        check_join(text, values[0])
    elif name in ("format", "format_map"):
        check_format(meter, text, values)
    elif name in ("translate", "maketrans"):
        raise LimitError(f"str.{name} is not available")


def _check_filter(meter: Meter, name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    values = [*args, *kwargs.values()]
    if name in _SLOW and hasattr(value, "__len__"):
        refuse_beyond(len(value) * _SLOWNESS)
    if name in _WITH_WIDTH:
        check_width(*values)
    elif name == "indent":
        width = next(iter(args), kwargs.get("width", 4))
        check_width(width)
        check_replace(str(value), "\n", width if isinstance(width, str) else " " * width)
    elif name == "join":
        check_join(next(iter(args), kwargs.get("d", "")), value)
    elif name == "replace" and len(values) >= 2:
        check_replace(str(value), *values[:2])
    elif name == "format":
        check_printf(meter, str(value), values)
    elif name == "sum" and isinstance(next(iter(args[1:]), kwargs.get("start", 0)), str | list | tuple):
        raise LimitError("it sums what are no numbers")
    elif name == "tojson":
        _check_json_layout(meter, value, args, kwargs)


def _check_json_layout(meter: Meter, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    layout = dict(zip(("ensure_ascii", "indent", "separators"), args, strict=False)) | kwargs
    indent, separators = layout.get("indent"), layout.get("separators") or ()
    if indent is not None:  # json indents in Python, item by item
        refuse_beyond(meter.size(value) * _SLOWNESS)
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MAX_JSON_INDENT or any(len(separator) > _MAX_JSON_INDENT for separator in separators):
        raise LimitError(f"it lays out JSON with more than {_MAX_JSON_INDENT} characters of indent or separator")


def _weighed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, its arguments checked and its result weighed.

    Being passed the context also keeps jinja2 from computing it on constants while it compiles.
    """
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def weighed(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.step()
        meter.size(value)
        _check_filter(meter, name, value, args, kwargs)
        first: dict[str | None, tuple[Any, ...]] = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
            None: (),
        }
        return meter.weigh(function(*first[wanted], value, *args, **kwargs))

    return weighed


@pass_context
def _step(context: Context, value: Any) -> bool:
    _meter(context).step()
    return True


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    return _meter(context).weigh(value)


@pass_context
def _print(context: Context, value: Any) -> str:
    return str(_meter(context).weigh(value))


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter = _meter(context)
    refuse_beyond(sum(map(meter.size, values)))
    return str(meter.weigh("".join(map(str, values))))
