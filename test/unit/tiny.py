"""Tiny random checkpoints and configurations that tests build workers from."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.models.config import ModelConfig

PARTS = {part.name: part.type for part in msgspec.structs.fields(RuntimeConfig) if part.name != "speculative"}
"""The structs of a configuration, by name."""


def tiny_model(**changes: object) -> ModelConfig:
    """A Llama of three layers."""
    values: dict[str, object] = dict(
        architecture="LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=3, num_q_heads=4, num_kv_heads=2,
        head_dim=16, rms_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_context_len=256, tie_embeddings=False, qkv_bias=False,
        o_bias=False, mlp_bias=False, qk_norm=False, window=(-1, -1, -1), eos_ids=(1,), bos_id=None, dtype="float32",
    )  # fmt: skip
    values.update(changes)
    return ModelConfig(**values)  # type: ignore[arg-type]


def tiny_runtime(speculative: SpeculativeConfig | None = None, **changes: object) -> RuntimeConfig:
    """A configuration of dummy weights on the CPU."""
    values: dict[str, object] = dict(
        model_path="", load_format="dummy", tokenizer_path="", served_model_name="tiny", revision=None, dtype="float32", quantization=None,
        context_length=256, chat_template=None, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        page_size=1, mem_fraction_static=None, max_total_tokens=4096, max_running_requests=8, cpu_threads=1, cuda_graph_bs=(),
        cuda_graph_padding=True, chunked_prefill_size=64, max_prefill_tokens=256, max_queued_requests=1024,
        max_queued_tokens=1 << 20, max_priority=0, queue_timeout=None, request_timeout=None,
        max_body_mib=32, max_parse_ms=1000, max_logprob_cells=1 << 20,
        schedule_policy="fcfs", schedule_conservativeness=1.0, radix_cache=True,
        overlap=True, mixed_chunk=False, stream_interval=1, random_seed=0, watchdog_timeout=300.0,
        host="127.0.0.1", port=0, api_key=None, admin_api_key=None, trust_request_chat_template=False, enable_metrics=True,
        log_level="info", log_requests=False, shutdown_timeout=30.0, skip_server_warmup=True, profile_folder=None,
        embedding_pooling="mean",
    )  # fmt: skip
    values.update(changes)
    unknown = set(values) - set().union(*(kind.__struct_fields__ for kind in PARTS.values()))
    assert not unknown, f"no such options: {unknown}"
    nested = {name: kind(**{key: values[key] for key in kind.__struct_fields__ if key in values}) for name, kind in PARTS.items()}
    return RuntimeConfig(**nested, speculative=speculative)


def tiny_speculative(folder: str, **changes: object) -> SpeculativeConfig:
    """An EAGLE chain of three steps with dummy weights from `folder`."""
    values: dict[str, object] = dict(
        algorithm="EAGLE", draft_model_path=folder, draft_load_format="dummy", num_steps=3, topk=1, num_draft_tokens=4, token_map=None,
        attention_backend="torch_native", draft_decode_graph=True, draft_extend_graph=True, disable_by_batch_size=None,
        accept_threshold_single=1.0, accept_threshold_acc=1.0, synthetic_accept=None, check_parity=False,
    )  # fmt: skip
    values.update(changes)
    return SpeculativeConfig(**values)  # type: ignore[arg-type]


def write_head(folder: Path, eagle3: bool = False) -> str:
    """The config.json of a one-layer draft head for `tiny_model`."""
    raw = dict(
        architectures=["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLMEagle"], model_type="llama", vocab_size=96, hidden_size=64,
        intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope_theta=10000.0, max_position_embeddings=256, tie_word_embeddings=False, torch_dtype="float32",
    )  # fmt: skip
    if eagle3:
        raw |= {"draft_vocab_size": 96, "target_hidden_size": 64}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)
