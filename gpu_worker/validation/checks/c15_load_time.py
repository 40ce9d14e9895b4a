"""Check 15: how long loading took, for whoever plans a rollout."""

from __future__ import annotations

from registry_service.domain.findings import Check, Code, Finding, info


def load_time_check(seconds: float, device: str) -> list[Finding]:
    """One informing finding."""
    got = f"{seconds:.3f} s on {device}"
    return [info(Check.LOAD_TIME, Code.LOAD_TIME, "adapter", "measured", got)]
