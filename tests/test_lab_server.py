"""`make lab` as a student's browser sees it: the server answers, the first notebook is open, and its cells run."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid

import pytest
import websocket

from utils import notebooks

NOTEBOOK = "notebooks/01_gpu_model.ipynb"
#: Cells that the test runs through the server, enough to load the course and launch a kernel; nbval runs all of them.
CELLS = int(os.environ.get("MLF_SERVER_CELLS", "6"))


class Server:
    """JupyterLab in a process of its own, started by the Makefile's own line, but for the browser and the port."""

    def __init__(self) -> None:
        shown = subprocess.run(["make", "-n", "lab"], cwd=notebooks.ROOT, capture_output=True, text=True, check=True)
        arguments = shlex.split(next(line for line in shown.stdout.splitlines() if "jupyter lab" in line))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter", *arguments[1:], "--no-browser", "--port=0"],
            cwd=notebooks.ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        # a server that never says where it is must not hold the test forever
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        self.log: list[str] = []
        self.url = self.page = self.token = ""
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"(http://(?:localhost|127\.0\.0\.1):\d+)(/lab\S*)\?token=(\w+)", line):
                self.url, self.page, self.token = found.groups()
                break
        watchdog.cancel()
        if not self.url:
            self.stop()
            raise AssertionError("the server gave no address:\n" + "".join(self.log))
        # the pipe is emptied, or a talkative server would block
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        """The address is printed a moment before connections are accepted."""
        for _ in range(100):
            try:
                self.ask("/api/status")
                return
            except urllib.error.URLError:
                if self.process.poll() is not None:
                    break
                threading.Event().wait(0.2)
        raise AssertionError("the server never answered:\n" + "".join(self.log))

    def ask(self, path: str, body: dict | None = None) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()


def run_cell(socket: websocket.WebSocket, source: str) -> str:
    """Execute a cell in the kernel behind the socket; the error's text, or an empty string."""
    identity = uuid.uuid4().hex
    header = {"msg_id": identity, "msg_type": "execute_request", "username": "", "session": "test", "version": "5.3"}
    content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    socket.send(json.dumps(message))
    while True:
        reply = json.loads(socket.recv())
        if reply["parent_header"].get("msg_id") == identity and reply["msg_type"] == "execute_reply":
            content = reply["content"]
            return "" if content["status"] == "ok" else f"{content['ename']}: {content['evalue']}"


@pytest.mark.slow
def test_the_server_opens_the_first_notebook_and_runs_its_cells(server):
    assert server.page.startswith("/lab/tree/notebooks/01_gpu_model.ipynb")
    assert b"JupyterLab" in server.ask("/lab/tree/" + NOTEBOOK)
    notebook = json.loads(server.ask(f"/api/contents/{NOTEBOOK}"))["content"]
    name = notebook["metadata"]["kernelspec"]["name"]
    session = json.loads(
        server.ask("/api/sessions", {"path": NOTEBOOK, "name": "01", "type": "notebook", "kernel": {"name": name}})
    )
    address = f"{server.url.replace('http', 'ws')}/api/kernels/{session['kernel']['id']}/channels"
    socket = websocket.create_connection(address, header=[f"Authorization: token {server.token}"], timeout=120)
    try:
        cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"][:CELLS]
        assert cells
        for number, source in enumerate(cells):
            error = run_cell(socket, "".join(source))
            assert not error, f"code cell {number}: {error}"
    finally:
        socket.close()
