"""Acceptance probabilities by draft position, read from --speculative-synthetic-accept-length."""

from __future__ import annotations

from runtime.errors import ConfigError

FLAG = "--speculative-synthetic-accept-length"


def synthetic_acceptance(text: str, num_steps: int, mean_steps: int | None = None) -> tuple[float, ...]:
    """Conditional acceptance by draft position, from a mean accept length X or from K probabilities with commas.

    X counts the bonus token, so 1 <= X <= K + 1. Every position gets the same p, where p + p^2 + ... + p^K = X - 1. With
    `mean_steps`, X is the mean accept length at that depth instead of K.

    Raises:
        ConfigError: the text has another form, or values are out of range.
    """
    try:
        values = [float(part) for part in text.removesuffix(",").split(",")]
    except ValueError as error:
        raise ConfigError(f"{FLAG} must be a number, or {num_steps} probabilities with commas; got {text!r}.") from error
    if "," not in text:
        mean_steps = mean_steps or num_steps
        if not 1.0 <= values[0] <= mean_steps + 1:
            raise ConfigError(f"{FLAG} must be from 1 to {mean_steps + 1} with {mean_steps} steps; got {text}.")
        return (_equal_acceptance(values[0] - 1.0, mean_steps),) * num_steps
    if len(values) != num_steps or not all(0.0 <= value <= 1.0 for value in values):
        raise ConfigError(f"{FLAG} with commas must list {num_steps} probabilities, one per step; got {text!r}.")
    return tuple(values)


def _equal_acceptance(drafts: float, num_steps: int) -> float:
    """The p with p + p^2 + ... + p^K = `drafts`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, num_steps + 1)) < drafts:
            low = middle
        else:
            high = middle
    return (low + high) / 2
