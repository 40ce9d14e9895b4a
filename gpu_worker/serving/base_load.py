"""Loading a proven base: what is hashed is the very buffer that is loaded."""

from __future__ import annotations

import copy
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from gpu_worker.base_files import ProvenBase
from gpu_worker.model_class import is_causal, load_fault, model_class_of
from gpu_worker.serving.parameters import Named, parameters_digest, parameters_named
from registry_service.domain.base_model import (
    base_config_parse,
    chat_template_digest,
    chat_template_of,
    is_tokenizer_file,
    tokenizer_digest,
)
from registry_service.domain.digests import digest_equal, digest_of
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.quantization import quantization_of

_LOADING_TROUBLE: Final = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """The base in memory. ``max_tokens`` is how many positions it has, for prompt and answer.

    ``chat_template`` is empty when it has none.
    """

    model: PreTrainedModel
    text: Text
    chat_template: str
    stop_tokens: frozenset[int]
    max_tokens: int
    parameters: Named
    parameters_digest: str


class Text:
    """The base's tokenizer, one caller at a time: fast tokenizers are not re-entrant.

    What decodes is a copy of its own: the model's thread decodes, and never waits for a prompt that
    is encoded, which takes long.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._decoder = tokenizer, copy.deepcopy(tokenizer)
        self._encoding, self._decoding = threading.Lock(), threading.Lock()
        self.token_chars: int = 1 + max(map(len, tokenizer.get_vocab()))
        """The most characters of a prompt for one token: its longest, and what parts it from the
        next, which some tokenizers drop."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt, with the special ones that the tokenizer adds."""
        with self._encoding:
            return tuple(self._tokenizer(text)["input_ids"])

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered chat, whose template wrote the special ones itself."""
        with self._encoding:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones."""
        with self._decoding:
            text: str = self._decoder.decode(tokens, skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """One token by itself, special ones included."""
        with self._decoding:
            text: str = self._decoder.decode([token], skip_special_tokens=False)
        return text

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their names, as chat templates use them."""
        found = self._tokenizer.special_tokens_map
        return {name: token for name, token in found.items() if isinstance(token, str)}

    @property
    def stop_token(self) -> int | None:
        """The tokenizer's end of sequence."""
        token: int | None = self._tokenizer.eos_token_id
        return token


def base_load(proven: ProvenBase, device: str) -> LoadedBase:
    """Load a base and its tokenizer from bytes that are hashed after they were read.

    Raises:
        RefusedError: the files changed since they were proven, weights and config disagree, or it
            is no causal language model.
    """
    fields = base_config_parse(proven.config)
    config, model_class = _classes(fields)
    with tempfile.TemporaryDirectory() as scratch:
        # The tokenizer's files are read by name, so they are read from a copy of ours.
        folder = Path(scratch)
        template = _private_copy(proven, folder)
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    model = _model(model_class, config, _weights(proven), quantization_of(fields))
    model.to(device).eval().requires_grad_(requires_grad=False)
    text = Text(tokenizer)
    named = parameters_named(model)
    return LoadedBase(
        model=model,
        text=text,
        chat_template=template,
        stop_tokens=_stop_tokens(config, text),
        max_tokens=int(getattr(config, "max_position_embeddings", 0) or 2**31),
        parameters=named,
        parameters_digest=parameters_digest(named),
    )


def device_choose(wanted: str) -> str:
    """``auto`` is CUDA when there is one, else the CPU.

    Raises:
        RefusedError: CUDA was asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RefusedError("device: expected CUDA, found none; use --device auto or cpu")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _private_copy(proven: ProvenBase, folder: Path) -> str:
    """Copy config and tokenizer, and compare them; the chat template."""
    (folder / "config.json").write_bytes(proven.config)
    files = {}
    for path in sorted(proven.dir.iterdir()):
        if path.is_file() and is_tokenizer_file(path.name):
            files[path.name] = path.read_bytes()
            (folder / path.name).write_bytes(files[path.name])
    tokenizer = tokenizer_digest({name: digest_of(data) for name, data in files.items()})
    template = chat_template_of(files)
    if (tokenizer, chat_template_digest(template)) != (
        proven.tokenizer_digest,
        proven.chat_template_digest,
    ):
        raise RefusedError("base: the tokenizer changed while the node started; start again")
    return template


def _weights(proven: ProvenBase) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in proven.files:
        if not file.path.endswith(".safetensors"):
            continue
        try:
            content = (proven.dir / file.path).read_bytes()
        except OSError as error:
            raise MalformedError(f"base: {file.path}: {error.strerror}") from error
        if not digest_equal(digest_of(content), file.digest):
            raise RefusedError(f"base: {file.path}: changed while the node started; start again")
        tensors = safetensors.torch.load(content)
        twice = state.keys() & tensors.keys()
        if twice:
            raise RefusedError(f"base: {file.path}: {min(twice)} is in another file too")
        state |= tensors
    return state


def _classes(fields: dict[str, Any]) -> tuple[Any, Any]:
    """The config, and the class of the model: one that writes text, or nothing is served."""
    config_class, model_class = model_class_of(fields)
    if not is_causal(config_class, model_class):
        raise RefusedError(
            f"base: {model_class.__name__}: expected a causal language model; a node serves no "
            "other, so validate its adapters here and serve them elsewhere"
        )
    return config_class.from_dict(fields), model_class


def _model(model_class: Any, config: Any, weights: dict[str, Tensor], quantization: str) -> Any:
    try:
        model, trouble = model_class.from_pretrained(
            None, config=config, state_dict=weights, dtype="auto", output_loading_info=True
        )
    except Exception as error:
        # Hundreds of model classes, each with exceptions of its own.
        raise RefusedError(load_fault(quantization, error)) from error
    found = {name: sorted(map(str, trouble[name])) for name in _LOADING_TROUBLE if trouble[name]}
    if found:
        raise RefusedError(f"base: weights and config disagree: {str(found)[:600]}")
    return model


def _stop_tokens(config: Any, text: Text) -> frozenset[int]:
    named = config.eos_token_id
    found = {named} if isinstance(named, int) else set(named or ())
    if text.stop_token is not None:
        found.add(text.stop_token)
    return frozenset(found)
