"""The composition root: binds, loads, warms up, serves, drains. Everything that lives is started here."""

from __future__ import annotations

import gc
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial

import trio

from tlserve.config import ServeConfig, parse_listen
from tlserve.engine.loop import EngineLoop
from tlserve.errors import ConfigError, EngineDied, ListenError, ModelLoading, StoppedWhileLoading
from tlserve.health import Health, Phase
from tlserve.http.access import RequestRecord
from tlserve.http.cors import Cors
from tlserve.http.limits import Limits
from tlserve.http.messages import Reply, Request
from tlserve.http.router import Router
from tlserve.http.serve import HttpServer
from tlserve.http.tls import server_context
from tlserve.loading import Loaded, Progress, load, silent
from tlserve.log import LOGGER
from tlserve.metrics.page import Metrics
from tlserve.model.checkpoint import open_checkpoint
from tlserve.openai.api_keys import ApiKeys
from tlserve.openai.app import add_document, add_routes
from tlserve.openai.errors import ERRORS
from tlserve.overview import Overview
from tlserve.tracing import follow_requests

Address = tuple[str, int]
OnReady = Callable[["Server"], None]

API_HINT = "the API is under /v1, and GET /openapi.json lists it"
ON_THE_HEALTH_PORT = dict.fromkeys(("/metrics", "/readyz"), "it is on the health port")
# Seconds for answers to take the error that ends them when the time to drain is over, and for replies to
# reach their clients after the engine has died.
CUT_TIMEOUT = 5.0
FAREWELL_TIMEOUT = 2.0
# Seconds a thread may hold the interpreter while another waits for it. Python's default of 5 ms would be
# several steps of a small model; below 0.5 ms the switching itself shows in the token rate.
SWITCH_INTERVAL = 0.0005
# Young objects between two collections. Decoding a body of 4 MB makes millions; at Python's default of 700 the
# collector takes eight times as long as the decoding.
GC_THRESHOLD = 100_000


class Server:
    """A running server, as ``serve`` gives it."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.http_addr: Address = ("", 0)
        self.health_addr: Address = ("", 0)
        self.overview: Overview  # of the model, once it is loaded
        self._health = Health()
        self._drain_requested = trio.Event()

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base_url."""
        host, port = self.http_addr
        scheme = "https" if self.config.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @property
    def phase(self) -> Phase:
        return self._health.phase

    def drain(self) -> None:
        """Stop taking requests; those in flight finish. Synchronous and idempotent."""
        if self._health.phase is Phase.READY:
            self._health.phase = Phase.DRAINING
        self._drain_requested.set()

    async def wait_drain(self) -> None:
        """Return when a drain has been asked for."""
        await self._drain_requested.wait()


@asynccontextmanager
async def serve(config: ServeConfig, *, progress: Progress = silent) -> AsyncIterator[Server]:
    """Run a server for the length of a block, which is entered when the server is ready.

    Resource handling: leaving the block drains; no task, thread, socket or signal handler is left.
    Error handling: raises ConfigError, ModelError or ListenError when it cannot start, EngineDied when a step
    failed. An exception of the block aborts what is in flight and is raised as it is.
    Cancellation handling: aborts what is in flight.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError("serve needs a trio event loop; from asyncio or plain code use tlserve.spawn")
    of_block: BaseException | None = None
    with _interpreter_settings():
        try:
            async with trio.open_nursery() as nursery:
                server: Server = await nursery.start(_run, Server(config), progress)
                try:
                    yield server
                except BaseException as error:
                    of_block = error
                    raise
                server.drain()
        except BaseExceptionGroup as group:
            lone = _lone(group, of_block)
            if lone is group:
                raise
            raise lone from lone.__cause__


async def _run(server: Server, progress: Progress, *, task_status: trio.TaskStatus[Server]) -> None:
    """The whole life of a server; reports itself started once it is ready."""
    config, health = server.config, server._health
    keys, tls, cors = read_access(config)
    # A model that is not there is said before an address that is in use; an existing one is opened in no time.
    await trio.to_thread.run_sync(open_checkpoint, config.model_dir)
    check_addresses(config)
    api = _Api(health, keys, cors)
    health_router = health.router()
    health_server = HttpServer(health_router, ERRORS, _limits(config), name="health", check=health_router.check)
    async with AsyncExitStack() as resources:
        api_server = HttpServer(
            api,
            ERRORS,
            _limits(config),
            name="api",
            check=api.check,
            headers_for=api.cors.headers,
            on_finish=partial(_report, health.metrics),
            begin_trace=await resources.enter_async_context(follow_requests(scheme="https" if tls else "http")),
        )
        async with trio.open_nursery() as nursery:
            server.health_addr = await _listen(nursery, health_server, config.health_listen, "health_listen")
            server.http_addr = await _listen(nursery, api_server, config.http_listen, "http_listen", tls)
            if config.handle_signals:
                await nursery.start(_handle_signals, server, keys)
            loaded = await _load(server, progress)
            resources.callback(loaded.close)
            loop = EngineLoop(
                loaded.engine,
                queue_deadline=config.queue_deadline_ms / 1000,
                step_delay=config.step_delay,
                on_step=health.metrics.observe_step,
            )
            nursery.start_soon(_run_engine, loop, health)
            health.metrics.add_engine(
                lambda: asdict(loop.stats()), instruction_set=loaded.overview.isa, model=_model_facts(loaded)
            )
            add_routes(api.router, loaded.service(loop))
            server.overview = loaded.overview
            health.phase = Phase.READY
            task_status.started(server)
            await server.wait_drain()
            server.drain()  # where it was asked for at the last moment of loading
            await _drain(api_server, deadline=trio.current_time() + config.drain_timeout_ms / 1000)
            if not loop.is_dead:  # else its task is about to say so
                nursery.cancel_scope.cancel()


class _Api:
    """The handler of the API port: its health and its description at once, the rest when the model is there.

    Whoever needs a key and has none learns nothing else: not whether the path exists, nor how the server does.
    """

    def __init__(self, health: Health, keys: ApiKeys | None, cors: Cors) -> None:
        self.router = Router(elsewhere=ON_THE_HEALTH_PORT, hint=API_HINT)
        self.cors = cors
        self._health = health
        self._keys = keys
        health.add_api_routes(self.router)
        add_document(self.router)

    def check(self, request: Request) -> None:
        """What can be refused before the body has come."""
        if self.cors.preflight(request) is not None:
            return
        if f"{request.path}/".startswith("/v1/"):  # decoded, so that no spelling of a route gets by
            if self._keys is not None:
                self._keys.check(request)
            if self._health.phase is Phase.LOADING:
                raise ModelLoading("the model is being loaded")
        self.router.check(request)

    async def __call__(self, request: Request, reply: Reply) -> None:
        preflight = self.cors.preflight(request)
        if preflight is not None:
            await reply.send(preflight)
        else:
            await self.router(request, reply)


def read_access(config: ServeConfig) -> tuple[ApiKeys | None, ssl.SSLContext | None, Cors]:
    """What decides who may come in. Raises ConfigError for a file or an origin that cannot be used."""
    keys = ApiKeys(config.api_keys_file) if config.api_keys_file else None
    tls = server_context(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    return keys, tls, Cors(config.cors_allow_origins)


def check_addresses(config: ServeConfig) -> None:
    """Raises ListenError where both ports would be one."""
    http, health = parse_listen(config.http_listen, "http_listen"), parse_listen(config.health_listen, "health_listen")
    is_one_host = http[0] == health[0] or None in (http[0], health[0])
    if is_one_host and http[1] == health[1] != 0:
        raise ListenError(
            f"health_listen = {config.health_listen!r}: is the address of http_listen too; each needs a port of its own"
        )


async def open_listeners(listen: str, key: str) -> list[trio.SocketListener]:
    """Listen on the address of a configuration key. Raises ListenError, whose context is the system's error."""
    host, port = parse_listen(listen, key)
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        variable = f"TL_ENGINE__{key.upper()}"
        raise ListenError(f"{key} = {listen!r}: {error.strerror or error}; {variable} sets another address") from None


async def _listen(
    nursery: trio.Nursery, http: HttpServer, listen: str, key: str, tls: ssl.SSLContext | None = None
) -> Address:
    """Serve ``http`` on the address of a configuration key; the address says which port it got."""
    listeners = await open_listeners(listen, key)
    name = listeners[0].socket.getsockname()
    await nursery.start(http.serve, [trio.SSLListener(item, tls) for item in listeners] if tls else listeners)
    return name[0], name[1]


async def _load(server: Server, progress: Progress) -> Loaded:
    """Load the model in a thread, unless a request to drain comes first."""
    result: Loaded | None = None

    def report(what: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        progress(what, done, total)

    async def load_model() -> None:
        nonlocal result
        result = await trio.to_thread.run_sync(load, server.config, report, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load_model)
        await server.wait_drain()
        nursery.cancel_scope.cancel()
    if result is None:
        raise StoppedWhileLoading("stopped while the model was being loaded")
    return result


async def _run_engine(loop: EngineLoop, health: Health) -> None:
    """A step that failed has ended every request with an error; the replies get a moment, then the server ends."""
    try:
        await loop.run()
    except Exception as error:
        health.phase = Phase.FAILED
        LOGGER.critical("a step of the engine failed", exc_info=True)
        await trio.sleep(FAREWELL_TIMEOUT)
        raise EngineDied("a step of the engine failed; the log has the traceback") from error


async def _drain(http: HttpServer, *, deadline: float) -> None:
    """Let what is in flight finish; what has not by the deadline ends with an error."""
    http.drain()
    with trio.move_on_at(deadline):
        await http.ended.wait()
        return
    LOGGER.warning("the time to drain is over", extra={"connections": http.num_connections})
    http.cut()
    with trio.move_on_after(CUT_TIMEOUT):
        await http.ended.wait()


async def _handle_signals(server: Server, keys: ApiKeys | None, *, task_status: trio.TaskStatus[None]) -> None:
    """The first SIGTERM or SIGINT drains; the second ends the process at once, whatever it is doing.

    SIGHUP has the API keys read again; without any it keeps its own meaning.
    """
    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if keys else [])]
    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        async for number in signals:
            if keys is not None and number == signal.SIGHUP:
                _reload(keys)
            elif server._drain_requested.is_set():
                LOGGER.warning("ended by a second signal", extra={"signal": signal.Signals(number).name})
                os._exit(128 + number)
            else:
                LOGGER.info("draining", extra={"signal": signal.Signals(number).name})
                server.drain()


def _reload(keys: ApiKeys) -> None:
    try:
        keys.reload()
    except ConfigError as error:
        LOGGER.error("the API keys stay as they were", extra={"error": str(error)})
    else:
        LOGGER.info("the API keys have been read again", extra={"keys": len(keys)})


def _report(metrics: Metrics, record: RequestRecord) -> None:
    _log_request(record)
    metrics.requests.observe(record)


def _model_facts(loaded: Loaded) -> dict[str, str]:
    """What the metrics page says of the model: nothing that changes while it runs."""
    model, engine = loaded.overview, loaded.config.engine
    return {
        "model_id": model.model_id,
        "architecture": model.architecture,
        "formats": ",".join(model.formats),
        "weights": engine.weights,
        "kv_dtype": engine.kv_dtype,
        "max_model_len": str(model.max_model_len),
        "block_size": str(model.block_size),
        "num_blocks": str(model.num_blocks),
        "fingerprint": loaded.fingerprint,
    }


def _log_request(record: RequestRecord) -> None:
    fields = {
        "id": record.request_id,
        "method": record.method,
        "route": record.route or "none",
        "status": record.status,
        "outcome": record.outcome.value,
        "seconds": record.duration,
    }
    LOGGER.info("request", extra=fields | {key: value for key, value in record.notes.items() if key != "route"})


def _limits(config: ServeConfig) -> Limits:
    return Limits(
        max_body_bytes=config.max_body_bytes,
        header_timeout=config.header_timeout_ms / 1000,
        body_timeout=config.body_timeout_ms / 1000,
        idle_timeout=config.idle_timeout_ms / 1000,
        write_timeout=config.write_timeout_ms / 1000,
        max_connections=config.max_connections,
    )


def _lone(group: BaseException, of_block: BaseException | None) -> BaseException:
    """The one exception in groups of one, which nurseries make; what the block raised is what it was, group or not."""
    if of_block is not None and _leaves(group) == _leaves(of_block):
        return of_block  # itself, where a nursery has made a copy of a group
    error = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _leaves(error: BaseException) -> set[int]:
    """The identities of all exceptions in ``error`` that are no groups."""
    if not isinstance(error, BaseExceptionGroup):
        return {id(error)}
    return set().union(*map(_leaves, error.exceptions))


@contextmanager
def _interpreter_settings() -> Iterator[None]:
    """Short turns at the interpreter lock, and collections of garbage that do not walk what stays anyway."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
    gc.set_threshold(GC_THRESHOLD, *threshold[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)


def run(config: ServeConfig, *, progress: Progress = silent, on_ready: OnReady = lambda server: None) -> None:
    """Serve until SIGTERM or SIGINT, drain, return: what the command does.

    Raises ExitError when the server cannot start or go on.
    """

    async def main() -> None:
        async with serve(replace(config, handle_signals=True), progress=progress) as server:
            on_ready(server)
            await server.wait_drain()

    trio.run(main)
