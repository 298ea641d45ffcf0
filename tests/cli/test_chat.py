"""``trio-tlserve chat``: a conversation on a terminal, one message through a pipe, and what a server may do to both."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from openai import OpenAI

from tests.cli.fake_api import FakeApi, fake_api
from tests.cli.terminal import CTRL_C, CTRL_D, on_terminal
from tests.cli.typed import typed
from tests.client import wait_for_metric
from tests.command import COMMAND, ROOT, SUCC, config_text
from tlserve import ServeConfig, serve, spawn
from tlserve.__main__ import main
from tlserve.cli.chat_session import Session
from tlserve.cli.chat_turn import Turn
from tlserve.cli.replies import PromptDetails, Usage
from tlserve.cli.terminal import Terminal, visible
from tlserve.http.client import Origin

GREEDY = ("--temperature", "0", "--max-tokens", "5")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def piped(data: bytes, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [*COMMAND, "chat", *arguments]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=environment, input=data, capture_output=True, timeout=60, check=False)


async def ask(*arguments: str, data: bytes = b"abc", **env: str) -> subprocess.CompletedProcess[bytes]:
    return await trio.to_thread.run_sync(lambda: piped(data, *arguments, **env))


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as api:
        yield api


# Through a pipe


async def test_all_of_stdin_is_one_message_and_its_answer_is_all_of_stdout() -> None:
    """The bigram goes on with the byte after the last one of its prompt, which is that of its template."""
    async with serve(ServeConfig.for_model(SUCC)) as server:
        ended = await ask("--base-url", server.base_url, *GREEDY, data=b"two\nlines\n")
        expected = await trio.to_thread.run_sync(answer_of, server.base_url, "two\nlines")
    assert ended.stdout.decode() == expected + "\n"
    assert (ended.returncode, ended.stderr) == (0, b"")


def answer_of(base_url: str, content: str) -> str:
    with OpenAI(base_url=base_url, api_key="none") as client:
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="succ", messages=messages, temperature=0, max_tokens=5)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("way", ["--model-dir", "file"])
def test_a_model_or_a_configuration_is_served_by_the_command_itself(way: str, tmp_path: Path) -> None:
    """Keys and TLS are for others: nobody else can know of this server's port."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(api_keys_file=str(keys), http_listen=":8000", prefix_cache="off"))
    source = ["--model-dir", str(SUCC)] if way == "--model-dir" else [str(path)]
    ended = piped(b"abc", *source, *GREEDY)
    assert ended.returncode == 0
    assert len(ended.stdout.decode().strip("\n")) == 5


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "stdin is empty"), (b" \n", "stdin is empty"), (b"a\xff", "not UTF-8 at byte 1")]
)
def test_a_message_that_is_none_is_refused_in_a_line(data: bytes, message: str) -> None:
    ended = piped(data, "--model-dir", str(SUCC))
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert message in ended.stderr.decode().splitlines()[-1]


async def test_what_a_server_refuses_is_one_line_on_stderr_and_1() -> None:
    async with serve(ServeConfig.for_model(SUCC)) as server:
        ended = await ask("--base-url", server.base_url, "--temperature", "9")
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.decode() == "trio-tlserve chat: 400: temperature must be a number from 0 to 2, got 9\n"


async def test_a_character_that_stdout_cannot_take_is_spelled_out(api: FakeApi) -> None:
    api.token = "é"
    ended = await ask("--base-url", api.base_url, "--max-tokens", "1", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, b"\\xe9\n")


def test_nobody_there_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--base-url", "http://127.0.0.1:1/v1"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err == "trio-tlserve chat: cannot connect to 127.0.0.1:1: Connection refused\n"


@pytest.fixture
def server_with_keys(tmp_path: Path) -> Iterator[str]:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with spawn(ServeConfig.for_model(SUCC, api_keys_file=str(keys))) as server:
        yield server.base_url


@pytest.mark.parametrize(
    "command", [["chat"], ["chat", "--model", "succ"], ["load"], ["load", "--model", "succ"], ["conform"]]
)
def test_a_key_that_is_asked_for_is_named_with_the_ways_to_give_it(
    command: list[str], server_with_keys: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a")))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main([*command, "--base-url", server_with_keys]) != 0
    error = capsys.readouterr().err
    assert "401: " in error
    assert "API key" in error
    assert error.endswith("; --api-key or OPENAI_API_KEY gives a key\n")


@pytest.mark.parametrize("command", [["chat"], ["load"], ["conform"]])
def test_a_url_without_the_prefix_of_the_api_is_doubted(
    command: list[str], server_with_keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--base-url", f"{server_with_keys}/v2", "--api-key", "secret"]) != 0
    assert capsys.readouterr().err.endswith("; is the URL right? it ends in /v1\n")


@pytest.mark.parametrize(
    "command", [["chat"], ["load", "--requests", "1", "--max-tokens", "2"], ["conform", "--only", "models.list"]]
)
def test_the_variables_of_openai_s_clients_say_which_server_and_which_key(
    command: list[str], server_with_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on the command line is there for every user of the machine to see."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a")))
    monkeypatch.setenv("OPENAI_BASE_URL", server_with_keys)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main(command) == 0


def test_an_option_goes_before_its_variable(server_with_keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    arguments = ["--base-url", server_with_keys, "--api-key", "secret"]
    assert main(["conform", *arguments, "--only", "models.list"]) == 0


@pytest.mark.parametrize("arguments", [["--base-url", "nowhere"], ["--base-url", "http://a", "x.toml"]])
def test_a_wrong_command_line_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["chat", *arguments])
    assert caught.value.code == 2
    assert "usage: trio-tlserve chat" in capsys.readouterr().err


def test_a_fault_of_the_configuration_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runtime.toml"
    path.write_text(config_text(max_model_len=5000))
    assert main(["chat", str(path)]) == 2
    expected = f"trio-tlserve: {path}: max_model_len = 5000: the model supports up to 4096\n"
    assert capsys.readouterr().err.endswith(expected)


# One session against a server that does as it is told


Talk = Callable[..., Any]


@pytest.fixture
def talk(api: FakeApi) -> Talk:
    """Has a session read these lines to their end; gives the session, what it showed and its complaints."""

    async def talk(*lines: str, out: io.StringIO | None = None, **settings: Any) -> tuple[Session, str, str]:
        shown, said = io.StringIO() if out is None else out, io.StringIO()
        body = {"model": "fake", "max_tokens": 3} | settings
        session = Session(Origin.parse(api.base_url), (), body, Terminal(shown), Terminal(said))
        await trio.to_thread.run_sync(session.talk, typed(*lines))
        return session, shown.getvalue(), said.getvalue()

    return talk


def sent(api: FakeApi, index: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in api.bodies[index]["messages"]]


async def test_each_question_brings_all_that_was_said(api: FakeApi, talk: Talk) -> None:
    _, shown, _ = await talk("one", "", "  ", "two ", temperature=0.5)
    assert shown == "w w w \nw w w \n\n"
    assert sent(api, 0) == [("user", "one")]
    assert sent(api, 1) == [("user", "one"), ("assistant", "w w w "), ("user", "two")]
    assert {key: value for key, value in api.bodies[0].items() if key != "messages"} == {
        "model": "fake",
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_reset_forgets_and_system_begins_anew(api: FakeApi, talk: Talk) -> None:
    await talk("one", "/system Be brief.", "two", "/reset", "three", "/system", "four")
    assert sent(api, 1) == [("system", "Be brief."), ("user", "two")]
    assert sent(api, 2) == [("system", "Be brief."), ("user", "three")]
    assert sent(api, 3) == [("user", "four")]


async def test_commands_answer_in_a_line_and_a_slash_can_be_said(api: FakeApi, talk: Talk) -> None:
    _, shown, _ = await talk("/stats", "/nothing", "/help", " /path is a message", "/stats")
    assert shown.startswith("nothing was asked yet\n/nothing is no command; /help lists them\n/reset ")
    assert sent(api) == [("user", "/path is a message")]
    assert "\n3 tokens, " in shown
    assert "; prompt 9 tokens, 0 of them cached\n" in shown


@pytest.mark.parametrize(
    ("fate", "complaint", "is_kept"),
    [
        ("busy", "429: ", False),
        ("error event", "it broke", True),
        ("nonsense", "not a chunk of this API: {]", True),
        ("cut short", "the answer was cut short", True),
    ],
)
async def test_a_fault_is_one_line_and_what_was_shown_stays_in_the_conversation(
    api: FakeApi, talk: Talk, fate: str, complaint: str, is_kept: bool
) -> None:
    api.fate = lambda index: fate if index == 0 else None
    _, shown, said = await talk("one", "two")
    assert said.startswith(complaint)
    assert said.count("\n") == 1
    assert sent(api) == [("user", "one"), ("assistant", "w "), ("user", "two")] if is_kept else [("user", "two")]
    assert shown == ("w \n" if is_kept else "") + "w w w \n\n"


HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\r\x08\u202ec\x9b1m\tüñ😀\n"


async def test_a_terminal_gets_no_escape_of_the_model_and_a_pipe_gets_what_came(api: FakeApi, talk: Talk) -> None:
    api.token = HOSTILE
    _, on_screen, _ = await talk("one", out=Screen(), max_tokens=1)
    _, in_file, _ = await talk("one", max_tokens=1)
    assert in_file == HOSTILE + "\n\n"
    assert on_screen.split("\n")[0] == "a\\x1b]0;title\\x07\\x1b[2Jb\\x0d\\x08\\u202ec\\x9b1m\tüñ😀"


async def test_colours_are_for_terminals_that_want_them(
    api: FakeApi, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in (await talk("/stats", out=Screen()))[1]
    assert "\x1b[" not in (await talk("/stats"))[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in (await talk("/stats", out=Screen()))[1]


def test_half_a_surrogate_pair_and_every_control_is_spelled_out() -> None:
    assert visible("\ud83d|\x00|\x7f|\u2066") == "\\ud83d|\\x00|\\x7f|\\u2066"
    for character in "\x9b\xad\u061c\u200b\u200e\u200f\u2028\u2029\u202e\u2060\ufeff\U000e0041":
        assert visible(character) == ascii(character)[1:-1]
    assert visible("é\t\n👩‍💻") == "é\t\n👩‍💻"  # a joined emoji stays one


def test_the_summary_counts_from_the_first_token() -> None:
    usage = Usage(prompt_tokens=40, completion_tokens=11, prompt_tokens_details=PromptDetails(cached_tokens=32))
    turn = Turn(text="x", start=1.0, first=1.5, end=3.5, num_pieces=9, usage=usage)
    assert turn.summary() == "11 tokens, 5.0 tokens/s, first after 0.50 s; prompt 40 tokens, 32 of them cached"
    turn.usage = None  # of a server that does not count: pieces stand for tokens
    assert turn.summary() == "9 tokens, 4.0 tokens/s, first after 0.50 s"


# On a terminal


async def test_a_conversation_on_a_terminal_ends_with_control_d() -> None:
    async with on_terminal(["chat", "--model-dir", str(SUCC), *GREEDY]) as screen:
        await screen.wait_for("succ; /help lists commands")
        await screen.wait_for("> ")
        await screen.type("/system abc\r")
        await screen.wait_for("system: abc")
        await screen.wait_for("> ")
        await screen.type("hello\r")
        await screen.wait_for("hello\r\n")
        answer = await screen.wait_for("\r\n")
        assert len(answer) >= 5
        await screen.wait_for("> ")
        await screen.type("/stats\r")
        await screen.wait_for("5 tokens, ")
        await screen.wait_for("> ")
        await screen.type(CTRL_D)
        assert await screen.wait() == 0


async def test_control_c_stops_an_answer_in_the_server_too_and_then_leaves() -> None:
    async with serve(ServeConfig.for_model(SUCC, step_delay=0.02)) as server:
        arguments = ["chat", "--base-url", server.base_url, "--max-tokens", "4000", "--temperature", "0"]
        async with on_terminal(arguments) as screen:
            await screen.wait_for("> ")
            await screen.type("a\r")
            await screen.wait_for("a\r\n")
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 1, within=20)
            await screen.type(CTRL_C)
            await screen.wait_for("stopped")
            await wait_for_metric(server.health_addr, "tl_engine_active_sequences", 0)
            await screen.wait_for("> ")
            await screen.type(CTRL_C)
            assert await screen.wait() == 0
            await screen.wait_for("\r\n")
            assert "Traceback" not in screen.seen


async def test_lines_can_be_called_back(api: FakeApi) -> None:
    up = "\x1b[A"
    async with on_terminal(["chat", "--base-url", api.base_url, "--max-tokens", "1"], TERM="xterm") as screen:
        await screen.wait_for("> ")
        for keys in ("one\r", f"{up}\r"):
            await screen.type(keys)
            await screen.wait_for("w ")
            await screen.wait_for("> ")
        await screen.type(CTRL_D)
        assert await screen.wait() == 0
    assert sent(api) == [("user", "one"), ("assistant", "w "), ("user", "one")]
