"""Settings of a group of hosts that run one backend together, and of this host in the group."""

import ipaddress
from collections.abc import Mapping
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

DEFAULT_PORT = 7700
LWS_SIZE, LWS_RANK, LWS_ADDRESS = "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"
"""Environment variables that a Kubernetes LeaderWorkerSet sets in each of its pods."""


class HostsFlags(BaseModel):
    """Settings for multiple hosts that share one model.

    The operator starts each host with its own rank.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    size: int = Field(default=1, ge=1)
    """Number of hosts that share the base model."""
    rank: int = Field(default=0, ge=0)
    """Number of this host, counted from 0.
    Rank 0 runs the engine; the other ranks repeat its backend calls."""
    address: str | None = None
    """Host and port at which the other hosts reach rank 0, for example host0:7700.
    Rank 0 listens there, and the backend uses the next port (7701). Use a private network."""
    key: SecretStr | None = None
    """Secret that every host needs to join. Required unless --hosts.address is a loopback address.
    Prefer the environment variable. The key itself is never sent, but calls are not encrypted."""

    @field_validator("address")
    @classmethod
    def _validate_address(cls, address: str | None) -> str | None:
        if address is not None:
            split_address(address)
        return address

    @model_validator(mode="after")
    def _validate_rank(self) -> Self:
        if self.rank >= self.size:
            raise ValueError(f"hosts.rank {self.rank} must be below hosts.size, which is {self.size}")
        return self

    @property
    def key_bytes(self) -> bytes:
        """The key as bytes; empty if no key is set."""
        return b"" if self.key is None else self.key.get_secret_value().encode()

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The host and the port of rank 0. Raises ValueError if `address` is not set."""
        if self.address is None:
            raise ValueError(
                "hosts.address is required with hosts.size: set it to the host and port of rank 0, such as host0:7700"
            )
        return split_address(self.address)

    def check_joinable(self) -> None:
        """Raise ValueError if multiple hosts cannot join safely.

        They need an address, and a key unless the address is a loopback address.
        """
        if self.size == 1:
            return
        host, _ = self.host_and_port
        if not self.key_bytes and not _is_loopback(host):
            raise ValueError(
                f"hosts.key is required, because other machines can reach hosts.address {self.address}. Make a key with"
                "\n    openssl rand -hex 32\n"
                "and set it on every host in the environment variable SKYRL_TX_HOSTS__KEY"
            )

    @property
    def coordinator(self) -> str:
        """The address of rank 0 that the backend may use for itself: the next port."""
        host, port = self.host_and_port
        return join_address(host, port + 1)


class HostsSettings(HostsFlags):
    """The settings of a group of hosts with the time limit, which the server sets."""

    silence_s: float = Field(default=600.0, gt=0)
    """Restart all hosts if a host other than rank 0 takes longer than this for one call.
    Joining and starting are not limited.
    The server sets it to --step-timeout-s, the limit for a single host."""


_Hosts = TypeVar("_Hosts", bound=HostsFlags)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[IPv6 address]:port` into host and port.

    Raises ValueError for anything else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"{address!r} must be host:port with a port from 1 to 65534, such as host0:7700")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port to `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def from_leader_worker_set(given: _Hosts, environment: Mapping[str, str]) -> _Hosts:
    """Return `given` with the size, rank and address from a Kubernetes LeaderWorkerSet.

    The port comes from `given.address`, or is DEFAULT_PORT. Raises ValueError if a variable is
    missing, or if size or rank is not a number.
    """
    missing = [name for name in (LWS_SIZE, LWS_RANK, LWS_ADDRESS) if not environment.get(name)]
    if missing:
        raise ValueError(
            f"launcher lws: the environment lacks {', '.join(missing)}. A LeaderWorkerSet sets these variables in its "
            "pods; outside of one, choose another launcher"
        )
    size, rank = environment[LWS_SIZE], environment[LWS_RANK]
    if not (size.isdecimal() and rank.isdecimal()):
        raise ValueError(f"launcher lws: {LWS_SIZE}={size!r} and {LWS_RANK}={rank!r} must be whole numbers")
    port = DEFAULT_PORT if given.address is None else split_address(given.address)[1]
    address = join_address(environment[LWS_ADDRESS], port)
    return type(given).model_validate({**given.model_dump(), "size": int(size), "rank": int(rank), "address": address})
