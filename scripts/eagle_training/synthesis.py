"""Generates training text: user turns from templates or from the model itself, and the model's answers to them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from eagle_training.conversations import Conversation, ShardFolder, cut_loop, loop_period
from eagle_training.kinds import PromptKinds, Turn, is_held_out_kind
from eagle_training.openers import draw_openers
from runtime.text.tokenizer import Tokenizer

USER_TEMPERATURES = (0.7, 0.85, 1.0)
ANSWER_TEMPERATURES = (0.2, 0.4, 0.7, 1.0)
ANSWER_LIMITS, LIMIT_SHARES = (64, 128, 256, 512), (0.05, 0.15, 0.3, 0.5)
LONGEST_FIRST = 256
"""Only first answers of at most this many tokens get a follow-up."""
OWN_TEXTS, SHORTEST_OWN_TEXT, LONGEST_OWN_TEXT = 2048, 200, 600
"""How many answers are kept as texts that prompts can ask about, and their lengths in characters."""
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
    """How much text to generate, and of which kinds.

    Attributes:
        seed: seed of all random choices.
        seconds: no round starts after this time; running rounds finish.
        tokens: number of training answer tokens after which to stop.
        held_out: number of self-written prompts for evaluation.
        greedy_share: share of greedy answers; the others are sampled at temperatures from 0.2 to 1.
        kinds_share: share of user turns from `prompts.yaml`; the model writes the others itself.
        part: number of this engine, if several generate text in parallel.
        round_size: user turns per round.
        workers: concurrent rounds, so that the last requests of a round do not leave the device idle.
    """

    seed: int
    seconds: float
    tokens: int
    held_out: int
    user_tokens: int = 128
    answer_tokens: int = 512
    greedy_share: float = 0.5
    kinds_share: float = 0.75
    part: int = 0
    round_size: int = 256
    workers: int = 3


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate: to a turn or, given the first answer as `answer`, to its follow-up. `limit` is its maximum length."""

    turn: Turn
    held_out: bool
    temperature: float
    limit: int
    answer: str | None = None


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
    """Generates conversations in rounds; rounds may run in several threads."""

    def __init__(self, engine: Generator, tokenizer: Tokenizer, amount: Amount, known: Sequence[Conversation] = ()) -> None:
        self._engine, self._tokenizer, self._amount = engine, tokenizer, amount
        self._kinds = PromptKinds()
        self._prefix = user_prefix(tokenizer)
        self._seen = {key_of(c.prompt) for c in known}
        self._held_out = len({c.prompt for c in known if c.held_out})
        self._texts: deque[str] = deque(maxlen=OWN_TEXTS)
        self._lock = threading.Lock()

    def round(self, number: int) -> list[Conversation]:
        """Generate user turns, their answers, and the answers to follow-ups."""
        rng = np.random.default_rng([self._amount.seed, self._amount.part, number])
        with self._lock:
            texts = list(self._texts)
        drawn = int(self._amount.round_size * self._amount.kinds_share)
        turns = [self._kinds.draw(rng, texts) for _ in range(drawn)]
        jobs = [self._job(turn, rng) for turn in turns if self._claim(turn.prompt, False) == "train"]
        for prompt in self._user_turns(self._amount.round_size - drawn, rng):
            place = self._claim(prompt, True)
            if place == "held out":
                jobs.append(Job(Turn(prompt), True, 0.0, self._amount.answer_tokens))
            elif place == "train":
                jobs.append(self._job(self._kinds.around(prompt, rng, texts), rng))
        first = self._answer(jobs, rng)
        again = [
            self._job(job.turn, rng, text)
            for job, (talk, text) in zip(jobs, first, strict=True)
            if job.turn.follow_up is not None and not job.held_out and 0 < talk.answer_tokens < min(job.limit, LONGEST_FIRST)
        ]
        return [talk for talk, _ in first + self._answer(again, rng) if talk.held_out or talk.answer_tokens >= SHORTEST_ANSWER]

    def _job(self, turn: Turn, rng: np.random.Generator, answer: str | None = None) -> Job:
        temperature = 0.0 if rng.random() < self._amount.greedy_share else float(rng.choice(ANSWER_TEMPERATURES))
        limit = min(int(rng.choice(ANSWER_LIMITS, p=LIMIT_SHARES)), self._amount.answer_tokens)
        return Job(turn, False, temperature, limit, answer)

    def _user_turns(self, count: int, rng: np.random.Generator) -> list[str]:
        openers = draw_openers(count, rng)
        sampling = [
            {"temperature": float(t), "top_p": TOP_P, "max_new_tokens": self._amount.user_tokens, "seed": int(rng.integers(1 << 62))}
            for t in rng.choice(USER_TEMPERATURES, len(openers))
        ]
        ids = [self._prefix + self._tokenizer.encode_plain(o) for o in openers]
        outputs = self._engine.generate(input_ids=ids, sampling_params=sampling) if ids else []
        turns = []
        for opener, output in zip(openers, outputs, strict=True):
            text = (opener + output["text"]).strip()
            if len(text) >= SHORTEST_PROMPT and loop_period(output["output_ids"])[0] == 0:
                turns.append(text)
        return turns

    def _claim(self, prompt: str, may_be_held_out: bool) -> str:
        key = key_of(prompt)
        with self._lock:
            if not key or key in self._seen or is_held_out_kind(prompt):
                return "known"
            self._seen.add(key)
            if may_be_held_out and self._held_out < self._amount.held_out:
                self._held_out += 1
                return "held out"
        return "train"

    def _answer(self, jobs: Sequence[Job], rng: np.random.Generator) -> list[tuple[Conversation, str]]:
        """The conversation of each job, and the text of its answer. Loops are cut in answers for training."""
        prompts = [self._tokenizer.encode_chat(job.turn.messages(job.answer)) for job in jobs]
        sampling = [{"temperature": job.temperature, "max_new_tokens": job.limit, "seed": int(rng.integers(1 << 62))} for job in jobs]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling) if jobs else []
        found = []
        for job, ids, output in zip(jobs, prompts, outputs, strict=True):
            answer = np.array(output["output_ids"], dtype=np.int32)
            if not job.held_out:
                looping = loop_period(answer)[0] > 0
                answer = cut_loop(answer)
                if not looping and len(output["text"]) >= SHORTEST_OWN_TEXT:
                    with self._lock:
                        self._texts.append(own_text(output["text"]))
            whole = np.concatenate([np.array(ids, dtype=np.int32), answer])
            found.append((Conversation(whole, len(ids), job.temperature, job.turn.prompt, job.held_out), output["text"].strip()))
        return found


def own_text(text: str) -> str:
    """The complete sentences at the start of an answer, as a text that prompts can ask about."""
    start = text.strip()[:LONGEST_OWN_TEXT]
    whole, stop, _ = start.rpartition(". ")
    return whole + stop.strip() if stop else start


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
    pool = ThreadPoolExecutor(amount.workers)
    try:
        with tqdm(total=amount.tokens, initial=made, unit="tok", unit_scale=True, desc="Writing answers", smoothing=0.1) as bar:
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
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, open rounds end with the engine
    shards.put_note(seconds=spent())
