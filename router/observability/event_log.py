"""Logs a router's requests and worker changes; hides unsafe error messages from clients."""

import logging
import re

from penstock.router.observability.request_metrics import FinishedRequest
from penstock.router.routing import events as ev

log = logging.getLogger(__name__)

NOT_CLIENT_SAFE = re.compile(r"[\n\\]|/\w|0x|File |\d+(\.\d+){3}")


def is_client_safe(message: str) -> bool:
    """Return whether a message is one short line without paths, pointers and IP addresses."""
    return bool(message) and len(message) < 400 and not NOT_CLIENT_SAFE.search(message)


def client_safe_message(message: str) -> str:
    """Return a worker's error message if it is safe for clients, else a generic message.

    Messages that are not safe are only logged.
    """
    if is_client_safe(message):
        return message
    log.error("a request failed on its worker: %s", message)
    return "the request failed on its worker: see the server's log"


def log_ended(ended: FinishedRequest | None) -> None:
    """Log the end of a request, without its content."""
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
    """Log that a request is submitted to a worker."""
    if log.isEnabledFor(logging.INFO):
        fields = {
            "request": submit.request.external_id,
            "attempt": submit.attempt,
            "worker": submit.worker,
            "source": submit.source.worker if submit.source is not None else None,
        }
        log.info("placed", extra={"fields": fields})


def log_worker(event: ev.Event) -> None:
    """Log that a worker was connected, lost or given another role; ignore other events."""
    match event:
        case ev.WorkerUp(info):
            fields = {"worker": info.worker, "role": info.role, "incarnation": info.incarnation}
            log.info("worker_up", extra={"fields": fields})
        case ev.WorkerLost(worker):
            log.info("worker_gone", extra={"fields": {"worker": worker}})
        case ev.RoleChanged(worker, role):
            log.info("role", extra={"fields": {"worker": worker, "role": role}})


def log_drain(is_drained: bool, by: str) -> None:
    """Log that an operator has begun or ended a drain; `by` is the name of the API key."""
    log.info("drain", extra={"fields": {"drain": is_drained, "by": by}})
