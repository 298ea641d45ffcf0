"""What the bodies of all requests may take together: large ones wait outside, and small ones are never kept out."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import build, chunked, post, serving
from tlserve.errors import NoCapacity
from tlserve.http.bodies import Bodies, Body
from tlserve.http.limits import FREE_BODY_BYTES, LARGEST_BODIES, Limits

SIZE = 4 * FREE_BODY_BYTES
LIMITS = Limits(max_body_bytes=SIZE)
LARGE = post("/echo", b"a" * SIZE)
NUM_FIT = LARGEST_BODIES * SIZE // (SIZE - FREE_BODY_BYTES)  # of such bodies


def test_a_body_counts_past_its_free_beginning_until_it_is_dropped() -> None:
    bodies = Bodies(100)
    body = Body(bodies)
    for size, counted in ((FREE_BODY_BYTES, 0), (60, 60), (40, 100)):
        body.add(b"x" * size)
        assert bodies.num_bytes == counted
    assert len(body.take_all()) == FREE_BODY_BYTES + 100
    assert bodies.num_bytes == 100
    for _ in range(2):
        body.drop()
        assert bodies.num_bytes == 0


def test_a_body_that_finds_no_room_gives_all_of_its_own_back() -> None:
    bodies = Bodies(100)
    first, second = Body(bodies), Body(bodies)
    first.add(b"x" * (FREE_BODY_BYTES + 70))
    second.add(b"x" * (FREE_BODY_BYTES + 30))
    with pytest.raises(NoCapacity, match=r"^the bodies of other requests take all of 100 bytes$"):
        second.add(b"x")
    assert bodies.num_bytes == 70


async def test_when_bodies_take_all_the_room_a_large_one_is_503_and_a_small_one_is_served(
    autojump_clock: MockClock,
) -> None:
    async with serving(LIMITS) as app:
        senders = [app.connect() for _ in range(NUM_FIT)]
        for sender in senders:
            await sender.send(LARGE[:-1])
        await trio.testing.wait_all_tasks_blocked()
        for data in (LARGE, build("POST", "/echo", "Transfer-Encoding: chunked") + chunked(b"a" * SIZE)):
            client = app.connect()
            await client.send(data + post("/echo", b"small") + post("/echo", b"b" * FREE_BODY_BYTES))
            refused = await client.response()
            assert (refused.status, refused.header("retry-after"), refused.header("connection")) == (503, "1", None)
            assert (await client.response()).body == b"small"
            assert (await client.response()).status == 200
        for sender in senders:
            await sender.send(LARGE[-1:])
            assert (await sender.response()).status == 200
        await client.send(LARGE)
        assert (await client.response()).status == 200


@pytest.mark.parametrize("ending", ["leaves", "deadline", "fails"])
async def test_the_room_of_a_body_comes_back_however_its_request_ends(autojump_clock: MockClock, ending: str) -> None:
    async with serving(LIMITS) as app:
        for _ in range(3):
            senders = [app.connect() for _ in range(NUM_FIT)]
            for sender in senders:
                await sender.send(LARGE.replace(b"/echo", b"/bug")[:-1])
            await trio.testing.wait_all_tasks_blocked()
            for sender in senders:
                if ending == "leaves":
                    await sender.stream.aclose()
                elif ending == "fails":
                    await sender.send(LARGE[-1:])
                    assert (await sender.response()).status == 500
                else:
                    assert (await sender.response()).status == 408
            await trio.testing.wait_all_tasks_blocked()
        client = app.connect()
        await client.send(LARGE)
        assert (await client.response()).status == 200
