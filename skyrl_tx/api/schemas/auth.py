"""Keys and tokens."""

from skyrl_tx.api.schemas.base import Answer


class TokenAnswer(Answer):
    """A token that stands for the key which was shown; its claims say whose it is."""

    jwt: str


class Organization(Answer):
    """Who runs the server."""

    name: str


class User(Answer):
    """Whose key it is; the client has a place for an address only."""

    email: str


class KeyDetails(Answer):
    """Whom a key belongs to."""

    org_details: Organization
    user_details: User


class KeyAnswer(Answer):
    """What is known of the key that was shown."""

    key_id: int
    name: str
    note: str
    details: KeyDetails
