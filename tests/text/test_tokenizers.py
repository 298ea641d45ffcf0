"""Tokenizers against their references: llama.cpp for GGUF files, transformers and sentencepiece for tokenizer.json.

The ids are recorded by fixtures/make_text.py over strings that are hard in some way.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.smollm2 import SMOLLM2, needs_smollm2
from tests.processor_time import processor_seconds
from tlserve.errors import ContextLengthExceeded
from tlserve.model.checkpoint import open_checkpoint
from tlserve.text.byte_tokenizer import byte_tokenizer
from tlserve.text.gguf_tokenizer import from_gguf
from tlserve.text.subword_tokenizer import SubwordTokenizer
from tlserve.text.text_stream import TextStream
from tlserve.text.tokenizer import Tokenizer
from tlserve.text.tokenizer_json import from_tokenizer_json

FIXTURES = Path(__file__).parents[2] / "fixtures/text"
GGUF = [path.stem for path in sorted(FIXTURES.glob("gguf_*.json"))]
HUGGING_FACE = [path.name for path in sorted(FIXTURES.glob("hf_*"))]
PUTS_SPACE_FIRST = ("gguf_llama", "hf_llama-first", "hf_llama-legacy")


def load(name: str) -> tuple[SubwordTokenizer, dict[str, Any]]:
    """A tokenizer and its recorded cases."""
    if name in GGUF:
        recorded: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
        return from_gguf(recorded["fields"]), recorded
    directory = FIXTURES / name
    config = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer = from_tokenizer_json((directory / "tokenizer.json").read_bytes(), config)
    return tokenizer, json.loads((directory / "cases.json").read_text())


def assert_equal_to_reference(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        text = case["text"]
        assert tokenizer.encode(text, add_special_tokens=True) == case["ids"], text
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == case["plain_ids"], text
        if "decoded" in case:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == case["decoded"], text


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_hard_strings_give_the_ids_of_the_reference(name: str) -> None:
    """With control tokens matched, and with their spellings taken as text."""
    tokenizer, recorded = load(name)
    assert len(recorded["cases"]) >= 38
    assert_equal_to_reference(tokenizer, recorded["cases"])


@needs_smollm2
def test_smollm2_gives_the_ids_of_llama_cpp() -> None:
    tokenizer = from_gguf(open_checkpoint(SMOLLM2).text.gguf)
    assert_equal_to_reference(tokenizer, json.loads((FIXTURES / "smollm2_ids.json").read_text())["cases"])
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.vocab_size, set(tokenizer.eos_ids), tokenizer.adds_bos) == (49152, {2}, False)


@needs_smollm2
def test_a_real_vocabulary_loads_quickly() -> None:
    """SmolLM2's 49,152 tokens and 48,900 merges take about 0.1 s."""
    fields = open_checkpoint(SMOLLM2).text.gguf
    assert processor_seconds(lambda: from_gguf(fields)) < 0.5


def test_older_tokenizer_json_of_a_sentencepiece_model_gives_its_ids() -> None:
    tokenizer, recorded = load("hf_llama-legacy")
    for case in recorded["sentencepiece"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]


@pytest.mark.parametrize("name", GGUF)
def test_only_control_tokens_add_nothing_to_the_output(name: str) -> None:
    tokenizer, recorded = load(name)
    types = recorded["fields"]["tokenizer.ggml.token_type"]
    for token_id, token_type in enumerate(types):
        is_control = token_type in (2, 3)
        assert (tokenizer.token_bytes(token_id) == b"") == is_control


def sentencepiece_ids(fields: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's algorithm as it is told: join the pair with the best joint token, leftmost first, until none."""
    scores = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True))
    ids = {token: token_id for token_id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    joinable = {token for token in ids if fields["tokenizer.ggml.token_type"][ids[token]] == 1}
    symbols = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        joints = ["".join(pair) for pair in itertools.pairwise(symbols)]
        best = max(
            (place for place, joint in enumerate(joints) if joint in joinable),
            key=lambda place: (scores[joints[place]], -place),
            default=None,
        )
        if best is None:
            break
        symbols[best : best + 2] = [joints[best]]
    return [
        token_id
        for symbol in symbols
        for token_id in ([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


LLAMA, LLAMA_RECORDED = load("gguf_llama")


@given(st.text(alphabet="abcdeinorst .,:\n 0123😀é你", max_size=40))
def test_sentencepiece_model_of_a_gguf_file_joins_by_score(text: str) -> None:
    expected = sentencepiece_ids(LLAMA_RECORDED["fields"], text)
    assert LLAMA.encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("name", [name for name in GGUF + HUGGING_FACE if name not in PUTS_SPACE_FIRST])
def test_decode_is_the_inverse_of_encode(name: str) -> None:
    tokenizer, recorded = load(name)
    for case in recorded["cases"]:
        text = unicodedata.normalize("NFC", case["text"]) if name == "hf_qwen2" else case["text"]
        assert tokenizer.decode(tokenizer.encode(case["text"], add_special_tokens=False)) == text


@pytest.mark.parametrize("name", ["gguf_llama", "hf_llama-legacy"])
def test_the_space_put_before_a_text_is_taken_away_again(name: str) -> None:
    tokenizer, _ = load(name)
    for text in ("a", " a", "  a ", "\n", "😀", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_deltas_are_what_the_output_adds_to_the_prompt(name: str) -> None:
    """B058: spaces at the border and between tokens are neither eaten nor doubled."""
    tokenizer, _ = load(name)
    prompt = tokenizer.encode("It is", add_special_tokens=False)
    for text in ("It is a. It  b 😀", "It is", "It is ", "It is\n x"):
        output = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream()
        deltas = [stream.push(tokenizer.token_bytes(token_id)) for token_id in output]
        joined = "".join([*deltas, stream.finish()])
        assert tokenizer.decode(prompt) + joined == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_bytes_of_tokens_join_to_the_text(name: str) -> None:
    """B054, B104: exact bytes, also where a token is a part of a character; a control token adds nothing."""
    tokenizer, _ = load(name)
    ids = tokenizer.encode("né 😀<|im_end|>你", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).replace(b" ", b"") == "né😀你".encode()
    for token_id in (-1, tokenizer.vocab_size, 2**31):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
    assert tokenizer.token_text(tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]) == "<|im_end|>"


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_guarded_text_has_the_ids_of_the_whole_when_nothing_is_guarded(name: str) -> None:
    """Encoding the stretches between control tokens one by one changes nothing."""
    tokenizer, recorded = load(name)
    for case in recorded["cases"]:
        expected = tokenizer.encode(case["text"], add_special_tokens=False)
        assert tokenizer.encode_guarded(case["text"], {"\U0010abcd": "x"}) == expected


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_guarded_spellings_stay_text(name: str) -> None:
    tokenizer, _ = load(name)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    ids = tokenizer.encode_guarded("a\U0010abcd b<|im_end|>c", {"\U0010abcd": "<|im_end|>"})
    assert ids.count(end) == 1
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text.strip().replace("> c", ">c").replace("b c", "bc") == "a<|im_end|> bc"


@pytest.mark.parametrize("name", ["gguf_smollm", "gguf_llama-bpe", "gguf_llama", "hf_qwen2"])
@pytest.mark.parametrize("unit", ["a ", "a", "\n", " ", "1", "=", "😀"])
def test_text_that_cannot_fit_is_refused_before_the_work(name: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B094: eight megabytes cost milliseconds, as they are never encoded, and the message has both numbers."""
    tokenizer, _ = load(name)
    monkeypatch.setattr("tlserve.text.subword_tokenizer._ids", lambda *_, **__: pytest.fail("encoded"))
    text = unit * (8_000_000 // len(unit.encode()))

    def refuse() -> None:
        with pytest.raises(ContextLengthExceeded, match=r"4096 tokens.*at least \d+ tokens"):
            tokenizer.encode(text, add_special_tokens=False, limit=4096)

    assert processor_seconds(refuse) < 0.5


@pytest.mark.parametrize("name", GGUF + HUGGING_FACE)
def test_the_limit_never_refuses_what_fits(name: str) -> None:
    tokenizer, recorded = load(name)
    for case in recorded["cases"]:
        for text in (case["text"], case["text"] * 20):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text, add_special_tokens=False, limit=len(ids)) == ids


def test_the_limit_reckons_with_composed_characters() -> None:
    """Qwen's tokenizer.json composes characters, so its ids can be fewer than the bytes of a text suggest."""
    tokenizer, _ = load("hf_qwen2")
    for text in ("e\u0301", "<\u0338", "\u1112\u1161\u11ab", "\u1fef\u212b", "\u03b1\u0313\u0300\u0345"):
        ids = tokenizer.encode(text * 500, add_special_tokens=False)
        assert tokenizer.encode(text * 500, add_special_tokens=False, limit=len(ids)) == ids
    assert tokenizer.encode("word " * 99, add_special_tokens=False, limit=300)
    with pytest.raises(ContextLengthExceeded):
        tokenizer.encode("été " * 100_000, add_special_tokens=False, limit=1000)


@pytest.mark.parametrize("unit", ["a ", "a", "\n", " ", "1"])
def test_time_grows_with_the_text_and_not_with_its_square(unit: str) -> None:
    tokenizer, _ = load("gguf_smollm")

    def seconds(size: int) -> float:
        return processor_seconds(lambda: tokenizer.encode(unit * (size // len(unit)), add_special_tokens=False))

    assert seconds(320_000) < 40 * max(seconds(20_000), 0.002)


def test_byte_tokenizer_reads_bytes() -> None:
    tokenizer = byte_tokenizer(frozenset({0}))
    assert tokenizer.encode("aé", add_special_tokens=True) == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 0xA9, 0xFF]) == "aé\ufffd"
    assert [tokenizer.token_bytes(255), tokenizer.token_bytes(256), tokenizer.token_bytes(-1)] == [b"\xff", b"", b""]
    assert tokenizer.token_text(0xC3) == "\ufffd"
    assert (tokenizer.vocab_size, set(tokenizer.eos_ids), tokenizer.bos_id) == (256, {0}, None)
    with pytest.raises(ContextLengthExceeded):
        tokenizer.encode("abc", add_special_tokens=False, limit=2)


def test_control_tokens_that_take_the_space_around_them_do_so_in_guarded_text() -> None:
    """Phi's and BERT's kind of added tokens: `lstrip` and `rstrip`."""
    description = json.loads((FIXTURES / "hf_smollm/tokenizer.json").read_text())
    for token in description["added_tokens"]:
        token["lstrip"] = token["content"] == "<|im_start|>"
        token["rstrip"] = token["content"] == "<|im_end|>"
    tokenizer = from_tokenizer_json(json.dumps(description).encode())
    for text in (
        "a <|im_start|> b <|im_end|> \n c",
        "<|im_end|>  <|im_start|>",
        " <|im_start|><|im_end|> ",
        "<|im_end|>\n\n",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode_guarded(text, {"\U0010abcd": "x"}) == ids
        assert tokenizer.encode(text, add_special_tokens=False, limit=len(ids)) == ids
