"""Any exception inside a verifier is a denial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from registry_service.domain.errors import UntrustedError


@contextlib.contextmanager
def denial(reason: str) -> Iterator[None]:
    """Turn whatever fails inside into UntrustedError; use as ``with`` or as a decorator.

    Raises:
        UntrustedError: the one that was raised inside, or one that says ``reason``.
    """
    try:
        yield
    except UntrustedError:
        raise
    except Exception as error:
        # Parsers and cryptographic libraries leak odd exceptions on hostile input; none of them
        # may be taken for an answer, or for a fault that is tried again.
        raise UntrustedError(reason) from error
