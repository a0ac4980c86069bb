"""How the tokens of one request are chosen and when they end, and the bounds of these values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from annotated_types import Interval

from runtime.errors import InvalidField, UnknownToken

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 1 << 18
MAX_DRAFT_STEPS = 63
MAX_TOKENS = (1 << 31) - 1
TOP_K_ALL = 1 << 30
"""The `top_k` that keeps every token; padding rows hold it too."""

NewTokens = Annotated[int, Interval(ge=1, le=MAX_TOKENS)]
MinNewTokens = Annotated[int, Interval(ge=0, le=MAX_TOKENS)]
Temperature = Annotated[float, Interval(ge=0, le=100)]
TopP = Annotated[float, Interval(gt=0, le=1)]
TopK = Annotated[int, Interval(ge=-1, le=TOP_K_ALL)]
MinP = Annotated[float, Interval(ge=0, le=1)]
Penalty = Annotated[float, Interval(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Interval(gt=0, le=10)]
Bias = Annotated[float, Interval(ge=-100, le=100)]
DraftSteps = Annotated[int, Interval(ge=0, le=MAX_DRAFT_STEPS)]
Int64 = Annotated[int, Interval(ge=-(1 << 63), le=(1 << 63) - 1)]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


class GrammarSpec(msgspec.Struct, frozen=True):
    """The text of a grammar and the language it is written in."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request, under SGLang's names.

    `temperature == 0` means greedy. `top_k <= 0` means all tokens. If `seed` is None, the server draws one.
    `no_stop_trim` leaves the stop string or the stop token that ends the output in the text.
    `shown_token_ids` are control tokens that appear in the text even if `skip_special_tokens` leaves out the others. Text from a token of
    `header_begins` up to one of `header_ends` is not searched for stop strings.

    At most one of `json_schema` (the schema as JSON text), `regex`, `ebnf` and `structural_tag` (JSON text) is given: the
    output then follows that grammar. With `grammar_after` the output is free until these tokens appear in it one after
    the other, and the grammar starts after them.

    Of each draft window at most `speculative_num_steps` drafts are accepted; 0 decodes without drafts.
    """

    max_new_tokens: NewTokens = 128
    min_new_tokens: MinNewTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculative_num_steps: int | None = None
    shown_token_ids: tuple[int, ...] = ()
    header_begins: tuple[int, ...] = ()
    header_ends: tuple[int, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    grammar_after: tuple[int, ...] = ()

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar that the output follows; None for free text."""
        return next((GrammarSpec(kind, text) for kind in GRAMMAR_KINDS if (text := getattr(self, kind)) is not None), None)

    @property
    def draft_limit(self) -> int:
        """Drafts of a window that it takes at most."""
        return MAX_DRAFT_STEPS if self.speculative_num_steps is None else self.speculative_num_steps

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self, vocab_size: int) -> None:
        """Check what depends on the model, and the size of the grammar, which may be made from an object or from tools.

        The request bodies hold all other bounds.

        Raises:
            InvalidField: a token id is outside the vocabulary, or the grammar is too long; `param` is the field's name here.
        """
        for name in ("logit_bias", "stop_token_ids", "shown_token_ids", "grammar_after"):
            check_token_ids(name, getattr(self, name) or (), vocab_size)
        if (grammar := self.grammar) is not None and len(grammar.text) > MAX_GRAMMAR_CHARS:
            limit = f"a string of at most {MAX_GRAMMAR_CHARS} characters"
            raise InvalidField(grammar.kind, grammar.text, limit, subject="The whole grammar")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values of fields that are absent from a request; None for the default of `SamplingParams`."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> SamplingDefaults:
        """The defaults among the entries of `raw`; null counts as left out.

        Raises:
            InvalidField: a value is out of bounds.
        """
        given = {name: raw[name] for name in cls.__struct_fields__ if raw.get(name) is not None}
        for name, value in given.items():
            check_number(name, value, _NUMBERS[name])
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def over(self, others: SamplingDefaults) -> SamplingDefaults:
        """These, and `others` where these have none."""
        return SamplingDefaults(**{**others.given(), **self.given()})

    def complete(self) -> dict[str, float]:
        """Every field, with the value of `SamplingParams` where these have none."""
        plain = SamplingParams()
        return {name: getattr(plain, name) for name in self.__struct_fields__} | self.given()


NO_DEFAULTS = SamplingDefaults()
"""OpenAI's defaults, which are those of `SamplingParams`."""


_NUMBERS: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(SamplingParams, include_extras=True).items() if get_origin(hint) is Annotated
}


def check_number(field: str, value: object, kind: Any) -> None:
    """Raise `InvalidField` unless `value` is a number of `kind`, one of the types above. A boolean is not a number."""
    whole, bounds = get_args(kind)
    # The comparisons refuse NaN, and they hold for integers too large for a float.
    if isinstance(value, bool) or not isinstance(value, int if whole is int else (int, float)) or not _within(value, bounds):
        raise InvalidField(field, value, number_limit(whole is int, bounds))


def check_token_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `UnknownToken` unless all ids are in the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UnknownToken(field, token, vocab_size)


def number_limit(whole: bool, bounds: Interval) -> str:
    """The bounds in words, such as "a number above 0 and at most 1"."""
    kind = "an integer" if whole else "a number"
    return f"{kind} between {bounds.ge} and {bounds.le}" if bounds.gt is None else f"{kind} above {bounds.gt} and at most {bounds.le}"


def _within(value: float, bounds: Interval) -> bool:
    low: Any = bounds.ge if bounds.gt is None else bounds.gt
    high: Any = bounds.le
    return low <= value <= high and value != bounds.gt
