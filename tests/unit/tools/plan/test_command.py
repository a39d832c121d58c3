"""`skyrl-tx plan`, run like a user would."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.tools.cli import main
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.model_configs import QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B

CONFIGS = Path(__file__).parents[2] / "models" / "hub_configs"
GIB = 2**30


@pytest.fixture(autouse=True)
def _default_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)


@pytest.fixture
def dense(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def as_json(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    status = main(["plan", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_the_plan_as_text(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--base-model", dense, "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert "8,190,735,360 parameters, 7,568,097,280 active) fits on h200:1 with mesh fsdp=1,tp=1,ep=1" in out
    for text in (
        "base weights",
        "15.3 GiB",
        "optimizer",
        "temporary",
        "Upper bound",
        "limited by arithmetic",
        "40960 tokens",
        "attention of 36 layers in training: triton",
    ):
        assert text in out, text
    assert out.endswith(f"skyrl-tx serve --base-model {dense}\n")


def test_samples_of_the_longest_length_are_printed_if_they_are_fewer(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--base-model", dense, "--device", "h200"]) == 0
    assert re.search(r"^  samples +\d+ at \d+ tokens each, or \d+ at 40960 tokens each$", capsys.readouterr().out, re.M)

    # A tiny model has memory for all samples at any length.
    write_tiny_model(tmp_path / "tiny")
    assert main(["plan", "--base-model", str(tmp_path / "tiny"), "--device", "h200"]) == 0
    assert re.search(r"^  samples +\d+ at \d+ tokens each$", capsys.readouterr().out, re.M)


def test_the_plan_as_json(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--device", "v5e:2x4", "--rank", "8", "--adapters", "2", "--context", "8192")
    status, found = as_json(capsys, "--base-model", dense, *flags)
    assert status == 0 and found["fits"]
    assert {name: type(value).__name__ for name, value in found.items()} == {
        **dict.fromkeys(("base_model", "architecture", "dtype"), "str"),
        **dict.fromkeys(("num_parameters", "num_active_parameters", "free_bytes"), "int"),
        **dict.fromkeys(("device", "mesh", "limits"), "dict"),
        **dict.fromkeys(("kernels", "meshes", "memory", "rates", "warnings"), "list"),
        "long_rows": "NoneType",
        "fits": "bool",
    }
    assert found["num_parameters"] == 8_190_735_360 and found["mesh"] == {"dp": 1, "fsdp": 1, "tp": 8, "ep": 1, "cp": 1}
    assert [item["item"] for item in found["memory"]] == [
        *("base weights", "sampler adapters", "KV cache"),
        *("adapters in training", "optimizer", "temporary"),
    ]

    used = sum(item["bytes"] for item in found["memory"])
    assert used + found["free_bytes"] == found["device"]["usable_bytes"] == 15.75 * GIB

    of_rank_1 = 36 * (2 * (4096 + 4096 // 8) + 2 * (4096 + 1024 // 8) + 3 * (4096 + 12288 // 8)) + 4096 + 151936 // 8
    assert found["memory"][4]["bytes"] == 2 * 2 * 4 * 8 * of_rank_1, "two moments of two models in float32"
    assert found["limits"]["context_tokens"] == 8192 and found["limits"]["models"] == 2
    assert found["limits"].keys() == {
        *("context_tokens", "kv_tokens", "sample_slots", "samples_of_longest_context", "models"),
        *("micro_batch_tokens", "is_rematerialized", "row_tokens", "row_host_bytes"),
    }
    assert [(rate["work"], rate["expected_tokens_per_s"]) for rate in found["rates"]] == [
        ("training", None),
        ("sampling", None),
    ]
    assert found["meshes"][0].keys() == {
        *("mesh", "weight_bytes", "has_room", "training_tokens_per_s", "sampling_tokens_per_s")
    }


QWEN3_32B = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}


@pytest.mark.parametrize(
    ("config", "device", "micro_batch_tokens", "kv_tokens", "is_rematerialized"),
    [
        pytest.param(QWEN3_4B, "h200", 16384, 131_072, False, marks=pytest.mark.slow),
        (QWEN3_8B, "h200", 8192, 262_144, False),
        pytest.param(QWEN3_32B, "v5e:2x4", 256, 65_536, True, marks=pytest.mark.slow),
    ],
    ids=["4B", "8B", "32B"],
)
def test_micro_batches_and_cache_share_the_memory(
    tmp_path: Path, capsys, config, device, micro_batch_tokens, kv_tokens, is_rematerialized
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, found = as_json(capsys, "--base-model", str(tmp_path), "--device", device)
    limits = found["limits"]
    assert status == 0 and limits["micro_batch_tokens"] == micro_batch_tokens
    assert limits["kv_tokens"] >= kv_tokens and limits["is_rematerialized"] is is_rematerialized


@pytest.mark.parametrize(
    ("device", "shares"), [("h200", (0.50, 0.54)), ("l4", None), pytest.param("h200:2", None, marks=pytest.mark.slow)]
)
def test_what_one_device_reaches_of_the_bound_is_expected_where_it_was_measured(
    capsys: pytest.CaptureFixture[str], device: str, shares: tuple[float, float] | None
) -> None:
    command = ["plan", "--base-model", "tiny", "--device", device]
    assert main([*command, "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["rates"]
    for place, rate in enumerate(rates):
        wanted = None if shares is None else pytest.approx(shares[place] * rate["tokens_per_s"], abs=1)
        assert rate["expected_tokens_per_s"] == wanted
    assert main(command) == 0
    assert capsys.readouterr().out.count("; expect about") == (0 if shares is None else 2)


def test_a_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--base-model", "tiny", "--device", "l4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny (Qwen3ForCausalLM") and out.endswith("skyrl-tx serve --base-model tiny\n")


def test_a_model_that_does_not_fit(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = as_json(capsys, "--base-model", dense, "--device", "v5e:1x1")
    assert status == 1 and not found["fits"] and found["free_bytes"] < 0
    assert "the weights need at least 2" in found["warnings"][0]


SMALL = {**QWEN3_8B, "num_hidden_layers": 4, "vocab_size": 32_000}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--adapters", "64", "--rank", "256"), r"it fits with --adapters \d+ instead of 64\. Or use more devices$"),
        (("--backend-config.micro-batch-tokens", "65536"), r"micro-batch-tokens \d+ instead of 65536\. Or use"),
        (
            ("--backend-config.max-sample-tokens", "900000", "--adapters", "99"),
            r"max-sample-tokens \d+ instead of 900000 and --adapters \d+ instead of 99\. Or use",
        ),
        (("--rank", "4096"), r"it fits with --rank 64 instead of 4096\. Or use"),
        (("--adapters", "1"), ""),
    ],
)
def test_a_model_that_fits_with_smaller_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    status, found = as_json(capsys, "--base-model", str(tmp_path), "--device", "v5e:1x1", *flags)
    assert status == (1 if said else 0)
    assert not said or re.search(said, found["warnings"][0])


def test_warnings(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--device", "v5e:4x4", "--mesh", "fsdp=2,tp=8", "--backend-config.dtype", "float32")
    _, found = as_json(capsys, "--base-model", dense, *flags)
    text = "\n".join(found["warnings"])
    assert "more than one host" in text and "in float32 they are lower" in text
    assert found["mesh"] == {"dp": 1, "fsdp": 2, "tp": 8, "ep": 1, "cp": 1} and len(found["meshes"]) == 1


def test_a_mesh_that_shards_rows(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--base-model", dense, "--device", "v5e:2x4", "--no-backend-config.offload")
    _, whole = as_json(capsys, *flags, "--mesh", "tp=8")
    status, found = as_json(capsys, *flags, "--mesh", "tp=2,cp=4")
    assert found["limits"]["row_host_bytes"] == 0
    assert status == 0 and found["mesh"] == {"dp": 1, "fsdp": 1, "tp": 2, "ep": 1, "cp": 4}
    assert found["memory"][0]["bytes"] < 1.1 * whole["memory"][0]["bytes"], "cp shards weights like fsdp"
    assert found["limits"]["row_tokens"] > 1.5 * whole["limits"]["row_tokens"]
    assert found["limits"]["micro_batch_tokens"] >= 2 * whole["limits"]["micro_batch_tokens"]


LONG = {**QWEN3_8B, "max_position_embeddings": 131072, "num_hidden_layers": 8}
LONG_FLAGS = ("--rank", "8", "--backend-config.sample-slots", "32")


@pytest.mark.parametrize(
    ("flags", "chosen", "longest", "said"),
    [
        (("--context", "42000"), {"cp": 2}, {"tp": 2}, "so mesh fsdp=1,tp=1,ep=1,cp=2 was chosen, which fits it"),
        pytest.param(
            ("--context", "42000", "--mesh", "tp=2"),
            {"tp": 2},
            {"tp": 2},
            "It fits with --mesh fsdp=1,tp=1,ep=1,cp=2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--context", "65536"), {"tp": 2}, {"tp": 2}, "no mesh of v5e:1x2 fits it", marks=pytest.mark.slow
        ),
        pytest.param(("--context", "42000", "--mesh", "cp=2"), {"cp": 2}, None, "", marks=pytest.mark.slow),
    ],
)
def test_cp_is_recommended_for_rows_that_fit_in_no_other_way(
    tmp_path: Path,
    flags: tuple[str, ...],
    chosen: dict[str, int],
    longest: dict[str, int] | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    ones = {"dp": 1, "fsdp": 1, "tp": 1, "ep": 1, "cp": 1}
    _, found = as_json(capsys, "--base-model", str(tmp_path), "--device", "v5e:1x2", *LONG_FLAGS, *flags)
    assert found["mesh"] == ones | chosen
    text, rows = "\n".join(found["warnings"]), found["long_rows"]
    if longest is None:
        assert rows is None and "training row" not in text and found["limits"]["row_tokens"] >= 42000
    else:
        assert rows["mesh"] == ones | longest and rows["longest"] < rows["tokens"] == int(flags[1])
        assert said in text


def test_a_context_above_the_models_is_a_warning(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = as_json(capsys, "--base-model", dense, "--device", "h200", "--context", "50000")
    assert "--context 50000 is more than the model's limit of 40960 tokens" in found["warnings"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--device", "h300"), "argument --device: unknown device 'h300'"),
        (("--device", "v5e:8"), "argument --device: '8' must be a topology"),
        (("--device", "h200", "--mesh", "pp=2"), "argument --mesh: 'pp=2' must be one of dp, fsdp, tp, ep"),
        (("--device", "h200", "--mesh", "tp=0"), "argument --mesh: 'tp=0'"),
        (("--device", "h200", "--context", "0"), "argument --context: '0' must be a whole number from 1"),
        (("--device", "h200", "--adapters", "many"), "argument --adapters: 'many'"),
        (("--device", "cpu"), "for this machine, for example a laptop without an accelerator, use `skyrl-tx doctor"),
    ],
)
def test_wrong_flags_are_named(
    dense: str, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--base-model", dense, *flags])
    assert ended.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--device", "h200:8", "--mesh", "tp=4"), "--mesh fsdp=1,tp=4,ep=1 has 4 devices, but --device h200:8 has 8"),
        (("--device", "h200:3", "--mesh", "tp=3"), "--mesh: tp=3 does not divide vocab_size = 151936"),
        (("--device", "h200:2", "--mesh", "ep=2"), "--mesh: ep=2: the model has no experts"),
        (("--device", "h200", "--backend", "fake"), "--backend fake"),
        ((), "--device is required, for example --device h200:8; for this machine, for example a laptop without"),
    ],
)
def test_what_does_not_go_together_is_named(
    dense: str, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--base-model", dense, *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_model_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--base-model", str(tmp_path / "none"), "--device", "h200"]) == 2
    assert "--base-model: " in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert main(["plan", "--base-model", str(tmp_path), "--device", "h200"]) == 2
    assert "GPT2LMHeadModel" in capsys.readouterr().err


TOO_LARGE = {"DeepSeek-V3.1", "GLM-4.5", "Kimi-K2-Thinking", "Kimi-K2.5", "Qwen3.5-397B-A17B"}


def make_exhaustive(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", *(make_exhaustive(path.stem) for path in sorted(CONFIGS.glob("*.json")))]
)
def test_published_models_are_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.dumps(QWEN3_30B_A3B) if name == "Qwen3-30B-A3B" else (CONFIGS / f"{name}.json").read_text()
    (tmp_path / "config.json").write_text(content)
    status, found = as_json(capsys, "--base-model", str(tmp_path), "--device", "b200:8", "--rank", "8")
    assert status == (0 if found["fits"] else 1)
    assert found["fits"] or name in TOO_LARGE, found["memory"]
    assert all(rate["tokens_per_s"] > 100 for rate in found["rates"])
