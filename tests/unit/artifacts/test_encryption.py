import json
import shutil
import subprocess
from pathlib import Path

import pyrage
import pytest

from skyrl_tx.artifacts.files import encrypt_files, parse_recipients
from skyrl_tx.contract.errors import UserError

# Generated for this test.
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQf+jcYcOlnhqKm1gGDlYL1n8/Jx/Tlz0ZiihQyqJES"


def test_every_file_is_encrypted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(bytes(200_000))
    identity = pyrage.x25519.Identity.generate()
    encrypt_files(tmp_path, [str(identity.to_public())])
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.age", "b.safetensors.age"}
    assert pyrage.decrypt((tmp_path / "b.safetensors.age").read_bytes(), [identity]) == bytes(200_000)


@pytest.mark.skipif(shutil.which("age") is None, reason="the tool age is not installed")
def test_the_age_tool_decrypts_our_files(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "key.txt").write_text(f"{identity}\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    encrypt_files(folder, [str(identity.to_public())])
    command = ["age", "--decrypt", "--identity", tmp_path / "key.txt", folder / "adapter_config.json.age"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout) == {"r": 8}


def test_recipients_are_age_or_ssh_keys() -> None:
    identity = pyrage.x25519.Identity.generate()
    parse_recipients([str(identity.to_public()), SSH_KEY])
    for wrong in ("", "age1", "ssh-ed25519 AAAA"):
        with pytest.raises(UserError, match=f"recipients {wrong!r}"):
            parse_recipients([wrong])


def test_error_does_not_quote_a_secret_key() -> None:
    secret = str(pyrage.x25519.Identity.generate())
    with pytest.raises(UserError, match="contains a secret key") as error:
        parse_recipients([secret])
    assert secret not in str(error.value)
