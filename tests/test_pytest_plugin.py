"""The fixture ``tlserve_server`` in runs of pytest of their own, beside the plugins that its users have."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tlserve import pytest_plugin
from tlserve.data import TINY_LLAMA
from tlserve.kernels.jit import cache_root
from tlserve.pytest_plugin import _CompilingNotice

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
SUCC = ROOT / "fixtures" / "succ"
CACHE = cache_root()
PLAIN_TEST = """
    import urllib.request

    def test_the_server_answers(tlserve_server):
        with urllib.request.urlopen(f"{tlserve_server.base_url}/models/tiny-llama") as reply:
            assert reply.status == 200
        with urllib.request.urlopen(f"{tlserve_server.health_url}/readyz") as reply:
            assert reply.status == 200
        assert tlserve_server.model == "tiny-llama"
"""
NO_PATIENCE = (
    "import tlserve.pytest_plugin\ntlserve.pytest_plugin.PATIENCE = -1.0\n"  # every start is one that compiles
)
# Runs a command on a terminal of its own and copies what is written there.
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
NOTICE = "tlserve: compiling kernels, once on this machine"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugins but those that a run names, and the kernels of this machine: a run has an empty home of its own."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("TLSERVE_CACHE_DIR", str(CACHE))


def command(*arguments: str, plugins: Sequence[str] = ()) -> list[str]:
    """``plugins`` are names of entry points, as ``tlserve`` is."""
    names = [argument for name in ("tlserve", *plugins) for argument in ("-p", name)]
    return [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *names, *arguments]


def run(pytester: pytest.Pytester, *arguments: str, plugins: Sequence[str] = ()) -> pytest.RunResult:
    return pytester.run(*command(*arguments, plugins=plugins))


def readme_tests() -> list[str]:
    """The programs under "In a test", as they stand there."""
    section = (ROOT / "README.md").read_text().split("\n## In a test\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_what_the_readme_says_can_be_pasted(pytester: pytest.Pytester) -> None:
    tests = readme_tests()
    assert len(tests) == 3
    for index, text in enumerate(tests):
        pytester.makepyfile(**{f"test_{index}": text})
    pytester.makeini("[pytest]\ntrio_mode = true\n")
    (pytester.path / "path/to/a").mkdir(parents=True)
    (pytester.path / "path/to/a/model").symlink_to(TINY_LLAMA)
    run(pytester, plugins=["trio"]).assert_outcomes(passed=3)


def test_a_session_of_plain_pytest_has_one_server_and_says_why_a_start_that_compiles_takes_long(
    pytester: pytest.Pytester,
) -> None:
    text = "def test_it(tlserve_server):\n    print('served by', tlserve_server.base_url)\n"
    pytester.makepyfile(PLAIN_TEST, test_one=text, test_two=text)
    pytester.makeconftest(NO_PATIENCE)
    result = run(pytester, "-rP")
    result.assert_outcomes(passed=3)
    urls = re.findall(r"^served by (\S+)$", result.stdout.str(), re.MULTILINE)
    assert (len(urls), len(set(urls))) == (2, 1)
    assert result.stdout.str().count(NOTICE) == 1  # past the capturing of output


def test_pytest_trio(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, trio

        @pytest.mark.trio
        async def test_the_server_answers(tlserve_server):
            host, port = tlserve_server.health_url.removeprefix("http://").split(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(b"GET /readyz HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        """
    )
    run(pytester, plugins=["trio"]).assert_outcomes(passed=1)


def test_pytest_asyncio(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from openai import AsyncOpenAI

        @pytest.mark.asyncio
        async def test_the_server_answers(tlserve_server):
            async with AsyncOpenAI(base_url=tlserve_server.base_url, api_key="none") as client:
                answer = await client.completions.create(model=tlserve_server.model, prompt="a", max_tokens=2)
            assert answer.usage.completion_tokens <= 2
        """
    )
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    run(pytester, plugins=["asyncio"]).assert_outcomes(passed=1)


def test_each_worker_of_pytest_xdist_has_a_server_and_the_terminal_to_say_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pathlib import Path

        def test_the_server_is_mine(tlserve_server, worker_id):
            Path(worker_id).write_text(tlserve_server.base_url)
        """
    )
    pytester.makeconftest(NO_PATIENCE)
    options = ("--tx", "2*popen", "--dist", "each", "--color", "no")
    result = pytester.run(sys.executable, "-c", ON_A_TERMINAL, *command(*options, plugins=["xdist"]))
    result.assert_outcomes(passed=2)
    assert len({(pytester.path / worker).read_text() for worker in ("gw0", "gw1")}) == 2
    assert result.stdout.str().count(NOTICE) == 2


@pytest.mark.parametrize(("setting", "option"), [("./succ", ()), ("/nowhere", ("--tlserve-model", "succ"))])
def test_another_model_is_named_by_a_setting_or_an_option_which_goes_first(
    pytester: pytest.Pytester, setting: str, option: tuple[str, ...]
) -> None:
    """Relative to the file of the setting, and to where pytest was called."""
    pytester.makepyfile("def test_it(tlserve_server):\n    assert tlserve_server.model == 'succ'\n")
    (pytester.path / "succ").symlink_to(SUCC)
    pytester.makeini(f"[pytest]\ntlserve_model = {setting}\n")
    run(pytester, *option).assert_outcomes(passed=1)


def test_a_model_that_cannot_be_loaded_is_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN_TEST)
    result = run(pytester, "--tlserve-model", "/nowhere")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["tlserve_server: /nowhere: does not exist"])
    result.stdout.no_fnmatch_line("*ModelError*")


def test_a_run_that_does_not_ask_for_a_server_does_not_load_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert "tlserve.pytest_plugin" in sys.modules
            assert not {"trio", "numba", "msgspec", "tlserve.server", "tlserve.config"} & sys.modules.keys()
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_loading_from_the_cache_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines: list[str] = []
    notice = _CompilingNotice(lines.append)
    notice("weights", 0, 1)
    for done in range(3):
        notice("kernels", done, 20)
    now = pytest_plugin.PATIENCE
    notice("kernels", 20, 20)
    assert lines == []
    now += 1
    notice("warming up", 0, 1)
    assert lines == []
    for _ in range(2):
        notice("kernels", 0, 20)
    assert len(lines) == 1
