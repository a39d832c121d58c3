"""Statements for every result: the database gets their text and values, without SQLAlchemy's work for each execution.

That takes a third of the time of `database.execute` (28 instead of 75 microseconds for an insert of eleven columns).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, CursorResult, Executable
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler
from sqlmodel import Session, SQLModel


@dataclass(frozen=True, slots=True)
class _CompiledStatement:
    """A statement as one kind of database takes it."""

    text: str
    constants: Mapping[str, Any]
    positions: Sequence[str] | None
    """The names of the values in the order in which they are passed; None if they are passed by name."""

    def values(self, named: Mapping[str, Any]) -> Any:
        if self.positions is not None:
            constants = self.constants
            return tuple([named[name] if name in named else constants[name] for name in self.positions])
        return {**self.constants, **named}


@dataclass(frozen=True, slots=True)
class PreparedStatement:
    """A statement without result rows. `columns` are the names of all its values.

    Values are passed to the driver as they are: numbers, text, bytes and None.
    """

    build: Callable[[str], Executable]
    """Makes the statement for a kind of database, `sqlite` or `postgresql`."""
    columns: Sequence[str]
    _texts: dict[str, _CompiledStatement] = field(default_factory=dict[str, _CompiledStatement])

    def execute(self, tx: Session, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> CursorResult[Any]:
        """Execute the statement, once for each mapping. Like `database.execute`, it writes changed objects first."""
        tx.flush()
        connection = tx.connection()
        statement = self._texts.get(connection.dialect.name) or self._compile(connection)
        if isinstance(values, Mapping):
            return connection.exec_driver_sql(statement.text, statement.values(values))
        return connection.exec_driver_sql(statement.text, [statement.values(each) for each in values])

    def _compile(self, connection: Connection) -> _CompiledStatement:
        dialect = connection.dialect
        compiled = self.build(dialect.name).compile(dialect=dialect, column_keys=list(self.columns))  # pyright: ignore
        assert isinstance(compiled, SQLCompiler)
        unset = set(self.columns)
        constants = {name: value for name, value in compiled.params.items() if name not in unset}
        text = _CompiledStatement(str(compiled), constants, compiled.positiontup)
        self._texts[dialect.name] = text
        return text


def make_upsert_builder(table: type[SQLModel], key: Sequence[str], sums: Sequence[str]) -> Callable[[str], Executable]:
    """Return the builder of a statement that inserts a row or adds its `sums` to those of the row with its key."""

    def build(database: str) -> Executable:
        row = (sqlite.insert if database == "sqlite" else postgresql.insert)(table)
        added = {name: getattr(table, name) + getattr(row.excluded, name) for name in sums}
        return row.on_conflict_do_update(index_elements=list(key), set_=added)

    return build
