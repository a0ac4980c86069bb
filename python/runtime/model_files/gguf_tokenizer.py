"""Converts the tokenizer in a GGUF file to Hugging Face's tokenizer files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from runtime.errors import ConfigError
from runtime.model_files.gguf_file import GGUFFile

logger = logging.getLogger(__name__)


# Regular expressions that split text into words before merging, from the tokenizer.json of the named models.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_PATTERN = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_PLAIN = frozenset({"gpt-2", "gpt2"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
SUPPORTED_PRE = sorted({*_BY_PATTERN, *_DIGITS_APART, *_PLAIN})


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Only warns if the kind of tokenizer is not supported, because the model can still be served with --tokenizer-path.
    """
    try:
        tokenizer = build_tokenizer(file)
    except ConfigError as error:
        logger.warning("%s", error)
        return
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = _tokenizer_config(file)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template = file.get("tokenizer.chat_template", str, "")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer that the metadata describes.

    Raises:
        ConfigError: the server cannot rebuild this kind of tokenizer exactly.
    """
    model = file.get("tokenizer.ggml.model", str, "")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise ConfigError(f"{file.path} has a tokenizer of kind {model!r}; give a folder with its tokenizer.json as --tokenizer-path")
    try:
        tokenizer = build(file)
        _add_control_tokens(tokenizer, file)
        _add_bos(tokenizer, file)
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(f"{file.path} holds a tokenizer that contradicts itself ({str(error)[:120]}); download it again") from error
    return tokenizer


def _byte_level(file: GGUFFile) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str, "")
    if pre not in SUPPORTED_PRE:
        raise ConfigError(
            f"{file.path} splits text by {pre or 'an unnamed rule'!r}; supported are {', '.join(SUPPORTED_PRE)}; "
            "give a folder with its tokenizer.json as --tokenizer-path"
        )
    vocab = {token: i for i, token in enumerate(_tokens(file))}
    # Byte-level vocabularies write a space as another letter, so the only space separates the two parts.
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.get("tokenizer.ggml.merges", list))]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if _BY_PATTERN.get(pre) is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = pre_tokenizers.Split(Regex(_BY_PATTERN[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Rebuild SentencePiece's BPE: merges are ordered by the score of the piece that they produce, highest first.

    Merges produce only normal pieces, so control tokens written in a text stay plain text.
    """
    tokens, types = _tokens(file), _types(file)
    scores = file.get("tokenizer.ggml.scores", list)
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {token: i for token, i in vocab.items() if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    merges = [
        (-scores[i], mergeable[token[:cut]], mergeable[token[cut:]], token[:cut], token[cut:])
        for token, i in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges.sort()
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", int, 0)]
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    undo: list[object] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix_space else undo)
    return tokenizer


def _add_control_tokens(tokenizer: Tokenizer, file: GGUFFile) -> None:
    types = _types(file)
    added = {
        i: AddedToken(token, special=types[i] != TokenType.USER_DEFINED, normalized=False)
        for i, token in enumerate(_tokens(file))
        if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    }
    tokenizer.add_special_tokens([token for token in added.values() if token.special])
    tokenizer.add_tokens([token for token in added.values() if not token.special])


def _add_bos(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Add the BOS token to texts if the file requests it. The default, as in llama.cpp, is yes for SentencePiece, Llama 3 and tekken."""
    pre = file.get("tokenizer.ggml.pre", str, "")
    default = file.get("tokenizer.ggml.model", str, "") == "llama" or pre in _WHOLE_WORDS_FIRST
    if not file.get("tokenizer.ggml.add_bos_token", bool, default) or not file.has("tokenizer.ggml.bos_token_id"):
        return
    bos = file.get("tokenizer.ggml.bos_token_id", int)
    text = _tokens(file)[bos]
    bos_first = processors.TemplateProcessing(single=f"{text}:0 $A:0", pair=f"{text}:0 $A:0 $B:1", special_tokens=[(text, bos)])
    tokenizer.post_processor = bos_first


def _tokens(file: GGUFFile) -> list[str]:
    return file.get("tokenizer.ggml.tokens", list)


def _types(file: GGUFFile) -> list[int]:
    return file.get("tokenizer.ggml.token_type", list, [int(TokenType.NORMAL)] * len(_tokens(file)))


def _tokenizer_config(file: GGUFFile) -> dict[str, object]:
    tokens = dict(enumerate(_tokens(file)))
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {
        name: tokens[file.get(f"tokenizer.ggml.{key}_token_id", int)]
        for name, key in keys.items()
        if file.get(f"tokenizer.ggml.{key}_token_id", int, -1) in tokens
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length", int, 1 << 20),
        **named,
    }
