"""The machine's clock."""

from __future__ import annotations

from datetime import UTC, datetime


class SystemClock:
    """Implements ``ports.Clock``."""

    def now(self) -> datetime:
        """Now, in UTC."""
        return datetime.now(UTC)
