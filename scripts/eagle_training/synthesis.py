"""Training text that the model writes itself: user turns that continue the chat template, then answers to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from eagle_training.conversations import Conversation, ShardFolder, cut_loop, loop_period
from eagle_training.openers import draw_openers
from runtime.text.tokenizer import Tokenizer

USER_TEMPERATURES = (0.7, 0.85, 1.0)
ANSWER_TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
TOP_P = 0.95
SENTINEL = "@@the user's turn@@"
SHORTEST_PROMPT, SHORTEST_ANSWER = 8, 6
"""Minimum lengths, in characters and in tokens."""


class Generator(Protocol):
    """The part of `runtime.Engine` that is used here."""

    def generate(self, prompt: Any = None, sampling_params: Any = None, *, input_ids: Any = None) -> Any:
        """Complete prompts."""
        ...


@dataclass(frozen=True, slots=True)
class Amount:
    """How much text to write.

    Attributes:
        seed: seed of all random choices.
        seconds: time after which no round starts; running rounds finish.
        tokens: number of training answer tokens after which to stop.
        held_out: number of prompts for evaluation.
        sampled_share: share of prompts that get a sampled answer in addition to the greedy one.
        round_size: user turns per round.
        workers: concurrent rounds, so that the last requests of a round do not leave the device idle.
    """

    seed: int
    seconds: float
    tokens: int
    held_out: int
    user_tokens: int = 128
    answer_tokens: int = 512
    sampled_share: float = 0.35
    round_size: int = 256
    workers: int = 3


def user_prefix(tokenizer: Tokenizer) -> list[int]:
    """The ids of the chat template before the user's text."""
    text = tokenizer.render_chat([{"role": "user", "content": SENTINEL}])
    before, found, _ = text.partition(SENTINEL)
    if not found:
        raise SystemExit("the model's chat template does not contain the user's message, so it cannot write training text")
    return tokenizer.encode(before, add_special_tokens=False)


def key_of(prompt: str) -> str:
    """The letters and digits of a prompt; prompts with equal keys are duplicates."""
    return "".join(c for c in prompt.lower() if c.isalnum())


class Synthesizer:
    """Makes conversations in rounds; rounds may run in several threads."""

    def __init__(self, engine: Generator, tokenizer: Tokenizer, amount: Amount, known: Sequence[Conversation] = ()) -> None:
        self._engine, self._tokenizer, self._amount = engine, tokenizer, amount
        self._prefix = user_prefix(tokenizer)
        self._seen = {key_of(c.prompt) for c in known}
        self._held_out = len({c.prompt for c in known if c.held_out})
        self._lock = threading.Lock()

    def round(self, number: int) -> list[Conversation]:
        """New user turns and their answers."""
        rng = np.random.default_rng([self._amount.seed, number])
        chosen = [(prompt, self._claim(prompt)) for prompt in self._user_turns(rng)]
        prompts = [(prompt, place == "held out") for prompt, place in chosen if place != "known"]
        jobs = [(prompt, held_out, 0.0) for prompt, held_out in prompts]
        for prompt, held_out in prompts:
            if not held_out and rng.random() < self._amount.sampled_share:
                jobs.append((prompt, False, float(rng.choice(ANSWER_TEMPERATURES))))
        return self._answers(jobs, rng)

    def _user_turns(self, rng: np.random.Generator) -> list[str]:
        openers = draw_openers(self._amount.round_size, rng)
        sampling = [
            {"temperature": float(t), "top_p": TOP_P, "max_new_tokens": self._amount.user_tokens, "seed": int(rng.integers(1 << 62))}
            for t in rng.choice(USER_TEMPERATURES, len(openers))
        ]
        outputs = self._engine.generate(
            input_ids=[self._prefix + self._tokenizer.encode_plain(o) for o in openers], sampling_params=sampling
        )
        turns = []
        for opener, output in zip(openers, outputs, strict=True):
            text = (opener + output["text"]).strip()
            if len(text) >= SHORTEST_PROMPT and loop_period(output["output_ids"])[0] == 0:
                turns.append(text)
        return turns

    def _claim(self, prompt: str) -> str:
        key = key_of(prompt)
        with self._lock:
            if not key or key in self._seen:
                return "known"
            self._seen.add(key)
            if self._held_out < self._amount.held_out:
                self._held_out += 1
                return "held out"
        return "train"

    def _answers(self, jobs: list[tuple[str, bool, float]], rng: np.random.Generator) -> list[Conversation]:
        prompts = [self._tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt, _, _ in jobs]
        sampling = [
            {"temperature": t, "max_new_tokens": self._amount.answer_tokens, "seed": int(rng.integers(1 << 62))} for _, _, t in jobs
        ]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling) if jobs else []
        found = []
        for (prompt, held_out, temperature), ids, output in zip(jobs, prompts, outputs, strict=True):
            answer = np.array(output["output_ids"], dtype=np.int32)
            if not held_out:
                answer = cut_loop(answer)
            if held_out or len(answer) >= SHORTEST_ANSWER:
                whole = np.concatenate([np.array(ids, dtype=np.int32), answer])
                found.append(Conversation(whole, len(ids), temperature, prompt, held_out))
        return found


def enough(shards: ShardFolder, amount: Amount) -> bool:
    """Whether the time is up or there are enough tokens."""
    return shards.note["seconds"] >= amount.seconds or train_tokens(shards.load()) >= amount.tokens


def train_tokens(conversations: Sequence[Conversation]) -> int:
    """Number of answer tokens for training."""
    return sum(c.answer_tokens for c in conversations if not c.held_out)


def synthesize(engine: Generator, tokenizer: Tokenizer, amount: Amount, shards: ShardFolder) -> None:
    """Fill `shards` until the time is up or there are enough tokens; resumes after an interruption."""
    known = shards.load()
    made = train_tokens(known)
    maker = Synthesizer(engine, tokenizer, amount, known)
    before, started = shards.note["seconds"], time.monotonic()
    number = shards.next_number()

    def spent() -> float:
        return before + time.monotonic() - started

    open_rounds: dict[Future[list[Conversation]], int] = {}
    with ThreadPoolExecutor(amount.workers) as pool, tqdm(total=amount.tokens, initial=made, unit="tok", unit_scale=True,
                                                          desc="Writing answers", smoothing=0.1) as bar:  # fmt: skip
        while True:
            while len(open_rounds) < amount.workers and spent() < amount.seconds and made < amount.tokens:
                open_rounds[pool.submit(maker.round, number)] = number
                number += 1
            if not open_rounds:
                break
            done, _ = wait(open_rounds, return_when=FIRST_COMPLETED)
            for future in done:
                conversations = future.result()
                shards.save(open_rounds.pop(future), conversations)
                new = train_tokens(conversations)
                made += new
                bar.update(new)
            shards.put_note(seconds=spent())
    shards.put_note(seconds=spent())
