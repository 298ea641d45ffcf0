"""Completion scripts for shells, from what the commands take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One option of a command, as a shell needs to know it."""

    names: tuple[str, ...]
    what: str
    takes_value: bool
    choices: tuple[str, ...]
    takes_file: bool


@dataclass(frozen=True)
class Spec:
    """One command: its options, and what may stand beside them."""

    name: str
    what: str
    options: tuple[Option, ...]
    words: tuple[str, ...]  # choices of its argument
    takes_file: bool  # its argument is a file


def bash(specs: Sequence[Spec]) -> str:
    """A function for ``complete -F``. What follows an option comes from its choices, files, or nowhere."""
    lines = [
        "# Completion of trio-tlserve for bash; made by: trio-tlserve completion bash",
        "_trio_tlserve() {",
        '    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=serve words=""',
        "    local files=-f",
        "    if (( COMP_CWORD > 1 )); then",
        '        case "${COMP_WORDS[1]}" in',
        f"            {'|'.join(spec.name for spec in specs)}) command=${{COMP_WORDS[1]}} ;;",
        "        esac",
        "    fi",
        '    case "$command $previous" in',
        *(f"        {line}" for line in _bash_values(specs)),
        "        *)",
        '            case "$command" in',
        *(f"                {line}" for line in _bash_words(specs)),
        "            esac",
        f'            (( COMP_CWORD == 1 )) && words+=" {" ".join(spec.name for spec in specs)} --version"',
        "            [[ $current == -* ]] && files=",
        "            ;;",
        "    esac",
        '    mapfile -t COMPREPLY < <(compgen $files -W "$words" -- "$current")',
        "}",
        "complete -o filenames -F _trio_tlserve trio-tlserve",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(specs: Sequence[Spec]) -> Iterator[str]:
    """What may follow an option: files, its choices, or whatever the user has in mind."""
    for spec in specs:
        patterns: dict[str, list[str]] = {}
        for option in spec.options:
            if option.takes_value:
                found = "" if option.takes_file else f'words="{" ".join(option.choices)}" files='
                patterns.setdefault(found, []).extend(f'"{spec.name} {name}"' for name in option.names)
        yield from (f"{'|'.join(names)}) {found} ;;" for found, names in patterns.items())


def _bash_words(specs: Sequence[Spec]) -> Iterator[str]:
    for spec in specs:
        words = " ".join([*(name for option in spec.options for name in option.names), *spec.words])
        yield f'{spec.name}) words="{words}"{"" if spec.takes_file else " files="} ;;'


def zsh(specs: Sequence[Spec]) -> str:
    """A function for compsys; ``_arguments`` does the work."""
    lines = [
        "#compdef trio-tlserve",
        "# Completion of trio-tlserve for zsh; made by: trio-tlserve completion zsh",
        "_trio_tlserve() {",
        "    local command=serve",
        "    if (( CURRENT == 2 )); then",
        "        local -a commands=(",
        *(f"            {shlex.quote(f'{spec.name}:{spec.what}')}" for spec in specs),
        "        )",
        "        _describe -t commands command commands",
        "    fi",
        f"    if (( CURRENT > 2 )) && [[ $words[2] == ({'|'.join(spec.name for spec in specs)}) ]]; then",
        "        command=$words[2]",
        "        shift words",
        "        (( CURRENT-- ))",
        "    fi",
        "    case $command in",
    ]
    for spec in specs:
        rows = [*(_zsh_option(option, name) for option in spec.options for name in option.names), *_zsh_argument(spec)]
        lines += [f"        {spec.name})", "            _arguments -s \\"]
        lines += [f"                {row} \\" for row in rows[:-1]] + [f"                {rows[-1]} ;;"]
    return "\n".join([*lines, "    esac", "}", '_trio_tlserve "$@"']) + "\n"


def _zsh_option(option: Option, name: str) -> str:
    what = option.what.replace("[", "(").replace("]", ")").replace(":", ",")
    value = ""
    if option.takes_value:
        action = "_files" if option.takes_file else f"({' '.join(option.choices)})" if option.choices else " "
        value = f":value:{action}"
    return shlex.quote(f"{name}[{what}]{value}")


def _zsh_argument(spec: Spec) -> list[str]:
    if spec.words:
        return [shlex.quote(f"1:{spec.name}:({' '.join(spec.words)})")]
    return [shlex.quote("*:file:_files")] if spec.takes_file else []


def fish(specs: Sequence[Spec]) -> str:
    """A list of ``complete`` commands."""
    names = " ".join(spec.name for spec in specs)
    lines = ["# Completion of trio-tlserve for fish; made by: trio-tlserve completion fish"]
    lines += ["complete -c trio-tlserve -f", "complete -c trio-tlserve -n __fish_use_subcommand -F"]
    lines += [
        f"complete -c trio-tlserve -n __fish_use_subcommand -a {spec.name} -d {_fish_quoted(spec.what)}"
        for spec in specs
    ]
    for spec in specs:
        seen = f"'__fish_seen_subcommand_from {spec.name}'"
        if spec.name == "serve":
            seen = f"'not __fish_seen_subcommand_from {names.replace('serve ', '')}'"
        start = f"complete -c trio-tlserve -n {seen}"
        lines += [f"{start} {_fish_option(option)}" for option in spec.options]
        lines += [f"{start} -F"] if spec.takes_file else []
        lines += [f"{start} -a {_fish_quoted(' '.join(spec.words))}"] if spec.words else []
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    names = [
        f"-l {name[2:]}" if name.startswith("--") else f"-{'s' if len(name) == 2 else 'o'} {name[1:]}"
        for name in option.names
    ]
    value = ""
    if option.takes_value:
        value = (
            " -r -F"
            if option.takes_file
            else f" -x -a {_fish_quoted(' '.join(option.choices))}"
            if option.choices
            else " -x"
        )
    return f"{' '.join(names)}{value} -d {_fish_quoted(option.what)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
