"""Invalid requests are rejected with a message that names the field, the value and the limit."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.contract.requests import (
    CreateModel,
    LoadWeights,
    LoraSpec,
    ModelSpec,
    OptimizerParams,
    PromptOptions,
    SaveWeights,
)
from skyrl_tx.engine import request_checks
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import SPEC, datum, forward_backward, sample

CAPABILITIES = FakeBackend("tiny", FakeConfig(vocab_size=128, max_context_length=32, max_lora_rank=8)).start()


def raises(text):
    return pytest.raises(UserError, match=re.escape(text))


def floats(*values):
    return np.array(values, np.float32)


def test_an_example_in_training_may_have_a_limit_of_its_own():
    longer = replace(CAPABILITIES, max_training_length=33)
    request_checks.check_pass(forward_backward(data=(datum(0, 33),)), longer)
    with raises("data[0].model_input has 34 tokens; an example in training has at most 33"):
        request_checks.check_pass(forward_backward(data=(datum(0, 34),)), longer)


POLICY = {"logprobs": floats(*[-1.0] * 6), "advantages": floats(*[1.0] * 6)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": ()}, "data is empty"),
        ({"data": (datum(), datum(0, 0))}, "data[1].model_input has no tokens"),
        ({"data": (datum(0, 33),)}, "data[0].model_input has 33 tokens; the context is 32"),
        ({"loss": "hinge"}, "loss_fn 'hinge' is not one of cispo, cross_entropy, dro"),
        ({"loss_config": {"beta": 1.0}}, "loss_fn_config.beta: cross_entropy takes nothing"),
        ({"loss": "dro", "loss_config": {"beta": math.nan}}, "loss_fn_config.beta nan must be a finite number"),
        ({"loss": "dro", "loss_config": {"beta": "x"}}, "loss_fn_config.beta 'x' must be a finite number"),
        ({"loss": "dro", "loss_config": {"beta": -1e39}}, "loss_fn_config.beta -1e+39 must be a finite number"),
        ({"loss": "ppo", "loss_config": {"clip_low_threshold": -0.1}}, "loss_fn_config.clip_low_threshold -0.1 must"),
        ({"loss": "cispo", "loss_config": {"clip_high_threshold": -1.0}}, "loss_fn_config.clip_high_threshold -1.0"),
        (
            {"loss": "ppo", "loss_config": {"clip_low_threshold": 1.3}},
            "clip_low_threshold 1.3 must not be greater than clip_high_threshold 1.2",
        ),
        (
            {"loss": "cispo", "loss_config": {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}},
            "clip_low_threshold 2.0 must not be greater than clip_high_threshold 1.0",
        ),
        ({"data": (datum(mask=floats(*[1] * 6)),)}, "data[0].loss_fn_inputs['mask']: cross_entropy takes"),
        ({"loss": "ppo"}, "data[0].loss_fn_inputs['logprobs'] is missing: ppo needs it"),
        ({"data": (datum(weights=floats(1, 2)),)}, "data[0].loss_fn_inputs['weights'] has length 2, model_input has 6"),
        (
            {"data": (datum(weights=floats(1, 1, math.nan, 1, 1, 1)),)},
            "data[0].loss_fn_inputs['weights'] contains nan; numbers must be finite",
        ),
        (
            {"loss": "ppo", "data": (datum(**POLICY | {"advantages": floats(*[math.inf] * 6)}),)},
            "data[0].loss_fn_inputs['advantages'] contains inf",
        ),
        (
            {"loss": "ppo", "data": (datum(**POLICY | {"logprobs": floats(*[-math.inf] * 6)}),)},
            "data[0].loss_fn_inputs['logprobs'] contains -inf",
        ),
        (
            {"data": (datum(target_tokens=np.array([1, 2, 3, 4, 5, 128])),)},
            "data[0].loss_fn_inputs['target_tokens']: token 128 is outside the vocabulary of 128 tokens",
        ),
        ({"data": (datum(target_tokens=np.array([1, 2, 3, 4, 5, -1])),)}, "token -1 is outside the vocabulary"),
        ({"data": (datum(target_tokens=floats(*[1] * 6)),)}, "has dtype float32; expected integers"),
        ({"data": (datum(weights=np.ones((6, 2, 2), np.float32)),)}, "['weights'] has shape [6, 2, 2]"),
        (
            {"data": (datum(weights=np.ones((6, 2), np.float32)),)},
            "data[0].loss_fn_inputs disagree in shape: target_tokens [6], weights [6, 2]",
        ),
        ({"data": (datum(target_tokens=np.zeros((6, 0), np.int64)),)}, "['target_tokens'] has shape [6, 0]"),
        (
            {"data": (datum(target_tokens=np.broadcast_to(np.int64(0), (6, 2**19 + 1))),)},
            "['target_tokens'] has shape [6, 524289]: a position may have at most 524288 targets",
        ),
        (
            {"data": (datum(target_tokens=np.zeros((6, 129), np.int64)),)},
            "['target_tokens'] has shape [6, 129]: a position may have at most 128 targets, the size of the vocab",
        ),
        ({"data": (datum(weights=np.zeros((6, 129), np.float32)),)}, "['weights'] has shape [6, 129]: a position may"),
        ({"data": (replace(datum(), tokens=np.array([1, -5, 3, 4, 5, 6], np.int32)),)}, "model_input: token -5"),
    ],
)
def test_invalid_passes(changes, text):
    with raises(text):
        request_checks.check_pass(forward_backward(**changes), CAPABILITIES)


def test_valid_passes():
    request_checks.check_pass(forward_backward(), CAPABILITIES)
    for width in (3, 128):  # as many entries as there are tokens, with duplicates
        top_k = np.zeros((6, width), np.int64)
        request_checks.check_pass(forward_backward(data=(datum(target_tokens=top_k),)), CAPABILITIES)
    config = {"clip_low_threshold": 0.5}
    request_checks.check_pass(forward_backward(data=(datum(**POLICY),), loss="ppo", loss_config=config), CAPABILITIES)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": math.nan}, "adam_params.learning_rate nan"),
        ({"learning_rate": math.inf}, "adam_params.learning_rate inf"),
        ({"learning_rate": -1.0}, "adam_params.learning_rate -1.0"),
        ({"beta1": 1.0}, "adam_params.beta1 1.0 must be in [0, 1)"),
        ({"beta2": math.nan}, "adam_params.beta2 nan"),
        ({"beta2": -0.1}, "adam_params.beta2 -0.1"),
        ({"eps": -1.0}, "adam_params.eps -1.0"),
        ({"weight_decay": math.inf}, "adam_params.weight_decay inf"),
        ({"grad_clip_norm": -1.0}, "adam_params.grad_clip_norm -1.0"),
        ({"learning_rate": 1e308}, "adam_params.learning_rate 1e+308 must be a finite number (float32), 0 or more"),
        ({"weight_decay": 1e308}, "adam_params.weight_decay 1e+308"),
        ({"eps": 1e39}, "adam_params.eps 1e+39"),
        ({"learning_rate": 1e30, "weight_decay": 1e10}, "learning_rate 1e+30 and weight_decay 10000000000.0: their"),
        ({"learning_rate": 1e38, "beta1": 0.999}, "learning_rate 1e+38 and beta1 0.999: learning_rate / (1 - beta1)"),
    ],
)
def test_invalid_optim_steps(changes, text):
    with raises(text):
        request_checks.check_optim(OptimizerParams(**changes))


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ({"rank": 0}, "lora_config.rank 0 must be from 1 to 8"),
        ({"rank": -3}, "lora_config.rank -3"),
        ({"rank": 9}, "lora_config.rank 9"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "nothing to train"),
    ],
)
def test_invalid_lora_specs(lora, text):
    spec = ModelSpec(lora=LoraSpec(**{"rank": 2, "seed": 0, **lora}))
    with raises(text):
        request_checks.check_create(CreateModel(base_model="tiny", spec=spec), CAPABILITIES, ["tiny"])


def test_invalid_models():
    with raises("base_model 'huge' is not served here; this server has tiny"):
        request_checks.check_create(CreateModel(base_model="huge", spec=SPEC), CAPABILITIES, ["tiny"])

    with raises("optimizer 'dimuon' is not one of adamw"):
        request_checks.check_create(
            CreateModel(base_model="tiny", spec=replace(SPEC, optimizer="dimuon")), CAPABILITIES, ["tiny"]
        )

    refused = "lora_config.train_attn, train_mlp True: this server cannot train these layers; create the client with "
    with raises(refused + "train_attn=False, train_mlp=False"):
        request_checks.check_create(
            CreateModel(base_model="tiny", spec=SPEC),
            replace(CAPABILITIES, lora_targets=frozenset({"unembed"})),
            ["tiny"],
        )

    with raises(
        "lora_config.train_mlp True: this server cannot train these layers; create the client with train_mlp=F"
    ):
        request_checks.check_create(
            CreateModel(base_model="tiny", spec=SPEC),
            replace(CAPABILITIES, lora_targets=frozenset({"attn", "unembed"})),
            ["tiny"],
        )

    load = LoadWeights(
        path="tinker://a/weights/b",
        artifact_id=ArtifactId("x"),
        spec=SPEC,
        optimizer=True,
        create=True,
        base_model="huge",
    )
    with raises("base_model 'huge'"):
        request_checks.check_load(load, CAPABILITIES, ["tiny"], None)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\0b", "x" * 300, "-a"])
def test_invalid_checkpoint_names(name):
    with raises("checkpoint name"):
        request_checks.check_save(SaveWeights(kind="weights", name=name))


def test_invalid_saves():
    with raises("path is missing: name the checkpoint"):
        request_checks.check_save(SaveWeights(kind="weights", name=None))
    with raises("ttl_seconds -1 must be positive"):
        request_checks.check_save(SaveWeights(kind="weights", name="a", ttl_s=-1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": ()}, "prompt has no tokens"),
        ({"prompt": (1, 128)}, "prompt: token 128 is outside the vocabulary"),
        ({"prompt": (1, -1)}, "prompt: token -1"),
        ({"max_tokens": 0}, "sampling_params.max_tokens 0 must be from 1 to 2147483647"),
        ({"max_tokens": -5}, "sampling_params.max_tokens -5"),
        ({"max_tokens": 31}, "prompt of 2 tokens + sampling_params.max_tokens 31 exceeds the context of 32 tokens"),
        (
            {"prompt": (1,) * 33, "max_tokens": 4},
            "prompt of 33 tokens + sampling_params.max_tokens 4 exceeds the context",
        ),
        ({"prompt": (1,) * 32, "max_tokens": None}, "prompt has 32 tokens: no new token fits"),
        ({"prompt": (1,) * 33, "max_tokens": None}, "prompt has 33 tokens: no new token fits into the context of 32"),
        (
            {"temperature": 1e-38},
            "sampling_params.temperature 1e-38 must be from 1e-30 to 8.507059173023462e+37, or 0",
        ),
        ({"temperature": 5e-324}, "sampling_params.temperature 5e-324"),
        ({"temperature": 1e300}, "sampling_params.temperature 1e+300"),
        ({"temperature": -0.5}, "sampling_params.temperature -0.5"),
        ({"temperature": math.nan}, "sampling_params.temperature nan"),
        ({"top_p": 0.0}, "sampling_params.top_p 0.0 must be in (0, 1]"),
        ({"top_p": 1.5}, "sampling_params.top_p 1.5"),
        ({"top_k": -2}, "sampling_params.top_k -2"),
        ({"stop_strings": ("a", "")}, "sampling_params.stop contains an empty string"),
        ({"stop_token_ids": (500,)}, "sampling_params.stop: token 500"),
    ],
)
def test_invalid_samples(changes, text):
    with raises(text):
        request_checks.check_sample(sample(**changes), CAPABILITIES)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topk": 21}, "topk_prompt_logprobs 21 must be from 0 to 20"),
        ({"sample_topk": -1}, "topk_sample_logprobs -1"),
        ({"alt_tokens_k": 99}, "prompt_alt_tokens_k 99"),
        ({"topk": -1}, "topk_prompt_logprobs -1"),
        ({"logprobs": True, "last_n": 0}, "prompt_logprobs_last_n 0"),
        ({"logprobs": True, "last_n": 2}, "prompt_logprobs_last_n 2 must be from 1 to 1"),
        ({"target_tokens": np.zeros((2, 1), np.int64)}, "target_prompt_logprobs has shape [2, 1]; expected [1, K]"),
        ({"target_tokens": np.array([[-2]])}, "target_prompt_logprobs: token -2"),
        ({"target_tokens": np.zeros((1, 129), np.int64)}, "target_prompt_logprobs has shape [1, 129]: a position may"),
        ({"target_tokens": np.broadcast_to(np.int64(0), (1, 2**25))}, "target_prompt_logprobs has shape [1, 33554432]"),
    ],
)
def test_invalid_prompt_options(options, text):
    with raises(text):
        request_checks.check_sample(replace(sample(), options=PromptOptions(**options)), CAPABILITIES)


def test_invalid_num_samples():
    for number in (0, -1):
        with raises(f"num_samples {number} must be from 1 to 4096"):
            request_checks.check_sample(replace(sample(), num_samples=number), CAPABILITIES)
