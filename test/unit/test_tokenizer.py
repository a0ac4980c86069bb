"""Text to ids and back, against transformers on the same files."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_tokenizer import write_llama_tokenizer
from small_tokenizer import SPECIAL, reference, write_small_tokenizer

from runtime.errors import ConfigError, RequestError
from runtime.model_files.synthetic_tokenizer import write_synthetic_tokenizer
from runtime.text.decode_stream import WindowStream
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import tokenizer_eos_ids

TEXTS = [
    "",
    " ",
    "Hello, world",
    "  two  spaces\n\n\nthree lines\t",
    "naïve café — 東京 😀 👩‍👩‍👧 \u200b",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2  # 12345",
    "\x00\x1f\x7f",
    "é" * 50,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_encode_and_decode_equal_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    hf = reference(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf(text)["input_ids"]
        for skip in (True, False):
            assert tokenizer.decode(tokenizer.encode(text), skip) == hf.decode(hf(text)["input_ids"], skip_special_tokens=skip)


def test_sizes_and_special_ids_come_from_the_files(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(reference(folder))
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


@pytest.mark.parametrize("newer", [True, False])
def test_named_tokens_come_from_the_file_that_transformers_reads(tmp_path: Path, newer: bool) -> None:
    path = write_small_tokenizer(tmp_path) / "tokenizer_config.json"
    config: dict[str, object] = {"eos_token": "<|endoftext|>", "bos_token": None, "unk_token": "<|endoftext|>"}
    path.write_text(json.dumps(config | ({"added_tokens_decoder": {}} if newer else {})))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}')
    tokenizer, hf = Tokenizer.load(tmp_path), reference(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (hf.bos_token_id, hf.eos_token_id) == ((None, 0) if newer else (1, 2))
    assert tokenizer_eos_ids(tmp_path) == (hf.eos_token_id,)


def test_tokens_of_the_configuration_win_as_in_transformers(tmp_path: Path) -> None:
    path = write_small_tokenizer(tmp_path) / "tokenizer_config.json"
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    tokens = {
        "2": {"content": "<|im_end|>", **plain, "rstrip": True},
        "700": {"content": "<think>", **plain},
        "702": {"content": "<tool>", **plain, "special": False},
        "703": {"content": "<end>", **plain},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    tokenizer, hf = Tokenizer.load(tmp_path), reference(tmp_path)
    for text in [*TEXTS, "<|im_end|> \n x", "a<think>b</think> <tool> c<end>"]:
        ids = hf(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            shown = hf.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip) == tokenizer.stream(skip).step(ids) == shown
    assert set(tokenizer.special_tokens) == {*SPECIAL, "<think>", "<end>"}
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode_plain("<think><|im_end|><end>"))
    path.write_text(json.dumps({"added_tokens_decoder": {"2": {"content": 3}}}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder must hold tokens by id"):
        Tokenizer.load(tmp_path)


WRITTEN = {"__type": "AddedToken", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
"""The form of a token that older versions of transformers wrote."""


@pytest.mark.parametrize(
    ("further", "changes"),
    [
        (set(), {}),
        (set(), {"eos_token": {"content": "<|im_end|>", **WRITTEN}}),
        ({"</think>"}, {"pad_token": "</think>"}),
        ({"</think>"}, {"image_token": "</think>"}),
        ({"def"}, {"extra_special_tokens": {"audio_token": "def"}, "additional_special_tokens": ["import"]}),
        ({"def"}, {"additional_special_tokens": ["def", "</think>"], "extra_special_tokens": []}),
        (set(), {"extra_special_tokens": [{"content": "def", **WRITTEN}], "additional_special_tokens": None}),
        (set(), {"additional_special_tokens": "def", "mask_token": 3}),
    ],
)
def test_named_tokens_are_special_as_in_transformers(tmp_path: Path, further: set[str], changes: dict[str, object]) -> None:
    """Whatever tokenizer.json says: here it lists no token but <|endoftext|> and the tags, and all as ordinary ones."""
    path = write_small_tokenizer(tmp_path) / "tokenizer_config.json"
    size = Tokenizer.load(tmp_path).vocab_size
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    listed = [{**token, "special": False} for token in definition["added_tokens"] if not token["content"].startswith("<|im")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition | {"added_tokens": listed}))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    tokenizer = Tokenizer.load(tmp_path)
    assert set(tokenizer.special_tokens) == {*SPECIAL, *further}
    assert tokenizer.vocab_size == size
    if changes.get("additional_special_tokens") == "def":  # transformers refuses it
        return
    hf = reference(tmp_path)
    for text in [*TEXTS, "<|im_end|> \n x", "a<think>b</think> def<|endoftext|>"]:
        ids = hf(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == tokenizer.stream().step(ids) == hf.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode_plain("<|im_start|></think><|im_end|>"))
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[0] == tokenizer.bos_id


def test_tokenizer_eos_ids_reads_the_files_alone(tmp_path: Path, folder: Path) -> None:
    assert tokenizer_eos_ids(folder) == (2,)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert tokenizer_eos_ids(tmp_path) == (), "no file names one"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert tokenizer_eos_ids(tmp_path) == (0,)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": 3}')
    with pytest.raises(ConfigError, match="cannot be read"):
        tokenizer_eos_ids(tmp_path)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*SPECIAL, "<think>", "</think>", "<", "|", ">", "im_end", " ", "é", "a"]), max_size=12))
def test_plain_text_never_makes_control_tokens(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode_plain(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert max(ids, default=0) < tokenizer.vocab_size - 2, "a soft control token was made"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_encoding_equals_transformers_without_control_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    hf = reference(folder)
    for text in TEXTS:
        if not any(token in text for token in SPECIAL):
            assert tokenizer.encode_plain(text) == hf(text, add_special_tokens=False)["input_ids"]
        else:
            assert tokenizer.encode_plain(text) == hf(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


# ---- decoding as tokens arrive


def _chunks(ids: list[int], seed: int) -> list[list[int]]:
    rng, at, out = random.Random(seed), 0, []
    while at < len(ids):
        step = rng.randint(1, 4)
        out.append(ids[at : at + step])
        at += step
    return out


def _streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], skip: bool = True) -> list[str]:
    decoder = tokenizer.stream(skip)
    return [decoder.step(chunk) for chunk in chunks]


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_equals_decoded_text(tokenizer: Tokenizer, seed: int) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            pieces = _streamed(tokenizer, _chunks(ids, seed), skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip)
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_stream_as_they_decode(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
    text = "".join(_streamed(tokenizer, _chunks(ids, seed)))
    whole = tokenizer.decode(ids)
    assert text == whole or (whole.startswith(text) and set(whole[len(text) :]) == {"\ufffd"})


def test_an_incomplete_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 😀")
    assert "".join(_streamed(tokenizer, [[i] for i in ids[:-1]])) == "ok "


def test_a_real_replacement_character_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\ufffdb\ufffd")
    assert "".join(_streamed(tokenizer, [[i] for i in ids])) == "a\ufffdb\ufffd"


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


# ---- vocabularies that mark spaces and fall back to bytes


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-like vocabulary: bytes, letters and a few words."""
    return Tokenizer.load(write_llama_tokenizer(tmp_path_factory.mktemp("spaced"), "normalizer"))


@pytest.mark.parametrize("text", ["the cat", "the the  the", "東京 the 😀", "</s> the"])
def test_byte_fallback_streams_as_it_decodes(spaced: Tokenizer, text: str) -> None:
    ids = spaced.encode_plain(text)
    assert spaced.special_ids.isdisjoint(ids)
    assert spaced.decode(ids) == text
    for seed in range(4):
        pieces = _streamed(spaced, _chunks(ids, seed))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_invalid_bytes_do_not_stall_the_stream(spaced: Tokenizer) -> None:
    lone = spaced.encode_plain("東")[-1]
    pieces = _streamed(spaced, [[lone]] * 100)
    assert len("".join(pieces)) >= 90


@pytest.mark.parametrize("cut", range(1, 9))
def test_continued_text_starts_at_the_end_of_the_prompt(spaced: Tokenizer, tokenizer: Tokenizer, cut: int) -> None:
    """Leading spaces count, and a character whose first bytes end the prompt comes out whole."""
    for one in (spaced, tokenizer):
        ids = one.encode_plain("the the 東京 the 😀 the")
        decoder = one.stream(prompt_tail=ids[:cut][-8:])
        shown = "".join(decoder.step([i]) for i in ids[cut:])
        assert one.stream().step(ids[:cut]) + shown == one.decode(ids)


def test_text_without_a_prompt_loses_its_first_space(spaced: Tokenizer) -> None:
    the = spaced.encode_plain("the")
    assert "".join(_streamed(spaced, [the, the])) == "the the"
    assert spaced.stream(prompt_tail=the).step(the) == " the"
    assert spaced.stream(prompt_tail=[1]).step(the) == "the", "after the begin token alone nothing is continued"


# ---- Llama-2's tokenizers

LLAMA_TEXTS = [*TEXTS, "the the", " the", "<s>the", "<s> the</s> cat", "a</s>b</s> c", "<s>[inst] hi [/inst] ok</s><s>the", "▁the"]


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always"])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "options", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}, {"legacy": True, "add_prefix_space": True}]
)
def test_llama_tokenizers_place_spaces_like_transformers(tmp_path: Path, scheme: str, kind: str, options: dict[str, bool]) -> None:
    folder = write_llama_tokenizer(tmp_path, scheme, tokenizer_class=kind, **options)
    tokenizer, hf = Tokenizer.load(folder), reference(folder)
    for text in LLAMA_TEXTS:
        for special in (True, False):
            assert tokenizer.encode(text, special) == hf(text, add_special_tokens=special)["input_ids"], text
        ids = hf(text)["input_ids"]
        assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_mistral_tokenizers_are_used_unchanged(tmp_path: Path) -> None:
    write_llama_tokenizer(tmp_path, "always", tokenizer_class="LlamaTokenizer", legacy=False)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer, hf = Tokenizer.load(tmp_path), reference(tmp_path)
    for text in LLAMA_TEXTS:
        assert tokenizer.encode(text) == hf(text)["input_ids"], text


# ---- cost and loading


@pytest.mark.parametrize("unit", ["hello wörld 123, ", "<|im_end|> x"])
def test_encoding_is_linear_in_the_text(tokenizer: Tokenizer, unit: str) -> None:
    """Counted, not timed: 16 times the text makes 16 times the tokens, in pieces that are processed apart."""
    small, large = (tokenizer.encode_plain(unit * n) for n in (100, 1600))
    assert len(large) == 16 * len(small)


def test_streaming_cost_is_constant_per_token(spaced: Tokenizer) -> None:
    """The window that a step decodes stays small, whatever came before."""
    decoder = spaced.stream()
    for _ in range(500):
        decoder.step(spaced.encode_plain("the cat"))
    assert isinstance(decoder, WindowStream)
    assert len(decoder.window) <= 16


def test_synthetic_tokenizer_round_trips_every_id(tmp_path: Path) -> None:
    write_synthetic_tokenizer(tmp_path, 5000)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 5000
    ids = [random.Random(0).randrange(256, 5000) for _ in range(300)]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode(tokenizer.encode("Any téxt at all: 😀!")) == "Any téxt at all: 😀!"
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant:"


def test_missing_and_broken_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer-path"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is only a Git LFS pointer to the file; fetch the file with 'git lfs pull'"):
        Tokenizer.load(tmp_path)


def test_the_tokenizer_needs_no_torch() -> None:
    import subprocess

    modules = "runtime.text.tokenizer, runtime.model_files.model_source"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


DEEP = "[" * 100_000


@pytest.mark.parametrize("definition", ["[]", "{}", "null", '{"model": 3}', '{"model": {"type": "BPE"}, "decoder": 5}', DEEP])
def test_a_definition_that_is_none_is_a_config_error(tmp_path: Path, definition: str) -> None:
    (tmp_path / "tokenizer.json").write_text(definition)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_companion_nested_too_deeply_is_a_config_error(tmp_path: Path, name: str) -> None:
    (write_small_tokenizer(tmp_path) / name).write_text(DEEP)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(tmp_path)


def test_ids_without_text_are_not_held_for_ever(spaced: Tokenizer) -> None:
    """A model may have more ids than its tokenizer, and a bias of the logits can ask for them."""
    decoder, cat = spaced.stream(), spaced.encode_plain("the cat")
    assert isinstance(decoder, WindowStream)
    shown = decoder.step(cat)
    for _ in range(100):
        shown += decoder.step((10**6,))
        assert len(decoder.window) <= 16
    assert shown + decoder.step(cat) == spaced.decode([*cat, *cat])
