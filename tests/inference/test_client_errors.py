"""Clients and pools against ports where nothing listens, or nobody answers."""

import asyncio

import aiohttp
import pytest
from engines import free_port

from megatron_rl.inference.client import EngineClient, EngineError
from megatron_rl.inference.pool import EnginePool


def with_client(act) -> tuple[str, str]:
    """(URL, the EngineError's message) of a client of a port where nothing listens."""
    url = f"http://127.0.0.1:{free_port()}"

    async def inner() -> str:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(EngineError) as caught:
                await act(EngineClient(url, "token", session))
            return str(caught.value)

    return url, asyncio.run(inner())


def test_a_request_names_the_engine_and_what_was_asked():
    url, said = with_client(lambda client: client.generate([1], 4, 1.0))
    assert said.startswith(f"engine {url}: /inference/v1/generate got no answer (ClientConnectorError:") and "\n" not in said


def test_waiting_for_a_dead_process_ends_at_once_with_its_last_words():
    url, said = with_client(lambda client: client.wait_ready(600, lambda: "ValueError: no memory"))
    assert said == f"engine {url} died before it was ready: ValueError: no memory"


def test_waiting_has_a_deadline():
    url, said = with_client(lambda client: client.wait_ready(0.1))
    assert said == f"engine {url} was not ready within 0.1 s; see its log or raise inference.start_timeout_s"


def test_sampling_before_the_first_update_is_refused_without_asking_anybody():
    async def act() -> None:
        async with EnginePool([f"http://127.0.0.1:{free_port()}"], "token") as pool:
            with pytest.raises(EngineError, match="holds no verified version: update_weights comes before sample"):
                await pool.sample("s", [1, 2], 4, 1.0)

    asyncio.run(act())


def test_a_pool_without_engines_is_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([], "token")


def test_a_weight_update_gets_through_however_many_requests_are_frozen():
    async def act() -> list[str]:
        asked = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            path = (await reader.readline()).split()[1].decode()
            asked.append(path)
            if path == "/resume":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            else:  # frozen
                await reader.read()
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with EnginePool([url], "token") as pool:
                client = pool.clients[url]
                frozen = [asyncio.create_task(client.generate([1], 4, 1.0)) for _ in range(600)]
                while len(asked) < 512:
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(client.resume(), 5)
                for task in frozen:
                    task.cancel()
                await asyncio.gather(*frozen, return_exceptions=True)
        return asked

    assert "/resume" in asyncio.run(act())
