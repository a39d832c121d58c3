"""Plans of one model share the traces by which they count its memory."""

from tests.support.shared_traces import share_traces as share_traces
