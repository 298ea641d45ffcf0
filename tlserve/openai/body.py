"""From the bytes of a body to a request struct, or to an error that names the field, the rule and the value.

The body is decoded without types first and converted after: so the last of two equal keys wins whatever the
first one held, and fields nobody reads are held to the same text and number rules as the others.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from tlserve.errors import InvalidRequest
from tlserve.openai.blame import field_at_fault
from tlserve.openai.counts import check_counts, check_digits

MAX_NESTING = 64
MAX_SHOWN = 64  # characters of a client's value that are given back in a message

T = TypeVar("T", bound=Struct)
Path = tuple[str | int, ...]

_AT_PATH = re.compile(r" - at `\$(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")
_PATH_PART = re.compile(r"\.(\w+)|\[(\d+)\]")


def _number(text: str) -> int | float:
    """A JSON number with a fraction or an exponent. Raises ValueError past float64."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return int(value) if value.is_integer() else value


# Python reads the floats, not msgspec, which takes 13 microseconds for each 1e308 of a list and gives the
# interpreter lock to nobody meanwhile.
_DECODER = msgspec.json.Decoder(float_hook=_number)


def read(body: bytes, request_type: type[T]) -> T:
    """The request in ``body``.

    Raises InvalidRequest for a body that holds more than it may (``check_counts``), for text that is not one JSON
    object under the rules of ``decode_object``, and for a field that breaks the rule of its type; ``param`` names
    the field, for such text where one is to blame.
    """
    check_counts(body)
    try:
        fields = decode_object(body)
    except InvalidRequest as error:
        raise _blamed(error, body, request_type) from None
    try:
        return msgspec.convert(fields, request_type)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), fields, request_type) from None


def decode_object(body: bytes) -> dict[str, object]:
    """Decode one JSON object; integral floats come back as integers, and the last of equal keys wins.

    Raises InvalidRequest for anything that is not valid UTF-8 and JSON, an unpaired surrogate, a number that
    is not finite or has more than MAX_DIGITS digits, or more than MAX_NESTING levels, wherever it stands.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty, it must be one JSON object")
    check_digits(body)
    try:
        value = _DECODER.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body must be one JSON object in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(value)}")
    _check_depth(value, 1)
    return value


def shown(value: object) -> str:
    """A client's value, short and valid text whatever it holds, for use in a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value)  # msgspec writes none past 64 bits
    else:
        text = msgspec.json.encode(value[: MAX_SHOWN + 1] if isinstance(value, str) else value).decode()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _blamed(error: InvalidRequest, body: bytes, request_type: type[Struct]) -> InvalidRequest:
    """``error`` with the field that it is about; a name that is no field of ours is not given back."""
    field = field_at_fault(body, _is_json, MAX_NESTING)
    if field not in request_type.__struct_fields__:
        return error
    return InvalidRequest(f"{field}: {error.message}", param=field)


def _is_json(text: bytes) -> bool:
    try:
        check_digits(text)
        _DECODER.decode(text)
    except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body must not nest deeper than {MAX_NESTING} levels")


def _check_depth(container: dict[str, Any] | list[Any], depth: int) -> None:
    if depth > MAX_NESTING:
        raise _too_deep()
    values = container.values() if isinstance(container, dict) else container
    # One pass in C settles the usual long list, which holds token ids and nothing else.
    if set(map(type, values)).isdisjoint((dict, list)):
        return
    for value in values:
        if isinstance(value, dict | list):
            _check_depth(value, depth + 1)


def _field_error(message: str, fields: dict[str, object], request_type: type[Struct]) -> InvalidRequest:
    """Put msgspec's finding into our words: the field, the rule from its type, the value it had."""
    at = _AT_PATH.search(message)
    path: Path = tuple(name or int(index) for name, index in _PATH_PART.findall(at[1])) if at else ()
    if missing := _MISSING.match(message):
        param = param_name((*path, missing[1]))
        return InvalidRequest(f"{param} is required", param=param)
    param = param_name(path)
    value = _value_at(fields, path)
    if value is None:
        return InvalidRequest(f"{param} is required and must not be null", param=param)
    return InvalidRequest(f"{param} must be {_rule_at(request_type, path)}, got {shown(value)}", param=param)


def param_name(path: Path) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _value_at(value: Any, path: Path) -> object:
    for part in path:
        value = value[part]
    return value


@cache
def _hints(struct: type[Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


def _rule_at(struct: type[Struct], path: Path) -> str:
    """The description of the innermost type on the way that has one."""
    rule, hint = "valid", None
    for part in path:
        if isinstance(part, str):
            owner = struct if hint is None else _find(hint, lambda h: isinstance(h, type) and issubclass(h, Struct))
            hint = _hints(owner)[part]
        else:
            hint = get_args(_find(hint, lambda h: get_origin(h) is list))[0]
        rule = _description(hint) or rule
    return rule


def _description(hint: Any) -> str | None:
    """The outermost description inside a hint, not looking into the items of a list."""
    if get_origin(hint) is list:
        return None
    args: Sequence[Any] = get_args(hint)
    own = next((arg.description for arg in args if isinstance(arg, Meta) and arg.description), None)
    return own or next((text for arg in args if (text := _description(arg))), None)


def _find(hint: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """The first type inside a hint that is wanted, the hint itself included."""
    if is_wanted(hint):
        return hint
    return next((found for arg in get_args(hint) if (found := _find(arg, is_wanted)) is not None), None)
