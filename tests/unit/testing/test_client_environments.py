"""Environments are built once and completely, and errors say why one is unavailable.

The recipes here need no package index.
"""

import venv

import pytest

from tests.support import client_environments, prepare_environments
from tests.support.client_environments import (
    CACHE_VARIABLE,
    ClientEnvironment,
    PreparedEnvironment,
    UnavailableEnvironment,
    cache_directory,
    link,
    prepare,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Write wheels by hand, which pip can install without an index or a build."""
    import zipfile

    directory = tmp_path_factory.mktemp("wheels")
    for name in ("nvidia_pretender", "harmless"):
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 42\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return directory


@pytest.mark.slow
def test_builds_once_and_runs_scripts(package, tmp_path, monkeypatch):
    recipe = ClientEnvironment(name="small", requirements=(str(package / "harmless-1.0-py3-none-any.whl"),))
    script = tmp_path / "script.py"
    script.write_text("import harmless, sys; print(harmless.VALUE, sys.argv[1])")
    first = prepare(recipe, tmp_path / "cache")
    assert first.run(script, "hello").stdout.split() == ["42", "hello"]
    monkeypatch.setattr(client_environments, "_build", lambda *_: pytest.fail("built again"))
    assert prepare(recipe, tmp_path / "cache") == first

    script.write_text("raise SystemExit('no luck')")
    with pytest.raises(RuntimeError, match=r"(?s)status 1\nstdout is empty\nstderr:.*no luck"):
        first.run(script)
    script.write_text("import os; os.abort()")
    with pytest.raises(RuntimeError, match="signal SIGABRT\nstdout is empty\nstderr is empty"):
        first.run(script)
    script.write_text("import sys; raise ValueError(sys.argv, sys.path[0], __name__)")
    with pytest.raises(RuntimeError, match=rf"ValueError: \(\['{script}', 'hello'\], '{tmp_path}', '__main__'\)"):
        first.run(script, "hello")
    script.write_text("import atexit, os; atexit.register(os.abort); print('done')")
    assert first.run(script).stdout == "done\n", "no shutdown of the interpreter, in which the SDK can abort"


@pytest.mark.slow
def test_one_over_another_sees_its_packages_after_its_own(package, tmp_path):
    wheel = package / "harmless-1.0-py3-none-any.whl"
    below = ClientEnvironment(name="below", requirements=(str(wheel),))
    above = ClientEnvironment(name="above", requirements=(str(wheel),), over=below)
    script = tmp_path / "script.py"
    script.write_text("import harmless; print(harmless.__file__)")
    prepared = prepare(above, tmp_path)
    assert prepared.run(script).stdout.startswith(str(tmp_path / below.key)), "installed once: pip sees it below"
    assert above.key != ClientEnvironment(name="above", requirements=(str(wheel),)).key
    own = next((tmp_path / above.key / "lib").glob("python*/site-packages"))
    (own / "harmless.py").write_text("")
    assert prepared.run(script).stdout.startswith(str(own))


@pytest.mark.slow
def test_packages_of_a_linked_environment_are_found_after_the_own_ones(package, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    linked = ClientEnvironment(name="linked", requirements=(str(package / "harmless-1.0-py3-none-any.whl"),))
    venv.create(tmp_path / "own")
    python = tmp_path / "own" / "bin" / "python"
    script = tmp_path / "script.py"
    script.write_text("import harmless; print(harmless.__file__)")
    file = link(linked, python)
    own = PreparedEnvironment(python=python)
    assert own.run(script).stdout.startswith(str(tmp_path / linked.key))
    (file.parent / "harmless.py").write_text("")
    assert own.run(script).stdout.startswith(str(file.parent))


def test_refuses_accelerator_packages(package, tmp_path):
    recipe = ClientEnvironment(name="gpu", requirements=(str(package / "nvidia_pretender-1.0-py3-none-any.whl"),))
    with pytest.raises(UnavailableEnvironment, match="nvidia-pretender"):
        prepare(recipe, tmp_path)
    assert not (tmp_path / recipe.key).exists()


def test_says_why_it_cannot_be_made(tmp_path):
    recipe = ClientEnvironment(name="absent", requirements=(str(tmp_path / "absent.whl"),))
    with pytest.raises(UnavailableEnvironment, match=r"absent\.whl"):
        prepare(recipe, tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """Replace pip with a build that makes an empty environment. Another test covers pip."""

    def build(recipe, directory, python, below):
        if "absent" in recipe.requirements:
            raise UnavailableEnvironment("absent.whl")
        python.parent.mkdir(parents=True)
        python.touch()

    monkeypatch.setattr(client_environments, "_build", build)


@pytest.mark.usefixtures("quick")
def test_an_interrupted_build_is_started_over(tmp_path):
    recipe = ClientEnvironment(name="small", requirements=("harmless",))
    (tmp_path / recipe.key).mkdir()
    (tmp_path / recipe.key / "rubbish").touch()
    assert prepare(recipe, tmp_path).python.exists()
    assert not (tmp_path / recipe.key / "rubbish").exists()


def test_another_recipe_has_another_directory():
    one = ClientEnvironment(name="x", requirements=("a",))
    assert one.key != ClientEnvironment(name="x", requirements=("b",)).key
    assert one.key != ClientEnvironment(name="x", requirements=("a",), no_deps=("b",)).key


def test_the_cache_directory_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path


@pytest.mark.usefixtures("quick")
def test_all_can_be_made_before_the_tests_ask_for_them(tmp_path, monkeypatch, capsys):
    below = ClientEnvironment(name="below", requirements=("harmless",))
    absent = ClientEnvironment(name="absent", requirements=("absent",))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.argv", ["prepare_environments"])
    monkeypatch.setattr(prepare_environments, "ALL", (below,))
    assert prepare_environments.main() == 0 and (tmp_path / below.key / "complete").exists()
    monkeypatch.setattr(prepare_environments, "ALL", (below, absent))
    assert prepare_environments.main() == 1 and "absent.whl" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_fresh_builds_use_no_cache_and_leave_nothing(tmp_path, monkeypatch, capsys):
    recipe = ClientEnvironment(name="fresh", requirements=("harmless",))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("sys.argv", ["prepare_environments", "--fresh"])
    monkeypatch.setattr(prepare_environments, "ALL", (recipe,))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    assert prepare_environments.main() == 0
    assert "fresh: " in capsys.readouterr().out and not list(tmp_path.iterdir())
