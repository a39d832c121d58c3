"""Plans of a model share the traces that count its memory use."""

from tests.support.shared_traces import share_traces as share_traces
