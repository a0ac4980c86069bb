"""A tokenizer for random weights. Each id has a distinct text, which encodes back to the same id."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_synthetic_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of `vocab_size` ids: 256 bytes, then one word of letters for each further id.

    A text of such words, each preceded by a space, has one token per word.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{_letters(i)}" for i in range(max(0, vocab_size - len(alphabet)))]
    vocab = {token: i for i, token in enumerate([*alphabet, *words][:vocab_size])}
    # Without merges, a word in the vocabulary becomes one token, and any other text becomes bytes.
    tokenizer = Tokenizer(BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def is_synthetic_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds all files of a synthetic tokenizer."""
    return all((folder / name).is_file() for name in FILES)


def _letters(number: int) -> str:
    """Write `number` in base 26, at least two letters."""
    text = ""
    while number or len(text) < 2:
        number, digit = divmod(number, 26)
        text = chr(ord("a") + digit) + text
    return text
