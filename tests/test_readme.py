"""The README's Python runs as it stands, and the package exports what it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.model
@pytest.mark.slow
def test_python_in_the_readme_runs() -> None:
    """A new user who pastes the example gets an answer, and its assertion holds."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3


def test_everything_exported_exists() -> None:
    """Names in __all__ can be imported and are shown by dir() and help(), others are refused as of any module."""
    for name in specdec.__all__:
        assert getattr(specdec, name).__name__ == name
    code = "import sys, specdec; print(*dir(specdec)); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert set(specdec.__all__) <= set(shown)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        specdec.LLMM  # noqa: B018
