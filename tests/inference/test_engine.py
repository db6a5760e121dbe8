"""One real engine: what it samples, and how it gets new weights."""

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from engines import RunningEngine, free_port, hf_logprobs

from megatron_rl.envs.protocol import Completion
from megatron_rl.inference.client import EngineError
from megatron_rl.inference.pool import EnginePool, UpdateError
from megatron_rl.transports.weights.filesystem import acked, offer_checkpoint
from megatron_rl.transports.weights.manifest import Manifest
from megatron_rl.transports.weights.update import Outcome, Step

pytestmark = pytest.mark.engine

PROMPT = [5 + (7 * i) % 290 for i in range(200)]
"""Longer than a block of the KV cache (128 tokens): prefix caching has something to find."""
GREEDY_IS_NOT = {"max_tokens": 24, "temperature": 0.7, "seed": 11}


@pytest.fixture(scope="module")
def offers(engine_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Versions 0 (model a), 1 (model b), and broken ones."""
    run_dir = tmp_path_factory.mktemp("run")
    a, b = offer_checkpoint(engine_models[0], run_dir, 0), offer_checkpoint(engine_models[1], run_dir, 1)
    corrupted = copy_of(b, run_dir / "corrupted", 2)
    file = corrupted / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    return {"a": a, "b": b, "corrupted": corrupted}


def copy_of(version: Path, directory: Path, number: int) -> Path:
    shutil.copytree(version, directory)
    manifest = replace(Manifest.read(directory), version=number)
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def without(version: Path, directory: Path, number: int, name: str) -> Path:
    """A version that lacks one tensor, in manifest and files."""
    from safetensors.torch import load_file, save_file

    copy_of(version, directory, number)
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    manifest = Manifest.read(directory)
    kept = tuple(entry for entry in manifest.tensors if entry.name != name)
    (directory / "manifest.json").write_text(replace(manifest, tensors=kept).to_json())
    return directory


def renamed(version: Path, directory: Path, number: int, name: str, to: str) -> Path:
    """A version in which one tensor has another name."""
    from safetensors.torch import load_file, save_file

    copy_of(version, directory, number)
    tensors = {to if found == name else found: tensor for found, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    manifest = Manifest.read(directory)
    entries = tuple(replace(entry, name=to) if entry.name == name else entry for entry in manifest.tensors)
    (directory / "manifest.json").write_text(replace(manifest, tensors=entries).to_json())
    return directory


async def answer(pool: EnginePool, session: str = "s") -> Completion:
    return await pool.sample(session, PROMPT, **GREEDY_IS_NOT)


def close(left: list[float], right: list[float], tolerance: float) -> bool:
    return len(left) == len(right) and max(abs(x - y) for x, y in zip(left, right, strict=True)) < tolerance


# The first test: the engine has had no version yet. Later ones update it to what they need.


def test_before_its_first_whole_version_the_engine_samples_for_nobody(engine: RunningEngine, offers, tmp_path):
    q_proj = "model.layers.1.self_attn.q_proj.weight"
    partial = without(offers["a"], tmp_path / "partial", 5, q_proj)
    unknown = renamed(offers["a"], tmp_path / "unknown", 6, "model.norm.weight", "model.norm.wait")
    no_norm = without(offers["a"], tmp_path / "no_norm", 7, "model.layers.2.post_attention_layernorm.weight")

    async def act(pool: EnginePool) -> None:
        client = pool.clients[engine.url]
        with pytest.raises(EngineError, match="holds no verified version"):
            await answer(pool)
        with pytest.raises(EngineError, match="answered 503: this engine holds no verified weights"):
            await client.generate(PROMPT, 4, 1.0)
        for broken, said in ((partial, "layers.1.self_attn.qkv_proj.weight"), (no_norm, "layers.2.post_attention_layernorm.weight")):
            with pytest.raises(UpdateError, match=f"does not fill: .*{said}") as caught:
                await pool.update_weights(broken)
            assert caught.value.update.outcome is Outcome.BROKEN
        with pytest.raises(UpdateError, match=r"flip, tensor model\.norm\.wait"):
            await pool.update_weights(unknown)
        assert await client.version() is None
        with pytest.raises(EngineError, match="no engine is in use"):
            pool.version = 6
            await answer(pool)
        await client.resume()
        with pytest.raises(EngineError, match="503"):
            await client.generate(PROMPT, 4, 1.0)
        await pool.update_weights(offers["a"])
        assert await client.version() == 0
        await answer(pool)

    engine.call(act)


def test_logprobs_are_those_of_the_sampled_distribution(engine: RunningEngine, offers, engine_models):
    async def act(pool: EnginePool) -> Completion:
        await pool.update_weights(offers["a"])
        return await answer(pool)

    sampled = engine.call(act)
    assert close(sampled.logprobs, hf_logprobs(engine_models[0], PROMPT, sampled.token_ids, 0.7), 1e-4)
    assert sampled.versions == [(0, 0, len(sampled.token_ids))]
    assert sampled.finish_reason == "length" or sampled.token_ids[-1] == 0


def test_after_an_update_the_same_prompt_meets_the_new_weights_only(engine: RunningEngine, offers, engine_models):
    async def act(pool: EnginePool) -> tuple[Completion, Completion]:
        await pool.update_weights(offers["a"])
        before = [await answer(pool) for _ in range(2)][-1]  # its prompt is in the prefix cache now
        seconds = await pool.update_weights(offers["b"])
        assert set(seconds) == {"stage", "pause", "flip", "resume", "total"} and pool.version == 1
        return before, await answer(pool)

    before, after = engine.call(act)
    assert close(before.logprobs, hf_logprobs(engine_models[0], PROMPT, before.token_ids, 0.7), 1e-4)
    assert close(after.logprobs, hf_logprobs(engine_models[1], PROMPT, after.token_ids, 0.7), 1e-4)
    assert not close(after.logprobs, hf_logprobs(engine_models[0], PROMPT, after.token_ids, 0.7), 1e-1)
    assert after.versions == [(1, 0, len(after.token_ids))]
    assert acked(offers["b"].parent.parent, 1)


def test_a_corrupted_version_is_refused_and_the_old_one_serves_on_unchanged(engine: RunningEngine, offers):
    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        before = await answer(pool)
        with pytest.raises(UpdateError, match=r"version 2 failed, all engines keep .*its sender computed") as caught:
            await pool.update_weights(offers["corrupted"])
        (failure,) = caught.value.update.failures
        assert (failure.engine, failure.step) == (engine.url, Step.STAGE) and failure.tensor is not None
        assert pool.version == 0 and not (offers["corrupted"] / "ACK").exists()
        assert await answer(pool) == before

    engine.call(act)


def test_a_version_of_other_tensors_is_refused_before_the_flip(engine: RunningEngine, offers, tmp_path):
    partial = without(offers["a"], tmp_path / "partial", 5, "model.layers.0.mlp.up_proj.weight")

    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        before = await answer(pool)
        with pytest.raises(UpdateError, match=r"stage, tensor model\.layers\.0\.mlp\.up_proj\.weight: version 5 lacks"):
            await pool.update_weights(partial)
        assert await answer(pool) == before

    engine.call(act)


def test_one_engine_that_cannot_be_reached_keeps_all_at_the_old_version(engine: RunningEngine, offers):
    dead = f"http://127.0.0.1:{free_port()}"

    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        before = await answer(pool)
        async with EnginePool([engine.url, dead], engine.token) as both:
            with pytest.raises(UpdateError, match=f"engine {dead}, stage: .* got no answer") as caught:
                await both.update_weights(offers["b"])
            assert caught.value.update.outcome is Outcome.REFUSED and both.version is None
        assert await answer(pool) == before

    engine.call(act)


def test_repeating_an_update_changes_nothing(engine: RunningEngine, offers):
    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["b"])
        before = await answer(pool)
        await pool.update_weights(offers["b"])
        assert await answer(pool) == before
        client = pool.clients[engine.url]
        for _ in range(2):
            await client.stage(0, offers["a"], verify=True)
        for _ in range(2):
            await client.flip(0)
        await client.flip(0)
        assert await client.version() == 0

    engine.call(act)


def test_a_request_in_flight_goes_on_with_the_new_weights_and_says_where(engine: RunningEngine, offers, engine_models):
    async def act(pool: EnginePool) -> Completion:
        await pool.update_weights(offers["a"])
        while True:  # until one did not meet the end of its sequence early
            long = asyncio.create_task(pool.sample("long", PROMPT[:8], max_tokens=480, temperature=1.0, seed=3))
            await asyncio.sleep(0.3)
            await pool.update_weights(offers["b"])
            if not long.done():
                return await long
            raise AssertionError(f"too short to straddle an update: {await long}")

    sampled = engine.call(act)
    (old, start, middle), (new, middle_again, end) = sampled.versions
    assert (old, start, new, end) == (0, 0, 1, len(sampled.token_ids)) and 0 < middle == middle_again < end
    first = hf_logprobs(engine_models[0], PROMPT[:8], sampled.token_ids[:middle], 1.0)
    assert close(sampled.logprobs[:middle], first, 1e-3)
    assert not close(sampled.logprobs[middle:], hf_logprobs(engine_models[0], PROMPT[:8], sampled.token_ids, 1.0)[middle:], 1e-1)


def test_a_seed_gives_the_same_answer_whatever_else_is_sampled(engine: RunningEngine, offers):
    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        alone = await answer(pool)
        among = await asyncio.gather(*(pool.sample(f"s{i}", PROMPT, 24, 0.7, seed=seed) for i, seed in enumerate((3, 4, 11, 5))))
        assert among[2].token_ids == alone.token_ids and close(among[2].logprobs, alone.logprobs, 1e-4)
        assert among[0].token_ids != alone.token_ids

    engine.call(act)


def test_more_seeded_prompts_at_once_than_a_step_takes_up(engine: RunningEngine, offers):
    """40 prompts of 200 tokens against 4,096 per step: some wait for a later one."""

    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        prompts = [[(7 * i + j) % 250 for j in range(200)] for i in range(40)]
        answers = await asyncio.gather(*(pool.sample(f"s{i}", prompt, 4, 0.7, seed=i) for i, prompt in enumerate(prompts)))
        assert all(len(found.token_ids) == len(found.logprobs) > 0 for found in answers)

    engine.call(act)


def test_every_route_but_health_wants_the_token(engine: RunningEngine, offers):
    engine.call(lambda pool: pool.update_weights(offers["a"]))
    assert status(engine.url + "/health") == 200
    refused = [
        "/inference/v1/generate",
        "/collective_rpc",
        "/pause",
        "/update_weights",
        "/v1/completions",
        "/v1/models",
        "/metrics",
        "/nowhere",
    ]
    for path in refused:
        assert status(engine.url + path) == 401, path
        assert status(engine.url + path, b"{}") == 401, path
        assert status(engine.url + path, b"{}", token="wrong") == 401, path
    assert status(engine.url + "/v1/models", token=engine.token) == 200


def test_what_the_engine_says_is_passed_on_in_one_line(engine: RunningEngine, offers):
    async def act(pool: EnginePool) -> None:
        await pool.update_weights(offers["a"])
        with pytest.raises(EngineError, match=f"engine {engine.url}: /inference/v1/generate answered 400: .*512") as caught:
            await pool.sample("s", [5] * 600, 8, 1.0)
        assert "\n" not in str(caught.value)

    engine.call(act)


def status(url: str, body: bytes | None = None, token: str | None = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        json.loads(error.read())
        return error.code
