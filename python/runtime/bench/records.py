"""What one measured request asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt to send.

    Attributes:
        prompt: text, or token ids.
        prompt_len: tokens in the prompt as the client counts them; 0 when it cannot count.
        output_len: most tokens to generate.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int


@dataclass(slots=True)
class Chunk:
    """One piece of a stream. `tokens` is how many it carried, None where the server did not say."""

    at: float
    text: str
    tokens: int | None


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request; times are seconds of the client's clock.

    Attributes:
        start: when it was asked, before its connection was made.
        latency: from asking until its last token arrived.
        ttft: from asking until its first token arrived.
        itl: seconds between tokens; a chunk of n tokens counts as n equal gaps.
        prompt_len: as the server counted it, else as the client did.
        verify_steps: verification passes of speculation, where the server says.
        error: why it failed; empty for a success.
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
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether the answer came to its end without an error."""
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where the answer came in one piece."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 and len(self.chunks) > 1 else None
