"""Two owners with keys and the real SDK: recorded samples and delegated access."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.store import keys
from tests.support.live_stack import PUBLIC_NAME, live_stack

TOKENS = [5, 6, 7, 8, 9, 10]


@dataclass(frozen=True, slots=True)
class User:
    """An owner's key and SDK clients."""

    key: str
    service: tinker.ServiceClient
    rest: tinker.RestClient


Users = dict[str, User]


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    folder: Path = tmp_path_factory.mktemp("stack")
    with live_stack("fake", folder) as stack:
        made: Users = {}
        for owner in ("ann", "bob"):
            key, _ = stack.server.store.write(
                lambda tx, owner=owner: keys.create(tx, owner=owner, scope="user", name=owner, note="", now=1.0)
            )
            at = {"base_url": stack.server.url, "api_key": key}
            made[owner] = User(key, tinker.ServiceClient(**at), tinker.RestClient(**at))
        yield made
        for user in made.values():
            user.service.holder.close()
    gc.collect()  # collect the SDK's unclosed objects here, where their warnings are ignored


def train_client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return client


def datum() -> types.Datum:
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def loss(client: tinker.TrainingClient) -> float:
    return client.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def test_recorded_samples_are_private_to_their_owner(users: Users) -> None:
    ann, bob = (user.service for user in users.values())
    sampler = train_client(ann).save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=3, seed=1, stop=[])
    (drawn,) = sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result().sequences
    tokens = [*TOKENS, *drawn.tokens]
    prompt = types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=0, length=len(TOKENS))
    advantages = np.array([0.0] * (len(TOKENS) - 1) + [1.0] * 3, np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "logprobs": np.zeros_like(advantages), "advantages": advantages}
    plain = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def make_span(length: int) -> types.SampledProvenanceSpan:
        return types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=length)

    after_first = types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=1, length=len(TOKENS) - 1)
    traced = plain.with_provenance(model_input=[prompt, make_span(2)], loss_fn_inputs=[after_first, make_span(3)])
    assert np.isfinite(train_client(ann).forward([traced], "stable_reinforce").result().metrics["loss:sum"])
    with pytest.raises(tinker.RequestFailedError, match=f"no logprobs are recorded.*{drawn.sequence_id}") as failure:
        train_client(bob).forward([traced], "stable_reinforce").result()
    assert failure.value.category == types.RequestErrorCategory.User


def test_weights_access_token_delegates_access(users: Users) -> None:
    ann, bob = (user.service for user in users.values())
    key = users["ann"].key
    client = train_client(ann)
    path = client.save_state("lent").result().path

    for make in (bob.create_training_client_from_state, bob.create_training_client_from_state_with_optimizer):
        with pytest.raises(tinker.RequestFailedError, match="there is no such checkpoint"):
            make(path).result()
        with pytest.raises(tinker.RequestFailedError, match="weights_access_token: not a key") as failure:
            make(path, weights_access_token="tml-unknown").result()
        assert failure.value.category == types.RequestErrorCategory.User and "tml-unknown" not in str(failure.value)
        borrowed = make(path, weights_access_token=key).result()
        assert loss(borrowed) == loss(client)

    own = bob.create_lora_training_client(PUBLIC_NAME, rank=8, seed=5).result()
    with pytest.warns(FutureWarning, match="load_state"):
        own.load_state(path, weights_access_token=key).result()
    assert loss(own) == loss(client)


def test_weights_access_token_allows_a_copy(users: Users) -> None:
    bob, rest, key = users["bob"].service, users["bob"].rest, users["ann"].key
    client = train_client(users["ann"].service)
    path = client.save_state("copied").result().path
    with pytest.raises(tinker.NotFoundError):
        rest.copy_weights(path, "project").result()
    with pytest.raises(tinker.BadRequestError, match="weights_access_token"):
        rest.copy_weights(path, "project", weights_access_token="tml-unknown").result()
    copied = rest.copy_weights(path, "project", weights_access_token=key).result()
    assert copied != path
    assert loss(bob.create_training_client_from_state(copied).result()) == loss(client)
