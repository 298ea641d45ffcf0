"""``trio-tlserve config runtime.toml``: the effective configuration, or its JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tlserve.config import ServeConfig, json_schema


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="trio-tlserve config", description="Print the effective configuration.")
    parser.add_argument("file", nargs="?", help="a runtime.toml; TL_ENGINE__ variables are applied")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of runtime.toml instead")
    arguments = parser.parse_args(argv)
    if arguments.schema:
        print(json.dumps(json_schema(), indent=2))
    elif arguments.file is None:
        parser.error("a file is required unless --schema is given")
    else:
        print(ServeConfig.load(arguments.file).to_toml(), end="")
    return 0
