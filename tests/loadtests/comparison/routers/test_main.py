from pathlib import Path

import pytest

from penstock.loadtests.comparison.environments import NotInstalled
from penstock.loadtests.comparison.routers import __main__ as routers
from penstock.loadtests.comparison.routers.__main__ import Options, main, table
from penstock.loadtests.comparison.routers.figures import DIRECT, Sample, summary
from tests.support.refusals import assert_refused


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--routers", "nginx"], "unknown router 'nginx': expected one of sglang-router, litellm"),
        (["--rounds", "0"], "must be at least 1"),
        (["--probes", "0"], "must be at least 1"),
        (["--step-ms", "0"], "must be above 0 and finite"),
        (["--idle-seconds", "nan"], "must be above 0 and finite"),
        (["--save-json", "/nowhere/x.json"], "--save-json /nowhere/x.json: its folder does not"),
        (["--streams", "many"], "invalid int value"),
        (["--peers", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_give_a_one_line_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(main, flags, message, capsys)


def test_missing_environments_are_named_with_the_command_that_installs_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--routers", "litellm", "sglang-router"]) == 2
    error = capsys.readouterr().err
    command = "python -m penstock.loadtests.comparison.routers --install"
    assert f"Run `{command} --routers sglang-router litellm`" in error
    assert error.count("\n") == 1


def test_install_installs_the_chosen_environments_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(routers, "python_of", lambda environment, _: Path(environment.name))
    assert main(["--install", "--routers", "litellm"]) == 0
    assert capsys.readouterr().out == "litellm: litellm\n"


def test_failed_installation_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python_of(*_: object) -> Path:
        raise NotInstalled("installing litellm failed")

    monkeypatch.setattr(routers, "python_of", python_of)
    assert main(["--install"]) == 1
    assert "installing litellm failed" in capsys.readouterr().err


def test_routers_keep_the_order_of_the_comparison() -> None:
    chosen = Options(routers=("ray-serve", "sglang-router")).chosen()
    assert [router.name for router in chosen] == ["sglang-router", "ray-serve"]


def test_table_has_a_line_per_router_and_omits_what_was_not_measured() -> None:
    sample = Sample(41.5e-6, 0.02, 1.0, 0.002, 0.01)
    rows = summary([{DIRECT: sample, "penstock": sample}], "penstock")
    text = table(rows, {DIRECT: "the stub alone", "penstock": "Penstock"})
    head, _, line = text.splitlines()
    assert "max tokens/s" not in head
    assert line.split("  ")[0] == "Penstock"
    assert "41.5 (41.5 to 41.5)" in line
    assert line.endswith("1.00          0.020")
