"""Errors of the database itself."""


class StoreError(Exception):
    """The database failed and kept nothing of the work; after a broken connection that is not certain."""


class StoreInUse(StoreError):
    """Another process already has this role on the data directory or database."""


class StoreUnreachable(StoreError):
    """The database, or what it refers to, cannot be reached now; it may come back."""


class StoreBlocked(StoreError):
    """The database cannot be written now because it is full or locked; that may pass."""


class ValueRefused(Exception):
    """A value that this database cannot hold, such as text with a zero character in PostgreSQL; a caller's error."""
