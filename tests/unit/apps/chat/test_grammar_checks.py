"""Bad grammars are refused, and their checks take little time."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_tx.apps.chat import grammar_checks
from skyrl_tx.apps.chat.grammar_checks import check_constraint
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import Constraint

OWNER = "ann"
MAX_CHECK_S = 5.0
"""A check of the largest hostile grammar may take this many CPU seconds; it usually takes less than 0.3."""


def make_chain(size: int) -> str:
    """Return a grammar whose texts have up to 2^size characters."""
    rules = [f"x{n} ::= x{n + 1} x{n + 1} | [a-z]" for n in range(size)]
    return "\n".join(["root ::= x0", *rules, f'x{size} ::= "b"'])


HOSTILE = {
    "repeats": ("regex", "(a{1000}){1000}"),
    "classes": ("regex", r"[\w\d\s\p{L}]" * 600),
    "states": ("regex", "(.*a.{500}b){50}"),
    "alternatives": ("regex", "|".join(f"[a-z]{{{n},{n * 7}}}x" for n in range(1, 400))),
    "parentheses": ("regex", "(" * 4000 + "a" + ")" * 4000),
    "properties": (
        "json_schema",
        json.dumps({"properties": {f"key{n}": {"type": "string"} for n in range(2000)}, "required": ["key7"]}),
    ),
    "items": ("json_schema", '{"type": "array", "items": {"const": "a"}, "minItems": 1000000000}'),
    "recursion": ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    "choices": ("choice", json.dumps([f"choice number {n}" for n in range(1000)])),
    "rules": ("grammar", make_chain(500)),
    "groups": ("grammar", "root ::= " + "(" * 8000 + '"a"' + ")" * 8000),
    "ambiguous": ("grammar", 'start: e\ne: e e | e e e | "a" | ""'),
    "remainders": ("json_schema", '{"type": "integer", "multipleOf": 3000017}'),
    "common remainders": ("json_schema", '{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 0.83}]}'),
    "inner remainders": ("grammar", 'start: "a" %json {"type": "integer", "multipleOf": 3000017}'),
    "long repeat": ("grammar", 'start: "a"{1000000}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_checked_quickly_and_does_not_block_other_threads(name: str) -> None:
    """Time is CPU time, because other processes may use the cores."""
    kind, text = HOSTILE[name]
    pauses = [0.0]
    is_over = threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not is_over.wait(0.005):
            now = time.process_time()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.process_time()
    try:
        check_constraint(Constraint(kind=kind, text=text), "regex", OWNER)
    except FieldError as error:
        assert error.field == "regex"
        assert len(error.message) <= 600
    finally:
        is_over.set()
        thread.join()
    assert time.process_time() - began < MAX_CHECK_S
    assert max(pauses) < MAX_CHECK_S / 5


@pytest.mark.parametrize(
    ("values", "is_supported"),
    [
        ([0.01, 0.1, 0.25, 5, 10, 12, 1000, 1e6], True),
        ([7, 9973], False),
        ([9999], True),
        ([10001], False),
        ([10001e-7], False),
        ([97, 89, 83], False),
    ],
)
def test_values_of_multiple_of_with_a_large_sum_or_common_multiple_are_refused(
    values: list[float], is_supported: bool
) -> None:
    parts = {f"p{n}": {"type": "number", "multipleOf": value} for n, value in enumerate(values)}
    constraint = Constraint(kind="json_schema", text=json.dumps({"properties": parts}))
    if is_supported:
        check_constraint(constraint, "schema", OWNER)
    else:
        with pytest.raises(FieldError, match="schema: its values of multipleOf"):
            check_constraint(constraint, "schema", OWNER)


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_tx.apps.chat.grammar_checks._MAX_CHECK_S", 0.0)
    with pytest.raises(FieldError, match="field: is too complex"):
        # No other test has this text: the results of checks are cached.
        check_constraint(Constraint(kind="regex", text="a grammar of this test alone"), "field", OWNER)


def test_a_slow_check_does_not_delay_checks_of_other_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_over = grammar_checks.write_grammar, threading.Event()

    def write_slowly(constraint: Constraint) -> str:
        assert not constraint.text.startswith("slow") or is_over.wait(60)
        return write(constraint)

    monkeypatch.setattr(grammar_checks, "write_grammar", write_slowly)
    with ThreadPoolExecutor() as pool:
        slow = [
            pool.submit(check_constraint, Constraint(kind="regex", text=f"slow {n}"), "regex", "ann") for n in range(4)
        ]
        try:
            # No other test has this text: the results of checks are cached.
            check_constraint(Constraint(kind="regex", text="a text of this test alone"), "regex", "bob")
            assert not any(future.done() for future in slow)
        finally:
            is_over.set()
        assert [future.result(60) for future in slow] == [None] * 4
