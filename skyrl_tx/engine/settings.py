"""Settings of the engine process."""

from pydantic import Field

from skyrl_tx.process.setup import CommonSettings


class EngineFlags(CommonSettings):
    """Settings of the engine that an operator sets. The command line adds the settings of the other components."""

    engines: int = Field(default=1, ge=1, le=64)
    """Engines that share the database, which must be PostgreSQL.
    `serve` starts as many, each with a part of the devices. For `engine`, any number above 1 lets it join others."""
    share_prefix_cache: bool = False
    """Let all owners use each other's cached prompts. It is faster, and an owner can find out what others asked."""
    step_timeout_s: float = Field(default=600.0, ge=0)
    """Restart the engine when one call of the backend takes longer, compilation excluded; 0: never."""
    compile_timeout_s: float = Field(default=3600.0, ge=0)
    """Restart the engine when the backend's start, or compilation in one call, takes longer; 0: never."""
    session_retention_s: float = Field(default=7 * 86_400.0, gt=0)
    """How long the models of a silent or finished session are kept."""
    trash_retention_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long deleted and expired checkpoints, and the last snapshots of ended runs, stay in the trash."""
    keep_samples: int = Field(default=32, ge=0)
    """Sample requests of each step of a model whose prompts and completions are kept for their owner; 0: none."""
    metrics_owners: bool = False
    """Count tokens by owner in `/metrics`: the first 50 owners since the engine started, then `other`."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port at which an engine alone (`skyrl-tx engine`) serves its metrics, without a key; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address of `--metrics-port`; 0.0.0.0 is every address of the machine or the container."""

    @property
    def base_models(self) -> list[str]:
        """The names of the base model for clients, the public one first."""
        return list(dict.fromkeys(name for name in (self.served_model_name, self.base_model) if name))


class EngineSettings(EngineFlags):
    """Settings of the engine process: what an operator sets, and constants. Only tests use other values for constants.

    For example, a test of expiry sets `run_retention_s` to 1 and does not wait for a month.
    """

    gap_timeout_s: float = Field(default=10.0, ge=0)
    """How long a training request waits while an earlier sequence number is missing.
    A client sends its requests at the same time, and they arrive within a second unless one of them is sent again."""
    snapshot_interval_s: float = Field(default=60.0, ge=0)
    """Seconds between two snapshots of a model in training: a crash then repeats about a minute of work."""
    snapshot_interval_requests: int = Field(default=100, ge=1)
    """Take a snapshot also after this many training requests, to bound the replay after a crash."""
    snapshot_max_share: float = Field(default=0.02, gt=0, le=1)
    """Maximum share of the time for snapshots that `snapshot_interval_requests` causes.
    Training may be 2 % slower for them, and no more."""
    max_backlog_bytes: int = Field(default=2**31, ge=1)
    """Memory for waiting requests; bodies of further training passes are read when their turn is near.
    It holds eight of the largest passes, while the device works on one."""
    max_queued_sample_bytes: int = Field(default=2**30, ge=1)
    """Memory for queued samples, about 4 KiB and 4 bytes per prompt token each; above it clients get 429 and retry.
    An owner with less than an equal share is admitted above it; all owners together take at most twice as much.
    It holds about 100,000 prompts of 1,500 tokens."""
    max_attempts: int = Field(default=3, ge=1)
    """Crashes of the engine while it runs a request alone, after which the request fails; a kill is no crash.
    A crash with another cause hardly hits the same request three times in a row."""
    session_timeout_s: float = Field(default=1800.0, gt=0)
    """Heartbeat timeout: a silent client's models are evicted from the device until it returns.
    Half an hour covers a suspended laptop and a pause in a debugger."""
    run_retention_s: float = Field(default=30 * 86_400.0, gt=0)
    """How long an ended run without checkpoints, and a finished session without runs, stay listed.
    They are rows of a few kilobytes."""
    sampler_retention_s: float = Field(default=86_400.0, gt=0)
    """How long an unused ephemeral sampler is kept, unless it is among its model's newest four.
    Training makes one every few steps, and uses the newest only."""
    max_ephemeral_sampler_bytes: int = Field(default=32 * 2**30, ge=0)
    """Disk space for ephemeral samplers; each model's newest one is always kept.
    It holds 32 adapters of 1 GiB."""
    min_free_disk_bytes: int = Field(default=2**30, ge=0)
    """Disk space that weights never take, so that the database has room: below it saves fail and snapshots wait.
    Between two removals of old data, the database grows by less."""
    max_pending_sampler_writes: int = Field(default=8, ge=1)
    """Ephemeral samplers waiting to be written; models that exceed this block until a write completes.
    Each holds a copy of an adapter in memory."""
    result_retention_s: float = Field(default=600.0, ge=0)
    """How long a result is kept after its client read it or its session finished.
    A client that lost the response asks again within a minute."""
    request_retention_s: float = Field(default=3600.0, ge=0)
    """How long after its result a request is kept to recognise retries; later retries are refused.
    A client that is restarted within an hour may still send its last requests again."""
    deletion_undo_s: float = Field(default=86_400.0, ge=0)
    """How long deleted checkpoints and runs can be restored with `undelete`; their files stay as long.
    People notice a mistake within a day; `delete --now` frees the disk at once."""
    max_trash_bytes: int = Field(default=32 * 2**30, ge=0)
    """Disk space for the trash, which also never takes more than is free; above it the oldest are removed."""
    kept_sample_retention_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long samples are kept for their owner to read, which is while a run is looked at."""
    max_kept_sample_bytes: int = Field(default=64 * 2**20, ge=0)
    """Database space for the kept samples of one owner from one model; above it the oldest are removed.
    It holds some thousand samples of 2,000 tokens."""
    housekeeping_interval_s: float = Field(default=60.0, gt=0)
    """Seconds between two removals of expired and unreferenced data, which take milliseconds."""
