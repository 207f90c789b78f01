"""Clients that compare every token of the hash model with the reference answer."""

from penstock.loadtests.simulator.constraints.random_constraints import is_valid
from penstock.loadtests.simulator.constraints.vocabulary import END, grammars, text_of
from penstock.loadtests.simulator.faults.schedules import RequestPlan
from penstock.loadtests.simulator.model.hash_model import reference_answer
from penstock.loadtests.simulator.world.router import Router
from penstock.router.routing.events import DeliverEnd, EndRequest, Status

LEFT = "left"
"""Value of `HashModelClient.how` after the client has disconnected."""


class HashModelClient:
    """A client with one request whose complete answer is computed in advance."""

    def __init__(self, plan: RequestPlan, max_model_len: int) -> None:
        self.plan = plan
        self.number = plan.number
        self.answers: list[list[int]] = [[] for _ in range(plan.num_choices)]
        self.how = ""  # final status of the request, or "" while it is running
        # Current router, and the id of the request at this router.
        self.at: tuple[Router, int] | None = None
        self._counted: tuple[Router, int] | None = None  # value of `at` when `deliver_cached` ran
        self._finished = [False] * plan.num_choices
        # Choices that the client has cut and the router has not yet cut.
        self._cutting: set[int] = set()
        wanted = plan.constraint
        grammar = None if wanted is None else grammars().compile(wanted)
        answers = [
            reference_answer(plan.prompt, plan.params, max_model_len, choice, grammar)[0]
            for choice in range(plan.num_choices)
        ]
        self._right = [answer[: plan.cut or len(answer)] for answer in answers]

    @property
    def over(self) -> bool:
        return bool(self.how)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    def deliver(self, choice: int, position: int, token: int, finish: int) -> int | None:
        """Take a new token. Return the answer's length if the client cuts the choice here.

        Raises AssertionError for a repeated, out-of-order or wrong token.
        """
        if not self._is_expected(choice, position):
            return None
        assert self._counted == self.at, (
            f"client {self.number}: a token arrived before the number of cached prompt tokens "
            "(`deliver_cached`)"
        )
        answer, cut_at = self.answers[choice], self.plan.cut
        answer.append(token)
        cut = 0 < cut_at <= len(answer) and not finish
        if cut:
            del answer[cut_at:]
        right, who = self._right[choice], f"client {self.number}, choice {choice}"
        assert answer == right[: len(answer)], (
            f"{who}: token {token} at position {position} is wrong: the answer differs from the "
            "expected one"
        )
        self._finished[choice] = cut or bool(finish)
        if not cut:
            return None
        self._cutting.add(choice)
        return cut_at

    def deliver_end(self, end: DeliverEnd) -> None:
        """Process a choice's end that comes without a new token."""
        if self._is_expected(end.choice, end.num_tokens):
            self._finished[end.choice] = True

    def deliver_cached(self, num_tokens: int) -> None:
        """Take the number of cached prompt tokens, delivered once per submission to a router."""
        assert self.how == LEFT or self._counted != self.at, (
            f"client {self.number}: the number of cached prompt tokens was delivered twice for "
            "one submission (`deliver_cached`)"
        )
        assert num_tokens <= len(self.plan.prompt), (
            f"client {self.number}: more prompt tokens were reported as cached than the prompt has"
        )
        self._counted = self.at

    def _is_expected(self, choice: int, position: int) -> bool:
        """Return whether to process a delivery.

        False means that the delivery must be ignored. Raises AssertionError if it is out of order.
        """
        if self.how == LEFT:
            return False  # the router has not yet processed the disconnect
        who, here = f"client {self.number}, choice {choice}", len(self.answers[choice])
        assert not self.over, f"{who}: tokens arrived after the request had ended"
        if choice in self._cutting:
            return False  # rest of a message after the cut, which the production router also drops
        assert not self._finished[choice], f"{who}: tokens arrived after the choice's finish reason"
        assert position == here, f"{who}: a delivery has position {position}, expected {here}"
        return True

    def on_choice_stopped(self, choice: int) -> None:
        """Record that the router has processed the cut. Later tokens of `choice` are errors."""
        self._cutting.discard(choice)

    def end(self, end: EndRequest) -> None:
        if self.how == LEFT:
            return
        assert not self.over, f"client {self.number}: the request ended twice"
        self.how = end.status.value
        if end.status is Status.OK:
            assert self.answers == self._right, (
                f"client {self.number}: the request ended with status OK, but its answers are not "
                "the complete expected answers"
            )
            self._check_constraint()

    @property
    def num_constrained(self) -> int:
        """Number of choices that are complete and satisfy the request's constraint."""
        complete = [answer for answer in self.answers if answer[-1:] == [END]]
        return len(complete) if self.plan.constraint is not None else 0

    def _check_constraint(self) -> None:
        """Raise AssertionError if an answer with an end token violates the constraint."""
        wanted = self.plan.constraint
        if wanted is None:
            return
        for answer in self.answers:
            text, who = text_of(answer), f"client {self.number}"
            assert answer[-1] != END or is_valid(wanted, text), (
                f"{who}: the answer {text!r} violates the request's constraint"
            )

    def leave(self) -> None:
        """Disconnect. From now on, all deliveries are ignored."""
        if not self.over:
            self.how = LEFT

    def check(self, undisturbed: bool) -> None:
        """Raise AssertionError if the plan does not explain the final status.

        Args:
            undisturbed: whether the schedule has no faults, so that fewer statuses are allowed.
        """
        allowed = {"ok", LEFT, "deadline", "overloaded", "invalid"}
        assert self.over, f"client {self.number}: the request never ended"
        assert not undisturbed or self.how in allowed, (
            f"client {self.number}: a request in a schedule without faults ended with the status "
            f"{self.how}, which only a fault explains"
        )
        if self.how in ("deadline", LEFT):
            plan = self.plan
            whys = (plan.deadline, plan.leaves_after, plan.leaves_moving)
            is_resumable = any(why != float("inf") for why in whys)
            assert is_resumable or not plan.resumes, (
                f"client {self.number}: the request ended with the status {self.how}, but it has "
                "no deadline and its client does not leave"
            )
