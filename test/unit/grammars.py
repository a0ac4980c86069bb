"""Grammars for tests: a tokenizer with JSON-like tokens, and workers and schedulers that follow grammars."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from runtime.constrained.backends import make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.constrained.grammar import GrammarBackend, Matcher, Vocabulary
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.entrypoints.grammar_process import vocabulary_of
from runtime.managers.messages import Finish, GenerateReq, TokensOut, TokensOutBatch
from runtime.managers.scheduler import Scheduler
from runtime.model_executor.followers import Followers
from runtime.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import TokenizerFiles
from unit.predicting import model_config, plain, speculating
from unit.tiny import tiny_runtime
from unit.wire import as_sent

VOCAB = 420
"""Ids of the model: some more than the tokenizer has, and no multiple of 32."""
CONTEXT = 256
CORPUS = [
    '{"name": "Ada", "age": 42, "tags": ["a", "b"], "ok": true, "none": null}',
    '{"x": {"y": [1.5, -2e3, false]}, "kind": "left", "value": "right side"}',
    "[1, 22, 333] { } [ ] \"\", \"name\": \"value\", null, true, false",
] * 20  # fmt: skip


@lru_cache
def json_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer trained on JSON, so that tokens cross the borders of the grammar's parts."""
    hf = HfTokenizer(BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<end>", "<think>"]
    hf.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False))
    hf.add_special_tokens([AddedToken("<tool>", special=True)])
    return Tokenizer(TokenizerFiles(hf.to_str(), {"eos_token": "<eos>"}))


def vocabulary(vocab_size: int = VOCAB) -> Vocabulary:
    """What backends know of `json_tokenizer`; the ids 0 and 1 end a text."""
    return vocabulary_of(json_tokenizer(), (0, 1), vocab_size)


def compiled(backend: GrammarBackend, spec: GrammarSpec) -> Matcher:
    """A grammar, compiled in this process."""
    return backend.compile(backend.translate(spec))


def make_compiler(name: str = "llguidance") -> GrammarCompiler:
    """A compiler for `json_tokenizer`."""
    return GrammarCompiler(lambda: make_backend(name, vocabulary()), None)


def constrained_worker(
    folder: Path,
    algorithm: str | None,
    replay: Any = None,
    sizes: list[int] | None = None,
    runtime: dict[str, Any] | None = None,
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
    **spec: Any,
) -> Any:
    """A worker of the vocabulary of `json_tokenizer`, plain where `algorithm` is None."""
    settings = {"context_length": CONTEXT, "max_running_requests": 16, **(runtime or {})}
    model = model_config(vocab_size=VOCAB, max_context_len=CONTEXT, eos_ids=(0, 1))
    if algorithm is None:
        return plain(replay, sizes, model=model, group=group, followers=followers, **settings)
    head = {"vocab_size": VOCAB, **({"draft_vocab_size": VOCAB} if algorithm == "EAGLE3" else {}), **spec.pop("head", {})}
    ranks = {"group": group, "followers": followers}
    return speculating(folder, algorithm, replay, sizes, runtime=settings, model=model, head=head, **ranks, **spec)


class Served:
    """What a scheduler said: by request the tokens, how it ended, and log-probabilities."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.outs: list[TokensOut] = []

    def text(self, rid: str) -> str:
        """The text without the end."""
        return json_tokenizer().decode(self.tokens[rid])

    def take(self, message: Any) -> None:
        """Keep a message."""
        message = as_sent(message)
        for out in message.outs if isinstance(message, TokensOutBatch) else []:
            self.outs.append(out)
            self.tokens.setdefault(out.rid, []).extend(out.token_ids)
            if out.finish is not None:
                self.ends[out.rid] = out.finish


def serve(
    worker: Any,
    asks: list[GenerateReq],
    compiler: GrammarCompiler | None = None,
    before_turn: Callable[[int, list[Any]], None] = lambda turn, inbox: None,
    served: Served | None = None,
    **settings: Any,
) -> tuple[Served, Scheduler]:
    """Run `asks` to their ends; `before_turn` may add messages to the inbox."""
    inbox: list[Any] = list(asks)
    served = served or Served()

    def receive(wait: float) -> Any:
        if not inbox:
            time.sleep(wait)  # leaves the processor to the compiler, for which alone a scheduler waits here
        return inbox.pop(0) if inbox else None

    config = tiny_runtime(**{"context_length": CONTEXT, "chunked_prefill_size": 24, **settings})
    scheduler = Scheduler(
        config.scheduler, config.cache, worker, (0, 1), receive, served.take,
        compiler=compiler or make_compiler(),
    )  # fmt: skip
    for turn in range(20000):
        before_turn(turn, inbox)
        scheduler.step(0.001)
        scheduler.groups.check()
        if scheduler.idle and not inbox:
            return served, scheduler
    raise AssertionError("the scheduler does not come to rest")


def schema(value: Any) -> str:
    """A schema as text."""
    return json.dumps(value)
