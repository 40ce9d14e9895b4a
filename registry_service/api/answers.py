"""What the OpenAPI document says of answers.

The models describe and are held against real answers by a test; they do not run on every request.
"""

from __future__ import annotations

from typing import Any, Final

from registry_service.domain import wire

PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"model": wire.Problem, "description": "Refused: problem+json (RFC 9457)"}
}


def answers(model: type[wire.Wire], status: int = 200) -> dict[str, Any]:
    """Route options: the answer with ``status`` has the form of ``model``."""
    return {"response_model": None, "responses": {status: {"model": model}}}
