"""Errors of the database itself."""


class StoreError(Exception):
    """The database failed and the changes were not stored.

    After a broken connection this is not certain.
    """


class StoreInUse(StoreError):
    """Another process already has this role on the data directory or database."""


class SchemaOutdated(StoreError):
    """The database has the schema of an older release, and only a server may migrate it."""


class StoreUnreachable(StoreError):
    """The database, or the artifacts that it refers to, cannot be reached now.

    It may work later.
    """


class StoreBlocked(StoreError):
    """The database cannot be written now because it is full or locked. It may work later."""


class ValueRefused(Exception):
    """The database cannot store a value, for example text with a zero character in PostgreSQL."""
