"""What tokenizer.json may not ask of the library: it would panic, take all memory, or draw lots.

Real files are far from every bound here.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping

MAX_GROWTH = 64  # times that normalizers may lengthen a text, at worst
MAX_AROUND = 64  # characters, or ids, that may be put around every text


def parts(component: object) -> Iterator[Mapping[str, object]]:
    """A normalizer, pre-tokenizer, post-processor or decoder, and the parts of a sequence of them."""
    if isinstance(component, dict):
        yield component
        for key in ("normalizers", "pretokenizers", "processors", "decoders"):
            inner = component.get(key)
            for part in inner if isinstance(inner, list) else ():
                yield from parts(part)


def fault_of(description: Mapping[str, object]) -> str | None:
    """What is wrong with a description, beginning with its field; None where nothing is."""
    model = description.get("model")
    if not isinstance(model, dict):
        return "model is missing or not an object"
    # The library cuts that many bytes off the second half of each merge, unchecked: a panic, which may end the process.
    if model.get("continuing_subword_prefix"):
        return "model.continuing_subword_prefix is not supported"
    if model.get("dropout"):
        return "model.dropout is not supported: it makes the tokens of a text random"
    return _fault_of_normalizer(description.get("normalizer")) or _fault_of_processor(description.get("post_processor"))


def _fault_of_normalizer(normalizer: object) -> str | None:
    kinds = list(parts(normalizer))
    # A pattern may match nothing, so that its replacement is put between all bytes.
    growth = math.prod(1 + _num_bytes(part.get("content")) for part in kinds if part.get("type") == "Replace")
    if growth > MAX_GROWTH:
        return f"normalizer may make a text {growth} times as long, more than {MAX_GROWTH} times"
    if sum(_num_bytes(part.get("prepend")) for part in kinds) > MAX_AROUND:
        return f"normalizer puts more than {MAX_AROUND} characters before a text"
    if not all(_is_charsmap(part.get("precompiled_charsmap")) for part in kinds if part.get("type") == "Precompiled"):
        return "normalizer.precompiled_charsmap is not one"
    return None


def _num_bytes(text: object) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0


def _is_charsmap(encoded: object) -> bool:
    """Whether the table inside is as long as it says: the library takes memory for what is said."""
    try:
        data = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
    except (binascii.Error, ValueError):
        return False
    size = int.from_bytes(data[:4], "little")
    return len(data) >= 4 and size % 4 == 0 and size <= len(data) - 4


def _fault_of_processor(processor: object) -> str | None:
    num_ids = sum(map(_num_template_ids, parts(processor)))
    if num_ids > MAX_AROUND:
        return f"post_processor puts {num_ids} tokens around a text, more than {MAX_AROUND}"
    return None


def _num_template_ids(part: Mapping[str, object]) -> int:
    """How many ids a TemplateProcessing adds; 0 for any other."""
    known, template = part.get("special_tokens"), part.get("single")
    if not isinstance(known, dict) or not isinstance(template, list):
        return 0
    return sum(_num_ids(known, piece) for piece in template)


def _num_ids(known: Mapping[str, object], piece: object) -> int:
    special = piece.get("SpecialToken") if isinstance(piece, dict) else None
    name = special.get("id") if isinstance(special, dict) else None
    entry = known.get(name) if isinstance(name, str) else None
    ids = entry.get("ids") if isinstance(entry, dict) else None
    return len(ids) if isinstance(ids, list) else 0
