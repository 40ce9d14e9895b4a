"""The first schema: tables, moves and transitions, row-level security and grants.

It has no way back: restore a backup instead.
"""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    sql = (Path(__file__).parent / "0001_first.sql").read_text(encoding="utf-8")
    # Without parameters psycopg sends the text as it is: percent signs stay percent signs.
    driver = op.get_bind().connection.dbapi_connection
    assert driver is not None  # noqa: S101 - a migration has its connection
    driver.execute(sql)
