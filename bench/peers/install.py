"""Install engines, each into an environment of its own: python bench/peers/install.py [engine ...]

An engine that cannot be installed is named with the reason, which the comparison repeats; the others go on. An environment
whose requirements have not changed is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys

from engines import ENGINES, UNAVAILABLE, EngineKind

STAMP = "requirements.sha256"


def install(kind: EngineKind) -> str:
    """Make an engine's environment; returns what became of it."""
    folder = kind.environment
    digest = hashlib.sha256(kind.requirements.read_bytes()).hexdigest()
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return "installed already"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [
        str(kind.python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--no-deps",
    ]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, "--requirement", str(kind.requirements)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR")]
            reason = f"could not be installed: {' '.join(said) or f'{command[-3:]} ended with status {done.returncode}'}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / UNAVAILABLE).write_text(reason + "\n", encoding="utf-8")
            return reason
    stamp.write_text(digest, encoding="utf-8")
    return "installed"


def main() -> None:
    known = [kind.name for kind in ENGINES.values() if kind.own_environment]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="engine", help=f"out of {', '.join(known)}; all, if none is given")
    chosen = parser.parse_args().engines or known
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"there is no engine {unknown[0]!r} to install; known: {', '.join(known)}")
    for name in chosen:
        print(f"{name}: installing into {ENGINES[name].environment} ...", flush=True)
        print(f"{name}: {install(ENGINES[name])}", flush=True)


if __name__ == "__main__":
    main()
