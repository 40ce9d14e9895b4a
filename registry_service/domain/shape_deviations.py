"""The known deviations that shapes, dtypes and layers show, once the names are understood."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain.catalog import Catalog
from registry_service.domain.expected_tensors import KEY_PREFIX, Expectation, ExpectedTensors
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.key_forms import layer_of, plain_name
from registry_service.domain.safetensors_header import Header, TensorInfo

_WHERE: Final = "adapter_model.safetensors"
_NAME_CHARS: Final = 110
_SHOWN: Final = 3
# One wrong tensor may be anything; from two on, all of them wrong in the same way are a pattern.
_SEVERAL: Final = 2
_DOWN: Final = frozenset({"lora_A", "lora_embedding_A"})
_UP: Final = frozenset({"lora_B", "lora_embedding_B", "lora_magnitude_vector"})
_ROWS: Final = "token_adapter"


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor and what it has to be, found by name or by a known deviation of it."""

    key: str
    tensor: TensorInfo
    expectation: Expectation


def shape_deviations(
    header: Header,
    pairs: Sequence[Pair],
    places: Mapping[str, str | None],
    expected: ExpectedTensors,
    catalog: Catalog,
) -> Iterator[Finding]:
    """One finding for each deviation; ``places`` gives each tensor's key, None where unknown."""
    here = frozenset(key for key in places.values() if key is not None)
    resized, vocabulary = _vocabulary(header, pairs, catalog)
    yield from _empty(header)
    yield from vocabulary
    yield from _width([pair for pair in pairs if pair.tensor.name not in resized], catalog)
    yield from _depth_over([name for name, key in places.items() if key is None], catalog)
    yield from _depth_under(here, expected)
    yield from _dtype(pairs)
    yield from _head(here, expected, catalog)


def _empty(header: Header) -> Iterator[Finding]:
    """What ZeRO-3 leaves of a parameter that was not gathered before saving."""
    empty = [tensor for tensor in header.tensors if 0 in tensor.shape]
    flat = [
        tensor
        for tensor in header.tensors
        if len(tensor.shape) == 1 and tensor.shape != (0,)
        if not {"lora_A", "lora_B"}.isdisjoint(tensor.name.split("."))
        and not tensor.name.endswith(".bias")
    ]
    lost = empty + (flat if len(empty) + len(flat) >= _SEVERAL else [])
    if lost:
        got = f"{len(lost)} of {len(header.tensors)} tensors empty or flat, as in {_named(lost[0])}"
        expected = (
            "whole tensors; under DeepSpeed ZeRO-3 gather the parameters before saving "
            "(stage3_gather_16bit_weights_on_model_save, or zero_to_fp32)"
        )
        yield summary(Code.TENSORS_EMPTY, expected, got)


def _vocabulary(
    header: Header, pairs: Sequence[Pair], catalog: Catalog
) -> tuple[frozenset[str], list[Finding]]:
    """Tensors whose count of rows is another vocabulary's, and the finding about them."""
    embeddings = (catalog.input_embedding, catalog.output_embedding)
    sizes = {
        module.name: (module.in_size, module.out_size)
        for module in catalog.modules
        if module.name in embeddings
    }
    rows = {
        f"{name}.weight": (size if name == catalog.input_embedding else size[::-1])
        for name, size in sizes.items()
    }
    counts: dict[str, tuple[int, int | None]] = {}
    for tensor in header.tensors:
        wanted = rows.get(plain_name(tensor.name))
        if wanted and len(tensor.shape) == 2 and tensor.shape[1] == wanted[1]:
            counts[tensor.name] = (tensor.shape[0], wanted[0])
    for pair in pairs:
        axis = 1 - pair.expectation.rank_axis if pair.expectation.rank_axis in (0, 1) else None
        side = _DOWN if pair.expectation.module == catalog.input_embedding else _UP
        if pair.expectation.module in sizes and axis is not None and _on(side, pair.key):
            shapes = (pair.tensor.shape, pair.expectation.shape)
            if all(len(shape) == 2 for shape in shapes):
                counts[pair.tensor.name] = (shapes[0][axis], shapes[1][axis])
    resized = {name: sizes for name, sizes in counts.items() if sizes[0] != sizes[1]}
    if not resized:
        return frozenset(), []
    name, (got, wanted_rows) = next(iter(resized.items()))
    expected = (
        f"a vocabulary of {wanted_rows}; train without resizing the embeddings, or register the "
        "base with the resized ones"
    )
    text = f"{got} in {cut(name)}, and {len(resized)} such tensors in all"
    return frozenset(resized), [summary(Code.VOCABULARY_RESIZED, expected, text)]


def _width(pairs: Sequence[Pair], catalog: Catalog) -> Iterator[Finding]:
    """Says whether A or B is of another width, where all tensors of a kind of module are."""
    kinds: dict[tuple[str, str], list[tuple[int, int] | None]] = defaultdict(list)
    for pair in pairs:
        for side, names in (("A", _DOWN), ("B", _UP)):
            if _on(names, pair.key):
                kinds[side, pair.expectation.module.rpartition(".")[2]].append(_widths(pair))
    wrong: Counter[tuple[str, int, int]] = Counter()
    for (side, _), widths in kinds.items():
        if None not in widths:
            wrong.update((side, *sizes) for sizes in widths if sizes is not None)
    if sum(wrong.values()) < _SEVERAL:
        return
    totals = Counter(side for (side, _), widths in kinds.items() for _ in widths)
    hidden = next((m.out_size for m in catalog.modules if m.name == catalog.input_embedding), None)
    hint = "train it on this very base, or name the base that it was trained on"
    other = Counter[int]()
    for (_, wanted, got), count in wrong.items():
        if wanted == hidden:
            other[got] += count
    if other:
        got = other.most_common(1)[0][0]
        hint = f"trained on a base of hidden size {got}, this one has {hidden}: {hint}"
    parts = [_side(side, totals[side], wrong) for side in ("A", "B")]
    yield summary(Code.OTHER_WIDTH, hint, "; ".join(parts))


def _widths(pair: Pair) -> tuple[int, int] | None:
    """The first (expected, got) that differ besides the rank; None where none does."""
    got, wanted = pair.tensor.shape, pair.expectation.shape
    if len(got) != len(wanted) or got == wanted[::-1]:
        return None
    for axis, sizes in enumerate(zip(wanted, got, strict=True)):
        if axis != pair.expectation.rank_axis and sizes[0] != sizes[1]:
            return sizes
    return None


def _side(side: str, total: int, wrong: Counter[tuple[str, int, int]]) -> str:
    mine = [(count, wanted, got) for (at, wanted, got), count in wrong.items() if at == side]
    if not mine:
        return f"lora_{side}: 0 of {total} differ"
    mine.sort(reverse=True)
    what = "takes" if side == "A" else "gives"
    sizes = ", ".join(f"{got} for {wanted}" for _, wanted, got in mine[:_SHOWN])
    differ = sum(count for count, _, _ in mine)
    return f"lora_{side}: {differ} of {total} differ ({what} {sizes})"


def _depth_over(strays: Sequence[str], catalog: Catalog) -> Iterator[Finding]:
    """Layers in the file that the base does not have."""
    depth: dict[str, int] = {}
    for module in catalog.modules if strays else ():
        place = layer_of(module.name)
        if place is not None:
            depth[place[0]] = max(depth.get(place[0], 0), place[1] + 1)
    over: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in strays:
        place = layer_of(name.removeprefix(KEY_PREFIX))
        if place is not None and place[1] >= depth.get(place[0], place[1] + 1):
            over[place[0]].append((place[1], name))
    for root, found in over.items():
        layers = sorted({number for number, _ in found})
        got = f"{len(found)} keys of {cut(root)} {_range(layers)}, as in {cut(found[0][1])}"
        yield summary(Code.OTHER_DEPTH, _depth_hint(root, depth[root]), got)


def _depth_under(here: frozenset[str], expected: ExpectedTensors) -> Iterator[Finding]:
    """Layers at the end that the file lacks as a whole."""
    wanted: dict[str, set[int]] = defaultdict(set)
    present: dict[str, set[int]] = defaultdict(set)
    for key in expected.tensors:
        place = layer_of(key.removeprefix(KEY_PREFIX))
        if place is not None:
            wanted[place[0]].add(place[1])
            if key in here:
                present[place[0]].add(place[1])
    for root, layers in wanted.items():
        missing = sorted(layers - present[root])
        if missing and present[root] and missing[0] > max(present[root]):
            got = f"nothing for {root} {_range(missing)}; the last one is {missing[0] - 1}"
            yield summary(Code.OTHER_DEPTH, _depth_hint(root, len(layers)), got)


def _depth_hint(root: str, count: int) -> str:
    return (
        f"{count} layers of {cut(root)}; train it on this very base, or say layers_to_transform "
        "in adapter_config.json"
    )


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    more = ", …" if len(numbers) > _SHOWN else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more


def _dtype(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Every tensor in one wrong dtype: a matter of how the file was saved."""
    dtypes = {pair.tensor.dtype for pair in pairs}
    if len(pairs) < _SEVERAL or len(dtypes) != 1:
        return
    if any(pair.tensor.dtype in pair.expectation.dtypes for pair in pairs):
        return
    expected = f"{' or '.join(pairs[0].expectation.dtypes)}; save again in one of these"
    yield summary(Code.OTHER_DTYPE, expected, f"all {len(pairs)} tensors {dtypes.pop()}")


def _head(here: frozenset[str], expected: ExpectedTensors, catalog: Catalog) -> Iterator[Finding]:
    """Modules that the config saves in full and of which the file holds nothing."""
    embeddings = {catalog.input_embedding, catalog.output_embedding, *catalog.tied_modules}
    full: dict[str, bool] = {}
    for key, expectation in expected.tensors.items():
        if expectation.module not in embeddings and _is_full(key):
            full[expectation.module] = full.get(expectation.module, False) or key in here
    lost = [module for module, kept in full.items() if not kept]
    if lost:
        names = ", ".join(map(cut, lost[:_SHOWN]))
        expected_text = (
            f"the full tensors of {names}, as modules_to_save or task_type says; a head without "
            "them would answer at random: save again with PEFT's save_pretrained"
        )
        got = f"no tensor of {len(lost)} of {len(full)} modules"
        yield summary(Code.HEAD_LOST, expected_text, got)


def _is_full(key: str) -> bool:
    parts = key.split(".")
    return _ROWS not in parts and _DOWN.isdisjoint(parts) and _UP.isdisjoint(parts)


def _on(names: Iterable[str], key: str) -> bool:
    return not frozenset(names).isdisjoint(key.split("."))


def _named(tensor: TensorInfo) -> str:
    return f"{cut(tensor.name)} {tensor.shape}"


def cut(name: str) -> str:
    """A name short enough to stand in a sentence."""
    return name if len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 3] + "..."


def summary(code: Code, expected: str, got: str) -> Finding:
    """The one finding of a deviation."""
    return refuse(Check.STRUCTURE, code, _WHERE, expected, got)
