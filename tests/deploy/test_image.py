"""What the Containerfile's RUN steps give, made in a scratch directory: no container engine is needed.

With ``DEPLOY=full`` only, as ``make deploy-check`` has it, and as root: packages are installed, kernels compiled, and
servers started as other users. What a directory is to them that they cannot write, a read-only root is to a container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import get, post
from tests.command import running
from tests.deploy.files import instructions
from tests.deploy.programs import DEPLOY, ROOT

UID = 10001  # as the image has it
OTHER_UID = 10002
WARNING = "kernel cache cannot be"
BUILD_TIMEOUT = 600.0
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin")  # the system's: other users cannot reach root's own

pytestmark = [
    pytest.mark.skipif(os.environ.get("DEPLOY") != "full", reason="builds for minutes; make deploy-check runs it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="starts servers as other users, which only root can"),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some starts here compile all kernels first."""
    monkeypatch.setattr("tests.command.TIMEOUT", 300.0)


class Image:
    """The two directories of the image that its RUN steps fill."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = root / "opt" / "bin" / "trio-tlserve"
        self.cache = root / "cache"
        self.models = root / "models"

    def run(self, step: str, *, uid: int | None = None, cwd: Path | None = None) -> None:
        """A RUN step with its two directories here."""
        step = step.replace("/opt/trio-tlserve", f"{self.root}/opt").replace("/var/cache/trio-tlserve", str(self.cache))
        step = step.replace("install --directory /models", f"install --directory {self.models}")
        result = subprocess.run(
            ["sh", "-ec", step],
            cwd=cwd,
            user=uid,
            group=uid and 0,
            extra_groups=[] if uid else None,
            env={"PATH": os.environ["PATH"], "TLSERVE_CACHE_DIR": str(self.cache), **_pip_settings()},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT,
        )
        assert result.returncode == 0, result.stdout + result.stderr

    def command(self, uid: int, cache: Path, **env: str) -> list[str]:
        """The entry of the image as some user, with nothing in its environment but what the image and ``env`` give."""
        variables = {
            "TLSERVE_CACHE_DIR": str(cache),
            "TL_ENGINE__MODEL_DIR": str(self.models),
            "TL_ENGINE__HTTP_LISTEN": "127.0.0.1:0",
            "TL_ENGINE__HEALTH_LISTEN": "127.0.0.1:0",
            **env,
        }
        user = ["setpriv", f"--reuid={uid}", "--regid=0", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [*user, "env", "-i", *settings, str(self.program), str(self.root / "container.toml")]

    def kernels(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.cache.glob("*/*")}


def _pip_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "NO_PROXY"))}


def _copied(into: Path) -> Path:
    """The context that the build stage copies."""
    into.mkdir()
    for name, rest in instructions():
        if name != "COPY" or "--from" in rest or "container.toml" in rest:
            continue
        for source in rest.split()[:-1]:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)
    return into


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """Built step by step as the Containerfile says."""
    root = Path(tempfile.mkdtemp())  # not pytest's directory, which is for its user alone
    root.chmod(0o755)
    made = Image(root)
    install, directories, compile_ = [rest for name, rest in instructions() if name == "RUN"]
    made.run(install.replace("python3 -m venv", f"{PYTHON} -m venv"), cwd=_copied(root / "source"))
    made.run(directories)
    made.run(compile_, uid=UID)
    shutil.copy(DEPLOY / "container.toml", root)
    shutil.copytree(ROOT / "fixtures" / "tiny-llama", made.models, dirs_exist_ok=True)
    subprocess.run(["chmod", "-R", "a-w", made.cache], check=True)
    yield made
    shutil.rmtree(root)


async def _serves(command: list[str]) -> str:
    """Start, answer, drain on SIGTERM; what stderr had."""
    async with running(command) as server:
        api, health = await server.wait_ready()
        assert (await get(health, "/readyz")).status == 200
        body = {"model": "models", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert (await post(api, "/v1/chat/completions", body)).status == 200
        server.send_signal(15)
        assert await server.wait() == 0
    return server.stderr.decode()


async def test_the_image_starts_from_its_own_kernels_and_writes_nothing(image: Image) -> None:
    before = image.kernels()
    log = await _serves(image.command(UID, image.cache))
    assert WARNING not in log
    assert image.kernels() == before


async def test_a_copy_of_the_kernels_serves_any_user(image: Image) -> None:
    """What the init container of the Deployment does, as a user whom the cluster has chosen."""
    cache = image.root / "copy"
    cache.mkdir()
    os.chown(cache, OTHER_UID, 0)
    image.run(f"cp -R {image.cache}/. {cache}/", uid=OTHER_UID)
    for path in cache.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    assert WARNING not in await _serves(image.command(OTHER_UID, cache))


async def test_on_another_cpu_with_nowhere_to_write_it_compiles_warns_once_and_serves(image: Image) -> None:
    """Another instruction set stands for another CPU: the key of the cache holds both."""
    log = await _serves(image.command(UID, image.cache, TLSERVE_ISA="portable"))
    assert log.count(WARNING) == 1


async def test_on_another_cpu_with_a_directory_to_write_it_compiles_once(image: Image) -> None:
    cache = image.root / "empty"
    cache.mkdir()
    os.chown(cache, UID, 0)
    assert WARNING not in await _serves(image.command(UID, cache, TLSERVE_ISA="portable"))
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert kept
    await _serves(image.command(UID, cache, TLSERVE_ISA="portable"))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == kept
