"""The database that the API process and the engine share.

This module defines the errors of the database itself. Most modules of the package hold functions
for one table or one concept, for example `futures` or `checkpoints`. Their first argument `tx` is a
session inside a transaction that `database.Store` opened.
"""


class StoreError(Exception):
    """The database failed and the changes were not stored.

    If the connection broke during the commit, the changes may have been stored nevertheless.
    """


class StoreInUse(StoreError):
    """Another process already has this role on the data directory or database.

    For example, two engines may not use the same SQLite database.
    """


class SchemaOutdated(StoreError):
    """The database has the schema of an older release, and only a server may migrate it."""


class StoreUnreachable(StoreError):
    """The database, or the artifacts that it refers to, cannot be reached now.

    A later attempt may succeed.
    """


class StoreBlocked(StoreError):
    """The database cannot be written now because it is full or locked.

    A later attempt may succeed.
    """


class ValueRefused(Exception):
    """The database cannot store a value, for example text with a zero character in PostgreSQL."""
