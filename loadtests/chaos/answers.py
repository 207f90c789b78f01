"""What a client heard, and whether it is what an undisturbed cluster says. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.loadtests.chaos.request_mix import ChaosRequest
from penstock.protos import inference_pb2 as pb

Scores = tuple[float, int, tuple[tuple[int, float], ...]]
"""The chosen token's log probability, its rank, and the best with theirs."""

ROUNDING = 1e-3
"""Log probabilities of one position computed in two batches differ by less."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    stopped_by: str = ""
    num_received: int = 0  # positions, in the call that is under way

    def take(self, reply: pb.GenerateReply) -> Iterator[str]:
        """Take a reply; yields what is wrong with it."""
        if self.finish:
            yield "something came after its finish"
        if reply.tokens and reply.position != self.num_received:
            yield f"position {reply.position} came where {self.num_received} was to come"
        for token in reply.tokens:
            if self.num_received == len(self.tokens):
                self.tokens.append(token)
            elif self.tokens[self.num_received] != token:
                yield f"another token came for position {self.num_received}, asked again"
            self.num_received += 1
        self.scores += map(_scores, reply.logprobs)
        self.text += reply.text
        self.finish, self.stopped_by = reply.finish_reason, reply.stop_reason

    def restart(self) -> None:
        """The same is asked anew: what is known has to come again."""
        self.scores, self.text, self.finish, self.num_received = [], "", "", 0


@dataclass(slots=True)
class Stream:
    """One call of one client. Times are seconds since 1970."""

    name: str
    request: ChaosRequest
    began: float
    ended: float = float("inf")
    arrivals: list[float] = field(default_factory=list)  # of new tokens
    choices: dict[int, Choice] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    error: str = ""  # that it ended with

    def take(self, reply: pb.GenerateReply, now: float) -> None:
        choice = self.choices.setdefault(reply.choice, Choice())
        if reply.tokens:
            self.arrivals.append(now)
        self.problems += choice.take(reply)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer left the one it should be: to be judged."""

    request: ChaosRequest
    choice: int
    before: tuple[int, ...]  # tokens of the answer up to there
    right: int
    wrong: int


def compare(stream: Stream, right: Stream, exact: bool) -> tuple[list[str], list[Divergence]]:
    """What is wrong with a complete answer, and where it took another token.

    exact: to the last bit; else what follows another token is not looked at.
    """
    problems, divergences = list(stream.problems), []
    if stream.choices.keys() != right.choices.keys():
        problems.append(f"choices {sorted(stream.choices)}, not {sorted(right.choices)}")
    for number, choice in stream.choices.items():
        known = right.choices.get(number)
        if known is None:
            continue
        divergence = _divergence(stream.request, number, choice, known)
        if divergence is not None and not exact:
            divergences.append(divergence)
        elif (difference := _difference(choice, known, exact)) is not None:
            problems.append(f"choice {number}: {difference}")
    return problems, divergences


def _divergence(
    request: ChaosRequest, number: int, choice: Choice, known: Choice
) -> Divergence | None:
    pairs = zip(choice.tokens, known.tokens, strict=False)
    for position, (own, right) in enumerate(pairs):
        if own != right:
            return Divergence(request, number, tuple(known.tokens[:position]), right, own)
    return None


def _difference(choice: Choice, known: Choice, exact: bool) -> str | None:
    if choice.tokens != known.tokens:
        return f"{len(choice.tokens)} tokens, not the {len(known.tokens)} that it should have"
    for name in ("text", "finish", "stopped_by"):
        if getattr(choice, name) != getattr(known, name):
            return f"{name} is {getattr(choice, name)!r}, not {getattr(known, name)!r}"
    if len(choice.scores) != len(known.scores):
        return f"{len(choice.scores)} log probabilities, not {len(known.scores)}"
    for position, (own, right) in enumerate(zip(choice.scores, known.scores, strict=True)):
        if (own != right) if exact else abs(own[0] - right[0]) > ROUNDING:
            return f"log probabilities of position {position} differ"
    return None


def near_tie(divergence: Divergence, scores: Scores, noise: Mapping[int, float]) -> float | None:
    """How far apart the two tokens were when one was drawn; None if that cannot be told.

    scores: of that position, undisturbed, with so many best that both are among them; noise: what
    the draw adds to each of the two.
    """
    sampling = divergence.request.sampling
    known = dict(scores[2])
    if not {divergence.right, divergence.wrong} <= known.keys():
        return None
    heat = sampling["temperature"] or 1.0

    def weight(token: int) -> float:
        count = divergence.before.count(token)
        penalty = sampling.get("frequency_penalty", 0.0) * count
        penalty += sampling.get("presence_penalty", 0.0) * bool(count)
        return float((known[token] - penalty) / heat + noise.get(token, 0.0))

    return abs(weight(divergence.right) - weight(divergence.wrong))


def _scores(entry: pb.TokenLogprob) -> Scores:
    return entry.chosen, entry.rank, tuple((each.token, each.logprob) for each in entry.top)
