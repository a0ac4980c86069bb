// The conversation of OpenAI's client for Node: node openai_node.mjs URL MODEL JSON. Prints what was said, as JSON.
import OpenAI from "openai";

const [url, model, told] = process.argv.slice(2);
const { turns, tools, schema, who, ask, capital } = JSON.parse(told);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const user = (content) => ({ role: "user", content });
const known = { model, temperature: 0, max_completion_tokens: 80 };
const callsOf = (message) => message.tool_calls.map((call) => [call.function.name, call.function.arguments]);

const format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
const person = await client.chat.completions.create({ ...known, messages: [...turns.person, user(who)], response_format: format });
const called = { ...known, messages: [...turns.tool, user(ask)], tools };
const calls = await client.chat.completions.create(called);
const streamed = await client.chat.completions.stream(called).finalChatCompletion();
const thought = await client.chat.completions.create({ ...known, messages: [...turns.thought, user(capital)] });
const response = await client.responses.create({ model, temperature: 0, input: [...turns.thought, user(capital)] });

const left = await client.chat.completions.create({ model, messages: [user("Count to one hundred.")], stream: true, ignore_eos: true });
for await (const _ of left) break; // leaving the loop aborts the request

console.log(
  JSON.stringify({
    person: person.choices[0].message.content,
    calls: callsOf(calls.choices[0].message),
    streamed: callsOf(streamed.choices[0].message),
    reasoning: thought.choices[0].message.reasoning_content,
    answer: thought.choices[0].message.content,
    response: response.output_text,
  }),
);
