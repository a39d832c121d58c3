from pathlib import Path

import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings


def settings(**more: object) -> ApiSettings:
    return ApiSettings.model_validate({"data_dir": Path("data"), "base_model": "models/mine", **more})


def test_model_aliases_resolve_to_the_public_name() -> None:
    named = settings(served_model_name="org/model", served_model_aliases=["org/judge", "org/teacher"])
    for name in ("org/model", "models/mine", "org/judge", "org/teacher", "org/model:peft:262144"):
        assert named.resolve_model_name(name) == "org/model"
    assert named.model_names == ["org/model", "org/judge", "org/teacher"]
    assert settings(served_model_aliases=["org/judge"]).resolve_model_name("org/judge") == "models/mine"


def test_unknown_model_error_lists_served_names() -> None:
    with pytest.raises(UserError, match=r"'org/other'.*'models/mine', 'org/judge'"):
        settings(served_model_aliases=["org/judge"]).resolve_model_name("org/other")
    with pytest.raises(UserError, match="'org/judge:fast'"):
        settings(served_model_aliases=["org/judge"]).resolve_model_name("org/judge:fast")


def test_slash_at_the_end_of_a_directory_is_no_part_of_the_name() -> None:
    settings = ApiSettings(data_dir=Path("/data"), base_model="models/smollm2//")
    assert settings.public_model_name == settings.base_model == "models/smollm2"
    assert settings.resolve_model_name("models/smollm2/") == "models/smollm2"
    assert ApiSettings(data_dir=Path("/data"), base_model="/").base_model == "/"
