"""The conversation that every client has with the embedded model: its words, its tools and its schema.

The model is small. It calls both tools, thinks and answers in the schema because earlier turns of the conversation did.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

CITIES = ("Madrid", "Rome", "Oslo")


class Person(BaseModel):
    """The structured output."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=120)


WHO = "Name a person from France, with an age."
ASK = "Weather and time in Paris?"
CAPITAL = "What is the capital of France?"
LONG = "Count to one hundred."
MODEL = "SmolLM2-135M-Instruct"


def parameters() -> dict[str, Any]:
    """The JSON schema of both tools."""
    city = {"type": "string", "enum": ["Paris", *CITIES]}
    return {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}


TOOLS = {"get_weather": "The weather in a city", "get_time": "The time in a city"}
RESULTS = {"get_weather": "sunny", "get_time": "noon"}


def tools() -> list[dict[str, Any]]:
    """Both tools in the form of chat completions."""
    given = [{"name": name, "description": text, "parameters": parameters()} for name, text in TOOLS.items()]
    return [{"type": "function", "function": function} for function in given]


def tool_turns() -> list[dict[str, Any]]:
    """Earlier turns that called both tools at once, as chat messages."""
    done: list[dict[str, Any]] = []
    for city in CITIES:
        arguments = json.dumps({"city": city})
        calls = [{"id": f"{name}_{city}", "type": "function", "function": {"name": name, "arguments": arguments}} for name in TOOLS]
        results = [{"role": "tool", "tool_call_id": f"{name}_{city}", "content": RESULTS[name]} for name in TOOLS]
        done += [user(f"Weather and time in {city}?"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]
        done.append({"role": "assistant", "content": f"It is sunny in {city} and the time is noon."})
    return done


def person_turns() -> list[dict[str, Any]]:
    """Earlier turns that answered in the schema, as chat messages."""
    done: list[dict[str, Any]] = []
    for country, name, age in (("Spain", "Carmen", 31), ("Italy", "Luca", 54)):
        done += [
            user(f"Name a person from {country}, with an age."),
            {"role": "assistant", "content": json.dumps({"name": name, "age": age})},
        ]
    return done


def thought_turns() -> list[dict[str, Any]]:
    """Earlier turns that thought, as chat messages."""
    done: list[dict[str, Any]] = []
    for country, city in (("Spain", "Madrid"), ("Italy", "Rome")):
        thought = f"<think>{city} is the capital of {country}.</think>{city}."
        done += [user(f"What is the capital of {country}?"), {"role": "assistant", "content": thought}]
    return done


def thought_people() -> list[dict[str, Any]]:
    """`person_turns` with a thought before each answer."""
    turns = person_turns()
    for country, turn in zip(("Spain", "Italy"), turns[1::2], strict=True):
        turn["content"] = f"<think>The person is from {country}.</think>{turn['content']}"
    return turns


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


THOUGHT, ANSWER = "Paris is the capital of France.", "Paris."
CALLS = {("get_weather", "Paris"), ("get_time", "Paris")}


def calls_of(pairs: Any) -> set[tuple[str, str]]:
    """(name, city) of each call, from names and JSON arguments."""
    return {(name, (json.loads(given) if isinstance(given, str) else given)["city"]) for name, given in pairs}
