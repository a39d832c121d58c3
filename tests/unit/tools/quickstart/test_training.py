"""Training data, rewards and curves of the quickstart, without a server."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from tinker import SampledSequence
from transformers import AutoTokenizer

from skyrl_tx.tools.quickstart import training
from skyrl_tx.tools.quickstart.model import write_tiny_model
from skyrl_tx.tools.quickstart.run import MetricCurve, draw_curves
from skyrl_tx.tools.quickstart.training import Chat, Question, shuffle_forever


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Chat(AutoTokenizer.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("model"))))


def sample(chat, text, *, stopped=True):
    tokens = chat.encode(text) + ([chat.turn_end_token] if stopped else [])
    return SampledSequence(
        stop_reason="stop" if stopped else "length",
        sequence_id="s",
        tokens_np=np.array(tokens, np.int32),
        logprobs_np=np.full(len(tokens), -0.5, np.float32),
    )


def test_sft_weights_cover_the_answer_and_its_end(chat):
    question = Question("2+3?", "It is 5.\n#### 5")
    datum = chat.make_sft_datum(question)
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert datum.model_input.to_ints() == [*chat.encode_prompt(question), *targets[weights == 1][:-1]]
    assert chat.tokenizer.decode(targets[weights == 1].tolist()) == "It is 5.\n#### 5<|im_end|>"


def test_worked_answers_have_a_smaller_weight_in_reinforcement(chat):
    datum = chat.make_sft_datum(Question("2+3?", "#### 5"), training.RL_SFT_WEIGHT)
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    num_answer_tokens = len(chat.encode("#### 5")) + 1
    assert not weights[:-num_answer_tokens].any()
    assert weights[-num_answer_tokens:].tolist() == pytest.approx([0.3] * num_answer_tokens)


def test_mean_nll_averages_over_answer_tokens_only(chat):
    data = [
        chat.make_sft_datum(Question("1?", "#### 1")),
        chat.make_sft_datum(Question("A longer question?", "So\n#### 22")),
    ]

    def row(datum, value):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        return {"logprobs": SimpleNamespace(to_numpy=lambda: np.where(weights == 1, value, -99.0))}

    output = SimpleNamespace(loss_fn_outputs=[row(data[0], -1.0), row(data[1], -2.0)])
    counts = [float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data]
    assert training.compute_mean_nll(data, output) == pytest.approx((counts[0] + 2 * counts[1]) / sum(counts))


@pytest.mark.parametrize(
    ("text", "stopped", "expected"),
    [
        ("He has 2*3=6.\n#### 6", True, 1.0),
        ("#### 1,250.50", True, 1.0),
        ("#### -3", True, 1.0),
        ("#### 6", False, 0.0),
        ("#### 6\nand so on", True, 0.1),
        ("#### 6\n", True, 0.1),
        ("#### six", True, 0.1),
        ("so #### 6", True, 0.1),
        ("", True, 0.1),
    ],
)
def test_reward_of_ending_with_the_result_line(chat, text, stopped, expected):
    assert training.compute_reward(chat, sample(chat, text, stopped=stopped)) == expected


def test_rl_data_has_no_advantage_on_the_prompt(chat):
    prompt, sequence = chat.encode("2+3?"), sample(chat, "#### 5")
    datum = training.make_rl_datum(prompt, sequence, 0.25)
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    before = len(prompt) - 1
    assert datum.model_input.to_ints() == [*prompt, *sequence.tokens[:-1]]
    assert inputs["target_tokens"][before:] == sequence.tokens
    assert inputs["advantages"] == [0.0] * before + [0.25] * len(sequence.tokens)
    assert inputs["logprobs"] == [0.0] * before + [-0.5] * len(sequence.tokens)


def test_shuffled_items_repeat_none_within_an_epoch():
    taken = list(islice(shuffle_forever(range(5), seed=1), 10))
    assert sorted(taken[:5]) == sorted(taken[5:]) == [0, 1, 2, 3, 4]
    assert (
        taken
        == list(islice(shuffle_forever(range(5), seed=1), 10))
        != list(islice(shuffle_forever(range(5), seed=2), 10))
    )


def test_curves_are_written_as_png(tmp_path):
    path = tmp_path / "curves.png"
    nll = MetricCurve(batches=[7.0, 6.0, 5.0], before=7.0, after=4.0)
    draw_curves(path, nll, MetricCurve(batches=[0.0, 0.25, 0.5, 0.75], before=0.0, after=0.9))
    assert path.read_bytes().startswith(b"\x89PNG")
