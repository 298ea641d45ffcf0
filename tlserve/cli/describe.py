"""A model and its memory in a few lines, for the banner of a start and for ``check``."""

from __future__ import annotations

from tlserve.config import ServeConfig
from tlserve.overview import Overview

NAME_WIDTH = 10


def describe(view: Overview) -> list[str]:
    """The model, its memory, what it holds, and what computes it."""
    template = "its own" if view.has_own_template else "default"
    return [
        _line("model", f"{view.model_id} ({view.architecture}, {count(view.parameters)}, {', '.join(view.formats)})"),
        _line("files", view.path),
        _line("text", f"vocabulary {view.vocab_size}, tokenizer {view.tokenizer}, chat template {template}"),
        _line("memory", _memory(view)),
        _line("KV cache", _cache(view)),
        _line("context", f"{view.max_model_len} tokens; the model supports {view.model_context}"),
        _line("at once", _streams(view)),
        _line("compute", f"{view.threads} {'thread' if view.threads == 1 else 'threads'}, {view.isa}"),
    ]


def describe_access(config: ServeConfig, api: str, health: str) -> list[str]:
    """Where it is to be found, and who may come in."""
    tls = "on" if config.tls_cert else "off"
    keys = "asked for" if config.api_keys_file else "none"
    return [_line("API", f"{api} (TLS {tls}, API keys {keys})"), _line("health", f"{health} (metrics too)")]


def size(num_bytes: int) -> str:
    """1.5 GiB, 93.0 MiB, 22.5 KiB, 64 B."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def count(number: int) -> str:
    """7.6 billion parameters, 134.5 million parameters, 74304 parameters."""
    for word, factor in (("billion", 10**9), ("million", 10**6)):
        if number >= factor:
            return f"{number / factor:.1f} {word} parameters"
    return f"{number} parameters"


def _line(name: str, text: str) -> str:
    return f"{name:<{NAME_WIDTH}} {text}"


def _memory(view: Overview) -> str:
    draft = f" + draft model {size(view.draft_bytes)}" if view.draft_bytes else ""
    parts = f"weights {size(view.weights_bytes)} + buffers {size(view.buffers_bytes)} + KV {size(view.kv_bytes)}{draft}"
    return f"{parts} = {size(view.total_bytes)} of {size(view.available_bytes)} free"


def _cache(view: Overview) -> str:
    each = size(view.block_bytes // view.block_size)
    return f"{view.num_blocks} blocks of {view.block_size} tokens: {view.num_tokens} tokens of {each}"


def _streams(view: Overview) -> str:
    """How many requests run at the same time: of the longest context, and as many as may."""
    full, most = view.num_full_streams, view.max_num_seqs
    text = f"{full} {'request' if full == 1 else 'requests'} of {view.max_model_len} tokens"
    return text if full == most or not view.tokens_each else f"{text}, or {most} of {view.tokens_each}"
