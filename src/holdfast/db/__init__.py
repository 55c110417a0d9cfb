"""Connections to Postgres: opening, pooling, time limits, migrations, the embedded server."""
