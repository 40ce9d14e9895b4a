"""Each known deviation is told by its own code, with counts, an example and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import sample_adapter as sample

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.deviations import FORMS
from registry_service.domain.expected_tensors import (
    KEY_PREFIX,
    Expectation,
    ExpectedTensors,
)
from registry_service.domain.findings import Code, Finding
from registry_service.domain.key_forms import plain_name
from registry_service.domain.safetensors_header import ALLOWED_DTYPES, Header, TensorInfo
from registry_service.domain.structure import structure_check

RANK, WIDTH, ROWS = 4, 16, 32
Shapes = dict[str, tuple[int, ...]]

SINGLES = frozenset(
    {
        *(Code.UNEXPECTED_TENSOR, Code.MISSING_TENSOR, Code.SHAPE_MISMATCH, Code.RANK_MISMATCH),
        *(Code.DTYPE_MISMATCH, Code.BASE_TENSOR, Code.ADAPTER_NAME_IN_KEY),
    }
)


def base(root: str = "model", layers: int = 4, *more: Module) -> Catalog:
    """A decoder with q_proj and o_proj in each layer, an embedding and a head."""
    embedding = sample.module(f"{root}.embed_tokens", Kind.EMBEDDING, ROWS, WIDTH)
    modules = [sample.other(root), embedding]
    for layer in range(layers):
        for name in ("q_proj", "o_proj"):
            path = f"{root}.layers.{layer}.self_attn.{name}"
            modules.append(sample.module(path, Kind.LINEAR, WIDTH, WIDTH))
    modules.append(sample.module("lm_head", Kind.LINEAR, WIDTH, ROWS))
    return sample.catalog(input_embedding=embedding.name, modules=(*modules, *more))


def expected_of(catalog: Catalog, *targets: str, **more: tuple[int, ...]) -> ExpectedTensors:
    """The tensors of rank 4 on the modules with these last names, and full ones by name."""
    tensors: dict[str, Expectation] = {}
    for module in catalog.modules:
        if module.last_name in (targets or ("q_proj", "o_proj")):
            sizes = module.in_size or 0, module.out_size or 0
            suffixes = (".lora_A.weight", ".lora_B.weight")
            if module.kind is Kind.EMBEDDING:
                suffixes = (".lora_embedding_A", ".lora_embedding_B")
            shapes = ((RANK, sizes[0]), (sizes[1], RANK))
            for axis, (suffix, shape) in enumerate(zip(suffixes, shapes, strict=True)):
                tensors[KEY_PREFIX + module.name + suffix] = Expectation(
                    shape, ALLOWED_DTYPES, module.name, RANK, axis
                )
    for name, shape in more.items():
        key = name.replace("__", ".")
        module_name = key.rpartition(".")[0]
        tensors[KEY_PREFIX + key] = Expectation(shape, ALLOWED_DTYPES, module_name, 0, None)
    return ExpectedTensors(tensors, {}, (), {}, {})


def shapes_of(expected: ExpectedTensors) -> Shapes:
    return {name: expectation.shape for name, expectation in expected.tensors.items()}


def renamed(shapes: Shapes, change: Callable[[str], str]) -> Shapes:
    return {change(name): shape for name, shape in shapes.items()}


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> Header:
    return Header(
        tuple(TensorInfo(name, dtype, shape, 0, 0) for name, shape in shapes.items()), (), 0, 0
    )


def summaries(
    shapes: Shapes,
    expected: ExpectedTensors,
    catalog: Catalog,
    dtype: str = "F32",
) -> dict[Code, Finding]:
    """The deviations by code; they come before everything else and refuse."""
    findings = structure_check(header_of(shapes, dtype), expected, catalog)
    single = [finding.code in SINGLES for finding in findings]
    assert single == sorted(single)
    found = [finding for finding in findings if finding.code not in SINGLES]
    assert all(finding.severity == "refuse" and finding.check == 5 for finding in found)
    assert len({finding.code for finding in found}) == len(found)
    return {finding.code: finding for finding in found}


def test_a_file_as_it_should_be_shows_no_deviation() -> None:
    catalog = base()
    expected = expected_of(catalog)
    assert structure_check(header_of(shapes_of(expected)), expected, catalog) == ()


def test_copies_are_there_all_or_none() -> None:
    catalog = base()
    names = [
        f"{KEY_PREFIX}{module}.base_layer.weight" for module in ("model.embed_tokens", "lm_head")
    ]
    copies = {
        name: Expectation(
            (ROWS, WIDTH), ALLOWED_DTYPES, plain_name(name)[: -len(".weight")], 0, None
        )
        for name in names
    }
    plain = expected_of(catalog)
    expected = ExpectedTensors(plain.tensors, {}, (), copies, {}, full_tensors=True)
    shapes = shapes_of(plain)
    assert structure_check(header_of(shapes), expected, catalog) == ()
    both = shapes | {name: (ROWS, WIDTH) for name in copies}
    assert structure_check(header_of(both), expected, catalog) == ()
    one = shapes | {names[0]: (ROWS, WIDTH)}
    (finding,) = structure_check(header_of(one), expected, catalog)
    assert (finding.code, finding.where) == (Code.MISSING_TENSOR, names[1])
    refused = structure_check(header_of(both), replace(expected, full_tensors=False), catalog)
    assert {(f.code, f.where) for f in refused} == {(Code.FULL_TENSOR, name) for name in names}
    assert "save_embedding_layers=False" in refused[0].expected


def with_name(adapter: str) -> Callable[[str], str]:
    def change(name: str) -> str:
        path, _, weight = name.rpartition(".")
        return f"{path}.{adapter}.{weight}"

    return change


def kohya(name: str) -> str:
    path = name.removeprefix(KEY_PREFIX).removesuffix(".weight")
    module, _, side = path.rpartition(".")
    flat = module.replace(".", "_")
    return f"lora_unet_{flat}.{'lora_down' if side == 'lora_A' else 'lora_up'}.weight"


def mlx(name: str) -> str:
    return name.removeprefix(KEY_PREFIX).removesuffix(".weight").lower()


FORM_CASES: list[tuple[Code, Callable[[str], str], str]] = [
    (Code.KEY_PREFIX_MISSING, lambda name: name.removeprefix(KEY_PREFIX), "model"),
    (Code.KEY_PREFIX_DOUBLED, lambda name: KEY_PREFIX + name, "model"),
    (Code.KEY_PREFIX_DOUBLED, lambda name: KEY_PREFIX * 3 + name, "model"),
    (
        Code.KEY_COMPILED,
        lambda name: name.replace(KEY_PREFIX, KEY_PREFIX + "_orig_mod."),
        "model",
    ),
    (Code.KEY_COMPILED, lambda name: "_orig_mod." + name, "model"),
    (Code.KEY_DEFAULT_NAME, with_name("default"), "model"),
    (Code.KEY_OTHER_ADAPTER, with_name("first"), "model"),
    (Code.KEY_KOHYA, kohya, "model"),
    (Code.KEY_MLX, mlx, "model"),
    (
        Code.KEY_MULTIMODAL_OLD,
        lambda name: name.replace("model.language_model.layers", "language_model.model.layers"),
        "model.language_model",
    ),
    (
        Code.KEY_TEXT_CLASS,
        lambda name: name.replace("model.language_model.layers", "model.layers"),
        "model.language_model",
    ),
    (
        Code.KEY_MULTIMODAL_CLASS,
        lambda name: name.replace("model.layers", "model.language_model.layers"),
        "model",
    ),
    (
        Code.KEY_MULTIMODAL_CLASS,
        lambda name: name.replace("model.layers", "language_model.model.layers"),
        "model",
    ),
    (Code.KEY_OTHER_CLASS, lambda name: name.replace("model.layers", "layers"), "model"),
    (Code.KEY_OTHER_CLASS, lambda name: name.replace("net.layers", "wrap.net.layers"), "net"),
]


@pytest.mark.parametrize(("code", "change", "root"), FORM_CASES)
def test_each_form_of_names_has_its_code(
    code: Code, change: Callable[[str], str], root: str
) -> None:
    catalog = base(root)
    expected = expected_of(catalog)
    shapes = renamed(shapes_of(expected), change)
    if code is Code.KEY_OTHER_CLASS:
        # KEY_PREFIX itself ends in "model.", which must not be taken for a part of the path.
        shapes = {
            KEY_PREFIX + change(name.removeprefix(KEY_PREFIX)): shape
            for name, shape in shapes_of(expected).items()
        }
    found = summaries(shapes, expected, catalog)
    assert set(found) == {code}
    finding = found[code]
    total = len(expected.tensors)
    assert f"{total} of {total} unexpected keys" in finding.got
    assert f"{total} of them fit this base then; 0 have another fault" in finding.got
    first = next(iter(expected.tensors))
    assert finding.expected.startswith(f"{first}; ")
    assert finding.got.startswith(next(iter(shapes))[:100])
    assert FORMS[code][1] in finding.expected


def test_every_form_is_tried_here() -> None:
    tried = {code for code, _, _ in FORM_CASES} | {Code.KEY_PER_EXPERT}
    assert tried == set(FORMS)


def test_some_keys_without_the_prefix_are_counted_as_some() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = shapes_of(expected)
    last = list(shapes)[-1]
    shapes[last.removeprefix(KEY_PREFIX)] = shapes.pop(last)
    shapes["surprise"] = (1,)
    (finding,) = summaries(shapes, expected, catalog).values()
    assert finding.code is Code.KEY_PREFIX_MISSING
    assert "1 of 2 unexpected keys, 1 of them fit this base then; 1 have" in finding.got


def test_deviations_on_top_of_each_other_are_each_named() -> None:
    catalog = base("model.language_model")
    expected = expected_of(catalog)
    shapes = {
        with_name("default")(name.removeprefix(KEY_PREFIX).replace("language_model.", "")): shape
        for name, shape in shapes_of(expected).items()
    }
    assert set(summaries(shapes, expected, catalog)) == {
        Code.KEY_PREFIX_MISSING,
        Code.KEY_DEFAULT_NAME,
        Code.KEY_TEXT_CLASS,
    }


def test_a_second_key_for_the_same_place_is_no_deviation_of_the_first() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = shapes_of(expected)
    shapes[with_name("first")(next(iter(shapes)))] = (RANK, WIDTH)
    (finding,) = structure_check(header_of(shapes), expected, catalog)
    assert finding.code is Code.ADAPTER_NAME_IN_KEY


def test_names_without_an_expectation_are_held_against_the_base() -> None:
    catalog = base()
    wanted = expected_of(catalog)
    unknown = Finding(5, Code.TARGET_UNKNOWN, "adapter_config.json", "a", "b", "refuse")  # type: ignore[arg-type]  # the severity's text is enough here
    expected = ExpectedTensors({}, {}, (unknown,), {}, {})
    shapes = renamed(shapes_of(wanted), lambda name: name.removeprefix(KEY_PREFIX))
    findings = structure_check(header_of(shapes), expected, catalog)
    assert [finding.code for finding in findings] == [Code.KEY_PREFIX_MISSING, Code.TARGET_UNKNOWN]


def test_kohya_is_told_even_for_another_kind_of_base() -> None:
    catalog = base()
    shapes: Shapes = {}
    for number in range(3):
        path = f"lora_unet_down_blocks_{number}_attn1_to_q"
        shapes |= {f"{path}.lora_down.weight": (4, 320), f"{path}.lora_up.weight": (320, 4)}
        shapes[f"{path}.alpha"] = ()
    found = summaries(shapes, expected_of(catalog), catalog)
    assert set(found) == {Code.KEY_KOHYA}
    assert "9 of 9 unexpected keys, 0 of them fit" in found[Code.KEY_KOHYA].got


def test_experts_of_their_own_are_told_on_a_base_that_has_them_fused() -> None:
    experts = sample.other("model.layers.0.mlp.experts", gate_up_proj=(8, 64, WIDTH))
    catalog = base("model", 4, experts)
    expected = expected_of(catalog)
    for path in ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1"):
        shapes = shapes_of(expected)
        shapes[f"{KEY_PREFIX}model.layers.0.{path}.lora_A.weight"] = (RANK, WIDTH)
        found = summaries(shapes, expected, catalog)
        assert set(found) == {Code.KEY_PER_EXPERT}
        assert "target_parameters" in found[Code.KEY_PER_EXPERT].expected


def resized(shapes: Shapes, sides: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {
        name: next((shape for side, shape in sides.items() if f".{side}." in name), given)
        for name, given in shapes.items()
    }


def test_another_hidden_size_is_named_with_both_numbers() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = resized(shapes_of(expected), {"lora_A": (RANK, 12), "lora_B": (12, RANK)})
    (finding,) = summaries(shapes, expected, catalog).values()
    assert finding.code is Code.OTHER_WIDTH
    assert "trained on a base of hidden size 12, this one has 16" in finding.expected
    assert "lora_A: 8 of 8 differ (takes 12 for 16)" in finding.got
    assert "lora_B: 8 of 8 differ (gives 12 for 16)" in finding.got


def test_it_says_which_of_a_and_b_is_of_another_width() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = resized(shapes_of(expected), {"lora_B": (24, RANK)})
    (finding,) = summaries(shapes, expected, catalog).values()
    assert "lora_A: 0 of 8 differ; lora_B: 8 of 8 differ (gives 24 for 16)" in finding.got


def test_one_tensor_of_another_width_is_no_other_base() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = shapes_of(expected)
    shapes[next(iter(shapes))] = (RANK, 12)
    (finding,) = structure_check(header_of(shapes), expected, catalog)
    assert finding.code is Code.SHAPE_MISMATCH


def test_transposed_tensors_are_of_no_other_width() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = {name: shape[::-1] for name, shape in shapes_of(expected).items()}
    findings = structure_check(header_of(shapes), expected, catalog)
    assert {finding.code for finding in findings} == {Code.SHAPE_MISMATCH}


def test_another_width_is_seen_under_other_names_too() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = resized(shapes_of(expected), {"lora_A": (RANK, 12), "lora_B": (12, RANK)})
    shapes = renamed(shapes, lambda name: name.removeprefix(KEY_PREFIX))
    assert set(summaries(shapes, expected, catalog)) == {Code.KEY_PREFIX_MISSING, Code.OTHER_WIDTH}


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        (6, "8 keys of model.layers 4 to 5"),
        (5, "4 keys of model.layers 4, as in base_model.model.model.layers.4."),
        (3, "nothing for model.layers 3; the last one is 2"),
        (1, "nothing for model.layers 1 to 3; the last one is 0"),
    ],
)
def test_another_depth_is_named_with_the_layers(layers: int, got: str) -> None:
    catalog = base()
    shapes = shapes_of(expected_of(base(layers=layers)))
    (finding,) = summaries(shapes, expected_of(catalog), catalog).values()
    assert finding.code is Code.OTHER_DEPTH
    assert finding.got.startswith(got)
    assert finding.expected.startswith("4 layers of model.layers; ")


def test_a_layer_lost_in_the_middle_is_no_other_depth() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = {name: s for name, s in shapes_of(expected).items() if ".layers.1." not in name}
    findings = structure_check(header_of(shapes), expected, catalog)
    assert {finding.code for finding in findings} == {Code.MISSING_TENSOR}


@pytest.mark.parametrize("shape", [(0,), (RANK, 0), (64,)])
def test_what_zero_3_leaves_is_told(shape: tuple[int, ...]) -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = dict.fromkeys(shapes_of(expected), shape)
    found = summaries(shapes, expected, catalog)
    assert Code.TENSORS_EMPTY in found
    assert found[Code.TENSORS_EMPTY].got.startswith("16 of 16 tensors empty or flat, as in ")
    assert "ZeRO-3" in found[Code.TENSORS_EMPTY].expected


def test_a_resized_vocabulary_is_told_by_full_copies_and_by_lora() -> None:
    catalog = base()
    expected = expected_of(catalog)
    more: dict[str, Any] = {
        f"{KEY_PREFIX}model.embed_tokens.weight": (ROWS + 3, WIDTH),
        f"{KEY_PREFIX}lm_head.base_layer.weight": (ROWS + 3, WIDTH),
    }
    (finding,) = summaries(shapes_of(expected) | more, expected, catalog).values()
    assert finding.code is Code.VOCABULARY_RESIZED
    assert finding.got.startswith("35 in ") and "2 such tensors" in finding.got
    assert finding.expected.startswith("a vocabulary of 32; ")

    expected = expected_of(catalog, "embed_tokens", "lm_head", "q_proj", "o_proj")
    shapes = shapes_of(expected)
    shapes[f"{KEY_PREFIX}model.embed_tokens.lora_embedding_A"] = (RANK, ROWS + 3)
    shapes[f"{KEY_PREFIX}lm_head.lora_B.weight"] = (ROWS + 3, RANK)
    assert set(summaries(shapes, expected, catalog)) == {Code.VOCABULARY_RESIZED}


def test_a_base_tensor_of_its_own_size_is_no_resized_vocabulary() -> None:
    catalog = base()
    expected = expected_of(catalog)
    shapes = shapes_of(expected) | {f"{KEY_PREFIX}lm_head.weight": (ROWS, WIDTH)}
    (finding,) = structure_check(header_of(shapes), expected, catalog)
    assert finding.code is Code.BASE_TENSOR


def test_a_lost_head_is_told_and_one_lost_tensor_of_it_is_not() -> None:
    catalog = base()
    head: Any = {"score__weight": (3, WIDTH), "score__bias": (3,)}
    expected = expected_of(catalog, **head)
    shapes = shapes_of(expected)
    del shapes[f"{KEY_PREFIX}score.bias"]
    (finding,) = structure_check(header_of(shapes), expected, catalog)
    assert finding.code is Code.MISSING_TENSOR
    del shapes[f"{KEY_PREFIX}score.weight"]
    (finding,) = summaries(shapes, expected, catalog).values()
    assert finding.code is Code.HEAD_LOST
    assert "score" in finding.expected and finding.got == "no tensor of 1 of 1 modules"


def test_one_wrong_dtype_everywhere_is_told_once() -> None:
    catalog = base()
    expected = expected_of(catalog)
    found = summaries(shapes_of(expected), expected, catalog, dtype="F64")
    assert set(found) == {Code.OTHER_DTYPE}
    assert found[Code.OTHER_DTYPE].got == "all 16 tensors F64"


def test_hostile_names_are_bounded_and_do_not_take_long() -> None:
    catalog = base()
    expected = expected_of(catalog)
    long = ".lora_A" * 100_000
    shapes: Shapes = {
        f"{KEY_PREFIX}{long}": (1,),
        "base_model.model." * 25_000: (1,),
        "lora_unet_" + "_" * 400 + ".lora_down.weight": (1,),
        "\x1b[31m\u202e.lora_A.first.weight": (1,),
        ".": (1,),
        "": (1,),
    }
    for finding in structure_check(header_of(shapes), expected, catalog):
        for text in (finding.where, finding.expected, finding.got):
            assert text.replace("…", "").isascii() and text.isprintable() and len(text) <= 600


def test_a_full_file_on_a_large_base_is_worked_through() -> None:
    """As many tensors and modules as the limits allow; quadratic work would not come back."""
    count = limits.TENSORS // 4
    catalog = base("model", count)
    expected = expected_of(catalog)
    shapes = renamed(shapes_of(expected), lambda name: name.removeprefix(KEY_PREFIX))
    assert len(shapes) == limits.TENSORS
    findings = structure_check(header_of(shapes), expected, catalog)
    assert findings[0].code is Code.KEY_PREFIX_MISSING
    assert len(findings) == 1 + 2 * limits.TENSORS
