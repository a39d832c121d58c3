"""Usage, storage, the audit log, sessions and traces, as each supported release of the SDK shows them."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from skyrl_tx.store import keys
from skyrl_tx.store.tables import KeyScope
from tests.support.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "team_views.py"
"""Runs with a release of the SDK, reads each view that the release has, and prints them as JSON."""
FIRST_RELEASES = {
    "audit": (0, 20),
    "usage": (0, 24),
    "usage_command": (0, 24),
    "trace_command": (0, 24),
    "storage": (0, 33),
    "storage_command": (0, 33),
    "search": (0, 36),
}
"""The first release of the SDK with each view. tests/api/test_parity.py has the endpoints."""
OWNERS = ("ann", "bob")
NUM_TRAINED, PROMPT, NUM_SAMPLED = 4, [1, 2, 3], 5
"""Tokens that each owner trains and samples."""


@dataclass(frozen=True)
class Team:
    """A server on which two owners have trained, saved and sampled."""

    stack: LiveStack
    admin_key: str
    session_id: str
    """A session of the second owner."""
    checkpoint_paths: list[str]


def make_key(stack: LiveStack, owner: str, scope: KeyScope = "user") -> str:
    key, _ = stack.server.store.write(
        lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=time.time())
    )
    return key


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(1, 1 + NUM_TRAINED))),
        loss_fn_inputs={"target_tokens": [2] * NUM_TRAINED, "weights": [1.0] * NUM_TRAINED},  # type: ignore
    )

    with live_stack("fake", tmp_path_factory.mktemp("stack")) as stack:
        admin_key, session_id, paths = make_key(stack, "root", "admin"), "", list[str]()
        for owner in OWNERS:
            with tinker.ServiceClient(base_url=stack.url, api_key=make_key(stack, owner)) as service:
                training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
                training.forward_backward([datum], "cross_entropy").result()
                training.optim_step(tinker.AdamParams()).result()
                paths.append(training.save_state("end").result().path)
                sampling = service.create_sampling_client(base_model=PUBLIC_NAME).result()
                params = tinker.SamplingParams(max_tokens=NUM_SAMPLED, seed=1, stop=[])
                sampling.sample(tinker.ModelInput.from_ints(PROMPT), 1, params).result()
                session_id = training.model_id.partition(":")[0]
        yield Team(stack, admin_key, session_id, paths)


@pytest.mark.parametrize("version", SDKS)
def test_each_view_of_a_release_shows_the_work_of_both_owners(
    team: Team, client_environment: Callable[[ClientEnvironment], PreparedEnvironment], version: str
) -> None:
    # Run the program with this release
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{hour + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S+00:00}" for hours in (-12, 12)]
    variables = {"TINKER_API_KEY": team.admin_key, "TINKER_BASE_URL": team.stack.url, "TINKER_TELEMETRY": "0"}
    environment = replace(client_environment(SDKS[version]), variables=variables)
    completed = environment.run(PROGRAM, team.stack.url, team.session_id, *window, timeout_s=120.0)
    found: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    assert found.pop("version") == version
    release = tuple(map(int, version.split(".")))
    assert found.keys() == {view for view, first in FIRST_RELEASES.items() if release >= first}

    # Compare the views with the work of the owners
    if "trace_command" in found:
        assert httpx.get(found.pop("trace_command")).status_code == 200
    usage = {"training": NUM_TRAINED, "sampling_prefill": len(PROMPT), "sampling_sample": NUM_SAMPLED, "checkpoint": 1}
    expected = {
        "audit": sorted(["checkpoint_create", path] for path in team.checkpoint_paths),
        **dict.fromkeys(("usage", "usage_command"), dict.fromkeys(OWNERS, usage)),
        **dict.fromkeys(("storage", "storage_command"), [1] * len(OWNERS)),
        "search": [team.session_id],
    }
    assert found == {view: expected[view] for view in found}
