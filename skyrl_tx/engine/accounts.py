"""The account of each request: the owner, the key and the project for which its work counts."""

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store import allowances
from skyrl_tx.store.database import Store
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Account


class Accounts:
    """Looks up sessions once, and only while a key or a project has a quota: the owner is in the request."""

    def __init__(self, store: Store, view: QuotaView) -> None:
        self._store = store
        self._view = view
        self._of_session: dict[SessionId, Account] = {}

    def forget(self) -> None:
        """Look up all sessions again: they may have moved to other projects."""
        self._of_session.clear()

    def of(self, queued: QueuedRequest) -> Account:
        """Return the account of a request."""
        return self.of_session(queued.session_id, queued.owner)

    def of_session(self, session_id: SessionId, owner: str) -> Account:
        """Return the account of a session of an owner."""
        if not self._view.rules.concern_sessions:
            return Account(owner)
        found = self._of_session.get(session_id)
        if found is None:
            known = self._store.read(lambda tx: allowances.account_of(tx, session_id))
            found = self._of_session[session_id] = known or Account(owner)
        return found
