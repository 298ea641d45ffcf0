"""Sixteen deliberate faults, one at a time, each caught by the test that is named for it: ``make mutants``.

A mutant is one replacement in one file of a copy of the tree. It is caught when its test passes on the copy
as it stands and fails, by an assertion or an error of the test itself, once the fault is in.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("tlserve", "tests", "fixtures", "docs", "pyproject.toml", "runtime.toml", "README.md")
TESTS_FAILED = 1  # pytest's exit status when tests ran and some failed


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    file: str
    old: str  # occurs exactly once
    new: str
    test: str  # in tests/test_contract.py


MUTANTS = (
    Mutant(
        "s01",
        "a length cut is reported as stop",
        "tlserve/openai/choice.py",
        '"length" if out.finish is FinishReason.LENGTH',
        '"stop" if out.finish is FinishReason.LENGTH',
        "test_hand_example_chat_completion",
    ),
    Mutant(
        "s02",
        "the prompt is rendered without the generation prompt",
        "tlserve/text/template.py",
        "add_generation_prompt: bool = True,",
        "add_generation_prompt: bool = False,",
        "test_usage_counts_the_templated_prompt",
    ),
    Mutant(
        "s03",
        "an event ends with one newline",
        "tlserve/http/sse.py",
        'b"data: %b\\n\\n" % payload',
        'b"data: %b\\n" % payload',
        "test_stream_framing_role_first_then_done",
    ),
    Mutant(
        "s04",
        "the first delta has no role",
        "tlserve/openai/chat.py",
        'schema.Delta(role="assistant", content="")',
        'schema.Delta(content="")',
        "test_stream_framing_role_first_then_done",
    ),
    Mutant(
        "s05",
        "text that may begin a stop string is sent",
        "tlserve/text/text_stream.py",
        "self._held.take_until(doubtful)",
        "self._held.take_until(self._num_chars)",
        "test_text_stream_holds_back_stop_prefixes",
    ),
    Mutant(
        "s06",
        "the stop string is part of the answer",
        "tlserve/text/text_stream.py",
        "self._num_chars if self._stop_at is None else self._stop_at",
        "self._num_chars",
        "test_stop_strings_end_generation_across_tokens",
    ),
    Mutant(
        "s07",
        "a temperature below 0 is accepted",
        "tlserve/openai/requests.py",
        "Annotated[float, Meta(ge=0, le=2,",
        "Annotated[float, Meta(ge=-9, le=2,",
        "test_errors_use_the_openai_shape",
    ),
    Mutant(
        "s08",
        "n above 1 is ignored",
        "tlserve/openai/parse.py",
        "request.n is not None and request.n > 1",
        "request.n is not None and request.n > 9",
        "test_errors_use_the_openai_shape",
    ),
    Mutant(
        "s09",
        "a full queue is answered with 503",
        "tlserve/errors.py",
        "status = 429",
        "status = 503",
        "test_full_queue_answers_429_with_retry_after",
    ),
    Mutant(
        "s10",
        "an abort does not reach the scheduler",
        "tlserve/engine/engine.py",
        "state = self._states.pop(request_id, None)",
        "state = None if self._states[request_id].num_tokens else self._states.pop(request_id)",
        "test_full_queue_answers_429_with_retry_after",
    ),
    Mutant(
        "s11",
        "a drain does not wait for what is in flight",
        "tlserve/server.py",
        "    with trio.move_on_at(deadline):",
        "    with trio.move_on_at(trio.current_time()):",
        "test_drain_finishes_in_flight_and_refuses_new",
    ),
    Mutant(
        "s12",
        "an embedding is not normalised",
        "tlserve/engine/pooling.py",
        "mean / norm if norm else mean",
        "mean",
        "test_embeddings_are_mean_pooled_and_normalized",
    ),
    Mutant(
        "s13",
        "loop.first is true one message early",
        "tlserve/text/template.py",
        '"messages": messages,',
        '"messages": [{"role": "system", "content": ""}, *messages],',
        "test_chat_template_hand_example",
    ),
    Mutant(
        "s14",
        "TL_ENGINE__ variables are ignored",
        "tlserve/config.py",
        "_overridden(table, env)",
        "_overridden(table, {})",
        "test_runtime_toml_and_env_overrides",
    ),
    Mutant(
        "s15",
        "X-Request-Id is dropped",
        "tlserve/http/reply.py",
        '[date, ("X-Request-Id", self.request_id), *self.common_headers]',
        "[date, *self.common_headers]",
        "test_tokenize_models_health_and_request_id",
    ),
    Mutant(
        "s16",
        "a step runs on the event loop",
        "tlserve/engine/loop.py",
        "await trio.to_thread.run_sync(self._make_steps, post, limiter=self._limiter)",
        "self._make_steps(post)",
        "test_concurrent_streams_equal_serial",
    ),
)


def run_test(tree: Path, test: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/test_contract.py::{test}"]
    done = subprocess.run(command, cwd=tree, capture_output=True, check=False, timeout=300)
    return done.returncode


def is_caught(tree: Path, mutant: Mutant) -> bool:
    path = tree / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: the text to replace occurs {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        return run_test(tree, mutant.test) == TESTS_FAILED
    finally:
        path.write_text(source)


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def main() -> int:
    passed = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        for test in sorted({mutant.test for mutant in MUTANTS}):
            if run_test(tree, test) != 0:
                print(f"{test} fails without any fault")
                return 1
        for mutant in MUTANTS:
            caught = is_caught(tree, mutant)
            passed, failed = passed + caught, failed + (not caught)
            print(f"{mutant.name} {'caught' if caught else 'MISSED'} by {mutant.test}: {mutant.fault}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
