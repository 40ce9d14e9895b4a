"""The forms of tensor names that other tools and older versions write, and the way back from each.

A form is recognised by trying: its rule is applied, and the result has to be a key that the file
lacks. Rules work on the components of a name, never with a pattern that could backtrack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, Kind
from registry_service.domain.expected_tensors import KEY_PREFIX, ExpectedTensors
from registry_service.domain.findings import Code

# What PEFT calls its tensors, and whether a ``.weight`` or ``.bias`` follows.
_LORA: Final = {
    "lora_A": True,
    "lora_B": True,
    "lora_embedding_A": False,
    "lora_embedding_B": False,
    "lora_magnitude_vector": False,
}
_ENDINGS: Final = frozenset({"weight", "bias"})
_COMPILED: Final = "_orig_mod"
_KOHYA: Final = {"lora_down": "lora_A.weight", "lora_up": "lora_B.weight", "alpha": "alpha"}
_KOHYA_STARTS: Final = (
    *("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_"),
    "lora_",
)
_MLX: Final = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_WRAPPERS: Final = frozenset({"base_layer", "original_module"})
# Names of the parts of a multimodal model before transformers 5, and since.
_MULTIMODAL_OLD: Final = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("visual.", "model.visual."),
)
_TEXT_CLASS: Final = (("model.", "model.language_model."),)
_MULTIMODAL_CLASS: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
_ROOTS: Final = 16
_EXPERTS: Final = "experts"
_OLD_MIXTURE: Final = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor's name belongs, and the forms that it was in. ``key`` None: nowhere known."""

    name: str
    key: str | None
    codes: tuple[Code, ...]


def plain_name(name: str) -> str:
    """The base's own name for what a key speaks of, without PEFT's prefix and wrappers."""
    parts = name.removeprefix(KEY_PREFIX).split(".")
    if parts[0] == _COMPILED:
        parts = parts[1:]
    kept: list[str] = []
    for position, part in enumerate(parts):
        # Only a wrapper inside a path is one: as the last part it is a tensor's name.
        inside = 0 < position < len(parts) - 1
        if inside and (part in _WRAPPERS or part == "modules_to_save"):
            continue
        if inside and parts[position - 1] == "modules_to_save" and part not in _ENDINGS:
            continue
        kept.append(part)
    return ".".join(kept)


def adapter_name_of(name: str) -> str | None:
    """The adapter's name that stands in a key, or None where there is none, as it should be."""
    parts = name.split(".")
    position = _lora_position(parts)
    if position is None:
        return None
    rest = parts[position + 1 :]
    if rest and rest[-1] in _ENDINGS:
        rest = rest[:-1]
    return ".".join(rest) or None


def layer_of(name: str) -> tuple[str, int] | None:
    """What stands before the first number of a name, and that number: ``model.layers``, 7."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if position and part.isdecimal() and len(part) <= 6:
            return ".".join(parts[:position]), int(part)
    return None


class KeyForms:
    """Places names among the keys that are wanted; the same name is given out once."""

    def __init__(
        self, present: frozenset[str], expected: ExpectedTensors, catalog: Catalog
    ) -> None:
        self._wanted = {key for key in expected.tensors if key not in present}
        # Without an expectation any module that LoRA can be put on is a place.
        self._modules: frozenset[str] = frozenset(
            module.name for module in catalog.modules if module.kind is not Kind.OTHER
        )
        self._any = not expected.tensors
        self._fused = {
            module.name
            for module in catalog.modules
            if any(len(shape) == 3 for shape in module.tensors.values())
        }
        self._roots = sorted({module.name.partition(".")[0] for module in catalog.modules})[:_ROOTS]
        self._flat: dict[str, str] | None = None

    def place(self, name: str) -> Placed:
        """Undo the forms that ``name`` is in, one after the other, until it is a wanted key."""
        if len(name) > limits.TENSOR_NAME_CHARS:
            return Placed(name, None, ())
        key, codes = name, []  # type: tuple[str, list[Code]]
        for rule in (_compiled, self._foreign, _adapter_name, _prefix):
            if Code.KEY_KOHYA in codes or Code.KEY_MLX in codes:
                break
            code, key = rule(key)
            if code is not None:
                codes.append(code)
            if self._take(key):
                return Placed(name, key, tuple(codes))
        for code, candidate in self._classes(key):
            if self._take(candidate):
                return Placed(name, candidate, (*codes, code))
        if self._names_an_expert(key):
            return Placed(name, None, (*codes, Code.KEY_PER_EXPERT))
        foreign = tuple(code for code in codes if code in (Code.KEY_KOHYA, Code.KEY_MLX))
        return Placed(name, None, foreign)

    def _take(self, key: str) -> bool:
        if self._any:
            path, suffix = _split(key)
            return bool(suffix) and path in self._modules
        if key not in self._wanted:
            return False
        self._wanted.discard(key)
        return True

    def _foreign(self, name: str) -> tuple[Code | None, str]:
        """kohya's and MLX's names as PEFT's, prefix included."""
        path, _, last = name.rpartition(".")
        if last in _MLX:
            # transformers and MLX have the same paths.
            return Code.KEY_MLX, f"{KEY_PREFIX}{path.removeprefix(KEY_PREFIX)}.{_MLX[last]}"
        if last == "weight":
            path, _, last = path.rpartition(".")
        if last not in _KOHYA or (last == "alpha" and not path.startswith("lora_")):
            return None, name
        return Code.KEY_KOHYA, f"{KEY_PREFIX}{self._unflattened(path)}.{_KOHYA[last]}"

    def _unflattened(self, path: str) -> str:
        """A module's path from kohya's, which has underscores for dots."""
        if self._flat is None:
            self._flat = {module.replace(".", "_"): module for module in self._modules}
        path = path.removeprefix(KEY_PREFIX)
        for start in _KOHYA_STARTS:
            found = self._flat.get(path.removeprefix(start).replace(".", "_"))
            if found is not None:
                return found
        return path

    def _classes(self, key: str) -> Iterator[tuple[Code, str]]:
        """The same module's key under other classes of the model, and older ones."""
        path = key.removeprefix(KEY_PREFIX)
        for code, table in (
            (Code.KEY_MULTIMODAL_OLD, _MULTIMODAL_OLD),
            (Code.KEY_TEXT_CLASS, _TEXT_CLASS),
            (Code.KEY_MULTIMODAL_CLASS, _MULTIMODAL_CLASS),
        ):
            for old, new in table:
                if path.startswith(old):
                    yield code, KEY_PREFIX + new + path.removeprefix(old)
        if _OLD_MIXTURE in path:
            yield Code.KEY_PER_EXPERT, KEY_PREFIX + path.replace(_OLD_MIXTURE, "mlp")
        yield Code.KEY_OTHER_CLASS, KEY_PREFIX + path.partition(".")[2]
        for root in self._roots:
            yield Code.KEY_OTHER_CLASS, f"{KEY_PREFIX}{root}.{path}"

    def _names_an_expert(self, key: str) -> bool:
        """True for ``…experts.7.gate_proj…`` where the base has its experts in one tensor."""
        parts = key.removeprefix(KEY_PREFIX).replace(_OLD_MIXTURE, "mlp").split(".")
        if _EXPERTS not in parts:
            return False
        position = parts.index(_EXPERTS)
        number = parts[position + 1 : position + 2]
        return bool(number and number[0].isdecimal()) and (
            ".".join(parts[: position + 1]) in self._fused
        )


def _compiled(name: str) -> tuple[Code | None, str]:
    parts = name.split(".")
    if _COMPILED not in parts:
        return None, name
    return Code.KEY_COMPILED, ".".join(part for part in parts if part != _COMPILED)


def _adapter_name(name: str) -> tuple[Code | None, str]:
    adapter = adapter_name_of(name)
    parts = name.split(".")
    position = _lora_position(parts)
    if adapter is None or position is None:
        return None, name
    kept = parts[: position + 1]
    if _LORA[parts[position]]:
        kept.append(parts[-1] if parts[-1] in _ENDINGS else "weight")
    code = Code.KEY_DEFAULT_NAME if adapter == "default" else Code.KEY_OTHER_ADAPTER
    return code, ".".join(kept)


def _prefix(name: str) -> tuple[Code | None, str]:
    path, count = name, 0
    while path.startswith(KEY_PREFIX):
        path, count = path.removeprefix(KEY_PREFIX), count + 1
    if count == 1:
        return None, name
    code = Code.KEY_PREFIX_DOUBLED if count else Code.KEY_PREFIX_MISSING
    return code, KEY_PREFIX + path


def _lora_position(parts: Sequence[str]) -> int | None:
    """Where the last of PEFT's tensor names stands."""
    found = [position for position, part in enumerate(parts) if part in _LORA]
    return found[-1] if found else None


def _split(key: str) -> tuple[str, str]:
    """A key's module path and what follows it; nothing follows where it is no LoRA key."""
    if not key.startswith(KEY_PREFIX):
        return "", ""
    parts = key.removeprefix(KEY_PREFIX).split(".")
    position = _lora_position(parts)
    if position is None:
        return "", ""
    tail = parts[position + 1 :]
    if tail not in ([["weight"], ["bias"]] if _LORA[parts[position]] else [[]]):
        return "", ""
    return ".".join(parts[:position]), ".".join(parts[position:])
