"""The offline engine against the definition of its worker."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from event_loop import in_event_loop
from fake_worker import alone, pooled
from process.fake import CONTEXT, dummy_model, fake_limits, scheduler_command
from runtime import Engine
from runtime.errors import ConfigError, RequestError, ServerDraining, ServingError, WorkerDied
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from unit.small_tokenizer import write_small_tokenizer

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = dummy_model(tmp_path_factory.mktemp("models") / "tiny")
    with Engine(scheduler_command=scheduler_command("0.002"), model=str(model), load_format="dummy", device="cpu") as engine:
        yield engine


def expected(engine: Engine, prompt: list[int], max_new_tokens: int = 12) -> list[int]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return alone(prompt, sampling, 5, (1,), fake_limits(engine.config))


def test_one_prompt_gives_one_output_in_sglangs_shape(engine: Engine) -> None:
    output = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    assert output["output_ids"] == expected(engine, [5, 6, 7])
    meta = output["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["graph_hit_rate"], meta["padding_waste"]) == (1.0, 0.5), "each step of the worker replays, with one row of padding"
    assert output["text"]


def test_a_text_ends_at_the_end_token_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    """The model's configuration names token 1, the tokenizer's token 2."""
    folder = write_small_tokenizer(dummy_model(tmp_path / "model"))
    sampling = SamplingParams(max_new_tokens=200)
    with Engine(scheduler_command=scheduler_command("0"), model=str(folder), load_format="dummy", device="cpu") as engine:
        limits = fake_limits(engine.config)
        ended = {first: alone([first], sampling, 5, (1, 2), limits) for first in range(100, 200)}
        first = next(first for first, ids in ended.items() if ids[-1] == 2)
        output = engine.generate(input_ids=[first], sampling_params={**GREEDY, "max_new_tokens": 200})
    assert output["output_ids"] == ended[first]
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_many_prompts_come_back_in_their_order(engine: Engine) -> None:
    prompts = [[5, 6, index] for index in range(10, 50)]
    outputs = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [output["output_ids"] for output in outputs] == [expected(engine, prompt) for prompt in prompts]


def test_a_call_larger_than_the_queue_is_answered(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "tiny")
    queue = {"max_running_requests": 2, "max_queued_requests": 3}
    with Engine(scheduler_command=scheduler_command("0"), model=str(model), load_format="dummy", device="cpu", **queue) as engine:
        assert len(engine.generate(input_ids=[[5, index] for index in range(20)], sampling_params=GREEDY)) == 20
        assert len(engine.generate(input_ids=[[5, index] for index in range(10)], sampling_params={**GREEDY, "n": 4})) == 40
        assert engine.generate([]) == []
        with pytest.raises(RequestError, match="at most 5 texts"):
            engine.generate(input_ids=[[5, 6]], sampling_params={**GREEDY, "n": 6})


def test_a_prompt_that_is_refused_ends_the_other_prompts_of_its_call(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.generate(input_ids=[[5, 6], [5, 7], [5, 8]], sampling_params=[GREEDY, GREEDY, {"temperature": -1.0}])
    with pytest.raises(RequestError, match="5000"):
        engine.generate(input_ids=[[5, 6], [5, 7], [5000]], sampling_params=GREEDY)
    assert engine._alive().manager.open_requests == 0


def test_each_prompt_may_have_its_own_parameters(engine: Engine) -> None:
    outputs = engine.generate(["one", "two"], [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}])
    assert [output["meta_info"]["completion_tokens"] for output in outputs] == [2, 3]


def test_a_stream_grows_to_the_output_of_the_plain_call(engine: Engine) -> None:
    whole = engine.generate(input_ids=[8, 9], sampling_params=GREEDY)
    parts = list(engine.generate(input_ids=[8, 9], sampling_params=GREEDY, stream=True))
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["text"] == whole["text"]
    assert len(parts) > 1
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(parts))


def test_a_stream_that_is_left_early_frees_its_request(engine: Engine) -> None:
    for _ in engine.generate(input_ids=[8, 9], sampling_params={"max_new_tokens": 400, "ignore_eos": True}, stream=True):
        break
    deadline = time.monotonic() + 60.0  # a limit for a hang, not a measurement
    while (state := engine.get_server_info()["internal_states"][0])["num_running_reqs"] or state["token_usage"]:  # type: ignore[index]
        assert time.monotonic() < deadline
    engine.flush_cache()


def test_ctrl_c_in_a_call_ends_its_requests(engine: Engine) -> None:
    def state() -> dict[str, int]:
        return engine.get_server_info()["internal_states"][0]  # type: ignore[index]

    def interrupt() -> None:
        while state()["num_running_reqs"] != 2:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = state()["generation_tokens_total"]
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=[[5, 6], [5, 7]], sampling_params={"max_new_tokens": 490, "ignore_eos": True})
    thread.join()
    deadline = time.monotonic() + 60.0  # a limit for a hang, not a measurement
    while state()["num_running_reqs"]:
        assert time.monotonic() < deadline
    assert state()["generation_tokens_total"] - before < 2 * 490


def test_a_fork_is_told_to_start_its_own_engine(engine: Engine) -> None:
    stream = engine.generate(input_ids=[8, 9], sampling_params={"max_new_tokens": 100, "ignore_eos": True}, stream=True)
    next(stream)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
        child = os.fork()
    if child == 0:
        for call in (lambda: engine.generate(input_ids=[5]), lambda: next(stream), engine.get_server_info, engine.shutdown):
            try:
                call()
                os.write(writer, b"nothing raised\n")
            except BaseException as error:
                os.write(writer, f"{error}\n".encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as lines:
        said = lines.read().splitlines()
    os.waitpid(child, 0)
    refused = "This process is a fork of the engine's process. Start an engine of its own in each process."
    assert said == [refused] * 3 + ["nothing raised"]
    assert list(stream)[-1]["meta_info"]["completion_tokens"] == 100
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        pickle.dumps(engine)


def test_log_probabilities_stand_beside_the_tokens(engine: Engine) -> None:
    output = engine.generate(input_ids=[5, 6], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    meta = output["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == output["output_ids"]
    assert all(len(row) == 2 for row in meta["output_top_logprobs"])


def test_embeddings_and_scores_are_those_of_the_worker(engine: Engine) -> None:
    def embedding(*ids: int) -> dict[str, object]:
        vector = pooled(Pooling(kind="mean"), ids).astype(float)
        return {"embedding": pytest.approx(vector / np.linalg.norm(vector)), "meta_info": {"prompt_tokens": len(ids)}}

    def probabilities(*ids: int) -> object:
        return pytest.approx(np.exp(pooled(Pooling(kind="labels", label_ids=(9, 10)), ids).astype(float)))

    assert engine.encode([5, 6, 7]) == embedding(5, 6, 7)
    assert engine.encode([(5, 6, 7), [8]]) == [embedding(5, 6, 7), embedding(8)]
    assert engine.encode(["ab"]) == [asyncio.run(engine.async_encode("ab"))]
    short = np.array(engine.encode([5, 6, 7])["embedding"][:2])
    assert engine.encode([5, 6, 7], dimensions=2)["embedding"] == pytest.approx(short / np.linalg.norm(short))
    assert engine.score([5, 6], [[7], [8]], [9, 10]) == [probabilities(5, 6, 7), probabilities(5, 6, 8)]
    (shares,) = asyncio.run(engine.async_score([5, 6], [[7]], [9, 10], apply_softmax=True, item_first=True))
    assert sum(shares) == pytest.approx(1.0)
    first, second = engine.score([7], [[5, 6]], [9, 10])[0]
    assert shares == pytest.approx([first / (first + second), second / (first + second)])


@in_event_loop
async def test_it_works_inside_a_running_loop(engine: Engine) -> None:
    whole, other = await asyncio.gather(
        engine.async_generate(input_ids=[5, 6, 7], sampling_params=GREEDY),
        engine.async_generate(input_ids=[8, 9], sampling_params=GREEDY),
    )
    assert whole["output_ids"] == expected(engine, [5, 6, 7])
    assert other["output_ids"] == expected(engine, [8, 9])
    assert engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["text"] == whole["text"]  # blocking, from inside the loop
    stream = await engine.async_generate(input_ids=[8, 9], sampling_params=GREEDY, stream=True)
    parts = [part async for part in stream]
    assert parts[-1]["output_ids"] == other["output_ids"]


def test_threads_may_share_an_engine(engine: Engine) -> None:
    outputs: dict[int, list[int]] = {}

    def work(index: int) -> None:
        outputs[index] = engine.generate(input_ids=[20, index], sampling_params=GREEDY)["output_ids"]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {index: expected(engine, [20, index]) for index in range(8)}


def test_bad_calls_are_refused_by_name_and_the_engine_goes_on(engine: Engine) -> None:
    for call, field in (
        (lambda: engine.generate(), "prompt"),
        (lambda: engine.generate("a", input_ids=[1]), "prompt"),
        (lambda: engine.generate(["a", "b"], [{}]), "sampling_params"),
        (lambda: engine.generate("a", {"temprature": 1}), "temprature"),
        (lambda: engine.generate("a", {"n": 0}), "sampling_params.n"),
        (lambda: engine.generate("a", {"n": 2}, stream=True), "stream"),
        (lambda: engine.generate("a", {"temperature": float("nan")}), "sampling_params.temperature"),
        (lambda: engine.generate(["a", "b"], stream=True), "stream"),
        (lambda: engine.generate(input_ids=[5000]), "input_ids"),
        (lambda: engine.generate(5), "prompt"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(b"abc"), "prompt"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(["a", None]), "prompt"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(["a", ""]), "prompt"),
        (lambda: engine.generate(input_ids=5), "input_ids"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(input_ids=[[1], 2]), "input_ids"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(input_ids=[[1], []]), "input_ids"),
        (lambda: engine.generate(input_ids=np.array([5, 6])), "input_ids"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate("a", 5), "sampling_params"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate("a", "abc"), "sampling_params"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate(["a"], [5]), "sampling_params"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.generate("a", {"stop": 5}), "sampling_params.stop"),
        (lambda: engine.generate("a", {"stop": ["\ud800"]}), "sampling_params.stop"),
        (lambda: engine.generate("a", {"stop_token_ids": 5}), "sampling_params.stop_token_ids"),
        (lambda: engine.generate("a", {"logit_bias": {True: 1}}), "sampling_params.logit_bias"),
        (lambda: engine.encode([]), "prompt"),
        (lambda: engine.encode(None), "prompt"),  # pyright: ignore[reportArgumentType]
        (lambda: engine.encode([5000]), "prompt"),
        (lambda: engine.encode("a", dimensions=0), "dimensions"),
        (lambda: engine.encode("a", dimensions=5000), "dimensions"),
        (lambda: engine.score([5], [[6]], []), "label_token_ids"),
        (lambda: engine.score([5], [[6]], [5000]), "label_token_ids"),
        (lambda: engine.score("a", [[6]], [7]), "items"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == field
    with pytest.raises(RequestError, match=r"sampling_params has no field temprature; did you mean temperature\?"):
        engine.generate("a", {"temprature": 1})
    with pytest.raises(ServingError, match=str(CONTEXT - 1)):
        engine.generate(input_ids=[5] * CONTEXT)
    assert engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"] == expected(engine, [5, 6, 7])


def test_an_unknown_or_impossible_option_is_refused_and_leaves_no_process() -> None:
    before = len(psutil.Process().children())
    for options in ({"modle_path": "m"}, {"dp_size": 2}, {"model_path": "/nowhere/at/all"}):
        with pytest.raises(ConfigError):
            Engine(**options)
    assert len(psutil.Process().children()) == before


def test_a_start_that_fails_raises_and_leaves_no_process(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "tiny")
    before = len(psutil.Process().children())
    with pytest.raises(ConfigError, match="fake worker"):
        Engine(scheduler_command=scheduler_command("config-error"), model_path=str(model), load_format="dummy", device="cpu")
    assert len(psutil.Process().children()) == before


def test_after_shutdown_no_process_is_left_and_calls_are_refused(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "tiny")
    before = {process.pid for process in psutil.Process().children()}
    engine = Engine(scheduler_command=scheduler_command(), model_path=str(model), load_format="dummy", device="cpu")
    ours = [process for process in psutil.Process().children() if process.pid not in before]
    assert len(ours) == 2
    engine.shutdown()
    engine.shutdown()
    assert not any(process.is_running() for process in ours)
    with pytest.raises(ServingError, match="shut down"):
        engine.generate("a")


def test_shutdown_ends_the_calls_of_other_threads_and_may_come_from_several(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "tiny")
    engine = Engine(scheduler_command=scheduler_command("0.05"), model_path=str(model), load_format="dummy", device="cpu")
    long: dict[str, int | bool] = {"max_new_tokens": 400, "ignore_eos": True}
    stream = engine.generate(input_ids=[5], sampling_params=long, stream=True)
    next(stream)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            engine.generate(input_ids=[5, 6], sampling_params=long)
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    while engine.get_server_info()["internal_states"][0]["num_running_reqs"] != 2:  # type: ignore[index]
        time.sleep(0.01)
    enders = [threading.Thread(target=engine.shutdown, daemon=True) for _ in range(3)]
    for thread in enders:
        thread.start()
    for thread in [*enders, caller]:
        thread.join(20.0)
        assert not thread.is_alive()
    assert [type(error) for error in failures] == [ServerDraining]
    with pytest.raises(ServingError, match="shut"):
        list(stream)


def test_a_stream_collected_in_the_engines_own_thread_does_not_stop_it(engine: Engine) -> None:
    stream = engine.generate(input_ids=[8, 9], sampling_params={"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    engine._loop.call_soon_threadsafe(stream.close)
    calls: list[object] = []
    caller = threading.Thread(target=lambda: calls.append(engine.flush_cache()), daemon=True)
    caller.start()
    caller.join(10.0)
    assert calls


def test_when_its_scheduler_dies_open_calls_fail_and_shutdown_still_cleans_up(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "tiny")
    before = {process.pid for process in psutil.Process().children()}
    with Engine(scheduler_command=scheduler_command("0.05"), model_path=str(model), load_format="dummy", device="cpu") as engine:
        ours = [process for process in psutil.Process().children() if process.pid not in before]
        stream = engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 400, "ignore_eos": True}, stream=True)
        next(stream)
        next(process for process in ours if "scheduler" in process.cmdline()[0]).kill()
        with pytest.raises(WorkerDied, match="scheduler"):
            list(stream)
        with pytest.raises(WorkerDied):
            engine.generate("a")
    assert not any(process.is_running() for process in ours)


def test_sglangs_arguments_are_taken_or_refused_by_name(engine: Engine) -> None:
    outputs = engine.generate(
        None, GREEDY, [[5, 6, 7], [8, 9]],
        return_logprob=[True, False], logprob_start_len=[1, -1], top_logprobs_num=[2, 0], rid=["one", "two"], priority=1, cache_salt="salt",
        image_data=None, lora_path=None, return_hidden_states=False, bootstrap_host=None, session_id="s", return_routed_experts=False,
    )  # fmt: skip
    assert [output["meta_info"]["id"] for output in outputs] == ["one", "two"]
    first, second = (output["meta_info"] for output in outputs)
    assert [token for _, token, _ in first["input_token_logprobs"]] == [6, 7]
    assert all(len(row) == 2 for row in first["output_top_logprobs"])
    assert "output_token_logprobs" not in second
    sampled = {**GREEDY, "n": 2, "sampling_seed": 7, "stop_regex": [], "no_stop_trim": False, "custom_params": None}
    texts = engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=sampled)
    assert [text["meta_info"]["prompt_tokens"] for text in texts] == [3, 3, 2, 2]
    assert texts[0]["output_ids"] == engine.generate(input_ids=[5, 6, 7], sampling_params={**sampled, "n": 1})["output_ids"]
    nothing = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0})
    assert (nothing["output_ids"], nothing["meta_info"]["completion_tokens"]) == ([], 0)
    for name, value in (
        ("image_data", "http://x/"),
        ("lora_path", "a"),
        ("custom_logit_processor", "x"),
        ("made_up", 1),
        ("embed_overrides", []),
    ):
        with pytest.raises(RequestError, match=name):
            engine.generate(input_ids=[5], **{name: value})
    with pytest.raises(RequestError, match="stop_regex"):
        engine.generate(input_ids=[5], sampling_params={"stop_regex": "x"})
    whole = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["text"]
    stop, end = whole[5], whole.index(whole[5])
    for keep in (False, True):
        output = engine.generate(input_ids=[5, 6, 7], sampling_params={**GREEDY, "stop": stop, "no_stop_trim": keep})
        assert output["text"] == whole[: end + keep]


def test_the_engine_takes_what_generate_takes(engine: Engine) -> None:
    """Also what only Python has: integers as names, tuples, and `SamplingParams`."""
    expected = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"]
    for sampling in (
        {**GREEDY, "logit_bias": {"9": 0.0}},
        {**GREEDY, "logit_bias": {9: 0.0}, "stop": (), "stop_token_ids": {400}},
        SamplingParams(temperature=0.0, max_new_tokens=12, seed=5, stop_token_ids=(400,)),
    ):
        assert engine.generate(input_ids=(5, 6, 7), sampling_params=sampling)["output_ids"] == expected
    schemas = {"type": "object"}, '{"type": "object"}'
    as_object, as_text = (engine.generate(input_ids=[5], sampling_params={**GREEDY, "json_schema": schema}) for schema in schemas)
    assert as_object["output_ids"] == as_text["output_ids"]
    two = engine.generate(["a", "b"], [{**GREEDY, "n": 1}, {**GREEDY, "n": 2}], return_logprob=True, return_text_in_logprobs=True)
    assert len(two) == 3
    assert all(isinstance(text, str) for _, _, text in two[0]["meta_info"]["output_token_logprobs"])
    assert engine.generate([]) == []
