"""The order of answers, cancelled samples, and the copies of sampling clients."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.create_table(
        "answer_counter",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO answer_counter (id, value) VALUES (1, 0)")
    op.add_column("requests", sa.Column("answer_order", sa.BigInteger))
    op.create_index("ix_requests_answers", "requests", ["answer_order"])
    op.create_index("ix_requests_sampling_session_answers", "requests", ["sampling_session_id", "answer_order"])
    op.create_table(
        "cancellations",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("request_id", sa.String, nullable=False),
        sqlite_autoincrement=True,
    )
    op.add_column("sampling_sessions", sa.Column("num_clones", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("sampling_sessions", "num_clones")
    op.drop_table("cancellations")
    op.drop_index("ix_requests_sampling_session_answers", "requests")
    op.drop_index("ix_requests_answers", "requests")
    op.drop_column("requests", "answer_order")
    op.drop_table("answer_counter")
