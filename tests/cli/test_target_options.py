"""What the commands that talk to a server refuse on their command line, each alike and in a line."""

from __future__ import annotations

import pytest

from tlserve.__main__ import main

COMMANDS = pytest.mark.parametrize("command", ["chat", "load", "conform"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that says why, which is the last."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@COMMANDS
@pytest.mark.parametrize("url", ["http://a/v 1", "http://a/v1\r\nX: y", "http://a..b/v1", "http://a:0/v1"])
def test_a_url_that_cannot_be_asked_is_quoted(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, command, "--base-url", url)
    assert line.startswith(f"trio-tlserve {command}: error: --base-url: {url!r}")


@COMMANDS
@pytest.mark.parametrize("key", ["se\ncret", "secret\r\nX: y", "s\xe9cret", "se cret", "\udcffsecret"])
@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    command: str, key: str, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--api-key", key] if way == "option" else []
    monkeypatch.setenv("OPENAI_API_KEY", key if way == "variable" else "")
    line = refused(capsys, command, "--base-url", "http://127.0.0.1:1/v1", *given)
    assert line.endswith("a key, also that of $OPENAI_API_KEY, is ASCII without spaces or line ends")
    assert "cret" not in line
