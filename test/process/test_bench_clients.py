"""Load generators, evaluations and front ends of other projects run unchanged against the embedded model.

They are installed by `scripts/bench_clients.sh`, which then runs this file; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_script import MODEL

from conftest import Embedded

BIN = Path(sys.prefix) / "bench-clients" / "bin"
SCRIPTS = Path(__file__).parent / "clients"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
PROMPTS, TOKENS = 4, 8
"""Requests of a load generator, and tokens of each answer."""
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Norway": "Oslo"}

pytestmark = [
    pytest.mark.skipif(not BIN.exists(), reason="scripts/bench_clients.sh installs these clients"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def server(embedded: Embedded) -> Iterator[Embedded]:
    yield embedded
    embedded.quiet()


@pytest.fixture
def model(embedded: Embedded, tmp_path: Path) -> Path:
    """The folder of the served model, as a path below `tmp_path`, where the clients run."""
    link = tmp_path / "model"
    link.symlink_to(httpx.get(f"{embedded.url}/get_model_info", timeout=10).json()["tokenizer_path"])
    return link


def run(folder: Path, *words: str | Path, offline: Mapping[str, str] = OFFLINE) -> str:
    """The output of a client that must succeed, run in `folder`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {**offline, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(BIN / words[0]), *map(str, words[1:])], cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def written(folder: Path, pattern: str) -> Any:
    """The one JSON file that a client wrote."""
    (file,) = folder.rglob(pattern)
    return json.loads(file.read_text())


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_sglang_bench_serving(server: Embedded, model: Path, tmp_path: Path, backend: str) -> None:
    lengths = ["--random-input-len", "16", "--random-output-len", str(TOKENS), "--random-range-ratio", "1"]
    load = ["--dataset-name", "random-ids", *lengths, "--num-prompts", str(PROMPTS), "--max-concurrency", "2", "--flush-cache"]
    where = ["--backend", backend, "--base-url", server.url, "--model", model, "--served-model-name", MODEL]
    run(tmp_path, "python", "-m", "sglang.bench_serving", *where, *load, "--output-file", "out.jsonl", "--disable-tqdm")
    figures = written(tmp_path, "out.jsonl")
    assert (figures["completed"], figures["total_output_tokens"]) == (PROMPTS, PROMPTS * TOKENS)
    assert figures["mean_ttft_ms"] > 0
    assert figures["accept_length"] >= 1


def test_sglang_front_end(server: Embedded, tmp_path: Path) -> None:
    said = json.loads(run(tmp_path, "python", SCRIPTS / "sglang_frontend.py", server.url).splitlines()[-1])
    assert "Paris" in said["answer"]
    assert said["streamed"] == said["batch"][0] == said["answer"]
    assert "Rome" in said["batch"][1]
    assert said["city"] == " Paris"
    assert said["tips"].startswith("Here are two tips for staying healthy:")
    assert said["year"].isdigit()


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
doc_to_text: "{prompt}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: ["Paris", "Tokyo", "Oslo"]
doc_to_target: city
"""
TEXT = """
output_type: generate_until
doc_to_target: city
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
filter_list: [{name: city, filter: [{function: regex, regex_pattern: "(Paris|Tokyo|Oslo)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.parametrize(
    ("kind", "tasks", "prompt"),
    [("completions", "choice,text", "The capital of {{country}} is"), ("chat-completions", "text", "What is the capital of {{country}}?")],
)
def test_lm_eval(server: Embedded, model: Path, tmp_path: Path, kind: str, tasks: str, prompt: str) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"country": country, "city": city}) + "\n" for country, city in CAPITALS.items()))
    for name, form in (("choice", CHOICE), ("text", TEXT)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, questions=questions, prompt=prompt) + form)
    known = f"model={MODEL},base_url={server.url}/v1/{kind.replace('-', '/')},tokenizer=./{model.name},num_concurrent=2,max_retries=1"
    chat = ["--apply_chat_template"] if kind == "chat-completions" else []
    flags = ["--model", f"local-{kind}", "--model_args", known, "--tasks", tasks, "--include_path", tmp_path, "--output_path", "out"]
    run(tmp_path, "lm_eval", "run", *flags, *chat)
    results = written(tmp_path / "out", "results_*.json")["results"]
    assert set(results) == set(tasks.split(","))
    assert results["text"]["exact_match,city"] == 1.0
    assert results.get("choice", {"acc,none": 1.0})["acc,none"] == 1.0


def test_guidellm(server: Embedded, model: Path, tmp_path: Path) -> None:
    data = f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"
    load = ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={PROMPTS}", "--data", data]
    backend = f"kind=openai_http,target={server.url},model={MODEL}"
    outputs = ["--output", f"kind=json,path={tmp_path / 'out.json'}", "--disable-console"]
    run(tmp_path, "guidellm", "run", "--backend", backend, *load, "--tokenizer", f"kind=hf_auto,model={model}", *outputs)
    (figures,) = written(tmp_path, "out.json")["benchmarks"]
    totals = figures["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (PROMPTS, 0)
    assert figures["metrics"]["output_token_count"]["successful"]["mean"] == TOKENS


def test_aiperf(server: Embedded, model: Path, tmp_path: Path) -> None:
    load = ["--request-count", str(PROMPTS), "--concurrency", "2", "--isl", "32", "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true"]
    where = ["--model", MODEL, "--url", server.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", f"./{model.name}"]
    run(tmp_path, "aiperf", "profile", *where, *load, "--artifact-dir", "out", "--ui", "none", offline={})  # offline it takes no folder
    figures = written(tmp_path / "out", "profile_export_aiperf.json")
    assert figures["request_count"]["avg"] == PROMPTS
    assert figures["error_summary"] == []
    assert figures["total_usage_completion_tokens"]["avg"] == PROMPTS * TOKENS
    assert figures["input_sequence_length"]["avg"] == 32
