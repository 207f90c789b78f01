"""Checks of the source tree: packages, symlinks, import direction, and no code from data."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "kernels", "loadtests", "protos", "router", "workers")

MAY_IMPORT = {
    "common": set(),
    "protos": {"common"},
    "kernels": {"common"},
    "workers": {"kernels", "protos", "common"},
    "router": {"protos", "common"},
    "cluster": {"router", "workers", "protos", "common"},
    "loadtests": {"kernels", "workers", "router", "cluster", "protos", "cli", "common"},
    "cli": {"cluster", "router", "workers", "protos", "loadtests", "common"},
}
"""Packages that each package may import besides itself."""

SHARED_RECORDS = {
    "penstock.common.block_hash",
    "penstock.common.invalid_parameter",
    "penstock.common.number_text",
    "penstock.common.sampling_params",
    "penstock.common.structured_outputs",
    "penstock.common.thinking_budget",
    "penstock.common.worker_load",
}
"""Modules of `common` without I/O, which deciding code may import."""

DECIDING = {
    "penstock.common.block_hash": {"numpy"},
    "penstock.common.invalid_parameter": set(),
    "penstock.common.number_text": set(),
    "penstock.common.sampling_params": {
        *("penstock.common.invalid_parameter", "penstock.common.number_text"),
        *("penstock.common.structured_outputs", "penstock.common.thinking_budget"),
        "penstock.common.token_ids",
    },
    "penstock.common.structured_outputs": {"penstock.common.invalid_parameter"},
    "penstock.common.thinking_budget": {
        *("penstock.common.invalid_parameter", "penstock.common.number_text"),
    },
    "penstock.common.token_ids": {
        *("numpy", "penstock.common.invalid_parameter", "penstock.common.number_text"),
    },
    "penstock.common.worker_load": set(),
    "penstock.workers.scheduling": {"numpy", *SHARED_RECORDS},
    "penstock.workers.kv_transfer.shards": {"penstock.workers.scheduling.sequence"},
    "penstock.workers.kv_transfer.protocol": {
        *("penstock.workers.kv_transfer.shards", "penstock.workers.scheduling.sequence"),
    },
    "penstock.common.argument_notation": set(),
    "penstock.common.schema_types": set(),
    "penstock.router.parsers": {
        *("penstock.common.argument_notation", "penstock.common.schema_types"),
    },
    "penstock.router.routing": {"numpy", *SHARED_RECORDS},
    "penstock.cluster.spec.labels": set(),
    "penstock.cluster.spec.records": set(),
    "penstock.cluster.spec.router_spec": {"penstock.cluster.spec.records"},
    "penstock.cluster.spec.spec": {
        "penstock.cluster.spec.labels",
        "penstock.cluster.spec.records",
        "penstock.cluster.spec.router_spec",
        "penstock.router.parsers",
    },
    "penstock.cluster.placement.packing": {
        "penstock.cluster.spec.labels",
        "penstock.cluster.spec.spec",
    },
    "penstock.cluster.placement.placement_plan": {
        *(
            "penstock.cluster.spec.labels",
            "penstock.cluster.placement.packing",
            "penstock.cluster.spec.spec",
        ),
    },
    "penstock.cluster.processes.backoff": set(),
    "penstock.cluster.autoscaling.autoscaler": {
        *(
            "penstock.cluster.autoscaling.arrival_rate",
            "penstock.cluster.autoscaling.gpu_budget",
            "penstock.cluster.autoscaling.late_work",
            *SHARED_RECORDS,
        ),
    },
    "penstock.cluster.autoscaling.arrival_rate": set(),
    "penstock.cluster.autoscaling.gpu_budget": set(),
    "penstock.cluster.autoscaling.late_work": set(),
    "penstock.cluster.autoscaling.pool_changes": set(),
    "penstock.cluster.autoscaling.cold_start": {"penstock.cluster.autoscaling.pool_changes"},
    "penstock.cluster.status.status_events": set(),
}
"""Imports that deciding code (without I/O and clock) may use besides the standard library."""

SOURCES = sorted(
    path
    for folder in (*PACKAGES, "penstock/cli", "penstock/common")
    for path in (ROOT / folder).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "penstock" else parts
    return ".".join(("penstock", *(part for part in parts if part != "__init__")))


TREES = {name_of(path): ast.parse(path.read_text(), str(path)) for path in SOURCES}


def imports(module: str) -> Iterator[str]:
    """Yield the full names of all modules that a module imports, at any level."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: write penstock.…"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in TREES else str(node.module)


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_penstock_holds_exactly_the_links() -> None:
    links = {
        path.name: str(path.readlink())
        for path in (ROOT / "penstock").iterdir()
        if path.is_symlink()
    }
    assert links == {package: f"../{package}" for package in PACKAGES}
    others = {path.name for path in (ROOT / "penstock").iterdir()} - links.keys() - {"__pycache__"}
    assert others == {"__init__.py", "py.typed", "cli", "common", "models"}


def test_no_root_folder_has_an_init_file() -> None:
    # An `__init__.py` would make the folder shadow an installed package of the same name.
    folders = (*PACKAGES, "penstock/common")
    assert [
        str(path) for package in folders for path in (ROOT / package).rglob("__init__.py")
    ] == []


def test_no_document_has_merge_conflict_markers() -> None:
    marks = tuple(sign * 7 + " " for sign in "<>|")
    texts = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    found = [
        f"{path.name}: {line}"
        for path in texts
        for line in path.read_text().splitlines()
        if line.startswith(marks)
    ]
    assert found == []


def outside(module: str, allowed: set[str]) -> set[str]:
    """Return the imports of a module that are neither in `allowed` nor below one of its entries."""
    return {
        name
        for name in imports(module)
        if not any(name == each or name.startswith(f"{each}.") for each in allowed)
    }


def test_packages_import_only_what_they_may() -> None:
    wrong = {}
    for module in TREES:
        internal = {name for name in imports(module) if name.startswith("penstock.")}
        packages = {package_of(name) for name in internal} - {package_of(module)}
        wrong[module] = packages - MAY_IMPORT[package_of(module)]
    assert not {module: packages for module, packages in wrong.items() if packages}


HELD_OUT_QUESTIONS = "penstock.loadtests.quality.questions"
"""This module runs in the source tree only, because its questions are those of `training`."""


def test_nothing_is_imported_by_its_folder_name() -> None:
    folders = {*PACKAGES, "training", "tests"}
    tops = {module: {name.split(".")[0] for name in imports(module)} for module in TREES}
    assert {module for module, top in tops.items() if top & folders} == {HELD_OUT_QUESTIONS}
    assert tops[HELD_OUT_QUESTIONS] & folders == {"training"}


RAY_SERVE = "penstock.loadtests.comparison.routers.adapters.on_ray_serve"
"""This module runs under the interpreter and with the Ray of another environment."""


def test_ray_and_torch_stay_in_their_packages() -> None:
    for module in TREES:
        top = {name.split(".")[0] for name in imports(module)}
        if package_of(module) != "cluster" and module != RAY_SERVE:
            assert "ray" not in top, module
        if package_of(module) in ("router", "cluster", "cli", "protos", "common"):
            assert not top & {"torch", "triton"}, module


COMPILE_TEMPLATES = ("penstock.common.text.chat_renderer", "penstock.common.text.chat_template")


def test_only_helper_processes_compile_chat_templates() -> None:
    users = {module for module in TREES if {*COMPILE_TEMPLATES} & {*imports(module)}}
    assert users == {
        "penstock.common.text.chat_renderer",
        "penstock.router.helpers.main",
        "penstock.router.requests.render_job",
    }


def test_common_imports_only_allowed_packages() -> None:
    allowed = {*sys.stdlib_module_names, "penstock.common", "numpy"}
    more = {"text": {"tokenizers", "jinja2"}, "grammar": {"llguidance"}}
    for module in TREES:
        if package_of(module) == "common":
            folder = module.split(".")[2]
            assert not outside(module, allowed | more.get(folder, set())), module


def test_deciding_code_imports_no_io_clock_or_threads() -> None:
    acting = {"asyncio", "threading", "socket", "subprocess", "time", "random", "os", "logging"}
    for module, others in DECIDING.items():
        allowed = {*(sys.stdlib_module_names - acting), *others, module}
        packages = [name for name in TREES if name == module or name.startswith(f"{module}.")]
        assert packages, f"{module} does not exist"
        assert not {name: unexpected for name in packages if (unexpected := outside(name, allowed))}


def test_no_import_cycles() -> None:
    edges = {module: {name for name in imports(module) if name in TREES} for module in TREES}
    while leaves := {module for module, below in edges.items() if not below & edges.keys()}:
        for leaf in leaves:
            del edges[leaf]
    assert not edges, f"modules in an import cycle, or importing one: {sorted(edges)}"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"),
    *("os.system", "os.popen"),
}


def test_no_code_is_loaded_from_data() -> None:
    for module, tree in TREES.items():
        assert not {name.split(".")[0] for name in imports(module)} & FORBIDDEN_MODULES, module
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & FORBIDDEN_CALLS, module


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.common.text.tokenizer", ("torch", "ray", "grpc", "numpy", "penstock.protos")),
        ("penstock.router.server", ("torch", "ray", "jinja2")),
        ("penstock.router.helpers.main", ("torch", "ray", "grpc", "starlette", "uvicorn")),
        ("penstock.workers.scheduling.batcher", ("torch", "ray", "grpc")),
        ("penstock.workers.kv_transfer.protocol.receive", ("torch", "ray", "grpc")),
        ("penstock.workers.kv_transfer.protocol.send", ("torch", "ray", "grpc")),
        ("penstock.router.routing.dispatcher", ("torch", "ray", "grpc")),
        ("penstock.workers.models.spec", ("torch", "ray", "numpy")),
        ("penstock.cluster.supervisor", ("torch",)),
        ("penstock.cluster.placement.placement_plan", ("torch", "ray")),
        ("penstock.cli", ("torch", "ray", "grpc", "rich", "yaml")),
        ("penstock.cli.serve", ("torch", "ray", "grpc", "huggingface_hub")),
        ("penstock.cli.chat", ("torch", "ray")),
        ("penstock.cli.status", ("torch", "ray", "grpc")),
    ],
)
def test_import_does_not_load_unneeded_packages(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
