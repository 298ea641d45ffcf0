"""Which of the formats of a page an Accept header asks for, in the spelling that prometheus_client's encoder reads.

The encoder takes the first format that it finds in a header, whatever its weight, and gives back any version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# The versions of each; "" where none was named. An OpenMetrics scraper of before 1.0.0 gets text.
_VERSIONS: Final = {"application/openmetrics-text": ("", "1.0.0"), "text/plain": ("", "0.0.4", "1.0.0")}
_ESCAPINGS: Final = ("allow-utf-8", "underscores", "dots", "values")
_WEIGHT: Final = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
_BLANKS: Final = " \t"


def preferred(accept: str) -> str:
    """The one format of ``accept`` with the greatest weight, the first of equals; "" where none is known."""
    return max(_known(accept), key=lambda item: item[0], default=(0.0, ""))[1]


def _known(accept: str) -> Iterator[tuple[float, str]]:
    """Weight and spelling of each range that names a format of ours and does not refuse it."""
    for item in accept.split(","):
        kind, *rest = (part.strip(_BLANKS) for part in item.split(";"))
        kind = kind.lower()
        parameters = {name.lower(): value.strip('"') for name, _, value in (part.partition("=") for part in rest)}
        weight, version = parameters.get("q", "1"), parameters.get("version", "")
        is_known = version in _VERSIONS.get(kind, ()) and _WEIGHT.fullmatch(weight)
        if not is_known or float(weight) == 0:
            continue
        spelling = f"{kind};version={version}" if version else kind
        escaping = parameters.get("escaping", "").lower()
        yield float(weight), f"{spelling};escaping={escaping}" if escaping in _ESCAPINGS else spelling
