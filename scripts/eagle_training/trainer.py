"""A resumable training run of the unrolled head against the frozen target, scheduled by steps or by time."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from eagle_training.batches import Batch, epoch_batches, join_rows, make_batch, row_lengths
from eagle_training.chain_attention import chain_attention, kernel_agrees
from eagle_training.conversations import Conversation
from eagle_training.estimate import estimate
from eagle_training.features import FeatureCache, Seen
from eagle_training.head import EagleHead
from eagle_training.loss import Teacher, cross_entropy
from eagle_training.target import FrozenTarget

BETAS = (0.9, 0.95)
NORM_SCALES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05)
CALIBRATION_ROWS = 16
LAST_RATE = 0.02
"""The final learning rate as a share of its peak."""


@dataclass(frozen=True, slots=True)
class Course:
    """Training options.

    Attributes:
        passes: number of unrolled draft passes.
        steps: optimiser steps; None to train for `seconds`.
        seconds: training time, if `steps` is None.
        warmup: share of the training in which the learning rate rises.
        pass_decay: weight of a pass's loss relative to the previous pass.
        hard_share: see `loss.cross_entropy`.
        joined_share: see `batches.join_rows`.
        amp: dtype of GEMMs.
        save_seconds: seconds between checkpoints.
        checks: number of held-out estimates during training.
    """

    seed: int
    steps: int | None
    seconds: float
    passes: int = 5
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: float = 0.04
    batch_tokens: int = 32768
    max_length: int = 1024
    joined_share: float = 0.15
    pass_decay: float = 0.9
    hard_share: float = 0.3
    amp: torch.dtype = torch.float32
    save_seconds: float = 60.0
    log_steps: int = 10
    checks: int = 6


@dataclass(slots=True)
class Progress:
    """The state of the run.

    Attributes:
        step: finished optimiser steps.
        tokens: tokens of text in these steps.
        seconds: training time without checks and checkpoints.
        epoch, index: the next batch.
        history: one row of metrics per `log_steps`.
        checks: held-out estimates.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    index: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Owns the head's optimiser and the state of the run; its files are in `folder`."""

    def __init__(
        self, head: EagleHead, target: FrozenTarget, train: Sequence[Conversation], held_out: Sequence[Conversation], course: Course,
        folder: Path,
    ) -> None:  # fmt: skip
        """Raises `SystemExit` if no batch has an answer to learn from."""
        if not any(c.answer_start < min(len(c.ids), course.max_length) - 1 for c in train):
            raise SystemExit(f"--max-length {course.max_length} cuts off all answers of the training text; raise it")
        self.head, self.target, self.course, self.folder = head, target, course, folder
        self._rows, self._held_out = join_rows(train, course.max_length, course.joined_share, course.seed), held_out
        self._lengths = row_lengths(self._rows, course.max_length)
        self.seen = FeatureCache(target, self._lengths)
        self.progress = Progress()
        vocabulary = torch.from_numpy(head.vocabulary).to(target.device)
        to_draft = torch.full((target.config.vocab_size,), -1, dtype=torch.int64, device=target.device)
        to_draft[vocabulary] = torch.arange(len(vocabulary), device=target.device)
        self._to_draft, self._target_rows = to_draft, target.model.lm_head.weight[vocabulary].to(course.amp)
        attention, c = head.midlayer.self_attn, head.config
        if kernel_agrees(c.num_q_heads, c.num_kv_heads, c.head_dim, target.device, course.amp):
            attention.later = chain_attention
        decayed = [p for p in head.parameters() if p.dim() == 2]
        plain = [p for p in head.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": course.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=course.learning_rate, betas=BETAS, fused=target.device.type == "cuda",
        )  # fmt: skip

    # ---- one step

    def learn(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one optimiser step.

        Returns:
            The loss, and float32 [passes]: the share of positions where a pass predicts the target's argmax.
        """
        c = self.course
        for group in self.optimizer.param_groups:
            group["lr"] = c.learning_rate * rate_at(self._done(), c.warmup)
        loss, shares = self._loss(batch, self.seen.get(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), c.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), shares

    def _loss(self, batch: Batch, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        c, head, device = self.course, self.head, self.target.device
        depth = batch.depth.flatten()
        hidden, best = seen.hidden.flatten(0, 1), self._to_draft[seen.best.flatten()]
        total, weights, shares = torch.zeros((), device=device), 0.0, []
        amp = torch.autocast(device.type, c.amp, enabled=c.amp != torch.float32)
        with amp:
            for i, h in enumerate(head.unroll(batch.ids, seen.features, c.passes)):
                # Positions whose next token is trained on; found on the CPU, so that nothing waits for the device.
                places = torch.nonzero(depth >= i).flatten().to(device, non_blocking=True)
                rows = h.flatten(0, 1)[places - i - 1]
                lesson = Teacher(hidden[places].to(c.amp), self._target_rows, best[places], self.target.config.final_softcap)
                summed, guesses = cross_entropy(head.norm(rows), head.lm_head.weight, lesson, c.hard_share, c.amp)
                weight, count = c.pass_decay**i, max(len(places), 1)
                total = total + weight * summed / count
                weights += weight
                shares.append((guesses == lesson.best).float().sum() / count)
        return total / weights, torch.stack(shares)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Scale the new head's last norm so that its initial distributions have a suitable temperature.

        If the norm is too large, the loss starts far above that of a uniform distribution, which costs hundreds of steps.
        """
        batch = next(self._batches())
        few = Batch(batch.ids[:CALIBRATION_ROWS], batch.depth[:CALIBRATION_ROWS], 0, batch.numbers[:CALIBRATION_ROWS])
        self.progress.index -= 1
        seen = self.seen.get(few)
        weight = self.head.norm.weight
        whole = weight.clone()
        losses = {}
        for scale in NORM_SCALES:
            weight.copy_(whole * scale)
            losses[scale] = float(self._loss(few, seen)[0])
        weight.copy_(whole * min(losses, key=losses.__getitem__))

    # ---- the run

    def run(self, saved_too: Callable[[], object] = lambda: None) -> None:
        """Train from the current state to the end; `saved_too` is called with each checkpoint."""
        p, c = self.progress, self.course
        total = c.steps or max(int(c.seconds), 1)
        losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        saved = time.monotonic()
        clock = time.monotonic()
        with tqdm(total=total, initial=self._units(), unit="step" if c.steps else "s", desc="Training", smoothing=0.05) as bar:
            for batch in self._batches():
                if self._done() >= 1.0:
                    break
                losses.append(self.learn(batch))
                p.step += 1
                p.tokens += batch.tokens
                if p.step % c.log_steps == 0:
                    self._log(losses, bar)
                    losses = []
                p.seconds += time.monotonic() - clock
                clock = time.monotonic()
                bar.update(self._units() - bar.n)
                if self._check_is_due():
                    self.check()
                if time.monotonic() - saved > c.save_seconds:
                    self.save()
                    saved_too()
                    saved = time.monotonic()
                clock = time.monotonic()
        if losses:
            self._log(losses, None)
        if not p.checks or p.checks[-1]["step"] != p.step:
            self.check()
        self.save()

    def check(self) -> dict[str, Any]:
        """Estimate acceptance on held-out greedy answers and record it."""
        c, p = self.course, self.progress
        self.head.eval()
        counters = estimate(self.head, self.target, self._held_out, c.passes, c.batch_tokens, c.amp)
        self.head.train()
        found = {"step": p.step, "seconds": round(p.seconds, 1), "tokens": p.tokens, **msgspec.to_builtins(counters.stats())}
        p.checks.append(found)
        rates = " ".join(f"{rate:.3f}" for rate in counters.rates())
        tqdm.write(f"step {p.step}: held-out accept length {counters.mean_accept_len:.3f} with K = {c.passes}; by position {rates}")
        return found

    def _batches(self) -> Iterator[Batch]:
        p, c = self.progress, self.course
        while True:
            batches = epoch_batches(self._lengths, c.batch_tokens, c.seed, p.epoch)
            while p.index < len(batches):
                p.index += 1
                numbers = batches[p.index - 1]
                batch = make_batch([self._rows[number] for number in numbers], c.max_length, numbers)
                if bool((batch.depth >= 0).any()):
                    yield batch.to(self.target.device)
            p.epoch, p.index = p.epoch + 1, 0

    def _units(self) -> float:
        return self.progress.step if self.course.steps else round(self.progress.seconds, 1)

    def _done(self) -> float:
        c, p = self.course, self.progress
        return p.step / c.steps if c.steps else p.seconds / max(c.seconds, 1e-9)

    def _check_is_due(self) -> bool:
        """Whether the next of `checks` equal parts of the training is done; the last check runs at the end."""
        checks = self.course.checks
        return len(self.progress.checks) + 1 < checks and self._done() * checks >= len(self.progress.checks) + 1

    def _log(self, losses: list[tuple[torch.Tensor, torch.Tensor]], bar: tqdm[Any] | None) -> None:
        p = self.progress
        loss = float(torch.stack([one for one, _ in losses]).mean())
        shares = torch.stack([share for _, share in losses]).mean(0).tolist()
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss} at step {p.step}; lower --learning-rate")
        rate = self.optimizer.param_groups[0]["lr"]
        p.history.append({"step": p.step, "seconds": round(p.seconds, 1), "tokens": p.tokens, "loss": loss, "rate": rate,
                          "agreement": [round(s, 4) for s in shares]})  # fmt: skip
        if bar is not None:
            speed = p.tokens / max(p.seconds, 1e-9)
            bar.set_postfix_str(f"loss {loss:.3f} agree {' '.join(f'{s:.2f}' for s in shares)} {speed / 1e3:.1f}k tok/s")

    # ---- its files

    @property
    def _file(self) -> Path:
        return self.folder / "training.pt"

    def save(self) -> None:
        """Write the state, replacing the previous one, and the metrics as JSON."""
        p = self.progress
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"head": self.head.state_dict(), "vocabulary": self.head.vocabulary.tolist(), "optimizer": self.optimizer.state_dict(),
                 "progress": {name: getattr(p, name) for name in Progress.__dataclass_fields__}}  # fmt: skip
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._file)
        figures = {"history": p.history, "checks": p.checks}
        (self.folder / "training.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")

    def resume(self) -> bool:
        """Load the saved state, if there is one.

        Raises:
            SystemExit: the state does not belong to this head, or the file is damaged.
        """
        if not self._file.is_file():
            return False
        try:
            state = torch.load(self._file, map_location=self.target.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise SystemExit(f"{self._file} is damaged. Remove it to train a new head.") from error
        sizes, saved = ({name: tensor.shape for name, tensor in one.items()} for one in (self.head.state_dict(), state["head"]))
        if saved != sizes or state.get("vocabulary") != self.head.vocabulary.tolist():
            raise SystemExit(
                f"{self._file} is the state of a head of another size or vocabulary; the vocabulary depends on the training text. "
                "Run the command that wrote it, or remove the file to train a new head."
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True


def rate_at(done: float, warmup: float) -> float:
    """The learning rate, as a share of its peak, after a share `done` (0..1) of the training: a linear rise, then half a cosine."""
    if done < warmup:
        return max(done, 1e-3) / warmup if warmup else 1.0
    turn = min((done - warmup) / max(1.0 - warmup, 1e-9), 1.0)
    return LAST_RATE + (1.0 - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * turn))
