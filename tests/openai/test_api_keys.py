"""The file of API keys: what it may hold, and who gets past it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlserve.errors import ConfigError, Unauthorized
from tlserve.http.messages import Request
from tlserve.openai.api_keys import MAX_FILE_BYTES, MAX_KEY_CHARS, ApiKeys

NO_LINE_ENDS = "\x00\x0b\x0c\r\x1c\x1d\x1e\x85\xa0\u2028\u2029"
BAD_FILES: list[tuple[bytes, str]] = [
    (b"", "at least one key"),
    (b"\n \n# only a comment\n", "at least one key"),
    (b"good\nsk two words\n", "line 2: a key is"),
    ("schlüssel\n".encode(), "line 1: must be printable ASCII"),
    *((f"good\nsecret{end}words\n".encode(), "line 2: must be printable ASCII") for end in NO_LINE_ENDS),
    ("good\n# a comment\u2028words\n".encode(), "line 2: must be printable ASCII"),
    ("\u3000words\n".encode(), "line 1: must be printable ASCII"),
    (b"tab\tinside", "line 1: a key is"),
    (b"x" * (MAX_KEY_CHARS + 1), "line 1: a key is"),
    (b"good\n\xff\n", "UTF-8 text, is not at byte 5"),
    (b"k\n" * (MAX_FILE_BYTES // 2 + 1), "at most 1048576 bytes"),
]


def request(*authorization: str) -> Request:
    headers = tuple(("authorization", value) for value in authorization)
    return Request("GET", "/v1/models", "", headers, b"", "req-1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("\ufeff# of the first team\nsk-one\n\n  sk-two  \r\nsk-one\n")
    return path


@pytest.mark.parametrize(("content", "rule"), BAD_FILES)
def test_a_bad_file_is_refused_with_its_name_and_rule_and_without_its_text(
    tmp_path: Path, content: bytes, rule: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ApiKeys(path)
    assert str(caught.value).startswith(f"api_keys_file = '{path}': ")
    assert rule in str(caught.value)
    assert "words" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing': cannot be read: No such file"):
        ApiKeys(tmp_path / "missing")
    with pytest.raises(ConfigError, match="must be a regular file"):
        ApiKeys(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be a regular file"):
        ApiKeys(tmp_path / "pipe")


@pytest.mark.parametrize("value", ["Bearer sk-one", "bearer sk-two", "BEARER   sk-one"])
def test_every_key_of_the_file_is_taken(path: Path, value: str) -> None:
    keys = ApiKeys(path)
    assert len(keys) == 2
    keys.check(request(value))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["sk-one"],
        ["Bearer"],
        ["Bearer sk-on"],
        ["Bearer sk-one2"],
        ["Bearer SK-ONE"],
        ["Bearer sk-one sk-two"],
        ["Basic sk-one"],
        ["Bearer # of the first team"],
        ["Bearer sk-\xfcne"],
        ["Bearer sk-one", "Bearer sk-one"],
    ],
)
def test_anything_else_is_401_and_is_not_quoted(path: Path, values: list[str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        ApiKeys(path).check(request(*values))
    assert "sk-" not in caught.value.message
    assert caught.value.headers == [("WWW-Authenticate", "Bearer")]


def test_a_reload_takes_the_file_as_it_is_now(path: Path) -> None:
    keys = ApiKeys(path)
    path.write_text("sk-three\n")
    keys.check(request("Bearer sk-one"))
    keys.reload()
    keys.check(request("Bearer sk-three"))
    with pytest.raises(Unauthorized):
        keys.check(request("Bearer sk-one"))


def test_a_reload_of_a_bad_file_keeps_the_keys(path: Path) -> None:
    keys = ApiKeys(path)
    for spoil in (lambda: path.write_text(""), path.unlink):
        spoil()
        with pytest.raises(ConfigError):
            keys.reload()
        keys.check(request("Bearer sk-one"))


def test_no_key_is_kept_or_shown(path: Path) -> None:
    keys = ApiKeys(path)
    assert "sk-" not in repr(keys) + repr(vars(keys))
