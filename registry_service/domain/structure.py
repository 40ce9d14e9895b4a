"""Check 5: the header's keys equal the expected keys, with exact shapes, ranks and dtypes.

A key too many is as fatal as one too few: PEFT copies a key that names a base tensor into the
base, and one with another adapter's name into that adapter, both without a word. The known
deviations come first, since reports are cut at a limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from registry_service.domain.catalog import Catalog
from registry_service.domain.deviations import deviations
from registry_service.domain.expected_tensors import Expectation, ExpectedTensors
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.key_forms import adapter_name_of, plain_name
from registry_service.domain.safetensors_header import Header, TensorInfo

_NO_COPY: Final = (
    "no copy of the base's embedding: the tenant's policy full_tensors is off; "
    "save with save_pretrained(..., save_embedding_layers=False)"
)


def structure_check(
    header: Header, expected: ExpectedTensors, catalog: Catalog
) -> tuple[Finding, ...]:
    """All differences between what the file holds and what it has to hold.

    The known deviations first, then what the selection found, then tensor by tensor.
    """
    present = frozenset(tensor.name for tensor in header.tensors)
    copied = present & expected.copies.keys()
    if copied and expected.full_tensors:
        expected = replace(expected, tensors={**expected.tensors, **expected.copies})
    if not expected.findings and expected.tensors.keys() == present:
        # Names as they should be: only shapes and dtypes are left to look at.
        base_names: frozenset[str] = frozenset()
    else:
        base_names = _base_names(catalog)
    singles = list(expected.findings)
    for tensor in header.tensors:
        expectation = expected.tensors.get(tensor.name)
        if expectation is not None:
            singles += _compared(tensor, expectation)
        elif tensor.name in copied:
            singles.append(_finding(Code.FULL_TENSOR, tensor.name, _NO_COPY, _shape(tensor.shape)))
        # Without an expectation to compare with, only what is wrong on any base is said.
        elif not expected.findings or _code(tensor.name, base_names) is not Code.UNEXPECTED_TENSOR:
            singles.append(_unexpected(tensor, base_names))
    singles += [
        _finding(Code.MISSING_TENSOR, name, _shape(expectation.shape), "no tensor")
        for name, expectation in expected.tensors.items()
        if name not in present
    ]
    return (*deviations(header, expected, catalog), *singles) if singles else ()


def _compared(tensor: TensorInfo, expectation: Expectation) -> list[Finding]:
    findings = []
    if tensor.shape != expectation.shape:
        code = Code.SHAPE_MISMATCH
        if _differs_in_rank_only(tensor.shape, expectation):
            code = Code.RANK_MISMATCH
        findings.append(
            _finding(code, tensor.name, _shape(expectation.shape), _shape(tensor.shape))
        )
    if tensor.dtype not in expectation.dtypes:
        expected = " or ".join(expectation.dtypes)
        findings.append(_finding(Code.DTYPE_MISMATCH, tensor.name, expected, tensor.dtype))
    return findings


def _differs_in_rank_only(shape: tuple[int, ...], expectation: Expectation) -> bool:
    axis = expectation.rank_axis
    if axis is None or len(shape) != len(expectation.shape):
        return False
    return all(
        size == wanted or position == axis
        for position, (size, wanted) in enumerate(zip(shape, expectation.shape, strict=True))
    )


def _base_names(catalog: Catalog) -> frozenset[str]:
    return frozenset(
        f"{module.name}.{tensor}" for module in catalog.modules for tensor in module.tensors
    )


def _code(name: str, base_names: frozenset[str]) -> Code:
    if plain_name(name) in base_names:
        return Code.BASE_TENSOR
    if adapter_name_of(name) is not None:
        return Code.ADAPTER_NAME_IN_KEY
    return Code.UNEXPECTED_TENSOR


def _unexpected(tensor: TensorInfo, base_names: frozenset[str]) -> Finding:
    code = _code(tensor.name, base_names)
    got = f"{_shape(tensor.shape)} {tensor.dtype}"
    if code is Code.BASE_TENSOR:
        return _finding(code, tensor.name, "no tensor of the base", got)
    if code is Code.ADAPTER_NAME_IN_KEY:
        name = adapter_name_of(tensor.name) or ""
        return _finding(code, tensor.name, "a key without an adapter's name", name)
    return _finding(code, tensor.name, "no tensor of this name", got)


def _shape(shape: tuple[int, ...]) -> str:
    return str(shape)


def _finding(code: Code, where: str, expected: str, got: str) -> Finding:
    return refuse(Check.STRUCTURE, code, where, expected, got)
