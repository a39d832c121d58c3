"""What the HTTP process is told."""

import ipaddress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from skyrl_tx.contract.errors import UserError

_HUB_NAME_SLASHES = 2


class ApiSettings(BaseModel):
    """Settings of the HTTP process; the command line composes them with the other components'."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        default="127.0.0.1", description="address to listen on; any but loopback asks for keys, or for --no-auth"
    )
    no_auth: bool = Field(default=False, description="ask nobody for a key: whoever can reach --host may do everything")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(description="directory of the database and all weights")
    database_url: SecretStr | None = Field(
        default=None,
        description="database, if not a file in --data-dir: postgresql://user:password@host/name; a password is better "
        "given by the environment",
    )
    base_model: str = Field(description="hub id or local directory of the model that is served")
    served_model_name: str | None = Field(
        default=None, description="name that clients use; default: base_model as given"
    )
    served_model_aliases: list[str] = Field(
        default=[], description="more names of the model, separated by commas; runs are listed under the first name"
    )
    tokenizer_id: str | None = Field(
        default=None, description="what clients load the tokenizer from; default: base_model"
    )
    max_request_bytes: int = Field(
        default=256 * 2**20, ge=1024, description="longest body taken, and its length decompressed"
    )
    retrieve_hold_s: float = Field(
        default=30.0, gt=0, le=40, description="longest that a poll for a result is held open; some end after 3/4 of it"
    )
    large_result_bytes: int = Field(
        default=2**20, ge=0, description="results longer than this are announced by their size, then fetched"
    )
    engine_silence_s: float = Field(
        default=10.0, gt=0, description="clients are told to wait when the engine is silent so long"
    )
    download_url_ttl_s: float = Field(
        default=3600.0, gt=0, description="how long a URL to download weights from is valid"
    )
    public_url: str | None = Field(
        default=None, description="where clients reach this server, for URLs to download from; default: as they ask"
    )
    request_threads: int = Field(
        default=100, ge=1, description="requests worked on at once; each may wait for a commit"
    )

    @property
    def store_url(self) -> str | None:
        """The database's URL, with its secrets."""
        return None if self.database_url is None else self.database_url.get_secret_value()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine's own users can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def public_model_name(self) -> str:
        """The name that answers carry."""
        return self.served_model_name or self.base_model

    @property
    def offered_names(self) -> list[str]:
        """The names that clients are told of, the public one first."""
        return list(dict.fromkeys([self.public_model_name, *self.served_model_aliases]))

    def known_model_name(self, name: str) -> str:
        """Return the public name of the base model that a client asks for; raises UserError for another model."""
        if name not in (self.served_model_name, self.base_model, *self.served_model_aliases):
            raise UserError(f"base_model {name[:200]!r}: this server serves {', '.join(map(repr, self.offered_names))}")
        return self.public_model_name

    @property
    def client_tokenizer_id(self) -> str:
        """What `AutoTokenizer` resolves on the client.

        The SDK takes a name of exactly two slashes for `organisation/model/variant` and cuts it, so a short local
        path is written in a longer, equivalent form.
        """
        name = self.tokenizer_id or self.base_model
        if not Path(name).is_dir():
            return name
        path = str(Path(name).absolute())
        missing = _HUB_NAME_SLASHES + 1 - path.count("/")
        return "/" + "./" * max(missing, 0) + path.removeprefix("/")
