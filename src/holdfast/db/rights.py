"""The rights that Holdfast's role needs on its schema and tables, and the statements that grant them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import sql

# Every process reads these tables at its start. Only migrations write to them.
MIGRATION_TABLES = ("checkpoint_migrations", "holdfast_migration", "store_migrations", "vector_migrations")
# All tables of Holdfast. The schema may be `public` and contain tables of other programs, which are not checked.
TABLES = (
    "abandoned",
    "api_key",
    "assistant",
    "assistant_version",
    "budget_pot",
    "checkpoint_blobs",
    "checkpoint_writes",
    "checkpoints",
    "child",
    "cron",
    "event",
    "graph_absence",
    "idempotency_key",
    "interrupt",
    "run",
    "store",
    "store_vectors",
    "tenant",
    "tenant_spend",
    "thread",
    "webhook_delivery",
    "worker",
    *MIGRATION_TABLES,
)
# How many tables a message names. It gives only the number of the others.
MAX_TABLES_NAMED = 3

# By oid: has_schema_privilege raises an error for the name of a schema that does not exist.
SCHEMA_RIGHTS = """
SELECT array_remove(ARRAY[
           CASE WHEN NOT has_schema_privilege(oid, 'USAGE') THEN 'USAGE' END,
           CASE WHEN NOT has_schema_privilege(oid, 'CREATE') THEN 'CREATE' END], NULL) AS lacking
FROM pg_namespace WHERE nspname = %(schema)s
"""

# `owned` because migrations alter tables, which only their owner may do.
TABLE_RIGHTS = """
SELECT relname AS table, pg_get_userbyid(relowner) AS owner, pg_has_role(relowner, 'USAGE') AS owned,
       ARRAY(SELECT wanted FROM unnest(CASE WHEN relname = ANY(%(migration_tables)s) THEN ARRAY['SELECT']
                                            ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) AS wanted
             WHERE NOT has_table_privilege(pg_class.oid, wanted)) AS lacking
FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s)
  AND relkind IN ('r', 'p') AND relname = ANY(%(tables)s)
ORDER BY relname
"""

# Whether the role may use tables that their owner creates in the schema later. Grantee 0 means every role.
LATER_TABLES = """
SELECT NOT EXISTS (
    SELECT 1 FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS wanted
    WHERE NOT EXISTS (
        SELECT 1 FROM pg_default_acl CROSS JOIN LATERAL aclexplode(defaclacl) AS given
        WHERE defaclobjtype = 'r' AND pg_get_userbyid(defaclrole) = %(owner)s
          AND defaclnamespace IN (0, (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s))
          AND given.privilege_type = wanted
          AND (given.grantee = 0 OR pg_has_role(given.grantee, 'USAGE')))
) AS usable
"""

Tables = Sequence[Mapping[str, Any]]


def parameters(schema: str) -> dict[str, Any]:
    """The parameters of SCHEMA_RIGHTS and TABLE_RIGHTS."""
    return {"schema": schema, "tables": list(TABLES), "migration_tables": list(MIGRATION_TABLES)}


def identifier(name: str) -> str:
    """A name as SQL, quoted if it must be."""
    return name if re.fullmatch("[a-z_][a-z0-9_]*", name) else sql.Identifier(name).as_string(None)


def create_schema(schema: str, role: str) -> str:
    return f"CREATE SCHEMA {identifier(schema)} AUTHORIZATION {identifier(role)};"


def schema_grant(schema: str, role: str) -> str:
    return f"GRANT USAGE, CREATE ON SCHEMA {identifier(schema)} TO {identifier(role)};"


def usage_grant(schema: str, role: str) -> str:
    return f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {identifier(role)};"


def table_grant(schema: str, role: str) -> str:
    wanted = "SELECT, INSERT, UPDATE, DELETE"
    return f"GRANT {wanted} ON ALL TABLES IN SCHEMA {identifier(schema)} TO {identifier(role)};"


def role_grants(schema: str, role: str, *, owner: str) -> list[str]:
    """The grants for a role that uses the tables of another role, including those of later migrations. The owner must
    execute the grants, and run the migrations."""
    return [usage_grant(schema, role), table_grant(schema, role), later_tables_grant(schema, role, owner=owner)]


def later_tables_grant(schema: str, role: str, *, owner: str) -> str:
    return (
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {identifier(owner)} IN SCHEMA {identifier(schema)} "
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {identifier(role)};"
    )


def lacking_on_tables(tables: Tables) -> str:
    """List the tables on which the role lacks rights, with the rights, as text; empty if it lacks none."""
    incomplete = [table for table in tables if table["lacking"]]
    named = ", ".join(f"{table['table']} ({', '.join(table['lacking'])})" for table in incomplete[:MAX_TABLES_NAMED])
    return f"{named} and {len(incomplete) - MAX_TABLES_NAMED} more" if len(incomplete) > MAX_TABLES_NAMED else named


def other_owner(tables: Tables) -> str | None:
    """A role that owns tables which the role of this connection does not own."""
    return next((table["owner"] for table in tables if not table["owned"]), None)


def owner_remedy(owner: str, role: str) -> str:
    """Tell the operator how to migrate tables that another role owns."""
    return f"Run `holdfast migrate` as the role {owner}, or GRANT {identifier(owner)} TO {identifier(role)};"
