"""Settings of the API process."""

import ipaddress
import re
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, SerializeAsAny, field_validator

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import SampledLogprobs
from skyrl_tx.process.setup import CommonSettings

S = TypeVar("S", bound=BaseModel)
_HUB_NAME_SLASHES = 2
_VARIANT = re.compile(r":peft:\d+$")
"""Suffix of a model name that recipes of the cookbook use to choose a context length in tokens.

For example, `Qwen/Qwen3.6-35B-A3B:peft:262144`. This server has one context length per model and
ignores the suffix.
"""


class ApiFlags(CommonSettings):
    """Settings of the API that an operator can set.

    `skyrl_tx.launch.settings` combines them with the settings of the other parts.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Any address except loopback requires API keys or --no-auth."""
    no_auth: bool = False
    """Disable authentication: everyone who can reach --host is an admin."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 chooses a free port."""
    served_model_aliases: list[str] = Field(default=[])
    """Additional names of the model, separated by commas. Runs are listed under the first name."""
    tokenizer_id: str | None = None
    """Hub id or directory of the tokenizer that clients load; default: base_model."""
    chat_template: Path | None = None
    """Jinja file with the chat template of the OpenAI and Anthropic endpoints.

    Default: the model's own template.
    """
    tool_parser: Literal[
        "auto",
        "deepseek",
        "deepseek_v32",
        "glm",
        "harmony",
        "hermes",
        "kimi",
        "llama3",
        "llama4",
        "mistral",
        "qwen3_coder",
        "none",
    ] = "auto"
    """Form in which the model writes reasoning and tool calls; 'auto': by the chat template."""
    sampled_logprobs: SampledLogprobs = "tempered"
    """Log-probabilities of sampled tokens: after the temperature and penalties, or the model's own, before both.

    A session can set `skyrl_tx.sampled_logprobs` in its metadata.
    """
    max_request_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Maximum size in bytes of a training pass or sample request, before and after decompression.

    JSON may have a quarter of it. The limit for other requests is 1 MiB.
    """
    redirect_downloads: bool = False
    """Let clients download external weights directly from the object store of --artifacts.

    Clients must be able to reach it.
    """
    public_url: str | None = None
    """Base URL of this server in download URLs; default: the address that the client used."""
    no_console: bool = False
    """Disable the console, the web pages for runs, samples, checkpoints, keys and the server."""
    no_custom_losses: bool = False
    """Do not evaluate losses that clients upload. The SDK then evaluates them in the client."""
    no_shared_prefixes: bool = False
    """In new runs, compute each training example whole, even if another one of the request has the same prompt.

    The metadata of a session or a run can choose this too. Runs that exist do not change.
    """
    ssl_certfile: Path | None = None
    """File with the TLS certificate and its chain (PEM). The server then only accepts HTTPS."""
    ssl_keyfile: Path | None = None
    """File with the unencrypted private key (PEM); default: the key is in --ssl-certfile."""
    allowed_hosts: list[str] = Field(default=[])
    """Host names of this server, separated by commas. Requests with another Host are refused.

    Default: without API keys, only localhost, IP addresses and the name of this machine are
    allowed.
    """
    trusted_proxies: list[str] = Field(default=[])
    """Addresses and networks of reverse proxies, separated by commas.

    The server trusts their X-Forwarded-For and X-Forwarded-Proto headers.
    """

    metrics_open: bool = False
    """Let everyone who can reach the server read `/metrics`.

    Default: programs on this machine, and keys with scope metrics or admin.
    """

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
        """The scheme of this server's URLs, http or https."""
        return "https" if self.ssl_certfile else "http"

    @property
    def public_model_name(self) -> str:
        """The model name in responses."""
        return self.served_model_name or self.base_model

    @property
    def model_names(self) -> list[str]:
        """The model names that clients may use. The public name comes first."""
        return list(dict.fromkeys([self.public_model_name, *self.served_model_aliases]))

    def resolve_model_name(self, name: str) -> str:
        """Return the public name of the base model that a client requested.

        Accepts the served name, the name of the base model and the aliases, each with or without a
        variant such as `:peft:262144`. Raises UserError for other names.
        """
        if _VARIANT.sub("", name).rstrip("/") not in (
            self.served_model_name,
            self.base_model,
            *self.served_model_aliases,
        ):
            raise UserError(f"base_model {name[:200]!r}: this server serves {', '.join(map(repr, self.model_names))}")
        return self.public_model_name

    @property
    def client_tokenizer_id(self) -> str:
        """The tokenizer name for `AutoTokenizer` on the client.

        The SDK reads a name with exactly two slashes as `organisation/model/variant` and removes
        the variant. So a short local path, such as `/models/qwen`, is written as `/./models/qwen`.
        """
        name = self.tokenizer_id or self.base_model
        if not Path(name).is_dir():
            return name
        path = str(Path(name).absolute())
        missing = _HUB_NAME_SLASHES + 1 - path.count("/")
        return "/" + "./" * max(missing, 0) + path.removeprefix("/")


class ApiSettings(ApiFlags):
    """All settings of the API process: flags of operators, and constants that only tests change."""

    apps: tuple[SerializeAsAny[BaseModel], ...] = ()
    """The settings of the apps."""
    max_streams: int = Field(default=64, ge=0)
    """Maximum number of streamed responses that receive tokens while they are sampled.

    An owner may have a quarter of them. Further streams get all tokens at the end. Each stream
    reads new tokens from the database several times a second, so thousands of streams would slow
    down all requests.
    """
    max_inflight_bytes: int = Field(default_factory=lambda data: 4 * data["max_request_bytes"], ge=2**20)
    """Memory for bodies that are being received and decoded.

    The default fits four of the largest. An owner may use half of it. Requests beyond that wait.
    """
    failed_key_limit: int = Field(default=20, ge=0)
    """Number of wrong API keys from one address before further wrong keys get 429. 0: no limit.

    One failure is forgiven every 3 seconds. A person mistypes a key a few times, whereas guessing a
    key takes millions of attempts.
    """
    retrieve_hold_s: float = Field(default=30.0, gt=0, le=40)
    """Hold time of a long poll in seconds. A poll ends after 75 to 100 % of it.

    Reverse proxies close a connection that is silent for too long: nginx, for example, after 60
    seconds.
    """
    large_result_bytes: int = Field(default=2**20, ge=0)
    """Results larger than this are announced by their size before they are sent.

    So a client can limit the memory for results that it receives.
    """
    engine_silence_s: float = Field(default=10.0, gt=0)
    """Seconds without an engine status, or in one activity, before polls and health report it.

    The engine publishes its status every second. A training batch usually takes a few seconds.
    """
    download_url_ttl_s: float = Field(default=3600.0, gt=0)
    """Lifetime of a signed download URL in seconds. The download must begin within this time."""
    request_threads: int = Field(default=100, ge=1)
    """Number of threads that handle requests.

    A thread may be waiting for a commit, which needs no CPU.
    """
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Maximum number of connections per client address, or per IPv6 /64 network.

    Trusted proxies have no such limit. By default, this is three quarters of all connections that
    the limit on open files allows, so that one address cannot lock out other clients.
    """
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds for a client to send the head of a request, including the TLS handshake."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Maximum pause within a request body in seconds.

    A client must also send 1 KiB/s on average. A client that sends nothing for this long has
    probably disconnected.
    """

    def get_app_settings(self, kind: type[S]) -> S:
        """Return the settings of an app. Returns the defaults if none are configured."""
        return next((settings for settings in self.apps if isinstance(settings, kind)), kind())
