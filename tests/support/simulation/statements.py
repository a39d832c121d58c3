"""The product's statements and sessions without the work that SQLAlchemy repeats for each execution.

`Statements.execute` takes the place of `skyrl_tx.store.database.execute`. A statement that a module of the store holds
has the same text, conversions of parameters and columns of rows each time. They are taken from SQLAlchemy's own first
execution; later ones go to SQLite's driver. `FastSession` loads objects by their keys, and reads, in the same way.
Statements that are made for each use, inserts, other queries of objects, and flushes take SQLAlchemy's way. With
`--plain` everything does, and every history must have the same trace.
"""

import sqlite3
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Engine, Executable, bindparam, select
from sqlalchemy.engine import CursorResult, IteratorResult
from sqlalchemy.orm import Mapper, class_mapper
from sqlalchemy.orm.attributes import instance_state
from sqlmodel import Session

from skyrl_tx.store import database

_Values = dict[str, Any]
EXECUTE = database.execute


class _Rows(IteratorResult[Any]):
    """The result of a prepared statement, with the parts of `CursorResult` that the product uses."""

    returns_rows = True
    rowcount = -1


class _NoRows:
    """The result of a prepared statement that returns no rows."""

    returns_rows = False

    def __init__(self, rowcount: int) -> None:
        self.rowcount = rowcount


class _Prepared:
    """A statement with a set of parameter names, after its first execution."""

    def __init__(self, statement: Executable, first: CursorResult[Any]) -> None:
        self.statement = statement  # its id is the key, so it must live
        context: Any = first.context
        self._compiled: Any = context.compiled
        self._metadata: Any = first._metadata if first.returns_rows else None
        self._own_values: _Values = self._compiled.construct_params(
            extracted_parameters=context.extracted_parameters, escape_names=False, _check=False
        )
        self._lists = [self._compiled.bind_names[bind] for bind in self._compiled.post_compile_params]
        self._forms: dict[tuple[int, ...], tuple[str, list[str], Mapping[str, Any], Mapping[str, list[str]]]] = {}

    @staticmethod
    def is_possible(context: Any) -> bool:
        """Whether nothing but the given parameters changes from one execution to the next."""
        compiled = context.compiled
        changing = (
            *(compiled.isinsert, compiled.update_prefetch, compiled.escaped_bind_names),
            *(compiled.literal_execute_params, compiled.schema_translate_map, context.executemany),
        )
        return not any(changing)

    def execute(self, connection: sqlite3.Connection, parameters: _Values) -> Any:
        """Execute in the open transaction."""
        values = {**self._own_values, **parameters}
        sizes = tuple(len(values[name]) for name in self._lists)
        if sizes not in self._forms:
            self._forms[sizes] = self._form(values)
        sql, names, processors, expansions = self._forms[sizes]
        for name, expanded in expansions.items():
            values.update(zip(expanded, values[name], strict=True))
        cursor = connection.execute(
            sql, [processors[name](values[name]) if name in processors else values[name] for name in names]
        )
        if self._metadata is None:
            return _NoRows(cursor.rowcount)
        rows = cursor.fetchall()
        result = _Rows(self._metadata, iter(rows))
        result.rowcount = cursor.rowcount
        return result

    def _form(self, values: _Values) -> tuple[str, list[str], Mapping[str, Any], Mapping[str, list[str]]]:
        compiled = self._compiled
        if not self._lists:
            return compiled.string, compiled.positiontup, compiled._bind_processors, {}
        state = compiled._process_parameters_for_postcompile(dict(values))
        return (
            state.statement,
            list(state.positiontup),
            {**compiled._bind_processors, **state.processors},
            state.parameter_expansion,
        )


class Statements:
    """The prepared statements of a process."""

    def __init__(self, connection: sqlite3.Connection, begin_read: Callable[[], None]) -> None:
        """`begin_read` begins a transaction of a reader."""
        self._connection = connection
        self.begin_read = begin_read
        self._fixed = {
            id(value)
            for name, module in list(sys.modules.items())
            if name.startswith("skyrl_tx.store.")
            for named in vars(module).values()
            for value in (named if isinstance(named, tuple) else (named,))
            if isinstance(value, Executable)
        }
        self._prepared: dict[tuple[Any, ...], _Prepared | None] = {}
        self._by_key: dict[Mapper[Any], Executable] = {}

    def execute(self, tx: Session, statement: Executable, parameters: Any = None) -> Any:
        """Stand for `skyrl_tx.store.database.execute`."""
        if id(statement) not in self._fixed or not (parameters is None or isinstance(parameters, dict)):
            return EXECUTE(tx, statement, parameters)
        key = (id(statement), *(parameters or ()))
        if key not in self._prepared:
            result: Any = EXECUTE(tx, statement, parameters)
            is_possible = _Prepared.is_possible(result.context)
            self._prepared[key] = _Prepared(statement, result) if is_possible else None
            return result
        prepared = self._prepared[key]
        if prepared is None:
            return EXECUTE(tx, statement, parameters)
        tx.flush()
        tx.begin_for(self)  # type: ignore[attr-defined]

        try:
            return prepared.execute(self._connection, parameters or {})
        except sqlite3.Error:
            return EXECUTE(tx, statement, parameters)  # fails again, with the error as the product knows it

    def end_read(self) -> None:
        """End a transaction of a reader."""
        if self._connection.in_transaction:
            self._connection.rollback()

    def row(self, tx: Session, mapper: Mapper[Any], values: _Values) -> Any:
        """Return the columns of the row with this primary key, or None."""
        if mapper not in self._by_key:
            is_wanted = [column == bindparam(f"key_{column.key}") for column in mapper.primary_key]
            self._by_key[mapper] = wanted = select(*mapper.columns).where(*is_wanted)
            self._fixed.add(id(wanted))
        return self.execute(tx, self._by_key[mapper], values).one_or_none()


class FastSession(Session):
    """The session of the product; `get` loads an object as SQLAlchemy does, without making a query each time."""

    statements: Statements

    def __init__(self, bind: Any = None, **options: Any) -> None:
        super().__init__(bind, **options)
        self._only_reads = isinstance(bind, Engine)
        self._is_reading = False

    def begin_for(self, statements: Statements) -> None:
        """Begin the transaction. A read-only transaction needs no SQLAlchemy objects."""
        if not self._only_reads:
            self.connection()
        elif not self._is_reading:
            statements.begin_read()
            self._is_reading = True

    def close(self) -> None:
        super().close()
        if self._is_reading:
            self._is_reading = False
            self.statements.end_read()

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        mapper = class_mapper(entity)
        names = ident if isinstance(ident, tuple) else (ident,)
        key = mapper.identity_key_from_primary_key(names)
        if options or key in self.identity_map:
            return super().get(entity, ident, **options)
        values = {f"key_{column.key}": name for column, name in zip(mapper.primary_key, names, strict=True)}
        row = self.statements.row(self, mapper, values)
        if row is None:
            return None
        found = mapper.class_manager.new_instance()
        state = instance_state(found)
        state.key, state.session_id = key, self.hash_key
        state.dict.update(zip(mapper.columns.keys(), row, strict=True))
        self.identity_map.add(state)
        state._commit_all(state.dict, self.identity_map)
        return found
