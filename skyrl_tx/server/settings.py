"""Settings of the API process."""

import ipaddress
import re
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, SerializeAsAny, field_validator

from skyrl_tx.contract.errors import UserError
from skyrl_tx.process.setup import CommonSettings

S = TypeVar("S", bound=BaseModel)
_HUB_NAME_SLASHES = 2
_VARIANT = re.compile(r":peft:\d+$")
"""The end of names such as Qwen/Qwen3.6-35B-A3B:peft:262144 in recipes of the cookbook: a context length in tokens.

This server has one context length for each model.
"""


class ApiFlags(CommonSettings):
    """Settings of the API that an operator sets. `skyrl_tx.launch.settings` adds those of the other parts."""

    host: str = "127.0.0.1"
    """Address to listen on; any but loopback requires API keys or --no-auth."""
    no_auth: bool = False
    """Disable authentication: every caller that can reach --host is an admin."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free port."""
    served_model_aliases: list[str] = Field(default=[])
    """Additional names of the model, separated by commas; runs are listed under the first name."""
    tokenizer_id: str | None = None
    """Hub id or directory from which clients load the tokenizer; default: base_model."""
    chat_template: Path | None = None
    """Jinja file with the chat template of the OpenAI and Anthropic endpoints; default: the model's own."""
    tool_parser: Literal["auto", "hermes", "llama3", "none"] = "auto"
    """Form in which the model writes tool calls; 'auto': by the chat template."""
    max_request_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Largest pass or sample in bytes, before and after decompression; a quarter of it in JSON. Other bodies: 1 MiB."""
    redirect_downloads: bool = False
    """Let clients download external weights from the object store of --artifacts, which they must reach."""
    public_url: str | None = None
    """Base URL of this server in download URLs; default: the address of the request."""
    no_console: bool = False
    """Serve no console: the web pages about runs, samples, checkpoints, sessions, keys and the server."""
    no_custom_losses: bool = False
    """Evaluate no losses that clients upload; the SDK then evaluates them in the client."""
    ssl_certfile: Path | None = None
    """File with the TLS certificate and its chain (PEM); the server then speaks HTTPS only."""
    ssl_keyfile: Path | None = None
    """File with the private key of --ssl-certfile (PEM, not encrypted); default: the key is in that file."""
    allowed_hosts: list[str] = Field(default=[])
    """Names by which clients address this server, separated by commas; other names are then refused.
    Default: without API keys only localhost, IP addresses and the name of this machine are accepted."""
    trusted_proxies: list[str] = Field(default=[])
    """Addresses and networks of reverse proxies, separated by commas, whose X-Forwarded-For and -Proto are believed."""

    metrics_open: bool = False
    """Let everyone who can reach the server read `/metrics`.
    Default: programs on this machine, and keys of scope metrics or admin."""

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, values: list[str]) -> list[str]:
        for value in values:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError as error:
                raise ValueError(f"{value!r} is not an IP address or network") from error
        return values

    @property
    def is_loopback(self) -> bool:
        """Whether the server listens on loopback only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        """The scheme of this server's URLs."""
        return "https" if self.ssl_certfile else "http"

    @property
    def public_model_name(self) -> str:
        """The model name in responses."""
        return self.served_model_name or self.base_model

    @property
    def model_names(self) -> list[str]:
        """The model names that clients may use, the public one first."""
        return list(dict.fromkeys([self.public_model_name, *self.served_model_aliases]))

    def resolve_model_name(self, name: str) -> str:
        """Return the public name of a requested base model, with or without a variant. Raises UserError for another."""
        if _VARIANT.sub("", name) not in (self.served_model_name, self.base_model, *self.served_model_aliases):
            raise UserError(f"base_model {name[:200]!r}: this server serves {', '.join(map(repr, self.model_names))}")
        return self.public_model_name

    @property
    def client_tokenizer_id(self) -> str:
        """The name that `AutoTokenizer` resolves on the client.

        The SDK reads a name with exactly two slashes as `organisation/model/variant` and cuts it, so a short local path
        is written in a longer, equivalent form.
        """
        name = self.tokenizer_id or self.base_model
        if not Path(name).is_dir():
            return name
        path = str(Path(name).absolute())
        missing = _HUB_NAME_SLASHES + 1 - path.count("/")
        return "/" + "./" * max(missing, 0) + path.removeprefix("/")


class ApiSettings(ApiFlags):
    """Settings of the API process: what an operator sets, and constants. Only tests use other values for constants."""

    apps: tuple[SerializeAsAny[BaseModel], ...] = ()
    """The settings of apps."""
    max_streams: int = Field(default=64, ge=0)
    """Streamed responses that get tokens while they are decoded; further ones get all of them at the end.
    Each stream reads new tokens from the database several times a second, so thousands would slow all requests."""
    max_inflight_bytes: int = Field(default_factory=lambda data: 4 * data["max_request_bytes"], ge=2**20)
    """Memory for bodies that are received and decoded at the same time: four of the largest.
    An owner gets half, other requests wait."""
    failed_key_limit: int = Field(default=20, ge=0)
    """Wrong API keys from one address after which further ones get 429, one less every 3 seconds; 0: no limit.
    A person mistypes a key a few times; a program that guesses needs millions of attempts."""
    retrieve_hold_s: float = Field(default=30.0, gt=0, le=40)
    """Hold time of a long poll in seconds; some polls end after 3/4 of it.
    nginx, for example, closes a silent connection after 60 seconds."""
    large_result_bytes: int = Field(default=2**20, ge=0)
    """Larger results are announced by their size first, then fetched, so that clients may limit what they hold."""
    engine_silence_s: float = Field(default=10.0, gt=0)
    """Seconds without a status of the engine, or in one activity, after which polls and health report that.
    The engine publishes its status every second, and a step usually takes a few seconds."""
    download_url_ttl_s: float = Field(default=3600.0, gt=0)
    """Lifetime of a signed download URL in seconds: long enough to begin the download of a large checkpoint."""
    request_threads: int = Field(default=100, ge=1)
    """Number of threads that handle requests; each may wait for a commit, which needs no CPU."""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Connections from one client address, or one IPv6 network of 64 bits; trusted proxies have no such limit.
    Unset: three quarters of all that the limit of open files allows, so that one address cannot lock others out."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which a client must send the head of a request, TLS handshake included: a few round trips."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest pause in a request body in seconds; a slow client must send 1 KiB/s on average.
    A client that sends nothing for so long has gone."""

    def get_app_settings(self, kind: type[S]) -> S:
        """Return the settings of an app, which are the defaults unless some are set."""
        return next((settings for settings in self.apps if isinstance(settings, kind)), kind())
