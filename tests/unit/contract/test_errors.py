"""Messages of errors: printable, bounded, and accepted by every database."""

import pickle

from skyrl_tx.contract.errors import MAX_MESSAGE_CHARS, CapacityError, UserError


def test_text_of_clients_in_messages_is_escaped_and_bounded() -> None:
    assert UserError("loss_fn a\0\ud800\x1b: unknown").message == "loss_fn a\\x00\\ud800\\x1b: unknown"
    error = CapacityError("x" * 10**6)
    assert len(error.message) < MAX_MESSAGE_CHARS + 50 and error.message.endswith("… (1,000,000 characters)")
    assert str(error) == error.message and pickle.loads(pickle.dumps(error)).message == error.message
