"""The kinds of change that ``mutants`` applies: how they are made, and what has to come of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from mutants import PREFIX, Adapter, Change, Shape, kinds

from registry_service.domain.catalog import Kind


def _drop(adapter: Adapter, name: str | None) -> bool:
    return name is not None and adapter.tensors.pop(name, None) is not None


def _add(adapter: Adapter, name: str, shape: Shape = (4, 4)) -> bool:
    fresh = name not in adapter.tensors
    adapter.tensors[name] = ("F32", shape)
    return fresh


def _module(key: str) -> str:
    return key.partition(".lora_")[0]


def _drop_module(adapter: Adapter) -> bool:
    module = _module(adapter.pair()[0])
    gone = [name for name in adapter.tensors if name.startswith(f"{module}.lora_")]
    for name in gone:
        del adapter.tensors[name]
    return bool(adapter.tensors)


def _last_layer(adapter: Adapter) -> bool:
    layers = sorted(
        {p for name in adapter.tensors for p in name.split(".") if p.isdigit()}, key=int
    )
    if len(layers) < 2:
        return False
    for name in [n for n in adapter.tensors if f".{layers[-1]}." in n]:
        del adapter.tensors[name]
    return bool(adapter.tensors)


def _retype(dtype: str) -> Change:
    def change(adapter: Adapter) -> bool:
        name = next(iter(adapter.tensors))
        adapter.tensors[name] = (dtype, adapter.tensors[name][1])
        return True

    return change


def _base_tensor(kind: Callable[[Any], bool], between: str = "") -> Change:
    def change(adapter: Adapter) -> bool:
        for module in adapter.catalog.modules:
            name = f"{PREFIX}{module.name}{between}.weight"
            if "weight" in module.tensors and kind(module) and name not in adapter.tensors:
                return _add(adapter, name, module.tensors["weight"])
        return False

    return change


def _untargeted(adapter: Adapter) -> bool:
    for module in adapter.catalog.modules:
        name = f"{PREFIX}{module.name}.lora_A.weight"
        if module.kind is Kind.LINEAR and not any(
            key.startswith(f"{PREFIX}{module.name}.") for key in adapter.tensors
        ):
            return _add(adapter, name, (4, module.in_size or 0))
    return False


def _beyond(adapter: Adapter) -> bool:
    layers = [p for p in adapter.pair()[0].split(".") if p.isdigit()]
    return bool(layers) and _add(
        adapter, adapter.pair()[0].replace(f".{layers[0]}.", ".97.", 1), (4, 4)
    )


def _shift(adapter: Adapter) -> bool:
    def change(name: str) -> str:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            parts[at] = str(int(parts[at]) + 1)
        return ".".join(parts)

    return adapter.rename(change)


def _swap(adapter: Adapter) -> bool:
    down, up = adapter.pair()
    tensors = adapter.tensors
    if down not in tensors or up not in tensors or tensors[down][1] == tensors[up][1]:
        return False
    tensors[down], tensors[up] = tensors[up], tensors[down]
    return True


def _name_in(name: str, every: bool) -> Change:
    def change(adapter: Adapter) -> bool:
        down = adapter.pair()[0]

        def renamed(key: str) -> str:
            if ".lora_" not in key or not (every or key == down):
                return key
            head, mark, tail = key.rpartition(".lora_")
            factor, dot, rest = tail.partition(".")
            return f"{head}{mark}{factor}.{name}{dot}{rest}"

        return adapter.rename(renamed)

    return change


def _ranks(change: Callable[[int], int], both: bool) -> Change:
    def mutate(adapter: Adapter) -> bool:
        down, up = adapter.pair()
        if len(adapter.tensors[down][1]) != 2:
            return False
        adapter.reshape(down, lambda shape: (change(shape[0]), *shape[1:]))
        return not both or adapter.reshape(up, lambda shape: (shape[0], change(shape[1])))

    return mutate


def _configured(**changes: Any) -> Change:
    def change(adapter: Adapter) -> bool:
        applies = any(adapter.config.get(name) != value for name, value in changes.items())
        adapter.config.update(changes)
        return applies

    return change


def _listed(change: Callable[[Adapter, list[str]], list[str]]) -> Change:
    def mutate(adapter: Adapter) -> bool:
        targets = adapter.config["target_modules"]
        if not isinstance(targets, list) or not targets:
            return False
        changed = change(adapter, targets)
        applies = changed != targets and bool(changed)
        adapter.config["target_modules"] = changed
        return applies

    return mutate


def _exclude(adapter: Adapter) -> bool:
    module = _module(adapter.pair()[0]).removeprefix(PREFIX)
    if adapter.config.get("exclude_modules") or any(
        module == name for name in adapter.config["target_parameters"] or []
    ):
        return False
    adapter.config["exclude_modules"] = [module]
    return True


def _rank_of_one(adapter: Adapter) -> bool:
    down = adapter.pair()[0]
    module = _module(down).removeprefix(PREFIX)
    if adapter.config["rank_pattern"] or adapter.config.get("target_parameters"):
        return False
    adapter.config["rank_pattern"] = {module: adapter.tensors[down][1][0] + 2}
    return True


def _on_base(name: str) -> Change:
    def change(adapter: Adapter) -> bool:
        # Layers that are written out are there in a deeper base too: only its digest is another.
        if name not in adapter.others or adapter.config["layers_to_transform"]:
            return False
        adapter.catalog = adapter.others[name]
        return True

    return change


def _raw(change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> Change:
    def mutate(adapter: Adapter) -> bool:
        adapter.raw_header = change
        return True

    return mutate


def _entries(edit: Callable[[dict[str, Any], list[str]], None]) -> Change:
    def change(header: bytes, data: bytes) -> tuple[bytes, bytes]:
        entries = json.loads(header)
        edit(entries, [name for name in entries if name != "__metadata__"])
        return json.dumps(entries).encode(), data

    return _raw(change)


def _overlap(entries: dict[str, Any], names: list[str]) -> None:
    entries[names[1]]["data_offsets"] = entries[names[0]]["data_offsets"]
    entries[names[1]]["shape"] = entries[names[0]]["shape"]


def _twice(header: bytes, data: bytes) -> tuple[bytes, bytes]:
    entries = json.loads(header)
    name = next(key for key in entries if key != "__metadata__")
    return header[:-1] + b"," + json.dumps({name: entries[name]}).encode()[1:], data


def _twice_in_config(adapter: Adapter) -> bool:
    adapter.raw_config = json.dumps(adapter.config).encode()[:-1] + b',"r":1}'
    return True


def _not_a_number(adapter: Adapter) -> bool:
    adapter.raw_config = json.dumps({**adapter.config, "lora_alpha": float("nan")}).encode()
    return True


def _declared(**changes: Any) -> Change:
    def change(adapter: Adapter) -> bool:
        adapter.declared = changes
        return True

    return change


def _rows(adapter: Adapter) -> bool:
    indices = adapter.config["trainable_token_indices"]
    if indices is None:
        adapter.config["trainable_token_indices"] = [1, 2]
    elif isinstance(indices, list):
        indices.append(50)
    return True


def _special(adapter: Adapter) -> bool:
    # A base's copy may be there or not.
    ends = (
        *(".lora_A.weight", ".lora_B.weight"),
        *("_embedding_A", "_embedding_B"),
        ".base_layer.weight",
    )
    return _drop(adapter, next((n for n in adapter.tensors if not n.endswith(ends)), None))


_KEYS: Final = "UNEXPECTED_TENSOR MISSING_TENSOR BASE_TENSOR ADAPTER_NAME_IN_KEY"
_SHAPES: Final = "SHAPE_MISMATCH RANK_MISMATCH"

REFUSED: Final = kinds(
    {
        "drop a first factor": (lambda a: _drop(a, a.pair()[0]), "MISSING_TENSOR"),
        "drop a second factor": (lambda a: _drop(a, a.pair()[1]), "MISSING_TENSOR"),
        "drop what is no factor": (_special, "MISSING_TENSOR"),
        "drop a module": (_drop_module, "MISSING_TENSOR"),
        "drop the last layer": (_last_layer, "MISSING_TENSOR"),
        "drop all but one": (
            lambda a: len(a.tensors) > 1 and bool(a.tensors.pop(a.pair()[1])) and _drop_module(a),
            "MISSING_TENSOR",
        ),
        "add an unknown factor": (
            lambda a: _add(a, f"{_module(a.pair()[0])}.lora_C.weight"),
            "UNEXPECTED_TENSOR",
        ),
        "add a stray tensor": (lambda a: _add(a, "stray"), "UNEXPECTED_TENSOR"),
        "add a factor of another module": (_untargeted, "UNEXPECTED_TENSOR"),
        "add a layer that is not there": (_beyond, "UNEXPECTED_TENSOR"),
        "add a linear's base weight": (
            _base_tensor(lambda m: m.kind in (Kind.LINEAR, Kind.CONV1D)),
            "BASE_TENSOR",
        ),
        "add a wrapped base weight": (
            _base_tensor(lambda m: m.kind in (Kind.LINEAR, Kind.CONV1D), ".base_layer"),
            "BASE_TENSOR",
        ),
        "add a norm": (_base_tensor(lambda m: m.kind is Kind.OTHER), "BASE_TENSOR"),
        "add an embedding": (_base_tensor(lambda m: m.kind is Kind.EMBEDDING), "BASE_TENSOR"),
        "leave default in one key": (_name_in("default", False), "ADAPTER_NAME_IN_KEY"),
        "leave default in all keys": (_name_in("default", True), "KEY_DEFAULT_NAME"),
        "leave another name in all keys": (_name_in("first", True), "KEY_OTHER_ADAPTER"),
        "lose the prefix": (
            lambda a: a.rename(lambda n: n.removeprefix(PREFIX)),
            "KEY_PREFIX_MISSING",
        ),
        "double the prefix": (lambda a: a.rename(lambda n: PREFIX + n), "KEY_PREFIX_DOUBLED"),
        "keep the compiler's prefix": (
            lambda a: a.rename(lambda n: n.replace(PREFIX, f"{PREFIX}_orig_mod.", 1)),
            "KEY_COMPILED",
        ),
        "write small letters": (lambda a: a.rename(lambda n: n.replace("lora_A", "lora_a")), _KEYS),
        "write down and up": (
            lambda a: a.rename(lambda n: n.replace("lora_A", "lora_down").replace("_B", "_up")),
            _KEYS,
        ),
        "misspell a module": (
            lambda a: a.rename(lambda n: n.replace(f"{_module(a.pair()[0])}.", "model.typo.")),
            _KEYS,
        ),
        "shift the layers": (_shift, _KEYS),
        "swap the factors": (_swap, "SHAPE_MISMATCH RANK_MISMATCH"),
        "transpose a factor": (
            lambda a: a.reshape(a.pair()[0], lambda s: s[::-1]),
            "SHAPE_MISMATCH RANK_MISMATCH",
        ),
        "flatten a factor": (
            lambda a: a.reshape(a.pair()[1], lambda s: (s[0] * s[1], *s[2:])),
            "SHAPE_MISMATCH",
        ),
        "add a dimension": (lambda a: a.reshape(a.pair()[1], lambda s: (1, *s)), "SHAPE_MISMATCH"),
        "add a rank to one factor": (_ranks(lambda r: r + 1, False), "RANK_MISMATCH"),
        "add a rank to a module": (_ranks(lambda r: r + 1, True), "RANK_MISMATCH"),
        "widen a first factor": (
            lambda a: a.reshape(a.pair()[0], lambda s: (s[0], s[1] + 8, *s[2:])),
            "SHAPE_MISMATCH",
        ),
        "halve a second factor": (
            lambda a: a.reshape(a.pair()[1], lambda s: (s[0] // 2, *s[1:])),
            "SHAPE_MISMATCH",
        ),
        "empty a factor": (
            lambda a: a.reshape(a.pair()[0], lambda s: (0, *s[1:])),
            "TENSOR_LAYOUT",
        ),
        "retype to F64": (_retype("F64"), "TENSOR_DTYPE"),
        "retype to I8": (_retype("I8"), "TENSOR_DTYPE"),
        "retype to F8": (_retype("F8_E4M3"), "TENSOR_DTYPE"),
        "retype to BOOL": (_retype("BOOL"), "TENSOR_DTYPE"),
        "another rank in the config": (
            lambda a: _configured(r=a.config["r"] + 1)(a),
            f"{_SHAPES} PATTERN_UNUSED",
        ),
        "a rank as text": (_configured(r="4"), "CONFIG_VALUE"),
        "a negative alpha": (_configured(lora_alpha=-8), "CONFIG_VALUE"),
        "a target that is not there": (_listed(lambda a, t: [*t, "typo_proj"]), "TARGET_UNKNOWN"),
        "a target less": (
            _listed(lambda a, t: t[1:]),
            "UNEXPECTED_TENSOR PATTERN_UNUSED TARGET_UNKNOWN BASE_TENSOR",
        ),
        "no targets": (_configured(target_modules=None), "TARGETS_MISSING CONFIG_VALUE"),
        "DoRA flipped": (
            lambda a: _configured(use_dora=not a.config["use_dora"])(a),
            f"{_KEYS} CONFIG_VALUE",
        ),
        "bias flipped": (
            lambda a: _configured(lora_bias=not a.config["lora_bias"])(a),
            f"{_KEYS} CONFIG_VALUE TARGET_KIND",
        ),
        "an exclusion more": (_exclude, f"{_KEYS} TARGET_UNKNOWN PATTERN_UNUSED"),
        "only one layer": (
            _configured(layers_to_transform=[0], layers_pattern=None),
            f"{_KEYS} CONFIG_VALUE TARGET_UNKNOWN PATTERN_UNUSED",
        ),
        "another rank of one module": (_rank_of_one, f"{_SHAPES} TARGET_KIND"),
        "a module to save": (
            lambda a: _configured(modules_to_save=[a.catalog.input_embedding])(a),
            "MISSING_TENSOR TARGET_UNKNOWN TARGET_KIND",
        ),
        "other rows": (_rows, f"{_KEYS} {_SHAPES} TARGET_KIND"),
        "all biases": (_configured(bias="all"), "CONFIG_OPTION_UNSUPPORTED"),
        "another type": (_configured(peft_type="IA3"), "PEFT_TYPE_UNSUPPORTED"),
        "a start that changes the base": (
            _configured(init_lora_weights="pissa"),
            "CONFIG_OPTION_UNSUPPORTED",
        ),
        "replicated layers": (_configured(layer_replication=[[0, 2]]), "CONFIG_OPTION_UNSUPPORTED"),
        "an unknown field": (_configured(lora_magic=1), "CONFIG_FIELD_UNKNOWN"),
        "an import": (
            _configured(auto_mapping={"parent_library": "os"}),
            "CONFIG_FIELD_FORBIDDEN",
        ),
        "a field twice": (_twice_in_config, "CONFIG_MALFORMED"),
        "not a number": (_not_a_number, "CONFIG_MALFORMED"),
        "another task": (
            _configured(task_type="QUESTION_ANS"),
            "TARGET_UNKNOWN CONFIG_VALUE TARGET_KIND",
        ),
        "a wider base": (_on_base("wider"), f"{_SHAPES} OTHER_WIDTH"),
        "a shallower base": (_on_base("shallower"), f"{_KEYS} TARGET_UNKNOWN PATTERN_UNUSED"),
        "a deeper base": (_on_base("deeper"), f"{_KEYS} CONFIG_VALUE"),
        "another architecture": (_on_base("foreign"), f"{_KEYS} TARGET_UNKNOWN TARGET_KIND"),
        "a tensor twice": (_raw(_twice), "TENSOR_DUPLICATE"),
        "tensors that overlap": (_entries(_overlap), "TENSOR_LAYOUT"),
        "trailing bytes": (_raw(lambda h, d: (h, d + bytes(8))), "TENSOR_LAYOUT"),
        "a truncated file": (_raw(lambda h, d: (h, d[:-4])), "TENSOR_LAYOUT"),
        "a hole": (
            _entries(
                lambda e, names: e[names[-1]].update(
                    data_offsets=[at + 4 for at in e[names[-1]]["data_offsets"]]
                )
            ),
            "TENSOR_LAYOUT",
        ),
        "an unknown field of a tensor": (
            _entries(lambda e, names: e[names[0]].update(extra=1)),
            "HEADER_MALFORMED",
        ),
        "metadata that is no text": (
            _entries(lambda e, names: e.update(__metadata__={"format": 1})),
            "HEADER_MALFORMED",
        ),
        "another rank declared": (_declared(rank=7), "DECLARATION_MISMATCH"),
        "another alpha declared": (_declared(alpha=7.5), "DECLARATION_MISMATCH"),
        "other targets declared": (_declared(targetModules=["x"]), "DECLARATION_MISMATCH"),
        "another base declared": (
            _declared(baseModelDigest="sha256:" + "c" * 64),
            "DECLARATION_MISMATCH",
        ),
    }
)


def _alpha(adapter: Adapter) -> bool:
    adapter.config["lora_alpha"] *= 10
    adapter.config["alpha_pattern"] = {}
    return True


def _alpha_of_one(adapter: Adapter) -> bool:
    if adapter.config["alpha_pattern"] or adapter.config["target_parameters"]:
        return False
    module = _module(adapter.pair()[0]).removeprefix(PREFIX)
    adapter.config["alpha_pattern"] = {module: adapter.config["lora_alpha"] * 10}
    return True


REVIEWED: Final = kinds(
    {
        "ten times alpha": (_alpha, "SCALING_HIGH"),
        "ten times alpha on one module": (_alpha_of_one, "SCALING_HIGH"),
    }
)


def _reordered(adapter: Adapter) -> bool:
    adapter.tensors = dict(reversed(adapter.tensors.items()))
    return True


def _halves(adapter: Adapter) -> bool:
    adapter.tensors = {name: ("BF16", shape) for name, (_, shape) in adapter.tensors.items()}
    return True


def _sorted_config(adapter: Adapter) -> bool:
    ordered = dict(sorted(adapter.config.items(), reverse=True))
    adapter.raw_config = json.dumps(ordered, indent=4).encode()
    return True


PASSED: Final = kinds(
    {
        "keys in another order": (_reordered, ""),
        "half the precision": (_halves, ""),
        "no metadata": (lambda a: a.metadata.clear() is None, ""),
        "the config's fields in another order": (_sorted_config, ""),
        "targets in another order": (_listed(lambda a, t: t[::-1]), ""),
        "another dropout": (
            lambda a: not a.config["target_parameters"] and _configured(lora_dropout=0.3)(a),
            "",
        ),
        "another name of the base": (_configured(base_model_name_or_path="org/name"), ""),
    }
)


def _values(adapter: Adapter) -> bool:
    # This stands for every change that keeps names, shapes and dtypes, a square transpose too.
    adapter.fill = 1
    return True


def _stable(adapter: Adapter) -> bool:
    return _configured(use_rslora=not adapter.config["use_rslora"])(adapter)


def _other_rows(adapter: Adapter) -> bool:
    indices = adapter.config["trainable_token_indices"]
    if not isinstance(indices, list):
        return False
    adapter.config["trainable_token_indices"] = [index + 1 for index in indices]
    return True


# What no static check can see; signature and digests do, or the dynamic checks.
UNSEEN: Final = kinds(
    {
        "changed values, or a square transpose": (_values, ""),
        "rslora flipped": (_stable, ""),
        "rows of other tokens": (_other_rows, ""),
    }
)
