"""The embedded default: fetched, converted, and the same model to transformers and to us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.layers.attention.base import AttentionShape, plan_pass
from runtime.layers.attention.registry import build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.model_files.model_source import ModelSource, resolve_model
from runtime.models.registry import build_model, load_hf_config
from runtime.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
CPU = torch.device("cpu")
MAX_LEN, PAGE = 256, 16

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "   leading and trailing   \n\n\t tabs\r\n",
    "1234567890 3.14159 1,000,000 x2y3",
    "naïve café Straße Ελληνικά русский עברית العربية हिन्दी 中文 日本語 한국어",
    "😀👩‍👩‍👧‍👦🇫🇷 e\u0301 \u200b\ufeff\x00\x7f",
    "it's we'll I'D they've WON'T",
    "def f(x):\n    return {'a': [x ** 2, None]}  # <|not a token|>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<repo_name>a<file_sep>b",
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model(None)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return Tokenizer.load(source.tokenizer_folder)


@pytest.fixture(scope="module")
def theirs(source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source.weights_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hf_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.tokenizer_folder)


class OneRequest:
    """Our model over the pages of a single request."""

    def __init__(self, folder: str) -> None:
        c = load_hf_config(folder)
        self.model = build_model(c, TorchOps(), torch.float32, CPU)
        self.model.load(safetensors_weights(folder, progress=False))
        layers = self.model.attention_specs
        pool = KVPool([layer.kv for layer in layers], MAX_LEN // PAGE, PAGE, CPU)
        self.table = PageTable(1, MAX_LEN, PAGE, CPU)
        self.table.pages[0] = torch.arange(1, MAX_LEN // PAGE + 1, dtype=torch.int32)
        shape = AttentionShape(layers, 1, 1, MAX_LEN, tuning=H200)
        self.backend = build_backend("torch_native", shape, pool, self.table)
        self.model.bind(pool, self.backend)

    def logits(self, ids: list[int], start: int) -> torch.Tensor:
        """Logits [len(ids), V] of tokens that begin at position `start`; a lone token is decoded, more are a prompt."""
        n, mode = len(ids), ForwardMode.DECODE if len(ids) == 1 else ForwardMode.EXTEND
        positions, rows = torch.arange(start, start + n), torch.zeros(n, dtype=torch.int64)
        batch = ForwardBatch(
            mode=mode,
            batch_size=1,
            tokens_per_req=1 if mode == ForwardMode.DECODE else 0,
            input_ids=torch.tensor(ids),
            positions=positions,
            out_cache_loc=self.table.slots(rows, positions),
            req_pool_indices=rows[:1],
            seq_lens=torch.tensor([start + n], dtype=torch.int32),
            qo_indptr=torch.tensor([0, n], dtype=torch.int32),
            seq_len_bounds=np.array([start + n], dtype=np.int32),
            extend_lens=np.array([n], dtype=np.int32) if mode == ForwardMode.EXTEND else None,
        )
        with torch.inference_mode():
            plan_pass(self.backend, batch)
            return self.model.logits(self.model.forward(batch)[0])


def test_the_embedded_model_is_the_one_that_was_meant(source: ModelSource) -> None:
    assert (source.served_name, source.kind, source.is_embedded) == ("SmolLM2-135M-Instruct", "safetensors", True)
    config = json.loads((Path(source.weights_folder) / "config.json").read_text())
    expected = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    expected |= {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    assert {key: config[key] for key in expected} == expected


def test_its_weights_are_the_dequantised_ones_of_the_file(source: ModelSource, theirs: Any) -> None:
    """A k projection whose rows were put back by hand equals the converted one."""
    import gguf

    from runtime.model_files.cache_folder import default_cache_dir
    from runtime.model_files.embedded import find_gguf

    reader = gguf.GGUFReader(find_gguf(default_cache_dir()))
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.attn_k.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(3, 64, 576)
    by_hand = np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1).reshape(192, 576)
    assert np.array_equal(theirs.model.layers[7].self_attn.k_proj.weight.detach().numpy(), by_hand)


def test_ids_and_texts_equal_transformers(tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    for text in TEXTS:
        ids = hf_tokenizer(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == hf_tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode_plain(text) == hf_tokenizer(text, split_special_tokens=True)["input_ids"]
        decoder = tokenizer.stream(skip_special_tokens=False)
        assert "".join(decoder.step([i]) for i in ids) == text
        chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        chat = [*chat, {"role": "user", "content": text.replace("<|", "<").replace("<repo_name>", "").replace("<file_sep>", "")}]
        assert tokenizer.encode_chat(chat) == hf_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_it_answers_paris_with_the_logits_of_transformers(source: ModelSource, tokenizer: Tokenizer, theirs: Any) -> None:
    prompt = tokenizer.encode_chat(QUESTION)
    with torch.inference_mode():
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
        expected = theirs(torch.tensor([prompt + answer])).logits[0]
    ours = OneRequest(source.weights_folder)
    rows = [ours.logits(prompt, 0)]
    tokens = [int(rows[0][-1].argmax())]
    while tokens[-1] != tokenizer.eos_id:
        rows.append(ours.logits(tokens[-1:], len(prompt) + len(tokens) - 1))
        tokens.append(int(rows[-1][-1].argmax()))
    assert tokens == answer
    assert tokenizer.decode(tokens) == ANSWER
    got = torch.cat(rows)
    scale = expected.abs().max()
    assert ((got - expected[: len(got)]).abs().max() / scale).item() < 1e-4
