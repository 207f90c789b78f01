"""Output of `penstock serve`: progress bars on a terminal, and lines of text elsewhere."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from penstock.cli.log_lines import EventLog
from penstock.cluster.status import status_events

MB = 1e6


def sentence(title: str, notice: status_events.StatusEvent) -> str:
    """Return an event as a sentence, or "" if the event is not printed."""
    match notice:
        case status_events.Progress(stage, _, total):
            return f"{title}: {stage}" + (f" ({total / MB:.1f} MB)" if total else "")
        case status_events.Ready(seconds):
            return f"{title}: ready after {seconds:.1f} s"
        case status_events.Died(reason, delay):
            when = f"in {delay:.1f} s" if delay else "at once"
            return f"{title}: {reason}; it is started again {when}"
        case status_events.GivenUp(reason, delay):
            when = f"the next try is in {delay:g} s, and the other processes continue"
            return f"{title}: {reason}; {when}"
        case status_events.Waiting():
            return f"{title}: {notice}"
        case status_events.Draining() | status_events.RoleAssigned():
            return str(notice)
        case status_events.PoolResized(_, text):
            return f"pool {text}"
        case status_events.Stuck(worker, _, reason):
            return f"{title}: worker {worker} is stuck: {reason}"
        case status_events.LogLine(text):
            return text
    return ""


class Lines:
    """Prints status events as lines of text.

    Args:
        print_line: called with each line.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.print_line = print_line
        self._stages: dict[str, str] = {}

    def __call__(self, title: str, notice: status_events.StatusEvent) -> None:
        if isinstance(notice, status_events.Progress):
            # Byte counts change many times per second, so print only one line per stage.
            if self._stages.get(title) == notice.stage:
                return
            self._stages[title] = notice.stage
        text = sentence(title, notice)
        if text:
            self.print_line(text)

    def close(self) -> None:
        pass


class _Bytes(ProgressColumn):
    """A column that shows, while weights are loaded, the number of loaded bytes and the total."""

    def render(self, task: Task) -> Text:
        if not task.total or not task.fields["weights"]:
            return Text("")
        return Text(f"{task.completed / MB:.1f} of {task.total / MB:.1f} MB")


class _Seconds(ProgressColumn):
    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        return Text(f"{seconds or 0.0:5.1f} s", style="progress.elapsed")


class Bars:
    """Shows a progress bar for each process until the cluster is ready, and then prints lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = Lines(self.print_line)
        self._tasks: dict[str, int] = {}
        self._open = True
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("[cyan]{task.fields[stage]}"),
            _Bytes(),
            _Seconds(),
            console=console,
        )

    def print_line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def __call__(self, title: str, notice: status_events.StatusEvent) -> None:
        if self._open and isinstance(notice, status_events.Progress | status_events.Ready):
            self._update_bar(title, notice)
            return
        if self._open and isinstance(notice, status_events.Waiting):
            return  # the progress bar already shows the seconds, so print nothing
        if isinstance(notice, status_events.Serving | status_events.Draining):
            self.close()
        self._lines(title, notice)

    def refresh(self) -> None:
        """Redraw the bars now instead of at the next tick."""
        self._progress.refresh()

    def close(self) -> None:
        """Stop updating the bars. Later events are printed as lines."""
        if self._open:
            self._open = False
            self._progress.stop()

    def _update_bar(self, title: str, notice: status_events.Progress | status_events.Ready) -> None:
        # This hides the cursor. `__init__` must not do so, because an interrupt could follow before
        # the caller has the object whose `close` shows the cursor again.
        self._progress.start()
        if title not in self._tasks:
            self._tasks[title] = self._progress.add_task(title, total=None, stage="", weights=False)
        task = self._progress.tasks[self._tasks[title]]
        if isinstance(notice, status_events.Ready):
            total = task.total or 1
            self._progress.update(task.id, total=total, completed=total, stage="ready")
        elif notice.total and notice.done < notice.total:
            self._progress.update(
                task.id,
                total=notice.total,
                completed=notice.done,
                stage=notice.stage,
                weights=True,
            )
        else:
            self._progress.update(task.id, stage=notice.stage)


View: TypeAlias = Lines | Bars | EventLog


def make_view(log_format: Literal["text", "keys", "json"]) -> View:
    """Return the view for a log format.

    Progress bars are shown only if standard output is a terminal.
    """
    if log_format != "text":
        return EventLog(log_format, _print)
    console = Console()
    return Bars(console) if console.is_terminal else Lines(_print)


def _print(text: str) -> None:
    print(text, flush=True)
