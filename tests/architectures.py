"""Tiny configs of the architectures that bases are made of, and models of them on meta.

A model here is built through transformers' Auto classes, apart from the catalog builder that the
tests judge by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

VOCABULARY: Final = 64
_TOKENS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    **_TOKENS,
}
_GEMMA: Final = {**_DECODER, "tie_word_embeddings": True, "query_pre_attn_scalar": 8}
_LLAMA: Final = {"model_type": "llama", **_DECODER}
_ENCODER: Final[dict[str, Any]] = {"vocab_size": VOCABULARY, "num_labels": 3, "pad_token_id": 0}

ARCHITECTURES: Final[Mapping[str, dict[str, Any]]] = {
    "llama": _LLAMA,
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_DECODER},
    "qwen2": {"model_type": "qwen2", **_DECODER},
    "qwen3": {"model_type": "qwen3", **_DECODER},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_DECODER,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"model_type": "mixtral", **_DECODER, "num_local_experts": 4},
    "gemma2": {"model_type": "gemma2", **_GEMMA},
    "gemma3_text": {"model_type": "gemma3_text", **_GEMMA},
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", **_GEMMA},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", **_DECODER},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": VOCABULARY,
        **_TOKENS,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
    },
    "bert_classifier": {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        **_ENCODER,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "distilbert_classifier": {
        "model_type": "distilbert",
        "architectures": ["DistilBertForSequenceClassification"],
        **_ENCODER,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
    },
    "llama_classifier": {
        **_LLAMA,
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 3,
    },
}
_AUTO: Final = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}


def meta_model(config: Mapping[str, Any]) -> Any:
    """The model of a config on the meta device, of the class that it names."""
    import torch
    import transformers

    fields = {key: value for key, value in config.items() if key != "model_type"}
    named = config.get("architectures", [""])[0]
    auto = next((_AUTO[end] for end in _AUTO if named.endswith(end)), "AutoModelForCausalLM")
    built = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(built)
    assert named in ("", type(model).__name__)
    return model
