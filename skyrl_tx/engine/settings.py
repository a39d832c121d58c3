"""Settings of the engine process."""

from pydantic import Field

from skyrl_tx.process.setup import CommonSettings


class EngineFlags(CommonSettings):
    """Settings of the engine that an operator can set.

    The command line adds the settings of other components.
    """

    engines: int = Field(default=1, ge=1, le=64)
    """Number of engines that share the database, which must be PostgreSQL.
    `serve` starts this number of engines and divides the devices among them. For `engine`, any number above 1 lets it
    share the database with other engines."""
    share_prefix_cache: bool = False
    """Let all owners use each other's cached prompts. Faster, but owners can find out each other's prompts."""
    step_timeout_s: float = Field(default=600.0, ge=0)
    """Restart the engine when one backend call takes longer than this, not counting compilation; 0: never."""
    compile_timeout_s: float = Field(default=3600.0, ge=0)
    """Restart the engine when the start of the backend, or the compilation in one call, takes longer; 0: never."""
    session_retention_s: float = Field(default=7 * 86_400.0, gt=0)
    """How long the models of a silent or finished session are kept."""
    trash_retention_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long deleted and expired checkpoints, and the last snapshots of ended runs, stay in the trash."""
    keep_last: int = Field(default=0, ge=0)
    """Number of checkpoints to train on, and of checkpoints to sample from, that each run keeps; 0: all.
    Each save moves the older ones to the trash, except published ones and those with a TTL."""
    keep_samples: int = Field(default=32, ge=0)
    """Number of sample requests per step of a model whose prompts and completions the owner can read later; 0: none."""
    metrics_owners: bool = False
    """Count tokens by owner in `/metrics`: the first 50 owners since the engine started, then `other`."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port where `skyrl-tx engine` serves its metrics, without authentication; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address of `--metrics-port`; 0.0.0.0 means all addresses of the machine or the container."""

    @property
    def base_models(self) -> list[str]:
        """The names of the base model that clients may use, starting with the public name."""
        return list(dict.fromkeys(name for name in (self.served_model_name, self.base_model) if name))


class EngineSettings(EngineFlags):
    """All settings of the engine, including constants that only tests change.

    For example, a test of expiry sets `run_retention_s` to 1 instead of waiting for a month.
    """

    gap_timeout_s: float = Field(default=10.0, ge=0)
    """How long a training request waits while an earlier sequence number is missing.
    A client sends requests at the same time, and they arrive within a second unless one of them is sent again."""
    snapshot_interval_s: float = Field(default=60.0, ge=0)
    """Seconds between two snapshots of a model in training. After a crash, about a minute of work is repeated."""
    snapshot_interval_requests: int = Field(default=100, ge=1)
    """Number of training requests after which a snapshot is taken earlier, to limit the replay after a crash."""
    snapshot_max_share: float = Field(default=0.02, gt=0, le=1)
    """Maximum share of the time for the snapshots that `snapshot_interval_requests` causes.
    They may slow down training by 2 %."""
    max_backlog_bytes: int = Field(default=2**31, ge=1)
    """Memory for waiting requests. If it is full, the bodies of training passes are read when their turn is near.
    It holds eight of the largest passes, while the device works on one."""
    max_queued_sample_bytes: int = Field(default=2**30, ge=1)
    """Memory for queued samples, about 4 KiB and 4 bytes per prompt token each. If full, clients get 429 and retry.
    An owner with less than an equal share is still admitted; all owners together use at most twice this memory.
    It holds about 100,000 prompts of 1,500 tokens."""
    max_attempts: int = Field(default=3, ge=1)
    """Number of engine crashes while a request runs alone after which the request fails. A kill is no crash.
    Crashes with another cause are unlikely to hit the same request three times in a row."""
    session_timeout_s: float = Field(default=1800.0, gt=0)
    """Heartbeat timeout: a silent client's models are evicted from the device until it returns.
    Half an hour covers a suspended laptop and a pause in a debugger."""
    run_retention_s: float = Field(default=30 * 86_400.0, gt=0)
    """How long an ended run without checkpoints, and a finished session without runs, stay listed.
    Each of them needs a few kilobytes."""
    sampler_retention_s: float = Field(default=86_400.0, gt=0)
    """How long an unused ephemeral sampler is kept, unless it is one of the newest four of its model.
    Training makes a sampler every few steps, and uses only the newest."""
    max_ephemeral_sampler_bytes: int = Field(default=32 * 2**30, ge=0)
    """Disk space for ephemeral samplers. The newest sampler of each model is always kept.
    It holds 32 adapters of 1 GiB."""
    min_free_disk_bytes: int = Field(default=2**30, ge=0)
    """Disk space that is reserved for the database. If less is free, saves fail and snapshots wait.
    Between two removals of old data, the database grows by less than this."""
    max_pending_sampler_writes: int = Field(default=8, ge=1)
    """Number of ephemeral samplers that may wait to be written. A model that adds more waits for its write.
    Each of them holds a copy of an adapter in memory."""
    result_retention_s: float = Field(default=600.0, ge=0)
    """How long a result is kept after its client has read it or its session has finished.
    A client that lost the response asks again within a minute."""
    request_retention_s: float = Field(default=3600.0, ge=0)
    """How long a request is kept after its result, to recognize retries. Later retries are rejected.
    A client that is restarted within an hour may still send its last requests again."""
    deletion_undo_s: float = Field(default=86_400.0, ge=0)
    """How long deleted checkpoints and runs can be restored with `undelete`. Their files are kept as long.
    People notice a mistake within a day. `delete --now` frees the disk at once."""
    max_trash_bytes: int = Field(default=32 * 2**30, ge=0)
    """Disk space for the trash, which also never exceeds the free space. The oldest files are removed first."""
    kept_sample_retention_s: float = Field(default=7 * 86_400.0, ge=0)
    """How long samples are kept for their owner to read, for example to look at a run in the console."""
    max_kept_sample_bytes: int = Field(default=64 * 2**20, ge=0)
    """Database space for the kept samples of one owner and model. The oldest samples are removed first.
    It holds some thousand samples of 2,000 tokens."""
    housekeeping_interval_s: float = Field(default=60.0, gt=0)
    """Seconds between two removals of expired and unreferenced data. A removal takes milliseconds."""
