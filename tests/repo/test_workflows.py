"""The jobs of the CI workflow."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_one_job_guards_the_decode_step_with_jax_0_11_and_is_never_skipped() -> None:
    """The other jobs install whichever JAX is the newest for their Python."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    job = jobs["decode-guard"]
    assert not {"if", "needs", "continue-on-error"} & job.keys()
    assert job["steps"][-1] == {"run": "make decode-guard"}
    python = next(step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))

    recipe = (ROOT / "Makefile").read_text().partition("\ndecode-guard:  ##")[2].partition("\n\n")[0]
    assert python == "3.12", "JAX 0.11 has no packages for Python 3.11"
    assert "'jax==0.11.*'" in recipe and "SKYRL_TX_REQUIRE_ENVIRONMENTS=1" in recipe
    [name] = [word for word in recipe.split() if word.startswith("tests/")]
    assert "def test_a_decode_step_with_an_adapter_copies_no_weights(" in (ROOT / name).read_text()
