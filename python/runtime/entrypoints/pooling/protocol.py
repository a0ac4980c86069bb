"""Request and response bodies of the pooling endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BaseModel, Field, model_validator

from runtime.entrypoints.http.body import Body, Int64, Name, Text, TokenId, TokenIds, Unused, items
from runtime.entrypoints.http.field_rules import TRUE, any_of, has, lacks
from runtime.entrypoints.openai.protocol import ModelName
from runtime.errors import RequestError
from runtime.pooling import MAX_LABELS
from runtime.sampling_params import MAX_TOKENS

MAX_INPUTS = 2048
"""OpenAI's limit of inputs per call."""

Inputs = Annotated[
    Text | TokenIds | Annotated[list[Text | TokenIds], items(1, MAX_INPUTS)],
    Field(description=f"a string, an array of token ids, or an array of 1 to {MAX_INPUTS} of these, none of them empty"),
]
Items = Annotated[
    str | Annotated[list[str | list[TokenId]], items(1, MAX_INPUTS)],
    Field(description=f"a string, or an array of 1 to {MAX_INPUTS} strings or arrays of token ids"),
]
LabelIds = Annotated[list[TokenId], items(1, MAX_LABELS)]


# ---- requests


class PoolingBody(Body):
    """The fields that the pooling endpoints share."""

    cache_salt: Name = ""
    model: ModelName | None = None
    priority: Int64 = 0
    rid: Unused = None
    user: Unused = None


class EmbeddingBody(PoolingBody):
    """A body of /v1/embeddings."""

    input: Inputs
    dimensions: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def many(self) -> bool:
        """Whether `input` is a list of inputs."""
        return not isinstance(self.input, str) and not isinstance(self.input[0], int)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per input."""
        given: Any = self.input
        return given if self.many else [given]


class ScoreBody(PoolingBody):
    """A body of /v1/score, in SGLang's form. Query and items are all text or all token ids."""

    RULES = (
        any_of(
            has(query={"type": "string"}, items={"type": ["string", "array"], "items": {"type": "string"}}),
            has(query={"type": "array"}, items={"type": "array", "items": {"type": "array"}}),
        ),
        any_of(has(query={"minItems": 1, "minLength": 1}), has(items={"minLength": 1, "items": {"minItems": 1, "minLength": 1}})),
        any_of(lacks(temperature={"enum": [1, None]}), has(apply_softmax=TRUE)),
    )

    query: Annotated[str | list[TokenId], Field(description="a string or an array of token ids")]
    items: Items
    label_token_ids: LabelIds
    apply_softmax: bool = False
    item_first: bool = False
    temperature: Annotated[float, Interval(gt=0, le=100)] = 1.0

    @model_validator(mode="after")
    def _check_fields(self) -> ScoreBody:
        given = [self.items] if isinstance(self.items, str) else self.items
        if len({isinstance(part, str) for part in (self.query, *given)}) > 1:
            raise RequestError("query and items must be all strings or all arrays of token ids.", "items")
        if not self.query and not all(given):
            raise RequestError("query and item must not both be empty.", "items")
        if self.temperature != 1.0 and not self.apply_softmax:
            raise RequestError("temperature requires apply_softmax: true.", "temperature")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: query and item joined, in the requested order."""
        given: Any = [self.items] if isinstance(self.items, str) else self.items
        query: Any = self.query
        return [item + query if self.item_first else query + item for item in given]


class RerankBody(PoolingBody):
    """A body of /rerank and /v1/rerank, in SGLang's form."""

    query: Text
    documents: Annotated[list[Text], items(1, MAX_INPUTS)]
    return_documents: bool = True
    top_n: Annotated[int, Interval(ge=1, le=MAX_TOKENS)] | None = None


# ---- responses


class PromptUsage(BaseModel):
    """Token counts of a call that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """One embedding: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Len(1)]


class EmbeddingList(BaseModel):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Scores(BaseModel):
    """The answer of /v1/score: for each item, one number per label."""

    object: Literal["scoring"]
    scores: list[list[float]]
    model: str
    usage: PromptUsage


class RerankMeta(BaseModel):
    """Token counts of one document's prompt."""

    prompt_tokens: int


class Rank(BaseModel):
    """One document of /rerank and /v1/rerank; `index` is its position in the request."""

    index: int
    score: float
    document: str | None = None
    meta_info: RerankMeta
