"""Compile the constraints of sample requests before their samples start."""

from collections.abc import Collection
from concurrent.futures import Future

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.constraints import TokenConstraint
from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import Constraint, SamplingParams
from skyrl_tx.grammars import CompiledGrammar, GrammarCompiler
from skyrl_tx.store.database import Store


class RequestConstraint:
    """The compiled constraint of one request, which makes the constraints of its samples."""

    def __init__(self, compiler: GrammarCompiler, constraint: Constraint, stops: Collection[int], owner: str) -> None:
        """Begin to compile a constraint of a request of an owner."""
        self.compiled: Future[CompiledGrammar] = compiler.begin(constraint, owner)
        self._field = constraint.field
        self._owner = owner
        self._compiler = compiler
        self._stops = stops
        self._errors: list[UserError] = []

    def __call__(self) -> TokenConstraint:
        """Return the constraint of a new sample. Raises UserError if it cannot be compiled."""
        return self._compiler.make_matcher(self.compiled.result(), self._stops, self._owner, self._errors)

    def raise_error(self) -> None:
        """Raise a FieldError if the constraint cannot be compiled, or if a sample exceeded its limits."""
        try:
            if self.compiled.done():
                self.compiled.result()
            if self._errors:
                raise self._errors[0]
        except UserError as error:
            raise FieldError(error.message, self._field) from error


class Constraints:
    """The constraints of requests that are about to start or run."""

    def __init__(self, backend: AbstractBackend, capabilities: Capabilities, store: Store) -> None:
        self._backend = backend
        self._capabilities = capabilities
        self._store = store
        self._compiler: GrammarCompiler | None = None
        self._requests: dict[RequestId, RequestConstraint] = {}

    def prepare(self, request_id: RequestId, owner: str, params: SamplingParams) -> bool:
        """Begin to compile the constraint of a request of an owner, and return whether the request can start.

        The engine wakes when the constraint is compiled. Raises UserError if this has failed.
        """
        constraint = params.active_controls.constraint
        if constraint is None:
            return True

        prepared = self._requests.get(request_id)
        if prepared is None:
            eos = self._capabilities.eos_token_ids
            if self._compiler is None:
                read = self._backend.make_tokenizer_reader()
                self._compiler = GrammarCompiler(read, self._capabilities.vocab_size, eos)
            stops = {*params.stop_token_ids, *(eos if params.eos_stops else ())}
            if not stops:
                raise UserError("response_format: the model has no token that ends a sample; send stop_token_ids")
            prepared = RequestConstraint(self._compiler, constraint, stops, owner)
            prepared.compiled.add_done_callback(lambda _: self._store.wake())
            self._requests[request_id] = prepared

        prepared.raise_error()
        return prepared.compiled.done()

    def get(self, request_id: RequestId) -> RequestConstraint | None:
        """Return the constraint of a request that was prepared, or None if it has none."""
        return self._requests.get(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Free the constraint of a request that has ended. Idempotent."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads that compile. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()
