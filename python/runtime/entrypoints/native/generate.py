"""POST /generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from starlette.responses import Response

from runtime.entrypoints.http.rendering import encoded, off_loop
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import DONE, EventStream, event
from runtime.entrypoints.native.output import Outputs
from runtime.entrypoints.native.protocol import GenerateBody
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.managers.tokenizer_manager import TokenizerManager


class GenerateApi:
    """Generates in SGLang's native form."""

    def __init__(self, manager: TokenizerManager, model: ServedModel) -> None:
        self._manager, self._model = manager, model

    async def generate(self, body: GenerateBody) -> Response:
        """Generate. Answers with an object, with an array for several prompts or n > 1, or with a stream of outputs so far."""
        self._model.check(body.model)
        outputs = await Outputs.start(self._manager, body)
        if body.stream:
            return EventStream(_events(outputs), outputs.group.close)
        async with outputs.group as group:
            texts = await group.texts()
        pairs = [(prompt, text) for prompt, of_prompt in enumerate(texts) for text in of_prompt]
        cells = sum(outputs.cells(*pair) for pair in pairs)
        shown = await off_loop(cells, lambda: [encoded(outputs.of(*pair)) for pair in pairs])
        return json_response(shown[0] if body.single else shown)


async def _events(outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """Yield events, each with the whole text so far, as SGLang does."""
    single, n = outputs.body.single, outputs.body.n
    async for prompt, text in outputs.growing():
        output = await off_loop(outputs.cells(prompt, text), partial(outputs.of, prompt, text))
        yield event(output if single else {**output, "index": prompt * n + text.index})
    yield DONE
