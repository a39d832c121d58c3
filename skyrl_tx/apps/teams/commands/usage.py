"""`skyrl-tx usage`: show the usage of owners, projects, keys, sessions, runs or days."""

import argparse
import csv
import json
import sys
import time
from dataclasses import asdict

from pydantic import ValidationError

from skyrl_tx.apps.teams.prices import Prices, TeamsSettings
from skyrl_tx.apps.teams.usage_report import SUBJECTS, UsageLine, read_usage_lines
from skyrl_tx.launch.command import CommandError, suggest
from skyrl_tx.launch.command_line import Record, add_since, finish_parser, format_table, open_database, parse_path
from skyrl_tx.launch.settings import SettingsError, check_file, read_config_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--by", choices=SUBJECTS, default="owner", help="what to show in each line (default: owner)")
    add_since(parser, days=30)
    parser.add_argument("--owner", help="show only the usage of this owner")
    parser.add_argument(
        "--config", type=parse_path, metavar="FILE", help="the server's YAML file; costs are computed from its `prices`"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    finish_parser(parser, _run)


def _run(arguments: argparse.Namespace) -> None:
    prices, since = _read_prices(arguments), time.time() - arguments.since
    with open_database(arguments) as store:
        lines = store.read(lambda tx: read_usage_lines(tx, arguments.owner, arguments.by, since, prices))

    records = [{arguments.by: line.subject, **_make_record(line)} for line in lines]
    if arguments.json:
        print(json.dumps(records, indent=2))
    elif arguments.csv:
        writer = csv.DictWriter(sys.stdout, [arguments.by, *_make_record(UsageLine(subject=""))], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    else:
        print("\n".join(format_table(records)) if records else "no usage")
        if records and prices == Prices():
            missing = "needs the server's YAML file, with its `prices`"
            if arguments.config is not None:
                missing = f"{arguments.config} has no `prices`"
            print(f"without costs: --config {missing}", file=sys.stderr)


def _make_record(line: UsageLine) -> Record:
    values: Record = {
        **asdict(line),
        "device_s": round(line.device_s, 1),
        "gigabyte_hours": round(line.gigabyte_hours, 3),
    }
    del values["subject"]
    if line.cost_usd is not None:
        values["cost_usd"] = round(line.cost_usd, 4)
    return values


def _read_prices(arguments: argparse.Namespace) -> Prices:
    if arguments.config is None:
        return Prices()
    try:
        values = read_config_file(arguments.config)
        # Check only names like `prices`: the file may have settings of a backend that is not installed here.
        own = {name: value for name, value in values.items() if suggest(name, TeamsSettings.model_fields)}
        check_file(TeamsSettings, own, f"--config {arguments.config}")
        return Prices.model_validate(values.get("prices") or {})
    except SettingsError as error:
        raise CommandError(str(error)) from error
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, ("prices", *problem["loc"])))
        raise CommandError(f"--config {arguments.config}: {name}: {problem['msg']}") from error
