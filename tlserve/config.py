"""The configuration: its keys, their rules, and the ways to read and write it.

Every key of the ``[engine]`` table is a field of EngineConfig or ServeConfig. A field's annotation is its
rule, and its metadata holds its line of documentation; the published JSON schema comes from both.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import tomli_w
from msgspec import Meta

from tlserve.errors import ConfigError
from tlserve.regular_file import read_regular_file

ENV_PREFIX = "TL_ENGINE__"
# Fields of ServeConfig that are set by a program only, never by a file or the environment.
_PROGRAM_ONLY = frozenset({"engine", "handle_signals", "step_delay"})

MAX_FILE_BYTES = 1 << 20
MAX_ID_CHARS = 256
_INT64 = range(-(2**63), 2**63)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

Positive = Annotated[int, Meta(ge=1)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]


def _key(doc: str, default: Any = MISSING) -> Any:
    """A field of the table with its line of documentation."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The ``[engine.speculative]`` table: how draft tokens are found. The output is the same without it."""

    method: Literal["prompt_lookup", "draft_model"] = _key("Where drafts come from.")
    num_tokens: Annotated[int, Meta(ge=1, le=32)] = _key("Longest draft in one step.", 4)
    ngram_min: Annotated[int, Meta(ge=1, le=32)] = _key("Shortest match that prompt_lookup takes.", 2)
    ngram_max: Annotated[int, Meta(ge=1, le=32)] = _key("Longest match that prompt_lookup tries.", 4)
    draft_model_dir: Path | None = _key("The smaller model of draft_model; same tokenizer.", None)

    def __post_init__(self) -> None:
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"speculative.ngram_min = {self.ngram_min}: must not exceed ngram_max = {self.ngram_max}")
        if (self.method == "draft_model") != (self.draft_model_dir is not None):
            rule = "is required" if self.method == "draft_model" else "has no effect"
            raise ConfigError(f"speculative.draft_model_dir: {rule} with method = {self.method!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine and the model runner are built from."""

    prefix_cache: Literal["off", "hash", "radix"] = _key("How prompts share KV blocks.", "radix")
    prefill_chunk: Annotated[int, Meta(ge=0)] = _key("Tokens of one prompt in one step; 0 = the whole prompt.", 512)
    block_size: Annotated[int, Meta(ge=16, le=256, multiple_of=16)] = _key("Tokens of one KV block.", 16)
    kv_cache_mb: Positive | None = _key("Size of the KV cache in MiB; not with num_blocks.", None)
    num_blocks: Positive | None = _key("Size of the KV cache in blocks; not with kv_cache_mb.", None)
    kv_dtype: Literal["f32", "f16"] = _key("Number format of keys and values.", "f16")
    weights: Literal["auto", "f32", "q8", "q4"] = _key("Precision of the weights in memory.", "auto")
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)] = _key("Requests that run at the same time.", 32)
    max_batch_tokens: Annotated[int, Meta(ge=1, le=65_536)] = _key("Token budget of one step.", 1024)
    max_model_len: Positive | None = _key("Longest context; the model's own by default.", None)
    threads: Annotated[int, Meta(ge=1, le=256)] | None = _key("Compute threads; all cores by default.", None)
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = _key("Seed of requests that bring none.", None)
    speculative: SpeculativeConfig | None = _key("Speculative decoding; off by default.", None)

    def __post_init__(self) -> None:
        if self.kv_cache_mb is not None and self.num_blocks is not None:
            raise ConfigError(f"kv_cache_mb = {self.kv_cache_mb}: give either kv_cache_mb or num_blocks, not both")

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything a server is built from. Times are in the unit that a field's name ends with."""

    model_dir: Path = _key("A Hugging Face directory, a directory with one .gguf file, or a .gguf file.")
    model_id: str = _key("The served id; from the path by default.", "")
    http_listen: str = _key("Address of the API.", "127.0.0.1:8000")
    health_listen: str = _key("Address of health and metrics.", "127.0.0.1:9464")
    engine: EngineConfig = field(default_factory=EngineConfig)
    queue_capacity: Positive = _key("Waiting requests; the next one gets 429.", 64)
    queue_deadline_ms: Milliseconds = _key("Waiting longer gets 503 no_capacity.", 30_000)
    drain_timeout_ms: Milliseconds = _key("Time that requests in flight have to finish when draining.", 30_000)
    max_body_bytes: Positive = _key("Largest request body; 413 above.", 4_194_304)
    header_timeout_ms: Milliseconds = _key("Time to receive a request's headers.", 10_000)
    body_timeout_ms: Milliseconds = _key("Time to receive a request's body.", 30_000)
    idle_timeout_ms: Milliseconds = _key("Time a connection may stay open between requests.", 75_000)
    write_timeout_ms: Milliseconds = _key("Time one write may wait for the client.", 30_000)
    max_connections: Positive = _key("Open connections; 503 and close above.", 1024)
    api_keys_file: Path | None = _key("File with one API key a line; every /v1 route then needs one.", None)
    cors_allow_origins: tuple[str, ...] = _key("Origins that browsers may call from.", ())
    tls_cert: Path | None = _key("PEM file with the certificate chain; together with tls_key.", None)
    tls_key: Path | None = _key("PEM file with the private key; together with tls_cert.", None)
    log_format: Literal["text", "json"] = _key("Form of the log on stderr.", "text")
    # How a program runs the server, and no part of what is configured: no key, and not compared.
    handle_signals: bool = field(default=False, compare=False)
    step_delay: float = field(default=0.0, compare=False)  # seconds slept in each step; for tests

    def __post_init__(self) -> None:
        _check_model_id(self.model_id, "")
        if not self.model_id:
            object.__setattr__(self, "model_id", default_model_id(self.model_dir))
            _check_model_id(self.model_id, " (from model_dir)")
        parse_listen(self.http_listen, "http_listen")
        parse_listen(self.health_listen, "health_listen")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert, tls_key: give both or neither")

    @classmethod
    def for_model(cls, model_dir: str | Path, **overrides: Any) -> ServeConfig:
        """The defaults for a model, on free ports; ``overrides`` are keys of the table, or fields of this class."""
        program = {name: overrides.pop(name) for name in _PROGRAM_ONLY & set(overrides)}
        table = {"http_listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0"} | overrides
        return _from_table(table | {"model_dir": str(model_dir)}, Path(), program)

    @classmethod
    def from_toml(cls, text: str, env: Mapping[str, str], *, directory: Path = Path()) -> ServeConfig:
        """Read a TOML document, then the overrides in ``env``. Relative paths start at ``directory``.

        Raises ConfigError naming key, value and rule.
        """
        table = _document(text).get("engine", {})
        if not isinstance(table, dict):
            raise ConfigError(f"engine = {_shown(table)}: must be a table")
        return _from_table(_overridden(table, env), directory, {"handle_signals": True})

    @classmethod
    def load(cls, path: str | Path, env: Mapping[str, str] = os.environ) -> ServeConfig:
        """Read a file with the overrides in ``env``. Raises ConfigError naming the file, or the variable at fault."""
        path = Path(path)
        if path.is_dir() or path.suffix == ".gguf":
            raise ConfigError(
                f"{path}: is a model, not a configuration; give it as --model-dir {shlex.quote(str(path))}"
            )
        data = read_regular_file(path, str(path), limit=MAX_FILE_BYTES, or_pipe=True)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: must be UTF-8 text, is not at byte {error.start}") from None
        try:
            return cls.from_toml(text, env, directory=path.parent)
        except ConfigError as error:
            raise with_source(error, str(path), env) from None

    def to_toml(self) -> str:
        """The effective configuration as a document; reading it gives an equal configuration.

        Keys that have no value are comments in it, which say what is done without one.
        """
        flat = {name: value for name, value in asdict(self).items() if name not in _PROGRAM_ONLY}
        values = flat | asdict(self.engine)
        table = _plain(values)
        inner = {"speculative": table.pop("speculative")} if "speculative" in table else {}
        keys = _keys(ServeConfig) | _keys(EngineConfig)
        unset = [f"# {name} is not set. {keys[name][1].metadata['doc']}\n" for name in values if values[name] is None]
        # A table of its own must come behind all that belongs to the one around it.
        nested = "\n" + tomli_w.dumps({"engine": inner}) if inner else ""
        return tomli_w.dumps({"engine": table}) + "".join(unset) + nested


def default_model_id(model_dir: Path) -> str:
    """The last component of the path, or its parent where the last looks like ``v3``; the stem of a .gguf file."""
    path = Path(os.path.abspath(model_dir))
    if path.suffix == ".gguf":
        return path.stem
    return (path.parent.name if re.fullmatch(r"v\d+", path.name) else "") or path.name or "model"


def parse_listen(text: str, key: str) -> tuple[str | None, int]:
    """``host:port``, ``[v6]:port`` or ``:port`` (all interfaces, host None). Raises ConfigError."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]*):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[2]) > 65_535:
        raise ConfigError(f"{key} = {_shown(text)}: must be host:port, [v6]:port or :port with a port up to 65535")
    host = match[1].strip("[]")
    if not _is_host(host):
        raise ConfigError(f"{key} = {_shown(text)}: the host must be ASCII, its parts of 1 to 63 characters")
    return host or None, int(match[2])


def _is_host(text: str) -> bool:
    """Whether a resolver can be asked for it: for what is no name at all, it raises what is no OSError."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return text.isascii() and text.isprintable()


def _check_model_id(model_id: str, source: str) -> None:
    """It stands in every answer, in labels of metrics and on the terminal. Raises ConfigError."""
    if len(model_id) > MAX_ID_CHARS or not model_id.isprintable():  # which no lone surrogate is
        raise ConfigError(f"model_id = {_shown(model_id)}{source}: must be 1 to {MAX_ID_CHARS} printable characters")


def _keys(cls: type) -> dict[str, tuple[Any, Field[Any]]]:
    """Key -> (annotation, field) of the keys that a table may hold."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: (hints[f.name], f) for f in fields(cls) if f.name not in _PROGRAM_ONLY}


def _document(text: str) -> dict[str, Any]:
    """The TOML document in ``text``. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError("not valid TOML: nested too deeply") from None
    except ValueError:  # Python's own: it converts no integer of thousands of digits
        raise ConfigError(f"{_key_with_most_digits(text)}: must not have thousands of digits") from None


def _key_with_most_digits(text: str) -> str:
    line = max(text.split("\n"), key=lambda line: sum(map(str.isdecimal, line)))
    return _shown_key(line.partition("=")[0].strip())


def _overridden(table: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """``table`` with each TL_ENGINE__ variable put over its key."""
    result = dict(table)
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        key, _, nested = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not key:
            raise ConfigError(f"{name}: names no key; {ENV_PREFIX}MODEL_ID is how it is done")
        if nested and key != "speculative":
            raise ConfigError(f"{_shown_key(name)}: is no key; only those of speculative have a second part")
        if nested:
            inner = result.get(key)
            if isinstance(inner, _EnvText):  # the whole table, given by a variable of its own
                inner = inner.as_toml()
            result[key] = (inner if isinstance(inner, dict) else {}) | {nested: _EnvText(text)}
        else:
            result[key] = _EnvText(text)
    return result


def sources(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """Where the keys that are set have their values from: "file", or the variable's name.

    ``text`` and ``env`` are what ``ServeConfig.from_toml`` has accepted. Keys of the nested table have a dot.
    """
    table = _overridden(tomllib.loads(text).get("engine", {}), env)
    if isinstance(table.get("speculative"), dict):
        table |= {f"speculative.{key}": value for key, value in table.pop("speculative").items()}
    return {key: _name(key, value) if isinstance(value, _EnvText) else "file" for key, value in table.items()}


def with_source(error: ConfigError, name: str, env: Mapping[str, str]) -> ConfigError:
    """The error with where its value is from: the variable that gives it, else ``name``, of a file or a model."""
    message = str(error)
    if message.startswith(ENV_PREFIX):
        return error
    key = re.match(r"(?:[a-z_]+\.)?[a-z_]+(?=[ :])", message)
    if key is not None:
        variable = ENV_PREFIX + key[0].upper().replace(".", "__")
        if variable in env:
            return ConfigError(variable + message[key.end() :])
        table = ENV_PREFIX + key[0].partition(".")[0].upper()
        if table in env:  # the whole table, given by a variable of its own
            return ConfigError(f"{table}: {message}")
    return ConfigError(f"{name}: {message}")


class _EnvText(str):
    """A value from the environment: TOML where it reads as TOML and fits the key, else plain text."""

    __slots__ = ()

    def as_toml(self) -> Any:
        try:
            document = tomllib.loads(f"value = {self}")
        except (ValueError, RecursionError):
            return str(self)
        return document["value"] if document.keys() == {"value"} else str(self)


def _from_table(table: Mapping[str, Any], directory: Path, program: dict[str, Any]) -> ServeConfig:
    engine_keys, serve_keys = _keys(EngineConfig), _keys(ServeConfig)
    values = _converted(table, engine_keys | serve_keys, directory, prefix="")
    if "model_dir" not in values:
        raise ConfigError("model_dir: is required in the table [engine]: a model directory or a .gguf file")
    engine = EngineConfig(**{key: values.pop(key) for key in engine_keys.keys() & values.keys()})
    return ServeConfig(**{"engine": engine, **values, **program})


def _converted(
    table: Mapping[str, Any], keys: Mapping[str, tuple[Any, Field[Any]]], directory: Path, *, prefix: str
) -> dict[str, Any]:
    unknown = next((key for key in table if key not in keys), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown[:80], keys, n=1)
        hint = f"; did you mean {prefix}{near[0]}?" if near else ""
        name = _shown_key(_name(prefix + unknown, table[unknown]))
        raise ConfigError(f"{name}: is no key of the [engine] table{hint}")
    return {key: _value(prefix + key, value, keys[key][0], directory) for key, value in table.items()}


def _value(key: str, value: Any, annotation: Any, directory: Path) -> Any:
    if isinstance(value, SpeculativeConfig):
        return value
    if key == "speculative":
        given, value = value, value.as_toml() if isinstance(value, _EnvText) else value
        if value is None:  # of a program, which TOML has no way to say
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{_name(key, given)} = {_shown(value)}: must be a table")
        inner = _converted(value, _keys(SpeculativeConfig), directory, prefix="speculative.")
        if "method" not in inner:
            raise ConfigError('speculative.method: is required: "prompt_lookup" or "draft_model"')
        return SpeculativeConfig(**inner)

    def to_path(kind: type, text: Any) -> Path:
        if kind is not Path or not isinstance(text, str | Path) or str(text) == "" or "\0" in str(text):
            raise ValueError("must be a path")
        return Path(os.path.abspath(directory / text))

    if isinstance(value, Path):
        value = str(value)
    attempts = [value.as_toml(), str(value)] if isinstance(value, _EnvText) else [value]
    for attempt in attempts:
        with suppress(msgspec.ValidationError, ValueError):
            if not isinstance(attempt, int) or attempt in _INT64:
                return msgspec.convert(attempt, annotation, dec_hook=to_path)
    rule = _rule(msgspec.json.schema(annotation, schema_hook=lambda kind: {"type": "path"}))
    raise ConfigError(f"{_name(key, value)} = {_shown(attempts[0])}: must be {rule}")


def _name(key: str, value: Any) -> str:
    """What an error calls a key: the variable where its value came from the environment."""
    return ENV_PREFIX + key.upper().replace(".", "__") if isinstance(value, _EnvText) else key


def _shown(value: Any) -> str:
    """A value as it may stand in the file, in one short printable line."""
    if isinstance(value, int) and value not in _INT64:
        return "a number past 64 bits"
    try:
        return str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)
    except ValueError:  # Python writes no integer of thousands of digits, which a list may hold
        return "..."


def _shown_key(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]{1,80}", key, re.ASCII) else _shown(key)


def _rule(schema: Mapping[str, Any]) -> str:
    """What a value that fits the JSON schema of a key is, in the words of the API's errors."""
    if "anyOf" in schema:
        return next(_rule(option) for option in schema["anyOf"] if option != {"type": "null"})
    if "enum" in schema:
        return "one of " + ", ".join(f'"{choice}"' for choice in schema["enum"])
    if schema["type"] != "integer":
        return {"array": "a list of strings", "string": "a string", "path": "a path"}[schema["type"]]
    least, most, factor = (schema.get(name) for name in ("minimum", "maximum", "multipleOf"))
    within = f" from {least} to {most}" if most is not None else f" of {least} or more"
    return f"an integer{within}" + (f" that is a multiple of {factor}" if factor else "")


def _plain(value: Any) -> Any:
    """TOML values only; what is None is left out."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def json_schema() -> dict[str, Any]:
    """The JSON schema of a runtime.toml document, published as docs/runtime.schema.json."""
    table = _object_schema(_keys(ServeConfig) | _keys(EngineConfig))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "runtime.toml of trio-tlserve",
        "type": "object",
        "properties": {"engine": table},
        "required": ["engine"],
    }


def _object_schema(keys: Mapping[str, tuple[Any, Field[Any]]]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, (annotation, fld) in keys.items():
        if name == "speculative":
            properties[name] = _object_schema(_keys(SpeculativeConfig))
        else:
            properties[name] = msgspec.json.schema(annotation, schema_hook=_path_schema)
        properties[name]["description"] = fld.metadata["doc"]
        if fld.default not in (MISSING, None, ""):
            properties[name]["default"] = _plain(fld.default)
    required = [name for name, (_, f) in keys.items() if f.default is MISSING and f.default_factory is MISSING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _path_schema(kind: type) -> dict[str, Any]:
    if kind is Path:
        return {"type": "string"}
    raise TypeError(f"no JSON schema for {kind}")
