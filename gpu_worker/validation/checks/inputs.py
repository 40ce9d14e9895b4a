"""The fixed inputs that the checks run a model on, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from gpu_worker.validation.checks.candidate import PREFIX, Candidate

Inputs = dict[str, torch.Tensor]
"""What a forward takes, by name; the first axis of each is the row."""

_TOKENS: Final = 16
_STRIDE: Final = 7919
_CHOSEN_TOKENS: Final = 16
_TRAINED_ROWS: Final = ".token_adapter.trainable_tokens_delta"
_VISION: Final = ("vision", "multi_modal")


def inputs_make(candidate: Candidate, model: Any) -> Inputs:
    """One row: fixed tokens, then those that an adapter on an embedding touches most.

    Where the adapter sits on the part of a model that sees, an image stands before the tokens.
    """
    embedding = model.get_input_embeddings().weight
    vocabulary = int(embedding.shape[0])
    tokens = [(torch.arange(_TOKENS) * _STRIDE + 1) % vocabulary]
    for name, tensor in sorted(candidate.tensors.items()):
        if name.endswith(".lora_embedding_A") and tensor.dim() == 2:
            tokens.append(_most(tensor.float().norm(dim=0)))
        elif name.endswith(_TRAINED_ROWS) and tensor.dim() == 2:
            tokens.append(_trained(candidate.config, name, tensor, embedding))
    chosen = torch.cat(tokens)
    inputs = {"input_ids": chosen[chosen < vocabulary].unsqueeze(0)}
    if any(word in name for name in candidate.tensors for word in _VISION):
        _image_add(inputs, model.config)
    return {name: tensor.to(embedding.device) for name, tensor in inputs.items()}


def rows_make(inputs: Inputs, rows: int, tokens: int) -> Inputs:
    """A batch of ``rows`` that differ: each row of tokens is the one before, rolled by one.

    The last ``tokens`` are enough, but for an image, whose own tokens have to be there.
    """
    row = inputs["input_ids"] if "pixel_values" in inputs else inputs["input_ids"][:, -tokens:]
    batch = {
        name: tensor.repeat(rows, *(1,) * (tensor.dim() - 1)) for name, tensor in inputs.items()
    }
    return {**batch, "input_ids": torch.cat([row.roll(n, dims=1) for n in range(rows)])}


def logits_of(model: Any, inputs: Mapping[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """The model's first output; ``options`` go to its forward."""
    options.update(inputs)
    if getattr(model.config, "is_encoder_decoder", False):
        options["decoder_input_ids"] = inputs["input_ids"]
    with torch.inference_mode():
        output = model(**options)
    result: torch.Tensor = output[0].detach().clone()
    return result


def _image_add(inputs: Inputs, config: Any) -> None:
    seen, places = getattr(config, "vision_config", None), getattr(config, "mm_tokens_per_image", 0)
    if seen is None or not places:
        return
    size = int(seen.image_size)
    shape = (1, int(seen.num_channels), size, size)
    # Stripes: an image of one colour would leave what looks for edges without effect.
    inputs["pixel_values"] = (torch.arange(size) % 7 / 3 - 1).expand(shape).contiguous()
    image = torch.full((1, int(places)), int(config.image_token_id))
    inputs["input_ids"] = torch.cat([image, inputs["input_ids"]], dim=1)


def _trained(
    config: dict[str, Any], name: str, rows: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """The trained tokens whose rows differ most from the base's."""
    indices = config.get("trainable_token_indices")
    if isinstance(indices, dict):
        module = name.removeprefix(PREFIX).removesuffix(_TRAINED_ROWS)
        listed = [value for key, value in indices.items() if f".{module}".endswith(f".{key}")]
        indices = listed[0] if listed else None
    chosen = torch.tensor(indices if isinstance(indices, list) else [], dtype=torch.long)
    if chosen.shape != rows.shape[:1] or rows.shape[1:] != embedding.shape[1:]:
        return chosen[:0]
    before = embedding[chosen.clamp(0, len(embedding) - 1)].detach().to("cpu", torch.float32)
    return chosen[_most((rows.float() - before).norm(dim=1))]


def _most(weights: torch.Tensor) -> torch.Tensor:
    return weights.topk(min(_CHOSEN_TOKENS, len(weights))).indices
