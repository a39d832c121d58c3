"""What unnamed samplers take on the disk, and which of them follow their model."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger))
    op.add_column("sampling_sessions", sa.Column("is_inflight", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Remove the columns."""
    op.drop_column("sampling_sessions", "is_inflight")
    op.drop_column("sampling_sessions", "size_bytes")
