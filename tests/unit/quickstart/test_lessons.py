"""The lessons' arithmetic, without a server."""

from types import SimpleNamespace

import numpy as np
import pytest
from tinker import SampledSequence
from transformers import AutoTokenizer

from skyrl_tx.quickstart import rl, sft
from skyrl_tx.quickstart.chat import Chat
from skyrl_tx.quickstart.order import Order
from skyrl_tx.quickstart.plot import HeldOut, draw_curves
from skyrl_tx.quickstart.questions import Question
from skyrl_tx.quickstart.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Chat(AutoTokenizer.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("model"))))


def sample(chat, text, *, stopped=True):
    tokens = chat.encode(text) + ([chat.turn_end] if stopped else [])
    return SampledSequence(
        stop_reason="stop" if stopped else "length",
        sequence_id="s",
        tokens_np=np.array(tokens, np.int32),
        logprobs_np=np.full(len(tokens), -0.5, np.float32),
    )


def test_a_lesson_is_learned_from_the_answers_first_token_to_its_end(chat):
    question = Question("2+3?", "It is 5.\n#### 5")
    lesson = chat.lesson(question)
    targets = lesson.loss_fn_inputs["target_tokens"].to_numpy()
    weights = lesson.loss_fn_inputs["weights"].to_numpy()
    assert lesson.model_input.to_ints() == [*chat.prompt(question), *targets[weights == 1][:-1]]
    assert chat.tokenizer.decode(targets[weights == 1].tolist()) == "It is 5.\n#### 5<|im_end|>"


def test_mean_nll_counts_the_answers_tokens_alone(chat):
    lessons = [chat.lesson(Question("1?", "#### 1")), chat.lesson(Question("A longer question?", "So\n#### 22"))]

    def row(lesson, value):
        weights = lesson.loss_fn_inputs["weights"].to_numpy()
        return {"logprobs": SimpleNamespace(to_numpy=lambda: np.where(weights == 1, value, -99.0))}

    output = SimpleNamespace(loss_fn_outputs=[row(lessons[0], -1.0), row(lessons[1], -2.0)])
    counts = [float(lesson.loss_fn_inputs["weights"].to_numpy().sum()) for lesson in lessons]
    assert sft.mean_nll(lessons, output) == pytest.approx((counts[0] + 2 * counts[1]) / sum(counts))


@pytest.mark.parametrize(
    ("text", "stopped", "expected"),
    [
        ("He has 2*3=6.\n#### 6", True, 1.0),
        ("#### 1,250.50", True, 1.0),
        ("#### -3", True, 1.0),
        ("#### 6", False, 0.5),
        ("#### 6\nand so on", True, 0.5),
        ("#### six", True, 0.0),
        ("so #### 6", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_reward_is_for_the_result_line_and_for_ending_there(chat, text, stopped, expected):
    assert rl.reward(chat, sample(chat, text, stopped=stopped)) == expected


def test_an_attempt_learns_nothing_of_the_prompt(chat):
    prompt, sequence = chat.encode("2+3?"), sample(chat, "#### 5")
    datum = rl.attempt(prompt, sequence, 0.25)
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    before = len(prompt) - 1
    assert datum.model_input.to_ints() == [*prompt, *sequence.tokens[:-1]]
    assert inputs["target_tokens"][before:] == sequence.tokens
    assert inputs["advantages"] == [0.0] * before + [0.25] * len(sequence.tokens)
    assert inputs["logprobs"] == [0.0] * before + [-0.5] * len(sequence.tokens)


def test_an_order_meets_all_before_any_twice():
    order = Order(5, seed=1)
    taken = order.take(3) + order.take(4) + order.take(3)
    assert sorted(taken[:5]) == sorted(taken[5:]) == [0, 1, 2, 3, 4]
    again = Order(5, seed=1)
    assert taken == again.take(10) != Order(5, seed=2).take(10)


def test_curves_are_a_picture(tmp_path):
    path = tmp_path / "curves.png"
    sft_steps = [sft.SftStep(step, 7.0 - step) for step in range(3)]
    rl_steps = [rl.RlStep(step, step / 4, 8) for step in range(4)]
    draw_curves(path, sft_steps, HeldOut(before=7.0, after=4.0), rl_steps, HeldOut(before=0.0, after=0.9))
    assert path.read_bytes().startswith(b"\x89PNG")
