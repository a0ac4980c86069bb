"""SGLang's front-end language on a server: sglang_frontend.py URL. Prints what was generated, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang


@sglang.function
def ask(s: Any, country: str) -> None:
    s += sglang.user(f"What is the capital of {country}?")
    s += sglang.assistant(sglang.gen("answer", max_tokens=8, temperature=0))


@sglang.function
def choose(s: Any) -> None:
    s += "The capital of France is" + sglang.select("city", choices=[" Paris", " Rome", " Oslo"])


@sglang.function
def branch(s: Any) -> None:
    s += "Here are two tips for staying healthy:"
    forks = s.fork(2)
    for index, fork in enumerate(forks):
        fork += f" Tip {index + 1}:" + sglang.gen("tip", max_tokens=6, temperature=0)
    s += forks[0]["tip"] + forks[1]["tip"]


@sglang.function
def matched(s: Any) -> None:
    s += "The year of the moon landing is " + sglang.gen("year", max_tokens=8, temperature=0, regex="[0-9]{4}")


backend = sglang.RuntimeEndpoint(sys.argv[1])
sglang.set_default_backend(backend)
streamed = "".join(ask.run("France", stream=True).text_iter("answer"))  # read at once: the client drops the text of a stream that is over
print(
    json.dumps(
        {
            "answer": ask.run("France")["answer"],
            "streamed": streamed,
            "batch": [state["answer"] for state in ask.run_batch([{"country": name} for name in ("France", "Italy")])],
            "city": choose.run()["city"],
            "tips": branch.run().text(),
            "year": matched.run()["year"],
        }
    )
)
