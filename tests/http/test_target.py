from __future__ import annotations

import pytest

from tlserve.errors import InvalidRequest
from tlserve.http.target import Target, check_host, parse_target


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/v1/models", "/v1/models", ""),
        ("/v1/models?a=b?c", "/v1/models", "a=b?c"),
        ("/%76%31/models", "/v1/models", ""),
        ("/a%2Fb", "/a/b", ""),
        ("/a%252Fb", "/a%2Fb", ""),
        ("/%e6%bc%a2", "/漢", ""),
        ("/a+b", "/a+b", ""),
        ("//host/a", "//host/a", ""),
        ("/v1/../healthz", "/v1/../healthz", ""),
        ("http://host/a?b", "/a", "b"),
        ("HTTPS://host:8000/a", "/a", ""),
        ("http://[::1]:8000/a", "/a", ""),
        ("http://host", "/", ""),
        ("http://host?q", "/", "q"),
        ("http://host//a", "//a", ""),
    ],
)
def test_a_target_names_a_path_and_a_query(target: str, path: str, query: str) -> None:
    parsed = parse_target("GET", target)
    assert (parsed.path, parsed.query) == (path, query)


@pytest.mark.parametrize(
    "target",
    [
        "",
        "a",
        "*",
        "host:443",
        "ftp://host/",
        "http://",
        "http:///a",
        "http://:80/",
        "http://user@host/",
        "/a#b",
        "/%",
        "/%4",
        "/%zz",
        "/%ff",
        "/%ed%a0%80",
    ],
)
def test_any_other_target_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_target("GET", target)


def test_an_asterisk_is_for_options_alone() -> None:
    assert parse_target("OPTIONS", "*") == Target("*", "*", "")


@pytest.mark.parametrize("host", ["", "a", "a.b:80", "127.0.0.1:8000", "[::1]", "[::1]:80", "a%20b", "a:"])
def test_a_host_with_an_optional_port_passes(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize("host", ["a b", "a/b", "user@a", "a:b", "a:1:2", "[::1", "[g]", "a,b:80:", "é", "a?b"])
def test_anything_else_is_no_host(host: str) -> None:
    with pytest.raises(InvalidRequest):
        check_host(host)
