"""K26: each way published configs differ gives the reference's meaning, and what has no meaning here is refused.

Invariant: any values in any fields of a config give a model that can be built, or ModelError.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.model.gguf_models import random_weights, wide_config, write_gguf_model
from tlserve.errors import ModelError
from tlserve.model.config import ModelConfig, from_gguf, from_hf, inverse_frequencies
from tlserve.model.gguf import read_gguf
from tlserve.model.rope import LinearScaling, Llama3Scaling, PairFactors, YarnScaling

FILE = Path("somewhere/config.json")
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
ABSENT = object()


def hf(**changes: object) -> ModelConfig:
    """The config of a small llama with keys replaced, or left out where the value is ABSENT."""
    return from_hf({key: value for key, value in (LLAMA | changes).items() if value is not ABSENT}, FILE)


def test_absent_keys_have_the_defaults_of_the_reference() -> None:
    assert hf() == ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=frozenset(),
        bos_token_id=None,
    )


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        ({}, 16),
        ({"head_dim": None}, 16),
        ({"head_dim": 32}, 32),
        ({"model_type": "qwen3", "head_dim": 32}, 32),
        ({"model_type": "qwen3", "head_dim": None}, 16),
        ({"model_type": "qwen3"}, 128),
    ],
)
def test_head_dim_null_absent_or_its_own(changes: dict[str, object], head_dim: int) -> None:
    """B123."""
    assert hf(**changes).head_dim == head_dim


@pytest.mark.parametrize(("value", "num_kv_heads"), [(ABSENT, 4), (None, 4), (2, 2), (1, 1)])
def test_kv_heads_absent_are_the_heads(value: object, num_kv_heads: int) -> None:
    """B123."""
    assert hf(num_key_value_heads=value).num_kv_heads == num_kv_heads


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 7.0},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": 5e5, "rope_scaling": {}},
    ],
)
def test_rope_theta_wherever_it_stands(changes: dict[str, object]) -> None:
    """B123."""
    config = hf(**changes)
    assert config.rope_theta == 5e5
    assert config.rope_scaling is None


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        ({"type": "linear", "factor": 4}, LinearScaling(4.0)),
        ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        ({**LLAMA3, "original_max_position_embeddings": 256}, Llama3Scaling(8.0, 1.0, 4.0, 256)),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 1024)),
        (
            {"type": "yarn", "factor": 4.0, "attention_factor": 1.0, "original_max_position_embeddings": 256},
            YarnScaling(4.0, 1.0, 32.0, 1.0, 256, True),
        ),
        ({"rope_type": "yarn", "factor": 1.0}, YarnScaling(1.0, 1.0, 32.0, 1.0, 1024, True)),
        ({"rope_type": "default", "factor": 4.0}, None),
    ],
)
def test_scaling_of_each_type_is_read(key: str, section: dict[str, object], scaling: object) -> None:
    """B122: under either name of the section and of the type."""
    assert hf(**{key: section}).rope_scaling == scaling


def test_yarn_stretches_the_context_that_it_is_switched_on_for() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert hf(rope_scaling=yarn).max_position_embeddings == 4096
    assert hf(rope_scaling={**yarn, "original_max_position_embeddings": 256}).max_position_embeddings == 1024
    assert hf(rope_scaling={"type": "linear", "factor": 4.0}).max_position_embeddings == 1024


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("flag", [True, False])
def test_biases_and_norms_of_each_family(architecture: str, flag: bool) -> None:
    config = hf(model_type=architecture, attention_bias=flag, mlp_bias=flag)
    assert config.attention_bias == (flag or architecture == "qwen2")
    assert config.output_bias == (flag and architecture != "qwen2")
    assert config.mlp_bias == (flag and architecture == "llama")
    assert config.qk_norm == (architecture == "qwen3")


@pytest.mark.parametrize(("value", "ids"), [(ABSENT, []), (None, []), (7, [7]), ([7, 9], [7, 9]), ([], [])])
def test_eos_is_one_token_or_several(value: object, ids: list[int]) -> None:
    assert hf(eos_token_id=value).eos_token_ids == frozenset(ids)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32},
        {"model_type": "qwen3", "sliding_window": 32, "layer_types": ["full_attention", "full_attention"]},
        {"sliding_window": None},
        {"sliding_window": 1024},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 2048},
    ],
)
def test_a_window_that_changes_nothing_is_no_reason_to_refuse(changes: dict[str, object]) -> None:
    assert hf(**changes).max_position_embeddings == 1024


@pytest.mark.parametrize("key", LLAMA)
@pytest.mark.parametrize("value", [ABSENT, None])
def test_a_missing_must_have_is_named(key: str, value: object) -> None:
    """B123."""
    with pytest.raises(ModelError, match=rf"^somewhere/config\.json: {key} is missing$"):
        hf(**{key: value})


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    "architecture of another type": ({"model_type": 5}, "model_type must be a string, got 5"),
    "dimension 0": ({"hidden_size": 0}, "hidden_size must be an integer from 1 to 2147483647, got 0"),
    "dimension negative": ({"vocab_size": -1}, "vocab_size must be an integer from 1"),
    "dimension huge": ({"num_hidden_layers": 2**40}, "num_hidden_layers must be an integer from 1"),
    "dimension true": ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1.*got True"),
    "dimension real": ({"hidden_size": 64.0}, "hidden_size must be an integer from 1.*got 64.0"),
    "dimension text": ({"hidden_size": "64"}, "hidden_size must be an integer from 1.*got '64'"),
    "long value": ({"hidden_size": "x" * 10**6}, r"hidden_size .*got 'x+\.\.\.x+'$"),
    "heads do not divide": ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of the 5 attention heads"),
    "kv heads do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 4 attention"),
    "head_dim odd": ({"head_dim": 15}, "head_dim must be even"),
    "head_dim 0": ({"head_dim": 0}, "head_dim must be an integer from 1"),
    "eps 0": ({"rms_norm_eps": 0}, "rms_norm_eps must be a number from 1e-12 to 1e.12, got 0"),
    "eps NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number from 1e-12 to 1e.12, got nan"),
    "theta infinite": ({"rope_theta": float("inf")}, "rope_theta must be a number from"),
    "theta huge integer": ({"rope_theta": 10**400}, "rope_theta must be a number from"),
    "theta true": ({"rope_theta": True}, "rope_theta must be a number from 1e-12 to 1e.12, got True"),
    "tie not a flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config with quant_method 'gptq'"),
    "window": ({"sliding_window": 512}, "sliding_window narrower than the context is not supported"),
    "window switched on": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512},
        "sliding_window narrower than the context is not supported",
    ),
    "window by layer": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
    "layer types a number": ({"layer_types": 5}, "layer_types 5 is not supported"),
    "eos outside": ({"eos_token_id": 100}, "eos_token_id must name tokens of the vocabulary of 100, got 100"),
    "eos negative": ({"eos_token_id": [1, -1]}, "eos_token_id must name tokens of the vocabulary of 100, got -1"),
    "eos text": ({"eos_token_id": "</s>"}, "eos_token_id must name tokens of the vocabulary"),
    "rope a list": ({"rope_scaling": [1]}, "rope_scaling must be an object, got"),
    "B122 dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type 'dynamic' is not supp"),
    "B122 unknown": (
        {"rope_scaling": {"rope_type": "x", "factor": 2.0}},
        "rope_scaling.rope_type 'x' is not supported",
    ),
    "B122 no type": ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type is missing beside a factor"),
    "B122 missing factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    "B122 null factor": ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor is missing"),
    "B122 factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number from"),
    "B122 llama3 without its factors": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters.low_freq_factor is missing",
    ),
    "B122 llama3 bounds": (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor must be above low_freq_factor 1.0, got 1.0",
    ),
    "B122 yarn of a base that gives no ramp": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
        "rope_scaling.rope_theta must be above 1 for yarn, got 1.0",
    ),
    "B122 by layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        r"rope_parameters\.\* must not be settings by kind of layer, got an object under 'full_attention'",
    ),
    "partial rotation": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor other than 1 is not supported",
    ),
    "partial rotation at the top": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError, match=rf"^somewhere/config\.json: {message}"):
        hf(**changes)


KEYS = [*LLAMA, "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "tie_word_embeddings", "attention_bias", "sliding_window", "use_sliding_window", "layer_types", "hidden_act",
        "eos_token_id", "bos_token_id", "quantization_config", "original_max_position_embeddings"]  # fmt: skip
ROPE_KEYS = [*LLAMA3, "type", "rope_theta", "original_max_position_embeddings", "beta_fast", "truncate", "mscale"]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(1, 64), st.floats(), st.floats(0.5, 8),
    st.sampled_from(["llama", "qwen2", "qwen3", "bigram", "linear", "llama3", "yarn", "default", "\ud800", "a\nb"]),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda children: st.lists(children, max_size=3)) | st.dictionaries(
    st.sampled_from(ROPE_KEYS), LEAVES, max_size=5
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_values_give_a_config_or_one_line_that_says_why_not(changes: dict[str, object]) -> None:
    try:
        config = hf(**changes)
    except ModelError as error:
        message = str(error)
        event("refused")
    else:
        message = repr(config)
        assert config.num_layers == 0 or len(inverse_frequencies(config)[0]) == config.head_dim // 2
    assert message.isprintable()
    assert len(message) < 1000


def test_a_bigram_is_a_vocabulary() -> None:
    config = from_hf({"model_type": "bigram", "vocab_size": 256}, FILE)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (256, 256, 0)
    assert config.max_position_embeddings == 4096
    assert from_hf({"model_type": "bigram", "vocab_size": 9, "eos_token_id": 8}, FILE).eos_token_ids == {8}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"head_dim": 32},
        {"rope_scaling": LinearScaling(4.0)},
        {"rope_scaling": YarnScaling(4.0, 0.1 * np.log(4.0) + 1, 32.0, 1.0, 128, True)},
    ],
)
def test_a_gguf_file_says_the_same_config(tmp_path: Path, architecture: str, changes: dict[str, object]) -> None:
    path = tmp_path / "model.gguf"
    config = wide_config(architecture, **changes)
    write_gguf_model(path, config, random_weights(config, 0))
    file = read_gguf(path)
    read = from_gguf(file.fields, {name: tensor.shape for name, tensor in file.tensors.items()}, path)
    assert replace(read, rms_norm_eps=config.rms_norm_eps) == config
    assert read.rms_norm_eps == np.float32(config.rms_norm_eps)


GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def gguf(pair_factors: tuple[float, ...] | None = None, **changes: object) -> ModelConfig:
    """The config of a small llama with fields replaced; `__` in a name stands for a dot."""
    values = GGUF | {key.replace("__", "."): value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not ABSENT}
    return from_gguf(values, {"token_embd.weight": (100, 64)}, Path("m.gguf"), pair_factors=pair_factors)


def test_gguf_stop_tokens_are_ends_of_text_turn_and_message() -> None:
    config = gguf(tokenizer__ggml__eos_token_id=1, tokenizer__ggml__eot_token_id=2, tokenizer__ggml__eom_token_id=3)
    assert config.eos_token_ids == {1, 2, 3}


def test_gguf_pair_factors_divide_the_frequencies() -> None:
    factors = tuple(float(i + 1) for i in range(8))
    config = gguf(factors)
    assert config.rope_scaling == PairFactors(factors)
    plain, _ = inverse_frequencies(gguf())
    np.testing.assert_array_equal(inverse_frequencies(config)[0], plain / np.array(factors, dtype=np.float32))


def test_gguf_scaling_of_older_files() -> None:
    assert gguf(llama__rope__scale_linear=4.0).rope_scaling == LinearScaling(4.0)
    assert gguf(llama__rope__scale_linear=1.0).rope_scaling is None


REFUSED_GGUF: dict[str, tuple[dict[str, object], str]] = {
    "architecture": ({"general__architecture": "phi3"}, "general.architecture 'phi3' is not supported"),
    "no architecture": ({"general__architecture": ABSENT}, "general.architecture is missing"),
    "no layers": ({"llama__block_count": ABSENT}, "llama.block_count is missing"),
    "layers by array": (
        {"llama__attention__head_count": np.array([4, 4])},
        "llama.attention.head_count must be an int",
    ),
    "mixture": ({"llama__expert_count": 8}, "llama.expert_count above 0 .a mixture of experts. is not supported"),
    "rope type": ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
    "rope factor": ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.factor is missing"),
    "yarn of another kind": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 0.1},
        "llama.rope.scaling.yarn_log_multiplier is not supported",
    ),
    "partial rotation": ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count other than the head's 16"),
    "two head sizes": ({"llama__attention__value_length": 8}, "llama.attention.value_length other than the head's 16"),
    "window": ({"llama__attention__sliding_window": 128}, "llama.attention.sliding_window narrower than the context"),
    "eos outside": ({"tokenizer__ggml__eos_token_id": 100}, "tokenizer.ggml.eos_token_id must name tokens of the voc"),
}


@pytest.mark.parametrize("case", REFUSED_GGUF)
def test_gguf_fields_that_would_be_computed_wrongly_are_refused_by_name(case: str) -> None:
    changes, message = REFUSED_GGUF[case]
    with pytest.raises(ModelError, match=rf"^m\.gguf: {message}"):
        gguf(**changes)  # type: ignore[arg-type]


def test_pair_factors_beside_another_scaling_are_refused() -> None:
    with pytest.raises(ModelError, match="'yarn' together with a rope_freqs tensor is not supported"):
        gguf((1.0,) * 8, llama__rope__scaling__type="yarn")
