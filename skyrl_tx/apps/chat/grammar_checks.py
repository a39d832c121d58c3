"""Check the grammars and schemas that clients send, before a request is stored."""

import json
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence, Set
from decimal import Decimal
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars import FairThreads, clean_error, make_limits, write_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_CHARS: Mapping[str, int] = {"json_schema": 65_536, "regex": 8192, "choice": 65_536, "grammar": 16_384}
"""The maximum length of each kind whose text comes from the client as it is."""
_MAX_TOGETHER_CHARS = 262_144
"""The maximum length of all schemas of one grammar, for example of the tools of a request."""
_MAX_DEPTH = 64
"""How deep the objects and lists of a schema may be nested."""
_MAX_PATTERN_CHARS = 8192
"""The maximum length of all regular expressions of a schema together."""
_MAX_MULTIPLE = 10_000
"""The largest sum and least common multiple of the values of `multipleOf`, as whole numbers without zeros at the end.

The library makes a state for each remainder, which no limit of `make_limits` covers.
"""
_MAX_CHECK_S = 1.0
"""How long a check may compute, because the limits of the library do not cover all of its work."""
_MAX_REMEMBERED = 256
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has a schema for each name."""
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is no schema."""
_REFUSED = frozenset({"x-guidance", "nullable", "divisibleBy", "disallow", "extends", "$dynamicAnchor"})
"""Keywords that the library ignores although they change what a schema allows, or how the library works."""
_INNER_SCHEMA = re.compile(r"%json\s*")
_checks = FairThreads(2, 1, "grammar-check")
"""The threads for checks. An owner uses one of them, so checks of other owners need not wait."""


def check_constraint(constraint: Constraint, field: str, owner: str) -> None:
    """Raise FieldError if a client's constraint is malformed, too large, not supported or matches no text.

    `field` is the field of the request that has the constraint. A check may take a fraction of a
    second, and waits for other checks of the same owner.
    """
    limit, size = _MAX_CHARS[constraint.kind], len(constraint.text)
    if size > limit:
        raise FieldError(f"{field}: has {size} characters, but must have at most {limit}", field)
    _checks.submit(owner, partial(_check_text, constraint, field)).result()


def check_schemas(schemas: Sequence[Mapping[str, object]], where: Sequence[str], field: str, owner: str) -> None:
    """Raise FieldError if schemas that become one grammar are not supported, or too large alone or together.

    A text matches one of the schemas, as a call is a call of one tool. `where` has the field of each
    schema, and `field` is the field of all of them.
    """
    texts = list(map(_write_json, schemas, where))
    size = sum(map(len, texts))
    if size > _MAX_TOGETHER_CHARS:  # before the checks, because each of them takes time
        raise FieldError(
            f"{field}: the schemas have {size} characters together, but must have at most {_MAX_TOGETHER_CHARS}", field
        )
    for text, own_field in zip(texts, where, strict=True):
        check_constraint(Constraint(kind="json_schema", text=text), own_field, owner)
    _checks.submit(owner, partial(_check_together, schemas, where, field)).result()


def _write_json(schema: Mapping[str, object], field: str) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise FieldError(f"{field}: is nested deeper than {_MAX_DEPTH} levels", field) from error


def _check_together(schemas: Sequence[Mapping[str, object]], where: Sequence[str], field: str) -> None:
    """Raise FieldError if patterns or values of multipleOf are too large together.

    The least common multiple matters only in one schema, because a text matches only one of them.
    """
    parts = list(map(_read_schema, schemas, where))
    _limit_patterns(sum(num_chars for num_chars, _ in parts), field)
    multiples = set[Decimal]().union(*(multiples for _, multiples in parts))
    _limit_multiples(sum(map(_read_digits, multiples)), field)


def _check_text(constraint: Constraint, field: str) -> None:
    if constraint.kind == "json_schema":
        _check_schema(json.loads(constraint.text), field)
    elif constraint.kind == "grammar":
        for match in _INNER_SCHEMA.finditer(constraint.text):
            _check_schema(_read_json(constraint.text, match.end()), field)
    problem = _find_problem(constraint)
    if problem is not None:
        raise FieldError(f"{field}: {problem}", field)


@lru_cache(_MAX_REMEMBERED)
def _find_problem(constraint: Constraint) -> str | None:
    """Compile a constraint and compute its first tokens. Returns why this failed, or None."""
    from llguidance import LLMatcher

    began = time.thread_time()
    try:
        grammar = write_grammar(constraint)
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(_get_bytes(), grammar, log_level=0, limits=make_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return clean_error(matcher.get_error())

    if (seconds := time.thread_time() - began) > _MAX_CHECK_S:
        return f"is too complex: its check took {seconds:.1f} s of computing, at most {_MAX_CHECK_S:g} s are allowed"
    return None


@cache
def _get_bytes() -> "LLTokenizer":
    """Return a tokenizer with one token for each byte, because a check depends on no model."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _check_schema(schema: object, field: str) -> None:
    """Raise FieldError if a schema is nested too deeply or too large, or has keywords that the library would ignore."""
    num_chars, multiples = _read_schema(schema, field)
    _limit_patterns(num_chars, field)
    _limit_multiples(_measure_multiples(multiples), field)


def _read_schema(schema: object, field: str) -> tuple[int, Set[Decimal]]:
    """Return the number of characters of a schema's patterns, and its values of `multipleOf`.

    Raises FieldError if it is nested too deeply, or has keywords that the library would ignore.
    """
    num_chars, multiples, level = 0, set[Decimal](), [(field, schema)]
    for _ in range(_MAX_DEPTH):
        below: list[tuple[str, object]] = []
        for path, part in level:
            if isinstance(part, list):
                below += [(f"{path}[{n}]", item) for n, item in enumerate(cast(list[object], part))]
            if not isinstance(part, dict):
                continue

            # Check the keywords of a schema, and collect the schemas in it
            for keyword, value in cast(dict[str, Any], part).items():
                where = f"{path}.{keyword}"
                if keyword in _REFUSED and value not in (None, False):
                    raise FieldError(f"{where}: this server does not support the keyword", field)
                num_chars += len(value) if keyword == "pattern" and isinstance(value, str) else 0
                if keyword == "multipleOf" and isinstance(value, int | float) and value > 0:
                    multiples.add(Decimal(repr(value + 0)))  # 1 for true
                if keyword in _NAMED and isinstance(value, dict):
                    num_chars += sum(map(len, value)) if keyword == "patternProperties" else 0
                    below += [(f"{where}.{name}", inner) for name, inner in cast(dict[str, object], value).items()]
                elif keyword not in _DATA:
                    below.append((where, value))
        level = below

    if level:
        raise FieldError(f"{field}: is nested deeper than {_MAX_DEPTH} levels", field)
    return num_chars, {value for value in multiples if value.is_finite()}


def _limit_patterns(num_chars: int, field: str) -> None:
    if num_chars > _MAX_PATTERN_CHARS:
        raise FieldError(
            f"{field}: its patterns have {num_chars} characters, but must have at most {_MAX_PATTERN_CHARS}", field
        )


def _limit_multiples(size: int, field: str) -> None:
    if size > _MAX_MULTIPLE:
        raise FieldError(
            f"{field}: its values of multipleOf, or their least common multiple, are too large; without zeros at the "
            f"end, at most {_MAX_MULTIPLE} is supported",
            field,
        )


def _read_digits(value: Decimal) -> int:
    """Return the digits of a number as a whole number without zeros at the end, for example 25 for 2.50."""
    return int("".join(map(str, value.normalize().as_tuple().digits)))


def _measure_multiples(multiples: Collection[Decimal]) -> int:
    """Return the sum or the least common multiple of `multipleOf` values, the larger one. See `_MAX_MULTIPLE`."""
    total, common = 0, 1
    for number in map(_read_digits, multiples):
        total, common = total + number, math.lcm(common, number)
        if max(total, common) > 100 * _MAX_MULTIPLE:  # large enough, and a larger number takes long
            break
    return max(total, int(str(common).rstrip("0")))


def _read_json(text: str, start: int) -> object:
    """Return the JSON value at a position of a text, or None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
