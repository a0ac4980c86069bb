"""Renders conversations, starts them, and reads their answers as typed updates. All chat protocols use it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.openai.answer_reader import AnswerReader
from runtime.entrypoints.openai.chat_updates import ChatUpdate
from runtime.entrypoints.openai.messages import rendered_messages
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.token_splitter import TokenSplitter
from runtime.entrypoints.openai.usage import TokenCounts, UsageCounter
from runtime.errors import FieldNeedsFlag, GrammarError
from runtime.managers.generation import RequestOptions
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.parsers.output_format import OutputFormat, OutputRequest
from runtime.parsers.registry import pick_think_format, pick_tool_format
from runtime.sampling_params import GRAMMAR_KINDS
from runtime.text.decode_stream import PROMPT_TAIL

log = logging.getLogger(__name__)


class Chat:
    """The running answers to one conversation.

    Attributes:
        name: the request id for `/abort_request`.
        group: the generations of the answers; close it to abort those that still run.
        prompt_ids: the token ids of the rendered conversation.
    """

    def __init__(
        self, name: str, group: Generations, readers: list[AnswerReader], *, thinks: bool, splitters: Sequence[TokenSplitter] = ()
    ) -> None:
        self.name, self.group = name, group
        self.prompt_ids = group.each[0].prompt_ids
        self._readers, self._splitters = readers, splitters
        self._thinks = thinks
        self._counter = UsageCounter(group)

    def counts(self) -> TokenCounts:
        """The token counts so far."""
        counts = self._counter.counts()
        return replace(counts, reasoning_tokens=sum(each.reasoning_tokens for each in self._readers)) if self._thinks else counts

    async def updates(self) -> AsyncGenerator[ChatUpdate, None]:
        """Yield the updates of all answers as they arrive; raise the first error."""
        async with aclosing(self.group.updates()) as updates:
            async for prompt, update in updates:
                self._counter.add(prompt, update)
                parts = self._splitters[update.index].split(update) if self._splitters else (update,)
                for part in parts:
                    yield self._readers[update.index].read(part)

    async def answers(self) -> list[ChatUpdate]:
        """Return all answers once they have ended. Each is one update, because the chat does not stream."""
        async with aclosing(self.updates()) as updates:
            answers = {update.index: update async for update in updates}
        return [answers[index] for index in range(len(answers))]


class Chats:
    """Starts conversations.

    Raises:
        ConfigError: the configured parsers do not match the model.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._format = output_format(manager)

    async def start(self, body: ChatBody, *, by_token: bool = False) -> Chat:
        """Render a conversation and start its answers. With `by_token`, each of their updates has one token.

        Raises:
            RequestError: a field is out of bounds, or the conversation is too long.
            QueueFull, QueuedTokensFull: the queue cannot hold its answers.
        """
        name = f"chatcmpl-{uuid.uuid4().hex}"
        tools = body.tool_request()
        prompt_ids = await self.prompt_ids(body)
        sampling = body.sampling(body.limit, body.min_tokens, self._manager.config.model.default_sampling_params)
        output = OutputRequest(
            tools.schemas,
            sampling.stop,
            body.separate_reasoning,
            tools.rule,
            tools.parallel,
            continues=body.continue_final_message,
            thinks=body.thinks,
        )
        tools_name = "functions" if body.functions else "tools"
        grammar_names = body.grammar_names() if tools.rule == "free" else dict.fromkeys(map(str, GRAMMAR_KINDS), tools_name)
        try:
            adapted = self._format.adapt(sampling, output, prompt_ids)
        except GrammarError as error:
            error.param = body.grammar_names()[error.param or ""]
            raise
        call = Call(
            name=name,
            prompts=[prompt_ids],
            sampling=[adapted],
            rids=[name],
            options=RequestOptions(
                n=body.n,
                fill_context=body.fill_context,
                stream=body.stream,
                top_logprobs=body.top,
                priority=body.priority,
                cache_salt=body.cache_salt,
                continues_prompt=body.continue_final_message,
                running_counts=body.wants_running_counts,
            ),
            params={"prompt": "messages", "input_ids": "messages", "max_new_tokens": body.limit_name, **grammar_names},
        )
        parsers = [self._format.parser(output, prompt_ids) for _ in range(body.n)]
        readers = [AnswerReader(parser, tools.parallel, body.stream_reasoning) for parser in parsers]
        group = await Generations.start(self._manager, call)
        tail = prompt_ids[-PROMPT_TAIL:] if body.continue_final_message else []
        stream = partial(self._manager.tokenizer.stream, adapted.skip_special_tokens, tail, adapted.shown_token_ids)
        splitters = [TokenSplitter(stream(), sampling.stop) for _ in range(body.n)] if by_token else []
        return Chat(name, group, readers, thinks=self._format.thinks, splitters=splitters)

    async def prompt_ids(self, body: ChatBody, *, any_length: bool = False) -> list[int]:
        """Token ids of the conversation and of the start of an answer. With `any_length` they may exceed the context."""
        if body.chat_template is not None and not self._manager.config.server.trust_request_chat_template:
            raise FieldNeedsFlag("chat_template", "--trust-request-chat-template")
        return await self._manager.encoder.encode_chat(
            rendered_messages(body.messages),
            any_length=any_length,
            tools=[function.rendered() for function in body.tool_request().described],
            call_form=self._format.call_form,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.template_kwargs() or None,
            chat_template=body.chat_template,
        )


def output_format(manager: TokenizerManager) -> OutputFormat:
    """The configured output format, or the model's own."""
    config, architecture, tokenizer = manager.config.model, manager.model_config.architecture, manager.tokenizer
    template = tokenizer.chat_template or ""
    tools = pick_tool_format(config.tool_call_parser, architecture, tokenizer.tool_template or "", tokenizer.describes_tools)
    thinking = pick_think_format(config.reasoning_parser, architecture, template, tokenizer.short_chat)
    log.info("tool calls are read as %s, thinking as %s", tools, thinking or "part of the text")
    return OutputFormat(tokenizer, tools, thinking)
