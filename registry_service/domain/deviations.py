"""Which known deviation a file's keys and shapes show, in one finding each, before all single ones.

A training engineer needs one sentence ("trained on a base of hidden size 4096") and not a thousand
findings that follow from it. Each summary says how much it explains and what to do about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from registry_service.domain.catalog import Catalog
from registry_service.domain.expected_tensors import KEY_PREFIX, ExpectedTensors
from registry_service.domain.findings import Code, Finding
from registry_service.domain.key_forms import KeyForms, Placed
from registry_service.domain.safetensors_header import Header
from registry_service.domain.shape_deviations import Pair, cut, shape_deviations, summary

_SAVE: Final = "or save again with PEFT's save_pretrained"
# What the file has, and what to do.
FORMS: Final[dict[Code, tuple[str, str]]] = {
    Code.KEY_PREFIX_MISSING: (
        f"no '{KEY_PREFIX}' in front",
        f"rename the keys: put '{KEY_PREFIX}' in front, {_SAVE}",
    ),
    Code.KEY_PREFIX_DOUBLED: (
        f"'{KEY_PREFIX}' more than once",
        f"rename the keys: keep '{KEY_PREFIX}' once; save the PEFT model, not a wrapper of it",
    ),
    Code.KEY_COMPILED: (
        "'_orig_mod' of torch.compile in the name",
        "rename the keys: drop '_orig_mod.'; save the model from before torch.compile",
    ),
    Code.KEY_DEFAULT_NAME: (
        "the adapter's name 'default' left in",
        f"rename the keys: drop '.default', {_SAVE}",
    ),
    Code.KEY_OTHER_ADAPTER: (
        "an adapter's name left in, which PEFT would load into that other adapter",
        "rename the keys: drop the adapter's name; one adapter a file",
    ),
    Code.KEY_KOHYA: (
        "kohya's names (lora_down, lora_up, alpha)",
        "convert the file to PEFT's names and put each alpha into lora_alpha or alpha_pattern",
    ),
    Code.KEY_MLX: (
        "MLX's names (lora_a of shape (in, r), lora_b of shape (r, out))",
        "convert the file: rename to lora_A.weight and lora_B.weight and transpose each tensor",
    ),
    Code.KEY_PER_EXPERT: (
        "one tensor an expert, as before transformers 5, where this base has its experts fused",
        "train with target_parameters on transformers 5 and peft 0.19 or newer",
    ),
    Code.KEY_MULTIMODAL_OLD: (
        "names of a multimodal model before transformers 5",
        "rename the keys: 'language_model.model.' is 'model.language_model.' now, or save again "
        "with transformers 5",
    ),
    Code.KEY_TEXT_CLASS: (
        "names of the text-only class, and this base is the multimodal one",
        "name the text-only base, or rename the keys: 'model.' is 'model.language_model.' here",
    ),
    Code.KEY_MULTIMODAL_CLASS: (
        "names of the multimodal class, and this base is the text-only one",
        "name the multimodal base, or rename the keys: 'model.language_model.' is 'model.' here",
    ),
    Code.KEY_OTHER_CLASS: (
        "names of another class of the same model (with or without its head)",
        "load the base as the class of its catalog, train or save again, or rename the keys",
    ),
}


def deviations(header: Header, expected: ExpectedTensors, catalog: Catalog) -> tuple[Finding, ...]:
    """The known deviations that the file shows; linear in the file's tensors and the catalog."""
    strays = _placed(header, expected, catalog)
    places: dict[str, str | None] = {tensor.name: tensor.name for tensor in header.tensors}
    places.update((item.name, item.key) for item in strays)
    # MLX's tensors are transposed, so that their sizes say nothing before they are converted.
    transposed = {item.name for item in strays if Code.KEY_MLX in item.codes}
    pairs = [
        Pair(key, tensor, expected.tensors[key])
        for tensor in header.tensors
        if (key := places[tensor.name]) is not None
        and key in expected.tensors
        and tensor.name not in transposed
    ]
    return (*_forms(strays), *shape_deviations(header, pairs, places, expected, catalog))


def _placed(header: Header, expected: ExpectedTensors, catalog: Catalog) -> list[Placed]:
    """What is not expected, with the place that it may belong to."""
    names = [tensor.name for tensor in header.tensors if tensor.name not in expected.tensors]
    if not names:
        return []
    forms = KeyForms(frozenset(tensor.name for tensor in header.tensors), expected, catalog)
    return [forms.place(name) for name in names]


def _forms(placed: Sequence[Placed]) -> Iterator[Finding]:
    """One finding for each form of names, with the first example that found its place."""
    seen: dict[Code, list[Placed]] = defaultdict(list)
    for item in placed:
        for code in item.codes:
            seen[code].append(item)
    unexplained = sum(not item.codes for item in placed)
    for code in FORMS:
        if code not in seen:
            continue
        what, remedy = FORMS[code]
        found = [item for item in seen[code] if item.key is not None]
        example = (found or seen[code])[0]
        wanted = f"{cut(example.key)}; " if example.key else ""
        count = f"{len(seen[code])} of {len(placed)} unexpected keys"
        fit = f"{len(found)} of them fit this base then; {unexplained} have another fault"
        yield summary(code, wanted + remedy, f"{cut(example.name)}: {what}; {count}, {fit}")
