"""``trio-tlserve load``: how fast any OpenAI-compatible server answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import trio

from tlserve.cli import plot
from tlserve.cli.arguments import (
    add_json_option,
    add_target_options,
    api_origin,
    from_environment,
    integer,
    natural,
    new_parser,
    number,
    positive,
    positive_float,
)
from tlserve.cli.load_prompts import Prompts
from tlserve.cli.load_report import summarise, table
from tlserve.cli.load_run import Plan, probe, run_load
from tlserve.cli.load_target import Answer, Target, TargetError, find_model
from tlserve.cli.progress import Progress
from tlserve.cli.refusal import URL_VARIABLE
from tlserve.cli.terminal import one_line, output
from tlserve.http.client import Origin

DESCRIPTION = """Stream answers from an OpenAI-compatible server and report tokens/s, time to first token, time
between tokens and errors. Prompts are random words, no two alike, so prefix caches do not help."""
EXAMPLES = (
    "trio-tlserve load --base-url http://127.0.0.1:8000/v1 --concurrency 16",
    "trio-tlserve load --base-url http://127.0.0.1:8000/v1 --rate 2 --duration 60 --json > load.json",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    plot.check_option(parser(), arguments)
    if arguments.shared_prefix > arguments.prompt_tokens:
        parser().error(
            f"--shared-prefix {arguments.shared_prefix}: must be at most --prompt-tokens, {arguments.prompt_tokens}"
        )
    origin = api_origin(parser(), arguments.base_url)
    plan = _plan(arguments)
    out = output()
    answers: list[Answer] = []
    try:
        target = trio.run(_measure, arguments, origin, plan, answers)
    except TargetError as error:
        print(f"trio-tlserve load: {one_line(str(error))}", file=sys.stderr)
        return 1
    summary = {"base_url": arguments.base_url, "model": target.model, **_settings(arguments), **summarise(answers)}
    out.write((json.dumps(summary, indent=2) if arguments.json else table(summary)) + "\n")
    if arguments.plot is not None:
        plot.plot_load(arguments.plot, answers)
    return 0 if summary["num_complete"] else 1


def parser() -> argparse.ArgumentParser:
    made = new_parser("load", DESCRIPTION, examples=EXAMPLES)
    base_url = from_environment(URL_VARIABLE)
    made.add_argument(
        "--base-url",
        required=base_url is None,
        default=base_url,
        metavar="URL",
        help=f"as clients have it: http://HOST:PORT/v1; default: ${URL_VARIABLE}",
    )
    add_target_options(made)
    made.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: chat")
    pace = made.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=positive, default=1, metavar="N", help="closed loop: N in flight; default 1"
    )
    pace.add_argument("--rate", type=positive_float, metavar="R", help="open loop: R requests/s, Poisson arrivals")
    amount = made.add_mutually_exclusive_group()
    amount.add_argument("--requests", type=positive, metavar="N", help="send N requests; default: 32")
    amount.add_argument("--duration", type=positive_float, metavar="S", help="send requests for S seconds")
    made.add_argument(
        "--prompt-tokens", type=positive, default=128, metavar="N", help="tokens a prompt, about; default 128"
    )
    made.add_argument(
        "--shared-prefix", type=natural, default=0, metavar="N", help="first N tokens alike in all; default 0"
    )
    made.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="tokens an answer, exactly; default 128"
    )
    made.add_argument("--temperature", type=number, default=0.0, metavar="T", help="default 0: greedy")
    made.add_argument("--seed", type=integer, default=0, metavar="N", help="of prompts and arrivals; default 0")
    made.add_argument(
        "--timeout", type=positive_float, default=600.0, metavar="S", help="seconds for one answer; default 600"
    )
    add_json_option(made)
    plot.add_option(made)
    return made


def _plan(arguments: argparse.Namespace) -> Plan:
    counts_requests = arguments.requests is not None or arguments.duration is None
    return Plan(
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        num_requests=(arguments.requests or 32) if counts_requests else None,
        duration=arguments.duration,
        seed=arguments.seed,
    )


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on, for the report."""
    pace = {"concurrency": arguments.concurrency} if arguments.rate is None else {"rate": arguments.rate}
    names = ("endpoint", "max_tokens", "shared_prefix", "temperature", "seed")
    return pace | {name: getattr(arguments, name) for name in names}


async def _measure(arguments: argparse.Namespace, origin: Origin, plan: Plan, answers: list[Answer]) -> Target:
    headers = (("Authorization", f"Bearer {arguments.api_key}"),) if arguments.api_key else ()
    target = Target(
        origin=origin,
        endpoint=arguments.endpoint,
        model=arguments.model or await find_model(origin, headers, patience=arguments.timeout),
        temperature=arguments.temperature,
        headers=headers,
        timeout=arguments.timeout,
    )
    cost = await probe(target)
    num_shared_words = round(arguments.shared_prefix / cost.tokens_per_word)
    prompts = Prompts(arguments.seed, cost.words_for(arguments.prompt_tokens), num_shared_words)
    start = trio.current_time()
    num_tokens = 0
    with Progress() as progress:
        progress("requests", 0, plan.num_requests)

        def take(answer: Answer) -> None:
            nonlocal num_tokens
            answers.append(answer)
            num_tokens += answer.completion_tokens
            progress.advance(f"{num_tokens / (trio.current_time() - start or 1.0):.0f} tokens/s")

        await run_load(target, prompts, plan, take)
    return target
