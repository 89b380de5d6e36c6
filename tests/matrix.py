"""Run tests/contract under every supported transformers release and print which area holds where.

    python -m tests.matrix                            # all of VERSIONS
    python -m tests.matrix --ends                     # the oldest and the newest only
    python -m tests.matrix --versions 5.0.0,5.24.0
    python -m tests.matrix --build-only               # make the environments, run nothing

Each release gets a virtual environment under .venvs/, built once; everything but transformers and what it asks for
is pinned by requirements.lock. The last line printed is the same table as JSON. The exit code is 1 when a cell has
a failure or ran no test.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

VERSIONS = ("4.57.6", "5.0.0", "5.3.0", "5.8.0", "5.12.0", "5.17.0", "5.20.0", "5.24.0")
AREAS = ("load", "forward", "cache", "generate", "save", "train")
PINNED = ("torch", "numpy", "safetensors", "accelerate", "pytest", "pytest-xdist", "hypothesis")

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Counter]


def locked(names: tuple[str, ...]) -> list[str]:
    """The lines of requirements.lock that pin the given packages."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0]: line for line in lines}
    return [pins[name] for name in names]


def environment(version: str) -> Path:
    """The Python of the environment for one release, built when it is missing or its requirements have changed."""
    folder = ROOT / ".venvs" / version
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    requirements = [f"transformers=={version}", *locked(PINNED)]
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"building {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run(install + requirements, check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def tally(report: Path) -> Row:
    """Count the outcomes of each area in a JUnit report."""
    row: Row = {area: Counter() for area in AREAS}
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that cannot be imported is reported with an empty class name and the module as its name.
        module = case.get("classname") or case.get("name") or ""
        area = module.removeprefix("tests.contract.test_").split(".")[0]
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        row.setdefault(area, Counter())[outcome] += 1
    return row


def run(version: str) -> Row:
    """Run the contract tests under one release; show all of pytest's output only if something is wrong."""
    pytest = [environment(version), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        done = subprocess.run(
            [*pytest, f"--junitxml={report}", "tests/contract"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        row = tally(report) if report.exists() else {area: Counter() for area in AREAS}
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode:
        print(*lines, done.stderr, sep="\n")
    print(f"transformers {version}: {lines[-1].strip('= ')}", flush=True)
    return row


def holds(cell: Counter) -> bool:
    return cell["passed"] > 0 and cell["failed"] == 0


def markdown(table: dict[str, Row]) -> str:
    """The table of passed / failed counts, one line a release."""
    areas = list(dict.fromkeys(area for row in table.values() for area in row))
    lines = [["transformers", *areas], ["---"] * (len(areas) + 1)]
    for version, row in table.items():
        cells = (row.get(area, Counter()) for area in areas)
        lines.append([version, *(f"{cell['passed']} / {cell['failed']}" for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chosen_versions(arguments: list[str] | None) -> tuple[tuple[str, ...], bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--versions", type=lambda text: tuple(text.split(",")), default=VERSIONS)
    which.add_argument("--ends", dest="versions", action="store_const", const=(VERSIONS[0], VERSIONS[-1]))
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args(arguments)
    return options.versions, options.build_only


def main(arguments: list[str] | None = None) -> int:
    versions, build_only = chosen_versions(arguments)
    if build_only:
        for version in versions:
            environment(version)
        return 0
    table = {version: run(version) for version in versions}
    print("\nPassed / failed tests of each area:\n")
    print(markdown(table))
    print(json.dumps(table))
    return 0 if all(holds(cell) for row in table.values() for cell in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
