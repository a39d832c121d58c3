"""What all schemas of requests share: unknown fields are kept, so that they can be refused or logged."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""An integer that everything it may come to can hold: the codec, NumPy, the database. JSON itself knows no bound."""
SeqId = Annotated[int, Field(ge=0, lt=2**63)]
"""A client's count of its requests; clones of a sampling client count from multiples of a billion."""


class WireModel(BaseModel):
    """An object as a client sends it.

    SDK releases add fields and send their defaults, so unknown ones are kept in `model_extra` and never an error by
    themselves. Where `changes_maths` is set, one that asks for anything is refused (see `refused_fields`).
    Python's JSON may hold NaN and infinities: no field takes them.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)
    changes_maths: ClassVar[bool] = False


class Answer(BaseModel):
    """An object as a client gets it."""

    model_config = ConfigDict(protected_namespaces=())


def unknown_fields(model: WireModel, path: str = "") -> Iterator[tuple[str, object, bool]]:
    """Give each unknown field of an object and those within: its path, its value, whether it may change the maths.

    Lists are not entered: what data consist of is checked where they are translated.
    """
    for name, value in (model.model_extra or {}).items():
        yield f"{path}{name}", value, model.changes_maths
    for name in model.model_fields_set:
        value: object = getattr(model, name, None)
        if isinstance(value, WireModel):
            yield from unknown_fields(value, f"{path}{name}.")


def asks_for_nothing(value: object) -> bool:
    """Whether an unknown field's value is what a release would send for "off"."""
    return value is None or value in (False, 0, "") or value == [] or value == {}


def first_error(error: ValidationError) -> str:
    """Name the first field that does not fit, and the value it has."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "missing":
        return f"{where}: missing"
    if first["type"] == "finite_number":
        return f"{where} {shown(first['input'])}: must be a finite number"
    return f"{where}: {first['msg']}, not {shown(first['input'])}"


def shown(value: object) -> str:
    """A value as an error message quotes it: short, whatever was sent."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
