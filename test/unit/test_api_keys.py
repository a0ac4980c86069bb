"""Several API keys with names and limits, from a file that can be read again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from front import ScriptedScheduler, front, until

from event_loop import in_event_loop
from runtime.config.flag_parser import from_fields
from runtime.config.key_file import ApiKey, read_key_file
from runtime.config.resolve import check
from runtime.config.server import KEY_VARIABLE, resolve_server
from runtime.entrypoints.http.key_ring import Bucket, KeyRing, KeyUse
from runtime.errors import ConfigError, KeyLimitReached

KEYS = """
keys:
  - {name: alice, key: sk-alice, requests_per_minute: 3, priority: 7}
  - {name: bob, key: sk-bob, tokens_per_minute: 20}
  - {name: carol, key: sk-carol, concurrent_requests: 1}
  - {name: ops, key: sk-ops, admin: true}
"""
ASK = {"prompt": "x", "max_tokens": 12}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@in_event_loop
async def test_each_key_has_its_own_limits(file: Path) -> None:
    scheduler = ScriptedScheduler()
    async with front(scheduler, api_key_file=str(file)) as f:

        async def ask(key: str) -> tuple[int, str | None]:
            answer = await f.post("/v1/completions", ASK, headers=bearer(key))
            return answer.status_code, answer.headers.get("retry-after")

        assert (await f.post("/v1/completions", ASK)).status_code == 401
        assert await ask("sk-unknown") == (401, None)
        assert (await f.client.get("/v1/models", headers={"x-api-key": "sk-ops"})).status_code == 200
        assert [await ask("sk-alice") for _ in range(4)] == [(200, None)] * 3 + [(429, "20")]
        assert (await f.client.get("/v1/models", headers=bearer("sk-alice"))).status_code == 200
        assert [(await ask("sk-bob"))[0] for _ in range(3)] == [200, 200, 429]  # 13 tokens each
        scheduler.hold = 0
        running = asyncio.create_task(ask("sk-carol"))
        await until(lambda: f.manager.open_requests == 1)
        refused = await f.post("/v1/completions", ASK, headers=bearer("sk-carol"))
        assert "carol has reached its limit of 1 concurrent requests" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        f.manager.abort(all=True)
        assert (await running)[0] == 200
        scheduler.hold = None
        assert (await ask("sk-carol"))[0] == 200
        assert scheduler.requests[0].client == "key alice"
        assert scheduler.requests[0].max_priority == 7
        for key, status, words in (
            ("sk-alice", 401, "/flush_cache needs an admin key."),
            ("sk-unknown", 401, "The API key is missing or wrong."),
            ("sk-ops", 200, "success"),
        ):
            answer = await f.client.post("/flush_cache", headers=bearer(key))
            assert (answer.status_code, words in answer.text) == (status, True)


@in_event_loop
async def test_sighup_reads_the_file_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with front(api_key_file=str(file)) as f:

        async def status(key: str) -> int:
            return (await f.client.get("/v1/models", headers=bearer(key))).status_code

        assert (await status("sk-alice"), await status("sk-dora")) == (200, 401)
        file.write_text("keys: [{name: dora, key: sk-dora}]")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert (await status("sk-alice"), await status("sk-dora")) == (401, 200)
        file.write_text("keys: [{name: dora}]")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert await status("sk-dora") == 200
    assert "the API keys are unchanged" in caplog.text
    assert "sk-" not in caplog.text


@in_event_loop
async def test_a_file_with_admin_keys_alone_does_not_open_the_api(file: Path) -> None:
    async with front(api_key_file=str(file)) as f:
        assert (await f.client.get("/v1/models", headers=bearer("sk-alice"))).status_code == 200
        file.write_text("keys: [{name: ops, key: sk-ops, admin: true}]")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert [(await f.client.get("/v1/models", headers=given)).status_code for given in ({}, bearer("sk-ops"))] == [401, 200]


def test_an_unchanged_key_keeps_its_use(file: Path) -> None:
    ring = KeyRing([], file)
    alice = ring.find("sk-alice")
    assert alice is not None
    file.write_text(KEYS.replace("tokens_per_minute: 20", "tokens_per_minute: 30"))
    ring.reload()
    assert ring.find("sk-alice") is alice
    assert ring.find("sk-bob") is not None


def test_a_file_for_all_users_is_reported_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, times in ((0o600, 0), (0o644, 1)):
        file.chmod(mode)
        check(from_fields({"api_key_file": str(file)}))
        KeyRing([], file)
        assert caplog.text.count("can be read by every user") == times


def test_a_pipe_is_read_once_and_not_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(pipe := tmp_path / "keys")
    writer = threading.Thread(target=pipe.write_text, args=(KEYS,))
    writer.start()
    check(from_fields({"api_key_file": str(pipe)}))
    ring = KeyRing([], pipe)
    writer.join()
    ring.reload()
    assert "the API keys are unchanged: --api-key-file" in caplog.text
    assert ring.find("sk-alice") is not None


def test_a_rate_refills_evenly() -> None:
    now = [0.0]
    use = KeyUse(ApiKey(name="a", key="k", requests_per_minute=2), lambda: now[0])
    use.begin()
    use.begin()
    with pytest.raises(KeyLimitReached) as caught:
        use.begin()
    assert caught.value.retry_after == 30
    now[0] = 30.0
    use.begin()
    bucket = Bucket(60, lambda: now[0])
    bucket.take(90)
    assert bucket.wait(1) == 31.0
    assert Bucket(None, lambda: now[0]).wait(1e9) == 0.0


def test_a_file_with_one_key_is_that_key(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("sk-one\n")
    assert read_key_file(path) == (ApiKey(name="default", key="sk-one"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "keys"),
        ("keys: []", "keys"),
        ("keys: [{name: a}]", "key"),
        ("keys: [{name: a, key: b, rpm: 5}]", "rpm"),
        ("keys: [{name: a, key: b, requests_per_minute: 0}]", "requests_per_minute"),
        ("keys: [{name: a, key: b}, {name: a, key: c}]", "same name"),
        ("keys: [{name: a, key: b}, {name: c, key: b}]", "same key"),
        ("keys: [{name: a, key: 'b c'}]", "the key of a"),
        ("keys: [", "not YAML"),
        ("keys: [{name: a, key: b}]\nkeys: [{name: c, key: d}]", "gives a name twice"),
    ],
)
def test_wrong_key_files_are_refused_by_their_entry(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-key-file.*{words}"):
        check(from_fields({"api_key_file": str(path)}))
    with pytest.raises(ConfigError, match="cannot be read"):
        check(from_fields({"api_key_file": str(tmp_path / "missing")}))


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-env")
    assert resolve_server(from_fields({}), 8).api_key == "sk-env"
    assert resolve_server(from_fields({"api_key": "sk-flag"}), 8).api_key == "sk-flag"
    monkeypatch.setenv(KEY_VARIABLE, "a b")
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        check(from_fields({}))
