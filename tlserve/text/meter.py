"""What one render of a chat template may take: size of values, work, and processor time.

A template comes with a model, from strangers, and its input from clients.

Rule 1: no value larger than MAX_VALUE_SIZE is ever made, however it is nested; what could come out far larger is
        refused before it is made, what cannot be is weighed afterwards.
Rule 2: all values made in one render weigh at most MAX_WORK together, and a step (a turn of a loop, a call) weighs
        UNITS_PER_STEP. The same template and messages always meet the same limit.
Rule 3: what the weights misjudge ends with MAX_SECONDS. It is the thread's processor time and not the wall clock,
        so no render fails because the machine is busy.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import GeneratorType
from typing import Any

from jinja2.utils import Namespace

MAX_VALUE_SIZE = 8 << 20  # characters and items: twice the largest request body
MAX_WORK = 128 << 20
MAX_SECONDS = 0.8
MAX_WIDTH = 10_000  # of padding, columns or decimals
MAX_INT_BITS = 4096
UNITS_PER_STEP = 256  # half a million steps a render
UNITS_PER_CLOCK_READ = 16 * UNITS_PER_STEP  # few enough for steps whose work is not weighed, such as comparisons

_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class LimitError(Exception):
    """A render took more than its share."""


class Meter:
    """What one render has used so far."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._work = 0
        self._next_clock_read = 0
        # id -> (container, its size). Containers never change in the sandbox; holding them keeps their ids theirs.
        self._sizes: dict[int, tuple[object, int]] = {}

    def step(self, units: int = UNITS_PER_STEP) -> None:
        """Charge for work."""
        self._work += units
        if self._work < self._next_clock_read:
            return
        self._next_clock_read = self._work + UNITS_PER_CLOCK_READ
        if self._work > MAX_WORK:
            raise LimitError("it takes more steps or makes more text than one render may")
        if time.thread_time() > self._deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS} s")

    def weigh(self, value: Any) -> Any:
        """Charge for a value that was made; give it back."""
        if isinstance(value, GeneratorType):
            return self._weigh_items(value)
        size = self.size(value)
        refuse_beyond(size)
        self.step(16 + size)
        return value

    def size(self, value: object) -> int:
        """About the characters of the printed value, shared parts counted each time they appear."""
        if isinstance(value, str | bytes | range):
            return len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 3
        if isinstance(value, Mapping):
            return self._container_size(value, (part for item in value.items() for part in item))
        if isinstance(value, list | tuple):
            return self._container_size(value, value)
        if isinstance(value, KeysView | ValuesView | ItemsView):
            return 1 + sum(map(self.size, value))
        if isinstance(value, Namespace):
            raise LimitError("it prints a namespace or puts one into another value")
        return 1

    def _container_size(self, container: object, parts: Iterable[object]) -> int:
        known = self._sizes.get(id(container))
        if known is None:
            size = 1
            for part in parts:
                size += 1 + self.size(part)
                self.step(1)
            known = self._sizes[id(container)] = (container, size)
        return known[1]

    def _weigh_items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield self.weigh(item)


def refuse_beyond(size: int) -> None:
    """Refuse a value of this size."""
    if size > MAX_VALUE_SIZE:
        raise LimitError(f"it makes a value larger than {MAX_VALUE_SIZE} characters")


def check_product(meter: Meter, left: object, right: object) -> None:
    """Before left * right."""
    for value, factor in ((left, right), (right, left)):
        if isinstance(factor, int):
            if isinstance(value, int):
                _check_bits(value.bit_length() + factor.bit_length())
            else:
                refuse_beyond(meter.size(value) * max(factor, 0))


def check_power(left: object, right: object) -> None:
    """Before left ** right."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def check_width(*widths: object) -> None:
    """Before padding to a width, or making that many columns or decimals."""
    if any(isinstance(width, int) and abs(width) > MAX_WIDTH for width in widths):
        raise LimitError(f"it asks for a width beyond {MAX_WIDTH}")


def check_printf(meter: Meter, template: str, values: object) -> None:
    """Before template % values."""
    if "*" in template:
        raise LimitError("it formats with a width taken from a value")
    refuse_beyond(template.count("%") * (_widest(template) + meter.size(values)))


def check_format(meter: Meter, template: str, values: object) -> None:
    """Before template.format(*values)."""
    if _NESTED_FIELD.search(template.replace("{{", "")):
        raise LimitError("it formats with a width taken from a value")
    refuse_beyond(template.count("{") * (_widest(template) + meter.size(values)))


def check_replace(text: str, old: object, new: object) -> None:
    """Before text.replace(old, new)."""
    if isinstance(old, str) and isinstance(new, str):
        refuse_beyond(len(text) + text.count(old) * len(new))


def check_join(separator: object, items: object) -> None:
    """Before separator.join(items)."""
    length = len(separator) if isinstance(separator, str) else 1
    try:
        refuse_beyond(length * len(items))  # type: ignore[arg-type]
    except TypeError:  # a generator: its items are weighed as they come
        check_width(length)


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise LimitError(f"it makes a number of more than {MAX_INT_BITS} bits")


def _widest(template: str) -> int:
    """The largest number spelled in a format string: a bound on its widths and precisions."""
    digits = max(re.findall(r"\d+", template), key=len, default="")
    return int("9" * min(len(digits), 9)) if digits else 0
