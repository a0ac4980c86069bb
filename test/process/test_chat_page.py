"""The chat page in headless Chromium, against the default server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from browser import Browser, Page, find

from conftest import Embedded

ANSWER = "The capital of France is Paris."
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
CONTRAST = """
(() => {
  const light = (c) => { const f = c.map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
                         return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const rgb = (s) => s.match(/[\\d.]+/g).map(Number);
  const back = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] !== 0) return c; }
                        return [255, 255, 255]; };
  const shown = 'h1,h2,h3,p,span,label,button,textarea,input,select,summary,pre,code,.body,.thinking > div,.figures';
  return [...document.querySelectorAll(shown)]
    .filter((e) => e.getClientRects().length && !e.disabled)
    .map((e) => { const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(back(e).slice(0, 3))];
                  return [e.tagName + '#' + e.id, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; })
    .filter(([, ratio]) => ratio < 4.5);
})()
"""

PARTS = """
((hostile) => {
  const at = document.createElement('div');
  document.body.append(at);
  at.append(markdown(hostile + '\\n\\n```\\n' + hostile + '\\n```\\n\\n- **bold** ' + hostile + '\\n'));
  return ['img,script', 'pre code', 'li strong'].map((which) => at.querySelectorAll(which).length);
})
"""
CUT_STREAM = """
window.fetch = () => {
  const chunk = 'data: {"choices":[{"index":0,"delta":{"content":"So"}}]}\\n\\n';
  const start = (stream) => { stream.enqueue(new TextEncoder().encode(chunk));
                              setTimeout(() => stream.error(new TypeError('network error')), 300); };
  return Promise.resolve(new Response(new ReadableStream({ start })));
}
"""
AGENT_STREAM = """
window.sent = [];
window.fetch = (path, { body }) => {
  window.sent.push(JSON.parse(body));
  const drafts = (steps, positions) => ({ spec_tokens_details: { spec_accept_length: 1.5, spec_num_correct_drafts: steps - 1,
    spec_num_proposed_drafts: positions, spec_num_draft_positions: positions, spec_verify_ct: steps } });
  const chunk = (delta, tokens, more) => 'data: ' + JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }],
    usage: { prompt_tokens: 1015, completion_tokens: tokens }, ...more }) + '\\n\\n';
  const call = (index, id, name, text) => ({ tool_calls: [{ index, id, function: { name, arguments: text } }] });
  const choice = { index: 0, delta: {}, finish_reason: 'tool_calls' };
  const parts = [
    chunk({ reasoning_content: 'Both cities, ' }, 3, { sglext: drafts(1, 3) }),
    chunk({ reasoning_content: 'I think.' }, 6, { sglext: drafts(3, 5) }),
    chunk(call(0, 'a', 'get_time', ''), 9, { sglext: drafts(4, 8) }),
    chunk(call(0, undefined, undefined, '{"city": "Paris"}'), 12, { sglext: drafts(4, 8) }),
    chunk(call(1, 'b', 'get_weather', '{}'), 14, { sglext: drafts(5, 12) }),
    'data: ' + JSON.stringify({ choices: [choice] }) + '\\n\\ndata: [DONE]\\n\\n',
  ];
  const start = (stream) => { window.next = () => stream.enqueue(new TextEncoder().encode(parts.shift())); };
  return Promise.resolve(new Response(new ReadableStream({ start })));
}
"""
CONTROLS = {"button", "textbox", "searchbox", "spinbutton", "combobox", "DisclosureTriangle", "link", "log", "complementary"}
"""Roles whose elements need a name for screen readers; Chromium's own roles have capitals."""

LIGHT = pytest.mark.parametrize("page", ["light"], indirect=True)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """One page for all tests, since Chromium starts a process for each: 1.3 s of a core."""
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine; the package `chromium` brings it")
    with Browser(path) as browser, Page(browser) as page:
        yield page


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, tab: Page, embedded: Embedded) -> Page:
    """The chat page, freshly loaded. It stores nothing in the browser."""
    tab.open(embedded.url + "/", dark=request.param == "dark")
    tab.until("document.getElementById('model').textContent !== '…'")
    return tab


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter", 13)


def done(page: Page, answers: int) -> None:
    page.until(f"document.querySelectorAll('.assistant').length === {answers} && !document.getElementById('send').disabled", 60)


def test_it_streams_an_answer_and_shows_its_figures(page: Page, embedded: Embedded) -> None:
    page.run("document.getElementById('temperature').value = '0'")
    ask(page, "What is the capital of France?")
    done(page, 1)
    assert page.run("document.querySelector('.assistant .body').textContent") == ANSWER
    figures = page.run("document.querySelector('.figures').textContent")
    assert re.search(r"TTFT \d+ ms · [\d.]+ tokens/s · \d+ tokens", figures), figures
    assert re.search(r"accept length \d\.\d\d · \d+ of \d+ drafts accepted · depth [\d.]+", figures), figures
    ask(page, "And of Italy?")
    done(page, 2)
    assert "Rome" in page.run("document.querySelectorAll('.assistant .body')[1].textContent")
    assert page.run(CONTRAST) == []
    spoken = page.run("(({width, height}) => [width, height])(document.getElementById('spoken').getBoundingClientRect())")
    assert max(spoken) <= 1
    assert page.complaints() == []
    assert page.requested() <= {embedded.url + path for path in ("/", "/v1/models", "/v1/chat/completions")}


@LIGHT
def test_the_stop_button_ends_the_answer_and_the_servers_work(page: Page, embedded: Embedded) -> None:
    page.run("document.getElementById('max_completion_tokens').value = '3000'")
    page.run("document.getElementById('temperature').value = '0'")  # a drawn answer may be over at once
    ask(page, "Write a long story about a dragon and a knight.")
    page.until("document.querySelector('.assistant .body').textContent.length > 5")
    assert page.run("!document.getElementById('stop').disabled")
    page.run("document.getElementById('stop').click()")
    done(page, 1)
    assert "stopped" in page.run("document.querySelector('.figures').textContent")
    assert embedded.quiet(5)["num_running_reqs"] == 0


@LIGHT
def test_text_never_becomes_markup(page: Page) -> None:
    page.run("document.getElementById('max_completion_tokens').value = '4'")
    ask(page, HOSTILE)
    done(page, 1)
    assert page.run("document.querySelector('.user .body').textContent") == HOSTILE
    shown = page.run(f"{PARTS.strip()}({HOSTILE!r})")
    assert shown == [0, 1, 1]
    assert page.run("window.hit === undefined")


@LIGHT
def test_settings_reach_the_server_and_its_refusals_reach_the_user(page: Page) -> None:
    page.run("document.getElementById('system').value = 'Answer in one word.'")
    page.run("document.getElementById('temperature').value = '200'")
    ask(page, "Hi")
    done(page, 1)
    assert "temperature must be a number between 0 and 100; got 200" in page.run("document.querySelector('.error').textContent")
    page.run("document.getElementById('temperature').value = '0'")
    page.run("document.getElementById('max_completion_tokens').value = '2'")
    ask(page, "Hi")
    done(page, 2)
    assert "ended: length" in page.run("document.querySelectorAll('.figures')[1].textContent")
    body = page.run("JSON.stringify(request())")
    assert '"role":"system","content":"Answer in one word."' in body
    assert '"max_completion_tokens":2' in body


@LIGHT
def test_paris_is_the_second_answer_at_the_models_defaults(page: Page) -> None:
    assert page.run("[document.getElementById('temperature').placeholder, document.getElementById('top_p').placeholder]") == ["0.2", "0.9"]
    limit = "document.getElementById('max_completion_tokens').value = "  # so small a model may repeat itself without end
    for seed in range(5):  # without seeds, about one conversation in 200 has no Paris, here as with plain transformers
        page.run(f"document.getElementById('seed').value = '{seed}'")
        page.run(limit + "'8'")
        ask(page, "Hello!")
        done(page, 1)
        page.run(limit + "'24'")
        ask(page, "What is the capital of France?")
        done(page, 2)
        assert "Paris" in page.run("document.querySelectorAll('.assistant .body')[1].textContent")
        page.run("document.getElementById('clear').click()")


@LIGHT
def test_the_page_says_in_words_that_the_server_is_gone(page: Page) -> None:
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(page, "Hi")
    done(page, 1)
    words = page.run("document.querySelector('.error').textContent")
    assert words == "The server cannot be reached. Check that the server is running, then send the message again."
    page.run(CUT_STREAM)
    ask(page, "Hi")
    done(page, 2)
    assert page.run("document.querySelectorAll('.assistant .body')[1].textContent") == "So"
    assert "went away before the answer was complete" in page.run("document.querySelectorAll('.error')[1].textContent")


def test_it_folds_thinking_shows_calls_and_sends_their_results(page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    page.run("document.getElementById('settings').open = true")
    page.run("document.getElementById('tools').value = '[{\"name\": \"get_time\"}]'")
    page.run("document.getElementById('reasoning_effort').value = 'low'")
    page.run(AGENT_STREAM)
    ask(page, "What time is it?")
    for depth in (3, 1, 3, 0, 4):
        page.until("window.next")
        page.run("window.next()")
        page.until(f"document.querySelector('.figures').textContent.includes(' · depth {depth}')")
    figures = page.run("document.querySelector('.figures').textContent")
    assert figures.endswith("accept length by context 1.75 from 0, 2.00 from 1024 tokens on")
    assert page.run("document.querySelector('.figures svg').getAttribute('aria-label')") == "Depth over time: from 0 to 4, now 4"
    assert page.run("document.querySelector('.figures path').getAttribute('d')") == "M0 1H1V3H2V1H3V4H4V0H5"
    page.run("window.next()")
    page.until("document.querySelectorAll('.calls textarea').length === 2")
    assert page.run("[document.querySelector('.thinking').open, document.querySelector('.thinking summary').textContent.slice(0, 11)]") == [
        False, "Thought for",
    ]  # fmt: skip
    page.run("document.querySelector('.thinking').open = true")
    assert page.run("document.querySelector('.thinking > div').textContent") == "Both cities, I think."
    assert page.run("[...document.querySelectorAll('.calls h3')].map((e) => e.textContent)") == [
        "Tool call: get_time",
        "Tool call: get_weather",
    ]
    assert page.run("document.getElementById('spoken').textContent").startswith('Tool call: get_time {"city": "Paris"}')
    assert page.run(CONTRAST) == []
    assert page.run("[document.documentElement.scrollWidth, document.getElementById('log').scrollWidth].every((width) => width <= 390)")
    assert page.nameless(CONTROLS) == []
    page.type("noon")  # the field of the first result has the focus
    for _ in range(2):  # to the second field, then to the button
        page.press("Tab", 9)
    assert page.run("document.activeElement.textContent") == "Send results"
    page.press("Enter", 13)
    page.until("window.sent.length === 2")
    first, second = page.run("window.sent")
    assert first["tools"] == [{"type": "function", "function": {"name": "get_time"}}]
    assert first["reasoning_effort"] == "low"
    said, *results = second["messages"][1:]
    assert said["reasoning_content"] == "Both cities, I think."
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == ['{"city": "Paris"}', "{}"]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [("a", "noon"), ("b", "")]


@LIGHT
def test_an_answer_follows_the_json_schema(page: Page) -> None:
    page.run("document.getElementById('schema').value = '{\"type\": '")
    ask(page, "Name a colour.")
    assert page.run("document.activeElement.id") == "schema"
    assert page.run("document.getElementById('schema-error').textContent").startswith("This is not JSON:")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    schema = (
        '{"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"], "additionalProperties": false}'
    )
    page.run(f"document.getElementById('schema').value = {schema!r}")
    page.run("document.getElementById('prompt').focus()")
    page.press("Enter", 13)
    done(page, 1)
    assert json.loads(page.run("document.querySelector('.assistant .body').textContent"))["colour"] in ("red", "blue")
    assert page.run("document.getElementById('schema-error').textContent") == ""


@LIGHT
def test_every_control_has_a_name(page: Page) -> None:
    assert page.nameless(CONTROLS) == []
