"""Totals of the dispatcher, for metrics and the cluster status."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start of the router."""

    num_failovers: int = 0  # number of requests that restarted because their worker was lost
    num_transfers: int = 0  # number of completed KV transfers
    num_transfers_failed: int = 0
    num_gaps: int = 0
    num_workers_lost: int = 0
