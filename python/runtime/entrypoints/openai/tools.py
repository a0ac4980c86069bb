"""Tools in request bodies: definitions, choices, and calls in earlier messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import Field

from runtime.entrypoints.http.body import Body, Name, Unused, items
from runtime.errors import RequestError

MAX_TOOLS = 512

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$", description='1 to 128 letters, digits, or any of "_-.:/"')]
JsonSchema = Annotated[dict[str, Any], Field(description="a JSON schema, as an object")]


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool = False

    def rendered(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class FunctionReference(Body):
    """The name of a function."""

    name: FunctionName


class ToolReference(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolReference], items(1, MAX_TOOLS)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Body):
    """The function of an earlier call; its arguments are JSON text or an object."""

    name: Annotated[str, Len(1, 256)]
    arguments: str | dict[str, Any] = ""

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


class CalledTool(Body):
    """A call in an earlier assistant message. Some clients repeat the `index` that the stream had."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Unused = None

    def rendered(self) -> dict[str, Any]:
        """The call in the form that chat templates expect."""
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": self.function.text}}


Tools = Annotated[list[Tool], items(0, MAX_TOOLS)]
Functions = Annotated[list[Function], items(0, MAX_TOOLS)]
CalledTools = Annotated[list[CalledTool], items(0, MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ToolReference | AllowedChoice
FunctionChoice = Literal["none", "auto"] | FunctionReference


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request and what the model may do with them.

    Attributes:
        described: the functions that the prompt describes; empty if the model may call none.
        allowed: the functions that the model may call.
        required: whether the model must call one.
        parallel: whether the model may call several.
    """

    described: Sequence[Function] = ()
    allowed: Sequence[Function] = ()
    required: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters of each function that may be called."""
        return {function.name: function.parameters or {} for function in self.allowed}

    @property
    def rule(self) -> Literal["free", "strict", "required"]:
        """How strictly the grammar constrains calls."""
        return "required" if self.required else "strict" if any(function.strict for function in self.allowed) else "free"

    @classmethod
    def of(cls, functions: Sequence[Function], choice: ToolChoice, parallel: bool, field: str) -> ToolRequest:
        """Apply a choice. `field` is the name of the choice's field in the request.

        Raises:
            RequestError: the choice names a tool that is not in the request.
        """
        if len({function.name for function in functions}) < len(functions):
            raise RequestError("tools must not hold two functions of the same name.", "tools")
        if choice == "none" or (choice == "auto" and not functions):
            return cls()
        if not functions:
            raise RequestError(f"{field} requires tools.", field)
        if isinstance(choice, str):
            return cls(functions, functions, choice == "required", parallel)
        references = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else [choice]
        names = [reference.function.name for reference in references]
        for name in names:
            if all(name != function.name for function in functions):
                raise RequestError(f"{field} names the function {json.dumps(name)}, which is not among the tools.", field)
        allowed = [function for function in functions if function.name in names]
        required = not isinstance(choice, AllowedChoice) or choice.allowed_tools.mode == "required"
        return cls(functions, allowed, required, parallel and isinstance(choice, AllowedChoice))
