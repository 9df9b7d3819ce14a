"""Requests that arrive together leave the event loop to others between them."""

import asyncio

from specdec.serve.turns import Turns


def test_what_others_do_comes_between_requests_that_arrive_together():
    said = []

    async def app(scope, receive, send):
        said.append(scope["number"])

    async def other():
        while len([one for one in said if one != "token"]) < 3:
            said.append("token")
            await asyncio.sleep(0)

    async def run():
        turns = Turns(app)
        scopes = [{"type": "http", "number": number} for number in range(3)]
        await asyncio.gather(*(turns(scope, None, None) for scope in scopes), other())

    asyncio.run(run())
    assert [one for one in said if one != "token"] == [0, 1, 2]
    assert all("token" in said[said.index(number) : said.index(number + 1)] for number in (0, 1))


def test_a_client_that_goes_while_it_waits_holds_nobody_up():
    async def app(scope, receive, send):
        pass

    async def run():
        turns = Turns(app)
        first, second, third = (asyncio.create_task(turns({"type": "http"}, None, None)) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait_for(asyncio.gather(first, third), 1)

    asyncio.run(run())
