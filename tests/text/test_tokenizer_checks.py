"""Files that would have the library panic, take all memory or draw lots: refused at load, or one text alone fails."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from tlserve.errors import ModelError
from tlserve.text.subword_tokenizer import TokenizerFault
from tlserve.text.tokenizer_json import from_tokenizer_json

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
UNIGRAM: dict[str, Any] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CATASTROPHIC = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}


def description(**fields: Any) -> bytes:
    plain = {"version": "1.0", "added_tokens": [], "decoder": BYTE_LEVEL, "model": BPE}
    return json.dumps(plain | fields).encode()


def replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*normalizers: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": normalizers}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(num_ids: int, times: int, name: str = "x") -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [0] * num_ids, "tokens": ["a"] * num_ids}}
    single: list[Any] = [{"SpecialToken": {"id": name, "type_id": 0}}] * times
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


HOSTILE = {
    "text a billion times as long": (
        {"normalizer": sequence(*[replace("a" * 1000)] * 3)},
        "normalizer may make a text 1003003001 times as long",
    ),
    "text before every text": (
        {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a" * 50}] * 2)},
        "normalizer puts more than 64 characters before a text",
    ),
    "nothing replaced by something": (
        {"normalizer": replace("xxxx", ""), "pre_tokenizer": BYTE_LEVEL},
        "the library fails on a text with PanicException",
    ),
    "a table of four gigabytes": ({"normalizer": charsmap(b"\xff" * 4)}, "precompiled_charsmap is not one"),
    "a table without a size": ({"normalizer": charsmap(b"\0")}, "precompiled_charsmap is not one"),
    "a table that is a number": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}},
        "precompiled_charsmap is not one",
    ),
    "a table that points past its end": ({"normalizer": charsmap(b"\x10\0\0\0" + b"\xff" * 16)}, "fails on a text"),
    "a billion tokens around a text": (
        {"post_processor": template(1_000, 1_000_000 // 1_000)},
        "post_processor puts 1000000 tokens around a text, more than 64",
    ),
    "the same in a sequence": (
        {"post_processor": {"type": "Sequence", "processors": [template(65, 1)]}},
        "post_processor puts 65 tokens",
    ),
    "a token of nobody around a text": ({"post_processor": template(1, 1, name="y")}, "cannot be used"),
    "tokens past the vocabulary": (
        {
            "post_processor": {
                "type": "RobertaProcessing",
                "sep": ["a", 4_000_000_000],
                "cls": ["b", 1],
                "trim_offsets": True,
                "add_prefix_space": True,
            }
        },
        "it gives token 4000000000, past its vocabulary",
    ),
    "chunks of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on a text"),
    "no token for what is unknown": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
        "fails on a text",
    ),
    "tokens by lot": ({"model": BPE | {"dropout": 0.1}}, "model.dropout is not supported"),
}


@pytest.mark.parametrize(("fields", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_description_is_refused_at_load(fields: dict[str, Any], message: str) -> None:
    began = time.process_time()
    with pytest.raises(ModelError) as caught:
        from_tokenizer_json(description(**fields), directory="model")
    assert str(caught.value).startswith("model/tokenizer.json: ")
    assert message in str(caught.value)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": UNIGRAM, "decoder": None},
        {"model": BPE | {"dropout": 0.0}},
        {"normalizer": sequence(replace('"', "``"), replace("▁", " "), {"type": "Prepend", "prepend": "▁"})},
        {"post_processor": template(1, 2)},
    ],
)
def test_what_real_files_ask_for_passes(fields: dict[str, Any]) -> None:
    assert from_tokenizer_json(description(**fields)).encode("ab", add_special_tokens=False)


def test_a_description_nested_without_end_is_refused() -> None:
    component = '{"type":"Sequence","normalizers":[' * 450 + "]}" * 450
    raw = description().replace(b'"version"', f'"normalizer":{component},"version"'.encode())
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        from_tokenizer_json(raw)


def test_a_text_that_the_library_fails_on_fails_alone() -> None:
    """The library gives up a regular expression with a panic, which is no Exception: uncaught it ends the server."""
    tokenizer = from_tokenizer_json(description(pre_tokenizer=CATASTROPHIC))
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
    with pytest.raises(TokenizerFault, match=r"^the library fails on a text with PanicException$"):
        tokenizer.encode("a" * 2_000 + " b", add_special_tokens=False)
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
