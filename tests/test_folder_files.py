"""Files of a folder from somebody else: whatever is planted at a name, nothing outside is read or written."""

import ast
import os
import socket
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.folder_files import (
    UnsafeFile,
    append_file,
    is_folder,
    lock_file,
    make_folder,
    new_file,
    open_file,
    parse_json,
    read_file,
    read_json,
    regular_files,
    remove_folder,
    write_file,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture
def outside(tmp_path):
    """A folder with a file, outside of the run."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["precious"]
    assert (folder / "precious").read_text() == "precious"


def plant(kind: str, path: Path, outside: Path) -> None:
    match kind:
        case "link to a file":
            path.symlink_to(outside / "precious")
        case "relative link":
            path.symlink_to(os.path.relpath(outside / "precious", path.parent))
        case "link to a folder":
            path.symlink_to(outside)
        case "link to nothing":
            path.symlink_to(outside / "new")
        case "link to itself":
            path.symlink_to(path)
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(os.path.relpath(path))
        case "folder":
            path.mkdir()


KINDS = (
    *("link to a file", "relative link", "link to a folder", "link to nothing", "link to itself", "link to a device"),
    *("FIFO", "socket", "folder"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_planted_at_a_name_is_followed(kind, tmp_path, outside, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    path = run / "config.json"
    plant(kind, path, outside)
    for use in (open_file, read_file, read_json, append_file, lock_file):
        with pytest.raises(OSError, match=r"config\.json") as raised:
            use(path)
        assert raised.value.filename == str(path)
        assert isinstance(raised.value, UnsafeFile) or kind == "folder"
        assert "\n" not in str(raised.value)
    if kind != "folder":
        with pytest.raises(OSError, match=r"config\.json"):
            make_folder(path)
        write_file(path, "mine")  # takes the place of what is there
        assert not path.is_symlink()
        assert read_file(path) == b"mine"
    assert sorted(p.name for p in run.iterdir()) == ["config.json"]


def test_links_between_the_folder_and_a_file_are_not_followed(tmp_path, outside):
    run = tmp_path / "run"
    run.mkdir()
    (run / "media").symlink_to(outside)
    for use in (open_file, read_file, append_file):
        with pytest.raises(UnsafeFile, match=r"media cannot be used \(it is a symbolic link"):
            use(run / "media" / "precious", run)
    with pytest.raises(UnsafeFile):
        write_file(run / "media" / "precious", "mine", run)
    with pytest.raises(UnsafeFile):
        make_folder(run / "media")
    with pytest.raises(UnsafeFile):
        is_folder(run / "media")
    with pytest.raises(UnsafeFile):
        list(regular_files(run))
    remove_folder(run / "media")
    assert not (run / "media").exists()
    # The folder itself may be a link: the user named it.
    (tmp_path / "named").symlink_to(run)
    write_file(tmp_path / "named" / "x", "mine", tmp_path / "named")
    assert read_file(tmp_path / "named" / "x") == b"mine"


def test_temporary_names_cannot_be_planted(tmp_path, outside):
    for _ in range(3):
        with new_file(tmp_path / "report.html") as file:
            (partial,) = tmp_path.glob("*.partial")
            assert partial.name != "report.partial"
            file.write(b"page")
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_file(tmp_path / "x", "old")
    with pytest.raises(TypeError), new_file(tmp_path / "x") as file:
        file.writelines([b"new", None])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert read_file(tmp_path / "x") == b"old"


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "x"):
        with pytest.raises(OSError, match=r"No such|Is a directory") as error:
            write_file(path, "new", tmp_path / "missing" if path.name == "x" else None)
        assert (error.value.filename, error.value.filename2) == (str(path), None)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="it has 1,099,511,627,776 bytes, more than 100,000,000"):
        read_file(tmp_path / "x")


def test_json_of_any_depth_is_a_value_error():
    for text in ("[" * 200 + "]" * 200, "[" * 10**5, "{" * 10**5, '{"a":' * 10**5, "1" * 5000, "", "[", b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)


def test_text_that_has_no_encoding_is_written(tmp_path):
    write_file(tmp_path / "x", "a\ud800é")
    assert read_file(tmp_path / "x").decode() == "a\\ud800é"


# Modules that read or write files of a run folder or of a bundle.
MODULES = [
    *(ROOT / "jaxtrain/observe").rglob("*.py"),
    *(ROOT / "jaxtrain/runner").rglob("*.py"),
    *(ROOT / f"jaxtrain/{name}.py" for name in ("run_folder", "profile/trace", "export/torch_checkpoint")),
    *(ROOT / f"jaxtrain/cli/{name}.py" for name in ("eval", "report", "replay", "train", "profile", "sample")),
    ROOT / "parity/bundle.py",
]
FORBIDDEN = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "fdopen", "load", "copyfile", "copy2"),
    *("copytree", "rmtree", "mkdtemp", "NamedTemporaryFile", "fromfile", "tofile", "memmap"),
}
# What is opened there is not a file of a run that another process may have written.
ALLOWED = {
    ("run_report.py", "resources"): "the package's own script",
    ("eval.py", "path.write_text"): "the file that --json names",
    ("lock.py", "os.open(self._path"): "the folder itself, to lock it",
    ("run_folder.py", "os.open(path"): "opened to flush it",
    ("signals.py", "os.open(os.devnull"): "no file",
    ("guards.py", "np.load(opened"): "opened before by open_file",
    ("state_files.py", "tensorstore"): "the arrays, whose files the manifest has checked",
    ("bundle.py", "(folder / INDEX).write_text"): "a folder that was created",
}
IMAGES = ("Image.open(", "wave.open(")


def test_every_file_of_a_run_is_opened_by_this_module():
    used, wrong = set(), []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = ast.unparse(node)
            if name not in FORBIDDEN or text.startswith(IMAGES):
                continue
            reasons = {(file, part) for file, part in ALLOWED if module.name == file and part in text}
            used |= reasons
            if not reasons:
                wrong.append(f"{module.relative_to(ROOT)}:{node.lineno} {text}")
    assert not wrong, "\n".join(wrong)
    assert used == set(ALLOWED)
