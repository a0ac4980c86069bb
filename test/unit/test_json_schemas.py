"""Two hundred JSON schemas, greedy and sampled, plain and with EAGLE-3: every finished text satisfies its schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from runtime.constrained.compiler import GrammarCompiler
from runtime.errors import GrammarError
from runtime.managers.messages import GenerateReq
from runtime.sampling_params import GrammarSpec, SamplingParams
from unit.grammars import Served, constrained_worker, json_tokenizer, make_compiler, serve
from unit.json_schemas import Schemas

COUNT = 200
BIASES = {'"': 9.0, "}": 4.0, "]": 4.0, " ": -4.0, "\n": -6.0, "\t": -6.0, "\r": -6.0, " \n": -6.0, "\n ": -6.0}
"""They keep strings, lists and white space short."""


@pytest.fixture(scope="module")
def schemas() -> list[str]:
    drawn, draw = dict[str, None](), Schemas(11)
    while len(drawn) < COUNT:
        drawn[json.dumps(draw.draw(), ensure_ascii=False)] = None
    return list(drawn)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    yield compiler
    compiler.close()


def answers(folder: Path, algorithm: str | None, temperature: float, schemas: list[str], compiler: GrammarCompiler) -> Served:
    worker = constrained_worker(folder, algorithm, runtime={"max_running_requests": 40, "max_total_tokens": 16384})
    closing = {json_tokenizer().encode(text, False)[0]: bias for text, bias in BIASES.items()}
    sampling = SamplingParams(temperature=temperature, max_new_tokens=80, logit_bias=closing)
    asks = [
        GenerateReq(rid=str(i), input_ids=[3 + i], sampling=SamplingParams(**{**as_dict(sampling), "json_schema": schema}), seed=i)
        for i, schema in enumerate(schemas)
    ]
    served, scheduler = serve(worker, asks, compiler)
    worker.close()
    assert scheduler.stats.num_failed_steps_total == 0
    return served


def as_dict(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_finished_text_satisfies_its_schema(tmp_path: Path, schemas: list[str], compiler: GrammarCompiler, temperature: int) -> None:
    """Every second schema at each temperature."""
    schemas = schemas[temperature::2]
    plain = answers(tmp_path / "plain", None, temperature, schemas, compiler)
    drafted = answers(tmp_path / "drafted", "EAGLE3", temperature, schemas, compiler)
    for served in (plain, drafted):
        ends = Counter(end.reason for end in served.ends.values())
        assert set(ends) <= {"stop", "length"}, "a text that does not end is cut, and says so"
        assert ends["stop"] >= 0.8 * len(schemas)
        for i, schema in enumerate(schemas):
            if served.ends[str(i)].reason == "stop":
                text, validator = served.text(str(i)), jsonschema.Draft202012Validator
                validator(json.loads(schema), format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    if temperature == 0:
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("reference", ["https://example.com/a.json", "other.json"])
def test_references_to_other_documents_are_refused_in_one_sentence(reference: str) -> None:
    schema = json.dumps({"properties": {"a": {"$ref": reference}}})
    with pytest.raises(GrammarError) as refused:
        make_compiler().compile(GrammarSpec("json_schema", schema)).future.result(60)
    assert refused.value.message == f"It refers to '{reference}'; only references inside the schema are supported."
