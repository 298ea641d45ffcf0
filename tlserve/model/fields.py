"""Typed reads of the settings in a model file, JSON or GGUF alike; what is wrong is named with its file and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tlserve.errors import ModelError
from tlserve.model.files import shown

MAX_INTEGER = 2**31 - 1  # above any real dimension, and what the kernels' indices can hold
# Published settings lie between 1e-12 (a norm's epsilon) and 1e9 (a rotary base); within these bounds products of
# two stay finite in float32.
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one settings object. A null value equals an absent key.

    A read without a default requires its key: its absence is a ModelError like a wrong value.
    """

    values: Mapping[str, object]
    file: Path
    prefix: str = ""  # what stands before each key in messages: "rope_scaling.", "llama."

    def has(self, key: str) -> bool:
        return self._value(key) is not None

    def integer(self, key: str, *, default: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`; true and false are none."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:
            raise self.fault(key, f"must be an integer from {low} to {MAX_INTEGER}, got {shown(value)}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number above zero: every real-valued setting of these models is one."""
        value = self._present(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER:
            return float(value)
        raise self.fault(key, f"must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {shown(value)}")

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.fault(key, f"must be a string, got {shown(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> frozenset[int]:
        """One token id or a list of them; none when the key is absent."""
        value = self._value(key)
        if value is None:
            return frozenset()
        ids = value if isinstance(value, list) else value.tolist() if isinstance(value, np.ndarray) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self.fault(key, f"must name tokens of the vocabulary of {vocab_size}, got {shown(item)}")
        return frozenset(ids)

    def section(self, key: str) -> Fields | None:
        """The object under `key`; None when it is absent or has no keys."""
        value = self._value(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.fault(key, f"must be an object, got {shown(value)}")
        return Fields(value, self.file, f"{self.prefix}{key}.")

    def fault(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.file}: {self.prefix}{key} {problem}")

    def _value(self, key: str) -> object:
        return self.values.get(key)

    def _present(self, key: str, default: object) -> object:
        value = self._value(key)
        if value is not None:
            return value
        if default is None:
            raise self.fault(key, "is missing")
        return default
