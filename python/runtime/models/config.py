"""A model's architecture, as read from config.json or GGUF metadata. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from runtime.config.quant_config import QuantConfig


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaled rotary frequencies.

    Attributes:
        kind: the rule, by its name in config.json.
        factor: by which wavelengths are stretched, fully or partly.
        low_freq_factor, high_freq_factor: llama3: bounds of the wavelengths that are partly stretched.
        original_max_position: the context length before scaling.
        beta_fast, beta_slow: yarn: bounds of the partly stretched pairs, as rotations within the original context.
        truncate: yarn: whether those bounds are rounded to whole pairs.
        short_factors, long_factors: longrope: the divisor of each pair's frequency, for contexts up to
            `original_max_position` and above.
        rotated: proportional: the share of pairs that rotate.
        magnitude: factor of cosines and sines.
        mscale_all_dim: yarn: weight of DeepSeek's correction of attention scores; 0 for none.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic", "longrope", "proportional"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated: float = 1.0
    magnitude: float = 1.0
    mscale_all_dim: float = 0.0


UNROTATED = RopeScaling("proportional", 1.0, rotated=0.0)
"""The scaling by which no entry is rotated."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Growth of queries with their position, as in Llama 4: the factor 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: int


Scoring = Literal["softmax", "sigmoid", "topk_softmax"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The sparse MLPs of a model.

    Attributes:
        top_k: experts that each token is routed to.
        intermediate_size: of one expert.
        scoring: how the router's logits become weights: softmax over all experts; sigmoid; or softmax over the chosen experts
            ("topk_softmax").
        correction: whether the router has a correction bias [E], which affects only which experts are chosen.
        renormalize: whether the weights of a token's experts are made to sum to 1.
        scaling: factor applied to the final weights.
        num_groups, top_groups: experts are chosen from the best `top_groups` of `num_groups` equal groups.
        group_best: how many of the best experts of a group make up its score, 1 or 2.
        shared_intermediate_size: of the shared expert, through which every token runs; 0 if there is none.
        layers: whether each layer is sparse.
        bias: whether the router and the experts have biases.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Scoring
    renormalize: bool
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    shared_intermediate_size: int = 0
    layers: tuple[bool, ...]
    bias: bool = False
    correction: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention. `ModelConfig.head_dim` is the number of rotated columns of a head.

    Attributes:
        q_rank: columns of the queries' latent; None if queries are projected in one step.
        kv_rank: columns of the latent of keys and values.
        nope_dim: columns of a query and of a key that are not rotated.
        value_dim: columns of a value.
        scale: factor of the scores.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Linear attention with the gated delta rule.

    Attributes:
        layers: whether each layer has it; the others have attention over keys and values.
        num_key_heads, num_value_heads: heads of queries and keys, and of values.
        key_dim, value_dim: size of a key and of a value.
        conv_width: tokens that the causal convolution reads, the current one included.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The multi-token prediction layer that a checkpoint holds in addition to its model.

    Attributes:
        prefix: common prefix of its tensor names.
        block: of the names of its block, after `prefix`.
        token_norm, hidden_norm, proj, final_norm: names of its own parts, after `prefix`.
        hidden_first: whether the input of `proj` is [hidden state, embedding] instead of [embedding, hidden state].
        blank_start: whether the embedding at position 0 is replaced by zeros.
        feeds_normed: whether the next draft step is fed the state after `final_norm`.
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    proj: str
    final_norm: str
    hidden_first: bool = False
    blank_start: bool = False
    feeds_normed: bool = False
    block: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """The full-attention layers of a model whose sliding-window layers have different heads.

    Attributes:
        shared_kv: whether the projected keys, before norm and rotation, also serve as the values.
    """

    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    shared_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's architecture, in the fields that all model families share.

    Attributes:
        architecture: Hugging Face's class name, e.g. LlamaForCausalLM; it selects the family.
        window: keys that a query sees before its own, by layer; -1 for all.
        eos_ids: token ids that end a text, of those that the model can write.
        dtype: of the checkpoint.
        qkv_bias, o_bias, mlp_bias: whether those projections have biases.
        qk_norm: whether q and k are normed per head.
        norm_after_rope: whether norms of q and k per head come after the rotary embedding.
        qk_row_norm: whether q and k are normed over all heads at once.
        sinks: whether each query head has an attention sink.
        rotary_dim: leading entries of a head that are rotated; None for all.
        rope_interleaved: whether entries 2i and 2i + 1 rotate together, instead of i and i + half.
        query_scaling: how queries grow with their position; None for not at all.
        latent: None for attention with keys and values per head.
        delta: the layers with linear attention; None if no layer has it.
        output_gate: whether the outputs of attention are multiplied by the sigmoid of a gate, which the query projection also gives.
        mtp: None where the checkpoint holds no layer for multi-token prediction.
        draft_vocab_size: for draft heads with a reduced vocabulary, else None.
        target_hidden_size: for EAGLE heads: hidden size of the target.
        moe: the sparse MLPs; None for a dense model.
        quant: how linear layers are quantised, in the checkpoint or while it is loaded; None for unquantised weights.
        full_attention: heads of the full-attention layers if they differ from those of the other layers; else None.
        shared_kv: as in `FullAttention`.
        unrotated: layers without rotary embedding.
        v_norm: whether v is normed per head, without a weight.
        attn_scale: factor of attention scores; None for head_dim ** -0.5.
        attn_softcap: c in score = c * tanh(score / c) of attention; 0 for none.
        embed_scale: factor applied to the embeddings, rounded to the model's dtype.
        residual_scale: factor of what attention and MLP add to the residual stream, in models without norms behind them. The stream is kept
            divided by it, so that nothing is rounded: the embeddings are divided too, and `rms_eps` of the stream's norms by its square.
        logit_scale: factor of the logits.
        final_softcap: c in logits = c * tanh(logits / c); 0 for none.
        norm_offset: added to the weights of all norms as they are loaded.
        weight_prefix: of the names of the decoder's tensors.
        head_prefix: of the name of the LM head.
        no_head: whether the checkpoint lacks the LM head, so that the model gives hidden states only.
        unused_weights: beginnings of names that the checkpoint may hold and the decoder does not use.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context_len: int
    tie_embeddings: bool
    window: tuple[int, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: Literal["float32", "bfloat16", "float16"]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_after_rope: bool = False
    qk_row_norm: bool = False
    sinks: bool = False
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    query_scaling: QueryScaling | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    output_gate: bool = False
    mtp: MtpConfig | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    moe: MoeConfig | None = None
    quant: QuantConfig | None = None
    full_attention: FullAttention | None = None
    shared_kv: bool = False
    unrotated: tuple[int, ...] = ()
    v_norm: bool = False
    attn_scale: float | None = None
    attn_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    norm_offset: float = 0.0
    weight_prefix: str = "model."
    head_prefix: str = ""
    no_head: bool = False
    unused_weights: tuple[str, ...] = ()

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration with the heads and the rotary embedding of layer `layer`."""
        if layer in self.unrotated:
            return replace(self, rope_scaling=UNROTATED, norm_after_rope=False, unrotated=())
        full = self.full_attention
        if full is None or self.window[layer] >= 0:
            return self
        return replace(self, **{field.name: getattr(full, field.name) for field in fields(full)}, full_attention=None)

    @property
    def kv_columns(self) -> int:
        """Values that one layer stores per token."""
        return 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.kv_rank + self.head_dim
