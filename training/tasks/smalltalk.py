"""Question families: greetings, questions about the model, and unanswerable questions."""

from __future__ import annotations

from random import Random

from training.tasks.base import Example, family
from training.tasks.words import listed

ABILITIES = (
    "I can add and subtract, sort and copy lists, find facts in a text, extract JSON, "
    "tell days and units, and tell short stories."
)
UNKNOWN = "I am only a small demo model and I do not know that. " + ABILITIES
_OPEN = ("", "Hello! ", "Hi! ", "Good morning. ", "Please, ", "Sorry, ", "Hey, ", "So, ", "Okay, ")
_CLOSE = ("", " Thanks.", " Please tell me.", " I am curious.")

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello",
            "Hi",
            "Hello there",
            "Hi there",
            "Hey",
            "Good morning",
            "Good evening",
            "Good day",
        ),
        "Hello! I am Penstock's demo model. How can I help you?",
    ),
    (
        ("who are you?", "what are you?", "what is your name?", "who am I talking to?"),
        "I am Penstock's demo model: a very small language model that was trained in an hour "
        "on two CPU cores.",
    ),
    (
        (
            "what can you do?",
            "how can you help me?",
            "what are you able to do?",
            "what can I ask you?",
        ),
        ABILITIES,
    ),
    (
        ("how are you?", "how is it going?", "are you well?"),
        "I am fine, thank you. How can I help you?",
    ),
    (("thank you", "thanks", "thanks a lot", "many thanks"), "You are welcome!"),
    (("goodbye", "bye", "see you later", "good night"), "Goodbye!"),
)
_QUESTIONS = (
    "What is the capital of {topic}?",
    "Who invented {topic}?",
    "Explain {topic} to me.",
    "What do you think about {topic}?",
    "Write a poem about {topic}.",
    "Why is {topic} so important?",
    "Translate {topic} to French.",
    "When was {topic} discovered?",
    "Tell me about {topic}.",
    "What is {topic}?",
    "How does {topic} work?",
)
_TOPICS = listed(
    "France Brazil Egypt Japan gravity light electricity history music football chess philosophy "
    "love politics weather money science religion physics chemistry painting cooking Mars Europe "
    "Africa computers bread paper television bicycles medicine mathematics"
)


def _varied(rng: Random, question: str) -> str:
    text = rng.choice(_OPEN) + question
    if text[-1] not in "?.!":
        text += rng.choice((".", "!", ""))
    text += rng.choice(_CLOSE) if text[-1] == "?" else ""
    return text[0].upper() + text[1:]


@family(weight=0.4)
def small_talk(rng: Random) -> Example:
    """Greetings and questions about the model: new wordings of a few known answers."""
    questions, answer = rng.choice(_TALK)
    return Example(_varied(rng, rng.choice(questions)), answer)


@family(weight=0.2)
def unknown(rng: Random) -> Example:
    """Questions that no other family covers. The model says that it does not know the answer."""
    question = rng.choice(_QUESTIONS).format(topic=rng.choice(_TOPICS))
    return Example(question, UNKNOWN)
