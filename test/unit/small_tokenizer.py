"""A small byte-level tokenizer with control tokens, and the same one in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SOFT = ("<think>", "</think>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_small_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Train on this very file, and write the folder that a model would have."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=700, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in SOFT])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def reference(folder: Path) -> Any:
    """The tokenizer that transformers makes of `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
