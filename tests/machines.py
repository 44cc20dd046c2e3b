"""Other machines, made on this one: the tests with other kernels, numbers of threads, hash seeds and orders of tests.

Run from the repository's root: ``python -m tests.machines [TESTS ...]``, or ``make test-machines``.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.run_all import ROOT, machine

#: Environments that make PyTorch and its libraries round as on other processors.
CONDITIONS = {
    "as it is": {},
    "PyTorch without vector instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "PyTorch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with SSE 4.1": {"DNNL_MAX_CPU_ISA": "SSE41"},
    "oneDNN with AVX2": {"DNNL_MAX_CPU_ISA": "AVX2"},
    "MKL for any processor": {"MKL_CBWR": "COMPATIBLE"},
    "two threads": {"DBLAST_TEST_THREADS": "2"},
    "all of the oldest, two threads": {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "DBLAST_TEST_THREADS": "2",
    },
}

#: Tests that compute much and take little time: about a minute together on one core.
CHEAP = (
    "block_cover", "branch_health", "checkpoints", "chunked", "continuations", "diagnosis", "drafter", "initialise",
    "losses", "objectives", "rejections", "replay", "sampling", "targets", "trajectories", "verifier",
)  # fmt: skip


def cheap_tests() -> list[str]:
    """Files of the cheap tests, wherever under ``tests`` they are."""
    return sorted(str(path) for name in CHEAP for path in (ROOT / "tests").rglob(f"test_{name}.py"))


def run_tests(tests: list[str], condition: dict[str, str], seed: int) -> dict:
    """Run pytest in a process of its own under a condition.

    Returns:
        How many tests there were, the names of those that failed, pytest's exit status and the seconds it took.
    """
    # Seeds of Python's hashes and of the order of tests; the condition may set the number of threads.
    seeds = {"PYTHONHASHSEED": str(seed), "DBLAST_TEST_ORDER_SEED": str(seed)}
    threads = {"OMP_NUM_THREADS": condition.get("DBLAST_TEST_THREADS", "1"), "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--tb=short", f"--junitxml={report}", *tests]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | threads | seeds | condition).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "status": status,
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or names (default: tests that compute much in little time)")
    parser.add_argument("--seed", type=int, help="of hashes and of the order of tests (default: a new one)")
    parser.add_argument("--only", help="conditions whose name contains this")
    arguments = parser.parse_args()
    # Python takes hash seeds up to 2^32 - 1.
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    chosen = {name: condition for name, condition in CONDITIONS.items() if (arguments.only or "") in name}
    if not chosen:
        parser.error(f"no condition contains {arguments.only!r}; there are {', '.join(CONDITIONS)}")
    results = {}
    for name, condition in chosen.items():
        settings = " ".join(f"{key}={value}" for key, value in condition.items())
        print(f"\n== {name} {settings}", flush=True)
        results[name] = run_tests(arguments.tests or cheap_tests(), condition, seed)
    print(f"\n{machine()}\nseed of hashes and order: {seed}\n")
    width = max(map(len, results))
    for name, result in results.items():
        good = result["tests"] - len(result["failed"])
        print(f"{name:{width}}  {good:5} of {result['tests']:5} tests good  {result['seconds']:5.0f} s")
        for test in result["failed"]:
            print(f"    {test}")
    return int(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
