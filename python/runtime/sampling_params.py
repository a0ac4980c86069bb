"""What one request asked for: how its tokens are chosen, and when they end."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runtime.errors import InvalidField

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
TOP_K_ALL = 1 << 30
"""The `top_k` that keeps every token; also what a padding row holds."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request, named as SGLang names it.

    `temperature == 0` means greedy. `top_k <= 0` means all. `seed` None lets the server pick one.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidField` for the first value outside its bounds."""
        _flag("ignore_eos", self.ignore_eos)
        _flag("skip_special_tokens", self.skip_special_tokens)
        _whole("max_new_tokens", self.max_new_tokens, 1, 1 << 31)
        _whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, TOP_K_ALL)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        self._check_stops(vocab_size)
        self._check_bias(vocab_size)

    def _check_stops(self, vocab_size: int) -> None:
        _many("stop", self.stop, "texts")
        _many("stop_token_ids", self.stop_token_ids, "token ids")
        if len(self.stop) > MAX_STOPS:
            raise InvalidField("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidField("stop", text, f"a text of 1 to {MAX_STOP_CHARS} characters")
            if not _encodable(text):
                raise InvalidField("stop", text, "made of whole characters, without half of a surrogate pair")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_IDS} ids")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, vocab_size - 1)

    def _check_bias(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidField("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidField("logit_bias", f"{len(bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        for token, value in bias.items():
            _whole("logit_bias", token, 0, vocab_size - 1)
            _real("logit_bias", value, -100.0, 100.0)


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidField(field, value, "True or False")


def _many(field: str, value: object, what: str) -> None:
    if not isinstance(value, tuple):
        raise InvalidField(field, value, f"a tuple of {what}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(field, value, f"a whole number from {low} to {high}")


def _real(field: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    # Comparisons refuse NaN too, and take whole numbers that no float holds.
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fine or (open_low and value == low):
        raise InvalidField(field, value, f"a number {'above' if open_low else 'from'} {low} {'up ' if open_low else ''}to {high}")
