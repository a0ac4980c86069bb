"""The most frequent tokens of a model's own text become a token map."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import check_acceptance, hot_tokens, tune
from runtime.config.flag_parser import parse
from runtime.errors import BAD_USE, INTERRUPTED, ServingError
from runtime.hot_tokens import covered, engine_options, hottest, save
from runtime.models.token_map import load_token_map


def test_the_most_frequent_tokens_are_kept_with_the_ends_of_text() -> None:
    counts = Counter({7: 5, 3: 2, 9: 2, 4: 1})
    assert hottest(counts, 3, ()) == [3, 7, 9]
    assert hottest(counts, 3, (50,)) == [3, 7, 50]
    assert hottest(counts, 7, (50,)) == [0, 1, 3, 4, 7, 9, 50]
    assert covered([[7, 7, 4], [1]], [3, 7]) == 0.5
    assert covered([], [3]) == 0.0


def test_the_file_is_what_the_server_reads(tmp_path: Path) -> None:
    save([3, 7, 9], tmp_path / "map.pt")
    assert load_token_map(tmp_path / "map.pt").equal(torch.tensor([3, 7, 9]))


def test_drafts_are_off_unless_asked_for() -> None:
    assert engine_options(parse(["--model-path", "m"]).args) == {"speculative_algorithm": "none", "model_path": "m"}
    asked = engine_options(parse(["--model-path", "m", "--speculative-algorithm", "NGRAM"]).args)
    assert asked["speculative_algorithm"] == "NGRAM"


@pytest.mark.parametrize("argv", [["--size", "0"], ["--tokens", "-1"], ["--temperature", "3"], ["--output", "/nowhere/else/map.pt"]])
def test_values_out_of_range_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert hot_tokens.main(argv) == BAD_USE
    assert argv[0] in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(hot_tokens, "Engine", lambda **options: started.append(options))
    for output in (tmp_path, tmp_path / ("x" * 256)):
        assert hot_tokens.main(["--output", str(output)]) == BAD_USE
        assert f"--output {output} cannot be written" in capsys.readouterr().err
    assert not started


def test_a_full_disk_is_named() -> None:
    with pytest.raises(ServingError, match="--output /dev/full cannot be written: no space left on device"):
        save([1, 2], Path("/dev/full"))


WRONG = [
    *(["--prompts", "/nowhere/prompts"], ["--check"], ["--size", "x"], ["--temperature", "hot"]),
    *(["--size", "1000000"], ["--max-new-tokens", "64", "--context-length", "64"]),
]


@pytest.mark.parametrize("argv", WRONG)
def test_flags_are_checked_before_the_engine_starts(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(hot_tokens, "Engine")
    assert hot_tokens.main(["--output", str(tmp_path / "map.pt"), *argv]) == BAD_USE
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", [hot_tokens, tune, check_acceptance])
def test_ctrl_c_ends_a_command_without_a_traceback(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "parse_shared", interrupt)
    assert command.main([]) == INTERRUPTED
    assert capsys.readouterr().err == ""


class Fake:
    """An engine whose answers repeat their seed."""

    def __init__(self, **options: Any) -> None:
        from types import SimpleNamespace

        self.asked: list[Any] = []
        self.config = SimpleNamespace(model=SimpleNamespace(model_path="m", tokenizer_path="m", chat_template=None, context_length=64))

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert len({one["seed"] for one in sampling_params}) == len(sampling_params)
        return [{"output_ids": [one["seed"] % 5, 11]} for one in sampling_params]


def test_the_model_writes_until_there_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(hot_tokens, "Engine", Fake)
    monkeypatch.setattr(hot_tokens, "load_hf_config", lambda _folder: SimpleNamespace(vocab_size=40, eos_ids=(30,), max_context_len=64))
    monkeypatch.setattr(hot_tokens.Tokenizer, "load", lambda *_args, **_options: None)
    monkeypatch.setattr(hot_tokens, "tokenised", lambda _tokenizer, prompts: [[1, 2]] * len(prompts))
    path = tmp_path / "map.pt"
    assert hot_tokens.main(["--size", "7", "--tokens", "300", "--max-new-tokens", "8", "--output", str(path)]) == 0
    assert load_token_map(path).tolist() == [0, 1, 2, 3, 4, 11, 30]
    out = capsys.readouterr().out
    assert "7 of 40 tokens, from 270 in 135 answers" in out
    assert "they cover 100.00% of 30 tokens in 15 other answers" in out
