"""A request ready to be stored, or the reason why it will fail."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from skyrl_tx.api.schemas.base import WireModel, asks_for_nothing, first_error, shown, unknown_fields
from skyrl_tx.api.translate.provenance import Provenance
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError

_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 1000

SchemaT = TypeVar("SchemaT", bound=WireModel)


@dataclass(frozen=True, slots=True)
class Translated:
    """A request, and the part of it that the client decided.

    `identity` is equal whenever a client sends the same again: the request without what was drawn or looked up.
    `provenance`, one per datum, is there where the request is yet to be completed by it (see `recall`).
    """

    request: requests.Request
    identity: requests.Request
    provenance: tuple[Provenance, ...] = ()

    @classmethod
    def exactly(cls, request: requests.Request) -> "Translated":
        """Nothing was drawn or looked up."""
        return cls(request, request)


class UnknownFields:
    """Refuses unknown fields that may change the maths; logs the others, once per name and SDK version."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def check(self, model: WireModel, sdk_version: str, path: str = "") -> None:
        """Raise UserError for a field that this server does not know and that asks for something."""
        for name, value, changes_maths in unknown_fields(model, path):
            if changes_maths and not asks_for_nothing(value):
                raise UserError(f"{name} {shown(value)}: this server does not know the field")
            self.note(name, sdk_version)

    def note(self, name: str, sdk_version: str) -> None:
        """Log a field that is ignored; names come from clients, so they are remembered up to a limit."""
        if (name, sdk_version) not in self._seen and len(self._seen) < _MAX_REMEMBERED:
            self._seen.add((name, sdk_version))
            _log.info("unknown field %s of SDK %s is ignored", shown(name), shown(sdk_version))


def rejected(kind: str, message: str, *, backward: bool = False) -> Translated:
    """Turn a mistake into a request that keeps its place in the order and fails with this text."""
    return Translated.exactly(requests.Rejected(kind=kind, message=message, backward=backward))


def translated(
    kind: str,
    schema: type[SchemaT],
    value: Mapping[str, object],
    translate: Callable[[SchemaT], Translated],
    check_unknown: Callable[[WireModel], None],
    *,
    backward: bool = False,
) -> Translated:
    """Check JSON against its schema and translate it; what is wrong with it is left to the future to tell."""
    try:
        model = schema.model_validate(value)
        request = translate(model)
        check_unknown(model)
        return request
    except ValidationError as error:
        return rejected(kind, first_error(error), backward=backward)
    except UserError as error:
        return rejected(kind, error.message, backward=backward)
