"""Large answers are rendered off the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from front import ScriptedScheduler, front

from event_loop import in_event_loop
from runtime.entrypoints.openai import chat, completions

LARGE = {"max_tokens": 150, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 90, "echo": True, "logprobs": 20, **LARGE}),
        ("/v1/completions", {"prompt": "x" * 100, "echo": True, "logprobs": 20, "stream": True, **LARGE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, **LARGE}),
        ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 150}}),
    ],
)
@in_event_loop
async def test_many_log_probabilities_are_rendered_in_a_thread(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.off_loop is completions.off_loop
    threads: set[int] = set()
    async with front(ScriptedScheduler(say=lambda request: "y" * 150)) as f:
        original = f.manager.tokenizer.token_text
        monkeypatch.setattr(f.manager.tokenizer, "token_text", lambda token: threads.add(threading.get_ident()) or original(token))
        small = {**body, "max_tokens": 1, "echo": False, "prompt": "x", "sampling_params": {"max_new_tokens": 1}}
        assert (await f.post(path, body)).status_code == 200
        if path == "/generate":
            return
        assert threads - {threading.get_ident()}
        threads.clear()
        assert (await f.post(path, small)).status_code == 200
        assert threads == {threading.get_ident()}
