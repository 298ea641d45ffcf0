"""Invariant: a model opens as one thing with every tensor it needs, or ModelError says in one line why not."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.model.containers import gguf_bytes, gguf_text, write_safetensors
from tests.model.gguf_models import random_weights, wide_config, write_gguf_model
from tests.model.smollm2 import SMOLLM2, needs_smollm2
from tests.reference import ReferenceModel
from tlserve.errors import ModelError
from tlserve.model.checkpoint import Checkpoint, fingerprint, open_checkpoint
from tlserve.model.config import ModelConfig, inverse_frequencies
from tlserve.model.layout import EMBEDDING, HEAD, interleaved_order
from tlserve.model.quants import dequantise
from tlserve.model.rope import Llama3Scaling, PairFactors
from tlserve.model.tensors import Format

FIXTURES = Path(__file__).parents[2] / "fixtures"
RANDOM_MODELS = ("tiny-llama", "tiny-llama-bias", "tiny-qwen2", "tiny-qwen3")
NARROW: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of the tiny llama that a test may spoil."""
    return Path(shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "llama"))


def edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


def stored_floats(directory: Path) -> dict[str, NDArray[np.float32]]:
    return {name: dequantise(tensor) for name, tensor in open_checkpoint(directory).tensors.items()}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_every_fixture_opens_with_its_files_as_views(name: str) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    assert checkpoint.config.eos_token_ids == {256}
    assert checkpoint.head.shape == (257, 64)
    assert not any(tensor.data.flags.owndata for tensor in checkpoint.tensors.values())


def test_the_succ_bigram_says_the_next_byte() -> None:
    """The worked example: after a come b, c, d."""
    checkpoint = open_checkpoint(FIXTURES / "succ")
    model = ReferenceModel(checkpoint)
    assert bytes(model.greedy(b"a", 3)) == b"bcd"
    assert model.greedy([255], 1) == [0]
    assert checkpoint.text.generation_config["chat_template"] == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert checkpoint.text.tokenizer_json is None


def test_a_bigram_has_one_matrix_of_logits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": 3}))
    logits = np.arange(9, dtype=np.float32).reshape(3, 3)
    write_safetensors(tmp_path / "model.safetensors", {"any.name": logits})
    assert dequantise(open_checkpoint(tmp_path).tensors["logits"]).tolist() == logits.tolist()
    for tensors, message in (
        ({"a": logits, "b": logits}, "a bigram has one tensor, found 2"),
        ({}, "a bigram has one tensor, found 0"),
        ({"a": logits[:2]}, r"tensor 'logits' must have shape \[3, 3\], got \[2, 3\]"),
        ({"a": logits.astype(np.float16)}, "tensor 'a' must be F32, got F16"),
    ):
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(ModelError, match=message):
            open_checkpoint(tmp_path)


def write_llama(directory: Path, tensors: Mapping[str, NDArray[np.generic]], tie: object) -> Checkpoint:
    write_safetensors(directory / "model.safetensors", tensors)
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": tie}
    if tie is None:
        del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))
    return open_checkpoint(directory)


def test_a_tied_flag_and_a_head_that_disagree(llama: Path) -> None:
    """B121: a head in the file is the head whatever the flag says; without one the flag must be true."""
    tensors = stored_floats(llama)
    head = tensors[EMBEDDING] + 1
    for tie in (True, False, None):
        checkpoint = write_llama(llama, tensors | {HEAD: head}, tie)
        assert np.array_equal(dequantise(checkpoint.head), head)
    assert write_llama(llama, tensors, True).head.name == EMBEDDING
    for tie in (False, None):  # the default of each of these families is untied
        with pytest.raises(ModelError, match=r"tensor 'lm_head\.weight' is missing"):
            write_llama(llama, tensors, tie)


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_that_is_a_copy_of_the_embedding_is_the_embedding(llama: Path, tie: bool) -> None:
    tensors = stored_floats(llama)
    checkpoint = write_llama(llama, tensors | {HEAD: tensors[EMBEDDING]}, tie)
    assert HEAD not in checkpoint.tensors
    assert checkpoint.head.name == EMBEDDING
    halved = tensors[EMBEDDING].astype(np.float16)
    assert write_llama(llama, tensors | {HEAD: halved}, tie).head.format is Format.F16


def test_tensors_that_do_not_fit_the_config_are_refused(llama: Path) -> None:
    tensors = stored_floats(llama)
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    spoiled: dict[str, dict[str, NDArray[np.float32]]] = {
        rf"tensor '{query}' is missing": {name: value for name, value in tensors.items() if name != query},
        rf"tensor '{query}' must have shape \[64, 64\], got \[32, 128\]": tensors | {query: np.zeros((32, 128), "f4")},
        rf"tensor '{norm}' must have shape \[64\], got \[8, 8\]": tensors | {norm: np.zeros((8, 8), "f4")},
        "tensor 'model.layers.2.mlp.up_proj.weight' has no place": tensors
        | {"model.layers.2.mlp.up_proj.weight": np.zeros((96, 64), "f4")},
        "tensor 'model.layers.0.self_attn.q_proj.bias' has no place": tensors
        | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, "f4")},
    }
    for message, wrong in spoiled.items():
        with pytest.raises(ModelError, match=rf"^{re.escape(str(llama))}: {message}"):
            write_llama(llama, wrong, True)


def test_a_billion_layers_are_missed_at_the_first(llama: Path) -> None:
    edit_json(llama / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.2\.input_layernorm\.weight' is missing"):
        open_checkpoint(llama)


def test_frequencies_stored_by_old_writers_are_left_aside(llama: Path) -> None:
    tensors = stored_floats(llama) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")}
    assert len(write_llama(llama, tensors, True).tensors) == len(tensors) - 1


def test_a_sharded_model_is_the_same_model(llama: Path) -> None:
    whole = open_checkpoint(llama)
    tensors = stored_floats(llama)
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:9], "model-2-of-2.safetensors": names[9:]}
    for file, members in parts.items():
        write_safetensors(llama / file, {name: tensors[name] for name in members})
    (llama / "model.safetensors").unlink()
    weight_map = {name: file for file, members in parts.items() for name in members}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = open_checkpoint(llama)
    assert fingerprint(sharded) == fingerprint(whole)
    assert np.array_equal(ReferenceModel(sharded).logits(b"abc"), ReferenceModel(whole).logits(b"abc"))


def test_a_fingerprint_tells_weights_and_configs_apart(llama: Path) -> None:
    seen = {fingerprint(open_checkpoint(FIXTURES / name)) for name in RANDOM_MODELS}
    tensors = stored_floats(llama)
    tensors["model.norm.weight"][3] += 1
    seen.add(fingerprint(write_llama(llama, tensors, True)))
    edit_json(llama / "config.json", rope_theta=20000.0)
    seen.add(fingerprint(open_checkpoint(llama)))
    assert len(seen) == len(RANDOM_MODELS) + 2
    assert all(re.fullmatch("[0-9a-f]{16}", digits) for digits in seen)


def test_stop_tokens_are_those_of_every_file(llama: Path) -> None:
    edit_json(llama / "config.json", eos_token_id=[256, 3])
    edit_json(llama / "generation_config.json", eos_token_id=4)
    assert open_checkpoint(llama).config.eos_token_ids == {256, 3, 4}
    edit_json(llama / "generation_config.json", eos_token_id=[257])
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must name tokens"):
        open_checkpoint(llama)


def test_what_text_is_made_from_is_handed_over_unread(llama: Path) -> None:
    (llama / "tokenizer.json").write_bytes(b"\xff not even JSON")
    edit_json(llama / "tokenizer_config.json", chat_template="A")
    edit_json(llama / "generation_config.json", chat_template="B")
    (llama / "chat_template.jinja").write_text("C é", encoding="utf-8")
    text = open_checkpoint(llama).text
    assert text.vocab_size == 257
    assert text.tokenizer_json == b"\xff not even JSON"
    assert text.tokenizer_config == {"chat_template": "A"}
    assert text.generation_config == {"chat_template": "B"}
    assert text.chat_template_jinja == "C é"
    assert text.gguf == {}


def make_huge(path: Path) -> None:
    """A terabyte of nothing, which takes no room on the disk."""
    path.touch()
    os.truncate(path, 1 << 40)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_unreadable(path: Path) -> None:
    """A regular file whose first byte cannot be read, whoever asks."""
    path.symlink_to("/proc/self/mem")


SPOILERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json: the file is not usable JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), r"config\.json: the file must be a JSON object"),
    "config cut in a character": (lambda d: (d / "config.json").write_bytes(b'{"a": "\xc3'), "not usable JSON"),
    "config nested": (lambda d: (d / "config.json").write_text('{"a":' * 10**5), "not usable JSON: nested too deeply"),
    "config with a key twice": (lambda d: (d / "config.json").write_text('{"a":1,"a":2}'), "key 'a' appears twice"),
    "config huge": (
        lambda d: make_huge(d / "config.json"),
        r"config\.json: the file is larger than 4194304 bytes",
    ),
    "tokenizer huge": (
        lambda d: make_huge(d / "tokenizer.json"),
        r"tokenizer\.json: the file is larger than 67108864 bytes",
    ),
    "config a directory": (
        lambda d: make_directory(d / "config.json"),
        r"config\.json: not a regular file",
    ),
    "weights a pipe": (
        lambda d: make_pipe(d / "model.safetensors"),
        r"model\.safetensors: not a regular file",
    ),
    "weights empty": (lambda d: os.truncate(d / "model.safetensors", 0), r"model\.safetensors: cannot be mapped"),
    "generation config not JSON": (
        lambda d: (d / "generation_config.json").write_text("nope"),
        r"generation_config\.json: the file is not usable JSON",
    ),
    "template not readable": (
        lambda d: make_unreadable(d / "chat_template.jinja"),
        r"chat_template\.jinja: cannot be read",
    ),
    "template not UTF-8": (
        lambda d: (d / "chat_template.jinja").write_bytes(b"ab\xff"),
        r"chat_template\.jinja: not UTF-8 at byte 2",
    ),
    "tokenizer of another kind": (
        lambda d: (d / "tokenizer.model").write_bytes(b""),
        r"tokenizer\.model: this kind of tokenizer is not supported",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"config\.json has no \*\.safetensors beside it"),
    "no config": (
        lambda d: (d / "config.json").unlink(),
        r"holds neither config\.json with \*\.safetensors nor a \.gguf",
    ),
}


@pytest.mark.parametrize("case", SPOILERS)
def test_a_spoiled_directory_is_refused_with_its_file(llama: Path, case: str) -> None:
    spoil, message = SPOILERS[case]
    spoil(llama)
    with pytest.raises(ModelError, match=rf"^{re.escape(str(llama))}.*{message}"):
        open_checkpoint(llama)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "fake.gguf").write_text("x")
    for path, message in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "notes.txt", "not a model directory or .gguf file"),
        (tmp_path / "fake.gguf", "the magic needs 4 bytes"),
        (tmp_path / "nul\0", "does not exist"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(ModelError, match=message):
            open_checkpoint(path)


def gguf_model(path: Path, config: ModelConfig | None = None, format: Format = Format.F32) -> Checkpoint:
    config = config or wide_config(**NARROW)
    write_gguf_model(path, config, random_weights(config, 0), format)
    return open_checkpoint(path)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    checkpoint = gguf_model(tmp_path / "a.gguf")
    edit_json(tmp_path / "generation_config.json", eos_token_id=5, chat_template="B")
    (tmp_path / "chat_template.jinja").write_text("C")
    opened = open_checkpoint(tmp_path)
    assert opened.path == tmp_path / "a.gguf"
    assert opened.config.eos_token_ids == {256, 5}
    assert opened.text.generation_config["chat_template"] == "B"
    assert opened.text.chat_template_jinja == "C"
    assert opened.text.gguf == checkpoint.text.gguf
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files; name one of them"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "b.gguf").text.generation_config == {}


def test_gguf_text_fields_are_plain_values(tmp_path: Path) -> None:
    fields = gguf_model(tmp_path / "a.gguf").text.gguf
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.eos_token_id"] == 256
    types = fields["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    assert {type(item) for item in types} == {int}
    assert "general.architecture" not in fields


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", Format)
def test_gguf_weights_have_their_canonical_names_and_order(tmp_path: Path, architecture: str, format: Format) -> None:
    config = wide_config(architecture, num_layers=1, tie_word_embeddings=False)
    held = write_gguf_model(tmp_path / "a.gguf", config, random_weights(config, 1), format)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert checkpoint.tensors.keys() == held.keys()
    for name, values in held.items():
        tensor = checkpoint.tensors[name]
        assert tensor.name == name
        assert np.array_equal(dequantise(tensor), values)
        assert tensor.format is (format if len(tensor.shape) == 2 else Format.F32)


def test_biases_of_a_gguf_llama_are_put_in_order_with_their_rows(tmp_path: Path) -> None:
    config = wide_config(**NARROW, attention_bias=True, output_bias=True, mlp_bias=True)
    held = write_gguf_model(tmp_path / "a.gguf", config, random_weights(config, 1))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert (checkpoint.config.attention_bias, checkpoint.config.output_bias, checkpoint.config.mlp_bias) == (True,) * 3
    bias = "model.layers.0.self_attn.k_proj.bias"
    assert np.array_equal(dequantise(checkpoint.tensors[bias]), held[bias])


def test_the_row_order_undoes_what_the_converter_does() -> None:
    """The converter's own steps: heads, halves, positions in a half; the last two exchanged."""
    rows = np.arange(3 * 8)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(stored[interleaved_order(3, 8)], rows)


def test_rope_freqs_become_pair_factors(tmp_path: Path) -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    checkpoint = gguf_model(tmp_path / "a.gguf", wide_config(**NARROW, rope_scaling=scaling))
    assert isinstance(checkpoint.config.rope_scaling, PairFactors)
    assert len(checkpoint.config.rope_scaling.factors) == 8
    assert checkpoint.config.rope_scaling.factors[0] == 1.0
    assert "rope_freqs.weight" not in checkpoint.tensors


Alter = Callable[[gguf_package.GGUFWriter], object]


def replace_tokens(writer: gguf_package.GGUFWriter, tokens: list[str] | None) -> None:
    del writer.kv_data[0]["tokenizer.ggml.tokens"]
    if tokens is not None:
        writer.add_token_list(tokens)


def quantise_norm(writer: gguf_package.GGUFWriter) -> None:
    del writer.tensors[0]["output_norm.weight"]
    blocks = gguf_package.quants.quantize(np.ones((1, 64), "f4"), gguf_package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", blocks[0], raw_dtype=gguf_package.GGMLQuantizationType.Q8_0)


ALTERED: dict[str, tuple[Alter, str]] = {
    "rope_freqs of another size": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(7, "f4")),
        r"tensor rope_freqs\.weight must have shape \[8\], got \[7\]",
    ),
    "rope_freqs of 0": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(8, "f4")),
        r"tensor rope_freqs\.weight must hold finite numbers above 0",
    ),
    "experts": (
        lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 8, 8), "f4")),
        r"tensor 'blk\.0\.ffn_gate_exps\.weight' has no place",
    ),
    "a layer too many": (
        lambda writer: writer.add_tensor("blk.7.ffn_up.weight", np.zeros((8, 8), "f4")),
        r"tensor 'blk\.7\.ffn_up\.weight' has no place",
    ),
    "a head of another size": (
        lambda writer: writer.add_tensor("output.weight", np.zeros((8, 8), "f4")),
        r"tensor 'output\.weight' must have shape \[257, 64\], got \[8, 8\]",
    ),
    "a quantised norm": (quantise_norm, r"tensor 'output_norm\.weight' is a vector and must be F32, F16 or BF16"),
    "one of two files": (
        lambda writer: writer.add_uint16("split.count", 2),
        r"field split\.count: a model split over several files",
    ),
    "no tokens": (
        lambda writer: replace_tokens(writer, None),
        r"field tokenizer\.ggml\.tokens must list at most 257 tokens.*got none",
    ),
    "a token too many": (
        lambda writer: replace_tokens(writer, ["t"] * 258),
        r"field tokenizer\.ggml\.tokens must list at most 257 tokens.*got 258 tokens",
    ),
}


@pytest.mark.parametrize("case", ALTERED)
def test_gguf_content_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    alter, message = ALTERED[case]
    config = wide_config(**NARROW)
    write_gguf_model(tmp_path / "a.gguf", config, random_weights(config, 0), alter=alter)
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path / 'a.gguf'))}: {message}"):
        open_checkpoint(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def narrow_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("narrow") / "a.gguf"
    gguf_model(path, wide_config(**NARROW, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)))
    return path.read_bytes()


@given(data=st.data())
def test_a_gguf_model_with_any_field_changed_opens_or_says_why_not(
    tmp_path_factory: pytest.TempPathFactory, narrow_gguf: bytes, data: st.DataObject
) -> None:
    """Invariant: ModelError of one printable line, or a checkpoint whose rotary frequencies can be calculated."""
    spoiled = bytearray(narrow_gguf)
    fields = narrow_gguf.index(b"tokenizer.ggml.tokens")
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(24, fields))
        spoiled[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "spoiled.gguf"
    path.write_bytes(spoiled)
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        message = str(error)
    else:
        message = repr(checkpoint.config)
        assert len(inverse_frequencies(checkpoint.config)[0]) == checkpoint.config.head_dim // 2
    assert message.isprintable()


def test_a_gguf_file_without_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes([gguf_text("general.architecture", "llama")]))
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight is missing"):
        open_checkpoint(path)


@needs_smollm2
def test_smollm2_answers_as_recorded() -> None:
    """Every recorded token is the likeliest after those before it, in float32 from the dequantised weights."""
    model = ReferenceModel(open_checkpoint(SMOLLM2))
    for answer in json.loads((FIXTURES / "smollm2_greedy.json").read_text()):
        prompt, tokens = answer["prompt_ids"], answer["tokens"]
        hidden = model.hidden(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert model.head is not None
        assert np.argmax(hidden @ model.head.T, axis=1).tolist() == tokens
