"""The settings of a group of hosts, and of this host in it."""

import ipaddress
from collections.abc import Mapping
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

DEFAULT_PORT = 7700
LWS_SIZE, LWS_RANK, LWS_ADDRESS = "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"


class HostsFlags(BaseModel):
    """Settings of an operator for several hosts that hold one model together. Each is started with its own rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    size: int = Field(default=1, ge=1)
    """Number of hosts that hold the base model together."""
    rank: int = Field(default=0, ge=0)
    """Number of this host, from 0. Rank 0 runs the engine; the others repeat its calls of the backend."""
    address: str | None = None
    """Host and port of rank 0 for the others, such as host0:7700.
    The backend uses the next port. Rank 0 listens on this address: use a private network."""
    key: SecretStr | None = None
    """Secret that all hosts share, without which none can join. Required unless --hosts.address is of this machine.
    Prefer the environment variable. It is not sent, but calls are not encrypted."""

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
        """The secret; empty without one."""
        return b"" if self.key is None else self.key.get_secret_value().encode()

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The address of rank 0. Raises ValueError without one."""
        if self.address is None:
            raise ValueError("hosts.address is required with hosts.size: host and port of rank 0")
        return split_address(self.address)

    def check_joinable(self) -> None:
        """Raise ValueError if several hosts cannot join: no address, or one that others reach without a key."""
        if self.size == 1:
            return
        host, _ = self.host_and_port
        if not self.key_bytes and not _is_loopback(host):
            raise ValueError(
                f"hosts.key is required: others can reach hosts.address {self.address}. Make one with\n"
                "    openssl rand -hex 32\n"
                "and give it to every host in the environment variable SKYRL_TX_HOSTS__KEY"
            )

    @property
    def coordinator(self) -> str:
        """The address of rank 0 that the backend itself may use: the next port."""
        host, port = self.host_and_port
        return join_address(host, port + 1)


class HostsSettings(HostsFlags):
    """The settings of a group of hosts, complete."""

    silence_s: float = Field(default=600.0, gt=0)
    """Restart all hosts when one is this much slower than the others in one call, its start excluded.
    The server sets it to --step-timeout-s: a single host that takes longer is restarted as well."""


_Hosts = TypeVar("_Hosts", bound=HostsFlags)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[IPv6 address]:port`. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"{address!r} is not host:port, with a port from 1 to 65534")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def from_leader_worker_set(given: _Hosts, environment: Mapping[str, str]) -> _Hosts:
    """Return the settings with size, rank and address from the variables of a Kubernetes LeaderWorkerSet.

    Raises ValueError if a variable is missing or no number.
    """
    missing = [name for name in (LWS_SIZE, LWS_RANK, LWS_ADDRESS) if not environment.get(name)]
    if missing:
        raise ValueError(f"launcher lws: the environment lacks {', '.join(missing)}, which a LeaderWorkerSet sets")
    size, rank = environment[LWS_SIZE], environment[LWS_RANK]
    if not (size.isdecimal() and rank.isdecimal()):
        raise ValueError(f"launcher lws: {LWS_SIZE}={size!r} and {LWS_RANK}={rank!r} must be numbers")
    port = DEFAULT_PORT if given.address is None else split_address(given.address)[1]
    address = join_address(environment[LWS_ADDRESS], port)
    return type(given).model_validate({**given.model_dump(), "size": int(size), "rank": int(rank), "address": address})
