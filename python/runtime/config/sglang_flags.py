"""SGLang's flags that Talon does not have: which are taken without effect, and why the others are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.errors import ConfigError

log = logging.getLogger(__name__)

_NO_CHOICE = "the reduction between devices is not configurable"
_ALWAYS_METRICS = "metrics have fixed labels and buckets"

NO_EFFECT: dict[str, str] = {
    "bucket-e2e-request-latency": _ALWAYS_METRICS,
    "bucket-inter-token-latency": _ALWAYS_METRICS,
    "bucket-time-to-first-token": _ALWAYS_METRICS,
    "decode-log-interval": "the log has a line at most every 5 seconds while requests run",
    "disable-custom-all-reduce": _NO_CHOICE,
    "disable-fast-image-processor": "the server reads text only",
    "disable-outlines-disk-cache": "grammars are not kept on disk",
    "disable-priority-preemption": "running requests are never preempted by priority",
    "enable-cache-report": "usage always reports cached tokens",
    "enable-cudagraph-gc": "graph capture has no such option",
    "enable-flashinfer-allreduce-fusion": _NO_CHOICE,
    "enable-metrics-for-all-schedulers": "there is one scheduler",
    "enable-mfu-metrics": "the metrics have no such figure",
    "enable-p2p-check": _NO_CHOICE,
    "enable-priority-scheduling": "requests with a higher priority always run first",
    "enable-request-time-stats-logging": "--log-requests logs the times of each request",
    "enable-symm-mem": _NO_CHOICE,
    "enable-torch-compile": "kernels are compiled ahead of serving",
    "file-storage-path": "the server stores no files",
    "gc-warning-threshold-secs": "the garbage collector passes over all that was loaded",
    "is-embedding": "/v1/embeddings is always there",
    "log-requests-level": "the log never holds the texts of requests",
    "num-continuous-decode-steps": "every decode step can admit requests",
    "prompt-tokens-buckets": _ALWAYS_METRICS,
    "scheduler-recv-interval": "the scheduler looks for requests before every step",
    "show-time-cost": "/get_server_info shows the seconds of each start-up phase",
    "sleep-on-idle": "an idle scheduler always sleeps",
    "soft-watchdog-timeout": "--watchdog-timeout is the one time limit of a step",
    "torch-compile-max-bs": "kernels are compiled ahead of serving",
    "triton-attention-num-kv-splits": "attention kernels have no such option",
    "triton-attention-reduce-in-fp32": "attention kernels have no such option",
    "warmups": "the warm-up is always one short request",
    "weight-loader-prefetch-checkpoints": "loading has no such option",
}
"""Accepted with a warning that says why there is nothing to do."""

ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "base-gpu-id": (("0",), "choose GPUs with CUDA_VISIBLE_DEVICES"),
    "detokenizer-worker-num": (("1",), "one detokenizer process keeps up with every scheduler measured"),
    "disaggregation-mode": (("null",), "prefill and decoding run in one server"),
    "gpu-id-step": (("1",), "choose GPUs with CUDA_VISIBLE_DEVICES"),
    "json-model-override-args": (("{}",), "change config.json in a copy of the model's folder"),
    "load-balance-method": (("auto", "round_robin"), "put a router in front of several servers"),
    "model-impl": (("auto", "sglang"), "models are Talon's own"),
    "pipeline-parallel-size": (("1",), "layers are not spread over devices"),
    "pp-size": (("1",), "layers are not spread over devices"),
    "radix-cache-backend": (("auto",), "the radix cache has one implementation"),
    "radix-eviction-policy": (("lru",), "the least recently used prefix is evicted"),
    "speculative-attention-mode": (("prefill", "decode"), "verification has one implementation"),
    "tokenizer-backend": (("huggingface",), "the tokenizers library is always used"),
    "tokenizer-mode": (("auto", "fast"), "the tokenizers library is always used"),
    "tokenizer-worker-num": (("1",), "one process tokenises, in threads"),
}
"""Accepted with these values, which describe what Talon does anyway; the reason why no other is possible."""

REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("disaggregation-", "decoupled-spec-", "encoder-", "enable-pd", "pdmux-", "language-only"), "prefill and decoding run in one server"),
    (("enable-lora", "lora-", "max-lora", "max-loaded-loras"), "adapters are not supported"),
    (("enable-hi", "hicache-", "hisparse-", "enable-lmcache", "lmcache-", "enable-flexkv", "flexkv-"),
     "the KV cache is on the device only"),
    (("enable-multimodal", "mm-", "image-processor", "allowed-media", "limit-mm", "enable-mm-", "media-url"), "the server reads text only"),
    (("moe-", "deepep-", "ep-", "eplb-", "enable-eplb", "enable-deepep", "expert-", "elastic-ep", "init-expert", "kt-"),
     "the ranks of --tp-size share the experts; --ep-size places whole experts on them"),
    (("enable-dp-", "attn-dp-size", "attention-data-parallel-size"), "the groups of --enable-dp-attention follow from --dp-size"),
    (("nccl-init-addr", "dist-timeout", "nccl-port"), "give the address of the first node as --dist-init-addr"),
    (("attn-cp", "attention-context", "dcp-", "decode-context", "enable-prefill-cp", "cp-"), "the context is not spread over devices"),
    (("mamba-", "linear-attn", "enable-linear", "max-mamba", "dsa-", "dsv4-", "dllm-"), "models of this kind are not supported"),
    (("remote-instance-", "checkpoint-engine-", "weight-cache-", "custom-weight-loader", "modelexpress-", "model-loader-extra"),
     "weights come from a folder, a .gguf file or the hub"),
    (("cpu-offload", "offload-", "ple-offload", "enable-memory-saver", "enable-weights-cpu"), "weights stay on the device"),
    (("prefill-attention-backend", "decode-attention-backend"), "choose one --attention-backend"),
    (("cuda-graph-bs-prefill", "cuda-graph-max-bs-prefill", "cuda-graph-max-seq-len-prefill", "cuda-graph-prefill"),
     "the sizes of prompt graphs are chosen by measurement"),
    (("cuda-graph-backend", "cuda-graph-config", "disable-prefill-cuda-graph", "disable-decode-cuda-graph"),
     "--disable-cuda-graph turns all graphs off"),
    (("enable-torchao", "torchao-", "modelopt-", "quantization-param", "rl-quant", "quantize-and-serve"),
     "checkpoints bring their own quantisation; see --quantization"),
    (("skip-tokenizer-init",), "the server works with text; send token ids as input_ids or prompt"),
    (("allow-auto-truncate",), "a prompt that is too long is an error"),
    (("incremental-streaming-output", "stream-output"), "every event of /generate holds the whole text so far"),
    (("enable-deterministic-inference", "rl-on-policy"), "seeds repeat an answer only in equal batches"),
    (("enable-custom-logit-processor", "enable-return-", "return-hidden", "enable-watermark", "watermark-", "forward-hooks"),
     "the server does not return or change model internals"),
    (("schedule-low-priority-values-first",), "a higher priority runs first"),
    (("speculative-ngram-", "speculative-dflash", "speculative-dspark", "speculative-domino", "speculative-adaptive", "uno-"),
     "this drafter is not supported, or has no such option"),
    (("speculative-draft-model-revision",), "give a local folder as --speculative-draft-model-path"),
    (("completion-template", "hf-chat-template-name"), "give the template itself as --chat-template"),
    (("kv-events-config", "load-publish"), "the server publishes no events"),
    (("tool-server", "enable-response-store"), "the server runs no tools and stores no answers"),
    (("grpc-", "smg-", "sidecar", "enable-http2", "http2-"), "the server speaks HTTP/1.1"),
    (("constrained-json-",), "grammars choose their whitespace"),
    (("crash-dump-folder", "debug-tensor-dump", "kv-canary", "msprobe-"), "the server writes no dumps"),
)  # fmt: skip
"""Refused, by how the name begins, with the reason."""


def take(name: str, values: Sequence[str]) -> bool:
    """Handle a flag of SGLang that Talon does not have; False if SGLang's tables have no such flag.

    Args:
        name: without the leading dashes, words joined by dashes.
        values: what follows it.

    Raises:
        ConfigError: the flag is refused; says why.
    """
    if name in NO_EFFECT:
        log.warning("--%s has no effect: %s", name, NO_EFFECT[name])
        return True
    if name in ONLY:
        accepted, why = ONLY[name]
        if not set(values) <= set(accepted):
            raise ConfigError(f"--{name} {' '.join(values)} is not supported: {why}.")
        return True
    for beginnings, why in REFUSED:
        if name.startswith(beginnings):
            raise ConfigError(f"--{name} is not supported: {why}. Leave it out.")
    return False
