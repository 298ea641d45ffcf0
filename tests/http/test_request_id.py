from __future__ import annotations

import pytest

from tlserve.http.request_id import fresh_request_id, request_id_of


@pytest.mark.parametrize("value", [b"a", b"A-Za-z0-9._:-", b"x" * 128])
def test_a_well_formed_id_of_the_client_is_kept(value: bytes) -> None:
    assert request_id_of([(b"host", b"x"), (b"x-request-id", value)]) == value.decode()


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a b", b"a\tb", b"a\nb", b"\xc3\xa9", b"a/b", b'"a"'])
def test_b095_an_id_that_could_break_a_header_or_a_log_line_is_replaced(value: bytes) -> None:
    assert request_id_of([(b"x-request-id", value)]).startswith("req-")


def test_b095_two_ids_in_one_request_are_replaced_by_one() -> None:
    assert request_id_of([(b"x-request-id", b"a"), (b"x-request-id", b"a")]).startswith("req-")


def test_a_fresh_id_is_well_formed_and_new() -> None:
    first, second = fresh_request_id(), fresh_request_id()
    assert first != second
    assert request_id_of([(b"x-request-id", first.encode())]) == first
