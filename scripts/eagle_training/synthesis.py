"""Training text that the model writes itself: users' turns from the chat template's opening, then answers to them."""

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
"""Characters, and tokens."""


class Generator(Protocol):
    """What is used of `runtime.Engine`."""

    def generate(self, prompt: Any = None, sampling_params: Any = None, *, input_ids: Any = None) -> Any:
        """Complete prompts."""
        ...


@dataclass(frozen=True, slots=True)
class Amount:
    """How much to make, and how.

    Attributes:
        seed: of everything drawn.
        seconds: when to begin no further round; what is under way is finished.
        tokens: answer tokens for training after which to stop, whatever the time.
        held_out: prompts kept for evaluation.
        sampled_share: share of prompts that get a sampled answer beside the greedy one.
        round_size: users' turns made together.
        workers: rounds under way together, so that one's stragglers do not leave the device idle.
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
    """The ids of the chat template up to where the user's words begin."""
    text = tokenizer.render_chat([{"role": "user", "content": SENTINEL}])
    before, found, _ = text.partition(SENTINEL)
    if not found:
        raise SystemExit("the model's chat template does not show the user's message; training text cannot be made from it")
    return tokenizer.encode(before, add_special_tokens=False)


def key_of(prompt: str) -> str:
    """What two prompts must not share: their letters and digits."""
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
        """Users' turns, new ones only, and their answers."""
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
    """Whether the time is up or there are tokens enough."""
    return shards.note["seconds"] >= amount.seconds or train_tokens(shards.load()) >= amount.tokens


def train_tokens(conversations: Sequence[Conversation]) -> int:
    """Answer tokens to train on."""
    return sum(c.answer_tokens for c in conversations if not c.held_out)


def synthesize(engine: Generator, tokenizer: Tokenizer, amount: Amount, shards: ShardFolder) -> None:
    """Fill `shards` until the time is up or there are tokens enough; goes on where an earlier call was cut off."""
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
