"""Which database a data directory's weights belong to; with another, an engine would take them for unused."""

from pathlib import Path

from skyrl_tx.store.errors import StoreError
from skyrl_tx.store.sqlite import DATABASE_NAME

_NOTE = "database"


def check(data_dir: Path, name: str | None) -> None:
    """Raise StoreError where the weights belong to another database than the named one; None: that of the directory."""
    note = data_dir / _NOTE
    noted = note.read_text().strip() if note.is_file() else None
    if name is None and noted is not None:
        raise StoreError(
            f"data directory {data_dir} belongs to the database {noted}: name it by --database-url, or choose another "
            "data directory"
        )
    if name is not None and noted is None and (data_dir / DATABASE_NAME).is_file():
        raise StoreError(
            f"data directory {data_dir} has a database of its own, {DATABASE_NAME}, to which its weights belong: "
            "choose another data directory for --database-url"
        )
    if name is not None and noted not in (None, name):
        raise StoreError(
            f"data directory {data_dir} belongs to the database {noted}, not {name}: choose another, or if these are "
            f"one database under two names, remove {note}"
        )


def note(data_dir: Path, name: str | None) -> None:
    """Note to which database a data directory belongs; its own needs no note."""
    if name is not None and not (data_dir / _NOTE).is_file():
        (data_dir / _NOTE).write_text(f"{name}\n")
