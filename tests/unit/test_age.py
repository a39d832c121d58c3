import json
import shutil
import subprocess
from pathlib import Path

import pyrage
import pytest

from skyrl_tx import age
from skyrl_tx.contract.errors import UserError

# Made for this test, and of no other use.
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQf+jcYcOlnhqKm1gGDlYL1n8/Jx/Tlz0ZiihQyqJES"


def test_every_file_is_sealed_and_none_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(bytes(200_000))
    identity = pyrage.x25519.Identity.generate()
    age.encrypt_files(tmp_path, [str(identity.to_public())])
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.age", "b.safetensors.age"}
    assert pyrage.decrypt((tmp_path / "b.safetensors.age").read_bytes(), [identity]) == bytes(200_000)


@pytest.mark.skipif(shutil.which("age") is None, reason="the tool age is not installed")
def test_the_tool_age_opens_what_we_sealed(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "key.txt").write_text(f"{identity}\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    age.encrypt_files(folder, [str(identity.to_public())])
    command = ["age", "--decrypt", "--identity", tmp_path / "key.txt", folder / "adapter_config.json.age"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout) == {"r": 8}


def test_recipients_are_age_or_ssh_keys() -> None:
    identity = pyrage.x25519.Identity.generate()
    age.check_recipients([str(identity.to_public()), SSH_KEY], "recipients")
    for wrong in ("", "age1", "ssh-ed25519 AAAA"):
        with pytest.raises(UserError, match=f"recipients {wrong!r}"):
            age.check_recipients([wrong], "recipients")


def test_a_secret_key_given_by_mistake_is_not_repeated() -> None:
    secret = str(pyrage.x25519.Identity.generate())
    with pytest.raises(UserError, match="holds a secret key") as told:
        age.check_recipients([secret], "recipients")
    assert secret not in str(told.value)
