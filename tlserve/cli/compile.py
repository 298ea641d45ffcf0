"""``trio-tlserve compile``: compile every kernel that any model may need, for this CPU, into the cache.

For images and for machines that are set up ahead: the first start then takes a second, whatever the model's format.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

from tlserve import kernels
from tlserve.cli.arguments import new_parser
from tlserve.cli.progress import Progress
from tlserve.errors import ConfigError
from tlserve.kernels.attention import WIDTHS, attention_leaves
from tlserve.kernels.jit import TARGET, Compiled, cache_key, cache_root, compile_all
from tlserve.kernels.layout import BY_CODE
from tlserve.kernels.leaves import leaves
from tlserve.kernels.pack_leaves import pack_leaf

NUMBER_BYTES = (2, 4)  # of keys and values: kv_dtype f16, f32
DESCRIPTION = """Compile the kernels for every format of weights, for this CPU, into the cache. TLSERVE_CACHE_DIR moves
the cache, TLSERVE_ISA chooses the instruction set."""
EXAMPLES = ("trio-tlserve compile", "TLSERVE_CACHE_DIR=/var/cache/tlserve trio-tlserve compile")


def main(argv: Sequence[str]) -> int:
    parser().parse_args(argv)
    num_kernels = _compile()
    directory = cache_root() / cache_key()
    num_kept = len(list(directory.iterdir())) if directory.is_dir() else 0
    if num_kept < num_kernels:
        raise ConfigError(f"{directory}: holds {num_kept} of {num_kernels} kernels, it could not be written")
    print(f"{num_kernels} kernels for {TARGET.isa} on {TARGET.cpu} are in {directory}")
    return 0


def parser() -> argparse.ArgumentParser:
    return new_parser("compile", DESCRIPTION, examples=EXAMPLES)


def _compile() -> int:
    """Compile what is not in the cache yet; how many kernels there are in all."""
    num_kernels = 0

    def report(done: int, total: int, name: str) -> None:
        nonlocal num_kernels
        num_kernels = total
        progress("kernels", done, total)

    _import_entries()
    with Progress() as progress:
        compile_all(every_leaf(), report)
    return num_kernels


def every_leaf() -> list[Compiled]:
    """The leaves that multiply by and pack each format of weights, and those of attention for any number of heads."""
    attention = {leaf.name: leaf for width in WIDTHS for size in NUMBER_BYTES for leaf in attention_leaves(width, size)}
    return [*leaves(layout.code for layout in BY_CODE), *map(pack_leaf, BY_CODE), *attention.values()]


def _import_entries() -> None:
    """A module's entries are known once it is imported."""
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
