"""Rank, size and address come from flags or from the variables of a LeaderWorkerSet."""

import pytest
from pydantic import SecretStr, ValidationError

from skyrl_tx.backends.hosts.settings import HostsSettings, from_leader_worker_set

VARIABLES = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "group-0.group.default"}


def test_the_backend_has_the_port_after_that_of_the_calls():
    assert HostsSettings(size=2, address="host0:7700").coordinator == "host0:7701"
    assert HostsSettings(size=2, address="[::1]:7700").host_and_port == ("::1", 7700)
    assert HostsSettings(size=2, address="[::1]:7700").coordinator == "[::1]:7701"


@pytest.mark.parametrize("address", ["host0", ":7700", "host0:x", "host0:0", "host0:65535"])
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(ValidationError, match=r"must be host:port with a port from 1 to 65534"):
        HostsSettings(size=2, address=address)


def test_a_rank_is_below_the_size():
    with pytest.raises(ValidationError, match=r"hosts.rank 2 must be below hosts.size, which is 2"):
        HostsSettings(size=2, rank=2)
    with pytest.raises(ValueError, match=r"hosts.address is required"):
        HostsSettings(size=2).host_and_port  # noqa: B018


def test_an_address_that_others_reach_takes_a_key():
    for size, address, key in (1, None, None), (2, "127.0.0.1:7700", None), (2, "[::1]:7700", None), (2, "a:7700", "k"):
        HostsSettings(size=size, address=address, key=key and SecretStr(key)).check_joinable()
    for address in "host0:7700", "10.0.0.1:7700", "0.0.0.0:7700":
        with pytest.raises(
            ValueError,
            match=r"hosts.key is required, because other machines can reach hosts.address .*\n.*rand -hex 32",
        ):
            HostsSettings(size=2, address=address, key=SecretStr("")).check_joinable()


def test_a_leader_worker_set_says_rank_size_and_address():
    given = HostsSettings(key=SecretStr("k"), silence_s=5)
    found = from_leader_worker_set(given, VARIABLES)
    assert (found.size, found.rank, found.address) == (4, 2, "group-0.group.default:7700")
    assert (found.key_bytes, found.silence_s) == (b"k", 5)
    other_port = from_leader_worker_set(HostsSettings(address="any:9000"), VARIABLES)
    assert other_port.address == "group-0.group.default:9000"


def test_missing_and_wrong_variables_are_named():
    with pytest.raises(ValueError, match=r"lacks LWS_WORKER_INDEX, LWS_LEADER_ADDRESS"):
        from_leader_worker_set(HostsSettings(), {"LWS_GROUP_SIZE": "2"})
    with pytest.raises(ValueError, match=r"LWS_GROUP_SIZE='two'"):
        from_leader_worker_set(HostsSettings(), VARIABLES | {"LWS_GROUP_SIZE": "two"})
