"""`jaxtrain report`, and the machine-readable output of `jaxtrain train`."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.cli import main, report, train
from jaxtrain.observe import serve
from tests.observe.runs import line, write_run


def run(command: str | list[str]) -> int:
    return main(command.split() if isinstance(command, str) else command)


def test_one_run_is_reported_in_its_folder_and_several_in_the_working_folder(capsys):
    write_run(Path("a"))
    write_run(Path("b"), lr=0.1)
    assert run("report a") == 0
    assert (
        capsys.readouterr().out
        == "a · digits-mlp · step 40, best validation loss 0.0732 at step 40\npage  a/report.html\n"
    )
    assert "digits-mlp" in Path("a/report.html").read_text()
    assert run("report a b a") == 0
    assert "2 runs compared" in Path("comparison.html").read_text()
    assert run("report a b --out both.html") == 0
    assert Path("both.html").read_text() == Path("comparison.html").read_text()


@pytest.mark.parametrize(
    ("command", "error_line"),
    [
        ("report", "a run folder is required: jaxtrain report DIR… [--out PAGE.html] [--serve [PORT]]"),
        ("report nowhere", "nowhere holds no run: give the folder of one, as in jaxtrain report runs/gpt-stdlib"),
        (
            "report nowhere --serve",
            "nowhere holds no run: give the folder of one, as in jaxtrain report runs/gpt-stdlib",
        ),
        ("report a --out no/where.html", "no/where.html cannot be written (No such file or directory): choose another"),
        ("report a --serve --out x.html", "--out x.html and --serve are mutually exclusive: use one of them"),
        ("report a --serve 99999", "port 99999 cannot be opened (bind(): port must be 0-65535.): choose another"),
        ("report a --serve x", "--serve must be an integer, got 'x'; see jaxtrain report --help"),
    ],
)
def test_invalid_usage_is_a_one_line_error(command, error_line, capsys):
    write_run(Path("a"))
    assert run(command) == 2
    error = capsys.readouterr().err
    assert error_line in error
    assert error.count("\n") == 1


@pytest.fixture
def served(monkeypatch):
    """A run, and a function that sends requests to the server started by `jaxtrain report a --serve 0`."""
    folder = write_run(Path("a").absolute(), steps=30)
    started, servers = threading.Event(), []
    start = serve.report_server

    def recorded(*args):
        servers.append(start(*args))
        started.set()
        return servers[-1]

    monkeypatch.setattr(report, "report_server", recorded)
    thread = threading.Thread(target=run, args=("report a --serve 0",))
    thread.start()
    assert started.wait(20)
    port = servers[0].server_address[1]

    def ask(path="/", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert (answer.getheader("Content-Type") is None) == (answer.status == 304)
        return answer.status, answer.read().decode(), answer.getheader("ETag")

    yield folder, port, ask
    servers[0].shutdown()
    thread.join(20)
    assert not thread.is_alive()


def test_a_served_page_is_updated_with_its_run(served):
    folder, _, ask = served
    status, page, tag = ask()
    assert status == 200
    assert "step 30 of 40" in page
    assert 'id="live"' in page
    assert ask(**{"If-None-Match": tag})[:2] == (304, "")
    with folder.metrics.open("a") as file:
        file.write(json.dumps(line(40)) + "\n")
    status, page, other = ask(**{"If-None-Match": tag})
    assert (status, "step 40 of 40" in page, other != tag) == (200, True, True)
    for text in (
        "{",
        "[" * 100_000,
        '{"recipe": [1], "settings": {}}',
        '{"recipe": "x", "settings": {}, "devices": 5}',
    ):
        folder.config.write_text(text)
        status, page, _ = ask()
        assert (status, "config.json" in page, "UserError" in page) == (503, True, False)


def test_idle_and_broken_clients_do_not_stop_the_server(served, monkeypatch, capfd):
    _, port, ask = served
    monkeypatch.setattr(serve._Handler, "timeout", 0.5)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * serve._CONNECTIONS)]
    assert threading.active_count() < serve._CONNECTIONS + 20
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            status = ask()[0]
            break
        except (ConnectionError, http.client.HTTPException):
            time.sleep(0.1)
    assert status == 200
    for connection in idle:
        connection.close()
    assert "Traceback" not in capfd.readouterr().err


def test_requests_for_other_hosts_and_paths_are_rejected(served):
    _, port, ask = served
    assert ask(Host=f"localhost:{port}")[0] == 200
    assert ask(Host="evil.example")[0] == 403
    assert ask(Host=f"evil.example:{port}")[0] == 403
    assert ask("/../a/config.json")[0] == 404
    assert serve.HOST == "127.0.0.1"


def test_a_port_in_use_is_an_error(served, capsys):
    _, port, _ = served
    capsys.readouterr()
    assert run(f"report a --serve {port}") == 2
    assert f"port {port} cannot be opened (Address already in use): choose another" in capsys.readouterr().err


class RecordingTracker:
    """A tracker that records its calls."""

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        self.calls = [uri]

    def begin(self, record, folder, known):
        return "id"

    def log(self, lines):
        self.calls += [line.step for line in lines]

    def end(self, record, exit_status):
        self.calls += [exit_status, record.references]
        return "there"


def test_a_run_prints_json_and_is_reported_to_a_tracker(monkeypatch, capsys):
    trackers = []
    monkeypatch.setattr(train, "MLflow", lambda uri: trackers.append(RecordingTracker(uri)) or trackers[-1])
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    flags = "--steps 4 --hidden 32 --batch-size 16 --log-every 2 --out a"
    assert run(f"train digits-mlp {flags} --json --mlflow") == 0
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["event"] == "start"
    lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert [e for e in events if e["event"] == "step"] == [{"event": "step", "of": 4, **line} for line in lines[1:]]
    assert events[-1]["event"] == "end"
    assert events[-1]["report"] == "a/report.html"
    assert {"event": "message", "text": "mlflow: there"} in events
    (tracker,) = trackers
    assert tracker.calls == ["sqlite:///mlflow.db", 0, 2, 4, 0, events[-1]["references"]]
    assert json.loads(Path("a/result.json").read_text())["step"] == 4


def test_invalid_outputs_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    for flags, error_line in (
        ("--quiet --json", "--quiet and --json are mutually exclusive: use one of them"),
        ("--wandb", "--wandb needs the package wandb: pip install 'jaxtrain[wandb]'"),
        ("--mlflow http://here", "--mlflow needs the package mlflow: pip install 'jaxtrain[mlflow]'"),
    ):
        assert run(f"train digits-mlp --out a {flags}") == 2
        assert capsys.readouterr().err == f"jaxtrain: {error_line}\n"
    assert not Path("a").exists()


def test_control_characters_and_unknown_encodings_do_not_reach_the_terminal(capsys):
    name = "a\x1b]0;title\x07\udce9"
    folder = write_run(Path(name))
    config = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps(config | {"recipe": "x\x1b[31m\n"}))
    assert run(["report", name]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("a\\x1b]0;title\\x07\\udce9 · x\\x1b[31m\\n · step 40")
    assert printed.replace("\n", "").isprintable()
