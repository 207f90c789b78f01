"""What a client of the fold model sees, and what it must see."""

from penstock.loadtests.simulate.fold import straight_answer
from penstock.loadtests.simulate.router import Router
from penstock.loadtests.simulate.schedules import RequestPlan
from penstock.router.routing.events import Cut, Deliver, End, Finish, Status
from penstock.workers.scheduling.sequence import SamplingParams

LEFT = "left"
"""How a client ends that went away."""


class FoldClient:
    """One client with one request, for whom every token is known beforehand."""

    def __init__(self, plan: RequestPlan, max_model_len: int) -> None:
        self.plan = plan
        self.number = plan.number
        self.answer: list[int] = []
        self.how = ""  # it ended; empty while it has not
        self.at: tuple[Router, int] | None = None  # where it asks, and its number there
        self._finished = False
        params = SamplingParams(max_tokens=plan.max_tokens, stop_tokens=plan.stop_tokens)
        self._right, _ = straight_answer(plan.prompt, params, max_model_len)
        if 0 < plan.cut < len(self._right):
            self._right = self._right[: plan.cut]
        else:
            self._right = list(self._right)

    @property
    def over(self) -> bool:
        return bool(self.how)

    def deliver(self, deliver: Deliver) -> Cut | None:
        """Take tokens; AssertionError for a position twice, out of order or wrong."""
        number, here = self.number, len(self.answer)
        if self.how == LEFT:
            return None  # its router has not noticed yet
        assert not self.over, f"client {number}: tokens after the end"
        assert not self._finished or not deliver.tokens, f"client {number}: more after the last"
        assert deliver.position == here, (
            f"client {number}: position {deliver.position} came where {here} was due"
        )
        self.answer.extend(deliver.tokens)
        plan = self.plan
        cut = 0 < plan.cut <= len(self.answer) and not deliver.finish
        if cut:
            del self.answer[plan.cut :]
        assert self.answer == self._right[: len(self.answer)], (
            f"client {number}: position {here} is {deliver.tokens}, not the reference's"
        )
        self._finished = cut or deliver.finish is not Finish.NONE
        return Cut(deliver.request, deliver.choice, plan.cut) if cut else None

    def end(self, end: End) -> None:
        if self.how == LEFT:
            return
        assert not self.over, f"client {self.number}: ended twice"
        self.how = end.status.value
        if end.status is Status.OK:
            assert self.answer == self._right, f"client {self.number}: OK, but not the whole answer"

    def leave(self) -> None:
        """It goes, and hears nothing more."""
        if not self.over:
            self.how = LEFT

    def check(self, undisturbed: bool) -> None:
        """AssertionError if it ended in a way that nothing explains."""
        allowed = {"ok", LEFT, "deadline", "overloaded", "invalid"}
        assert self.over, f"client {self.number}: no end"
        assert not undisturbed or self.how in allowed, f"client {self.number}: {self.how}"
        if self.how in ("deadline", LEFT):
            plan = self.plan
            whys = (plan.deadline, plan.leaves_after, plan.leaves_moving)
            asked = any(why != float("inf") for why in whys)
            assert asked or not plan.resumes, f"client {self.number}: {self.how} unasked"
