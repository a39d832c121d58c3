from skyrl_tx.apps.console.teams import add_lines, draw_days
from skyrl_tx.apps.teams.usage_report import UsageLine

NOON = 20_000 * 86_400 + 43_200


def test_bars_of_days_fill_the_height_and_leave_out_nothing() -> None:
    lines = [
        UsageLine(subject="2024-10-03", training_tokens=30, sampled_tokens=10),
        UsageLine(subject="2024-10-04", prefill_tokens=5, cached_tokens=5, sampled_tokens=10),
    ]
    before, full, half = draw_days(lines, 3, NOON)
    assert before.boxes == () and before.title == "2024-10-02: 0 tokens"
    assert full.title == "2024-10-03: 40 tokens"
    assert [box[0] for box in full.boxes] == ["training", "sampled"]
    assert sum(box[4] for box in full.boxes) == 120.0 and full.boxes[-1][2] == 0.0
    assert sum(box[4] for box in half.boxes) == 60.0 and half.boxes[0][2] + half.boxes[0][4] == 120.0
    assert all(x >= 0 and x + width <= 800 for bar in (full, half) for _, x, _, width, _ in bar.boxes)


def test_bars_of_a_year_show_the_last_hundred_days() -> None:
    bars = draw_days([], 365, NOON)
    assert len(bars) == 100 and bars[-1].title.startswith("2024-10-04")


def test_totals_add_all_lines_and_known_costs() -> None:
    lines = [UsageLine(subject="a", training_tokens=1, cost_usd=0.5), UsageLine(subject="b", sampled_tokens=2)]
    assert add_lines(lines) == UsageLine(subject="total", training_tokens=1, sampled_tokens=2, cost_usd=0.5)
    assert add_lines([]) == UsageLine(subject="total")
