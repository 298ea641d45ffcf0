"""A conversation in a terminal: its messages, its commands, and what Ctrl-C and Ctrl-D do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from tlserve.cli.chat_turn import ChatFailed, Turn, ask
from tlserve.cli.terminal import RED, Terminal, one_line
from tlserve.http.client import Origin
from tlserve.http.messages import Header

HELP = """/reset          forget what was said
/system TEXT    begin anew with this system message; without TEXT with none
/stats          tokens, tokens/s and time to first token of the last answer
/help           this list
Ctrl-C stops an answer, and leaves at the prompt; so does Ctrl-D.
A message that begins with / is sent with a space before it."""

ReadLine = Callable[[str], str]  # shows a prompt, gives a line; raises EOFError at the end


@dataclass
class Session:
    """One conversation with one server."""

    origin: Origin
    headers: tuple[Header, ...]
    settings: dict[str, Any]  # of each request: model, temperature, ...
    out: Terminal
    err: Terminal
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Turn | None = None

    def talk(self, read_line: ReadLine) -> None:
        """Ask and answer until the end of input or Ctrl-C at the prompt."""
        prompt = self.out.prompt("> ")
        while True:
            try:
                line = read_line(prompt)
            except (EOFError, KeyboardInterrupt):
                self.out.write("\n")
                return
            except UnicodeDecodeError:
                self.out.say("that is not UTF-8", RED)
                continue
            if line.startswith("/"):
                self._obey(line)
            elif line.strip() and (failure := self.answer(line.strip())):
                self.err.say(failure, RED)

    def answer(self, text: str) -> str:
        """Ask one question and show what is answered; gives what went wrong in one line, "" where nothing did.

        What was shown stays in the conversation, and a question without an answer does not.
        """
        turn = self.last = Turn()
        asked = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = self.settings | {"messages": [*system, *self.messages, asked]}
        failure = ""
        try:
            trio.run(ask, self.origin, self.headers, body, turn, self.out.write)
        except* KeyboardInterrupt:
            failure = "stopped"
        except* ChatFailed as group:
            failure = one_line(str(group.exceptions[0]))
        if turn.text:
            self.messages += [asked, {"role": "assistant", "content": turn.text}]
            self.out.write("\n")
        return failure

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        match name.strip():
            case "/reset":
                self.messages.clear()
                self.out.say("what was said is forgotten")
            case "/system":
                self.messages.clear()
                self.system = rest.strip() or None
                self.out.say(f"system: {self.system}" if self.system else "no system message")
            case "/stats":
                self.out.say("nothing was asked yet" if self.last is None else self.last.summary())
            case "/help":
                self.out.say(HELP)
            case other:
                self.out.say(f"{other} is no command; /help lists them", RED)
