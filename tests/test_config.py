"""The configuration: every key has a rule, every fault names key, value and rule, and TOML round-trips."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlserve.config import (
    MAX_FILE_BYTES,
    EngineConfig,
    ServeConfig,
    SpeculativeConfig,
    default_model_id,
    json_schema,
    parse_listen,
    sources,
)
from tlserve.errors import ConfigError


def read(table: str, **env: str) -> ServeConfig:
    return ServeConfig.from_toml(f"[engine]\nmodel_dir = 'm'\n{table}", env)


def test_a_relative_model_dir_starts_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text('[engine]\nmodel_dir = "models/a"\n')
    assert ServeConfig.load(tmp_path / "runtime.toml").model_dir == tmp_path / "models" / "a"


@pytest.mark.parametrize(
    ("path", "model_id"),
    [
        ("artifacts/models/smol-135m/v3", "smol-135m"),
        ("models/smol-135m", "smol-135m"),
        ("models/a/video", "video"),
        ("x/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("/v3", "v3"),
    ],
)
def test_the_model_id_comes_from_the_path(path: str, model_id: str) -> None:
    assert default_model_id(Path(path)) == model_id


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8000", (None, 8000)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:8000", ("::1", 8000)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_listen_addresses(text: str, address: tuple[str | None, int]) -> None:
    assert parse_listen(text, "http_listen") == address


@pytest.mark.parametrize("text", ["8000", "a:b", "::1:8000", "a:65536", "a:-1", "", "a b:1"])
def test_a_bad_listen_address_names_key_value_and_rule(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http_listen = '.*': must be host:port"):
        read(f"http_listen = {text!r}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prefix_cash = 'radix'", r"prefix_cash: is no key of the \[engine\] table; did you mean prefix_cache\?"),
        ("prefill_chunk = -1", r"prefill_chunk = -1: must be an integer of 0 or more$"),
        ("prefill_chunk = 'x'", r"prefill_chunk = 'x': must be an integer of 0 or more$"),
        ("prefill_chunk = true", r"prefill_chunk = true: must be an integer of 0 or more$"),
        ("prefix_cache = 'x'", r'prefix_cache = \'x\': must be one of "hash", "off", "radix"$'),
        ("block_size = 20", r"block_size = 20: must be an integer from 16 to 256 that is a multiple of 16$"),
        ("kv_cache_mb = 1\nnum_blocks = 1", r"give either kv_cache_mb or num_blocks, not both"),
        ("tls_cert = 'a.pem'", r"tls_cert, tls_key: give both or neither"),
        ("speculative = 5", r"speculative = 5: must be a table$"),
        ("speculative = {}", r"speculative\.method: is required"),
        ("speculative = {method = 'prompt_lookup', ngram_mim = 1}", r"did you mean speculative\.ngram_min\?"),
        (
            "speculative = {method = 'draft_model'}",
            r"speculative\.draft_model_dir: is required with method = 'draft_model'",
        ),
        ("speculative = {method = 'prompt_lookup', ngram_min = 5}", r"ngram_min = 5: must not exceed ngram_max = 4"),
        ("queue_capacity = 0", r"queue_capacity = 0: must be an integer of 1 or more$"),
        ("step_delay = 1.0", r"step_delay: is no key"),
        ("cors_allow_origins = 'x'", r"cors_allow_origins = 'x': must be a list of strings$"),
    ],
)
def test_a_fault_names_key_value_and_rule(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(line)


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text("[engine]\nmodel_dir = 'm'\nthreads = 0\n")
    with pytest.raises(ConfigError, match=rf"{path}: threads = 0: must be an integer from 1 to 256$"):
        ServeConfig.load(path)
    path.write_text("[engine\n")
    with pytest.raises(ConfigError, match=rf"{path}: not valid TOML"):
        ServeConfig.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ServeConfig.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"THREADS": "0"}, "TL_ENGINE__THREADS = 0: must be an integer from 1 to 256"),
        ({"HTTP_LISTEN": "x"}, "TL_ENGINE__HTTP_LISTEN = 'x': must be host:port"),
        ({"SPECULATIVE": "5"}, "TL_ENGINE__SPECULATIVE = 5: must be a table"),
        ({"SPECULATIVE": '{method = "x"}'}, "TL_ENGINE__SPECULATIVE: speculative.method = 'x': must be one of"),
        ({"KV_CACHE_MB": "1", "NUM_BLOCKS": "1"}, "TL_ENGINE__KV_CACHE_MB = 1: give either"),
    ],
)
def test_a_fault_of_a_variable_names_the_variable_and_no_file(
    variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text("[engine]\nmodel_dir = 'm'\n")
    with pytest.raises(ConfigError) as caught:
        ServeConfig.load(path, {f"TL_ENGINE__{name}": value for name, value in variables.items()})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("bad", ["\\u0000", "a\\nb", "\\u001b[31m", "\\u2028", "a" * 257])
def test_a_model_id_is_printable_and_bounded(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"^model_id = '.{1,100}: must be 1 to 256 printable characters$"):
        read(f'model_id = "{bad}"')
    assert read(f'model_id = "{"é" * 256}"').model_id == "é" * 256


def test_a_model_id_that_is_no_text_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match=r"^model_id = .* printable characters$"):
        read("", TL_ENGINE__MODEL_ID="\udcff")
    with pytest.raises(ConfigError, match=r"^model_id = .* \(from model_dir\): must be .* printable characters$"):
        ServeConfig.for_model("models/\udcff")
    assert ServeConfig.for_model("models/\udcff", model_id="a").model_id == "a"


DIGITS = "1" * 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f'{key} = "\\u0000"', f"{key} = .*: must be a path") for key in ("api_keys_file", "tls_cert", "tls_key")),
        (f"seed = {DIGITS}", "seed: must not have thousands of digits"),
        (f"seed = 0x{DIGITS}", "seed = a number past 64 bits: must be an integer from -9223372036854775808 to"),
        (f"num_blocks = 0x{DIGITS}", "num_blocks = a number past 64 bits: must be an integer of 1 or more"),
        (f"cors_allow_origins = [0x{DIGITS}]", "cors_allow_origins = ...: must be a list of strings"),
        (f"threads = {'[' * 3000}", "not valid TOML: nested too deeply"),
        (f"threads = '{'a' * 3000}'", "threads = .*: must be an integer from 1 to 256"),
        ('"a\\nb" = 1', "'a.*b': is no key"),
        (f"http_listen = '{'a' * 300}:80'", "http_listen = .*: the host must be ASCII"),
        ("http_listen = 'é..x:80'", "http_listen = .*: the host must be ASCII"),
        ("http_listen = 'é:80'", "http_listen = .*: the host must be ASCII"),
        ("health_listen = 'a..b:80'", "health_listen = .*: the host must be ASCII"),
        ('health_listen = "\\u0000:80"', "health_listen = .*: the host must be ASCII"),
    ],
)
def test_a_hostile_value_is_one_short_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        read(line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SEED", DIGITS, "TL_ENGINE__SEED = .*: must be an integer"),
        ("MODEL_ID", "[" * 3000, "model_id = .*: must be 1 to 256"),
        ("HTTP_LISTEN", "\udcff:80", "http_listen = .*: the host must be ASCII"),
        ("THREADS__X", "1", "TL_ENGINE__THREADS__X: is no key"),
        ("THREDS__" + "X" * 3000, "1", "'TL_ENGINE__.*': is no key"),
    ],
)
def test_a_hostile_variable_is_one_short_line(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        read("", **{f"TL_ENGINE__{name}": value})
    assert len(str(caught.value)) < 300


def test_a_configuration_may_come_through_a_pipe() -> None:
    """As ``trio-tlserve <(...)`` of a shell."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"[engine]\nmodel_dir = 'm'\n")
    os.close(write_end)
    assert ServeConfig.load(Path(f"/dev/fd/{read_end}")).model_dir.name == "m"
    os.close(read_end)


def test_a_configuration_is_no_device_and_of_bounded_size(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    for path, rule in (
        ("/dev/zero", "must be a regular file"),
        (tmp_path / "large.toml", "must be at most 1048576 bytes"),
        (tmp_path / "latin.toml", "must be UTF-8 text, is not at byte 2"),
    ):
        with pytest.raises(ConfigError, match=f"^{path}: {rule}$"):
            ServeConfig.load(path)


def test_model_dir_is_required() -> None:
    with pytest.raises(ConfigError, match=r"model_dir: is required in the table \[engine\]"):
        ServeConfig.from_toml("", {})


def test_the_configuration_of_a_program_round_trips() -> None:
    config = ServeConfig.for_model("m", prefill_chunk=16, step_delay=0.5)
    assert ServeConfig.from_toml(config.to_toml(), {}) == config


def test_other_tables_belong_to_other_roles() -> None:
    assert ServeConfig.from_toml("[gateway]\nx = 1\n[engine]\nmodel_dir = 'm'", {}).model_id == "m"


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("PREFILL_CHUNK", "16", "engine.prefill_chunk", 16),
        ("PREFIX_CACHE", "off", "engine.prefix_cache", "off"),
        ("MODEL_ID", "123", "model_id", "123"),
        ("MODEL_ID", '"quoted"', "model_id", "quoted"),
        ("CORS_ALLOW_ORIGINS", '["https://a"]', "cors_allow_origins", ("https://a",)),
        ("SPECULATIVE__METHOD", "prompt_lookup", "engine.speculative.method", "prompt_lookup"),
    ],
)
def test_the_environment_overrides_a_key(name: str, text: str, path: str, value: object) -> None:
    config: object = read("prefill_chunk = 8", **{f"TL_ENGINE__{name}": text})
    for part in path.split("."):
        config = getattr(config, part)
    assert config == value


def test_an_override_cannot_smuggle_a_second_key() -> None:
    with pytest.raises(ConfigError, match="TL_ENGINE__THREADS"):
        read("", TL_ENGINE__THREADS="1\nqueue_capacity = 1")


def test_a_nested_override_goes_over_an_override_of_its_table() -> None:
    table = '{method = "prompt_lookup", num_tokens = 8}'
    config = read("", TL_ENGINE__SPECULATIVE=table, TL_ENGINE__SPECULATIVE__NUM_TOKENS="3")
    assert config.engine.speculative == SpeculativeConfig(method="prompt_lookup", num_tokens=3)


def test_an_override_must_name_a_key() -> None:
    with pytest.raises(ConfigError, match="TL_ENGINE__: names no key"):
        read("", TL_ENGINE__="x")


def test_a_directory_or_a_model_is_no_configuration(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match="is a model, not a configuration"):
            ServeConfig.load(path)


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^TL_ENGINE__THREAD: is no key .* did you mean threads\?"):
        read("", TL_ENGINE__THREAD="1")


def test_a_program_may_set_what_a_file_may_not() -> None:
    config = ServeConfig.for_model("m", step_delay=0.5, queue_capacity=1, prefill_chunk=16)
    assert (config.step_delay, config.queue_capacity, config.engine.prefill_chunk) == (0.5, 1, 16)
    assert config.http_listen == "127.0.0.1:0"


@given(
    chunk=st.integers(0, 10**6),
    blocks=st.none() | st.integers(1, 10**6),
    origins=st.lists(st.text(st.characters(codec="ascii", min_codepoint=32)), max_size=3),
    spec=st.none() | st.builds(SpeculativeConfig, method=st.just("prompt_lookup"), num_tokens=st.integers(1, 32)),
)
def test_toml_round_trips(chunk: int, blocks: int | None, origins: list[str], spec: SpeculativeConfig | None) -> None:
    config = ServeConfig(
        model_dir=Path("/m"),
        cors_allow_origins=tuple(origins),
        engine=EngineConfig(prefill_chunk=chunk, num_blocks=blocks, speculative=spec),
    )
    assert ServeConfig.from_toml(config.to_toml(), {}) == config


@pytest.mark.parametrize("spec", ["", "speculative = {method = 'prompt_lookup', ngram_max = 7}"])
def test_the_effective_configuration_names_every_key_and_reads_back(spec: str) -> None:
    """Those without a value are comments; behind a nested table they would belong to it, were they none."""
    text = read(spec).to_toml()
    keys = json_schema()["properties"]["engine"]["properties"]
    assert [
        key for key in keys if not re.search(rf"^({key} = |# {key} is not set|\[engine\.{key}\])", text, re.M)
    ] == []
    assert ServeConfig.from_toml(text, {}).to_toml() == text


def test_a_key_that_is_set_has_its_value_from_the_file_or_a_variable() -> None:
    text = '[engine]\nmodel_dir = "m"\nthreads = 1\nspeculative = {method = "prompt_lookup"}\n[other]\nkey = 1\n'
    env = {"TL_ENGINE__THREADS": "2", "TL_ENGINE__SPECULATIVE__NUM_TOKENS": "3", "PATH": "/bin"}
    assert sources(text, env) == {
        "model_dir": "file",
        "threads": "TL_ENGINE__THREADS",
        "speculative.method": "file",
        "speculative.num_tokens": "TL_ENGINE__SPECULATIVE__NUM_TOKENS",
    }


def test_the_schema_fits_the_effective_configuration() -> None:
    document = tomllib.loads(read("speculative = {method = 'prompt_lookup'}").to_toml())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(document, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"engine": {"model_dir": "m", "prefix_cash": "off"}}, json_schema())
