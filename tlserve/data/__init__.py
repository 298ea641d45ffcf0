"""Files that come with the package."""

from __future__ import annotations

from pathlib import Path

# A random Llama of 300 KB that reads bytes: real attention in milliseconds, answers that mean nothing and never change.
TINY_LLAMA = Path(__file__).parent / "tiny-llama"
