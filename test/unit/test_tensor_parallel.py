"""Sharded workers generate what an unsharded one does; ranks that differ are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from runtime.batch import EagerSample
from runtime.config.device_tuning import H200
from runtime.config.quant_config import Int4Format, QuantConfig
from runtime.config.runtime_config import ParallelConfig, RuntimeConfig
from runtime.distributed.agreement import Agreement
from runtime.distributed.parallel_group import ALONE, Shard
from runtime.entrypoints.rank import check_same_model, check_same_weights, with_own_files
from runtime.errors import ConfigError, RankFailed, RanksDiffer
from runtime.layers.bounded_head import HeadWithCopy
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.linear import Linear
from runtime.layers.lm_head import all_logits, greedy, greedy_by_copy
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.models.config import FullAttention, ModelConfig
from runtime.sampling_params import SamplingParams
from runtime.speculative.draft_loader import draft_group
from runtime.speculative.registry import make_drafter
from unit.driver import GREEDY, Driver, EveryNth
from unit.predicting import RUNTIME, calm, draft_folder, model_config, teach, use_head_bounds
from unit.ranks import Meeting, ThreadGroup, ranks
from unit.tiny import tiny_runtime, tiny_speculative

PROMPTS = {1: [5, 9, 23, 4, 77, 31, 8], 2: [60, 2, 2, 19], 3: [7, 7, 7, 7, 7, 7, 7, 7, 7, 7]}
LENGTH = 16
"""Tokens of a text."""
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, seed=3, max_new_tokens=64)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=0.5, max_new_tokens=64)
MIXED = {1: GREEDY, 2: SAMPLED, 3: PENALISED}
CHAIN: dict[str, Any] = {"num_steps": 3, "num_draft_tokens": 4}
TREE: dict[str, Any] = {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}
GEMMA4: dict[str, Any] = dict(
    architecture="Gemma4ForCausalLM", window=(11, 11, -1), qk_norm=True, v_norm=True, attn_scale=1.0, embed_scale=8.0, final_softcap=30.0,
    full_attention=FullAttention(num_kv_heads=1, head_dim=32, rope_theta=1e6, rope_scaling=None, shared_kv=True),
)  # fmt: skip
GEMMA3: dict[str, Any] = dict(
    architecture="Gemma3ForCausalLM", window=(11, 11, -1), qk_norm=True, norm_offset=1.0, embed_scale=8.0,
    full_attention=FullAttention(num_kv_heads=2, head_dim=16, rope_theta=1e6, rope_scaling=None, shared_kv=False),
)  # fmt: skip
DRAFTS = {
    "plain": None,
    "eagle": ("EAGLE", CHAIN),
    "eagle tree": ("EAGLE", TREE),
    "eagle3": ("EAGLE3", CHAIN),
    "eagle3 tree": ("EAGLE3", TREE),
    "standalone": ("STANDALONE", {"num_steps": 2, "num_draft_tokens": 3}),
    "dflash": ("DFLASH", CHAIN),
    "ngram": ("NGRAM", CHAIN),
}


def builder(
    tmp_path: Path,
    draft: tuple[str, dict[str, Any]] | None,
    model: ModelConfig | None = None,
    quantization: str | None = None,
    sizes: list[int] | None = None,
    **runtime: Any,
) -> Callable[..., Any]:
    """Builds one rank's worker: the same weights for every number of ranks."""
    model = model or model_config()

    def build(group: Any = ALONE, followers: Any = None) -> Any:
        options = {**RUNTIME, "tp_size": group.size, "quantization": quantization, **runtime}
        replay: Any = "eager" if sizes else None
        if draft is None:
            worker = build_worker(tiny_runtime(**options), model, options=BuildOptions(replay, sizes), group=group, followers=followers)
        else:
            algorithm, spec = draft
            folder = None if algorithm == "NGRAM" else draft_folder(tmp_path / f"{group.rank}", algorithm)
            config = tiny_runtime(tiny_speculative("", **{"algorithm": algorithm, "draft_model_path": folder, **spec}), **options)
            worker = build_worker(config, model, make_drafter, BuildOptions(replay, sizes), group, followers)
        if quantization is None:
            calm(worker.parts.target.runner.model, 1.0)
        if draft is not None and draft[0] == "EAGLE":
            teach(worker.parts.drafter.model, worker.parts.target.runner.model.lm_head.weight)
        return worker

    return build


def texts(worker: Any, sampling: Any = GREEDY, logprobs: int = -1) -> tuple[dict[int, list[int]], Driver]:
    driver = Driver(worker)
    return driver.generate(PROMPTS, LENGTH, sampling=sampling, logprobs=logprobs), driver


@pytest.mark.parametrize("name", list(DRAFTS))
@pytest.mark.parametrize("sampling", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_two_ranks_generate_the_text_of_one(tmp_path: Path, name: str, sampling: Any) -> None:
    build = builder(tmp_path, DRAFTS[name])
    alone = build()
    expected, driver = texts(alone, sampling)
    with ranks(2, build) as worker:
        found, sharded = texts(worker, sampling)
        assert found == expected
        assert sharded.mean_accept_len() == driver.mean_accept_len()
        if name.startswith("eagle") and "3" not in name:
            assert 1.2 < sharded.mean_accept_len() < 4.0
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize("name", ["plain", "eagle", "eagle3", "standalone", "dflash"])
def test_iteration_graphs_of_two_ranks_generate_the_text_of_one(tmp_path: Path, name: str) -> None:
    sampling = {1: GREEDY, 2: SAMPLED, 3: GREEDY}
    expected, driver = texts(builder(tmp_path, DRAFTS[name])(), sampling)
    with ranks(2, builder(tmp_path, DRAFTS[name], sizes=[1, 2, 4], iteration_graph=True)) as worker:
        found, sharded = texts(worker, sampling)
        assert found == expected
        assert sharded.mean_accept_len() == driver.mean_accept_len()
        assert sum(runner.replayed for runner in worker.iteration_runners) == len(sharded.results)
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize("name", ["standalone", "dflash"])
def test_two_ranks_share_a_head_with_a_token_map(tmp_path: Path, name: str) -> None:
    torch.save(torch.arange(1, model_config().vocab_size, 2), tmp_path / "map.pt")
    algorithm, spec = DRAFTS[name] or ("", {})
    draft = algorithm, {**spec, "token_map": str(tmp_path / "map.pt")}
    expected, driver = texts(builder(tmp_path, draft)(), MIXED)
    assert expected[1] == texts(builder(tmp_path, None)(), MIXED)[0][1]  # the greedy row
    with ranks(2, builder(tmp_path, draft, sizes=[1, 2, 4])) as worker:
        found, sharded = texts(worker, MIXED)
        assert found == expected
        assert sharded.mean_accept_len() == driver.mean_accept_len()


def counted(rows: list[int]) -> Callable[..., torch.Tensor]:
    """`TorchOps.greedy_by_copy`, which adds the number of rows of each call to `rows`."""

    def greedy_by_copy(
        ops: TorchOps, x: torch.Tensor, head: HeadWithCopy, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows.append(len(x))
        return ops.greedy(x, head.own, tokens, logits)

    return greedy_by_copy


@pytest.mark.parametrize("name", ["plain", "eagle"])
def test_greedy_tokens_by_bounds_are_those_of_all_ranks(tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()
    expected, _ = texts(builder(tmp_path, DRAFTS[name], sizes=[1, 2, 4])())
    use_head_bounds(monkeypatch)
    monkeypatch.setattr(TorchOps, "greedy_by_copy", counted(rows))
    with ranks(2, builder(tmp_path, DRAFTS[name], sizes=[1, 2, 4], head_bounds=True)) as worker:
        found, _ = texts(worker)
        assert found == expected
        assert rows
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_greedy_drafts_come_from_the_head_with_candidates(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()
    algorithm, shape = DRAFTS[name] or ("", {})
    alone = builder(tmp_path, (algorithm, shape))()
    assert next(iter(alone.parts.drafter.models())).runner.model.candidate_head is None
    expected, driver = texts(alone)
    monkeypatch.setattr(TorchOps, "candidate_head", lambda self, head: CandidateHead(head))
    monkeypatch.setattr(TorchOps, "greedy_by_copy", counted(rows))
    build = builder(tmp_path, (algorithm, {**shape, "draft_candidates": True}))
    found, once = texts(build())
    assert found == expected
    assert once.mean_accept_len() == driver.mean_accept_len()
    assert rows, "greedy drafts use it"
    with ranks(2, build) as worker:
        found, sharded = texts(worker)
        assert found == expected
        assert sharded.mean_accept_len() == driver.mean_accept_len()
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize("name", ["eagle", "eagle tree", "eagle3", "standalone", "dflash"])
def test_drafts_that_each_rank_holds_whole_change_no_text(tmp_path: Path, name: str) -> None:
    algorithm, shape = DRAFTS[name] or ("", {})
    expected, _ = texts(builder(tmp_path, (algorithm, shape))(), MIXED)
    with ranks(2, builder(tmp_path, (algorithm, {**shape, "draft_tp_size": 1}))) as worker:
        assert texts(worker, MIXED)[0] == expected
        model = next(iter(worker.parts.drafter.models())).runner.model
        assert {spec.num_q_heads for spec in model.attention_specs} == {4}, "no block is shared"
        head = model.model.lm_head if name == "standalone" else worker.parts.target.runner.model.lm_head
        assert head.is_sharded, "the head is"
        assert not worker.parts.target.agreement.differs.item()


@pytest.mark.parametrize(
    ("hidden", "inner", "fused", "whole"),
    [(4096, 14336, True, False), (1024, 3072, True, True), (2048, 8192, True, False), (2048, 8192, False, True)],
)
def test_small_blocks_of_a_draft_are_faster_whole(hidden: int, inner: int, fused: bool, whole: bool) -> None:
    model = model_config(hidden_size=hidden, intermediate_size=inner, num_q_heads=hidden // 128, num_kv_heads=8, head_dim=128)
    group = SimpleNamespace(rank=0, size=2, fused=object() if fused else None)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), group=group)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), group=group)
    assert draft_group(None, model, on_gpu, H200) is (ALONE if whole else group)
    assert draft_group(None, model, on_cpu, H200) is group
    assert draft_group(1, model, on_gpu, H200) is ALONE
    assert draft_group(2, model, on_gpu, H200) is group


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
def test_rank_0_chooses_the_depth_of_every_step(tmp_path: Path, algorithm: str) -> None:
    depths = (0, 1, 2, 3, 5, 7)
    build = builder(tmp_path, (algorithm, {"num_steps": 7, "num_draft_tokens": 8, "depths": depths}))
    alone = build()
    with alone.parts.depths.in_turn():
        expected, driver = texts(alone, MIXED)
    with ranks(2, build) as worker:
        assert worker.info().depth.milliseconds["1"]
        with worker.parts.depths.in_turn():
            assert texts(worker, MIXED)[0] == expected
        again = Driver(worker)
        worker.reset()
        assert again.generate(PROMPTS, LENGTH)[1] == texts(builder(tmp_path, None)())[0][1], "as the controller chooses"
    assert {result.stats.depth for result in driver.results} > {0, 1, 7}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_rank_0_chooses_the_eager_sample_of_all_ranks(tmp_path: Path, verify: bool, whole: bool) -> None:
    build = builder(tmp_path, DRAFTS["eagle"], sizes=[1, 2, 4], iteration_graph=whole)
    expected, _ = texts(build())
    seen: dict[int, list[EagerSample]] = {0: [], 1: []}

    def watched(group: Any, followers: Any = None) -> Any:
        worker = build(group, followers)
        drafter, propose = worker.parts.drafter, worker.parts.drafter.propose
        drafter.propose = lambda iteration: seen[group.rank].append(iteration.sample) or propose(iteration)
        return worker

    with ranks(2, watched) as worker:
        seen[0].clear()
        seen[1].clear()
        worker.parts.monitor.schedule = EveryNth(3, verify=verify)
        assert texts(worker)[0] == expected
        stats = worker.info().acceptance
        assert any(runner.replayed for runner in worker.iteration_runners) is whole
    assert stats.eager_sample.iterations >= 2
    assert seen[0] == seen[1]
    assert EagerSample(True, verify) in seen[0]


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"num_q_heads": 3, "num_kv_heads": 3}),  # one rank holds more heads than the other
        (2, {"num_q_heads": 4, "num_kv_heads": 1}),  # both hold the one KV head
        (4, {"num_q_heads": 8, "num_kv_heads": 2, "intermediate_size": 126}),
        (3, {"tie_embeddings": True, "num_q_heads": 6, "num_kv_heads": 3, "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        (2, {"qk_norm": True, "vocab_size": 96}),
        (2, GEMMA3),
        (2, {"architecture": "ArceeForCausalLM", "mlp_bias": True}),
        (2, {"architecture": "HunYuanDenseV1ForCausalLM", "qk_norm": True, "norm_after_rope": True}),
        (2, {"architecture": "Olmo3ForCausalLM", "window": (11, -1), "qk_row_norm": True}),
        (2, {"architecture": "Glm4ForCausalLM", "rope_interleaved": True, "rotary_dim": 8, "qkv_bias": True}),
        (2, GEMMA4),  # both hold the one KV head of a global layer
    ],
)
def test_heads_and_vocabularies_of_any_size_are_shared(tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    build = builder(tmp_path, None, model_config(**changes))
    expected, _ = texts(build())
    with ranks(size, build) as worker:
        assert texts(worker)[0] == expected


def test_heads_that_the_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    build = builder(tmp_path, None, model_config(num_q_heads=4, num_kv_heads=2))
    with pytest.raises(ConfigError, match=r"--tp-size 3 cannot share the 4 query and 2 KV heads"):
        build(group=ThreadGroup(0, 3, Meeting(3)))


def test_log_probabilities_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    build = builder(tmp_path, DRAFTS["eagle"])
    _, alone = texts(build(), logprobs=5)
    with ranks(2, build) as worker:
        _, driver = texts(worker, logprobs=5)
        for mine, its in zip(driver.results, alone.results, strict=True):
            assert mine.logprobs is not None
            assert its.logprobs is not None
            np.testing.assert_allclose(mine.logprobs.chosen, its.logprobs.chosen, atol=1e-4)
            np.testing.assert_allclose(mine.logprobs.top, its.logprobs.top, atol=1e-4)
            assert np.array_equal(mine.logprobs.top_ids, its.logprobs.top_ids)


def test_prompt_log_probabilities_and_mixed_chunks_work_on_two_ranks(tmp_path: Path) -> None:
    build = builder(tmp_path, DRAFTS["eagle"], mixed_chunk=True)

    def run(worker: Any) -> tuple[dict[int, list[int]], list[float]]:
        driver = Driver(worker)
        driver.prefill({1: PROMPTS[1]}, logprobs=0)
        results = driver.prefill({3: PROMPTS[3]}, chunk=4, logprobs=0, prompt_logprobs=True, along=lambda: [1])
        driver.decode([1, 3], logprobs=0)
        return driver.out, [float(p) for r in results for found in r.prompt_logprobs.values() for p in found.chosen]

    out, logprobs = run(build())
    with ranks(2, build) as worker:
        found, theirs = run(worker)
        assert found == out
        np.testing.assert_allclose(theirs, logprobs, atol=1e-4)


@pytest.mark.parametrize(("quantization", "form"), [
    ("int8", None), ("int4", None), ("int4", Int4Format("awq", 32)), ("int4", Int4Format("compressed-tensors", 32)),
])  # fmt: skip
def test_quantized_weights_are_shared_too(tmp_path: Path, quantization: str, form: Int4Format | None) -> None:
    quant = None if form is None else QuantConfig("int4", int4=form)
    build = builder(tmp_path, None, model_config(tie_embeddings=True, vocab_size=96, quant=quant), quantization=quantization)
    with ranks(2, build) as worker:
        again, _ = texts(worker)
        assert all(len(text) == LENGTH for text in again.values())
        assert not worker.parts.target.agreement.differs.item()


def test_a_token_that_one_rank_changes_is_found_in_the_next_step(tmp_path: Path) -> None:
    def spoil(rank: int, worker: Any) -> None:
        accepter, calls = worker.parts.accepter, [0]
        accept = accepter.accept

        def changed(*args: Any) -> Any:
            result = accept(*args)
            calls[0] += 1
            if calls[0] == 3:
                result.tokens[0, 0] += 1
            return result

        accepter.accept = changed

    with ranks(2, builder(tmp_path, DRAFTS["eagle"]), spoil) as worker:
        driver = Driver(worker)
        driver.prefill(PROMPTS)  # step 1
        for _ in range(3):
            driver.decode([1, 2, 3])
        with pytest.raises(RanksDiffer, match="different tokens in step 4, found in step 5"):
            driver.decode([1, 2, 3])


def test_a_step_that_fails_names_its_rank(tmp_path: Path) -> None:
    build = builder(tmp_path, None)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with ranks(2, build) as worker:
        driver = Driver(worker)
        driver.prefill({1: PROMPTS[1]})
        forward, worker.parts.target.stage_rows = worker.parts.target.stage_rows, fail
        pending = driver.launch([1])
        with pytest.raises(RankFailed, match="rank 0 failed in step 2: OutOfMemoryError"):
            pending.wait()
        worker.parts.target.stage_rows = forward
        worker.run_between_steps(lambda: worker._step(driver_batch(driver)))  # the other rank waits in step 2


def driver_batch(driver: Driver) -> Any:
    from runtime.batch import ScheduleBatch

    return ScheduleBatch(2, np.array([1], dtype=np.int32), np.array([7], dtype=np.int32), np.array([-1], dtype=np.int32))


# ---- the parts


def test_a_rank_of_another_node_takes_over_all_but_its_own_files() -> None:
    def node(rank: int, **other: Any) -> RuntimeConfig:
        files = {"draft_model_path": f"/{rank}/draft", "token_map": f"/{rank}/hot.pt"}
        paths = {"model_path": f"/{rank}/model", "tokenizer_path": f"/{rank}/words"}
        return tiny_runtime(tiny_speculative("", **files, num_steps=3 - rank), tp_size=4, nnodes=2, node_rank=rank, **paths, **other)

    found = with_own_files(node(0, ep_size=2, random_seed=7), node(1, ep_size=1, random_seed=8))
    expected = node(1, ep_size=2, random_seed=7)
    assert expected.speculative is not None
    assert found == structs.replace(expected, speculative=structs.replace(expected.speculative, num_steps=3))


def test_a_node_with_another_model_is_named_on_every_rank() -> None:
    from concurrent.futures import ThreadPoolExecutor

    meeting, parallel = Meeting(4), ParallelConfig(tp_size=4, nnodes=2)

    def start(rank: int) -> str:
        with pytest.raises(ConfigError) as refused:
            check_same_model(ThreadGroup(rank, 4, meeting), model_config(num_layers=2 + (rank > 1)), parallel)
        return str(refused.value)

    with ThreadPoolExecutor(4) as pool:
        (error,) = set(pool.map(start, range(4)))
    assert error.startswith("The config.json of node 1, a LlamaForCausalLM, differs from that of node 0")


def test_a_node_with_other_weights_is_named_on_every_rank(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    meeting, weights = Meeting(4), {name: torch.randn(16, 8) for name in ("a.weight", "b.weight")}
    for folder in ("whole", "split", "other"):
        (tmp_path / folder).mkdir()
    save_file(weights, tmp_path / "whole" / "model.safetensors")
    for name, values in weights.items():
        save_file({name: values}, tmp_path / "split" / f"{name}.safetensors")
    save_file(weights | {"b.weight": weights["b.weight"] + 1}, tmp_path / "other" / "model.safetensors")

    def start(rank: int, folders: tuple[str, str]) -> str:
        folder = str(tmp_path / folders[rank // 2])
        config = tiny_runtime(
            tiny_speculative(folder, draft_load_format="safetensors"),
            model_path=str(tmp_path / "whole"), load_format="safetensors", tp_size=4, nnodes=2,
        )  # fmt: skip
        try:
            check_same_weights(ThreadGroup(rank, 4, meeting), config)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(start, range(4), [("whole", "split")] * 4)) == {""}
        assert set(pool.map(start, range(4), [("whole", "other")] * 4)) == {
            "The weights of the draft model on node 1 differ from those on node 0. All nodes need the same model."
        }


def test_shards_cover_a_dimension_without_overlap() -> None:
    for count in range(1, 9):
        for size in (0, 6, 24, 30, 66):
            parts = [Shard(i, count, 6).of(size) for i in range(count)]
            assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
            assert (parts[0].start, parts[-1].stop) == (0, size)
            assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) in (0, 6)


@pytest.mark.parametrize("vocab", [96, 97])
def test_the_likeliest_of_equal_tokens_is_the_smallest_id(vocab: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    hidden = 8
    weight = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))
    weight[[3, 50, 90]] = 5.0  # equal rows on both ranks
    x = torch.cat([torch.ones(1, hidden), torch.randn(4, hidden), torch.full((1, hidden), torch.nan)])
    meeting, ops = Meeting(2), TorchOps()

    def rank(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = ThreadGroup(index, 2, meeting)
        head = Linear.sharded(weight, group)
        drafts = greedy_by_copy(ops, x, CandidateHead(head))
        return greedy(ops, x, head, agreement=Agreement(torch.device("cpu"), group)), all_logits(ops, x, head), drafts

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2)))
    whole = ops.logits(x, Linear.dense(weight))
    for tokens, logits, drafts in results:
        assert torch.equal(tokens, whole.argmax(-1))
        assert torch.equal(drafts, tokens)
        torch.testing.assert_close(logits, whole, equal_nan=True)
    assert results[0][0][0] == 3


def test_selected_rows_of_a_sharded_head_are_shared_again() -> None:
    from concurrent.futures import ThreadPoolExecutor

    weight, rows = torch.randn(10, 4), torch.tensor([9, 0, 4, 7, 5])
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda r: Linear.sharded(weight, ThreadGroup(r, 2, meeting)).select_rows(rows), range(2)))
    assert torch.equal(torch.cat([part.weight for part in parts]), weight[rows])
    assert [part.whole for part in parts] == [5, 5]


def test_the_hash_sees_tokens_lengths_and_order() -> None:
    group = ThreadGroup(0, 2, Meeting(2))

    def words(*steps: tuple[list[list[int]], list[int]]) -> list[float]:
        agreement = Agreement(torch.device("cpu"), group)
        for tokens, lens in steps:
            agreement.commit(torch.tensor(tokens), torch.tensor(lens, dtype=torch.int32))
        return agreement.words().tolist()

    base = words(([[1, 2], [3, 4]], [2, 1]))
    assert base == words(([[1, 2], [3, 99]], [2, 1])), "what is not accepted does not count"
    others = [
        words(([[1, 2], [3, 4]], [2, 2])),
        words(([[1, 2], [3, 4]], [1, 1])),
        words(([[2, 1], [3, 4]], [2, 1])),
        words(([[3, 2], [1, 4]], [2, 1])),
        words(([[1, 2], [3, 4]], [2, 1]), ([[1, 2], [3, 4]], [2, 1])),
        words(([[1, 0], [3, 4]], [2, 1])),
    ]
    assert all(base != other for other in others)
    assert len({tuple(other) for other in others}) == len(others)
