"""Run notebooks in JupyterLab inside a real browser, as a reader would: ``make browser-check``.

A server on a free loopback port serves a copy of the notebooks without their outputs, a headless Chromium opens each,
picks Run All Cells in the menu and saves, and the saved file tells how far the kernel is. The first error output ends
the check with exit status 1; a screenshot of every notebook stays in ``runs/browser-check/``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat

from dblast.reproduction.paths import NOTEBOOKS, ROOT, RUNS

CHECKED = ("00_quickstart.ipynb", "01_mismatch_diagnosis.ipynb")
BROWSERS = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
#: Every cell stays in the page, so that the screenshot has all; no question about news.
LAB_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
#: What would otherwise come from, or end up in, the user's own set-up.
OWN_FOLDERS = (
    *("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"),
    *("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"),
)
#: Seconds for server, page and kernel to start, and for a kernel to stay idle with cells left (it died).
START, STALLED = 120.0, 30.0
CIRCLE, SCROLLED = (f".jp-NotebookPanel .jp-{name}" for name in ("Notebook-ExecutionIndicator", "WindowedPanel-outer"))


def progress_of(path: Path) -> tuple[int, int, str | None]:
    """Code cells of a saved notebook that are finished, all that get a count (empty ones never do), the first error."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code" and cell.source.strip()]
    errors = [
        f"code cell {number}: {output.ename}: {output.evalue.strip().splitlines()[:1]}"
        for number, cell in enumerate(cells, start=1) for output in cell.outputs if output.output_type == "error"
    ]  # fmt: skip
    return sum(cell.execution_count is not None for cell in cells), len(cells), next(iter(errors), None)


def copy_without_outputs(source: Path, target: Path) -> None:
    """No committed output can pass for one of this run."""
    notebook = nbformat.read(source, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, target)


@contextmanager
def jupyterlab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on ``folder``, its own files in ``home``; gives the address of a notebook, ``{}`` for its name."""
    for name, settings in LAB_SETTINGS.items():
        path = home / "JUPYTERLAB_SETTINGS_DIR/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    # The token stands in the environment, as command lines can be read by other users.
    environment = (
        os.environ | {name: str(home / name) for name in OWN_FOLDERS} | {"JUPYTER_TOKEN": secrets.token_hex(16)}
    )
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}", "--allow-root"]
    with open(home / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=log, stderr=log
        )
    try:
        # The server looks for a free port itself and writes down the one it got.
        record, patience = home / f"JUPYTER_RUNTIME_DIR/jpserver-{server.pid}.json", time.monotonic() + START
        while not (record.is_file() and record.stat().st_size):
            if server.poll() is not None or time.monotonic() > patience:
                sys.exit(f"JupyterLab did not start:\n{(home / 'server.log').read_text()[-1000:]}")
            time.sleep(0.2)
        started = json.loads(record.read_text())
        yield f"{started['url']}doc/tree/{{}}?token={started['token']}"
    finally:
        server.terminate()
        server.wait(timeout=20)


def run_all(page, address: str, path: Path, minutes: float) -> str | None:
    """Open a notebook, run all its cells and wait until each has its count; what went wrong, if anything."""
    page.set_default_timeout(1000 * START)
    page.goto(address.format(path.name))
    # Cells run before the kernel is there are lost. The status bar tells when it is; the circle says idle even before.
    page.get_by_text(re.compile(r"\| Idle$")).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator("[data-command='runmenu:run-all']").click()
    seen, began = 0, time.monotonic()
    moved = began
    while time.monotonic() - began < 60 * minutes:
        page.wait_for_timeout(2000)
        page.keyboard.press("ControlOrMeta+s")
        try:
            finished, total, error = progress_of(path)
        except nbformat.reader.NotJSONError:
            continue  # it is being saved
        if error or finished == total:
            return error
        if finished != seen or page.locator(CIRCLE).get_attribute("data-status") != "idle":
            seen, moved = finished, time.monotonic()
        if time.monotonic() - moved > STALLED:
            return f"the kernel stopped after {finished} of {total} cells; it may have died"
    return f"not done after {minutes:g} minutes (see --minutes)"


def main() -> None:
    """Run the check; the exit status is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description="Run notebooks in JupyterLab inside a headless Chromium.")
    parser.add_argument("names", nargs="*", default=CHECKED, metavar="NOTEBOOK", help=f"default: {' '.join(CHECKED)}")
    parser.add_argument("--minutes", type=float, default=60, help="time that one notebook may take (default: 60)")
    options = parser.parse_args()
    if not (chromium := next(filter(None, map(shutil.which, filter(None, BROWSERS))), None)):
        sys.exit("Chromium not found: apt-get install chromium, or set CHROMIUM=/path/to/it")
    from playwright.sync_api import sync_playwright

    pictures = RUNS / "browser-check"
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        folder = Path(home).resolve() / "notebooks"
        folder.mkdir()
        for name in options.names:
            copy_without_outputs(NOTEBOOKS / name, folder / name)
        with jupyterlab(folder, folder.parent) as address, sync_playwright() as driver:
            # Chromium refuses to start as root with its sandbox.
            browser = driver.chromium.launch(executable_path=chromium, chromium_sandbox=os.geteuid() != 0)
            for name in options.names:
                page = browser.new_page(viewport={"width": 1300, "height": 1000})
                problem = run_all(page, address, folder / name, options.minutes)
                # The notebook scrolls inside the page, so the page is made as tall as it is.
                hidden = page.locator(SCROLLED).evaluate("e => e.scrollHeight - e.clientHeight")
                page.set_viewport_size({"width": 1300, "height": min(1000 + hidden, 16_000)})
                page.wait_for_timeout(1000)
                page.screenshot(path=pictures / f"{Path(name).stem}.png")
                if problem:
                    sys.exit(f"{name}: {problem}")
                print(f"{name}: passed, screenshot in {pictures}", flush=True)
                page.close()
            browser.close()


if __name__ == "__main__":
    main()
