"""Official clients, unchanged, have one conversation each: a schema, two parallel tools, streaming, thinking, leaving early.

Large clients are imported by their own test: every process that runs tests imports all files of tests, and would take seconds more.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import client_script as script
import llm
import openai
import pytest
from browser import Browser, Page, find
from client_script import ANSWER, ASK, CALLS, CAPITAL, CITIES, LONG, MODEL, RESULTS, THOUGHT, TOOLS, WHO, Person, calls_of, user
from llm.default_plugins.openai_models import Chat
from llm.parts import ToolCallPart, ToolResultPart

from conftest import Embedded, serve_embedded
from event_loop import in_event_loop

HERE = Path(__file__).parent
OTHERS = Path(sys.prefix) / "clients"
"""Where scripts/setup_clients.sh puts clients that need other versions of the same packages, and Node's."""


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    with serve_embedded("--reasoning-parser", "qwen3", "--speculative-algorithm", "NGRAM") as server:
        yield server


class Tools:
    """The two tools as functions, and how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def get_weather(self, city: str) -> str:
        """The weather in a city"""
        self.calls.append(("get_weather", city))
        return RESULTS["get_weather"]

    def get_time(self, city: str) -> str:
        """The time in a city"""
        self.calls.append(("get_time", city))
        return RESULTS["get_time"]

    def functions(self) -> list[Callable[[str], str]]:
        """Plain functions: some clients read no bound methods."""

        def get_weather(city: str) -> str:
            """The weather in a city"""
            return self.get_weather(city)

        def get_time(city: str) -> str:
            """The time in a city"""
            return self.get_time(city)

        return [get_weather, get_time]


def test_openai_chat(server: Embedded) -> None:
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": 80}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        parsed = chat.parse(messages=[*script.person_turns(), user(WHO)], response_format=Person, **ask).choices[0].message.parsed
        assert parsed is not None
        assert parsed.name
        called: Any = {"messages": [*script.tool_turns(), user(ASK)], "tools": script.tools(), **ask}
        whole = chat.create(**called).choices[0]
        assert whole.finish_reason == "tool_calls"
        with chat.stream(**called) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            assert calls_of((call.function.name, call.function.arguments) for call in choice.message.tool_calls) == CALLS
        thought = chat.create(messages=[*script.thought_turns(), user(CAPITAL)], **ask)
        message: Any = thought.choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
        assert thought.usage is not None
        assert thought.usage.completion_tokens_details is not None
        assert (thought.usage.completion_tokens_details.reasoning_tokens or 0) > 0
        left: Any = chat.create(model=MODEL, messages=[user(LONG)], stream=True, extra_body={"ignore_eos": True})  # type: ignore[list-item]
        next(iter(left))
        left.close()
    server.quiet()


def test_openai_responses(server: Embedded) -> None:
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 80}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        responses = client.responses
        parsed = responses.parse(input=[*script.person_turns(), user(WHO)], text_format=Person, **ask).output_parsed
        assert parsed is not None
        called: Any = {"input": [*items(script.tool_turns()), user(ASK)], "tools": flat_tools(), **ask}
        whole = responses.create(**called)
        with responses.stream(**called) as stream:
            streamed = stream.get_final_response()
        for answer in (whole, streamed):
            assert calls_of((item.name, item.arguments) for item in answer.output if item.type == "function_call") == CALLS
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": RESULTS[item.name]}
            for item in whole.output
            if item.type == "function_call"
        ]
        told = responses.create(input=results, previous_response_id=whole.id, tools=flat_tools(), **ask)  # type: ignore[arg-type]
        assert "sunny in Paris" in told.output_text
        assert responses.retrieve(told.id).output_text == told.output_text
        thought: Any = responses.create(input=[*script.thought_turns(), user(CAPITAL)], **ask)
        assert (thought.output[0].content[0].text, thought.output_text) == (THOUGHT, ANSWER)
        left: Any = responses.create(model=MODEL, input=LONG, stream=True, extra_body={"ignore_eos": True})
        first = next(iter(left))
        assert responses.cancel(first.response.id).status == "cancelled"
        assert list(left)[-1].response.status == "cancelled"
    server.quiet()


def items(turns: list[dict[str, Any]]) -> list[Any]:
    """Chat messages as items of /v1/responses."""
    done: list[Any] = []
    for turn in turns:
        if turn["role"] == "tool":
            done.append({"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]})
        elif "tool_calls" in turn:
            done += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in turn["tool_calls"]]
        else:
            done.append(turn)
    return done


def flat_tools() -> list[Any]:
    """The tools as /v1/responses has them."""
    return [{"type": "function", **tool["function"]} for tool in script.tools()]


def test_anthropic(server: Embedded) -> None:
    import anthropic

    tools: Any = [{"name": name, "description": text, "input_schema": script.parameters()} for name, text in TOOLS.items()]
    turns: list[Any] = []
    for city in CITIES:
        used = [{"type": "tool_use", "id": f"{name}_{city}", "name": name, "input": {"city": city}} for name in TOOLS]
        results = [{"type": "tool_result", "tool_use_id": f"{name}_{city}", "content": RESULTS[name]} for name in TOOLS]
        turns += [user(f"Weather and time in {city}?"), {"role": "assistant", "content": used}, {"role": "user", "content": results}]
        turns.append({"role": "assistant", "content": f"It is sunny in {city} and the time is noon."})
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages: Any = client.messages
        assert messages.parse(messages=[*script.person_turns(), user(WHO)], output_format=Person, **ask).parsed_output.name
        called = {"messages": [*turns, user(ASK)], "tools": tools, **ask}
        whole = messages.create(**called)
        with messages.stream(**called) as stream:
            streamed = stream.get_final_message()
        for answer in (whole, streamed):
            assert answer.stop_reason == "tool_use"
            assert calls_of((block.name, block.input) for block in answer.content) == CALLS
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with messages.stream(messages=[*script.thought_turns(), user(CAPITAL)], thinking=thinking, **ask) as stream:
            thought, text = stream.get_final_message().content
        assert (thought.thinking, text.text) == (THOUGHT, ANSWER)
        assert messages.count_tokens(model=MODEL, messages=[user(LONG)]).input_tokens > 5
        with messages.stream(model=MODEL, max_tokens=8000, messages=[user(LONG)]) as stream:
            next(iter(stream.text_stream))
    server.quiet()


def test_langchain(server: Embedded) -> None:
    from langchain_core.messages import convert_to_messages
    from langchain_openai import ChatOpenAI

    known: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**known, max_completion_tokens=80)
    found = chat.with_structured_output(Person, method="json_schema").invoke(convert_to_messages([*script.person_turns(), user(WHO)]))
    assert isinstance(found, Person)
    bound, turns = chat.bind_tools(script.tools()), convert_to_messages([*script.tool_turns(), user(ASK)])
    whole: Any = bound.invoke(turns)
    streamed: Any = None
    for chunk in bound.stream(turns):
        streamed = chunk if streamed is None else streamed + chunk
    for answer in (whole, streamed):
        assert calls_of((call["name"], call["args"]) for call in answer.tool_calls) == CALLS
    thinking = ChatOpenAI(**known, max_completion_tokens=40, use_responses_api=True)
    content: Any = thinking.invoke(convert_to_messages([*script.thought_turns(), user(CAPITAL)])).content
    assert (content[0]["content"][0]["text"], content[1]["text"]) == (THOUGHT, ANSWER)
    left = ChatOpenAI(**known).stream(LONG)
    next(left)
    left.close()  # type: ignore[attr-defined]
    server.quiet()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pydantic-ai needs Python 3.11")
def test_pydantic_ai(server: Embedded) -> None:
    import pydantic_ai
    import pydantic_ai.messages as parts
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    settings: Any = {"temperature": 0, "max_tokens": 80}
    structured = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person), model_settings=settings)
    assert structured.run_sync(WHO, message_history=ai_history(script.person_turns())).output.name
    tools = Tools()
    agent = pydantic_ai.Agent(model, model_settings=settings, tools=[tools.get_weather, tools.get_time])
    assert "sunny in Paris" in agent.run_sync(ASK, message_history=ai_history(script.tool_turns())).output
    assert set(tools.calls) == CALLS
    plain = pydantic_ai.Agent(model, model_settings=settings)
    thought, text = plain.run_sync(CAPITAL, message_history=ai_history(script.thought_turns())).new_messages()[-1].parts
    assert isinstance(thought, parts.ThinkingPart)
    assert isinstance(text, parts.TextPart)
    assert (thought.content, text.content) == (THOUGHT, ANSWER)

    async def leave() -> None:
        async with pydantic_ai.Agent(model, model_settings={"temperature": 0}).run_stream(LONG) as run:
            async for _ in run.stream_text(delta=True, debounce_by=None):
                break

    asyncio.run(leave())
    server.quiet()


def ai_history(turns: list[dict[str, Any]]) -> list[Any]:
    """Chat messages as pydantic-ai keeps them."""
    import pydantic_ai.messages as parts

    done: list[Any] = []
    for turn in turns:
        content = turn["content"]
        if turn["role"] == "user":
            done.append(parts.ModelRequest(parts=[parts.UserPromptPart(content)]))
        elif turn["role"] == "tool":
            name = turn["tool_call_id"].rpartition("_")[0]
            done.append(parts.ModelRequest(parts=[parts.ToolReturnPart(name, content, turn["tool_call_id"])]))
        elif "tool_calls" in turn:
            calls = [(call["function"], call["id"]) for call in turn["tool_calls"]]
            done.append(parts.ModelResponse(parts=[parts.ToolCallPart(f["name"], f["arguments"], name) for f, name in calls]))
        else:
            done.append(parts.ModelResponse(parts=[parts.TextPart(content)]))
    return done


@in_event_loop
async def test_openai_agents(server: Embedded) -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    tools = Tools()
    settings = ModelSettings(temperature=0, max_tokens=80)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        known: Any = {"name": "a", "model": OpenAIResponsesModel(MODEL, client), "model_settings": settings}
        structured: Any = [*script.person_turns(), user(WHO)]
        assert isinstance((await Runner.run(Agent(**known, output_type=Person), structured)).final_output, Person)
        agent = Agent(**known, tools=[function_tool(tool) for tool in tools.functions()])
        assert "sunny in Paris" in (await Runner.run(agent, [*items(script.tool_turns()), user(ASK)], max_turns=3)).final_output
        assert set(tools.calls) == CALLS
        thought: Any = await Runner.run(Agent(**known), [*script.thought_turns(), user(CAPITAL)])  # type: ignore[list-item]
        assert thought.new_items[0].raw_item.content[0].text == THOUGHT
        assert thought.final_output == ANSWER
        left = Runner.run_streamed(Agent(**{**known, "model_settings": ModelSettings(temperature=0)}), LONG)
        async for event in left.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                left.cancel()
    server.quiet()


def test_llm(server: Embedded) -> None:
    model = Chat("talon", model_name=MODEL, api_base=f"{server.url}/v1", supports_schema=True, supports_tools=True)
    model.key = "none"
    tools, schema = Tools(), script.parameters()  # with schemas from signatures, processors differ in what this small model writes
    given = [llm.Tool(each.__name__, TOOLS[each.__name__], schema, each) for each in tools.functions()]
    settings: Any = {"temperature": 0, "max_tokens": 80}
    structured = model.prompt(messages=llm_history([*script.person_turns(), user(WHO)]), schema=Person, stream=False, **settings)
    assert Person.model_validate_json(structured.text()).name
    chain = model.chain(messages=llm_history([*script.tool_turns(), user(ASK)]), tools=given, options=settings)
    assert "sunny in Paris" in chain.text()  # streamed
    assert set(tools.calls) == CALLS
    assert model.prompt(messages=llm_history([*script.thought_turns(), user(CAPITAL)]), **settings).text() == ANSWER
    left: Any = iter(model.prompt(LONG, temperature=0))
    assert len(list(islice(left, 3))) == 3
    left.close()
    server.quiet()


def llm_history(turns: list[dict[str, Any]]) -> list[Any]:
    """Chat messages as llm has them."""
    done: list[Any] = []
    for turn in turns:
        if turn["role"] == "user":
            done.append(llm.user(turn["content"]))
        elif turn["role"] == "tool":
            name = turn["tool_call_id"].rpartition("_")[0]
            done.append(llm.tool_message(ToolResultPart(name=name, output=turn["content"], tool_call_id=turn["tool_call_id"])))
        elif "tool_calls" in turn:
            calls = [(call["function"], call["id"]) for call in turn["tool_calls"]]
            given = [(f["name"], json.loads(f["arguments"]), name) for f, name in calls]
            done.append(llm.assistant(*(ToolCallPart(name=f, arguments=arguments, tool_call_id=name) for f, arguments, name in given)))
        else:
            done.append(llm.assistant(turn["content"]))
    return done


@pytest.mark.parametrize("client", ["litellm", "instructor"])
def test_clients_that_need_other_versions(server: Embedded, client: str) -> None:
    python = OTHERS / "bin" / "python"
    if not python.exists():
        pytest.skip("run scripts/setup_clients.sh")
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(HERE)}
    run([str(python), str(HERE / "clients" / "python_clients.py"), client, server.url], env)
    server.quiet()


def test_openai_in_node(server: Embedded) -> None:
    if not (OTHERS / "node_modules" / "openai").exists():
        pytest.skip("Node is not installed, or scripts/setup_clients.sh did not run")
    turns = {"person": script.person_turns(), "tool": script.tool_turns(), "thought": script.thought_turns()}
    told = {"turns": turns, "tools": script.tools(), "schema": Person.model_json_schema(), "who": WHO, "ask": ASK, "capital": CAPITAL}
    copy = OTHERS / "openai_node.mjs"  # imports are looked up from the folder of the file
    copy.write_text((HERE / "clients" / "openai_node.mjs").read_text())
    said = json.loads(run(["node", str(copy), f"{server.url}/v1", MODEL, json.dumps(told)], dict(os.environ)))
    assert Person.model_validate_json(said["person"]).name
    for calls in (said["calls"], said["streamed"]):
        assert calls_of(calls) == CALLS
    assert (said["reasoning"], said["answer"], said["response"]) == (THOUGHT, ANSWER, ANSWER)
    server.quiet()


def test_chat_page(server: Embedded) -> None:
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine; the package `chromium` brings it")

    def talk(page: Page, turns: list[dict[str, Any]], text: str, answers: int) -> str:
        page.run(f"turns = {json.dumps(turns)}")
        page.run("document.getElementById('temperature').value = 0; document.getElementById('prompt').focus()")
        page.type(text)
        page.press("Enter", 13)
        page.until(f"document.querySelectorAll('.assistant').length === {answers} && !running", 60)
        return page.run("[...document.querySelectorAll('.assistant .body')].at(-1).textContent")

    with Browser(path) as browser, Page(browser) as page:
        page.open(server.url + "/")
        assert talk(page, script.thought_turns(), CAPITAL, 1) == ANSWER
        assert page.run("document.querySelector('.thinking:not([open]) > div').textContent") == THOUGHT
        page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps(script.tools()))}")
        talk(page, script.tool_turns(), ASK, 2)
        shown = page.run("[...document.querySelectorAll('.calls pre')].map((e) => [e.previousSibling.textContent, e.textContent])")
        assert calls_of((title.removeprefix("Tool call: "), text) for title, text in shown) == CALLS
        for name in RESULTS:
            page.run(f"pending.find(({{ field }}) => field.labels[0].textContent === 'Result of {name}').field.value = '{RESULTS[name]}'")
        page.run("document.querySelector('.calls button').click()")
        page.until("document.querySelectorAll('.assistant').length === 3 && !running", 60)
        assert "sunny in Paris" in page.run("[...document.querySelectorAll('.assistant .body')].at(-1).textContent")
        assert page.complaints() == []
    server.quiet()


def run(command: list[str], env: dict[str, str]) -> str:
    """The output of a program that must succeed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
