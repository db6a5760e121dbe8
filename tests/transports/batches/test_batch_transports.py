"""What every batch transport promises; each test runs over all of them."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from megatron_rl.transports.batches.base import BatchError, open_client, open_server
from megatron_rl.transports.batches.filesystem import FilesystemBatchServer, ReplayClient, write_batch
from megatron_rl.transports.batches.records import STREAMS, MicroBatch, StepBatch, encode

TRANSPORTS = ["tcp://127.0.0.1:*", "tcp://[::1]:*", "directory"]


def micro_batch(step, tokens):
    streams = {row.name: np.full(len(tokens), row.pad, row.dtype) for row in STREAMS}
    streams["token_ids"] = np.array(tokens, np.int32)
    return MicroBatch(step, step - 1, np.array([0, len(tokens)], np.int32), streams, {"rl": 4.0}, [f"sample-{tokens[0]}"])


def batch(step):
    micro_batches = [micro_batch(step, [10 * step + i, 7]) for i in range(3)]
    return StepBatch(step, step - 1, micro_batches, {"reward/mean": 0.25}, b"state")


def first_tokens(share):
    return [int(m.streams["token_ids"][0]) for m in share.micro_batches]


@pytest.fixture(params=TRANSPORTS)
def transport(request, tmp_path):
    """A server on a background event loop: (publish, address). The client under test blocks, as in a trainer rank."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    async def start():
        address = str(tmp_path / "exchange") if request.param == "directory" else request.param
        server = open_server(address, "secret", keep=2)
        return await server.__aenter__()

    server = run(start())
    yield (lambda b: run(server.publish(b))), server.address
    run(server.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextlib.contextmanager
def client(address, token="secret"):
    c = open_client(address, token)
    yield c
    c.close()


def test_each_rank_gets_its_share_and_together_they_are_the_batch(transport):
    publish, address = transport
    publish(batch(1))
    with client(address) as c:
        shares = [c.get(1, rank, 2, 5.0) for rank in range(2)]
    assert [first_tokens(s) for s in shares] == [[10, 12], [11, 0]]  # 3 micro-batches over 2 ranks: the last is an empty one
    assert [len(m) for m in shares[1].micro_batches] == [2, 1]
    assert not shares[1].micro_batches[1].streams["loss_mask"].any()
    assert all(m.denominators == {"rl": 4.0} for s in shares for m in s.micro_batches)
    assert shares[0].metrics == {"reward/mean": 0.25}
    assert (shares[0].step, shares[0].policy_version, shares[0].orchestrator_state) == (1, 0, b"state")


def test_asking_again_gives_the_same_bytes(transport):
    publish, address = transport
    publish(batch(1))
    with client(address) as c:
        assert encode(c.get(1, 0, 1, 5.0)) == encode(c.get(1, 0, 1, 5.0)) == encode(batch(1))


def test_a_request_before_publication_waits_for_it(transport):
    publish, address = transport
    got = []
    with client(address) as c:
        waiting = threading.Thread(target=lambda: got.append(c.get(1, 0, 1, 10.0)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        publish(batch(1))
        waiting.join(10)
    assert [b.step for b in got] == [1]


def test_the_last_two_steps_are_kept_and_an_older_one_is_refused(transport):
    publish, address = transport
    for step in (1, 2, 3):
        publish(batch(step))
    with client(address) as c:
        assert [c.get(step, 0, 1, 5.0).step for step in (2, 3)] == [2, 3]
        with pytest.raises(BatchError, match="step 1 is no longer kept"):
            c.get(1, 0, 1, 5.0)
        assert c.get(2, 0, 1, 5.0).step == 2  # the connection survives a refusal


def test_a_batch_that_does_not_come_names_address_step_and_seconds(transport):
    _, address = transport
    with client(address) as c, pytest.raises(TimeoutError) as error:
        c.get(4, 0, 1, 0.3)
    assert all(part in str(error.value) for part in (address, "step 4", "0.3 s"))


def test_a_wrong_token_gets_no_batch_and_is_told_so(transport):
    publish, address = transport
    publish(batch(1))
    with client(address, "guess") as c, pytest.raises((BatchError, TimeoutError), match="token"):
        c.get(1, 0, 1, 0.5)


def test_steps_must_ascend(transport):
    publish, _ = transport
    publish(batch(2))
    with pytest.raises(ValueError, match="step 2 published after step 2"):
        publish(batch(2))


@pytest.mark.parametrize(("step", "rank", "ranks"), [(0, 0, 1), (1, 1, 1), (1, -1, 2), (1, 0, 0)])
def test_an_impossible_share_is_a_programming_error(transport, step, rank, ranks):
    _, address = transport
    with client(address) as c, pytest.raises(ValueError, match="steps count from 1"):
        c.get(step, rank, ranks, 0.1)


def test_a_client_reaches_a_server_that_starts_after_it_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.transports.batches.zmq.REPEAT_S", 0.1)

    async def scenario():
        async with open_server("tcp://127.0.0.1:*", "secret") as first:
            address = first.address
        with client(address) as c:
            asked = asyncio.create_task(asyncio.to_thread(c.get, 1, 0, 1, 10.0))
            await asyncio.sleep(0.3)
            async with open_server(address, "secret") as second:
                await second.publish(batch(1))
                first_answer = await asked
                await second.publish(batch(2))  # answers to the repeated requests for step 1 are still arriving
                return first_answer.step, (await asyncio.to_thread(c.get, 2, 0, 1, 5.0)).step

    assert asyncio.run(scenario()) == (1, 2)


def test_garbage_on_the_port_does_not_stop_the_server():
    import zmq

    async def scenario():
        async with open_server("tcp://127.0.0.1:*", "secret") as server:
            context = zmq.Context()
            for garbage in (b"", b"\xc1", b"\x01", b"\x80"):
                with context.socket(zmq.DEALER) as socket:
                    socket.connect(server.address)
                    socket.send(garbage)
                    await asyncio.to_thread(socket.poll, 2000)
                    assert b"not a batch request" in socket.recv()
            context.term()
            await server.publish(batch(1))
            with client(server.address) as c:
                return await asyncio.to_thread(c.get, 1, 0, 1, 5.0)

    assert asyncio.run(scenario()).step == 1


def test_a_port_in_use_is_named():
    async def scenario():
        async with open_server("tcp://127.0.0.1:*", "secret") as server:
            with pytest.raises(BatchError, match=r"can't bind tcp://127.0.0.1:\d+: Address already in use"):
                open_server(server.address, "secret")

    asyncio.run(scenario())


def test_files_of_an_earlier_session_are_never_served(tmp_path):
    async def scenario():
        async with FilesystemBatchServer(str(tmp_path / "x"), "old") as old:
            await old.publish(batch(6))
        with client(old.address, "new") as c:
            with pytest.raises(TimeoutError, match="another token"):
                c.get(6, 0, 1, 0.2)
            async with FilesystemBatchServer(str(tmp_path / "x"), "new") as new:
                with pytest.raises(TimeoutError):
                    c.get(6, 0, 1, 0.2)
                await new.publish(batch(6))
                assert c.get(6, 0, 1, 5.0).step == 6

    asyncio.run(scenario())


def test_replay_serves_a_dump_in_any_layout_and_names_what_is_missing(tmp_path):
    for step in (1, 2):
        write_batch(tmp_path, batch(step))
    replay = ReplayClient(str(tmp_path))
    assert encode(replay.get(2, 0, 1, 1.0)) == encode(batch(2))
    assert [first_tokens(replay.get(1, rank, 3, 1.0)) for rank in range(3)] == [[10], [11], [12]]
    with pytest.raises(BatchError, match=r"no batch of step 3 .* it holds steps 1 to 2"):
        replay.get(3, 0, 1, 1.0)


def test_a_damaged_dump_is_named(tmp_path):
    write_batch(tmp_path, batch(1))
    path = tmp_path / "step_1.batch"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BatchError, match=r"step_1.batch is damaged"):
        ReplayClient(str(tmp_path)).get(1, 0, 1, 1.0)
