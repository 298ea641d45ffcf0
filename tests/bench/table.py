"""All groups by name, in the order of the document."""

from __future__ import annotations

from typing import Final

from tests.bench.cache import CACHE
from tests.bench.groups import BANDWIDTH, LONG, NEIGHBOUR, PERPLEXITY, Group, engine_group
from tests.bench.http_groups import CEILING, EVENTS_ALONE, ONE_STREAM, OVERHEAD, streams_group
from tests.bench.large_group import LARGE
from tests.bench.spec import SPEC
from tests.bench.stall import STALL

GROUPS: Final[dict[str, Group]] = {
    "Q4_1": engine_group("Q4_1", (5, 2.2, 5)),
    "Q4_0": engine_group("Q4_0", (2.2, 1.6, 2.5)),
    "Q8_0": engine_group("Q8_0", (2.2, 1.6, 2.5)),
    "Q4_K_M": engine_group("Q4_K_M", (2.2, 1.6, 2.5)),
    "BF16": engine_group("BF16", (0.8, 1.2, 1.5)),
    "long": LONG,
    "neighbour": NEIGHBOUR,
    "bandwidth": BANDWIDTH,
    "http-Q4_1": streams_group("Q4_1", 5),
    "http-Q4_0": streams_group("Q4_0", 2.5),
    "http-1": ONE_STREAM,
    "http-overhead": OVERHEAD,
    "http-events": EVENTS_ALONE,
    "ceiling": CEILING,
    "8b": LARGE,
    "perplexity": PERPLEXITY,
    "cache": CACHE,
    "spec": SPEC,
    "stall": STALL,
}
