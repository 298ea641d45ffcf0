"""``trio-tlserve conform``: does a server keep the rules of this API?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import trio

from tlserve.cli.arguments import add_target_options, from_environment, new_parser, positive_float
from tlserve.cli.progress import Progress
from tlserve.cli.refusal import URL_VARIABLE, refusal
from tlserve.cli.terminal import one_line, output, visible
from tlserve.conform import report
from tlserve.conform.case import Case, Failed
from tlserve.conform.catalogue import ALL_CASES
from tlserve.conform.run import Result, run_cases
from tlserve.conform.subject import Subject, Target
from tlserve.http.client import ConnectionFailed, Origin, open_stream

DESCRIPTION = """Try a running server against named cases, one a rule, and report which it keeps. Level core is what
every OpenAI-compatible server should do; level contract, the default, adds what trio-tlserve promises beyond that. The
exit status is 0 when no case failed, 1 when some did, 2 for wrong arguments and where no server is there."""
EXAMPLES = (
    "trio-tlserve conform --base-url http://127.0.0.1:8000/v1 --health-url http://127.0.0.1:9464",
    "trio-tlserve conform --base-url http://127.0.0.1:8080/v1 --level core --junit conform.xml",
    "trio-tlserve conform --list --only err chat.stream",
)
LEVELS = ("core", "contract")


class NoServer(Exception):
    """There is nothing to be tried; the message says why."""


def main(argv: Sequence[str]) -> int:
    parsing = parser()
    arguments = parsing.parse_args(argv)
    cases = _chosen(parsing, arguments)
    out = output()
    if arguments.list:
        out.write(report.listing(cases) + "\n")
        return 0
    api, health = _origins(parsing, arguments)
    _check_writable(parsing, [path for path in (arguments.junit, arguments.json) if path is not None])
    started = datetime.now(UTC)
    try:
        target, results = trio.run(_conform, arguments, cases, api, health)
    except NoServer as error:
        print(f"trio-tlserve conform: {one_line(str(error))}", file=sys.stderr)
        return 2
    out.write(visible(report.table(results)) + "\n")
    about = {"base_url": arguments.base_url, "model": target.model, "level": arguments.level}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_document(results, about), indent=2) + "\n", encoding="utf-8")
    if arguments.junit is not None:
        report.write_junit(arguments.junit, results, about, started.strftime("%Y-%m-%dT%H:%M:%S"))
    return 1 if any(result.status == "failed" for result in results) else 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("conform", DESCRIPTION, examples=EXAMPLES)
    base_url = from_environment(URL_VARIABLE)
    what = made.add_mutually_exclusive_group(required=base_url is None)
    what.add_argument(
        "--base-url",
        default=base_url,
        metavar="URL",
        help=f"as clients have it: http://HOST:PORT/v1; default: ${URL_VARIABLE}",
    )
    what.add_argument("--list", action="store_true", help="print the cases and their rules, and try none")
    made.add_argument("--health-url", metavar="URL", help="the health port; without it its cases are skipped")
    add_target_options(made)
    made.add_argument("--level", choices=LEVELS, default="contract", help="default: contract, which is all cases")
    made.add_argument(
        "--only",
        nargs="+",
        action="extend",
        metavar="PATTERN",
        help="cases by id, by the parts that it begins with (chat.stream), or by a glob",
    )
    made.add_argument(
        "--timeout", type=positive_float, default=60.0, metavar="S", help="seconds for one case; default 60"
    )
    made.add_argument("--junit", type=Path, metavar="FILE", help="write the results as JUnit XML")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    return made


def _chosen(parsing: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Case]:
    """The cases that --level and --only leave, in their order; every pattern must name one."""
    cases = [case for case in ALL_CASES if arguments.level == "contract" or case.level == "core"]
    if arguments.only is None:
        return cases
    for pattern in arguments.only:
        if not any(case.is_named_by(pattern) for case in cases):
            parsing.error(f"--only: {pattern!r} names no case of level {arguments.level}; --list has them")
    return [case for case in cases if any(case.is_named_by(pattern) for pattern in arguments.only)]


def _origins(parsing: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Origin, Origin | None]:
    api = _origin(parsing, "--base-url", arguments.base_url)
    health = _origin(parsing, "--health-url", arguments.health_url) if arguments.health_url is not None else None
    return api if api.path else replace(api, path="/v1"), health


def _origin(parsing: argparse.ArgumentParser, option: str, url: str) -> Origin:
    try:
        return Origin.parse(url)
    except ValueError as error:
        parsing.error(f"{option}: {error}")


def _check_writable(parsing: argparse.ArgumentParser, paths: Sequence[Path]) -> None:
    """A run takes a while: what cannot be written is said before it."""
    for path in paths:
        try:
            path.open("a").close()
        except OSError as error:
            parsing.error(f"{path}: cannot be written: {error.strerror}")


async def _conform(
    arguments: argparse.Namespace, cases: Sequence[Case], api: Origin, health: Origin | None
) -> tuple[Target, list[Result]]:
    unnamed = Target(api=api, model="", health=health, api_key=arguments.api_key)
    target = replace(unnamed, model=await _find_model(unnamed, arguments.model, arguments.timeout))
    num_failed = 0
    with Progress() as progress:
        progress("cases", 0, len(cases))

        def take(result: Result) -> None:
            nonlocal num_failed
            num_failed += result.status == "failed"
            progress.advance(note=f"{num_failed} failed, {result.case.id}")

        return target, await run_cases(cases, target, patience=arguments.timeout, on_result=take)


async def _find_model(target: Target, given: str | None, patience: float) -> str:
    """The model to ask for: the one given, else the first that the server names. Raises NoServer."""
    with trio.move_on_after(patience):
        try:
            if given is not None:
                await trio.aclose_forcefully(await open_stream(target.api))
                return given
            answer = await Subject(target).get("/models")
            if answer.status != 200:
                raise NoServer(refusal(answer.status, answer.body))
            return answer.document["data"][0]["id"].text()
        except ConnectionFailed as error:
            raise NoServer(str(error)) from None
        except Failed as error:
            hint = "" if error.came.startswith("cannot connect") else "; name the model with --model"
            raise NoServer(f"{error.sent}: expected {error.expected}, came {error.came}{hint}") from None
    raise NoServer(f"{target.api.authority} gave no answer within {patience:g} s")
