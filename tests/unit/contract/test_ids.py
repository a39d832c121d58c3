"""Paths and names are parsed in one place, with clear errors."""

import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import (
    CheckpointKind,
    CheckpointPath,
    ModelId,
    SessionId,
    checkpoint_name,
    model_id,
    sampling_session_id,
)


def test_ids_have_the_form_that_the_sdk_builds_by_itself() -> None:
    assert model_id(SessionId("s"), 3) == "s:train:3"
    assert sampling_session_id(SessionId("s"), 0) == "s:sample:0"


def test_a_path_is_parsed_and_formatted_back() -> None:
    path = CheckpointPath.parse("tinker://s:train:0/sampler_weights/step-1")
    assert path == CheckpointPath(ModelId("s:train:0"), CheckpointKind.SAMPLER, "step-1")
    assert str(path) == "tinker://s:train:0/sampler_weights/step-1"
    assert path.checkpoint_id == "sampler_weights/step-1"


@pytest.mark.parametrize(
    "text", ["", "s/weights/a", "tinker://s/weights", "tinker://s/weights/a/b", "tinker:///weights/a", "tinker://s/x/a"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="path"):
        CheckpointPath.parse(text)


@pytest.mark.parametrize("name", ["", "..", ".a", "a/b", "a\0b", "a" * 300, "a\n", "ä", "-rf"])
def test_a_checkpoint_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="checkpoint name"):
        checkpoint_name(name)


@pytest.mark.parametrize("name", ["a", "000010", "step_1.final", "A-b", "a" * 128])
def test_an_ordinary_name_is_kept(name: str) -> None:
    assert checkpoint_name(name) == name
