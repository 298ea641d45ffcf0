"""What a model's files say about text, and every way in which they can be wrong.

Invariant: any value in any field of a tokenizer's files gives a tokenizer that encodes, or ModelError.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tlserve.errors import ModelError
from tlserve.text.chat import ChatEncoder
from tlserve.text.gguf_tokenizer import from_gguf
from tlserve.text.loading import load_text
from tlserve.text.template import DEFAULT_TEMPLATE
from tlserve.text.tokenizer_json import from_tokenizer_json

FIXTURES = Path(__file__).parents[2] / "fixtures/text"
TOKENIZER_JSON = (FIXTURES / "hf_smollm/tokenizer.json").read_bytes()
SMOLLM = json.loads((FIXTURES / "gguf_smollm.json").read_text())["fields"]
LLAMA = json.loads((FIXTURES / "gguf_llama.json").read_text())["fields"]


@dataclass
class Text:
    """The files of a model, as model/checkpoint.py hands them over."""

    vocab_size: int = 1000
    tokenizer_json: bytes | None = None
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)
    generation_config: Mapping[str, object] = field(default_factory=dict)
    chat_template_jinja: str | None = None
    gguf: Mapping[str, object] = field(default_factory=dict)


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
PLACES: list[tuple[str | int, ...]] = [
    *[(key,) for key in json.loads(TOKENIZER_JSON)],
    *[("model", key) for key in json.loads(TOKENIZER_JSON)["model"]],
    *[("added_tokens", 0), ("added_tokens", 0, "content"), ("added_tokens", 0, "id"), ("added_tokens", 0, "special")],
    *[("pre_tokenizer", "type"), ("pre_tokenizer", "pretokenizers", 0), ("decoder", "type"), ("model", "vocab", "a")],
    ("model", "merges", 0),
]


def load(**files: Any) -> ChatEncoder:
    return load_text(Text(**files), Path("model"))


def test_the_first_template_in_order_is_used() -> None:
    sources: dict[str, Any] = {
        "generation_config": {"chat_template": "generation"},
        "tokenizer_config": {"chat_template": "tokenizer"},
        "chat_template_jinja": "jinja",
        "gguf": {**SMOLLM, "tokenizer.chat_template": "gguf"},
    }
    for expected in ("generation", "tokenizer", "jinja", "gguf"):
        assert load(**sources).template.source == expected
        sources = dict(list(sources.items())[1:])
    assert load(gguf=SMOLLM).template.source == DEFAULT_TEMPLATE


def test_a_list_of_templates_has_a_default() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(tokenizer_config={"chat_template": named}).template.source == "d"
    with pytest.raises(ModelError, match=r"model/tokenizer_config\.json: chat_template must be a string"):
        load(tokenizer_config={"chat_template": named[:1]})


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"generation_config": {"chat_template": "{% for %}"}}, "model/generation_config.json: chat_template: line 1"),
        ({"generation_config": {"chat_template": 5}}, "model/generation_config.json: chat_template must be"),
        ({"tokenizer_config": {"chat_template": "{{ ''.__class__ }}"}}, "model/tokenizer_config.json: chat_template"),
        ({"chat_template_jinja": "{{ a|nothing }}"}, "model/chat_template.jinja: the template: line 1"),
        ({"gguf": {**SMOLLM, "tokenizer.chat_template": "{% if %}"}}, "model: tokenizer.chat_template"),
        ({"generation_config": {"eos_token_id": "x"}}, "model/generation_config.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": [0, 1000]}}, "model/generation_config.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": True}}, "model/generation_config.json: eos_token_id"),
        ({"vocab_size": 100}, "model: tokenizer.json is missing"),
        ({"vocab_size": 300, "tokenizer_json": TOKENIZER_JSON}, "model: the tokenizer has 778 tokens"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(files: dict[str, Any], place: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(**files)
    assert str(caught.value).startswith(place)


def test_every_named_end_of_text_ends_a_generation() -> None:
    fields = {**SMOLLM, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert load(gguf=fields, generation_config={"eos_token_id": [7, 8]}).tokenizer.eos_ids == {2, 5, 6, 7, 8}
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"}
    tokenizer = load(
        tokenizer_json=TOKENIZER_JSON, tokenizer_config=config, generation_config={"eos_token_id": 1}
    ).tokenizer
    assert tokenizer.eos_ids == {1, 2}
    assert (tokenizer.eos_token, tokenizer.bos_id) == ("<|im_end|>", 0)
    assert load(generation_config={"eos_token_id": 10}).tokenizer.eos_ids == {10}


def test_a_model_without_tokenizer_files_reads_bytes() -> None:
    assert load(vocab_size=256).tokenizer.encode("é", add_special_tokens=True) == [0xC3, 0xA9]


def changed(**model: Any) -> bytes:
    """tokenizer.json with parts replaced."""
    return json.dumps({**json.loads(TOKENIZER_JSON), **model}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"model": ', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"\xff\xfe{}", "not a JSON object"),
        (b"{}", "model is missing"),
        (b'{"model": 5}', "model is missing"),
        (b'{"model": {"type": "Nothing"}}', "cannot be used"),
        (TOKENIZER_JSON[:-100], "not a JSON object"),
        (changed(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}), "cannot be used"),
        (changed(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "cannot be used"),
        (changed(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]), "vocab is empty"),
        (changed(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "'WordPiece' is not supported"),
        (changed(pre_tokenizer={"type": "Nothing"}), "cannot be used"),
        # the library would panic on the merge, now and then without a way back
        (
            changed(
                model={
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1},
                    "merges": [["a", "b"]],
                    "continuing_subword_prefix": "##",
                }
            ),
            "model.continuing_subword_prefix is not supported",
        ),
        (
            changed(
                pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
            ),
            "used",
        ),
    ],
)
def test_a_broken_tokenizer_json_is_refused_quickly(data: bytes, reason: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ModelError, match=reason) as caught:
        from_tokenizer_json(data, directory="model")
    assert str(caught.value).startswith("model/tokenizer.json: ")
    assert len(str(caught.value)) < 400
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("num_tokens", [1, 10_000])
def test_control_tokens_are_bounded(num_tokens: int) -> None:
    """They are looked for in every message."""
    spellings = [f"<{number:099}>" * 2 if num_tokens == 1 else f"<{number:099}>" for number in range(num_tokens)]
    added = [{**ADDED, "id": 1000 + place, "content": spelling} for place, spelling in enumerate(spellings)]
    with pytest.raises(ModelError, match=r"tokenizer\.json: added_tokens: control tokens have more than"):
        from_tokenizer_json(changed(added_tokens=added))
    fields = {**SMOLLM, "tokenizer.ggml.tokens": spellings, "tokenizer.ggml.token_type": [3] * num_tokens}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens control tokens have more than"):
        from_gguf({**fields, "tokenizer.ggml.merges": []})


@settings(max_examples=examples(100, cost=10))
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5), st.data())
def test_any_value_in_a_tokenizer_file_loads_or_is_named(value: object, data: st.DataObject) -> None:
    """Nothing but ModelError for one wrong field, wherever it is."""
    description = json.loads(TOKENIZER_JSON)
    place = description
    for key in data.draw(st.sampled_from(PLACES)):
        parent, place = place, place[key]
    parent[key] = value
    with contextlib.suppress(ModelError):
        from_tokenizer_json(json.dumps(description).encode()).encode("a", add_special_tokens=True)
    fields = {**SMOLLM, data.draw(st.sampled_from(sorted({**SMOLLM, **LLAMA}))): value}
    with contextlib.suppress(ModelError):
        from_gguf(fields).encode("a", add_special_tokens=True)


@pytest.mark.parametrize("value", [5, ["a"], {"content": 5}, "<nowhere>"])
@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_named_token_must_be_in_the_vocabulary(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"model/tokenizer_config\.json: {key}"):
        from_tokenizer_json(TOKENIZER_JSON, {key: value}, directory="model")


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    """A server that cut prompts silently would answer another question."""
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer = from_tokenizer_json(changed(truncation=truncation, padding={**padding, "pad_to_multiple_of": None}))
    plain = from_tokenizer_json(TOKENIZER_JSON)
    for text in ("a", "a longer text than three tokens"):
        assert tokenizer.encode(text, add_special_tokens=True) == plain.encode(text, add_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "tokenizer.ggml.model is missing"),
        ({**SMOLLM, "tokenizer.ggml.model": 5}, "tokenizer.ggml.model must be a string"),
        ({**SMOLLM, "tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({**SMOLLM, "tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm' is not supported"),
        ({**SMOLLM, "tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({**SMOLLM, "tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({**SMOLLM, "tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({**SMOLLM, "tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens must be a list of str"),
        ({**SMOLLM, "tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({**SMOLLM, "tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 values"),
        ({**SMOLLM, "tokenizer.ggml.token_type": ["a"] * 778}, "tokenizer.ggml.token_type must be a list of int"),
        ({**SMOLLM, "tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({**SMOLLM, "tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges 'a' does not join"),
        ({**SMOLLM, "tokenizer.ggml.merges": ["a nowhere"]}, "tokenizer.ggml.merges 'a nowhere' does not join"),
        ({**SMOLLM, "tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges 'a b c' does not join"),
        ({**SMOLLM, "tokenizer.ggml.eos_token_id": 778}, "tokenizer.ggml.eos_token_id must be one of 778 ids"),
        ({**SMOLLM, "tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id must be one of 778 ids"),
        ({**SMOLLM, "tokenizer.ggml.eot_token_id": True}, "tokenizer.ggml.eot_token_id must be one of 778 ids"),
        ({**SMOLLM, "tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({**LLAMA, "tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing"),
        ({**LLAMA, "tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores has 1 values"),
        ({**LLAMA, "tokenizer.ggml.scores": [float("nan")] * 700}, "tokenizer.ggml.scores has a value"),
        ({**LLAMA, "tokenizer.ggml.tokens": ["a" * 100_000] * 700}, "tokenizer.ggml.tokens has a token longer"),
        ({**LLAMA, "tokenizer.ggml.unknown_token_id": 700}, "tokenizer.ggml.unknown_token_id must be one of"),
        (
            {**SMOLLM, "tokenizer.ggml.tokens": ["\ud800"] * 778, "tokenizer.ggml.merges": []},
            "tokenizer.ggml: cannot be used",
        ),
    ],
)
def test_a_broken_gguf_tokenizer_is_refused_quickly(fields: dict[str, object], place: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        from_gguf(fields, file="m.gguf")
    assert str(caught.value).startswith(f"m.gguf: {place}")
    assert len(str(caught.value)) < 400
    assert time.perf_counter() - start < 1


def test_gguf_defaults_are_those_of_llama_cpp() -> None:
    named = ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token")
    llama = from_gguf({key: value for key, value in LLAMA.items() if not key.endswith(named)})
    assert (llama.bos_id, set(llama.eos_ids), llama.adds_bos) == (1, {2}, True)
    smollm = from_gguf({key: value for key, value in SMOLLM.items() if not key.endswith(named)})
    assert (smollm.bos_id, set(smollm.eos_ids), smollm.adds_bos) == (None, set(), False)


def test_gguf_may_ask_for_bos_and_eos() -> None:
    tokenizer = from_gguf({**SMOLLM, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a", add_special_tokens=True) == [0, *plain, 2]
    assert tokenizer.adds_bos
