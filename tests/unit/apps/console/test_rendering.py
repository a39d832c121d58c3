"""Static files that the wheel must contain, with third-party files unchanged."""

import tomllib
from pathlib import Path

from skyrl_tx.apps.console.rendering import STATIC, StaticFiles
from tests.support.fetch_vendored import VENDOR, digest, packages

ROOT = Path(__file__).parents[4]


def test_vendored_files_are_those_of_their_projects() -> None:
    listed = {"VENDOR.toml"}
    for package in packages():
        assert package["license"] in ("0BSD", "MIT") and "LICENSE" in package["files"]
        for path, expected in package["files"].items():
            name = f"{package['directory']}/{Path(path).name}"
            assert digest((VENDOR / name).read_bytes()) == expected, name
            listed.add(name)
    assert {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()} == listed


def test_the_wheel_has_templates_scripts_and_styles() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    for path in STATIC.parent.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(path.match(pattern) for pattern in patterns), path


def test_scripts_are_kept_under_a_hash_of_their_content() -> None:
    files = StaticFiles.load()
    assert files.digest in files.address("console.css") and "vendor/htmx/htmx.min.js" in files.files
    assert StaticFiles(files.files, files.digest) == StaticFiles.load()


def test_templates_run_no_inline_script_and_no_style() -> None:
    for template in (STATIC.parent / "templates").glob("*.jinja"):
        text = template.read_text()
        assert "style=" not in text and "<style" not in text and "|safe" not in text and "onclick" not in text
        assert "<script>" not in text and "autoescape" not in text and "http://" not in text and "https://" not in text
