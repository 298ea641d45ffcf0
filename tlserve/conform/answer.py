"""What came back: one whole answer, and the events of one that was a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from tlserve.conform.case import Failed
from tlserve.conform.found import Found, short, shown
from tlserve.http.messages import Header
from tlserve.http.sse import values_of_data


@dataclass(frozen=True, slots=True)
class Answer:
    sent: str  # the request, in words
    status: int
    headers: tuple[Header, ...]  # names in lower case
    body: bytes

    def fail(self, expected: str, came: str) -> NoReturn:
        raise Failed(sent=self.sent, expected=expected, came=short(came))

    def has_status(self, *statuses: int) -> Answer:
        if self.status not in statuses:
            said = self.body.decode("utf-8", "replace").strip()
            self.fail(f"status {' or '.join(map(str, statuses))}", f"status {self.status} {said}".rstrip())
        return self

    def header(self, name: str) -> Found:
        """The first header of that (lower-case) name; its value is None when there is none."""
        value = next((value for key, value in self.headers if key == name), None)
        return Found(value, f"header {name}", self.sent)

    @property
    def document(self) -> Found:
        return Found(self._parsed(self.body), "", self.sent)

    def refuses(self, status: int, *, param: str | None = None, code: str | None = None) -> Found:
        """Fail unless this is an error of that status and code, which names ``param`` where one is given."""
        error = self.has_status(status).document["error"]
        error["message"].text()
        error["code"].equals(code)
        if param is not None:
            error["param"].equals(param)
        return error

    def events(self) -> list[Found]:
        """The documents of a stream, one at the least, in order. ``[DONE]`` and comments are none."""
        self.has_status(200)
        payloads = [payload for payload in self._payloads() if payload != b"[DONE]"]
        if not payloads:
            self.fail("a stream of events", self.body.decode("utf-8", "replace"))
        return [Found(self._parsed(payload), f"event {index}", self.sent) for index, payload in enumerate(payloads)]

    @property
    def is_done(self) -> bool:
        """Whether the last event of the stream is ``[DONE]``."""
        return self._payloads()[-1:] == [b"[DONE]"]

    def choices(self) -> list[Found]:
        """The first choice of each chunk that has any; of a stream of one choice."""
        return [event["choices"][0] for event in self.events() if event["choices"].items()]

    def text(self) -> str:
        """The joined deltas of a stream of one choice, of chat or of text."""
        return "".join(_piece(choice) for choice in self.choices())

    def _payloads(self) -> list[bytes]:
        frames = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        return [b"\n".join(values) for frame in frames if (values := values_of_data(frame))]

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            kind = self.header("content-type").value
            self.fail("valid JSON", f"{shown(data[:120].decode('utf-8', 'replace'))} as {kind} ({error})")


def _piece(choice: Found) -> str:
    if "text" in choice:
        return choice["text"].text()
    content = choice["delta"].value.get("content") if isinstance(choice["delta"].value, dict) else None
    return content if isinstance(content, str) else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_answer(sent: str, raw: bytes) -> Answer:
    """An answer from the bytes of a connection that has ended; chunked coding is left as it is."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise Failed(sent=sent, expected="an HTTP answer", came=shown(first) if raw else "the end of the connection")
    pairs = [line.partition(":") for line in lines]
    return Answer(sent, int(status), tuple((name.lower(), value.strip()) for name, _, value in pairs), body)
