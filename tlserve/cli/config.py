"""``trio-tlserve config runtime.toml``: the effective configuration, or its JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tlserve.cli.arguments import add_choice_arguments, choose, new_parser
from tlserve.config import json_schema

DESCRIPTION = """Print the configuration that is in force, as a runtime.toml that gives the same one: the file, the
TL_ENGINE__<KEY> variables and the defaults. Keys without a value are comments."""
EXAMPLES = (
    "trio-tlserve config runtime.toml",
    "trio-tlserve config --model-dir model.gguf > runtime.toml",
    "TL_ENGINE__MAX_NUM_SEQS=8 trio-tlserve config runtime.toml > effective.toml",
    "trio-tlserve config --schema > runtime.schema.json",
)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.schema:
        print(json.dumps(json_schema(), indent=2))
    else:
        print(choose(parser(), arguments).config.to_toml(), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("config", DESCRIPTION, examples=EXAMPLES)
    add_choice_arguments(made)
    made.add_argument("--schema", action="store_true", help="print the JSON schema of runtime.toml instead")
    return made
