"""The rooms of the project and the one way that imports run between them, read from syntax trees.

Contract: these tests import nothing of the project. A module that does not exist yet has nothing
to break. A helper module that LEVELS does not name takes part in the test for cycles.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_paged"
KERNELS = ROOT / "kernels"
EVAL = ROOT / "eval"

# At module level a module imports only from its own line or from lines above it.
LEVELS = [
    {
        "block_pool",
        "config",
        "kv_format",
        "request",
        "stats",
        "progress",
        "storage_meter",
        "demo_prompts",
        "fingerprint",
        "rotation",
        "module_tree",
    },
    {"shared_prefix"},
    {
        "block_table",
        "prefix_tree",
        "weights_view",
        "demo_model",
        "request_output",
        "scheduler_output",
        "running",
        "driving",
    },
    {"block_manager", "blocks_ahead", "cache_group", "prefix_cache", "prefix_admission"},
    {"batch_blocks", "scheduler", "packed_metadata", "kv_pages", "kv_pool", "metadata", "weights"},
    {"adapters", "lazy", "padding", "placement", "row_processors", "switch"},
    {"rows", "model_watch", "kv_shapes"},
    {"model_identity"},
    {"checkpoint_scales", "memory"},
    {"kv_scales"},
    {"layer"},
    {"cache", "packed_cache", "traced_cache"},
    {"packed_attention"},
    {"attention", "history", "packing", "compiled", "graphs", "model_runner", "sampling", "sampler"},
    {"intake", "engine", "calls", "batcher_core", "calibration"},
    {"batcher"},
    {"batched"},
    {"generate"},
    {"demo"},
    {"cli"},
    {"__init__"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
WITHOUT_TORCH = {
    *("config", "kv_format", "request", "request_output", "block_pool", "block_table", "block_manager", "cache_group"),
    *(
        "blocks_ahead",
        "prefix_tree",
        "prefix_cache",
        "prefix_admission",
        "running",
        "batch_blocks",
        "scheduler",
        "scheduler_output",
        "driving",
    ),
}
MAY_IMPORT_KERNELS = {
    "weights_view",
    "calibration",
    "kv_pages",
    "kv_pool",
    "metadata",
    "cache",
    "attention",
    "packed_attention",
    "fingerprint",
    "model_runner",
    "rotation",
}

SOURCE_FOLDERS = ["hf_paged", "kernels", "eval", "tests", "examples", "docs", ".ci"]
SOURCE_SUFFIXES = {".py", ".md", ".toml", ".txt", ".c", ".h", ".cfg", ".in", ".sh", ""}
MAX_LINES = 400


def python_files(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


def modules() -> list[str]:
    return [file.stem for file in sorted(PACKAGE.glob("*.py"))]


def imports(file: Path, module_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports. `from a import b` gives `a.b`: b may be a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = set()
    for node in module_level(tree) if module_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(file, node)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def absolute(file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    room = next(room for room in (KERNELS, EVAL, ROOT) if file.is_relative_to(room))
    package = list(file.relative_to(room).parent.parts)
    package = package[: len(package) - node.level + 1]
    return ".".join(package + ([node.module] if node.module else []))


def module_level(tree: ast.AST):
    """Nodes that run when the module is imported: nothing inside functions or `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from module_level(child)


def within(names: set[str], package: str) -> set[str]:
    """Those of the names that are the package or lie in it."""
    return {name for name in names if name == package or name.startswith(package + ".")}


def siblings(names: set[str]) -> set[str]:
    """Modules of hf_paged among dotted names; plain `hf_paged`, or a name in it, is its __init__."""
    found = set()
    for name in within(names, "hf_paged"):
        first = (name.split(".") + [""])[1]
        found.add(first if (PACKAGE / f"{first}.py").exists() and first else "__init__")
    return found


@pytest.mark.parametrize("file", python_files(KERNELS / "hf_paged_kernels"), ids=lambda f: f.stem)
def test_kernels_know_nothing_of_hf_paged(file):
    for foreign in ("hf_paged", "hf_paged_eval", "transformers"):
        assert not within(imports(file), foreign)


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH & set(modules())))
def test_bookkeeping_does_not_import_torch(module):
    names = imports(PACKAGE / f"{module}.py")
    for foreign in ("torch", "transformers", "hf_paged_kernels"):
        assert not within(names, foreign)


@pytest.mark.parametrize("module", modules())
def test_only_four_modules_import_kernels(module):
    if within(imports(PACKAGE / f"{module}.py"), "hf_paged_kernels"):
        assert module in MAY_IMPORT_KERNELS


@pytest.mark.parametrize("module", [module for module in modules() if module in LEVEL_OF])
def test_imports_run_one_way(module):
    imported = siblings(imports(PACKAGE / f"{module}.py", module_level_only=True))
    upward = {name for name in imported if LEVEL_OF.get(name, 0) > LEVEL_OF[module]}
    assert not upward, f"hf_paged/{module}.py imports {sorted(upward)}, which lie above it"


def test_no_import_cycle():
    edges = {m: siblings(imports(PACKAGE / f"{m}.py", module_level_only=True)) for m in modules()}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for following in sorted(edges.get(module, ())):
                visit(following)
            done.add(path.pop())

    for module in edges:
        visit(module)


@pytest.mark.parametrize("module", modules())
def test_evaluation_is_imported_lazily_and_by_the_script_alone(module):
    file = PACKAGE / f"{module}.py"
    assert not within(imports(file, module_level_only=True), "hf_paged_eval")
    if module != "cli":
        assert not within(imports(file), "hf_paged_eval")


@pytest.mark.parametrize("file", python_files(EVAL, ROOT / "examples"), ids=lambda f: str(f.relative_to(ROOT)))
def test_eval_and_examples_use_public_names_only(file):
    for name in within(imports(file), "hf_paged"):
        parts = name.split(".")[1:]
        assert len(parts) <= 1, f"{name} is a submodule's"
        assert not parts or (not parts[0].startswith("_") and not (PACKAGE / f"{parts[0]}.py").exists()), name


def test_folders_that_must_not_be_packages():
    for folder in (KERNELS, EVAL):
        assert not (folder / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def sources() -> list[Path]:
    files = [file for file in ROOT.iterdir() if file.is_file() and file.name not in ("LICENSE", ".git")]
    for folder in SOURCE_FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder).parts
            if file.is_file() and not any(part.startswith((".", "__pycache__")) for part in inside):
                files.append(file)
    return [file for file in files if file.suffix in SOURCE_SUFFIXES]


def test_no_path_of_a_machine():
    # Put together here, so that this file does not contain what it looks for.
    roots = "|".join(("home", "root", "work", "tmp", "opt", "Users", "mnt", "srv", "private"))
    pattern = re.compile(rf"(?<![\w.~$}}\])/-])/(?:{roots})/|\b[A-Z]:\\\\?Users")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sources()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_files_stay_readable():
    long = {
        str(file.relative_to(ROOT)): lines
        for file in python_files(*(ROOT / folder for folder in SOURCE_FOLDERS))
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"
