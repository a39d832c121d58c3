"""Statements that run for every result and bypass SQLAlchemy's work per execution.

SQLAlchemy compiles such a statement once. Each execution then sends the text and the values to the
driver. An insert of eleven columns takes 28 microseconds instead of 75 with `database.execute`.
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
    """A statement that was compiled for one kind of database."""

    text: str
    constants: Mapping[str, Any]
    positions: Sequence[str] | None
    """Names of the values in the driver's order; None if the driver takes values by name."""

    def values(self, named: Mapping[str, Any]) -> Any:
        if self.positions is not None:
            constants = self.constants
            return tuple([named[name] if name in named else constants[name] for name in self.positions])
        return {**self.constants, **named}


@dataclass(frozen=True, slots=True)
class PreparedStatement:
    """A statement without result rows.

    Values are passed to the driver unchanged, so they must be numbers, text, bytes or None.
    """

    build: Callable[[str], Executable]
    """Builds the statement for a kind of database, `sqlite` or `postgresql`."""
    columns: Sequence[str]
    """Names of all values."""
    _statements: dict[str, _CompiledStatement] = field(default_factory=dict[str, _CompiledStatement])

    def execute(self, tx: Session, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> CursorResult[Any]:
        """Execute the statement, once for each mapping.

        Like `database.execute`, flushes changed objects first.
        """
        tx.flush()
        connection = tx.connection()
        statement = self._statements.get(connection.dialect.name) or self._compile(connection)
        if isinstance(values, Mapping):
            return connection.exec_driver_sql(statement.text, statement.values(values))
        return connection.exec_driver_sql(statement.text, [statement.values(row) for row in values])

    def _compile(self, connection: Connection) -> _CompiledStatement:
        dialect = connection.dialect
        compiled = self.build(dialect.name).compile(dialect=dialect, column_keys=list(self.columns))  # pyright: ignore
        assert isinstance(compiled, SQLCompiler)
        variables = set(self.columns)
        constants = {name: value for name, value in compiled.params.items() if name not in variables}
        statement = _CompiledStatement(str(compiled), constants, compiled.positiontup)
        self._statements[dialect.name] = statement
        return statement


def make_upsert_builder(table: type[SQLModel], key: Sequence[str], sums: Sequence[str]) -> Callable[[str], Executable]:
    """Return the builder of an upsert.

    The statement inserts a row. If a row with the same key exists, the statement adds the values of
    the columns `sums` to the existing row instead.
    """

    def build(database: str) -> Executable:
        row = (sqlite.insert if database == "sqlite" else postgresql.insert)(table)
        added = {name: getattr(table, name) + getattr(row.excluded, name) for name in sums}
        return row.on_conflict_do_update(index_elements=list(key), set_=added)

    return build
