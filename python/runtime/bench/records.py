"""One measured request: what is sent and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt to send.

    Attributes:
        prompt: text, or token ids.
        prompt_len: tokens in the prompt, counted by the client; 0 if it cannot count.
        output_len: maximum number of tokens to generate.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int


@dataclass(slots=True)
class Chunk:
    """One piece of a stream; `tokens` is None if the server did not report its number of tokens."""

    at: float
    text: str
    tokens: int | None


@dataclass(slots=True)
class RequestRecord:
    """The outcome of one request; times are seconds of `time.perf_counter`.

    Attributes:
        start: when the request began, before connecting.
        latency: from `start` to the last token.
        ttft: from `start` to the first token.
        itl: seconds between tokens; a chunk of n tokens counts as n equal gaps.
        prompt_len: counted by the server, else by the client.
        verify_steps: verify passes of speculation, if the server reports them.
        error: why the request failed; empty on success.
    """

    prompt_len: int
    output_len: int = 0
    start: float = 0.0
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    cached_tokens: int = 0
    verify_steps: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if the answer arrived in one piece."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 and len(self.chunks) > 1 else None
