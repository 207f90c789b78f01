"""What the router's log says of requests and workers."""

import logging
import re

from penstock.router.observability.request_metrics import FinishedRequest
from penstock.router.routing import events as ev

log = logging.getLogger(__name__)

NOT_CLIENT_SAFE = re.compile(r"[\n\\]|/\w|0x|File ")


def client_safe_message(message: str) -> str:
    """What a worker said, if a client may see it: no paths, no addresses, one line."""
    if message and len(message) < 400 and not NOT_CLIENT_SAFE.search(message):
        return message
    log.error("a request ended with: %s", message)
    return "the request failed on its worker: the server's log tells more"


def log_ended(ended: FinishedRequest | None) -> None:
    """An event for every request, with none of its content."""
    if ended is None or not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "request": ended.request.external_id,
        "tenant": ended.tenant,
        "reason": ended.reason,
        "prompt_tokens": len(ended.request.prompt),
        "answer_tokens": ended.num_tokens,
        "queued_seconds": ended.queued,
        "first_token_seconds": ended.first_token,
        "seconds": ended.seconds,
    }
    log.info("request", extra={"fields": fields})


def log_submit(submit: ev.Submit) -> None:
    """An event for every worker that a request is given to."""
    if log.isEnabledFor(logging.INFO):
        fields = {
            "request": submit.request.external_id,
            "attempt": submit.attempt,
            "worker": submit.worker,
            "source": submit.source.worker if submit.source is not None else None,
        }
        log.info("placed", extra={"fields": fields})


def log_worker(event: ev.Event) -> None:
    """An event for a worker that came, went, or got another role; others: nothing."""
    match event:
        case ev.WorkerUp(info):
            fields = {"worker": info.worker, "role": info.role, "incarnation": info.incarnation}
            log.info("worker_up", extra={"fields": fields})
        case ev.WorkerLost(worker):
            log.info("worker_gone", extra={"fields": {"worker": worker}})
        case ev.RoleChanged(worker, role):
            log.info("role", extra={"fields": {"worker": worker, "role": role}})
