"""Environment variables of the shell that reach routers and workers."""

from penstock.cluster.processes.environment import child_environment

SHELL = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "CUDA_VISIBLE_DEVICES": "0",
    "RAY_AUTH_TOKEN": "token",
    "PENSTOCK_API_KEY": "key",
    "PENSTOCK_LEAVE_FOLDER": "/leave",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "hf",
    "HF_HOME": "/hf",
    "PATHOLOGY": "not PATH",
    "http_proxy": "http://user:password@proxy",
}


def test_only_known_settings_are_passed_on() -> None:
    passed = child_environment(SHELL, SHELL, secret={"PENSTOCK_API_KEY"})
    assert passed.keys() == {
        *("PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "RAY_AUTH_TOKEN", "PENSTOCK_LEAVE_FOLDER"),
        *("HF_HOME", "HF_HUB_OFFLINE"),
    }


def test_named_variables_are_passed_on_but_never_keys() -> None:
    names = {"HF_TOKEN", "PENSTOCK_API_KEY", "UNSET"}
    passed = child_environment(SHELL, SHELL, names, {"PENSTOCK_API_KEY"})
    assert passed["HF_TOKEN"] == "hf"
    assert "PENSTOCK_API_KEY" not in passed
    assert "UNSET" not in passed


def test_hub_cannot_be_reached_whatever_the_shell_says() -> None:
    assert child_environment({}, {})["HF_HUB_OFFLINE"] == "1"
    shell = {"HF_HUB_OFFLINE": "0"}
    assert child_environment(shell, shell, {"HF_HUB_OFFLINE"})["HF_HUB_OFFLINE"] == "1"


def test_variables_that_ray_sets_are_kept() -> None:
    wanted = {**SHELL, "SOMETHING_OF_RAY": "1", "PATHOLOGY": "changed by Ray"}
    passed = child_environment(wanted, SHELL)
    assert passed["SOMETHING_OF_RAY"] == "1"
    assert passed["PATHOLOGY"] == "changed by Ray"
