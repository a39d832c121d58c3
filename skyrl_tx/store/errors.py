"""What goes wrong with the database itself."""


class StoreError(Exception):
    """The database did not do what was asked; nothing of it was kept, or, where a connection broke, no one can say."""


class StoreInUse(StoreError):
    """Another process already plays this role on this data directory or database."""


class StoreUnreachable(StoreError):
    """There is no connection to the database now; it may come back."""


class StoreBlocked(StoreError):
    """The database cannot be written now, as it is full or locked; that may pass."""


class ValueRefused(Exception):
    """A text or number that this database cannot hold, such as a zero character in PostgreSQL; the caller's mistake."""
