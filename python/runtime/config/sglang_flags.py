"""SGLang's flags that Talon does not have: which are taken without effect, and why the others are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.errors import ConfigError

log = logging.getLogger(__name__)

_TAKEN_BY_REASON = {
    "metrics have fixed labels and buckets": (
        "bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token generation-tokens-buckets prompt-tokens-buckets "
        "prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets"
    ),
    "kernels are chosen by measurement": (
        "bf16-gemm-backend fp4-gemm-backend fp4-gemm-runner-backend fp8-gemm-backend fp8-gemm-runner-backend moe-runner-backend "
        "speculative-moe-runner-backend disable-flashinfer-autotune flashinfer-autotune-skip-ops flashinfer-mla-disable-ragged "
        "enable-flashinfer-cutlass-moe enable-flashinfer-trtllm-moe flashinfer-mxfp4-moe-precision enable-fused-qk-norm-rope "
        "enable-lean-attention enable-nvidia-megakernel enable-amd-monokernel monokernel-backend enforce-shared-experts-fusion "
        "disable-flashinfer-cutlass-moe-fp4-allgather triton-attention-num-kv-splits "
        "triton-attention-reduce-in-fp32 triton-attention-split-tile-size disable-chunked-prefix-cache prefill-kv-cache-dequant-dtype "
        "enable-single-batch-overlap enable-two-batch-overlap tbo-token-distribution-threshold enable-fused-moe-sum-all-reduce"
    ),
    "logits are always float32": "enable-fp32-lm-head",
    "kernels are compiled ahead of serving": "enable-torch-compile torch-compile-max-bs",
    "graph capture has no such option": "enable-cudagraph-gc",
    "the reduction between devices is not configurable": (
        "boundary-reduction disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill disable-custom-all-reduce "
        "enable-aiter-allreduce-fusion enable-flashinfer-allreduce-fusion enable-mscclpp enable-nccl-nvls enable-p2p-check "
        "enable-symm-mem enable-torch-symm-mem enforce-disable-flashinfer-allreduce-fusion flashinfer-allreduce-fusion-backend "
        "pre-warm-nccl"
    ),
    "the parts of a layer are placed on devices by the server": (
        "disable-attn-tp-gather enable-attn-tp-input-scattered enable-dense-mlp-attn-tp enable-dp-attention-local-control-broadcast "
        "enable-dp-lm-head enable-layernorm-sp enable-megamoe-for-layernorm-sp enable-shared-experts-attn-tp enable-tp-lm-head-all-to-all "
        "moe-dense-tp-size shared-experts-tp-size"
    ),
    "layers are not spread over devices": "pp-async-batch-depth pp-max-micro-batch-size enable-dynamic-chunking",
    "the log has a line at most every 5 seconds while requests run": "decode-log-interval",
    "the log never holds the texts of requests": "log-requests-level",
    "HTTP requests are logged with --log-requests only": "uvicorn-access-log-exclude-prefixes",
    "--log-requests logs the times of each request": "enable-request-time-stats-logging",
    "--otlp-traces-endpoint turns traces on, and every request has one": "enable-trace trace-modules",
    "/get_server_info shows the seconds of each start-up phase": "show-time-cost",
    "the metrics have no such figure": "enable-mfu-metrics collect-tokens-histogram enable-expert-distribution-metrics",
    "there is one scheduler": "enable-metrics-for-all-schedulers",
    "requests with a higher priority always run first": "enable-priority-scheduling abort-on-priority-when-disabled",
    "running requests are never preempted by priority": "disable-priority-preemption priority-scheduling-preemption-threshold",
    "the youngest request is retracted": "retraction-policy",
    "every step can admit requests, up to --max-prefill-tokens": (
        "enable-prefill-delayer min-free-slots-delay num-continuous-decode-steps prefill-decode-interval prefill-decode-interval-min-bs "
        "prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes prefill-delayer-queue-min-ratio "
        "prefill-delayer-token-usage-low-watermark prefill-max-requests"
    ),
    "the scheduler looks for requests before every step": "scheduler-recv-interval",
    "an idle scheduler always sleeps": "sleep-on-idle",
    "prompts are tokenised in threads, and texts made as tokens come": (
        "batch-notify-size disable-tokenizer-batch-decode dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout "
        "enable-dynamic-batch-tokenizer enable-http-worker-reuseport enable-tokenizer-batch-encode"
    ),
    "loading has no such option": (
        "startup-weight-load-mode weight-loader-disable-mmap weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints "
        "weight-loader-prefetch-num-threads"
    ),
    "the server reads text only": "disable-fast-image-processor language-model-only",
    "the garbage collector passes over all that was loaded": "gc-threshold gc-warning-threshold-secs",
    "--watchdog-timeout is the one time limit of a step": "soft-watchdog-timeout",
    "the warm-up is always one short request": "warmups",
    "usage always reports cached tokens": "enable-cache-report",
    "grammars are not kept on disk": "disable-outlines-disk-cache",
    "the server stores no files": "file-storage-path",
    "/v1/embeddings is always there": "is-embedding",
    "/v1/responses always stores its answers, in memory": "enable-response-store",
    "drafts of sampled requests are always verified by rejection sampling": "speculative-use-rejection-sampling",
    "the load is counted when it is asked for": "load-snapshot-publish-interval",
}

NO_EFFECT = {name: why for why, names in _TAKEN_BY_REASON.items() for name in names.split()}
"""Accepted with a warning that says why there is nothing to do."""

_EXPERTS = "the ranks of --tp-size share the experts; --ep-size places whole experts on them"
_CONTEXT = "the context is not spread over devices"

ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "attention-context-parallel-size": (("1",), _CONTEXT),
    "attn-cp-size": (("1",), _CONTEXT),
    "base-gpu-id": (("0",), "choose GPUs with CUDA_VISIBLE_DEVICES"),
    "cpu-offload-gb": (("0",), "weights stay on the device"),
    "dcp-size": (("1",), _CONTEXT),
    "decode-context-parallel-size": (("1",), _CONTEXT),
    "default-priority-value": (("0",), "a request without a priority has priority 0"),
    "detokenizer-worker-num": (("1",), "one detokenizer process keeps up with every scheduler measured"),
    "disaggregation-mode": (("null",), "prefill and decoding run in one server"),
    "gpu-id-step": (("1",), "choose GPUs with CUDA_VISIBLE_DEVICES"),
    "json-model-override-args": (("{}",), "change config.json in a copy of the model's folder"),
    "load-balance-method": (("auto", "round_robin"), "put a router in front of several servers"),
    "log-requests-format": (("text",), "--log-format json writes the whole log as JSON"),
    "log-requests-target": (("stderr",), "the log goes to standard error"),
    "model-config-parser": (("auto", "hf"), "config.json says what the model is"),
    "model-impl": (("auto", "sglang"), "models are Talon's own"),
    "moe-a2a-backend": (("none",), _EXPERTS),
    "moe-data-parallel-size": (("1",), _EXPERTS),
    "moe-dp-size": (("1",), _EXPERTS),
    "pipeline-parallel-size": (("1",), "layers are not spread over devices"),
    "pp-size": (("1",), "layers are not spread over devices"),
    "radix-cache-backend": (("auto",), "the radix cache has one implementation"),
    "radix-eviction-policy": (("lru",), "the least recently used prefix is evicted"),
    "speculative-attention-mode": (("prefill", "decode"), "verification has one implementation"),
    "speculative-draft-kv-cache-dtype": (("auto",), "the KV cache of a draft model has no type of its own"),
    "tokenizer-backend": (("huggingface",), "the tokenizers library is always used"),
    "tokenizer-mode": (("auto", "fast"), "the tokenizers library is always used"),
    "tokenizer-worker-num": (("1",), "one process tokenises, in threads"),
    "weight-version": (("default",), "answers do not name a version of the weights"),
}
"""Accepted with these values, which describe what Talon does anyway; the reason why no other is possible."""

REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("disaggregation-", "decoupled-spec-", "encoder-", "enable-pd", "pdmux-", "language-only", "sm-group-num", "optimistic-prefill",
      "num-reserved-decode-tokens", "prefill-round-robin", "spec-trace-dir", "enable-adaptive-dispatch"),
     "prefill and decoding run in one server"),
    (("enable-lora", "lora-", "max-lora", "max-loaded-loras", "experts-shared-outer-loras", "uno-"), "adapters are not supported"),
    (("enable-hi", "hicache-", "disable-hicache", "hisparse-", "hierarchical-", "enable-lmcache", "lmcache-", "enable-flexkv", "flexkv-",
      "enable-unified-", "unified-cache-", "enable-linker", "enable-kv-cache-sharding"), "the KV cache is on the device only"),
    (("enable-page-major", "swa-", "hybrid-kvcache", "disable-hybrid-swa", "radix-eviction-policy-config", "prefill-only-disable-kv-cache"),
     "the KV cache has no such option"),
    (("enable-multimodal", "keep-mm-", "mm-", "image-processor", "allowed-media", "limit-mm", "enable-mm-", "media-url", "enable-prefix-mm",
      "enable-broadcast-mm", "trust-mm", "enable-precise-embedding", "asr-"), "the server reads text only"),
    (("deepep-", "ep-", "eplb-", "enable-eplb", "enable-deepep", "expert-", "elastic-ep", "init-expert", "kt-", "max-ep-size",
      "dwdp-", "enable-elastic", "enable-waterfill", "enable-paged-experts", "paged-experts-", "fuseep-", "flashinfer-a2a", "mooncake-",
      "enable-w4a4", "speculative-moe-a2a", "speculative-enable-w4a4"), _EXPERTS),
    (("attn-dp-size", "attention-data-parallel-size"), "the groups of --enable-dp-attention follow from --dp-size"),
    (("nccl-port",), "give the address of the first node as --dist-init-addr"),
    (("use-ray",), "--distributed-executor-backend ray starts the ranks with Ray"),
    (("numa-node",), "bind the server with numactl or taskset"),
    (("gated-launch",), "the ranks start without waiting for a permission"),
    (("enable-quant-communications",), "devices exchange activations in their own type"),
    (("attn-cp", "attention-context", "dcp-", "decode-context", "enable-prefill-cp", "cp-", "enable-cp-", "context-bucket"), _CONTEXT),
    (("mamba-", "linear-", "enable-linear", "max-mamba", "enable-mamba", "enable-int8-mamba", "int8-mamba", "dsa-", "dsv4-", "dllm-",
      "qsa-", "enable-dsa", "enable-deepseek-v4", "enable-encoder-swa", "enable-decoder-swa", "enable-scattered", "c128-", "mlx-",
      "speculative-dsa", "nsa-", "enable-nsa", "ds-", "enable-double-sparsity"), "models of this kind are not supported"),
    (("remote-instance-", "checkpoint-engine-", "weight-cache-", "custom-weight-loader", "modelexpress-", "model-loader-extra",
      "engine-info-", "decrypted-", "delete-ckpt"), "weights come from a folder, a .gguf file or the hub"),
    (("model-checksum",), "the server does not verify checksums; compare them before it starts"),
    (("offload-", "ple-offload", "enable-memory-saver", "enable-weights-cpu", "enable-draft-weights-cpu"), "weights stay on the device"),
    (("prefill-attention-backend", "decode-attention-backend"), "choose one --attention-backend"),
    (("cuda-graph-bs-prefill", "cuda-graph-max-bs-prefill", "cuda-graph-max-seq-len-prefill", "cuda-graph-prefill"),
     "the sizes of prompt graphs are chosen by measurement"),
    (("cuda-graph-backend", "cuda-graph-config", "disable-prefill-cuda-graph", "disable-decode-cuda-graph", "debug-cuda-graph",
      "enable-piecewise-cuda-graph", "disable-piecewise-cuda-graph", "piecewise-cuda-graph"), "--disable-cuda-graph turns all graphs off"),
    (("enable-profile-cuda", "enable-torch-compile-debug", "enable-layerwise-nvtx"), "--profile and /start_profile write a trace"),
    (("enable-torchao", "torchao-", "modelopt-", "quantization-param", "rl-quant", "quantize-and-serve"),
     "checkpoints bring their own quantisation; see --quantization"),
    (("enable-tf32",), "--dtype float32 computes in float32"),
    (("skip-tokenizer-init",), "the server works with text; send token ids as input_ids or prompt"),
    (("allow-auto-truncate",), "a prompt that is too long is an error"),
    (("incremental-streaming-output", "stream-output"), "every event of /generate holds the whole text so far"),
    (("stream-response-default-include-usage",), "a request asks for it with stream_options.include_usage"),
    (("return-input-ids", "return-output-ids"), "a request asks for them with return_token_ids"),
    (("default-chat-template-kwargs",), "a request sends chat_template_kwargs"),
    (("enable-deterministic-inference", "rl-on-policy"), "seeds repeat an answer only in equal batches"),
    (("enable-custom-logit-processor", "enable-return-", "return-hidden", "return-aux", "sampling-mask", "enable-watermark", "watermark-",
      "forward-hooks"), "the server does not return or change model internals"),
    (("schedule-low-priority-values-first",), "a higher priority runs first"),
    (("enable-mis", "multi-item-scoring"), "each item of /v1/score is a prompt of its own"),
    (("strip-thinking-cache", "enable-strict-thinking"), "thinking is cached and sampled like other text"),
    (("enable-streaming-session", "enable-session-radix"), "the server holds no sessions; send the whole conversation"),
    (("speculative-adaptive",), "--speculative-num-steps auto chooses the depth of each step"),
    (("speculative-ngram-", "speculative-dflash", "speculative-dspark", "speculative-domino", "speculative-draft-window",
      "speculative-draft-sink", "speculative-use-block", "enable-multi-layer-eagle"),
     "this drafter is not supported, or has no such option"),
    (("speculative-draft-model-revision",), "give a local folder as --speculative-draft-model-path"),
    (("completion-template", "hf-chat-template-name"), "give the template itself as --chat-template"),
    (("kv-events-config", "load-publish", "enable-forward-pass-metrics", "forward-pass-metrics"), "the server publishes no events"),
    (("export-metrics", "extra-metric-labels", "tokenizer-metrics", "stat-loggers"), "metrics have fixed labels, at /metrics"),
    (("otlp-service-name",), "set OTEL_SERVICE_NAME in the environment"),
    (("tool-server",), "the server runs no tools"),
    (("grpc-", "smg-", "sidecar", "enable-http2", "http2-"), "the server speaks HTTP/1.1"),
    (("fastapi-root-path",), "let the proxy take its prefix off the path"),
    (("ssl-ca-certs",), "the server asks clients for a key, not for a certificate"),
    (("enable-ssl-refresh",), "restart the server to use another certificate"),
    (("constrained-json-",), "grammars choose their whitespace"),
    (("custom-sigquit-handler",), "signals end the server as the documentation says"),
    (("crash-dump-folder", "debug-tensor-dump", "kv-canary", "msprobe-", "enable-nan-detection"),
     "the server has no such aid for debugging"),
)  # fmt: skip
"""Refused, by how the name begins, with the reason."""


def take(name: str, values: Sequence[str]) -> bool:
    """Handle a flag of SGLang that Talon does not have; False if SGLang's tables have no such flag.

    Args:
        name: without the leading dashes, words joined by dashes.
        values: what follows it. false and null ask for nothing, and `no-` before the name says the same.

    Raises:
        ConfigError: the flag is refused; says why.
    """
    asked = not name.startswith("no-") and list(values) not in (["false"], ["null"])
    name = name.removeprefix("no-")
    if name in NO_EFFECT:
        if asked:
            log.warning("--%s has no effect: %s", name, NO_EFFECT[name])
        return True
    if name in ONLY:
        accepted, why = ONLY[name]
        if asked and not set(values) <= set(accepted):
            raise ConfigError(f"--{name} {' '.join(values)} is not supported: {why}.")
        return True
    for beginnings, why in REFUSED:
        if name.startswith(beginnings):
            if asked:
                raise ConfigError(f"--{name} is not supported: {why}. Leave it out.")
            return True
    return False
