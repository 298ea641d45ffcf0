"""Pages of the site that stand at the top of the repository, where people look for them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        if page not in files.src_uris:
            text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
            files.append(File.generated(config, page, content=_relinked(text, "")))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    return _relinked(markdown, "../")


def _relinked(markdown: str, top: str) -> str:
    """``markdown`` with its links to those files, which begin with ``top``, led to their pages."""
    for page, source in PAGES.items():
        markdown = markdown.replace(f"]({top}{source})", f"]({page})")
    return markdown
