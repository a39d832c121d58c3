import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlmodel import update

from skyrl_tx.apps.history import logged_metrics, points
from skyrl_tx.apps.history.curves import fold_points
from skyrl_tx.apps.history.logged_metrics import CLIENT_RUN, LoggedPoint, LoggedRun, LoggedRunRow, NewLoggedPoint
from skyrl_tx.apps.history.points import LOSS_WEIGHT, Point, SampleTotals
from skyrl_tx.apps.history.run_report import draw_sparkline, get_last_loss, make_curves
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.contract.results import SHARED_TOKENS
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow
from skyrl_tx.tools.cli import main

RUN = ModelId("session-1:train:0")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    def fill(tx) -> None:
        session = sessions.create(tx, owner="ann", now=1.0, display_name="math", project_id="gsm8k")
        tx.flush()
        spec = codec.encode(ModelSpec(lora=LoraSpec(rank=16, seed=1)))
        tx.add(
            ModelRow(
                model_id=RUN,
                session_id=session,
                base_model="Qwen/Qwen3-8B",
                spec=spec,
                status="ready",
                created_at=1.0,
                last_request_at=2.0,
                num_steps=8,
                loaded_from="tinker://other:train:0/weights/start",
            )
        )
        tx.flush()

        for step in range(8):
            for part in range(2):
                values = {"loss:sum": 10.0 - step, LOSS_WEIGHT: 2.0, SHARED_TOKENS: 1.0}
                points.add(tx, point(10 * step + part, "train", step, values))
            points.add(tx, point(10 * step + 5, "step", step + 1, {"unclipped_grad_l2:mean": 1.0 + step}))

        row = logged_metrics.open_run(tx, LoggedRun(owner="ann", project="p", key="k", name="n", model_id=RUN), 3.0)
        rewards = [NewLoggedPoint(log_id=str(step), step=step, values={"reward\x1b[1m": step / 8}) for step in range(8)]
        logged_metrics.add_points(tx, row, rewards, 3.0)
        tx.add(
            CheckpointRow(
                model_id=RUN,
                kind=CheckpointKind.TRAINING,
                name="s4",
                artifact_id=ArtifactId("a"),
                created_at=3.0,
                size_bytes=2048,
                step=4,
                copied_from="tinker://other:train:0/weights/old",
            )
        )

    store = Store.open(tmp_path, role="tool")
    store.write(fill)
    store.close()
    return tmp_path


def point(position: int, kind, step: int, values: dict[str, float | None]) -> Point:
    return Point(
        position=position + 1,
        model_id=RUN,
        kind=kind,
        step=step,
        created_at=1.0,
        started_at=1.0,
        at=2.0,
        device_s=0.1,
        tokens=3,
        datums=1,
        values=values,
    )


def run(data_dir: Path, *arguments: str) -> int:
    return main(["runs", *arguments, "--data-dir", str(data_dir)])


def test_show_prints_config_curves_and_lineage(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, "show", RUN) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rank", "16"] in lines and ["project", "gsm8k"] in lines and ["step", "8"] in lines
    assert ["loaded", "from", "tinker://other:train:0/weights/start"] in lines
    assert ["shared", "tokens", "33%"] in lines, "one of three tokens of each pass"
    assert ["loss", "5", "█▇▆▅▄▃▂▁", "1.5", "8"] in lines
    assert ["gradient", "norm", "1", "▁▂▃▄▅▆▇█", "8", "8"] in lines
    assert ["reward\\x1b[1m", "0", "▁▂▃▄▅▆▇█", "0.875", "7"] in lines, "terminals execute no text of clients"
    table = [line[0] for line in lines[lines.index(["METRIC", "FIRST", "CURVE", "LAST", "STEP"]) :] if line]
    assert table[1:4] == ["reward\\x1b[1m", "loss", "gradient"]
    text = " ".join(word for line in lines for word in line)
    assert "tinker://session-1:train:0/weights/s4" in text and "tinker://other:train:0/weights/old" in text


def test_show_warns_as_the_page_does(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(tx) -> None:
        points.add(tx, point(200, "train", 8, {"loss:sum": math.nan}))
        for step in range(8):
            sums = SampleTotals(step=step, samples=4, cut=3, tokens=40, scored_tokens=40, logprob_sum=-40.0)
            points.add_sampled(tx, RUN, "ann", sums)

    store = Store.open(data_dir, role="tool")
    store.write(spoil)
    store.close()
    assert run(data_dir, "show", RUN) == 0
    found = capsys.readouterr().out
    assert "\nerror: The loss was NaN or infinite in step 9. Load the last good checkpoint" in found
    assert "\nwarning: 75% of the samples of steps 4–8 were cut off by max_tokens." in found
    assert run(data_dir, "show", RUN, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hints"][0]["level"] == "error"


def test_show_as_json_has_all_points(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, "show", RUN, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["step"], shown["loss"]) == (RUN, 8, 1.5)
    assert shown["curves"]["loss"][:2] == [[1, 5.0], [2, 4.5]] and shown["curves"]["gradient norm"][0] == [1, 1.0]
    assert len(shown["curves"]["reward\x1b[1m"]) == 8
    assert shown["checkpoints"][0]["copied_from"] == "tinker://other:train:0/weights/old"


def test_list_has_name_step_and_last_loss(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, "list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["step"], listed["loss"]) == ("n", 8, 1.5)


def test_a_run_with_metrics_but_no_logger_keeps_the_name_of_its_session(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(data_dir, role="tool")
    store.write(lambda tx: tx.exec(update(LoggedRunRow).values(name=CLIENT_RUN)))
    store.close()
    assert run(data_dir, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "math"


def test_a_run_of_an_older_release_shows_its_loss_per_token(tmp_path: Path) -> None:
    old = fold_points([point(0, "train", 0, {"loss:sum": 6.0}), point(1, "step", 1, {})])
    logged = [LoggedPoint(position=1, project="", run="", step=1, at=1.0, values={"loss per token": 7.0})]
    assert get_last_loss(old) is None
    assert make_curves(old, logged) == {"loss per token": [(1, 2.0)], "logged/loss per token": [(1, 7.0)]}


def test_show_names_an_unknown_run(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data_dir, "show", "nothing") == 1
    assert "run 'nothing' does not exist" in capsys.readouterr().err


def test_sparkline_shows_what_is_not_finite() -> None:
    assert draw_sparkline([1.0, None, 2.0]) == "▁·█"
    assert draw_sparkline([None]) == "·" and draw_sparkline([]) == "" and draw_sparkline([3.0, 3.0]) == "▄▄"
    assert draw_sparkline([1.0] * 50 + [2.0] * 50, width=10) == "▁▁▁▁▁█████"


@example([0.0, 5e-324])
@given(st.lists(st.none() | st.floats(allow_nan=True), max_size=200))
def test_any_values_can_be_drawn(values: list[float | None]) -> None:
    drawn = draw_sparkline(values)
    assert len(drawn) == min(40, len(values))
    assert math.isfinite(len(drawn))
