"""The share of greedy tokens that two servers agree on, given the same preceding text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmark.server import Server
from runtime.bench.datasets import embedded_prompts


@dataclass(frozen=True)
class Answer:
    """One greedy answer: the ids of the prompt and of the output."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Agreement:
    """Number of compared tokens, equal tokens, and answers that are equal as a whole."""

    tokens: int
    same: int
    whole_answers: int


def greedy_answers(server: Server, count: int, max_tokens: int) -> list[Answer]:
    """Answers to the held-out chat prompts, with the model's chat template."""
    answers = []
    for line in embedded_prompts()[:: max(80 // count, 1)][:count]:
        messages = [{"role": "user", "content": line["prompt"]}]
        prompt = server.post("/tokenize", {"messages": messages})["tokens"]
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens}}
        answers.append(Answer(prompt, server.post("/generate", body)["output_ids"]))
    return answers


def compare(server: Server, answers: list[Answer]) -> Agreement:
    """Compare the greedy choice of `server` at every position of the given answers, always given the answer's own preceding tokens.

    So a different token counts once; in free generation all later tokens would differ too.
    """
    tokens = same = whole = 0
    for answer in answers:
        hits = [top == token for top, token in zip(_choices(server, answer), answer.output, strict=True)]
        tokens, same, whole = tokens + len(hits), same + sum(hits), whole + all(hits)
    return Agreement(tokens, same, whole)


def _choices(server: Server, answer: Answer) -> list[int]:
    """The most likely id at each position of the answer."""
    body: dict[str, Any] = {"input_ids": answer.prompt + answer.output, "return_logprob": True, "top_logprobs_num": 1}
    body |= {"logprob_start_len": len(answer.prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    tops = server.post("/generate", body)["meta_info"]["input_top_logprobs"]
    return [top[0][1] for top in tops]
