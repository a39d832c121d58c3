"""The page of a training run in a browser, with curves that were recorded in a real run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.contract.ids import ModelId
from tests.support import recorded_runs
from tests.support.console_world import ConsoleWorld, console_world
from tests.support.watched_page import WatchedPage

OWNER = "ann"
EXTREMES: dict[str, list[float]] = {
    "huge": [1.7e308, -1.7e308, 0.0],
    "tiny": [5e-324, 0.0, 5e-324],
    "near one": [1.0, 1.0 + 2.3e-16, 1.0 - 1.2e-16],
    "near a million": [1e6, 1e6 + 1e-9, 1e6],
    "negative": [-1.0, -1.0, -1.0 - 1e-12],
    "zero": [0.0, 0.0, 0.0],
}
"""Three values of each logged metric, which are hard to draw or to label."""
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        yield world


@pytest.fixture(params=[390, 1440])
def visitor(world: ConsoleWorld, chromium: Any, request: pytest.FixtureRequest) -> Iterator[WatchedPage]:
    """Yield a visitor who is logged in, in a narrow and in a wide window.

    The test fails if the page had any problem.
    """
    context = chromium.new_context(base_url=world.server.url, viewport={"width": request.param, "height": 900})
    visitor, key = WatchedPage(context, world.server.url), world.key(OWNER)
    visitor.page.goto("/login")
    visitor.page.get_by_label("API key").fill(key)
    visitor.page.get_by_role("button", name="Log in").click()
    visitor.page.wait_for_url("**/overview")
    yield visitor
    assert visitor.problems == []
    context.close()


def read_titles(page: Any) -> list[str]:
    """Return the titles of the visible charts after all of them are drawn."""
    page.locator("section.chart[data-points]:visible").first.wait_for()
    assert page.locator("section.chart:visible canvas").count() == page.locator("section.chart:visible").count()
    return page.locator("section.chart:visible h3 > span").all_inner_texts()


def has_horizontal_scrollbar(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_a_recorded_quickstart_is_drawn(world: ConsoleWorld, visitor: WatchedPage, screenshots: Path) -> None:
    page, run = visitor.page, world.server.store.write(lambda tx: recorded_runs.add_quickstart(tx, OWNER))
    page.goto(f"/training_runs/{run}")
    titles = read_titles(page)
    assert titles[:2] == ["reward", "Loss"] and {"train_nll", "Ratio", "KL to the sampler"} <= set(titles)
    assert page.locator("h1").inner_text().startswith("quickstart") and not has_horizontal_scrollbar(page)
    width = page.viewport_size["width"]
    page.screenshot(path=screenshots / f"quickstart-{width}.png", full_page=True)

    # The filter hides charts and empty groups, and the next page remembers it
    page.get_by_label("charts").fill("ratio")
    assert read_titles(page) == ["Ratio"] and page.locator("section.chart-group:visible").count() == 1
    page.reload()
    assert read_titles(page) == ["Ratio"]
    page.get_by_label("charts").fill("")
    assert read_titles(page) == titles
    for option in ("log y", "checkpoints"):
        page.get_by_label(option).click()
    page.locator("select[name=x]").select_option("time")
    assert read_titles(page) == titles


def test_a_run_without_logged_metrics_shows_how_to_log_rewards(
    world: ConsoleWorld, visitor: WatchedPage, screenshots: Path
) -> None:
    def add(tx: Any) -> ModelId:
        run = recorded_runs.add_run(tx, OWNER, None)
        recorded_runs.add_points(tx, run, OWNER, recorded_runs.FIRST_RL_STEP)
        return run

    page, run = visitor.page, world.server.store.write(add)
    page.goto(f"/training_runs/{run}")
    assert read_titles(page)[0] == "Loss"
    assert "TRACKIO_SERVER_URL" in page.locator("#hints").inner_text()
    page.screenshot(path=screenshots / f"rl-{page.viewport_size['width']}.png", full_page=True)


def test_extreme_values_are_drawn(world: ConsoleWorld, visitor: WatchedPage) -> None:
    def add(tx: Any) -> ModelId:
        run = recorded_runs.add_run(tx, OWNER, "extremes")
        recorded_runs.add_points(tx, run, OWNER, recorded_runs.FIRST_RL_STEP + 11)
        rows = [{name: values[index] for name, values in EXTREMES.items()} for index in range(3)]
        # Step numbers close to the largest integer that JavaScript can count to
        high_steps = [(2**53 - 2 + index, {"far/steps": float(index)}) for index in range(3)]
        recorded_runs.log_metrics(tx, run, OWNER, [*enumerate(rows), *high_steps])
        return run

    page, run = visitor.page, world.server.store.write(add)
    page.goto(f"/training_runs/{run}")
    titles = read_titles(page)
    assert {*EXTREMES, "far/steps"} <= set(titles)
    page.get_by_label("log y").check()
    assert read_titles(page) == titles

    # The charts of several runs
    other = world.server.store.write(lambda tx: recorded_runs.add_quickstart(tx, OWNER))
    page.goto(f"/compare?runs={run},{other}")
    assert {"reward", *EXTREMES} <= set(read_titles(page))


def test_axes_and_smoothing(world: ConsoleWorld, visitor: WatchedPage) -> None:
    # Call the functions of the charts' module in the browser
    run = world.server.store.write(lambda tx: recorded_runs.add_run(tx, OWNER, None))
    visitor.page.goto(f"/training_runs/{run}")
    module = visitor.page.locator("script[type=module]").first.get_attribute("src").rpartition("/")[0]
    found = visitor.page.evaluate(
        """async (folder) => {
          const numbers = await import(`${folder}/chart_numbers.js`);
          const plot = { scales: { y: { distr: 1 } } };
          const label = (ticks, increment) => numbers.labelTicks(plot, ticks, 1, 50, increment);

          const values = Array.from({ length: 20 }, (_, index) => index);
          return {
            near: numbers.widen(1 - 5e-8, 1 + 5e-8, 1e-3), zero: numbers.findRange(null, 0, 0),
            negative: label([-4e-7, -2e-7, 0, 2e-7], 2e-7), ratio: label([0.9995, 1, 1.0005], 5e-4),
            halves: label([-2.5e-8, 0, 2.5e-8, 5e-8], 2.5e-8), quarters: label([0, 0.25, 0.5], 0.25),
            few: numbers.smooth([7.08, 2.92], 0.6), many: numbers.smooth(values, 0.6).at(-1),
          };
        }""",
        module,
    )

    # Compare the results
    low, high = found.pop("near")
    assert high - low == pytest.approx(1e-3) and (low + high) / 2 == pytest.approx(1.0)
    assert 17 < found.pop("many") < 19
    assert found == {
        "zero": [0, 1],
        "negative": ["-4e-7", "-2e-7", "0", "2e-7"],
        "ratio": ["0.9995", "1.0000", "1.0005"],
        "halves": ["-2.5e-8", "0", "2.5e-8", "5.0e-8"],
        "quarters": ["0", "0.25", "0.50"],
        "few": [7.08, 2.92],
    }
