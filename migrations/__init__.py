"""Alembic migrations; they run as the owner role only."""
