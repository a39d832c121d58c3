"""Usage, storage, the audit log and sessions, as one SDK release and its command line show them to an admin.

    python team_views.py URL SESSION START END

Needs TINKER_API_KEY and TINKER_BASE_URL. Prints JSON without the views that the release does not
have.
"""

import json
import sys
import warnings
from collections import Counter
from datetime import datetime
from importlib.metadata import version
from typing import Any

import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

warnings.simplefilter("ignore")  # newer releases have moved some of these methods
COMMANDS = {
    "usage_command": ("billing", "usage"),
    "storage_command": ("billing", "checkpoint-storage"),
    "trace_command": ("session", "export-trace"),
}


def plain(response: Any) -> dict[str, Any]:
    return response.model_dump(mode="json")


def count_usage(events: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return tokens and checkpoints by owner and kind of work."""
    found: dict[str, Counter[str]] = {}
    for event in events:
        info = event["event_info"]
        if info["type"] != "storage":
            amount = info.get("token_count", info.get("count", 0))
            found.setdefault(event["user_name"], Counter())[info["type"]] += amount
    return {owner: dict(amounts) for owner, amounts in sorted(found.items())}


def read_entries(response: dict[str, Any]) -> list[list[str]]:
    """Return the event and the path of each entry.

    Releases before 0.26 have the path only outside of the details.
    """
    return sorted([entry["event"], entry["tinker_path"]] for entry in response["entries"])


def count_checkpoints(response: dict[str, Any]) -> list[int]:
    return sorted(row["checkpoint_count"] for row in response["data"])


def run_command(*arguments: str) -> str:
    shown = CliRunner().invoke(main_cli, list(arguments))
    assert shown.exit_code == 0, (arguments, shown.output, shown.exception)
    return shown.stdout


def has_command(group: str, name: str) -> bool:
    try:
        return CliRunner().invoke(main_cli, [group, name, "--help"]).exit_code == 0
    except Exception:
        return False


def main(url: str, session: str, start: str, end: str) -> dict[str, Any]:
    found: dict[str, Any] = {"version": version("tinker")}
    rest = tinker.ServiceClient(base_url=url).create_rest_client()
    admin = tinker.AdminClient(base_url=url) if hasattr(tinker, "AdminClient") else rest
    if hasattr(admin, "get_audit_log"):
        found["audit"] = read_entries(plain(admin.get_audit_log(event_type="checkpoints").result()))
    if hasattr(admin, "get_billing_usage"):
        window = datetime.fromisoformat(start), datetime.fromisoformat(end)
        found["usage"] = count_usage(plain(admin.get_billing_usage(*window).result())["data"])

    if hasattr(admin, "get_current_checkpoint_storage_usage"):
        found["storage"] = count_checkpoints(plain(admin.get_current_checkpoint_storage_usage().result()))
    if hasattr(rest, "assign_session_project"):
        rest.assign_session_project(session, "math").result()
    if hasattr(rest, "search_sessions"):
        owner = {"type": "accessible"}
        wanted = tinker.types.SessionSearchRequest.model_validate({"project_ids": ["math"], "owner": owner})
        sessions = plain(rest.search_sessions(wanted).result())["sessions"]
        found["search"] = [summary["session_id"] for summary in sessions]

    if has_command(*COMMANDS["usage_command"]):
        shown = run_command("--format", "json", "billing", "usage", start, end)
        found["usage_command"] = count_usage(json.loads(shown)["data"])
    if has_command(*COMMANDS["storage_command"]):
        found["storage_command"] = count_checkpoints(
            json.loads(run_command("--format", "json", "billing", "checkpoint-storage"))
        )
    if has_command(*COMMANDS["trace_command"]):
        found["trace_command"] = run_command("session", "export-trace", session, "--url-only").strip()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
