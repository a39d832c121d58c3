"""What goes wrong with the database itself."""


class StoreError(Exception):
    """The database did not do what was asked; nothing of it was kept."""


class StoreInUse(StoreError):
    """Another process already plays this role on this data directory."""
