"""The house keeps its shape: import arrows, light imports, small documented files, one version."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fednl_runtime
from fednl_runtime.server_api.ui.page import FILES as UI_FILES

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "runtime": "fednl_runtime",
    "export": "fednl_runtime.export",
    "fed_sync": "fednl_runtime.fed_sync",
    "server_api": "fednl_runtime.server_api",
}
FOLDERS = (*PACKAGES, "tests", "benchmarks")
ARROWS = {
    "runtime": {"runtime"},
    "export": {"export", "runtime"},
    "fed_sync": {"fed_sync", "runtime"},
    "server_api": {"server_api", "fed_sync", "runtime"},
}
"""What each folder may import when it loads; server_api may also reach export, inside functions."""

HEAVY = ("hope", "hope_step", "recurrence", "kernels_triton", "torch_backend", "onnx_backend", "gradient_backend")
"""The modules of runtime/ that load torch or onnxruntime; the others import none of them."""

SHELL = "server_api/cli.py server_api/commands/*.py"
"""The rooms of the command line."""

NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SOURCES = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
MODELS = sorted((ROOT / "runtime/models").glob("*.onnx"))
LIGHT = [path.stem for path in (ROOT / "runtime").glob("*.py") if path.stem not in ("__init__", *HEAVY)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The name that a file is imported by."""
    name = name_of(path.with_suffix("")).replace("/", ".")
    return f"fednl_runtime.{name.removeprefix('runtime.')}"


def folder_of(module: str) -> str:
    """The folder that a `fednl_runtime...` module lives in."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in PACKAGES else "runtime"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Every (module, whether inside a function) that runs when the code does."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # `from fednl_runtime import export` names a module as well.
            yield from ((f"{child.module}.{alias.name}", lazy) for alias in child.names)
        elif not is_type_checking(child):
            yield from imports(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(ast.parse(path.read_text())))


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def loaded(modules: list[str], forbidden: tuple[str, ...]) -> str:
    """Which of `forbidden` are loaded by a fresh interpreter that imports `modules`."""
    lines = [*(f"import {module}" for module in modules), "import sys"]
    return run_python("\n".join([*lines, f"print(*(m for m in {forbidden!r} if m in sys.modules))"]))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_follow_the_arrows_of_the_house(path):
    folder = path.relative_to(ROOT).parts[0]
    for module, lazy in imports_of(path):
        if module.split(".")[0] == "fednl_runtime":
            allowed = ARROWS[folder] | ({"export"} if folder == "server_api" and lazy else set())
            assert folder_of(module) in allowed, f"{folder} may not import {module}"


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("onnxruntime", "runtime/onnx_backend.py"),
        ("pydantic", "server_api/schemas/*.py"),
        ("click", SHELL),
        ("rich", SHELL),
        ("fastapi", "server_api/*.py server_api/*/*.py fed_sync/fleet/endpoint.py"),  # a server too
        ("sqlalchemy", "fed_sync/fleet/repository.py fed_sync/fleet/tables.py"),
        ("onnx", "export/*.py"),
        ("flwr", "fed_sync/flower/*.py"),
    ],
)
def test_a_library_is_imported_only_in_its_rooms(library, rooms):
    users = [path for path in SOURCES if library in {module.split(".")[0] for module, _ in imports_of(path)}]
    assert [name_of(path) for path in users if not any(path.relative_to(ROOT).match(r) for r in rooms.split())] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nobody_imports_a_folder_by_its_name_on_disk(path):
    assert [m for m, _ in imports_of(path) if m.split(".")[0] in PACKAGES] == []


def test_importing_the_light_modules_loads_no_engine_no_compiler_and_no_server():
    modules = ["fednl_runtime", *(f"fednl_runtime.{name}" for name in LIGHT)]
    assert loaded(modules, ("torch", "onnx", "onnxruntime", "fastapi", "uvicorn", "transformers")) == ""


def test_the_server_and_its_command_line_load_no_torch_and_no_onnx():
    modules = [module_of(path) for path in (ROOT / "server_api").rglob("[!_]*.py")]
    assert loaded(modules, ("torch", "onnx", "transformers", "triton", "matplotlib")) == ""


def test_importing_the_package_takes_less_than_0_3_seconds():
    code = "import time; t = time.perf_counter(); import fednl_runtime; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_in_its_first_line_what_it_is_for_and_stays_under_500_lines(path):
    lines = path.read_text().splitlines()
    assert re.match(r'"""[^"]+[.:]("""|$)', lines[0]), "the first line is no sentence"
    assert len(lines) <= 500


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_everything_public_says_what_it_does(path):
    body = ast.parse(path.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    named = [node for scope in (body, *(node.body for node in classes)) for node in scope if isinstance(node, NAMED)]
    public = [node for node in named if not node.name.startswith("_")]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def libraries(*extras: str) -> set[str]:
    """What the project depends on, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    return {re.split(r"[<>=[]", line)[0] for line in lines} - {"fednl-runtime"}


def imported(files: list[Path]) -> set[str]:
    """The libraries that files import, by the name they are installed under."""
    names = {module.split(".")[0] for path in files for module, _ in imports_of(path)}
    own = {"fednl_runtime", *(path.stem for path in [*(ROOT / "tests").glob("*.py"), *BENCHMARKS])}
    return {name.replace("_", "-") for name in names - own - sys.stdlib_module_names}


def test_every_imported_library_is_a_declared_dependency():
    vocabulary = {"pydantic", "starlette"}  # FastAPI's own
    assert imported(SOURCES) <= libraries("aggregator", "export", "flower", "gpu", "plots") | vocabulary
    assert imported(FILES) <= libraries("aggregator", "export", "flower", "gpu", "plots", "dev") | vocabulary


def test_every_declared_dependency_is_imported():
    tools = {"mypy", "pytest-cov", "ruff"}
    by_url = {"psycopg"}  # SQLAlchemy imports the driver that a database's address names
    assert libraries("aggregator", "export", "flower", "gpu", "plots") - by_url <= imported(SOURCES)
    assert libraries("dev") - tools <= imported(FILES)


@pytest.mark.parametrize("path", [path for path in BENCHMARKS if "__main__" in path.read_text()], ids=name_of)
def test_a_benchmark_starts_and_says_what_it_takes(path):
    assert subprocess.run([sys.executable, path, "--help"], capture_output=True, check=True).stdout


def test_no_open_ends_are_left_in_the_text():
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    texts = [*FILES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".ci/*")]
    assert [name_of(path) for path in texts if path.is_file() and marks.search(path.read_text())] == []


def test_every_folder_of_code_is_packaged():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name_of(path.parent) for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")}
    assert set(tool["package-dir"].values()) == folders
    assert set(tool["packages"]) == set(tool["package-dir"])


def test_the_changelog_begins_with_the_version_of_the_package():
    versions = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == fednl_runtime.__version__ == importlib.metadata.version("fednl-runtime")


def test_the_installed_wheel_holds_the_code_the_licence_the_models_and_nothing_else():
    installed = {str(path) for path in importlib.metadata.files("fednl-runtime") or []}
    if not any(name == "fednl_runtime/__init__.py" for name in installed):
        pytest.skip("an editable install has no files of its own; .ci/run installs the wheel")
    files = {name for name in installed if "__pycache__" not in name and ".dist-info/" not in name}
    models = {f"fednl_runtime/models/{path.name}" for path in MODELS}
    expected = {f"fednl_runtime/{name_of(path).removeprefix('runtime/')}" for path in SOURCES}
    page = {f"fednl_runtime/server_api/ui/{name}" for name in UI_FILES}
    assert {name for name in files if "/bin/" not in name} == expected | models | page | {"fednl_runtime/py.typed"}
    assert any(name.endswith("LICENSE") for name in installed)


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_a_shipped_model_is_under_20_megabytes(path):
    assert path.stat().st_size < 20e6
