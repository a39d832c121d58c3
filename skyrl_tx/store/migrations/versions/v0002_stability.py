"""What samplers record of the sequences they draw."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "stability",
        sa.Column("sequence_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("prompt_length", sa.Integer, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
    )
    op.create_index("ix_stability_last_used_at", "stability", ["last_used_at"])


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("stability")
