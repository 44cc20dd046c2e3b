"""Run notebooks in JupyterLab inside a real browser, as a reader would: ``make browser-check``.

A server on a free loopback port serves a copy of the notebooks without their outputs, a headless Chromium opens each,
picks Run All Cells in the menu and saves, and the saved file tells how far the kernel is. The first error output ends
the check with exit status 1; a screenshot of every notebook opened stays in ``runs/browser-check/``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dblast.reproduction.paths import NOTEBOOKS, ROOT, RUNS

CHECKED = ("00_quickstart.ipynb", "01_mismatch_diagnosis.ipynb")
SCREENSHOTS = RUNS / "browser-check"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Nothing but the notebooks is loaded: no updates, no first-run pages, no traffic of the browser's own.
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: JupyterLab's settings: every cell stays in the page, so that the screenshot has all; no question about news.
LAB_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
#: What would otherwise come from, or end up in, the user's own set-up.
OWN_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    "IPYTHONDIR": "ipython",
}
#: Seconds: between two looks at a notebook, for the server, the page and the kernel to start, and for a kernel to stay
#: idle with cells left, after which they will never run (it died and was restarted).
POLL, START, STALLED = 2.0, 120.0, 30.0
#: Where JupyterLab shows what the kernel does, and the part of a notebook that scrolls.
CIRCLE, SCROLLED = (f".jp-NotebookPanel .jp-{name}" for name in ("Notebook-ExecutionIndicator", "WindowedPanel-outer"))
#: Pixels: the width of the page, its height while cells run, and the largest height that Chromium draws in one piece.
WIDTH, HEIGHT, TALLEST = 1300, 1000, 16_000


class CheckError(Exception):
    """The check failed or cannot start; the message is one line."""


class State(NamedTuple):
    """How far a notebook is: code cells with an execution count, code cells that get one, the first error."""

    finished: int
    total: int
    error: str | None

    @property
    def done(self) -> bool:
        return self.finished == self.total


def one_line(text: str) -> str:
    """The first line with something on it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def state_of(document: dict) -> State:
    """Read the state off a notebook document. Empty cells are left out: JupyterLab never gives them a count."""
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    error = None
    for number, cell in enumerate(cells, start=1):
        for output in cell["outputs"]:
            if output["output_type"] == "error" and error is None:
                what = ": ".join(filter(None, (output["ename"], one_line(output["evalue"]))))
                error = f"code cell {number} (id {cell.get('id', 'none')}): {what}"
    return State(sum(cell["execution_count"] is not None for cell in cells), len(cells), error)


def without_outputs(document: dict) -> dict:
    """The same notebook as if never run: no committed output can pass for one of this run."""
    fresh = {"outputs": [], "execution_count": None}
    cells = [cell | fresh if cell["cell_type"] == "code" else cell for cell in document["cells"]]
    return document | {"cells": cells}


def find_chromium() -> str:
    """The browser: ``CHROMIUM``, or the first of the usual names on the path."""
    if chosen := os.environ.get("CHROMIUM"):
        if found := shutil.which(chosen):
            return found
        raise CheckError(f"CHROMIUM={chosen} cannot be run: set it to the path of Chromium")
    if found := next(filter(None, map(shutil.which, BROWSERS)), None):
        return found
    raise CheckError("Chromium not found: apt-get install chromium, or set CHROMIUM=/path/to/it")


def load_playwright():
    """Playwright's synchronous module, imported here because only this check needs it."""
    try:
        from playwright import sync_api
    except ImportError:
        raise CheckError("Playwright is not installed: pip install playwright") from None
    return sync_api


def copy_notebooks(source: Path, names: list[str], folder: Path) -> None:
    """Copy a folder of notebooks, those to be run without outputs; the originals are never opened by the server."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in names:
        if not (folder / name).is_file():
            raise CheckError(f"no notebook {name} in {source}")
        document = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(without_outputs(document)), encoding="utf-8")


@contextmanager
def jupyterlab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on ``folder``, its own files in ``home``; gives the address of a notebook, ``{}`` for its name."""
    for name, settings in LAB_SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    environment = os.environ | {name: str(home / own) for name, own in OWN_FOLDERS.items()}
    # In the environment, as command lines can be read by other users.
    environment["JUPYTER_TOKEN"] = secrets.token_hex(16)
    # Kernels find the package of this checkout, wherever they run.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")
    command = [sys.executable, "-m", "jupyterlab", *options]
    log = home / "server.log"
    with open(log, "w", encoding="utf-8") as output:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the server in order.
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        # The server looks for a free port itself and writes down the one it got.
        record = home / "runtime" / f"jpserver-{server.pid}.json"
        patience = time.monotonic() + START
        while not (record.is_file() and record.stat().st_size):
            if server.poll() is not None or time.monotonic() > patience:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                raise CheckError(f"JupyterLab did not start: {lines[-1] if lines else 'it said nothing'}")
            time.sleep(0.2)
        started = json.loads(record.read_text())
        yield f"{started['url']}doc/tree/{{}}?token={started['token']}"
    finally:
        stop(server)


def stop(server: subprocess.Popen) -> None:
    """End the server, which ends its kernels; by force if it takes too long or Ctrl-C comes again."""
    try:
        server.terminate()
        server.wait(timeout=20)
    except BaseException as reason:
        server.kill()
        server.wait()
        if not isinstance(reason, subprocess.TimeoutExpired):
            raise


@contextmanager
def browser(playwright, executable: str) -> Iterator:
    """A headless browser; gives a function that opens an empty page."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:
        # Signals are for this process, which closes the browser itself.
        launched = driver.chromium.launch(
            executable_path=executable,
            args=list(FLAGS),
            chromium_sandbox=not root,  # Chromium refuses to start as root with its sandbox
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )
        try:
            yield lambda: launched.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        finally:
            launched.close()


def run_all(page, address: str, path: Path, minutes: float) -> None:
    """Open a notebook, run all its cells and wait until each has its count; stops at the first error output."""
    page.set_default_timeout(1000 * START)
    page.goto(address.format(path.name))
    # Cells run before the kernel is there are lost. The status bar tells when it is; the circle says idle even before.
    page.get_by_text(re.compile(r"\| Idle$")).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator("[data-command='runmenu:run-all']").click()
    seen = None
    began = moved = time.monotonic()
    while True:
        page.wait_for_timeout(1000 * POLL)
        page.keyboard.press("ControlOrMeta+s")
        state, now = state_of(json.loads(path.read_text(encoding="utf-8"))), time.monotonic()
        far = f"{state.finished} of {state.total} cells"
        if state != seen:
            progress(f"{path.stem[:2]}: {far}")
        if state != seen or page.locator(CIRCLE).get_attribute("data-status") != "idle":
            seen, moved = state, now
        if state.error:
            raise CheckError(f"{path.name}, {state.error}")
        if state.done:
            return
        if now - moved > STALLED:
            raise CheckError(f"{path.name}: the kernel stopped after {far}; it may have died")
        if now - began > 60 * minutes:
            raise CheckError(f"{path.name}: {far} after {minutes:g} minutes (see --minutes)")


def screenshot(page, path: Path) -> None:
    """Keep a picture of the whole notebook. It scrolls inside the page, so the page is first made as tall as it is."""
    hidden = page.locator(SCROLLED).evaluate("e => e.scrollHeight - e.clientHeight")
    page.set_viewport_size({"width": WIDTH, "height": min(HEIGHT + hidden, TALLEST)})
    page.wait_for_timeout(1000)
    page.screenshot(path=path)


def check(source: Path, names: list[str], minutes: float) -> None:
    """Run the named notebooks of a folder, one after the other.

    Raises:
        CheckError: something is missing, a cell gave an error, or a notebook did not come to its end.
    """
    playwright, executable = load_playwright(), find_chromium()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        folder = Path(home).resolve() / "notebooks"
        copy_notebooks(source, names, folder)
        try:
            with jupyterlab(folder, folder.parent) as address, browser(playwright, executable) as open_page:
                for name in names:
                    picture = SCREENSHOTS / f"{Path(name).stem}.png"
                    picture.unlink(missing_ok=True)
                    page = open_page()
                    try:
                        run_all(page, address, folder / name, minutes)
                    except (CheckError, playwright.Error):
                        with suppress(playwright.Error):  # what went wrong matters more
                            screenshot(page, picture)
                        raise
                    screenshot(page, picture)
                    page.close()
                    progress(f"{name}: passed, screenshot in {picture.relative_to(ROOT)}")
        except playwright.Error as error:
            raise CheckError(f"the browser failed: {one_line(error.message)}") from None


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_on_signals() -> None:
    """A terminal that closes and a polite kill end the check as Ctrl-C does: with server and browser shut down."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            signal.signal(getattr(signal, name), signal.default_int_handler)


def main(arguments: list[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run notebooks in JupyterLab inside a headless Chromium.")
    parser.add_argument("names", nargs="*", default=CHECKED, metavar="NOTEBOOK", help=f"default: {' '.join(CHECKED)}")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS, help="where they are (default: notebooks)")
    parser.add_argument("--minutes", type=float, default=60, help="time that one notebook may take (default: 60)")
    options = parser.parse_args(arguments)
    end_on_signals()
    try:
        check(options.folder, list(options.names), options.minutes)
    except CheckError as error:
        progress(f"browser-check: {error}")
        return 1
    except KeyboardInterrupt:
        progress("browser-check: interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
