"""Stored bytes of every kind of record are pinned: databases hold them, so later releases must read them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.arrays import Cells
from skyrl_tx.contract.custom_loss import CustomLoss, CustomLossInput, Operation
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SamplingSessionId

PINNED: Mapping[str, Mapping[str, str]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "codec.json").read_text(encoding="utf-8")
)
"""Hex bytes of each record, by the release that first wrote them.

Add a release when a record gets a field, and never change existing bytes.
"""

Record = requests.Request | results.Result | requests.ModelSpec
SPEC = requests.ModelSpec(lora=requests.LoraSpec(rank=8, seed=2**63, train_mlp=False))
CELLS = Cells(crow=np.array([0, 1, 3]), columns=np.array([4, 2, 0]))
FLOATS = np.array([-0.5, np.nan, np.inf], np.float32)
INTS = np.arange(3, dtype=np.int32)
TOPK = results.TopK(token_ids=INTS.reshape(1, 3), logprobs=FLOATS.reshape(1, 3))
LOSS = CustomLoss(
    name="scaled",
    inputs=(CustomLossInput(name="logprobs", rank=2), CustomLossInput(name="scale", rank=0)),
    constants=(0.5, np.inf),
    operations=(Operation(name="mul", values=(0, 1)), Operation(name="sum", values=(4,), options=(0, 0, 1))),
    loss=5,
    metrics={"custom/loss:sum": 5},
)

RECORDS: Mapping[str, Record] = {
    "create_model": requests.CreateModel(base_model="tiny", spec=SPEC),
    "model_spec": SPEC,
    "model_pass": requests.ModelPass(
        data=(
            requests.Datum(
                tokens=INTS,
                loss_inputs={"target_tokens": np.arange(6, dtype=np.int64).reshape(3, 2), "logprobs": FLOATS},
            ),
        ),
        loss="ppo",
        loss_config={"clip_low_threshold": 0.8, "mode": "x"},
        backward=True,
    ),
    "pass_of_samples": requests.ModelPass(
        data=(requests.Datum(tokens=INTS, loss_inputs={"target_tokens": np.arange(3, dtype=np.int64)}),),
        loss="importance_sampling",
        loss_config={},
        backward=True,
        sampled=(requests.SampledSpan(datum=0, first=1, length=2, sequence_id="seq-a-0"),),
    ),
    "pass_of_custom_loss": requests.ModelPass(
        data=(requests.Datum(tokens=INTS, loss_inputs={"target_tokens": np.arange(3, dtype=np.int64)}),),
        loss="custom",
        loss_config={"loss_id": "s:loss:0"},
        backward=True,
        custom=LOSS,
    ),
    "create_custom_loss": requests.CreateCustomLoss(loss=LOSS),
    "create_custom_loss_output": results.CreateCustomLossOutput(loss_id="s:loss:0"),
    "forward": requests.ModelPass(data=(), loss="cross_entropy", loss_config={}, backward=False),
    "optim_step": requests.OptimStep(
        params=requests.OptimizerParams(
            learning_rate=3e-4, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0
        )
    ),
    "save_weights": requests.SaveWeights(
        kind="external_weights",
        name="a",
        ttl_s=3600,
        overwrite=True,
        user_metadata={"k": "v"},
        age_recipients=("age1x",),
    ),
    "ephemeral_save": requests.SaveWeights(
        kind="sampler_weights", name=None, sampling_session_id=SamplingSessionId("s:sample:1"), is_inflight=True
    ),
    "load_weights": requests.LoadWeights(
        path="tinker://m/weights/a",
        artifact_id=ArtifactId("art-1"),
        spec=SPEC,
        optimizer=True,
        create=True,
        base_model="tiny",
    ),
    "unload_model": requests.UnloadModel(),
    "sample": requests.Sample(
        prompt=INTS,
        num_samples=2,
        sampler=SamplerId("art-2"),
        params=requests.SamplingParams(
            seed=2**64 - 1,
            max_tokens=9,
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            stop_token_ids=(1, 2),
            stop_strings=("\n",),
            eos_stops=False,
        ),
        options=requests.PromptOptions(
            logprobs=True,
            last_n=2,
            topk=3,
            sample_topk=4,
            target_tokens=np.full((2, 5), -1),
            target_cells=CELLS,
            alt_tokens_k=1,
        ),
        sequence_ids=("q-0", "q-1"),
        is_recorded=True,
    ),
    "plain_sample": requests.Sample(
        prompt=INTS, num_samples=1, sampler=None, params=requests.SamplingParams(seed=0), sequence_ids=("q-0",)
    ),
    "rejected": requests.Rejected(kind="model_pass", message="data is empty", backward=True),
    "create_model_output": results.CreateModelOutput(model_id=ModelId("s:train:0")),
    "forward_backward_output": results.ForwardBackwardOutput(logprobs=(FLOATS,), metrics={"loss:sum": 1.5}),
    "optim_step_output": results.OptimStepOutput(metrics={"step:max": 1.0}),
    "save_weights_output": results.SaveWeightsOutput(
        kind="weights", path="tinker://m/weights/a", sampling_session_id=SamplingSessionId("s:sample:1"), size_bytes=9
    ),
    "load_weights_output": results.LoadWeightsOutput(path="tinker://m/weights/a", model_id=ModelId("s:train:1")),
    "unload_model_output": results.UnloadModelOutput(model_id=ModelId("s:train:0")),
    "sample_output": results.SampleOutput(
        sequences=(results.SampledSequence(tokens=INTS, logprobs=FLOATS, stop_reason="stop", topk=TOPK),),
        prompt=results.PromptResult(
            logprobs=FLOATS, topk=TOPK, targets=FLOATS.reshape(3, 1), alt_tokens=TOPK, cache_hit_tokens=2
        ),
        target_cells=CELLS,
    ),
    "failure": results.Failure(message="no", category=ErrorCategory.USER),
}
"""At least one record of each kind, with a value in each field."""


def assert_equal(found: object, wanted: object) -> None:
    """Compare records that contain arrays, bit by bit."""
    assert type(found) is type(wanted)

    if isinstance(wanted, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_equal(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, Mapping):
        assert isinstance(found, Mapping) and found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, tuple):
        assert isinstance(found, tuple) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


def test_every_kind_of_record_is_pinned() -> None:
    kinds = {*get_args(requests.Request), *get_args(results.Result), requests.ModelSpec}
    assert {type(record) for record in RECORDS.values()} == kinds
    newest = PINNED[max(PINNED)]
    assert newest.keys() == RECORDS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_bytes_of_the_newest_pinned_release(name: str) -> None:
    assert codec.encode(RECORDS[name]).hex() == PINNED[max(PINNED)][name]


@pytest.mark.parametrize(
    ("release", "name"), [(release, name) for release, pinned in PINNED.items() for name in pinned]
)
def test_stored_bytes_of_each_release_are_read_as_the_same_record(release: str, name: str) -> None:
    assert_equal(codec.decode(bytes.fromhex(PINNED[release][name])), RECORDS[name])
