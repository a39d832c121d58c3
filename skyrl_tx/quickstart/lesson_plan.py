"""The run as a client sees it: supervised training, then reinforcement, with figures before and after each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker import SamplingClient, ServiceClient, TrainingClient

from skyrl_tx.quickstart import rl, sft
from skyrl_tx.quickstart.answers import ask
from skyrl_tx.quickstart.chat import Chat
from skyrl_tx.quickstart.plot import HeldOut, draw_curves
from skyrl_tx.quickstart.questions import QuestionSet
from skyrl_tx.quickstart.settings import QuickstartSettings

RANK = 32
NUM_SHOWN = 2  # questions whose answers are printed
NUM_JUDGED = 32  # held-out questions whose answers are rewarded, four each
NUM_HELD_OUT = 64  # questions of the held-out loss
LINE_EVERY = 20  # supervised steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the run computed."""

    nll: HeldOut
    reward: HeldOut
    checkpoint: str  # tinker:// path of weights and optimizer
    curves: Path


class LessonPlan:
    """Runs the lessons against a server, printing as it goes."""

    def __init__(self, service: ServiceClient, base_model: str, questions: QuestionSet, settings: QuickstartSettings):
        self._settings = settings
        self._questions = questions
        self._client: TrainingClient = service.create_lora_training_client(
            base_model, rank=RANK, seed=settings.seed
        ).result()
        self._chat = Chat(self._client.get_tokenizer())
        self._began = time.monotonic()

    def run(self) -> Results:
        """Do all of it; raises the SDK's errors."""
        chat, settings, held_out = self._chat, self._settings, self._questions.held_out
        lessons = [chat.lesson(question) for question in held_out[:NUM_HELD_OUT]]

        self._say(f"Supervised: {settings.steps} steps of {sft.BATCH_SIZE} worked answers, loss cross_entropy")
        loss_before = sft.held_out_nll(self._client, lessons)
        self._say(f"  held-out loss before  {loss_before:.3f} nats per answer token")
        self._show("before training", self._sampler())
        sft_steps: list[sft.SftStep] = []
        train = [chat.lesson(question) for question in self._questions.train]
        for row in sft.supervise(self._client, train, settings.steps, settings.seed):
            sft_steps.append(row)
            if row.step % LINE_EVERY == 0 or row.step == settings.steps - 1:
                self._say(f"  step {row.step + 1:4d}/{settings.steps}  loss {row.nll:.3f}")
        loss_after = sft.held_out_nll(self._client, lessons)
        self._say(f"  held-out loss after   {loss_after:.3f}")
        sampler = self._sampler()
        self._show("after supervised training", sampler)

        self._say(
            f"Reinforcement: {settings.rl_steps} steps of {rl.NUM_GROUPS} x {rl.GROUP_SIZE} sampled answers, "
            f"loss importance_sampling; reward {rl.TASK}"
        )
        judged = held_out[:NUM_JUDGED]
        reward_before = rl.mean_reward(sampler, chat, judged, settings.seed)
        self._say(f"  held-out reward before  {reward_before:.3f}")
        rl_steps: list[rl.RlStep] = []
        for row in rl.reinforce(self._client, chat, self._questions.train, settings.rl_steps, settings.seed):
            rl_steps.append(row)
            self._say(
                f"  step {row.step + 1:4d}/{settings.rl_steps}  reward {row.reward:.3f}  "
                f"{row.num_trained} answers trained on"
            )
        sampler = self._sampler()
        reward_after = rl.mean_reward(sampler, chat, judged, settings.seed)
        self._say(f"  held-out reward after   {reward_after:.3f}")
        self._show("after reinforcement", sampler)

        loss, reward = HeldOut(before=loss_before, after=loss_after), HeldOut(before=reward_before, after=reward_after)
        curves = settings.output / "curves.png"
        draw_curves(curves, sft_steps, loss, rl_steps, reward)
        checkpoint = self._client.save_state("quickstart").result().path
        return Results(nll=loss, reward=reward, checkpoint=checkpoint, curves=curves)

    def _sampler(self) -> SamplingClient:
        return self._client.save_weights_and_get_sampling_client().result()

    def _show(self, when: str, sampler: SamplingClient) -> None:
        lines: Sequence[str] = [
            line
            for answers in ask(sampler, self._chat, self._questions.held_out[:NUM_SHOWN], self._settings.seed)
            for line in answers.lines()
        ]
        self._say(f"  held-out answers {when}:")
        print(*lines, sep="\n", flush=True)

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)
