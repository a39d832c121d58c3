"""Check a history against a model of the server's guarantees.

The model is the fake backend itself, driven in one thread by the requests that clients sent: each takes effect once, in
the order of its sequence number, and its result is a function of the model's earlier requests alone.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, LocalArtifacts
from skyrl_tx.contract import requests, results
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.engine import prepare
from skyrl_tx.engine.sample_requests import SampleAssembler
from skyrl_tx.server.http.responses import make_result_response
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.testing.fake.model import FakeSnapshot
from tests.support.simulation.clients import Client, Model, Sent
from tests.support.simulation.device import BAD_TOKEN, CONFIG, CRASH_TOKEN

if TYPE_CHECKING:
    from tests.support.simulation.history import History

_ALL = frozenset({StatePart.WEIGHTS, StatePart.OPTIMIZER})
_SPEC = requests.ModelSpec(lora=requests.LoraSpec(rank=2, seed=0))
_FAILING_SAVES = ("artifact_errors", "power_loss", "sick_device")
"""Kinds of faults after which a save may fail."""


class Oracle:
    """The expected state of one client's models."""

    def __init__(self, history: "History", client: Client) -> None:
        self._history = history
        self._client = client
        self._backend = FakeBackend("tiny", CONFIG.model_copy(update={"max_models": 99, "max_samplers": 99}))
        self._capabilities = self._backend.start()
        self._saved: dict[str, FakeSnapshot] = {}
        self._plan = history.world.plan

    def findings(self) -> Iterator[str]:
        """Yield the violations of this client's promises."""
        for model in self._client.models:
            yield from self._model_findings(model)
        for sent in self._client.samples:
            yield from self._sample_findings(sent)
        yield from self._artifact_findings()

    def _model_findings(self, model: Model) -> Iterator[str]:
        model_id, name = ModelId(model.model_id), model.model_id
        gradient_is_complete = True
        last_effect = 0
        if model.log[0].has_failed:
            if not self._may_fail(model.log[0]):
                yield f"{name} could not be created: {model.log[0].result}"
            return

        for sent in self._in_order_of_effect(model):
            what = f"{sent.kind} {sent.seq_id} of {name}"
            assert sent.row is not None, what
            _, effect, _ = sent.row
            if effect is not None:
                if effect != last_effect + 1:
                    yield f"{what} has the log sequence number {effect} after {last_effect}"
                last_effect = effect
            if sent.kind == "optim_step" and not gradient_is_complete:
                gradient_is_complete = True
                self._backend.clear_gradient(model_id)
                if not sent.has_failed:
                    yield f"{what} succeeded with an incomplete gradient: {sent.result}"
                continue
            if sent.has_failed:
                if not self._may_fail(sent):
                    yield f"{what} failed: {sent.result}"
                if sent.kind == "pass" and sent.request.backward:
                    gradient_is_complete = False
                continue
            expected = self._execute(model_id, sent)
            if sent.result != expected:
                yield f"{what} has the result {sent.result}, expected {expected}"
            elif sent.kind == "load":
                gradient_is_complete = True

    def _in_order_of_effect(self, model: Model) -> Iterator[Sent]:
        """Yield the requests by sequence number. Passes between two barriers may take effect in another order."""
        group: list[Sent] = []
        for sent in [*model.log, None]:
            if sent is not None and sent.kind == "pass":
                group.append(sent)
                continue
            yield from self._sort_group(group)
            group = []
            if sent is not None:
                yield sent

    def _sort_group(self, group: list[Sent]) -> list[Sent]:
        effects = {id(sent): sent.row[1] for sent in group if sent.row is not None}
        done = sorted((sent for sent in group if effects[id(sent)]), key=lambda sent: effects[id(sent)] or 0)
        for earlier, later in pairwise(done):
            assert earlier.row is not None and later.row is not None
            if earlier.seq_id > later.seq_id and earlier.row[0] > later.row[0]:
                self._history.violate(
                    f"pass {later.seq_id} arrived before pass {earlier.seq_id} and took effect after it"
                )
        return [*done, *(sent for sent in group if not effects[id(sent)])]

    def _may_fail(self, sent: Sent) -> bool:
        if self._plan.has("sick_device"):
            return True  # the history has a limit for their number
        if sent.kind == "pass":
            return any(int(datum.tokens[0]) in (BAD_TOKEN, CRASH_TOKEN) for datum in sent.request.data)
        if sent.kind in ("save", "ephemeral_save", "sample", "load"):
            return any(self._plan.has(kind) for kind in _FAILING_SAVES)
        return False

    def _execute(self, model_id: ModelId, sent: Sent) -> object:
        backend, request = self._backend, sent.request
        result: results.Result
        match sent.kind:
            case "create_model":
                backend.create_model(model_id, request.spec)
                result = results.CreateModelOutput(model_id=model_id)
            case "pass":
                examples = tuple(prepare.make_pass_examples(RequestId("x"), model_id, request, self._capabilities))
                batch = PreparedModelPassBatch(examples=examples)
                found = backend.forward_backward(batch) if request.backward else backend.forward(batch)
                result = prepare.combine_pass_results(found, sum(datum.tokens.size for datum in request.data))
            case "optim_step":
                result = results.OptimStepOutput(metrics=dict(backend.optim_step(model_id, request.params)))
            case "save":
                self._save(model_id, sent)
                result = results.SaveWeightsOutput(kind=request, path=sent.path)
            case "ephemeral_save":
                self._save(model_id, sent)
                result = results.SaveWeightsOutput(kind="sampler_weights", sampling_session_id=sent.path)  # pyright: ignore
            case "load":
                parts = _ALL if request else {StatePart.WEIGHTS}
                backend.restore(model_id, _SPEC, self._saved[sent.path], parts)
                result = results.LoadWeightsOutput(path=sent.path, model_id=model_id)
            case "sample":
                raise AssertionError("samples belong to no model")
        return json.loads(bytes(make_result_response(result, "application/json").body))

    def _save(self, model_id: ModelId, sent: Sent) -> None:
        snapshot = self._backend.capture(model_id, _ALL)
        assert isinstance(snapshot, FakeSnapshot)
        self._saved[sent.path] = snapshot

    def _sample_findings(self, sent: Sent) -> Iterator[str]:
        save = self._client.samplers[sent.path]
        what = f"sample {sent.seq_id} of {sent.path}"
        if sent.has_failed:
            assert sent.result is not None
            is_cancelled = sent.is_cancelled and "cancelled" in sent.result["error"]
            if not is_cancelled and not self._may_fail(sent):
                yield f"{what} failed: {sent.result}"
            return
        sampler = None
        if save is not None:
            if save.path not in self._saved:
                return
            sampler = SamplerId(save.path)
            self._backend.load_sampler(sampler, self._saved[save.path])
        prompt, params, num_samples = sent.request
        sample = requests.Sample(prompt=prompt, num_samples=num_samples, sampler=sampler, params=params)
        request = prepare.make_sample_request(RequestId("x"), sample, self._capabilities)
        assembler = SampleAssembler(request, self._backend.text_of)
        for delta in self._backend.sample(PreparedSampleBatch(requests=(request,))):
            assembler.add(delta)
        expected = json.loads(bytes(make_result_response(assembler.build_output(), "application/json").body))
        if sent.result != expected:
            yield f"{what} has the result {sent.result}, expected {expected}"

    def _artifact_findings(self) -> Iterator[str]:
        """Yield the named saves whose files are missing or wrong."""
        artifacts = LocalArtifacts(self._history.world.disk.root)

        for path, expected in self._saved.items():
            if not path.startswith("tinker://"):
                continue
            artifact_id = self._history.artifacts.get(path)
            if artifact_id is None:
                yield f"the checkpoint {path} has no row"
                continue
            if self._history.world.plan.has("old_database") and artifact_id in artifacts.list_ids(trashed=True):
                artifacts.restore(artifact_id)  # as `skyrl-tx recover` does
            try:
                found = FakeSnapshot.read(artifacts.open(artifact_id).path, CONFIG.vocab_size)
            except (ArtifactMissing, ArtifactCorrupt) as error:
                yield f"the checkpoint {path} cannot be read: {error}"
                continue
            if found.state.weights.a_RV.tobytes() != expected.state.weights.a_RV.tobytes() or (
                found.state.weights.b_VR.tobytes() != expected.state.weights.b_VR.tobytes()
            ):
                yield f"the checkpoint {path} has other weights than were saved"
