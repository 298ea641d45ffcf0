"""What a trace says of a generation: its parameters by OpenTelemetry's GenAI conventions, and where its time went.

No text of a client is in it: neither prompts nor answers, nor stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlserve.engine.request import GenRequest
from tlserve.http.trace import Attribute, Trace
from tlserve.openai.parse import GenSpec


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the engine took a request in, in trio's time, and the seconds from then on; None for what never came."""

    accepted_at: float
    queue_time: float | None
    first_token_time: float | None
    end_time: float  # to the last token, or to what ended the request before it

    def add_to(self, trace: Trace) -> None:
        """The phases ``queue``, ``prefill`` and ``decode``, as far as the request came."""
        began = {"queue": 0.0, "prefill": self.queue_time, "decode": self.first_token_time}
        ended = self.end_time
        for name, start in reversed(began.items()):
            if start is not None:
                trace.add_phase(name, self.accepted_at + start, self.accepted_at + ended)
                ended = start


def describe_generation(trace: Trace, spec: GenSpec, requests: Sequence[GenRequest], response_id: str) -> None:
    params = spec.params
    attributes: dict[str, Attribute | None] = {
        "gen_ai.request.model": spec.model,
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": spec.seed,
        "gen_ai.request.choice.count": len(requests) if len(requests) > 1 else None,
        "gen_ai.request.stream": spec.stream or None,
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": spec.model,
    }
    trace.describe({name: value for name, value in attributes.items() if value is not None})


def describe_embeddings(trace: Trace, *, model: str, encoding_format: str, dimensions: int) -> None:
    trace.describe(
        {
            "gen_ai.request.model": model,
            "gen_ai.request.encoding_formats": (encoding_format,),
            "gen_ai.embeddings.dimension.count": dimensions,
            "gen_ai.response.model": model,
        }
    )
