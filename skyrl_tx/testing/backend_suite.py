"""What every backend promises, one test a promise; subclass `BackendSuite` and give it a backend."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, StatePart
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams, PromptOptions
from skyrl_tx.contract.results import REDUCTIONS
from skyrl_tx.testing.backend_bench import STEP, WEIGHTS_ONLY, Bench, Drawn, same_bits
from skyrl_tx.testing.sampling_suite import SamplingSuite


class BackendSuite(SamplingSuite):
    """Guarantees of the contract, with a tiny base model.

    The backend needs room for three models and two samplers, 64 tokens of context, and "cross_entropy". It is started
    once per class; override `make_backend`, and `tolerance` where the numbers are not float32.
    """

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        """Return a backend, not yet started; `directory` is its own to write in."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        """A running backend, shared by the class's tests."""
        backend = cls.make_backend(tmp_path_factory.mktemp("backend"))
        yield Bench(backend, backend.start(), tmp_path_factory.mktemp("snapshots"))
        backend.close()

    @pytest.fixture
    def bench(self, started: Bench, tmp_path: Path) -> Iterator[Bench]:
        """The running backend without models or samplers."""
        bench = Bench(started.backend, started.capabilities, tmp_path)
        yield bench
        bench.clean()

    # Aligned

    def test_result_i_belongs_to_example_i(self, bench: Bench) -> None:
        """Whatever the order and mix of lengths and models."""
        one, two = bench.model(1, steps=1), bench.model(2, steps=1)
        first = bench.request(one, (9, 3, 17), seed=1)
        second = bench.request(two, (4, 16), seed=2)
        forth = bench.backend.forward(bench.batch(first, second))
        back = bench.backend.forward(bench.batch(second, first))
        assert [len(result.logprobs) for result in forth] == [9, 3, 17, 4, 16]
        assert all(
            same_bits(left, right) for left, right in zip(forth[:3] + forth[3:], back[2:] + back[:2], strict=True)
        )

    def test_every_loss_answers_in_the_shape_of_its_targets(self, bench: Bench) -> None:
        """Forward and backward agree, logprobs do not depend on the loss, and all is finite."""
        model_id = bench.model(steps=1)
        for loss in bench.capabilities.losses:
            batch = bench.batch(bench.request(model_id, (6, 11), loss=loss))
            before, after = bench.backend.forward(batch), bench.backend.forward_backward(batch)
            assert all(same_bits(left, right) for left, right in zip(before, after, strict=True)), loss
            for example, result in zip(batch.examples, after, strict=True):
                assert result.logprobs.dtype == np.float32
                assert result.logprobs.shape == example.loss_inputs["target_tokens"].shape
                assert np.isfinite(result.logprobs).all() and np.isfinite(result.sums["loss"])
                assert not any(":" in name for name in (*result.sums, *result.means)), "the engine adds the colon"
            metrics = bench.backend.optim_step(model_id, OptimizerParams(learning_rate=0.0))
            assert metrics["unclipped_grad_l2:mean"] > 0, loss
            for name in metrics:
                _, colon, reduction = name.partition(":")
                assert colon and reduction in REDUCTIONS, f"{name}: a metric ends in a colon and {sorted(REDUCTIONS)}"

    def test_cross_entropy_is_a_plain_weighted_sum(self, bench: Bench) -> None:
        """No mean: the loss is the negative sum of weights times logprobs."""
        batch = bench.batch(bench.request(bench.model(steps=1), (6, 11)))
        for example, result in zip(batch.examples, bench.backend.forward(batch), strict=True):
            expected = -float((example.loss_inputs["weights"] * result.logprobs).sum())
            assert result.sums["loss"] == pytest.approx(expected, rel=1e-5)

    # Gradient bookkeeping

    def test_forward_leaves_no_trace(self, bench: Bench) -> None:
        """Neither weights nor a pending gradient change."""
        model_id = bench.model(steps=1)
        bench.backend.forward_backward(bench.batch(bench.request(model_id)))
        before = bench.state_of(model_id)
        bench.backend.forward(bench.batch(bench.request(model_id, seed=5)))
        assert bench.state_of(model_id) == before

    def test_step_and_clear_empty_the_gradient(self, bench: Bench) -> None:
        """A step without a gradient is a step with a zero gradient."""
        model_id = bench.model()
        batch = bench.batch(bench.request(model_id))
        still = OptimizerParams(learning_rate=0.0)
        bench.backend.forward_backward(batch)
        assert bench.backend.optim_step(model_id, still)["unclipped_grad_l2:mean"] > 0
        assert bench.backend.optim_step(model_id, still)["unclipped_grad_l2:mean"] == 0
        bench.backend.forward_backward(batch)
        bench.backend.clear_gradient(model_id)
        assert bench.backend.optim_step(model_id, still)["unclipped_grad_l2:mean"] == 0

    def test_training_lowers_the_loss(self, bench: Bench) -> None:
        """The gradient points the right way."""
        model_id = bench.model()
        batch = bench.batch(bench.request(model_id, (12, 12)))
        losses: list[float] = []
        for _ in range(4):
            losses.append(sum(result.sums["loss"] for result in bench.backend.forward_backward(batch)))
            bench.backend.optim_step(model_id, OptimizerParams(learning_rate=0.01))
        assert losses[-1] < losses[0]

    # Isolated

    def test_a_step_on_one_model_leaves_others_bit_equal(self, bench: Bench) -> None:
        """Weight decay and clipping are on, and the other has moments and a pending gradient."""
        mine, other = bench.model(1, steps=1), bench.model(2, steps=1)
        bench.backend.forward_backward(bench.batch(bench.request(other)))
        before = bench.state_of(other)
        bench.backend.forward_backward(bench.batch(bench.request(mine)))
        bench.backend.optim_step(mine, STEP)
        bench.backend.clear_gradient(mine)
        assert bench.state_of(other) == before

    def test_a_diverged_model_harms_only_itself(self, bench: Bench) -> None:
        """In one pass, and among samples, with a model whose weights are not finite any more."""
        sick, well = bench.model(1, steps=1), bench.model(2, steps=1)
        for _ in range(2):
            bench.backend.forward_backward(bench.batch(bench.request(sick)))
            bench.backend.optim_step(sick, OptimizerParams(learning_rate=3e38))
        request = bench.request(well, seed=3)
        start = bench.backend.capture(well, ALL_PARTS)
        alone = bench.backend.forward_backward(bench.batch(request))
        expected = bench.state_of(well)
        bench.backend.restore(well, bench.spec(2), start, ALL_PARTS)
        mixed = bench.backend.forward_backward(bench.batch(bench.request(sick), request))
        assert not np.isfinite(mixed[0].logprobs).all(), "the sick model should be sick, or this test shows nothing"
        assert all(same_bits(left, right) for left, right in zip(alone, mixed[2:], strict=True))
        bench.backend.optim_step(sick, STEP)
        assert bench.state_of(well) == expected
        sampler = bench.sampler(well)
        drawn: list[list[Drawn]] = []
        for neighbour in (bench.model(3, steps=1), sick):
            company = bench.sampler(neighbour)
            drawn.append(
                bench.draw(bench.sample_request(sampler, num_samples=2), bench.sample_request(company, num_samples=2))
            )
            bench.backend.drop_sampler(company)
        assert drawn[0] == drawn[1], "the same bits beside a neighbour in good health"

    # Atomic

    def test_a_failed_pass_leaves_no_trace(self, bench: Bench) -> None:
        """One of its models does not exist; nothing of the other request is kept."""
        model_id = bench.model(steps=1)
        before = bench.state_of(model_id)
        batch = bench.batch(bench.request(model_id), bench.request(ModelId("never-made")))
        raised = False
        try:
            bench.backend.forward_backward(batch)
        except BackendLost:
            raise
        except Exception:
            raised = True
        assert raised
        assert bench.state_of(model_id) == before

    def test_an_aborted_pass_leaves_no_trace(self, bench: Bench) -> None:
        """Also when all of it was dispatched; aborting after `results` undoes nothing."""
        model_id = bench.model(steps=1)
        before = bench.state_of(model_id)
        batch = bench.batch(bench.request(model_id, (4, 9, 17)))
        begun = bench.backend.begin_pass(batch, backward=True)
        begun.step()
        begun.abort()
        begun.abort()
        assert bench.state_of(model_id) == before
        kept = bench.backend.begin_pass(batch, backward=True)
        while not kept.step():
            pass
        kept.results()
        after = bench.state_of(model_id)
        kept.abort()
        assert after != before
        assert bench.state_of(model_id) == after

    # Immutable snapshots

    def test_training_changes_no_snapshot(self, bench: Bench) -> None:
        """A snapshot written late is the one taken early."""
        model_id = bench.model(steps=1)
        bench.backend.forward_backward(bench.batch(bench.request(model_id)))
        snapshot = bench.backend.capture(model_id, ALL_PARTS)
        early = bench.files_of(snapshot)
        bench.backend.optim_step(model_id, STEP)
        bench.backend.forward_backward(bench.batch(bench.request(model_id)))
        assert bench.files_of(snapshot) == early
        assert bench.state_of(model_id) != early

    def test_training_changes_no_sampler(self, bench: Bench) -> None:
        """Train on, sample again: the same tokens and logprobs."""
        model_id = bench.model(steps=2)
        sampler = bench.sampler(model_id)
        before = bench.draw(bench.sample_request(sampler))
        bench.backend.forward_backward(bench.batch(bench.request(model_id, seed=9)))
        bench.backend.optim_step(model_id, STEP)
        bench.backend.delete_model(model_id)
        assert bench.draw(bench.sample_request(sampler)) == before

    # Canonical

    def test_company_and_passes_change_no_bit(self, bench: Bench) -> None:
        """Two requests of a model: together, one after the other, and among another model's requests."""
        model_id, other = bench.model(1, steps=1), bench.model(2, steps=1)
        first, second = bench.request(model_id, (5, 9, 3), seed=1), bench.request(model_id, (12, 2), seed=2)
        stranger = bench.request(other, (7, 18), seed=3)
        start = bench.backend.capture(model_id, ALL_PARTS)
        together = bench.backend.forward_backward(bench.batch(first, second))
        expected = bench.state_of(model_id)
        bench.backend.restore(model_id, bench.spec(1), start, ALL_PARTS)
        apart = [
            *bench.backend.forward_backward(bench.batch(first)),
            *bench.backend.forward_backward(bench.batch(second)),
        ]
        assert all(same_bits(left, right) for left, right in zip(together, apart, strict=True))
        assert bench.state_of(model_id) == expected
        bench.backend.restore(model_id, bench.spec(1), start, ALL_PARTS)
        mixed = bench.backend.forward_backward(bench.batch(first, stranger, second))
        own = mixed[:3] + mixed[5:]
        assert all(same_bits(left, right) for left, right in zip(together, own, strict=True))
        assert bench.state_of(model_id) == expected

    def test_passes_of_two_models_side_by_side_change_no_bit(self, bench: Bench) -> None:
        """A micro-batch of each in turn, and a step on a third model in between."""
        models = [bench.model(number, steps=1) for number in (1, 2)]
        batches = [bench.batch(bench.request(model_id, (12, 5, 9))) for model_id in models]
        starts = [bench.backend.capture(model_id, ALL_PARTS) for model_id in models]
        alone = [bench.backend.forward_backward(batch) for batch in batches]
        expected = [bench.state_of(model_id) for model_id in models]
        for number, model_id in enumerate(models):
            bench.backend.restore(model_id, bench.spec(number + 1), starts[number], ALL_PARTS)
        other = bench.model(3)
        begun = [bench.backend.begin_pass(batch, backward=True) for batch in batches]
        under_way = list(begun)
        while under_way:
            under_way = [each for each in under_way if not each.step()]
            bench.backend.optim_step(other, STEP)
        results = [each.results() for each in reversed(begun)][::-1]
        for left, right in zip(alone, results, strict=True):
            assert all(same_bits(one, two) for one, two in zip(left, right, strict=True))
        assert [bench.state_of(model_id) for model_id in models] == expected

    # Trainer = sampler

    def test_trainer_and_sampler_agree(self, bench: Bench) -> None:
        """Logprobs of sampled tokens and of the prompt equal what `forward` gives for them."""
        model_id = bench.model(steps=2)
        options = PromptOptions(logprobs=True)
        request = bench.sample_request(bench.sampler(model_id), options=options)
        self._check_agreement(bench, model_id, request)

    def test_a_fresh_model_is_the_base_model(self, bench: Bench) -> None:
        """B is zero, so the base model samples what the trainer of a fresh adapter scores."""
        request = bench.sample_request(None, options=PromptOptions(logprobs=True))
        self._check_agreement(bench, bench.model(), request)

    def _check_agreement(self, bench: Bench, model_id: ModelId, request: SampleRequest) -> None:
        deltas = bench.run_samples(request)
        tokens = np.concatenate([request.prompt, *(delta.tokens for delta in deltas)]).astype(np.int32)
        prompt = deltas[0].prompt
        assert prompt is not None and prompt.logprobs is not None and np.isnan(prompt.logprobs[0])
        sampled = np.concatenate([prompt.logprobs[1:], *(delta.logprobs for delta in deltas)])
        [example] = bench.request(model_id, (len(tokens) - 1,))
        inputs = dict(example.loss_inputs) | {"target_tokens": tokens[1:]}
        fields = {"request_id": example.request_id, "model_id": model_id, "loss": example.loss}
        scored = type(example)(**fields, tokens=tokens[:-1], loss_inputs=inputs, loss_config=example.loss_config)
        [result] = bench.backend.forward(bench.batch([scored]))
        np.testing.assert_allclose(sampled, result.logprobs, rtol=0, atol=self.tolerance)

    # Round trip

    def test_a_restored_model_goes_on_bit_equal(self, bench: Bench) -> None:
        """Captured with a pending gradient, written, opened, restored into another model; its steps are counted on."""
        model_id, copy = bench.model(steps=2), bench.new_id()
        bench.backend.forward_backward(bench.batch(bench.request(model_id, seed=4)))
        directory = bench.directory / "kept"
        directory.mkdir()
        bench.backend.capture(model_id, ALL_PARTS).write(directory)
        bench.backend.restore(copy, bench.spec(), bench.backend.open_snapshot(directory), ALL_PARTS)
        assert bench.state_of(copy) == bench.state_of(model_id)
        metrics = []
        for each in (model_id, copy):
            bench.backend.forward_backward(bench.batch(bench.request(each, seed=5)))
            metrics.append(bench.backend.optim_step(each, STEP))
        assert metrics[0] == metrics[1]
        assert (metrics[1]["step:max"], metrics[1]["learning_rate:mean"]) == (3, pytest.approx(STEP.learning_rate))
        assert bench.state_of(copy) == bench.state_of(model_id)

    def test_parts_not_named_start_fresh(self, bench: Bench) -> None:
        """Weights alone: the moments and the gradient are those of a new model."""
        model_id, copy = bench.model(steps=2), bench.new_id()
        bench.backend.forward_backward(bench.batch(bench.request(model_id, seed=4)))
        source = bench.backend.capture(model_id, ALL_PARTS)
        bench.backend.restore(copy, bench.spec(), source, WEIGHTS_ONLY)
        metrics = bench.backend.optim_step(copy, OptimizerParams(learning_rate=0.0))
        assert (metrics["unclipped_grad_l2:mean"], metrics["step:max"], metrics["learning_rate:mean"]) == (0, 1, 0)
        weights = bench.files_of(bench.backend.capture(copy, WEIGHTS_ONLY))
        assert weights == bench.files_of(bench.backend.capture(model_id, WEIGHTS_ONLY))
        bench.backend.restore(copy, bench.spec(), source, {StatePart.WEIGHTS, StatePart.OPTIMIZER})
        bench.backend.clear_gradient(model_id)
        assert bench.state_of(copy) == bench.state_of(model_id)

    # Idempotent

    def test_giving_back_twice_is_fine(self, bench: Bench) -> None:
        """Delete, drop, and load what is loaded."""
        model_id = bench.model()
        sampler = bench.sampler(model_id)
        bench.backend.load_sampler(sampler, bench.backend.capture(model_id, WEIGHTS_ONLY))
        for _ in range(2):
            bench.backend.drop_sampler(sampler)
            bench.backend.delete_model(model_id)
        bench.backend.create_model(model_id, bench.spec())

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """Also before it was started."""
        backend = self.make_backend(tmp_path)
        with contextlib.closing(backend):
            backend.close()
