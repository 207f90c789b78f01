"""The layout of the tree: packages and links, imports that point downward, no code from data."""

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
"""The packages that each package may import beside itself."""

SHARED_RECORDS = {
    "penstock.common.block_hash",
    "penstock.common.sampling_params",
    "penstock.common.worker_load",
}
"""The pure part of `common`, which deciding code may import."""

DECIDING = {
    "penstock.common.block_hash": {"numpy"},
    "penstock.common.sampling_params": set(),
    "penstock.common.worker_load": set(),
    "penstock.workers.scheduling": {"numpy", *SHARED_RECORDS},
    "penstock.router.routing": {"numpy", *SHARED_RECORDS},
    "penstock.cluster.spec.labels": set(),
    "penstock.cluster.spec.records": set(),
    "penstock.cluster.spec.spec": {
        "yaml",
        "penstock.cluster.spec.labels",
        "penstock.cluster.spec.records",
    },
    "penstock.cluster.placement.packing": {
        "penstock.cluster.spec.labels",
        "penstock.cluster.spec.spec",
    },
    "penstock.cluster.placement.placement": {
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
            "penstock.cluster.autoscaling.late_work",
            *SHARED_RECORDS,
        ),
    },
    "penstock.cluster.autoscaling.arrival_rate": set(),
    "penstock.cluster.autoscaling.late_work": set(),
    "penstock.cluster.autoscaling.pool_changes": set(),
    "penstock.cluster.autoscaling.cold_start": {"penstock.cluster.autoscaling.pool_changes"},
    "penstock.cluster.status.status_events": set(),
}
"""What deciding code may import beside the standard library and itself."""

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
    """Everything that a module imports, anywhere in it, as full names of modules."""
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
    # It would shadow an installed package of that name for whoever runs from the root.
    folders = (*PACKAGES, "penstock/common")
    assert [
        str(path) for package in folders for path in (ROOT / package).rglob("__init__.py")
    ] == []


def test_no_text_has_the_marks_of_a_merge() -> None:
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
    """What a module imports that is neither in nor below `allowed`."""
    return {
        name
        for name in imports(module)
        if not any(name == each or name.startswith(f"{each}.") for each in allowed)
    }


def test_packages_import_only_what_they_may() -> None:
    wrong = {}
    for module in TREES:
        ours = {name for name in imports(module) if name.startswith("penstock.")}
        packages = {package_of(name) for name in ours} - {package_of(module)}
        wrong[module] = packages - MAY_IMPORT[package_of(module)]
    assert not {module: packages for module, packages in wrong.items() if packages}


def test_nothing_is_imported_by_its_folder_name() -> None:
    folders = {*PACKAGES, "training", "tests"}
    tops = {module: {name.split(".")[0] for name in imports(module)} for module in TREES}
    assert not {module for module, top in tops.items() if top & folders}


def test_ray_and_torch_stay_in_their_packages() -> None:
    for module in TREES:
        top = {name.split(".")[0] for name in imports(module)}
        if package_of(module) != "cluster":
            assert "ray" not in top, module
        if package_of(module) in ("router", "cluster", "cli", "protos", "common"):
            assert not top & {"torch", "triton"}, module


def test_common_imports_no_more_than_it_should() -> None:
    allowed = {*sys.stdlib_module_names, "penstock.common", "numpy"}
    text = {*allowed, "tokenizers", "jinja2"}
    for module in TREES:
        if package_of(module) == "common":
            is_text = module.startswith("penstock.common.text.")
            assert not outside(module, text if is_text else allowed), module


def test_deciding_code_imports_nothing_that_acts() -> None:
    acting = {"asyncio", "threading", "socket", "subprocess", "time", "random", "os", "logging"}
    for home, others in DECIDING.items():
        allowed = {*(sys.stdlib_module_names - acting), *others, home}
        packages = [name for name in TREES if name == home or name.startswith(f"{home}.")]
        assert packages, f"there is no {home}"
        assert not {name: strange for name in packages if (strange := outside(name, allowed))}


def test_no_import_cycles() -> None:
    edges = {module: {name for name in imports(module) if name in TREES} for module in TREES}
    while leaves := {module for module, below in edges.items() if not below & edges.keys()}:
        for leaf in leaves:
            del edges[leaf]
    assert not edges, f"these import each other in a circle: {sorted(edges)}"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"),
    *("os.system", "os.popen"),
}


def test_no_code_comes_from_data() -> None:
    for module, tree in TREES.items():
        assert not {name.split(".")[0] for name in imports(module)} & FORBIDDEN_MODULES, module
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & FORBIDDEN_CALLS, module


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.common.text.tokenizer", ("torch", "ray", "grpc", "numpy", "penstock.protos")),
        ("penstock.router.server", ("torch", "ray")),
        ("penstock.workers.scheduling.batcher", ("torch", "ray", "grpc")),
        ("penstock.router.routing.dispatcher", ("torch", "ray", "grpc")),
        ("penstock.workers.models.spec", ("torch", "ray", "numpy")),
        ("penstock.cluster.supervisor", ("torch",)),
        ("penstock.cluster.placement.placement", ("torch", "ray")),
        ("penstock.cli", ("torch", "ray", "grpc", "rich", "yaml")),
        ("penstock.cli.serve", ("torch", "ray", "grpc", "huggingface_hub")),
        ("penstock.cli.chat", ("torch", "ray")),
        ("penstock.cli.status", ("torch", "ray", "grpc")),
    ],
)
def test_importing_loads_no_more_than_it_should(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
